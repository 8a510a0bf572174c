"""Records that were forged: each forgery is found, and named by episode and turn where it lies in one.

The careful forger is met too: one who replaces an episode by another that was really played, and makes digests,
rewards, statistics, comparisons and trajectories agree with it.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from turngym_client import Split, connect
from turngym_leaderboard import record as records
from turngym_leaderboard import summary
from turngym_leaderboard.agents import Reply, Seat, View
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.evaluation import Evaluation, evaluate
from turngym_leaderboard.protocol import Decoding, Protocol, select_instances
from turngym_leaderboard.record import EnvironmentRecord, EpisodeRecord, Record, RecordError, RowRecord, Trajectory
from turngym_leaderboard.replay import drawn
from turngym_leaderboard.runner import play
from turngym_leaderboard.verify import (
    Sample,
    checked,
    episodes_to_play,
    unchecked,
    verify,
    verify_trajectories,
)

SMALL = Protocol(instances=8)
LAKE = Protocol(environment="frozen_lake", instances=4, attempts=2)


class Wanderer:
    """A policy of a kind: what it chooses is a function of its seat's seed, its turn and its weights."""

    samples = True
    wants_legal_actions = False
    wants_advice = False
    description: ClassVar[dict[str, str]] = {
        "kind": "checkpoint",
        "folder": "somewhere",
        "sha256": "ab" * 32,
        "context": "the last turn",
        "instructions": "none",
        "max_response_tokens": "4",
    }

    def __init__(self, name: str = "wanderer", weights: int = 7) -> None:
        self.name = name
        self.weights = weights

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        self.seats = seats

    def act(self, views: Sequence[View]) -> list[Reply]:
        return [self.reply(self.seats[view.seat].seed, view.turn) for view in views]

    def reply(self, seed: int, turn: int) -> Reply:
        ways = ("Up", "Down", "Left", "Right")
        actions = tuple(ways[(seed // self.weights**k + turn) % 4] for k in range(3))
        return Reply(text=f"<answer>{'||'.join(actions)}</answer>", reasoning="", actions=actions, tokens=4)


class NeighbourlyWanderer(Wanderer):
    """Its arithmetic depends on how many it plays with."""

    def reply(self, seed: int, turn: int) -> Reply:
        reply = super().reply(seed, turn)
        return dataclasses.replace(reply, actions=reply.actions[: 1 + len(self.seats) % 3])


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


@pytest.fixture(scope="module")
def evaluation(client):
    return evaluate(client, SMALL, [Wanderer()], sessions=5)


@pytest.fixture(scope="module")
def lake(client):
    return evaluate(client, LAKE, [Wanderer()])


def with_row(record: Record, index: int, episodes: Sequence[EpisodeRecord]) -> Record:
    rows = list(record.rows)
    rows[index] = rows[index].model_copy(update={"episodes": tuple(episodes)})
    return record.model_copy(update={"rows": tuple(rows)})


def with_episode(record: Record, index: int, place: int, **changes: object) -> Record:
    episodes = list(record.rows[index].episodes)
    episodes[place] = episodes[place].model_copy(update=changes)
    return with_row(record, index, episodes)


def with_environment(record: Record, **changes: object) -> Record:
    return record.model_copy(update={"environment": record.environment.model_copy(update=changes)})


def consistent(record: Record) -> Record:
    """With the statistics and comparisons of its episodes."""
    instances = record.environment.selection().instances
    floor = summary.reference(instances, "floor", record.rows[0].episodes)
    ceiling = summary.reference(instances, "ceiling", record.rows[-1].episodes)

    def told(row: RowRecord) -> RowRecord:
        samples = bool(row.decoding) and row.decoding != "greedy"
        statistics = summary.summarise(row.episodes, floor, ceiling, samples=samples) if row.episodes else None
        return row.model_copy(update={"statistics": statistics})

    rows = tuple(map(told, record.rows))
    comparisons = summary.compare_agents(rows, greedy=record.protocol.greedy)
    return record.model_copy(update={"rows": rows, "comparisons": comparisons})


def transplanted(evaluation: Evaluation, index: int, donor: int, place: int) -> tuple[Record, list[Trajectory]]:
    """One row's episode as another row's agent played it, and everything in agreement with it."""
    rows = evaluation.record.rows
    record = consistent(with_episode(evaluation.record, index, place, **dict(rows[donor].episodes[place])))
    of = {(each.agent, each.draw, each.attempt): each for each in evaluation.trajectories}
    episode = rows[index].episodes[place]
    given = of[rows[donor].agent, episode.draw, episode.attempt].model_copy(update={"agent": rows[index].agent})
    of[rows[index].agent, episode.draw, episode.attempt] = given
    return record, list(of.values())


def at(record: Record, index: int, place: int) -> str:
    episode = record.rows[index].episodes[place]
    return f"{record.rows[index].agent}, draw {episode.draw}, attempt {episode.attempt}"


def test_a_true_record_stands(client, evaluation, lake):
    counted: list[int] = []
    sample = Sample(3, 1)
    for each in (evaluation, lake):
        faults = verify(
            client,
            each.record,
            trajectories=each.trajectories,
            policies=[Wanderer()],
            sample=sample,
            on_episodes=counted.append,
        )
        assert faults == []
    assert sum(counted) == sum(episodes_to_play(each.record, [Wanderer()], sample) for each in (evaluation, lake)) == 54


def other_seed(record: Record, which: str) -> Record:
    return with_episode(record, 1, 1, **{which: 5})


def other_reward(record: Record) -> Record:
    rewards = record.rows[1].episodes[1].rewards
    return with_episode(record, 1, 1, rewards=(rewards[0], rewards[1] + 1, *rewards[2:]))


def other_action(record: Record) -> Record:
    first, second, *others = record.rows[1].episodes[1].actions
    way = "Left" if second[0] != "Left" else "Right"
    return with_episode(record, 1, 1, actions=(first, (way, *second[1:]), *others))


def fewer_turns(record: Record) -> Record:
    episode = record.rows[1].episodes[1]
    return with_episode(record, 1, 1, actions=episode.actions[:1], rewards=episode.rewards[:1])


def more_turns(record: Record) -> Record:
    return with_episode(record, 1, 1, actions=(*record.rows[1].episodes[1].actions, ("Up",)))


def turns_in_another_order(record: Record) -> Record:
    first, second, *others = record.rows[1].episodes[1].actions
    assert first != second
    return with_episode(record, 1, 1, actions=(second, first, *others))


def two_swapped(record: Record) -> Record:
    one, other, *rest = record.rows[1].episodes
    return with_row(record, 1, [other, one, *rest])


def one_missing(record: Record) -> Record:
    return with_row(record, 1, record.rows[1].episodes[1:])


def one_twice(record: Record) -> Record:
    return with_row(record, 1, [record.rows[1].episodes[0], *record.rows[1].episodes])


@pytest.mark.parametrize(
    ("forge", "told"),
    [
        (lambda record: with_episode(record, 1, 1, digest="00" * 32), r"{at}: digest: the record says '0000"),
        (other_reward, r"{at}, turn 1: reward: the record says \S+, found was -?0\.3"),
        (other_action, r"{at}(: digest: the record says '.*, found was '|, turn 2: actions: )"),
        (turns_in_another_order, r"{at}: digest: the record says '.*, found was '"),
        (fewer_turns, r"{at}, turn 1: the record has no such turn, but the episode goes on"),
        (more_turns, r"{at}, turn \d: actions: the record says \('Up',\), the episode has no such turn"),
        (
            lambda record: other_seed(record, "level_seed"),
            r"{at}: level_seed: the record says 5, from the proto.* \d+$",
        ),
        (
            lambda record: other_seed(record, "noise_seed"),
            r"{at}: noise_seed: the record says 5, from the proto.* \d+$",
        ),
        (
            lambda record: other_seed(record, "agent_seed"),
            r"{at}: agent_seed: the record says 5, from the proto.* \d+$",
        ),
        (
            lambda record: with_episode(record, 1, 1, world_id="00"),
            r"{at}: world_id: the record says '00', found was '",
        ),
        (
            lambda record: with_episode(record, 1, 1, instance_id="00"),
            r"{at}: its instance 00 is not one of the record",
        ),
        (
            lambda record: with_episode(record, 1, 1, success=True),
            r"{at}: success: the record says True, found was Fal",
        ),
        (lambda record: with_episode(record, 1, 1, invalid_turns=3), r"{at}: invalid_turns: the record says 3, found"),
        (
            lambda record: with_episode(record, 1, 1, end_reason="x"),
            r"{at}: end_reason: the record says 'x', found was",
        ),
        (
            lambda record: with_episode(record, 1, 1, outcome="agent_fault"),
            r"{at}: outcome: the record says 'agent_fault', found was 'played'",
        ),
        (
            two_swapped,
            r"wanderer, draw 1, attempt 0: it is episode 0 of the record, where draw 0, attempt 0 is due",
        ),
        (one_missing, r"wanderer, draw 0, attempt 0: the record lacks this episode"),
        (one_twice, r"wanderer, draw 0, attempt 0: the record has this episode 1 times too often"),
    ],
)
def test_each_change_of_an_episode_is_named(client, evaluation, forge, told):
    assert not evaluation.record.rows[1].episodes[1].success
    pattern = told.replace("{at}", at(evaluation.record, 1, 1))
    for forged in (forge(evaluation.record), consistent(forge(evaluation.record))):
        faults = verify(client, forged)
        assert any(re.match(pattern, fault) for fault in faults), faults


@pytest.mark.parametrize(("index", "donor", "who"), [(0, 2, "random"), (2, 0, "oracle"), (0, 1, "random")])
def test_a_scripted_agent_that_did_not_choose_its_episode_is_found(client, evaluation, index, donor, who):
    place = next(
        k
        for k, (one, other) in enumerate(
            zip(evaluation.record.rows[index].episodes, evaluation.record.rows[donor].episodes, strict=True)
        )
        if one.actions != other.actions
    )
    record, trajectories = transplanted(evaluation, index, donor, place)
    [fault] = verify(client, record, trajectories=trajectories)
    said = record.rows[index].episodes[place].actions[0]
    chosen = evaluation.record.rows[index].episodes[place].actions[0]
    assert fault == f"{at(record, index, place)}, turn 0: actions: the record says {said}, {who} chooses {chosen}"


def test_a_scripted_agent_played_on_under_another_seed_is_found(client, lake):
    """The luckier of two attempts, told twice: noise and actions are those of an episode that was really played."""
    first, second = lake.record.rows[0].episodes[:2]
    assert first.actions != second.actions
    told = {name: getattr(second, name) for name in EpisodeRecord.model_fields if name not in ("attempt", "noise_seed")}
    record = consistent(with_episode(lake.record, 0, 0, **told | {"agent_seed": first.agent_seed}))
    faults = verify(client, record)
    assert any(fault.startswith(f"{at(record, 0, 0)}, turn ") and "random chooses" in fault for fault in faults), faults


def test_a_scripted_row_that_was_left_out_is_found(client, evaluation):
    rows = list(evaluation.record.rows)
    rows[0] = rows[0].model_copy(update={"episodes": (), "statistics": None, "unavailable": "no random player"})
    record = consistent(evaluation.record.model_copy(update={"rows": tuple(rows)}))
    assert verify(client, record) == ["random: the record says that it could not play (no random player), but it can"]
    rows = list(evaluation.record.rows)
    rows[1] = rows[1].model_copy(update={"episodes": (), "statistics": None, "unavailable": "ill"})
    record = consistent(evaluation.record.model_copy(update={"rows": tuple(rows)}))
    assert any(
        fault.startswith("wanderer: the record says that it could not play (ill)") for fault in verify(client, record)
    )


def of_instance(place: int, **changes: object) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        instances = list(record.environment.instances)
        instances[place] = instances[place].model_copy(update=changes)
        return with_environment(record, instances=tuple(instances))

    return change


@pytest.mark.parametrize(
    ("forge", "told"),
    [
        (of_instance(3, floor=0.0), r"instance of draw \d+: floor: the record says 0.0, the server's is 0.\d+$"),
        (of_instance(3, ceiling=0.0), r"instance of draw \d+: ceiling: the record says 0.0, the server's is 1.0$"),
        (of_instance(3, floor=None), r"instance of draw \d+: floor: the record says None, the server's is 0.\d+$"),
        (of_instance(3, world_id="00"), r"instance of draw \d+: world_id: the record says '00', found was '\w+'$"),
        (of_instance(3, level_seed=5), r"instance of draw \d+: level_seed: the record says 5, found was \d+$"),
        (
            lambda record: with_environment(record, draws=1),
            r"environment: draws: the record says 1, the server's is \d+",
        ),
        (
            lambda record: with_environment(record, split_epoch=9),
            r"environment: split_epoch: the record says 9, the serv",
        ),
        (
            lambda record: with_environment(
                record, limits=record.environment.limits.model_copy(update={"max_turns": 9})
            ),
            r"environment: limits: the record says .*max_turns=9",
        ),
    ],
)
def test_each_change_of_a_level_is_named(client, evaluation, forge, told):
    faults = verify(client, consistent(forge(evaluation.record)))
    assert any(re.match(told, fault) for fault in faults), faults


def played_on(client, evaluation: Evaluation, environment: EnvironmentRecord, under: Protocol = SMALL) -> Record:
    """A record whose episodes were really played by the right agents, on levels of the forger's choice."""
    selection = environment.selection()
    record = with_environment(evaluation.record, **dict(environment))
    for index, agent in enumerate((RandomAgent(), Wanderer(), OracleAgent())):
        record = with_row(record, index, [one.record for one in play(client, under, selection, agent)])
    return consistent(record)


def test_levels_of_the_forgers_choice_are_found(client, evaluation):
    more = EnvironmentRecord.of(select_instances(client, dataclasses.replace(SMALL, instances=20)))
    told = evaluation.record.environment
    first, last = told.instances[0].draw, more.instances[-1].draw

    easier = told.model_copy(update={"instances": (*told.instances[1:], more.instances[-1])})
    faults = verify(client, played_on(client, evaluation, easier))
    assert f"instance of draw {first}: the protocol's walk over levels has it, but the record has not" in faults
    assert f"instance of draw {last}: the record has it, but the protocol's walk over levels has not" in faults

    fewer = told.model_copy(update={"instances": told.instances[1:]})
    assert verify(client, played_on(client, evaluation, fewer)) == [
        f"instance of draw {first}: the protocol's walk over levels has it, but the record has not"
    ]

    turned = told.model_copy(update={"instances": tuple(reversed(told.instances))})
    [fault] = verify(client, played_on(client, evaluation, turned))
    assert fault == f"instance 0: the record has draw {told.instances[-1].draw}, the protocol's walk {first}"

    twice = told.model_copy(update={"instances": (told.instances[0], *told.instances[:-1])})
    record = with_environment(evaluation.record, instances=twice.instances)
    assert f"instance of draw {first}: the record has it 2 times" in verify(client, record)


def test_levels_of_another_split_are_found(client, evaluation):
    train = dataclasses.replace(SMALL, split=Split.TRAIN)
    environment = EnvironmentRecord.of(select_instances(client, train))
    record = played_on(client, evaluation, environment, train)
    assert record.protocol.split == "held_out"
    faults = verify(client, record)
    assert any(re.match(r"instance of draw \d+: (world_id|the record has it): ?", fault) for fault in faults), faults
    assert any(re.match(r"wanderer, draw \d+, attempt 0: world_id: ", fault) for fault in faults)


def test_a_policy_that_did_not_choose_its_episode_is_found(client, evaluation):
    place = next(k for k, e in enumerate(evaluation.record.rows[2].episodes) if e.success)
    record, trajectories = transplanted(evaluation, 1, 2, place)
    # The actions earn what the record says; who chose them shows only where the policy chooses again.
    assert verify(client, record, trajectories=trajectories) == []
    said = unchecked(record, [], trajectories=True)
    assert said[0] == (
        "wanderer: who chose its actions, and its texts and tokens; "
        "give the policy's folder with --policy (it was somewhere)"
    )
    sample = Sample(8, 3)
    [fault] = verify(client, record, trajectories=trajectories, policies=[Wanderer()], sample=sample)
    told = record.rows[1].episodes[place].actions[0]
    chosen = evaluation.record.rows[1].episodes[place].actions[0]
    assert fault == (
        f"{at(record, 1, place)}, turn 0: actions: the record says {told}, the policy in somewhere chooses {chosen}"
    )
    assert checked(record, [Wanderer()], sample) == [
        "wanderer: its policy chose again in 8 of 8 episodes, drawn with seed 3"
    ]
    assert not any("who chose" in sentence for sentence in unchecked(record, [Wanderer()], trajectories=True))


def test_a_policy_with_other_weights_chooses_otherwise(client, evaluation):
    faults = verify(client, evaluation.record, policies=[Wanderer(weights=3)], sample=Sample(2, 0))
    assert 1 <= len(faults) <= 2
    assert all(re.match(r"wanderer, draw \d+, attempt 0, turn \d+: actions: the record says ", f) for f in faults)


def test_a_sample_is_drawn_by_its_seed(evaluation):
    row = evaluation.record.rows[1]
    draws = [[e.draw for e in drawn(row, 4, seed)] for seed in (1, 1, 2, 3)]
    assert draws[0] == draws[1]
    assert len({tuple(each) for each in draws}) == 3
    assert all(len(set(each)) == 4 for each in draws)
    assert len(drawn(row, 99, 1)) == 8


def test_a_policy_whose_arithmetic_depends_on_its_neighbours_is_played_among_them(client):
    evaluation = evaluate(client, SMALL, [NeighbourlyWanderer()], sessions=5)
    sample = Sample(1, 0)
    policies = [NeighbourlyWanderer()]
    assert verify(client, evaluation.record, policies=policies, sample=sample) == []


def test_a_policy_that_is_not_the_records_is_refused(client, evaluation):
    other = Wanderer()
    other.description = {**Wanderer.description, "sha256": "cd" * 32}
    with pytest.raises(RecordError, match=r"no row was played with the weights in somewhere .*wanderer: abab"):
        verify(client, evaluation.record, policies=[other])
    other.description = {**Wanderer.description, "context": "all turns", "folder": "elsewhere"}
    assert verify(client, evaluation.record, policies=[other]) == [
        "wanderer: context: the record says 'the last turn', the policy's is 'all turns'"
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"observation": "a wall"}, "observation: trajectories.jsonl says 'a wall', found was "),
        ({"actions_executed": 77}, "actions_executed: trajectories.jsonl says 77, found was "),
        ({"reasoning": "I know"}, "reasoning: trajectories.jsonl says 'I know', found was "),
        ({"text": "I win"}, "text: trajectories.jsonl says 'I win', found was "),
    ],
)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_was_read_and_written_is_compared(client, evaluation, changes, told, index):
    name = evaluation.record.rows[index].agent
    forged = next(t for t in evaluation.trajectories if t.agent == name)
    turns = (forged.turns[0].model_copy(update=changes), *forged.turns[1:])
    others = [t for t in evaluation.trajectories if t is not forged]
    trajectories = [forged.model_copy(update={"turns": turns}), *others]
    faults = verify(client, evaluation.record, trajectories=trajectories, policies=[Wanderer()], sample=Sample(8, 0))
    [fault] = faults
    assert fault.startswith(f"{at(evaluation.record, index, 0)}, turn 0: {told}")


