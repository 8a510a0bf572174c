"""Files of episodes as they are found: of both kinds, growing, cut, broken, hostile, and larger than what is kept."""

import json
import tracemalloc

import pytest
from sample_episodes import BOARD, PUSHED, training_episode, training_turn, write_lines

from turngym_client import connect
from turngym_leaderboard import record as records
from turngym_leaderboard.evaluation import evaluate
from turngym_leaderboard.pages import trajectory_file
from turngym_leaderboard.pages.trajectory_file import CannotView, TrajectoryFile
from turngym_leaderboard.protocol import Protocol


@pytest.fixture(scope="module")
def evaluated(server, tmp_path_factory):
    """The folder of a record: two scripted rows of eight episodes."""
    with connect(server) as client:
        done = evaluate(client, Protocol(environment="frozen_lake", instances=4, attempts=2), [], server=[server])
    return records.save(done.record, done.trajectories, tmp_path_factory.mktemp("records"))


def opened(path, key="a"):
    file = TrajectoryFile(path, key)
    file.refresh()
    return file


def test_a_training_run_is_listed_and_shown(tmp_path) -> None:
    file = opened(write_lines(tmp_path / "rl/trajectories.jsonl", training_episode(3, turns=2), training_episode(4)))
    assert file.title == "rl/trajectories.jsonl"
    assert not file.notices
    row = file.rows[0]
    assert (row.number, row.key, row.agent, row.environment) == (1, "a-1", "iteration 3", "sokoban")
    assert (row.verdict, row.turns, row.total) == ("solved", 2, -0.2)
    view = file.episode(2)
    assert view.agent == "iteration 4"
    assert dict(view.facts)["level seed"] == "9223372036854775808"
    assert [turn.total for turn in view.turns] == [-0.1, -0.2]
    assert view.turns[0].observation == BOARD
    assert view.last == PUSHED


def test_an_evaluation_is_listed_with_what_its_record_says(evaluated) -> None:
    file = opened(evaluated)
    record = records.load(evaluated)
    assert not file.notices
    assert [row.agent for row in file.rows] == ["random"] * 8 + ["oracle"] * 8
    for row in record.rows:
        solved = [shown.verdict == "solved" for shown in file.rows if shown.agent == row.agent]
        assert solved == [bool(episode.success) for episode in row.episodes]
    assert file.rows[0].environment == "frozen_lake"
    assert file.rows[0].instance == file.rows[1].instance == file.rows[8].instance != file.rows[2].instance
    view = file.episode(16)
    assert view.symbols == "ragen"
    assert dict(view.facts)["digest"] == record.row("oracle").episodes[7].digest


def test_without_its_record_verdicts_of_an_evaluation_are_unknown(evaluated, tmp_path) -> None:
    (tmp_path / "alone.jsonl").write_bytes((evaluated / "trajectories.jsonl").read_bytes())
    assert {row.verdict for row in opened(tmp_path / "alone.jsonl").rows} == {"unknown"}


def test_trajectories_that_were_changed_since_the_record_say_so(evaluated, tmp_path) -> None:
    for name in ("record.json", "trajectories.jsonl"):
        (tmp_path / name).write_bytes((evaluated / name).read_bytes())
    with (tmp_path / "trajectories.jsonl").open("ab") as file:
        file.write(b"\n")
    assert "was changed" in opened(tmp_path).notices[0]
    (tmp_path / "record.json").write_text("{}")
    assert "cannot be read, so verdicts are not known" in opened(tmp_path).notices[0]


def test_symbols_of_ones_own_are_taken_from_what_a_run_says(tmp_path) -> None:
    write_lines(tmp_path / "trajectories.jsonl", training_episode(), training_episode(environment="frozen_lake"))
    told = {"id": "sokoban", "options_json": json.dumps({"symbols": "abcdefg"})}
    (tmp_path / "run.json").write_text(json.dumps({"environment": told}))
    file = opened(tmp_path)
    assert file.episode(1).symbols == "abcdefg"
    assert file.episode(2).symbols == ""
    (tmp_path / "run.json").write_text('{"environment": 3}')
    assert opened(tmp_path).episode(1).symbols == ""


