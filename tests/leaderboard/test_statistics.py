"""Statistics against published tables, numbers worked by hand, and simulated coverage."""

import itertools
import math
from dataclasses import astuple

import numpy as np
import pytest
from scipy import stats

from turngym_leaderboard import binomial
from turngym_leaderboard import statistics as st
from turngym_leaderboard.binomial import Interval

# Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I.
NEWCOMBE = [
    (81, 263, (0.2553, 0.3662), (0.2527, 0.3676)),
    (15, 148, (0.0624, 0.1605), (0.0578, 0.1617)),
    (0, 20, (0.0, 0.1611), (0.0, 0.1684)),
    (1, 29, (0.0061, 0.1718), (0.0009, 0.1776)),
]


@pytest.mark.parametrize(("successes", "n", "wilson", "exact"), NEWCOMBE)
def test_intervals_of_one_proportion_are_newcombes(successes, n, wilson, exact):
    for interval, expected in (
        (binomial.wilson(successes, n), wilson),
        (binomial.clopper_pearson(successes, n), exact),
    ):
        assert (interval.low, interval.high) == pytest.approx(expected, abs=6e-5)


def test_all_solved_mirrors_none_solved():
    none, every = binomial.clopper_pearson(0, 20), binomial.clopper_pearson(20, 20)
    assert (every.low, every.high) == (pytest.approx(1 - none.high), 1.0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 20))


def test_effective_n_by_hand():
    # Means 1, .5, 0, 0: p̂ = 3/8, s² = (25 + 1 + 9 + 9)/64/3 = 11/48, v = 11/192, p̂(1 − p̂)/v = 15/64 · 192/11 = 45/11.
    result = st.success([[True, True], [True, False], [False, False], [False, False]])
    assert result.rate == 3 / 8
    assert result.effective_n == pytest.approx(45 / 11)
    assert (result.instances, result.episodes) == (4, 8)
    expected = binomial.clopper_pearson(3 / 8 * 45 / 11, 45 / 11)
    assert (result.interval.low, result.interval.high) == pytest.approx((expected.low, expected.high))


def test_effective_n_is_clipped_between_instances_and_episodes():
    # Every instance at 1/2: no spread at all between instances counts as I, not as infinitely many.
    assert st.success([[True, False]] * 10).effective_n == 10
    # Means 1, 0, 1, 0 …: attempts agree, so they are worth one each: p̂(1 − p̂)/v = I − 1, clipped to I.
    assert st.success([[True] * 4, [False] * 4] * 5).effective_n == 10
    # Means 1/2 and 3/4 alternating, I = 10: v = (1/8)² · 10/9 / 10, ratio 135, clipped to 40.
    assert st.success([[True, False, True, False], [True, True, True, False]] * 5).effective_n == 40
    assert st.success([[True]]).effective_n == 1


def test_few_successes_do_not_pass_for_independent():
    # One of 1,024 attempts, four on each instance. Means sum to 1/4, their squares to 1/16. Added: 1 - (1/1024)/0.012.
    outcomes = [[True, False, False, False]] + [[False] * 4] * 255
    added = 1 - (1 / 1024) / 0.012
    total, p = 256 + 2 * added, (1 / 4 + added) / (256 + 2 * added)
    variance = (1 / 16 + added - total * p * p) / (total - 1) / total
    assert st.success(outcomes).effective_n == pytest.approx(p * (1 - p) / variance * 256 / total)
    assert 300 < st.success(outcomes).effective_n < 310  # It was 1,023, and the upper end 0.5 %.
    none = st.success([[False] * 4] * 256)
    assert none.effective_n == 256
    assert st.success(outcomes).interval.high == pytest.approx(none.interval.high, abs=0.0005)
    # From 0.012 on nothing is added.
    means = np.array([1 / 4] * 13 + [0.0] * 243)
    plain = means.mean() * (1 - means.mean()) / (means.var(ddof=1) / 256)
    assert st.effective_n(means, 4 * 256) == pytest.approx(min(plain, 1024))


