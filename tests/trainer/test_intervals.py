"""Intervals of differences and of means over seeds."""

import pytest
from scipy import stats

from turngym_leaderboard import statistics as leaderboard
from turngym_trainer.intervals import mcnemar, mean_over_seeds, paired_difference, student_quantile


def test_a_paired_difference_by_hand():
    # Six worlds, two gained and one lost; with one gained and one lost more: 3 and 2 of 8, centre 1/8.
    first = [True, False, False, True, False, False]
    second = [False, True, True, True, False, False]
    told = paired_difference(first, second)
    half = 1.959964 * ((5 / 8 - 1 / 64) / 8) ** 0.5
    assert told.value == pytest.approx(1 / 6)
    assert (told.low, told.high) == (pytest.approx(1 / 8 - half), pytest.approx(1 / 8 + half))
    assert told.worlds == 6
    # One of three discordant worlds or fewer: (1 + 3)/8 on each side.
    assert told.p_value == 1.0


def test_a_paired_difference_is_the_leaderboards():
    first = [index % 3 == 0 for index in range(40)]
    second = [index % 3 == 0 or index % 7 == 1 for index in range(40)]
    ours = paired_difference(first, second)
    theirs = leaderboard.paired_difference([[won] for won in first], [[won] for won in second])
    assert ours.value == pytest.approx(theirs.value)
    assert (ours.low, ours.high) == (pytest.approx(theirs.interval.low), pytest.approx(theirs.interval.high))
    assert ours.p_value == pytest.approx(theirs.p_value)


def test_runs_that_do_not_differ_have_an_interval_still():
    told = paired_difference([True] * 10, [True] * 10)
    assert told.low < told.value == 0 < told.high
    assert told.p_value == 1.0


@pytest.mark.parametrize(("first", "second"), [([], []), ([True], [True, False])], ids=["none", "other worlds"])
def test_what_cannot_be_paired_is_refused(first, second):
    with pytest.raises(ValueError, match="needs the same worlds twice"):
        paired_difference(first, second)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (5, 0), (3, 4), (12, 2)])
def test_mcnemar_is_the_binomial_test(gained, lost):
    expected = stats.binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 31, 200])
def test_students_quantile(freedom):
    assert student_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-6)


def test_a_mean_over_seeds_by_hand():
    # 1, 2 and 6: mean 3, standard deviation √7, and t = 4.302653 at two degrees of freedom.
    told = mean_over_seeds([1.0, 2.0, 6.0])
    half = 4.302653 * 7**0.5 / 3**0.5
    assert (told.value, told.low, told.high) == (3.0, pytest.approx(3 - half), pytest.approx(3 + half))
    alone = mean_over_seeds([0.5])
    assert (alone.value, alone.low, alone.high) == (0.5, None, None)
    with pytest.raises(ValueError, match="at least one"):
        mean_over_seeds([])
