"""Evaluations against a real server: what is played, whose fault is whose, what is kept, and whether it stands."""

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console
from server_process import ServerProcess

from turngym_client import Limits, Split, TurngymError, connect
from turngym_leaderboard import record as records
from turngym_leaderboard import seeds, tables
from turngym_leaderboard.agents import AgentFault, AgentUnavailable, Fault, Reply, Seat, View
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.evaluation import CannotEvaluate, evaluate
from turngym_leaderboard.protocol import REFERENCE, Decoding, Protocol, select_instances
from turngym_leaderboard.runner import play
from turngym_leaderboard.verify import verify, verify_trajectories

SMALL = dataclasses.replace(REFERENCE, instances=24)


class Script:
    """Plays the same turns in every episode."""

    samples = False
    wants_legal_actions = False
    wants_advice = False
    description: ClassVar[dict[str, str]] = {}

    def __init__(self, name: str, *turns: Sequence[str]) -> None:
        self.name = name
        self.turns = turns
        self.seats: list[Seat] = []

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        self.seats += seats

    def act(self, views: Sequence[View]) -> list[Reply]:
        return [self.reply(self.turns[view.turn % len(self.turns)]) for view in views]

    def reply(self, actions: Sequence[str]) -> Reply:
        return Reply(text="||".join(actions), reasoning="", actions=tuple(actions), tokens=len(actions))


class GivesUp(Script):
    """Fails as a whole in its second turn."""

    def act(self, views: Sequence[View]) -> list[Reply]:
        if views[0].turn == 1:
            raise AgentFault("out of memory")
        return super().act(views)


class Hangs(Script):
    """Times out where it has not won after its first turn, outgrows its model at every third seat, and tells costs."""

    def act(self, views: Sequence[View]) -> list[Reply | Fault]:
        return [self.turn(view) for view in views]

    def turn(self, view: View) -> Reply | Fault:
        if view.turn == 1:
            return Fault("context: 9 tokens", truncated=True) if view.seat % 3 == 0 else Fault("timeout: no answer")
        return dataclasses.replace(self.reply(["Up"]), tokens_in=7, cost=0.25, failure="empty: nothing was said")


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


@pytest.fixture(scope="module")
def evaluation(client, server):
    agents = [Script("up", ["Up", "Up"]), Script("around", ["Up", "Right", "Down", "Left"], ["Left", "fly"])]
    return evaluate(client, SMALL, agents, server=[server], sessions=7)


def test_the_reference_protocol_is_the_designs():
    assert (
        Protocol(
            environment="sokoban",
            split=Split.HELD_OUT,
            instances=512,
            attempts=1,
            limits=Limits(max_turns=5, max_actions=10, max_actions_per_turn=5),
            decoding=Decoding(temperature=1.0, greedy=False),
            seed=0,
        )
        == REFERENCE
    )


def test_instances_are_the_first_levels_of_distinct_worlds_whatever_the_batch(client):
    by_seven, by_fifty = (select_instances(client, SMALL, sessions=sessions) for sessions in (7, 50))
    assert by_seven == by_fifty
    instances = by_seven.instances
    assert len({instance.world_id for instance in instances}) == len(instances) == 24
    assert by_seven.draws == instances[-1].draw + 1
    assert [instance.level_seed for instance in instances] == [
        seeds.level_seed(b"0", "sokoban", instance.draw) for instance in instances
    ]
    # Every draw that was passed over has a world met before.
    kept = {instance.draw for instance in instances}
    passed = [draw for draw in range(by_seven.draws) if draw not in kept]
    for draw in passed:
        met = client.reset("sokoban", split=Split.HELD_OUT, level_seed=seeds.level_seed(b"0", "sokoban", draw))
        assert met.world_id in {instance.world_id for instance in instances if instance.draw < draw}


def test_rows_are_random_agents_oracle_on_the_same_instances_and_seeds(evaluation):
    rows = evaluation.record.rows
    assert [row.agent for row in rows] == ["random", "up", "around", "oracle"]
    played = [[(e.draw, e.level_seed, e.noise_seed, e.agent_seed) for e in row.episodes] for row in rows]
    assert played[0] == played[1] == played[2] == played[3]
    assert len(played[0]) == 24


def test_the_oracle_reaches_the_exact_ceiling_of_every_instance(evaluation):
    ceilings = {instance.draw: instance.ceiling for instance in evaluation.record.environment.instances}
    assert {e.draw: float(e.success) for e in evaluation.record.row("oracle").episodes} == ceilings


