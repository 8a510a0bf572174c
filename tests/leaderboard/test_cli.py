"""The command, as a user runs it."""

import json
import os
import subprocess
import sys

import pytest

from turngym_leaderboard import record as records


def leaderboard(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turngym_leaderboard.cli", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "140", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )


def test_evaluate_show_and_verify(server, tmp_path):
    asked = ("--env", "frozen_lake", "--server", server, "--instances", "12", "--option", "slip=0", "--seed", "5")
    done = leaderboard("evaluate", "--agent", "random", *asked, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [folder] = records.find(tmp_path)
    kept = records.load(folder)
    assert kept.protocol.options == {"slip": 0}
    assert kept.protocol.seed == 5
    assert json.loads((folder / records.RECORD).read_text())["rows"][0]["episodes"][0]["level_seed"].isdecimal()
    for expected in ("12 distinct worlds of split held_out", "random", "oracle", str(folder / records.TRAJECTORIES)):
        assert expected in done.stdout
    shown = leaderboard("show", str(tmp_path))
    assert shown.returncode == 0
    assert "12 distinct worlds of split held_out" in shown.stdout
    verified = leaderboard("verify", str(folder), "--server", server)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "24 episodes were played again" in verified.stdout
    assert "trajectories.jsonl is as it was saved" in verified.stdout

    trajectories = folder / records.TRAJECTORIES
    trajectories.write_bytes(trajectories.read_bytes()[:-1])
    cut = leaderboard("verify", str(folder / records.RECORD), "--server", server)
    assert cut.returncode == 1
    assert f"{trajectories} was truncated" in cut.stdout
    assert "1 difference over 24 episodes" in cut.stdout

    text = (folder / records.RECORD).read_text().replace(kept.rows[1].episodes[0].digest, "00" * 32)
    (folder / records.RECORD).write_text(text)
    refused = leaderboard("verify", str(folder), "--server", server)
    assert refused.returncode == 1
    assert "does not stand" in refused.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent", "random", "--env", "sokobon"], "sokoban"),
        (["--agent", "randm", "--env", "sokoban"], "expected [NAME=]checkpoint:PATH, random or oracle"),
        (["--agent", "random", "--env", "sokoban", "--option", "size"], "expected key=value"),
        (["--agent", "random", "--env", "sokoban", "--option", "siz=7"], "siz"),
        (["--agent", "random", "--env", "sokoban", "--temperature", "0"], "--greedy"),
        (["--agent", "random", "--env", "bandit"], "too few worlds"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(server, tmp_path, arguments, message):
    done = leaderboard("evaluate", *arguments, "--server", server, "--out", str(tmp_path))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_played(server):
    done = leaderboard("evaluate", "--agent", "random", "--env", "sokoban", "--server", server, "--out", "/proc/x")
    assert done.returncode == 2
    assert done.stderr.startswith("leaderboard: /proc/x cannot be written: ")
    assert "512" not in done.stdout


def test_a_server_without_held_out_levels_is_told_how_to_be_started(server_without_held_out):
    done = leaderboard("evaluate", "--agent", "random", "--env", "sokoban", "--server", server_without_held_out)
    assert done.returncode == 2
    assert "does not serve split held_out of sokoban" in done.stderr
    assert "start it again as it was started, but with --splits train,validation,held_out" in done.stderr


def test_show_without_records(tmp_path):
    done = leaderboard("show", str(tmp_path))
    assert done.returncode == 2
    assert "holds no records" in done.stderr
