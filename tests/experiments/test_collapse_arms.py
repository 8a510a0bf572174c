"""What the collapse experiment makes of its trainings, on trainings written by hand."""

import collapse_arms
import pytest
from collapse_arms import ARMS, RATES, Panel
from survival import Time
from trainings import Trained, Validation


def trained(name, successes):
    """A validation every 4 iterations of 3 optimiser steps each."""
    validations = [Validation(4 * n, 4 * n, 12 * n, success, 0.0, 1.0) for n, success in enumerate(successes, 1)]
    played = [256 * n for n in range(1, len(successes) + 1)]
    return Trained(name, {}, None, 0.0, tuple(validations), (), 48, 0, "", tuple(played), tuple(played), 0.01)


SOUND = [0.6, 0.8, *[0.9] * 10]
FALLEN = [0.6, 0.8, 0.3, *[0.1] * 9]


def test_an_arm_gets_the_rate_with_which_it_ended_highest():
    found = {each.name: trained(each.name, SOUND) for each in collapse_arms.sweep(2)}
    assert collapse_arms.chosen_rates(found, 2) == dict.fromkeys(ARMS, RATES[0])  # Of several alike the lowest.
    for seed, end in ((collapse_arms.SWEEP_SEED, 0.7), (collapse_arms.SWEEP_SEED + 1, 1.0)):
        name = collapse_arms.training("bandit", "filter", RATES[1], seed).name
        found[name] = trained(name, [0.1, end, end, end])
    # 0.85 on average, where the others ended at 0.9.
    assert collapse_arms.chosen_rates(found, 2)["filter"] == RATES[0]
    name = collapse_arms.training("bandit", "filter", RATES[2], collapse_arms.SWEEP_SEED).name
    found[name] = trained(name, [0.1, 1.0, 1.0, 1.0])
    assert collapse_arms.chosen_rates(found, 2) == {**dict.fromkeys(ARMS, RATES[0]), "filter": RATES[2]}


def test_a_panel_has_the_seeds_for_which_all_its_arms_are_there():
    panel = Panel("two arms", "bandit", {"base": RATES[0], "filter": RATES[1]})
    plan = panel.plan(3)
    found = {each.name: trained(each.name, FALLEN if "base" in each.name else SOUND) for each in plan[:-1]}
    assert panel.seeds(found) == [0, 1]
    assert panel.of(found, "base") == [found[plan[0].name], found[plan[2].name]]
    lines = collapse_arms.table(panel, found)
    assert lines[0] == "two arms; 2 paired seeds"
    base = next(line for line in lines if line.startswith("base ")).split()
    # Ends at 0.1, which is 0.4 under the floor; both collapsed, at iteration 12 and step 36 of 144.
    assert base[1:] == [
        "0.0003",
        "-0.400",
        "-0.40",
        "-0.40",
        "2/2",
        "2/2",
        "12.0",
        "36",
        "144",
        "3072",
        "3072",
        "1.00%",
    ]
    later, higher = (line.split() for line in lines if line.startswith("filter ") and "p " in line)
    assert later == ["filter", "+36.0", "(+36.0", "to", "+36.0)", "p", "0.500,", "0.500"]
    assert higher == ["filter", "+0.800", "(+0.800", "to", "+0.800)", "p", "0.500,", "0.500"]
    assert "base           12: 0.00" in lines
    assert "filter         1.00 throughout" in lines


@pytest.mark.parametrize(
    ("successes", "iteration", "step"),
    [(SOUND, Time(48, False), Time(144, False)), (FALLEN, Time(12, True), Time(36, True))],
)
def test_both_clocks(successes, iteration, step):
    assert collapse_arms.times([trained("x", successes)]) == [iteration]
    assert collapse_arms.times([trained("x", successes)], "optimiser_step") == [step]