def test_a_file_of_an_older_release_has_no_last_state(tmp_path) -> None:
    episode = {key: value for key, value in training_episode().items() if key != "last_observation"}
    assert opened(write_lines(tmp_path / "t.jsonl", episode)).episode(1).last is None


def test_a_file_that_grows_is_read_on_from_where_it_was(tmp_path) -> None:
    path = write_lines(tmp_path / "t.jsonl", training_episode(1), training_episode(2), cut=10)
    file = opened(path)
    assert [row.agent for row in file.rows] == ["iteration 1"]
    assert "The last line is not whole" in file.notices[0]
    write_lines(path, training_episode(1), training_episode(2), training_episode(3))
    file.refresh()
    assert [row.agent for row in file.rows] == ["iteration 1", "iteration 2", "iteration 3"]
    assert not file.notices
    assert file.episode(3).agent == "iteration 3"
    file.refresh()
    assert len(file.rows) == 3


def test_a_file_that_was_cut_back_or_replaced_is_read_anew(tmp_path) -> None:
    path = write_lines(tmp_path / "t.jsonl", training_episode(1), training_episode(2))
    file = opened(path)
    write_lines(path, training_episode(5))
    file.refresh()
    assert [row.agent for row in file.rows] == ["iteration 5"]
    aside = write_lines(tmp_path / "aside", *(training_episode(n) for n in range(7, 12)))
    aside.replace(path)
    file.refresh()
    assert [row.agent for row in file.rows] == [f"iteration {n}" for n in range(7, 12)]


def test_an_empty_file_says_so(tmp_path) -> None:
    assert opened(write_lines(tmp_path / "t.jsonl")).notices == ("There is no episode in it yet.",)


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b'{"agent": "a"}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"iteration":1,"environment":"e","level_seed":1,"turns":[{"observation":1}]}',
        b"",
    ],
)
def test_lines_that_are_no_episodes_are_left_out_and_counted(tmp_path, line) -> None:
    path = write_lines(tmp_path / "t.jsonl", training_episode(1))
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.write(json.dumps(training_episode(2)).encode() + b"\n")
    found = opened(path)
    assert [row.number for row in found.rows] == [1, 3]
    assert found.episode(3).agent == "iteration 2"
    assert found.notices == ("1 of 3 lines are no episodes and are left out: 2.",)
    with pytest.raises(CannotView, match="has no episode 2"):
        found.episode(2)


def test_a_line_that_is_too_long_is_left_out_and_the_rest_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trajectory_file, "MOST_BYTES", 4_000)
    huge = training_episode(1, turns=1, last_observation="x" * 9_000)
    path = write_lines(tmp_path / "t.jsonl", huge, training_episode(2, turns=1))
    file = opened(path)
    assert [row.number for row in file.rows] == [2]
    assert file.episode(2).agent == "iteration 2"
    path = write_lines(tmp_path / "t.jsonl", training_episode(2, turns=1), huge, cut=1)
    assert "The last line is not whole" in opened(path).notices[0]


def test_numbers_that_are_none_are_no_returns(tmp_path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(training_episode(turns=1)).replace('"reward": -0.1', '"reward": 1e999') + "\n")
    file = opened(path)
    assert file.rows[0].total == file.episode(1).total == 0


def test_an_episode_that_was_changed_since_it_was_listed_is_refused(tmp_path) -> None:
    path = write_lines(tmp_path / "t.jsonl", training_episode(1))
    file = opened(path)
    path.write_bytes(b" " * path.stat().st_size)
    with pytest.raises(CannotView, match="changed since it was listed"):
        file.episode(1)


def test_a_file_that_is_none_is_refused(tmp_path) -> None:
    with pytest.raises(CannotView, match=r"name a trajectories\.jsonl"):
        TrajectoryFile(tmp_path)


def test_what_is_kept_of_a_file_is_a_small_part_of_it(tmp_path) -> None:
    turn = training_turn(reasoning="because " * 250)
    episode = training_episode(1, turns=0) | {"turns": [turn] * 20}
    path = write_lines(tmp_path / "t.jsonl", *[episode] * 500)
    size = path.stat().st_size
    tracemalloc.start()
    try:
        file = opened(path)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size > 20_000_000
    assert len(file.rows) == 500
    assert kept < size / 50
    assert most < size / 10
