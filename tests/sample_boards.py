"""Boards with submissions that have been played, written into a real database by the store's own transactions."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from sample_episodes import BOARD, LAKE, PUSHED

from turngym_client import Limits
from turngym_leaderboard.boards import BoardDefinition
from turngym_leaderboard.protocol import Instance, Selection
from turngym_leaderboard.record import EpisodeRecord, Trajectory, TurnRecord
from turngym_leaderboard.store import Store, boards, owners, submissions, work
from turngym_leaderboard.store.values import Board, Deal, Environment, Kind, Owner, State, Submission, Visibility
from turngym_leaderboard.summary import reference, summarise

SECRET = 2**255 + 12345
INSTANCES = 24
SHOWCASE = 3


def definition(name="grids", *, environments=("sokoban",), attempts=1, **others) -> BoardDefinition:
    told = [
        {"id": each, "instances": INSTANCES, "attempts": attempts, "showcase": SHOWCASE, "limits": {"max_turns": 5}}
        for each in environments
    ]
    return BoardDefinition.model_validate(
        {"name": name, "title": f"Board of {name}", "season": "2026", "environments": told, **others}
    )


def new_board(store: Store, asked: BoardDefinition) -> Board:
    """A board whose instances all have floor 0.2 and ceiling 0.9."""
    deals = [
        Deal(
            scored=Selection(
                instances=tuple(map(instance, range(INSTANCES))),
                draws=INSTANCES + SHOWCASE,
                version="1.0",
                split_epoch=1,
                options_json='{"symbols":"ragen"}',
                limits=Limits(max_turns=5, max_actions=10, max_actions_per_turn=5),
            ),
            showcase=tuple(map(instance, range(INSTANCES, INSTANCES + SHOWCASE))),
        )
        for _ in asked.environments
    ]
    return boards.create(store, asked, SECRET, deals)


def instance(draw: int) -> Instance:
    return Instance(draw, 10**19 + draw, f"i{draw}", f"w{draw}", 0.2, 0.9)


def submit(
    store: Store,
    board: Board,
    owner: Owner,
    name: str,
    *,
    visibility: Visibility = Visibility.PUBLIC,
    description: Mapping[str, str] | None = None,
) -> Submission:
    """A submission that waits in the queue."""
    made = submissions.create(
        store,
        board,
        owner,
        name=name,
        kind=Kind.CHECKPOINT,
        visibility=visibility,
        description=description or {"policy": "tiny"},
    )
    submissions.set_state(store, made.public_id, State.VALIDATED)
    return submissions.set_state(store, made.public_id, State.QUEUED)


def play(
    store: Store,
    board: Board,
    solved: Mapping[str, Sequence[int]],
    *,
    until: int = INSTANCES,
    text: str = "push right",
    unresolved: Sequence[int] = (),
    tokens: int | None = 40,
    attempts: int | None = None,
) -> Submission:
    """Plays whatever is next in the queue, as a worker does.

    Args:
        solved: draws that it solves, by environment; unresolved: those of which nothing is known.
        until: scored instances that are played; fewer leave it running.
        attempts: of each instance; None: the board's.
    """
    now = datetime.now(UTC)
    lease = work.claim(store, "tests", list(Kind), now=now, until=now + timedelta(hours=1))
    assert lease is not None
    results: list[work.NewResult] = []
    for environment in board.environments:
        deal = boards.deal(store, environment.id)
        wins = solved.get(environment.label, ())
        scored = [
            episode(environment, each, attempt, each.draw in wins, text, tokens, each.draw in unresolved)
            for each in deal.scored.instances[:until]
            for attempt in range(attempts or environment.definition.attempts)
        ]
        shown = [episode(environment, each, 0, each.draw in wins, text, tokens, False) for each in deal.showcase]
        work.commit(store, lease, environment, scored, showcase=False, sealed=True, now=now)
        work.commit(store, lease, environment, shown, showcase=True, sealed=False, now=now)
        exact = [reference(deal.scored.instances, which, []) for which in ("floor", "ceiling")]
        records = [record for record, _ in scored]
        results.append(work.NewResult(environment.id, summarise(records, *exact, samples=True)))
    if until == INSTANCES:
        state = State.INCOMPLETE if unresolved else State.SCORED
        reason = "some episodes could not be played" if unresolved else ""
        work.finish(store, lease, state, results=results, reason=reason, now=datetime.now(UTC))
    return submissions.find(store, lease.submission.public_id)


def episode(
    environment: Environment,
    played: Instance,
    attempt: int,
    success: bool,
    text: str,
    tokens: int | None,
    unresolved: bool,
) -> tuple[EpisodeRecord, Trajectory]:
    turns = tuple(
        TurnRecord(
            observation=LAKE if environment.definition.id == "frozen_lake" else BOARD,
            text=text,
            reasoning=text,
            actions=("Right",),
            actions_executed=1,
            reward=reward,
            action_valid=True,
            valid_format=success,
            cut_off=False,
            tokens=tokens,
            failure="" if success else "no answer: it wrote none",
        )
        for reward in (-0.1, 10.9 if success else -0.1)
    )
    record = EpisodeRecord(
        draw=played.draw,
        attempt=attempt,
        level_seed=played.level_seed,
        noise_seed=7,
        agent_seed=8,
        instance_id=played.instance_id,
        world_id=played.world_id,
        outcome="unresolved" if unresolved else "played",
        success=None if unresolved else success,
        truncated=not success,
        end_reason="terminated" if success else "max_turns",
        actions=(("Right",), ("Right",)),
        rewards=tuple(turn.reward for turn in turns),
        invalid_turns=0,
        unparsed_turns=0 if success else 2,
        cut_off_turns=0,
        tokens=None if tokens is None else 2 * tokens,
        failures={} if success else {"no answer": 2},
        digest="ab" * 32,
    )
    return record, Trajectory(
        agent="whoever", draw=played.draw, attempt=attempt, turns=turns, last_observation=PUSHED if success else BOARD
    )


def owner(store: Store, name: str) -> Owner:
    return owners.create(store, name)
