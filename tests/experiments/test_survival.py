"""Collapse and survival, against numbers worked by hand."""

import pytest
import survival


@pytest.mark.parametrize(
    ("successes", "index"),
    [
        ([0.5, 0.8, 0.39, 0.1, 0.2], 2),
        ([0.5, 0.8, 0.40, 0.1, 0.2], None),  # 0.40 is half of 0.8, and what comes after it is not confirmed.
        ([0.5, 0.8, 0.40, 0.1, 0.2, 0.0], 3),
        ([0.5, 0.8, 0.39, 0.5, 0.3, 0.2, 0.1], 4),  # The first fall was made up for.
        ([0.5, 0.8, 0.39, 0.1], None),
        ([0.59, 0.2, 0.1, 0.1, 0.1], None),  # Never 10 points over the floor.
        ([0.6, 0.2, 0.1, 0.1, 0.1], 1),
        ([], None),
    ],
)
def test_a_collapse_is_a_fall_under_half_of_the_best_that_stays(successes, index):
    assert survival.onset(successes, floor=0.5) == index


def test_kaplan_meier_and_restricted_mean_by_hand():
    # Four at risk at 10, one collapses: 3/4. One is censored at 15. Two at risk at 20, one collapses: 3/8.
    times = [survival.Time(20, True), survival.Time(15, False), survival.Time(10, True), survival.Time(30, False)]
    assert survival.kaplan_meier(times) == [(10, pytest.approx(3 / 4)), (20, pytest.approx(3 / 8))]
    assert survival.restricted_mean(times, 30) == pytest.approx(10 + 10 * 3 / 4 + 10 * 3 / 8)
    assert survival.restricted_mean(times, 12) == pytest.approx(10 + 2 * 3 / 4)
    assert survival.restricted_mean([survival.Time(30, False)] * 3, 30) == 30
    assert survival.restricted_mean([survival.Time(10, True)] * 3, 30) == 10


def test_later_by_hand():
    sound, early = survival.Time(30, False), survival.Time(10, True)
    same = survival.later([early, sound], [early, sound], 30)
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    # Three seeds gain 20: of 8 sign patterns, all plus and all minus are as far off.
    all_gain = survival.later([early] * 3, [sound] * 3, 30)
    assert (all_gain.difference, all_gain.low, all_gain.high) == (20, 20, 20)
    assert all_gain.p_value == pytest.approx(2 / 8)
    # One of three gains: any sign of it is as far off. Of bootstrapped means of 0, 0, 20 a share of 8/27 is 0.
    one = survival.later([early] * 3, [early, early, sound], 30)
    assert one.difference == pytest.approx(20 / 3)
    assert (one.low, one.high) == (0, pytest.approx(20))
    assert one.p_value == 1


def test_what_cannot_be_compared_is_refused():
    short = survival.Time(20, False)
    with pytest.raises(ValueError, match="paired seeds are needed, got 1 and 2"):
        survival.later([short], [short, short], 20)
    with pytest.raises(ValueError, match=r"censored at \[20\], before 30"):
        survival.later([short], [survival.Time(30, False)], 30)