@pytest.mark.parametrize(("rate", "attempts"), [(0.004, 8), (0.007, 4), (0.996, 8)])
def test_success_interval_covers_extreme_rates_of_attempts_that_are_alike(rate, attempts):
    # Correlation of attempts 0.6: 89 % and 93.5 % before.
    draws, covered = np.random.default_rng([attempts, round(1000 * rate)]), 0
    for _ in range(1500):
        chances = draws.beta(rate * 2 / 3, (1 - rate) * 2 / 3, 256)
        interval = st.success((draws.random((256, attempts)) < chances[:, None]).tolist()).interval
        covered += interval.low <= rate <= interval.high
    assert covered / 1500 >= 0.95


def test_method_by_size_and_rate():
    def solved(instances, successes):
        return st.success([[i < successes] for i in range(instances)])

    assert solved(255, 100).method == "clopper-pearson"
    assert solved(256, 100).method == "wilson"
    assert solved(300, 5).method == "clopper-pearson"
    assert solved(300, 6).method == "wilson"
    assert solved(300, 294).method == "wilson"
    assert solved(300, 295).method == "clopper-pearson"
    interval, expected = solved(400, 120).interval, binomial.wilson(120, 400)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize("outcomes", [[], [[]], [[True], []]])
def test_nothing_to_average_is_an_error(outcomes):
    with pytest.raises(ValueError, match="at least one"):
        st.success(outcomes)


OUTCOMES = [[True], [False], [True], [False]]
FLOORS = [0.25, 0.25, 0.5, 0.0]
CEILINGS = [1.0, 1.0, 1.0, 0.25]


def test_normalised_by_hand():
    # Σ(s − f) = 1, Σ(c − f) = 9/4, ν = 4/9. Residuals 15, −21, 10 and −4 of 36; their squares sum to 782/36².
    result = st.normalised(OUTCOMES, FLOORS, CEILINGS)
    error = math.sqrt(782 / 36**2 / 3) / (2 * 0.5625)
    assert result.value == pytest.approx(4 / 9)
    assert result.standard_error == pytest.approx(error)
    assert (result.floor, result.ceiling, result.method) == (0.25, 0.8125, "linearised")
    # t of 3 degrees of freedom at 97.5 % is 3.182446.
    assert (result.interval.low, result.interval.high) == pytest.approx(
        (4 / 9 - 3.182446 * error, 4 / 9 + 3.182446 * error), abs=1e-6
    )


def test_normalised_is_not_clipped_below_the_floor():
    assert st.normalised([[False], [True], [False], [False]], [0.5] * 4, [1.0] * 4).value == pytest.approx(-0.5)


def test_normalised_when_everything_was_solved_keeps_an_interval():
    result = st.normalised([[True]] * 20, [0.2] * 20, [1.0] * 20)
    assert (result.value, result.standard_error, result.interval.high) == pytest.approx((1.0, 0.0, 1.0))
    assert result.interval.low == pytest.approx((0.025 ** (1 / 20) - 0.2) / 0.8)


def test_bootstrap_when_everything_was_solved_keeps_an_interval():
    floors = [1.0, 0.0, 0.0, 0.0, 0.0] * 6
    result = st.normalised_by_bootstrap([[True]] * 30, floors, [1.0] * 30, seed=0, resamples=500)
    assert (result.value, result.interval.high, result.method) == (1.0, 1.0, "bootstrap")
    assert result.interval.low == pytest.approx((0.025 ** (1 / 30) - 0.2) / 0.8)


@pytest.mark.parametrize(
    ("floors", "ceilings", "message"),
    [([0.5] * 4, [0.5] * 4, "not above"), ([0.5] * 3, [1.0] * 4, "expected as many")],
)
def test_normalised_where_it_is_undefined(floors, ceilings, message):
    for form in (st.normalised, lambda *sides: st.normalised_by_bootstrap(*sides, seed=0)):
        with pytest.raises(ValueError, match=message):
            form(OUTCOMES, floors, ceilings)