def test_random_fills_every_turn_with_legal_actions(evaluation):
    for episode in evaluation.record.row("random").episodes:
        assert all(len(turn) == 5 and set(turn) <= {"Up", "Down", "Left", "Right"} for turn in episode.actions)
        assert episode.invalid_turns == 0
    assert len({episode.actions for episode in evaluation.record.row("random").episodes}) == 24


def test_numbers_of_a_row_follow_from_its_episodes(evaluation):
    row = evaluation.record.row("around")
    told = row.statistics
    # The second turn ends in an invalid action, unless its first action solves the level; the third is the last.
    turns = sum(len(episode.actions) for episode in row.episodes)
    met = [e for e in row.episodes if len(e.actions) == 3 or (len(e.actions) == 2 and not e.success)]
    assert told.invalid_action_rate == len(met) / turns > 0
    assert told.turns == turns / 24
    assert told.mean_return == pytest.approx(sum(sum(e.rewards) for e in row.episodes) / 24)
    trajectories = [t for t in evaluation.trajectories if t.agent == "around"]
    assert [tuple(turn.reward for turn in t.turns) for t in trajectories] == [e.rewards for e in row.episodes]
    assert [tuple(turn.actions for turn in t.turns) for t in trajectories] == [e.actions for e in row.episodes]


def test_comparisons_are_between_the_agents_only(evaluation):
    [comparison] = evaluation.record.comparisons
    assert (comparison.first, comparison.second, comparison.instances) == ("up", "around", 24)
    up, around = ({e.draw: e.success for e in evaluation.record.row(n).episodes} for n in ("up", "around"))
    assert comparison.difference == pytest.approx(sum(around[d] - up[d] for d in up) / 24)


def test_ranks_are_told_of_agents_that_are_compared(evaluation):
    # Over 24 worlds neither is better with 95 % certainty, so that both share the ranks.
    [line] = tables.rank_lines(evaluation.record)
    assert line.startswith("ranks: ")
    assert "up 1–2" in line
    assert "around 1–2" in line
    assert "(1 pair, any false difference in at most 5 % of cases; a difference of " in line


def test_the_same_digests_whatever_the_batch_and_whoever_else_plays(client, evaluation):
    again = evaluate(client, SMALL, [Script("around", ["Up", "Right", "Down", "Left"], ["Left", "fly"])], sessions=24)
    for name in ("random", "around", "oracle"):
        assert again.record.row(name).episodes == evaluation.record.row(name).episodes


def test_attempts_share_the_level_and_differ_in_noise(client):
    protocol = Protocol(environment="frozen_lake", instances=5, attempts=3)
    record = evaluate(client, protocol, []).record
    episodes = record.row("oracle").episodes
    assert [(e.draw, e.attempt) for e in episodes] == [
        (i.draw, attempt) for i in record.environment.instances for attempt in range(3)
    ]
    for first in range(0, 15, 3):
        group = episodes[first : first + 3]
        assert len({e.level_seed for e in group}) == len({e.instance_id for e in group}) == 1
        assert len({e.noise_seed for e in group}) == len({e.digest for e in group}) == 3
    assert record.row("random").statistics.score is not None


def test_too_few_worlds_are_all_played_and_it_says_so(client):
    protocol = Protocol(environment="bandit", split=Split.ALL, instances=3, limits=Limits())
    record = evaluate(client, protocol, []).record
    assert len(record.environment.instances) == 1
    said = tables.notes(record)
    assert any("only 1 distinct world of the 3 asked for in 1 draw;" in note for note in said)
    assert any("not held out" in note for note in said)


def test_an_environment_that_cannot_be_divided_says_what_to_play(client):
    with pytest.raises(CannotEvaluate, match=r"too few worlds to be divided.*all"):
        evaluate(client, Protocol(environment="bandit"), [])


LEVELS = "#####\n#@$.#\n#####\n\n######\n#@ $.#\n######\n\n#####\n#.$@#\n#####\n\n######\n#@$ .#\n######\n"
"""Four levels of two worlds: the third is the first, mirrored; the second and the fourth share floor and target."""


