"""Plans of trainings: what is kept of them, what is not done twice, and what the guard's experiment reads from them."""

import json
from dataclasses import replace

import guard_alarms
import pytest
from server_process import ServerProcess
from trainings import Trained, Training, Validation, Warned, read_results, train_all

TINY = ("environment.id=bandit", "environment.split=all", "validation.split=all", "rollout.max_response_tokens=6")
ONE = Training(
    "one",
    (
        *TINY,
        "run.iterations=2",
        "rollout.groups=2",
        "rollout.group_size=4",
        "rollout.stop_unreadable=false",
        "update.minibatch_episodes=4",
        "validation.every=1",
        "validation.episodes=4",
    ),
    "grpo",
    (
        *TINY,
        "warm_start.episodes=8",
        "warm_start.max_steps=2",
        "warm_start.check_every=2",
        "warm_start.check_episodes=4",
    ),
)


def test_a_plan_goes_on_with_what_is_left(tmp_path):
    results = tmp_path / "results.json"
    with ServerProcess("--env", "bandit", "--splits", "all") as server:
        found = train_all([ONE], server.address, tmp_path, results)
        one = found["one"]
        assert [each.iteration for each in one.validations] == [1, 2]
        assert one.episodes == (8, 16)
        assert (one.iterations, one.rollbacks, one.stopped, one.alarms) == (2, 0, "", ())
        assert read_results(results) == found
        assert json.loads(results.read_text())["code"]["packages"]["torch"]

        more = replace(ONE, name="more")
        again = train_all([ONE, more], server.address, tmp_path, results)
        assert again["one"] == one  # To the second that it took: it was not done again.
        assert replace(again["more"], name="one", seconds=one.seconds) == one
        assert len(json.loads((tmp_path / "starts.json").read_text())) == 1

        other = replace(ONE, settings=(*ONE.settings, "run.seed=1"))
        assert train_all([other], server.address, tmp_path, results)["one"].content != one.content


def trained(successes, alarms=()):
    validations = [Validation(3 * n, 2 * n, 8 * n, success, 0.0, 1.0) for n, success in enumerate(successes, 1)]
    warned = [Warned(kind, iteration, 2 * iteration // 3, "") for kind, iteration in alarms]
    return Trained("x", {"settings": []}, None, 0.0, tuple(validations), tuple(warned), 30, 0, "", (), (), 0.0)


@pytest.mark.parametrize(
    ("alarms", "kind", "late", "early", "in_time"),
    [
        ([], "none", None, 0, False),
        ([("success", 15), ("format", 12)], "format", 2, 0, True),
        ([("format", 8)], "format", -1, 0, True),  # Between the last sound validation, at 6, and the one at 9.
        ([("entropy", 6)], "none", None, 1, False),  # Before anything was wrong.
        ([("format", 30)], "format", 14, 0, True),
        ([("format", 33)], "format", 16, 0, False),
    ],
)
def test_how_late_an_alarm_is(alarms, kind, late, early, in_time):
    seen = guard_alarms.told(trained([0.7, 0.8, 0.3, 0.2, 0.1, 0.1], alarms))
    assert (seen.kind, seen.late, seen.early, seen.in_time) == (kind, late, early, in_time)
    assert (seen.collapse, seen.best, seen.end) == (6, 0.8, 0.1)


def test_what_does_not_collapse_has_no_alarm_in_time():
    seen = guard_alarms.told(trained([0.7, 0.8, 0.6], [("format", 9)]))
    assert (seen.collapse, seen.in_time, seen.best) == (None, False, 0.8)
