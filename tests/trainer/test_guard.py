"""The guard's alarms, on metrics written by hand."""

import json
from dataclasses import asdict

import pytest

from turngym_trainer.guard import Kind, Watch, watch

HEALTHY = {
    "train/group_std": 2.0,
    "average/train/group_std": 2.0,
    "average/train/reward": 5.0,
    "average/train/valid_format": 0.95,
    "update/entropy": 1.0,
    "average/update/entropy": 1.0,
    "update/gradient_norm": 1.0,
    "update/optimiser_steps": 1,
    "update/refused": 0,
}
NO_UPDATE = {"update/optimiser_steps": 0, "update/gradient_norm": None, "update/entropy": None}


def validation(successes: float, low: float, high: float) -> dict[str, float]:
    return {"validation/success": successes, "validation/low": low, "validation/high": high}


class Run:
    """Feeds the guard, keeping it as a checkpoint would."""

    def __init__(self, ceiling: float | None = 1.0):
        self.seen = Watch()
        self.iteration = 0
        self.ceiling = ceiling
        self.alarms = []

    def goes(self, iterations=1, **changes):
        for _ in range(iterations):
            self.iteration += 1
            metrics = {**HEALTHY, **changes, "iteration": self.iteration, "optimiser_step": 4 * self.iteration}
            self.seen, alarms = watch(self.seen, metrics, ceiling=self.ceiling)
            self.seen = Watch.from_plain(json.loads(json.dumps(asdict(self.seen))))
            self.alarms += alarms
        return self

    def told(self):
        return [(alarm.kind, alarm.iteration, alarm.since) for alarm in self.alarms]


def test_a_healthy_run_is_left_alone():
    run = Run().goes(60).goes(1, **validation(0.5, 0.4, 0.6)).goes(60)
    assert run.told() == []


COLLAPSED = {"average/train/group_std": 0.19, "average/train/reward": 3.9}


def test_spread_under_a_tenth_for_ten_updates_with_a_return_that_fell():
    run = Run().goes(20).goes(9, **COLLAPSED)
    assert run.told() == []
    run.goes(1, **COLLAPSED)
    assert run.told() == [(Kind.SPREAD, 30, 21)]
    assert run.alarms[0].optimiser_step == 120
    assert "spread by 0.19" in run.alarms[0].told
    assert "fell from 5 to 3.9" in run.alarms[0].told
    # It is told once, until the signal has recovered.
    assert len(run.goes(5, **COLLAPSED).told()) == 1
    assert len(run.goes(1).goes(10, **COLLAPSED).told()) == 2


@pytest.mark.parametrize(
    "sound",
    [
        {"average/train/group_std": 0.2, "average/train/reward": 3.9},
        {"average/train/group_std": 0.19, "average/train/reward": 4.0},
    ],
)
def test_spread_at_the_bound_or_without_a_fall_is_no_collapse(sound):
    assert Run().goes(20).goes(30, **sound).told() == []


def test_a_breach_that_is_broken_begins_anew():
    assert Run().goes(20).goes(9, **COLLAPSED).goes(1).goes(9, **COLLAPSED).told() == []


def test_entropy_is_looked_at_after_updates_only():
    off = {"average/update/entropy": 0.01, "average/train/reward": 3.9}
    run = Run().goes(20).goes(5, **off).goes(7, **{**off, **NO_UPDATE}).goes(5, **off)
    assert run.told() == [(Kind.ENTROPY, 37, 21)]


def test_groups_that_fare_alike_make_no_update_and_an_alarm():
    assert Run().goes(20).goes(10, **{**COLLAPSED, **NO_UPDATE}).told() == [(Kind.SPREAD, 30, 21)]


@pytest.mark.parametrize(("entropy", "alarms"), [(0.09, 1), (0.1, 0), (3.0, 0), (3.1, 1)])
def test_entropy_that_is_lost_or_explodes(entropy, alarms):
    off = {"average/update/entropy": entropy, "average/train/reward": 3.9}
    run = Run().goes(20).goes(10, **off)
    assert run.told() == [(Kind.ENTROPY, 30, 21)] * alarms


def test_a_solved_task_may_lose_spread_and_entropy():
    off = {**COLLAPSED, "average/update/entropy": 0.01}
    solved = validation(0.98, 0.96, 0.99)
    assert Run().goes(20).goes(1, **solved).goes(30, **off).told() == []
    # 0.96 of a ceiling of 1 is solved; of one that is not known it never is.
    assert {kind for kind, _, _ in Run(None).goes(20).goes(1, **solved).goes(30, **off).told()} == {
        Kind.SPREAD,
        Kind.ENTROPY,
    }
    assert Run().goes(20).goes(1, **validation(0.95, 0.94, 0.97)).goes(30, **off).told() != []


def test_three_gradient_spikes_within_fifty_updates():
    run = Run().goes(30)
    for _ in range(3):
        run.goes(1, **{"update/gradient_norm": 10.1}).goes(4)
    assert run.told() == [(Kind.GRADIENT, 41, 31)]
    far = Run().goes(30)
    for _ in range(3):
        far.goes(1, **{"update/gradient_norm": 10.1}).goes(30)
    assert far.told() == []
    assert Run().goes(30).goes(20, **{"update/gradient_norm": 10.0}).told() == []
    assert Run().goes(9).goes(3, **{"update/gradient_norm": 100.0}).told() == []  # No median yet.


def test_gradients_that_are_no_larger_than_at_the_start_are_no_spikes():
    # What a policy has that is nearly sure of everything; its rare gradients are many times their median.
    for norm, alarms in ((0.9, 0), (1.1, 1)):
        run = Run().goes(10).goes(40, **{"update/gradient_norm": 0.001})
        for _ in range(3):
            run.goes(1, **{"update/gradient_norm": norm}).goes(4, **{"update/gradient_norm": 0.001})
        assert [kind for kind, _, _ in run.told()] == [Kind.GRADIENT] * alarms


def test_format_that_falls_by_thirty_points():
    run = Run().goes(5).goes(3, **{"average/train/valid_format": 0.66})
    assert run.told() == []
    assert run.goes(1, **{"average/train/valid_format": 0.64}).told() == [(Kind.FORMAT, 9, 5)]


def test_a_fall_of_format_began_when_its_average_was_last_near_the_best():
    run = Run().goes(3, **{"average/train/valid_format": 0.99}).goes(20, **{"average/train/valid_format": 0.98})
    run.goes(2, **{"average/train/valid_format": 0.96}).goes(1, **{"average/train/valid_format": 0.69})
    assert run.told() == [(Kind.FORMAT, 26, 23)]


def test_success_under_half_of_the_best_for_three_validations():
    run = Run().goes(1, **validation(0.6, 0.5, 0.7))
    low = validation(0.15, 0.1, 0.24)
    run.goes(9).goes(1, **low).goes(9).goes(1, **low).goes(9)
    assert run.told() == []
    assert run.goes(1, **low).told() == [(Kind.SUCCESS, 31, 11)]
    fair = validation(0.2, 0.15, 0.25)
    assert Run().goes(1, **validation(0.6, 0.5, 0.7)).goes(5, **fair).told() == []


def test_five_refused_steps_in_a_row():
    refused = {**NO_UPDATE, "update/refused": 2}
    run = Run().goes(3).goes(2, **refused)
    assert run.told() == []
    assert run.goes(1, **refused).told() == [(Kind.REFUSED, 6, 4)]
    assert Run().goes(3).goes(2, **refused).goes(1).goes(2, **refused).told() == []
