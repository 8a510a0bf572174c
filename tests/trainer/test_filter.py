"""Which groups are learnt from."""

import math

import numpy as np
import pytest

from turngym_trainer.config import FilterConfig
from turngym_trainer.filter import FILTERS, spreads

# Four groups, of 3, 2, 4 and 1 members, interleaved. Spreads by hand:
# group 0: 0, 3, 6: mean 3, U² = (9 + 0 + 9)/2 = 9, U = 3.
# group 1: 5, 5: U = 0.
# group 2: 1, 1, 1, 5: mean 2, U² = (1 + 1 + 1 + 9)/3 = 4, U = 2.
# group 3: one member: U = 0.
GROUPS = np.array([2, 0, 1, 2, 0, 3, 2, 1, 0, 2])
RETURNS = np.array([1.0, 0.0, 5.0, 1.0, 3.0, 9.0, 1.0, 5.0, 6.0, 5.0])


def of(environments=("a",) * 10):
    return spreads(RETURNS, GROUPS, tuple(environments))


def kept(kind="std", environments=("a",) * 10, draws=(0.0, 0.0, 0.0, 0.0), **settings):
    return kept_of(of(environments), kind, draws, **settings)


def kept_of(spread, kind="std", draws=None, **settings):
    draws = np.zeros(len(spread.groups)) if draws is None else np.array(draws)
    return spread.groups[FILTERS[kind](spread, FilterConfig(kind=kind, **settings), draws)].tolist()


def test_spreads_by_hand():
    found = of()
    assert found.groups.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(found.std, [3.0, 0.0, 2.0, 0.0], rtol=1e-15)
    assert found.constant.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(0.01, [0]), (0.25, [0]), (0.26, [0, 2]), (0.5, [0, 2]), (1.0, [0, 2])],
    ids=["at least one", "1 of 4", "rounded up", "2 of 4", "never constant ones"],
)
def test_widest_groups_are_kept(keep, expected):
    assert kept(keep=keep) == expected


def test_share_is_of_each_environment():
    environments = ["b" if group in (2, 3) else "a" for group in GROUPS]
    assert kept(environments=environments, keep=0.25) == [0, 2]


def test_ties_go_to_the_lower_index():
    tied = spreads(np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0]), np.array([7, 7, 4, 4, 5, 5]), ("a",) * 6)
    assert kept_of(tied, keep=0.5) == [4, 5]
    assert kept_of(tied, "top_p", top_p=0.5) == [4, 5]


def test_ceiling_is_of_the_exact_product():
    pairs = np.arange(50) // 2
    wide = spreads(np.tile([0.0, 1.0], 25), pairs, ("a",) * 50)
    assert math.ceil(0.28 * 25) == 8  # What floating point makes of 7.
    assert len(kept_of(wide, keep=0.28)) == 7


def test_none_keeps_constant_groups_too():
    assert kept("none") == [0, 1, 2, 3]


def test_nothing_is_left_when_all_are_constant():
    flat = spreads(np.full(6, 0.3), np.array([0, 0, 0, 1, 1, 1]), ("a",) * 6)
    assert flat.constant.all()
    for kind in ("std", "top_p", "random"):
        assert kept_of(flat, kind, keep=1.0, top_p=1.0) == []


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.01, [0]), (0.6, [0]), (0.61, [0, 2]), (1.0, [0, 2])],
    ids=["at least one", "3 of 5 exactly", "a little more", "never constant ones"],
)
def test_top_p_keeps_the_fewest_that_hold_the_spread(top_p, expected):
    # U = 3, 0, 2, 0: the first holds 3/5 of it.
    assert kept("top_p", top_p=top_p) == expected


def test_top_p_of_one_keeps_all_that_spread_whatever_the_order_of_the_sum():
    rng = np.random.default_rng(0)
    for _ in range(200):
        spread = spreads(rng.normal(size=24), np.arange(24) // 2, ("a",) * 24)
        assert len(kept_of(spread, "top_p", top_p=1.0)) == 12


def test_top_p_is_of_each_environment():
    environments = ["b" if group in (2, 3) else "a" for group in GROUPS]
    assert kept("top_p", environments=environments, top_p=0.1) == [0, 2]


@pytest.mark.parametrize(
    ("draws", "keep", "expected"),
    [
        ((0.9, 0.1, 0.5, 0.2), 0.25, [1]),
        ((0.9, 0.1, 0.5, 0.2), 0.5, [1, 3]),
        ((0.9, 0.1, 0.5, 0.2), 1.0, [1, 3]),  # std would keep two: the others are constant.
        ((0.0, 0.1, 0.5, 0.2), 0.25, [0]),
    ],
)
def test_random_keeps_as_many_as_std(draws, keep, expected):
    assert kept("random", draws=draws, keep=keep) == expected
    assert len(expected) == len(kept("std", keep=keep))


def test_random_draws_in_each_environment():
    environments = ["b" if group in (2, 3) else "a" for group in GROUPS]
    assert kept("random", environments=environments, draws=(0.9, 0.1, 0.5, 0.2), keep=0.25) == [1, 3]


@pytest.mark.parametrize(("scale", "constant"), [(1.0, False), (100.0, True)])
def test_rounding_counts_against_the_size_of_returns(scale, constant):
    # U = 1e-5/√2 ≈ 7.1e-6: over 1e-6 · 1, under 1e-6 · 100.
    assert spreads(np.array([scale, scale + 1e-5]), np.array([0, 0]), ("a", "a")).constant.tolist() == [constant]
