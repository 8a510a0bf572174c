"""The fault matrix: a small one with real processes, and a judge that notices what it is there to notice."""

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_small_matrix_holds():
    faults = ["server killed", "instance's process killed", "connection cut"]
    command = [sys.executable, str(BENCHMARKS / "fault_matrix.py"), "--episodes", "6", "--only", *faults]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "24 of 24 cells held" in finished.stdout
    assert " named" in finished.stdout  # An environment without determinism loses what its server held.


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fault_matrix")


TURNS = ["Up", "Left", "Up"]


LAKE = "noted_frozen_lake"


@pytest.fixture
def whole(matrix: ModuleType):
    """A run of FrozenLake, one episode for each player."""
    journal, player = (importlib.import_module(name) for name in ("fault_journal", "fault_player"))
    seeds = [player.level_seed_of(number, LAKE, 0) for number in matrix.PLAYERS]
    return matrix.Run(
        committed=[
            player.Committed(
                environment=LAKE,
                level_seed=seed,
                outcome="finished",
                turns=3,
                digests=[f"{seed}/{turn}" for turn in range(4)],
                rewards=[0.0] * 3,
            )
            for seed in seeds
        ],
        notes=[
            journal.Note(LAKE, 1, f"first of {seed}", journal.mark_of(seed), place, action)
            for seed in seeds
            for place, action in enumerate(["", *TURNS])
        ],
        struck={LAKE: 1},
        strikes=1,
        errors=[],
        seconds=1.0,
    )


@pytest.fixture
def judged(matrix: ModuleType, whole):
    """Failures of FrozenLake's cell, where one killed server was to leave `whole` as it is."""

    def judge(*, lives: Sequence[Sequence[str]] = (), change=None, **fields) -> Sequence[str]:
        """Adds lives of the first episode, changes how it was committed, or replaces parts of the run."""
        first, second = whole.committed
        added = [
            replace(whole.notes[0], life=f"more {number}", place=place, action=action)
            for number, life in enumerate(lives)
            for place, action in enumerate(["", *life])
        ]
        run = replace(whole, notes=[*whole.notes, *added], committed=[replace(first, **(change or {})), second])
        [killed] = [fault for fault in matrix.FAULTS if fault.name == "server killed"]
        cell = matrix.judge(killed, LAKE, replace(run, **fields), whole, 1)
        assert json.loads(json.dumps(asdict(cell)))["failures"] == cell.failures
        return cell.failures

    return judge


def test_what_holds(judged):
    assert judged() == []
    # The one strike explains one replay, which may have died on its way.
    assert judged(lives=[TURNS]) == []
    assert judged(lives=[["Up"]]) == []


@pytest.mark.parametrize(
    ("wrong", "failure"),
    [
        ({"lives": [["Up", "Up", "Left"]]}, "executed ['Up', 'Up', 'Left'], undisturbed ['Up', 'Left', 'Up']"),
        ({"lives": [[*TURNS, "Up"]]}, "executed"),
        ({"lives": [["Up"], ["Up", "Left"]]}, "3 lives; expected at most 2"),
        ({"change": {"digests": ["0/0", "other", "0/2", "0/3"]}}, "digests or rewards differ"),
        ({"change": {"rewards": [0.0, 1.0, 0.0]}}, "digests or rewards differ"),
        ({"change": {"outcome": "lost", "reason": "NOT_REPLAYABLE"}}, "lost [NOT_REPLAYABLE]"),
        ({"change": {"outcome": "wrong reply", "error": "WrongReply: …"}}, "wrong reply"),
        ({"change": {"outcome": "failed", "error": "ServerUnavailable: …"}}, "failed"),
        ({"struck": {LAKE: 0}}, "never struck"),
        ({"errors": ["server.log: Traceback (most recent call last):"]}, "Traceback"),
        ({"notes": []}, "no life executed all"),
    ],
)
def test_what_fails(judged, wrong, failure):
    found = judged(**wrong)
    assert any(failure in each for each in found), found


def test_every_episode_is_committed_once(judged, whole):
    first, second = whole.committed
    assert judged(committed=[second]) == [f"episode {first.level_seed} is missing"]
    assert judged(committed=[first, first, second]) == [f"episode {first.level_seed} was committed 2 times"]
