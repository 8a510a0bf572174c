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


def kept(kind="std", environments=("a",) * 10, **settings):
    found = of(environments)
    return found.groups[FILTERS[kind](found, FilterConfig(kind=kind, **settings))].tolist()


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
    assert tied.groups[FILTERS["std"](tied, FilterConfig(keep=0.5))].tolist() == [4, 5]


def test_ceiling_is_of_the_exact_product():
    pairs = np.arange(50) // 2
    wide = spreads(np.tile([0.0, 1.0], 25), pairs, ("a",) * 50)
    assert math.ceil(0.28 * 25) == 8  # What floating point makes of 7.
    assert int(FILTERS["std"](wide, FilterConfig(keep=0.28)).sum()) == 7


def test_none_keeps_constant_groups_too():
    assert kept("none") == [0, 1, 2, 3]


def test_nothing_is_left_when_all_are_constant():
    flat = spreads(np.full(6, 0.3), np.array([0, 0, 0, 1, 1, 1]), ("a",) * 6)
    assert flat.constant.all()
    assert not FILTERS["std"](flat, FilterConfig(keep=1.0)).any()


@pytest.mark.parametrize(("scale", "constant"), [(1.0, False), (100.0, True)])
def test_rounding_counts_against_the_size_of_returns(scale, constant):
    # U = 1e-5/√2 ≈ 7.1e-6: over 1e-6 · 1, under 1e-6 · 100.
    assert spreads(np.array([scale, scale + 1e-5]), np.array([0, 0]), ("a", "a")).constant.tolist() == [constant]