def test_the_last_observation_is_compared(client, evaluation):
    forged = evaluation.trajectories[0].model_copy(update={"last_observation": "solved!"})
    [fault] = verify(client, evaluation.record, trajectories=[forged, *evaluation.trajectories[1:]])
    assert fault.startswith(
        f"{at(evaluation.record, 0, 0)}: last_observation: trajectories.jsonl says 'solved!', found was "
    )


def test_what_cannot_be_checked_is_said(evaluation):
    record = with_episode(evaluation.record, 1, 0, outcome="agent_fault")
    record = with_episode(record, 0, 0, outcome="unresolved", success=None)
    assert unchecked(record, [Wanderer()], trajectories=False) == [
        "random: whether the server failed in 1 episodes, which count as neither",
        "wanderer: whether the agent failed in 1 episodes, which count as failures",
        "trajectories.jsonl: what was read and written in the episodes",
        "when, where and with which code the episodes were played first",
    ]


def row_changed(index: int, **changes: object) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        rows = list(record.rows)
        rows[index] = rows[index].model_copy(update=changes)
        return record.model_copy(update={"rows": tuple(rows)})

    return change


@pytest.fixture(scope="module")
def two(client):
    return evaluate(client, dataclasses.replace(SMALL, instances=3), [Wanderer("one"), Wanderer("two", 3)])