def test_bootstrap_agrees_with_the_linearised_error_and_repeats_by_seed():
    generator = np.random.default_rng(5)
    floors = generator.uniform(0, 0.4, 400)
    outcomes = [[bool(x)] for x in generator.random(400) < 0.3 + 0.7 * floors]
    linear = st.normalised(outcomes, floors.tolist(), [1.0] * 400)
    boot = st.normalised_by_bootstrap(outcomes, floors.tolist(), [1.0] * 400, seed=1, resamples=4000)
    assert boot.value == pytest.approx(linear.value)
    assert boot.standard_error == pytest.approx(linear.standard_error, rel=0.06)
    assert boot == st.normalised_by_bootstrap(outcomes, floors.tolist(), [1.0] * 400, seed=1, resamples=4000)
    assert boot != st.normalised_by_bootstrap(outcomes, floors.tolist(), [1.0] * 400, seed=2, resamples=4000)


def test_bootstrap_over_two_instances_by_enumeration():
    # Instances (s, f, c) = (1, 0, 1) and (0, 1/2, 1). Resamples: ν = 1 (1/4), (1 − 1/2)/(3/2) = 1/3 (1/2), −1 (1/4).
    values = np.array([1, 1 / 3, 1 / 3, -1])
    result = st.normalised_by_bootstrap([[True], [False]], [0.0, 0.5], [1.0, 1.0], seed=3, resamples=20_000)
    assert result.value == pytest.approx(1 / 3)
    assert result.standard_error == pytest.approx(values.std(), rel=0.02)
    assert (result.interval.low, result.interval.high) == (-1, 1)


def test_paired_difference_by_hand():
    # Ten instances: three gained, one lost. Enlarged by one of each: shares 4/12 and 2/12, centre 1/6.
    first = [[False]] * 3 + [[True]] + [[True]] * 2 + [[False]] * 4
    second = [[True]] * 3 + [[False]] + [[True]] * 2 + [[False]] * 4
    result = st.paired_difference(first, second)
    half = 1.959964 * math.sqrt((6 / 12 - 1 / 36) / 12)
    assert result.value == pytest.approx(0.2)
    assert (result.interval.low, result.interval.high) == pytest.approx((1 / 6 - half, 1 / 6 + half), abs=1e-6)
    # Two-sided: 2 · (C(4,0) + C(4,1))/2⁴.
    assert (result.p_value, result.test, result.instances) == (pytest.approx(10 / 16), "mcnemar", 10)
    mirrored = st.paired_difference(second, first)
    assert (mirrored.value, mirrored.interval.low) == pytest.approx((-0.2, -result.interval.high))


def test_paired_difference_of_equals_is_not_certain():
    result = st.paired_difference([[True]] * 50, [[True]] * 50)
    assert (result.value, result.p_value) == (0.0, 1.0)
    assert result.interval.low < 0 < result.interval.high


def test_paired_difference_over_several_attempts_uses_the_sign_flip_test():
    # Differences of shares 1/2, 1, −1/2 → in attempts 1, 2, −1: sums ±1 ± 2 ± 1 reach 2 in six of eight patterns.
    first = [[False, False], [False, False], [True, False]]
    second = [[True, False], [True, True], [False, False]]
    result = st.paired_difference(first, second)
    assert (result.p_value, result.test) == (pytest.approx(6 / 8), "sign-flip")
    assert result.value == pytest.approx(1 / 3)


def test_where_test_and_interval_disagree_it_is_said_which_decides():
    # Six instances on which the second solves one of two attempts, the first none: all signs alike in 2 of 2⁶ patterns.
    # Enlarged by 1 and −1: mean 3/8, mean square (6/4 + 2)/8 = 7/16.
    gained = st.paired_difference([[False, False]] * 6, [[True, False]] * 6)
    half = 1.959964 * math.sqrt((7 / 16 - 9 / 64) / 8)
    assert gained.p_value == pytest.approx(2 / 64)
    assert gained.interval.low == pytest.approx(3 / 8 - half, abs=1e-6)
    assert gained.interval.low < 0
    told = st.disagreement(gained.p_value, gained.interval, gained.instances)
    assert told.startswith("The interval holds 0, but the test finds a difference: the test decides, since it is exact")
    assert told.endswith("rough over 6 instances")
    unseen = st.disagreement(0.06, Interval(-0.4, -0.01), 9)
    assert unseen.startswith("The interval leaves out 0, but the test finds no difference: the test decides")
    assert st.disagreement(0.05, Interval(0.01, 0.4), 9) == st.disagreement(0.06, Interval(0.0, 0.4), 9) == ""


