"""Kept episodes: lines that are whole, whoever else writes to the file and whatever was left in it."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from turngym_client import Limits
from turngym_leaderboard.playground.kept import CannotKeep, KeptEpisode, KeptFile, KeptTurn
from turngym_leaderboard.record import LimitsRecord


def episode(seed=1, text="#"):
    turn = KeptTurn(
        observation=text,
        reasoning="",
        actions=("Up",),
        actions_executed=1,
        reward=1.0,
        valid_action=True,
        advised=False,
    )
    return KeptEpisode(
        player="person",
        environment="sokoban",
        version="1.0",
        options_json="{}",
        limits=LimitsRecord.of(Limits()),
        split="train",
        split_epoch=0,
        action_separator="||",
        level_seed=seed,
        noise_seed=2**64 - 1,
        instance_id="i",
        world_id="w",
        success=True,
        terminated=True,
        truncated=False,
        end_reason="environment",
        digest="00",
        environment_return=1.0,
        turns=(turn,),
        last_observation=text,
        kept_at="2026-01-01T00:00:00+00:00",
    )


def seeds(file):
    return [json.loads(line)["level_seed"] for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


def test_lines_are_appended_and_seeds_keep_all_their_bits(tmp_path):
    file = tmp_path / "kept.jsonl"
    KeptFile(file).append(episode(2**64 - 1, "a\nb\u2028"))
    KeptFile(file).append(episode(7))
    assert seeds(file) == [str(2**64 - 1), "7"]


def test_several_writers_leave_whole_lines(tmp_path):
    file = tmp_path / "kept.jsonl"
    writers = [KeptFile(file) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: writers[at % 4].append(episode(at, "x" * 100_000)), range(40)))
    assert sorted(map(int, seeds(file))) == list(range(40))


def test_a_line_that_was_left_unfinished_does_not_swallow_the_next(tmp_path):
    file = tmp_path / "kept.jsonl"
    file.write_text('{"player":"per', encoding="utf-8")
    KeptFile(file).append(episode(7))
    lines = file.read_text(encoding="utf-8").split("\n")
    assert lines[0] == '{"player":"per'
    assert json.loads(lines[1])["level_seed"] == "7"
    assert lines[2:] == [""]


def test_what_cannot_be_written_whole_leaves_nothing(tmp_path, monkeypatch):
    """The disk is full in mid-line: the system's own write is made to fail, since no test can fill a disk."""
    file = tmp_path / "kept.jsonl"
    kept = KeptFile(file)
    kept.append(episode(1))
    before, write = file.read_bytes(), os.write

    def full(descriptor, line):
        if len(line) < 300:
            raise OSError(28, "No space left on device")
        return write(descriptor, line[:200])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CannotKeep, match="No space left"):
        kept.append(episode(2))
    monkeypatch.undo()
    assert file.read_bytes() == before
    kept.append(episode(3))
    assert seeds(file) == ["1", "3"]


@pytest.mark.parametrize("name", ["none/kept.jsonl", "."])
def test_a_file_that_cannot_be_written_is_told_at_once(name, tmp_path):
    with pytest.raises(CannotKeep, match="cannot be written"):
        KeptFile(tmp_path / name)