def comparison_changed(record: Record) -> Record:
    [comparison] = record.comparisons
    return record.model_copy(update={"comparisons": (comparison.model_copy(update={"p_value": 1e-9}),)})


def row_removed(record: Record) -> Record:
    return record.model_copy(update={"rows": (record.rows[0], *record.rows[2:])})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (row_changed(0, agent="mine"), "the first row is 'mine', but every record's is 'random'"),
        (row_changed(-1, agent="mine", description={"kind": "other"}), "the last row is 'mine'"),
        (row_changed(0, description={"kind": "other"}), "random: its description says kind 'other'"),
        (row_changed(-1, description={"kind": "other"}), "oracle: its description says kind 'other'"),
        (row_changed(1, description={"kind": "scripted"}), "one: its description says kind 'scripted'"),
        (row_changed(1, agent="two"), "2 rows are called 'two'"),
        (row_changed(1, decoding="T = 7"), "one: decoding 'T = 7'"),
        (row_changed(1, decoding=""), "one: the record does not say how this checkpoint was decoded"),
        (row_changed(1, statistics=None), "one: it has 3 episodes and no statistics"),
        (comparison_changed, "the comparisons are not those"),
        (row_removed, "the comparisons are not those"),
    ],
)
def test_each_change_of_a_row_is_named(client, two, change, found):
    faults = verify(client, change(two.record))
    assert any(fault.startswith(found) for fault in faults), faults


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (row_changed(1, agent="mine"), "mine: trajectories.jsonl holds no episode of an agent of that name"),
        (row_removed, "trajectories.jsonl holds 3 episodes of 'one', but the record has no row of that name"),
        (lambda r: with_episode(r, 1, 0, tokens=1), "one, draw 0, attempt 0: tokens: the record says 1, traj"),
        (lambda r: with_episode(r, 1, 0, attempt=1), "one: its 3 episodes are not the 3"),
        (other_action, r"{at}, turn 1: actions: the record says ("),
        (other_reward, r"{at}, turn 1: reward: the record says "),
        (fewer_turns, r"{at}, turn 1: actions: the record says no such turn, trajectories.jsonl ("),
    ],
)
def test_rows_are_held_against_the_trajectories(two, tmp_path, change, found):
    folder = records.save(two.record, two.trajectories, tmp_path)
    record = records.load(folder)
    assert verify_trajectories(folder, record) == verify_trajectories(folder / records.RECORD, record) == []
    faults = verify_trajectories(folder, change(record))
    assert any(fault.startswith(found.replace("{at}", at(two.record, 1, 1))) for fault in faults), faults
