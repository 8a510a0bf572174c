"""Small boards for tests: their definition, instances that no server dealt, and episodes that nobody played."""

from turngym_client import Limits
from turngym_leaderboard import seeds
from turngym_leaderboard.agents.confined_checkpoint import Bounds
from turngym_leaderboard.boards import BoardDefinition
from turngym_leaderboard.dealing import deal_board
from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.protocol import Instance, Selection
from turngym_leaderboard.record import EpisodeRecord, Trajectory, TurnRecord
from turngym_leaderboard.slot import Slot, SlotConfig
from turngym_leaderboard.store import boards, episodes, submissions
from turngym_leaderboard.store.values import Deal, Kind, State

SECRET = 2**255 + 12_345


def definition(**fields):
    """Two instances with two attempts and one in the showcase, of frozen_lake; 5 episodes."""
    told = {
        "name": "lakes",
        "title": "Lakes",
        "season": "one",
        "sealed": False,
        "submissions_per_owner": 2,
        "environments": [{"id": "frozen_lake", "instances": 2, "attempts": 2, "showcase": 1}],
    }
    return BoardDefinition.model_validate(told | fields)


def deal(instances=2, showcase=1):
    secret = str(SECRET).encode()
    dealt = [
        Instance(
            draw=2 * k,
            level_seed=seeds.level_seed(secret, "frozen_lake", 2 * k),
            instance_id=f"instance {k}",
            world_id=f"world {k}",
            floor=0.1,
            ceiling=0.5,
        )
        for k in range(instances + showcase)
    ]
    scored = Selection(
        instances=tuple(dealt[:instances]),
        draws=2 * (instances + showcase),
        version="1.0",
        split_epoch=1,
        options_json='{"size":4}',
        limits=Limits(max_turns=5, max_actions=10, max_actions_per_turn=5),
    )
    return Deal(scored, tuple(dealt[instances:]))


def episode(
    instance, attempt=0, *, outcome="played", success=True, action="Up", digest="d0", text="<answer>Up</answer>"
):
    """A played episode of one turn, as a runner would tell it."""
    turn = TurnRecord(
        observation="a lake",
        text=text,
        reasoning="",
        actions=(action,),
        actions_executed=1,
        reward=float(bool(success)),
        action_valid=True,
        valid_format=True,
        cut_off=False,
        tokens=7,
    )
    record = EpisodeRecord(
        draw=instance.draw,
        attempt=attempt,
        level_seed=instance.level_seed,
        noise_seed=1,
        agent_seed=2,
        instance_id=instance.instance_id,
        world_id=instance.world_id,
        outcome=outcome,
        fault="",
        success=None if outcome == "unresolved" else success,
        truncated=False,
        end_reason="environment",
        actions=((action,),),
        rewards=(turn.reward,),
        invalid_turns=0,
        unparsed_turns=0,
        cut_off_turns=0,
        tokens=7,
        digest=digest,
    )
    trajectory = Trajectory(
        agent="tiny", draw=instance.draw, attempt=attempt, turns=(turn,), last_observation="the other side"
    )
    return record, trajectory


def dealt_board(store, client, name="lakes", **fields):
    """A board that is dealt from a server; every board of these fields has the same seeds."""
    made = definition(name=name, **fields)
    # So few levels at once that few are looked at in vain.
    return boards.create(store, made, SECRET, deal_board(client, made, SECRET, sessions=8))


def submitted(store, board, owner, name="tiny", kind=Kind.CHECKPOINT):
    """A submission that waits for a worker; its files are still to be put where the worker looks for them."""
    submission = submissions.create(store, board, owner, name=name, kind=kind)
    submissions.set_state(store, submission.public_id, State.VALIDATED)
    return submissions.set_state(store, submission.public_id, State.QUEUED)


def new_slot(store, client, **fields):
    """A worker's slot, in this process."""
    settings = {
        "device": "cpu",
        "threads": 1,
        "bounds": Bounds(memory=4 << 30, seconds_per_token=5.0),
        "intake": IntakeLimits(),
        "lease_seconds": 60.0,
        "until_idle": True,
        "seal_key": None,
    }
    return Slot(SlotConfig(**(settings | fields)), store, client)


def play_out(store, client, **fields):
    """Plays all that waits, in this process."""
    slot = new_slot(store, client, **fields)
    slot.run()
    return slot


def everything(store, board):
    """Of each submission by name: all its episodes as records and trajectories, and its numbers."""
    told = {}
    numbers = episodes.results(store, board)
    for submission in submissions.of_board(store, board):
        lines, total = episodes.listing(store, submission, limit=100_000)
        assert total == len(lines)
        whole = [episodes.read(store, submission, line.id) for line in lines]
        told[submission.name] = (
            submission.state,
            [(each.line.environment, each.line.showcase, each.record, each.trajectory) for each in whole],
            [(result.environment, result.statistics, result.unavailable) for result in numbers.get(submission.id, [])],
        )
    return told
