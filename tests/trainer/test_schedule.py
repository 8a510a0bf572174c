"""Phases and rates, by hand."""

import json
import math

import pytest

from turngym_trainer.config import HorizonConfig, UpdateConfig, WarmStartConfig
from turngym_trainer.schedule import Phase, after_validation, phase_at, rate_share, turns_at, warm_start_rate

THREE = HorizonConfig(turns=(10, 20, 30), iterations=4)


def test_phases_of_so_many_iterations():
    turns = [turns_at(THREE, iteration, Phase(), 7) for iteration in range(1, 15)]
    assert turns == [10] * 4 + [20] * 4 + [30] * 6


def test_without_phases_there_is_one_horizon():
    assert [turns_at(HorizonConfig(), iteration, Phase(), 7) for iteration in (1, 500)] == [7, 7]


def validated(config, *successes):
    phase, phases = Phase(), []
    for success in successes:
        phase = after_validation(config, phase, success)
        phase = Phase.from_plain(json.loads(json.dumps(phase.plain())))
        phases.append(phase_at(config, 1, phase))
    return phases


def test_a_phase_ends_when_validation_has_stopped_rising():
    config = HorizonConfig(turns=(5, 8, 10), until="validation", patience=2)
    #                       rises            stale  ends  a new best begins the next phase
    assert validated(config, 0.1, 0.2, 0.3, 0.3, 0.25, 0.1, 0.1, 0.2, 0.2, 0.1, 0.0, 0.0) == [
        *(0, 0, 0, 0, 1),
        *(1, 1, 1, 1, 2, 2, 2),
    ]
    assert validated(HorizonConfig(turns=(5,), until="validation", patience=1), 0.1, 0.1, 0.1, 0.1) == [0] * 4


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, [1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        ({"warmup_iterations": 2}, [0.5, 1, 1, 1]),
        ({"schedule": "linear", "warmup_iterations": 2}, [0.5, 1, 1, 0.5]),
    ],
)
def test_rates(settings, shares):
    config = UpdateConfig(**settings)
    assert [rate_share(config, iteration, 4) for iteration in (1, 2, 3, 4)] == pytest.approx(shares)


def test_rates_of_a_warm_start():
    falling = WarmStartConfig(learning_rate=0.1, schedule="linear", max_steps=100)
    steps = (1, 25, 50, 51, 100)
    rising = [0.02, 0.5, 1, 1, 1]
    assert [warm_start_rate(falling, step) for step in steps] == pytest.approx(
        [0.1 * share * left for share, left in zip(rising, [1, 0.76, 0.51, 0.5, 0.01], strict=True)]
    )
    steady = falling.model_copy(update={"schedule": "constant"})
    assert [warm_start_rate(steady, step) for step in steps] == pytest.approx([0.1 * share for share in rising])
