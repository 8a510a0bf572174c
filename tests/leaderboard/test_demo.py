"""The demo's parts in small, and that it stops its server and says what failed."""

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turngym_leaderboard import record as records
from turngym_leaderboard.demo import standing
from turngym_leaderboard.pages.views import Estimate

SMALL = {
    "run.iterations": 1,
    "run.threads": 1,
    "rollout.groups": 2,
    "rollout.group_size": 4,
    "rollout.stop_unreadable": "false",
    "update.minibatch_episodes": 8,
    "critic.warmup_iterations": 0,
    "validation.episodes": 4,
    "warm_start.episodes": 20,
    "warm_start.max_steps": 4,
    "warm_start.check_every": 2,
    "warm_start.check_episodes": 4,
}


def command(folder: Path, settings: dict[str, object]) -> list[str]:
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "turngym_leaderboard.demo", "--folder", str(folder), "--instances", "4", *sets]


def is_served(log: Path) -> bool:
    """Whether anybody listens where the server said that it does."""
    found = re.search(r"listening on (?:http://)?(\S+):(\d+)", log.read_text())
    assert found
    with socket.socket() as probe:
        return probe.connect_ex((found[1], int(found[2]))) == 0


def test_the_demo_in_small(tmp_path):
    done = subprocess.run(command(tmp_path / "demo", SMALL), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not is_served(tmp_path / "demo" / "server.log")
    [folder] = records.find(tmp_path / "demo" / "leaderboard")
    record = records.load(folder)
    rows = ["random", "warm start", "warm start (greedy)", "after RL", "after RL (greedy)", "oracle"]
    assert [row.agent for row in record.rows] == rows
    assert [row.description.get("made_by") for row in record.rows[1:5:2]] == ["warm start", "training"]
    assert [(c.first, c.second) for c in record.comparisons] == [
        ("warm start", "after RL"),
        ("warm start (greedy)", "after RL (greedy)"),
    ]
    assert record.protocol.split == "held_out"
    page = (tmp_path / "demo" / "site" / "boards" / "demo-local.html").read_text()
    assert all(f">{name}<" in page for name in ("random", "after RL", "oracle"))
    assert not is_served(tmp_path / "demo" / "board.log")
    assert re.search(r"^On its board, at [\d.]+ % .* random [\d.]+ %.* oracle [\d.]+ %.*: file://", done.stdout, re.M)
    assert (tmp_path / "demo" / "board.token").stat().st_mode & 0o777 == 0o600
    for line in (
        "demo-local.html",
        "after RL − warm start:",
        str(folder / records.RECORD),
        str(tmp_path / "demo" / "rl"),
    ):
        assert line in done.stdout


@pytest.mark.parametrize(
    ("rate", "told"),
    [
        (0.65, "at 65.0 % (60.8–69.0) between random 15.4 % and oracle 99.0 %"),
        (0.154, "at 15.4 % (60.8–69.0) no better than random 15.4 %, oracle 99.0 %"),
        (0.1, "at 10.0 % (60.8–69.0) no better than random 15.4 %, oracle 99.0 %"),
        (0.99, "at 99.0 % (60.8–69.0) no worse than oracle 99.0 %, random 15.4 %"),
    ],
)
def test_the_last_line_says_where_the_policy_came_to_stand(rate, told):
    assert standing(Estimate(rate, 0.608, 0.69), 0.154, 0.99) == told


def test_a_part_that_fails_is_named_and_the_server_stopped(tmp_path):
    done = subprocess.run(command(tmp_path / "demo", {"rollout.grups": 2}), capture_output=True, text=True)
    assert done.returncode == 1
    assert "demo: warm start from the oracle's play failed" in done.stdout
    assert not is_served(tmp_path / "demo" / "server.log")


def test_a_folder_that_is_taken_is_refused(tmp_path):
    done = subprocess.run(command(tmp_path, {}), capture_output=True, text=True)
    assert done.returncode == 1
    assert "exists already" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_stopped_stops_its_server(tmp_path, number):
    log = tmp_path / "demo" / "server.log"
    with subprocess.Popen(command(tmp_path / "demo", {}), stdout=subprocess.DEVNULL) as process:
        while not (log.is_file() and "listening on" in log.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        try:
            assert process.wait(timeout=60) != 0
        finally:
            process.kill()
    assert not is_served(log)