def test_paired_difference_refuses_unpaired_agents():
    with pytest.raises(ValueError, match="same instances"):
        st.paired_difference([[True], [True]], [[True]])


@pytest.mark.parametrize(("gained", "lost", "p"), [(10, 2, 158 / 4096), (2, 10, 158 / 4096), (0, 0, 1), (5, 5, 1)])
def test_mcnemar_by_hand(gained, lost, p):
    assert st.mcnemar(gained, lost) == pytest.approx(p)
    assert st.sign_flip([1] * gained + [-1] * lost + [0] * 7) == pytest.approx(p)


def test_sign_flip_against_enumeration():
    differences = [3, -1, 2, 2, -4, 0, 1, 5]
    observed = abs(sum(differences))
    patterns = list(itertools.product((1, -1), repeat=len(differences)))
    extreme = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= observed for signs in patterns]
    assert st.sign_flip(differences) == pytest.approx(sum(extreme) / len(patterns))


def test_mean_of_scores_by_hand():
    intervals = [Interval(0.1, 0.9), Interval(0.57, 1.2)]
    mean, error, interval = st.mean_score([0.4, 0.97], [0.12, 0.05], intervals)
    # Errors 12 and 5 make 13, sides 30 and 40 make 50 below, 50 and 23 make √3029 above; of two scores, half of each.
    assert (mean, error) == pytest.approx((0.685, 0.065))
    assert (interval.low, interval.high) == pytest.approx((0.685 - 0.25, 0.685 + math.sqrt(0.3029) / 2))
    alone = Interval(0.25, 0.75)
    assert st.mean_score([0.5], [0.125], [alone]) == (0.5, 0.125, alone)
    for sides in (([], [], []), ([0.4], [0.1], intervals)):
        with pytest.raises(ValueError, match="one or more"):
            st.mean_score(*sides)


def test_pass_at_k_by_hand():
    outcomes = [[True, False, False, False], [True, True, True, False]]
    # k = 2: 1 − C(3,2)/C(4,2) = 1/2 and 1 − 0; C(1,2) = 0 and C(3,2)/C(4,2) = 1/2.
    assert st.pass_at_k(outcomes, 2) == pytest.approx(3 / 4)
    assert st.pass_hat_k(outcomes, 2) == pytest.approx(1 / 4)
    assert st.pass_at_k(outcomes, 1) == st.pass_hat_k(outcomes, 1) == pytest.approx(1 / 2)
    for k in (0, 5):
        with pytest.raises(ValueError, match="least attempts"):
            st.pass_at_k(outcomes, k)


def test_holm_by_hand():
    assert st.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert st.holm([0.9, 0.8]) == (1.0, 1.0)
    assert st.holm([]) == ()


def test_unresolved_bounds_by_hand():
    bounds = st.unresolved_bounds([[True, None], [False, False], [None, None]])
    assert (bounds.low, bounds.high) == pytest.approx((0.5 / 3, (1 + 0 + 1) / 3))


def simulated(generator, instances, attempts):
    """Attempts on instances whose own success probabilities are spread from never to always; true rate 1/2."""
    rates = generator.beta(0.5, 0.5, instances)
    return (generator.random((instances, attempts)) < rates[:, None]).tolist()


def test_success_interval_covers_what_it_promises_where_the_plain_one_does_not():
    generator = np.random.default_rng(11)
    clustered = plain = 0
    for _ in range(400):
        outcomes = simulated(generator, 300, 4)
        interval = st.success(outcomes).interval
        clustered += interval.low <= 0.5 <= interval.high
        interval = binomial.wilson(sum(map(sum, outcomes)), 1200)
        plain += interval.low <= 0.5 <= interval.high
    # Three standard errors of a coverage of 95 % over 400 repetitions are 3.3 points.
    assert clustered / 400 >= 0.917
    assert plain / 400 <= 0.85


def test_small_success_interval_never_covers_less_than_it_promises():
    for rate in (0.02, 0.3, 0.5, 0.95):
        intervals = [st.success([[i < k] for i in range(40)]).interval for k in range(41)]
        covered = sum(float(stats.binom.pmf(k, 40, rate)) for k, i in enumerate(intervals) if i.low <= rate <= i.high)
        assert covered >= 0.95