def test_a_level_file_is_played_from_its_first_level_to_its_last(tmp_path):
    (tmp_path / "levels.xsb").write_text(LEVELS)
    arguments = ("--env", "sokoban", "--option", f"levels={tmp_path / 'levels.xsb'}")
    protocol = Protocol(split=Split.ALL, instances=10, limits=Limits())
    with ServerProcess(*arguments) as running, connect(running.address) as client:
        with pytest.raises(CannotEvaluate, match=r"it plays a level file.* Play it with --split all"):
            evaluate(client, SMALL, [])
        record = evaluate(client, protocol, []).record
        assert verify(client, record) == []
    assert [instance.level_seed for instance in record.environment.instances] == [0, 1]
    assert all(episode.success for episode in record.row("oracle").episodes)
    assert "each level's own limits" in tables.protocol_line(record)
    assert '"levels":' in tables.protocol_line(record)


def test_two_agents_of_one_name_are_refused(client):
    with pytest.raises(CannotEvaluate, match="two agents are called 'up'"):
        evaluate(client, SMALL, [Script("up", ["Up"]), Script("up", ["Up"])])


def test_an_agents_fault_is_a_failure(client):
    selection = select_instances(client, SMALL)
    played = play(client, SMALL, selection, GivesUp("gives up", ["Up"]))
    assert {(p.record.outcome, p.record.success, p.record.fault) for p in played} == {
        ("agent_fault", False, "out of memory")
    }
    assert {len(p.turns) for p in played} == {1}


def test_a_fault_ends_its_own_conversation_and_costs_are_kept(client, tmp_path):
    evaluation = evaluate(client, SMALL, [Hangs("hangs")])
    record, row = evaluation.record, evaluation.record.row("hangs")
    # One push of a box never solves these levels, so all go on to the second turn.
    assert {(e.outcome, e.success, len(e.actions), e.tokens_in, e.cost) for e in row.episodes} == {
        ("agent_fault", False, 1, 7, 0.25)
    }
    assert [e.truncated for e in row.episodes] == [k % 3 == 0 for k in range(24)]
    assert {e.fault for e in row.episodes} == {"context: 9 tokens", "timeout: no answer"}
    assert {tuple(e.failures.items()) for e in row.episodes} == {(("empty", 1),)}
    assert row.statistics.faults == {"context": 8, "timeout": 16}
    assert (row.statistics.failures, row.statistics.truncation_rate) == ({"empty": 24}, 8 / 24)
    said = "\n".join([*tables.notes(record), *tables.cost_lines(record)])
    assert "hangs: 24 faults of the agent's (context 8, timeout 16) and 0 of the environment's" in said
    assert "hangs: turns whose answer was at fault (empty 24)" in said
    assert "hangs: 7.0 tokens read an episode, $6.00 in all, none solved" in said
    folder = records.save(record, evaluation.trajectories, tmp_path)
    kept = records.load(folder)
    assert verify(client, kept, trajectories=records.load_trajectories(folder)) == []
    assert verify_trajectories(folder, kept) == []


def test_scripted_agents_asked_for_by_name_are_no_contestants(client):
    record = evaluate(client, dataclasses.replace(SMALL, instances=2), [OracleAgent(), RandomAgent()]).record
    assert [row.agent for row in record.rows] == ["random", "oracle"]
    assert record.comparisons == ()


@pytest.fixture(scope="module")
def faulty():
    arguments = ("--env", "faulty:Faulty", "--splits", "all")
    with ServerProcess(*arguments, path=Path(__file__).parent) as running, connect(running.address) as connected:
        yield connected


FAULTY = Protocol(environment="faulty", split=Split.ALL, instances=4, limits=Limits())


def outcomes(client, *turns: Sequence[str]):
    selection = select_instances(client, FAULTY)
    return {(p.record.outcome, p.record.success) for p in play(client, FAULTY, selection, Script("script", *turns))}


def test_an_environment_that_fails_each_time_is_a_failure(faulty):
    assert outcomes(faulty, ["wait"], ["crash"]) == {("environment_fault", False)}


def test_an_environment_that_fails_once_is_played_again(faulty):
    assert outcomes(faulty, ["wait"], ["stumble"]) == {("played", True)}


def test_an_episode_without_a_verdict_is_unresolved(faulty):
    assert outcomes(faulty, ["shrug"]) == {("unresolved", None)}