@pytest.mark.parametrize("instances", [256, 264, 272, 300, 340, 1024])
def test_success_interval_covers_what_it_promises_at_every_rate(instances):
    # Exactly, by the binomial distribution: 93 to 97 % from 0.02 to 0.98, where 256 instances came to 97.9 % once, and
    # at least 95 % beyond.
    counts = np.arange(instances + 1)
    intervals = [st.success([[i < k] for i in range(instances)]).interval for k in counts]
    low, high = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
    assert (np.diff(low) >= 0).all()
    assert (np.diff(high) >= 0).all()
    assert low == pytest.approx(1 - high[::-1])
    rates = np.concatenate(
        [np.arange(0.0005, 0.02, 0.00005), np.arange(0.02, 0.04, 0.00005), np.arange(0.04, 0.5, 0.01)]
    )
    for p in (rates, 1 - rates):
        chances = stats.binom.pmf(counts, instances, p[:, None])
        coverage = (chances * ((low <= p[:, None]) & (p[:, None] <= high))).sum(1)
        inside = rates >= 0.02
        assert coverage[~inside].min() >= 0.95
        assert coverage[inside].min() >= 0.93
        assert coverage[inside].max() <= 0.97


def test_what_an_interval_can_spare_by_hand():
    # Of 256 episodes, 10 solved: Clopper–Pearson's lower end, 0.0189, is beyond 0.02. Without it rates from there to
    # 0.02 are still covered with 95.8 % or more (1 to 9 solved), so the lower end is Wilson's own. Once 10 cover a rate
    # 1 need not: 2 to 10 have more than 94 % then.
    ten, one = binomial.joined(10, 256), binomial.joined(1, 256)
    assert ten.low == binomial.wilson(10, 256).low == pytest.approx(0.0213, abs=1e-4)
    assert one.high == ten.low < binomial.clopper_pearson(1, 256).high
    assert binomial.clopper_pearson(10, 256).low == pytest.approx(0.0189, abs=1e-4)
    # Where nothing can be spared, or nothing meets, it is one of the two.
    for k, n, method in (
        (40, 256, binomial.wilson),
        (2, 300, binomial.clopper_pearson),
        (150, 300, binomial.wilson),
        (700, 1024, binomial.wilson),
        (1023, 1024, binomial.clopper_pearson),
    ):
        assert astuple(binomial.joined(k, n)) == pytest.approx(astuple(method(k, n)))


def test_ends_of_fractional_counts_lie_between_those_of_whole_ones():
    fifth, sixth = astuple(binomial.joined(5, 256)), astuple(binomial.joined(6, 256))
    halfway = [(a + b) / 2 for a, b in zip(fifth, sixth, strict=True)]
    assert astuple(binomial.joined(5.5, 256)) == pytest.approx(halfway)
    assert astuple(binomial.joined(250.5, 256)) == pytest.approx([1 - end for end in reversed(halfway)])
    assert astuple(binomial.joined(5 * 256.2 / 256, 256.2)) == pytest.approx(fifth)
    assert binomial.joined(0.0, 300.7).low == 0.0
    assert binomial.joined(300.7, 300.7).high == 1.0
    for successes, n in ((-1, 256), (257, 256), (0, 0)):
        with pytest.raises(ValueError, match="cannot have succeeded"):
            binomial.joined(successes, n)


def test_normalised_and_paired_intervals_cover_what_they_promise():
    generator = np.random.default_rng(12)
    ratio = paired = 0
    for _ in range(400):
        floors = generator.uniform(0, 0.4, 300)
        ceilings = generator.uniform(0.6, 1.0, 300)
        # Each instance is solved with probability f + (c − f)/2, so ν is 1/2.
        first = (generator.random((300, 1)) < ((floors + ceilings) / 2)[:, None]).tolist()
        interval = st.normalised(first, floors.tolist(), ceilings.tolist()).interval
        ratio += interval.low <= 0.5 <= interval.high
        second = (generator.random((300, 1)) < ((floors + ceilings) / 2 + 0.1)[:, None]).tolist()
        interval = st.paired_difference(first, second).interval
        paired += interval.low <= 0.1 <= interval.high
    assert 0.917 <= ratio / 400 <= 0.983
    assert 0.917 <= paired / 400 <= 0.983