def test_scripted_rows_that_cannot_play_are_shown_with_the_reason(faulty):
    evaluation = evaluate(faulty, FAULTY, [Script("winner", ["win"])])
    record = evaluation.record
    assert [bool(row.unavailable) for row in record.rows] == [True, False, True]
    assert record.row("winner").statistics.success.rate == 1.0
    assert record.row("winner").statistics.score is None
    said = " ".join(tables.notes(record))
    assert "its legal actions cannot be listed" in said
    assert "it advises nothing" in said
    assert verify(faulty, record) == []


def test_an_agent_that_cannot_play_is_an_error(faulty):
    class Needy(RandomAgent):
        name = "needy"

        def act(self, views: Sequence[View]) -> list[Reply]:
            raise AgentUnavailable("needy needs more")

    with pytest.raises(AgentUnavailable, match="needs more"):
        play(faulty, FAULTY, select_instances(faulty, FAULTY), Needy())


def test_a_server_that_goes_away_leaves_the_rest_unresolved():
    with ServerProcess("--env", "sokoban", "--splits", "held_out") as running:
        client = connect(running.address, deadline=2.0, patience=1.0, failover=0.2)
        selection = select_instances(client, SMALL)
        record = evaluate(client, SMALL, []).record
    with client:
        played = play(client, SMALL, selection, Script("late", ["Up"]), sessions=16)
        assert {(p.record.outcome, p.record.success) for p in played} == {("unresolved", None)}
        assert "not played" in played[-1].record.fault
        with pytest.raises(TurngymError):
            verify(client, record)


def test_a_record_is_kept_whole_and_read_back(evaluation, tmp_path):
    folder = records.save(evaluation.record, evaluation.trajectories, tmp_path / "runs")
    assert [file.name for file in (tmp_path / "runs").iterdir()] == [folder.name]
    assert records.find(tmp_path / "runs") == records.find(folder) == [folder]
    kept = records.load(folder)
    assert kept == records.load(folder / records.RECORD)
    assert kept.trajectories.size == (folder / records.TRAJECTORIES).stat().st_size
    assert kept.model_copy(update={"trajectories": None}) == evaluation.record
    assert tuple(records.load_trajectories(folder)) == evaluation.trajectories
    assert evaluation.record.code.packages["turngym"]


def test_texts_that_hold_line_separators_are_read_back(evaluation, tmp_path):
    odd = evaluation.trajectories[0].model_copy(update={"last_observation": "a\u2028b\x85c\rd\ne"})
    folder = records.save(evaluation.record, [odd, odd], tmp_path)
    assert records.load_trajectories(folder) == [odd, odd]


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-3]), "was truncated: "),
        (lambda file: file.write_bytes(file.read_bytes().replace(b"Up", b"up", 1)), "was changed: SHA-256 "),
        (lambda file: file.write_bytes(file.read_bytes() + b"\n"), "was changed: SHA-256 "),
    ],
)
def test_trajectories_are_covered_by_their_record(evaluation, tmp_path, harm, told):
    folder = records.save(evaluation.record, evaluation.trajectories, tmp_path)
    record = records.load(folder)
    assert records.trajectories_fault(folder, record) is None
    assert records.trajectories_fault(folder / records.RECORD, record) is None
    harm(folder / records.TRAJECTORIES)
    assert told in records.trajectories_fault(folder, record)
    assert told in records.trajectories_fault(folder / records.RECORD, record)


def test_a_record_from_before_trajectories_were_covered_still_loads(evaluation, tmp_path):
    folder = records.save(evaluation.record, evaluation.trajectories, tmp_path)
    tree = json.loads((folder / records.RECORD).read_text())
    del tree["trajectories"]
    (folder / records.RECORD).write_text(json.dumps(tree))
    (folder / records.TRAJECTORIES).write_text("")
    record = records.load(folder)
    assert record.trajectories is None
    assert records.trajectories_fault(folder, record) is None


def test_a_folder_without_a_record_is_an_error(tmp_path):
    with pytest.raises(records.RecordError, match="holds no record"):
        records.load(tmp_path)
    with pytest.raises(records.RecordError, match=f"name its folder, {tmp_path}, or record.json in it"):
        records.load(tmp_path / records.TRAJECTORIES)
    (tmp_path / records.RECORD).write_text('{"schema_version": 2}')
    with pytest.raises(records.RecordError, match="schema"):
        records.load(tmp_path)


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_table_folds(evaluation, width):
    console = Console(width=width, file=io.StringIO())
    tables.show(console, evaluation.record)
    assert "…" not in console.file.getvalue()
