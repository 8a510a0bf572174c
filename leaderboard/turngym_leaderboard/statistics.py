"""Scores with their intervals, and tests between agents. Pure functions; knows nothing of episodes, agents or servers.

An *instance* is one level and the cluster of every interval: attempts on one instance are not independent of each
other (plain Wilson over four attempts covers 73–92 % where it promises 95 %). Letters: I instances, m attempts each.

Sources: Wilson (JASA 1927) and Clopper and Pearson (Biometrika 1934) at an effective sample size (Kish 1965); Cochran,
"Sampling Techniques", 3rd ed., chapter 6, for ratios; Zou and Donner (Statistics in Medicine 2008) for means of scores;
Bonett and Price (2012) for paired differences; Chen et al. (arXiv 2107.03374) for pass@k; Yao et al. (arXiv 2406.12045)
for pass^k; Holm (1979).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

import numpy as np
from scipy import stats

from turngym_leaderboard import binomial
from turngym_leaderboard.binomial import Floats, Interval

EXACT_BELOW: Final = 256
"""With fewer instances the success interval is Clopper–Pearson's at any rate."""
_FEW: Final = 0.012
"""Up to this rate, and from 1 less it, how much attempts are alike is in doubt: see `effective_n`."""


@dataclass(frozen=True, slots=True)
class Success:
    """A success rate.

    Attributes:
        rate: mean over instances of the share of attempts that succeeded.
        instances: I.
        episodes: attempts over all instances.
        effective_n: how many independent episodes the attempts are worth, I to `episodes`.
        method: "wilson" or "clopper-pearson".
    """

    rate: float
    interval: Interval
    instances: int
    episodes: int
    effective_n: float
    method: str


@dataclass(frozen=True, slots=True)
class Normalised:
    """Where a score lies between floor (0) and ceiling (1); not clipped.

    Attributes:
        floor, ceiling: means over the instances played.
        method: "linearised", "clopper-pearson" or "bootstrap".
    """

    value: float
    standard_error: float
    interval: Interval
    floor: float
    ceiling: float
    method: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Success of one agent less that of another on the same instances.

    Attributes:
        value: mean over instances of the difference of their success shares.
        p_value: two-sided, of the exact test that the sign of each instance's difference is a coin flip.
        test: "mcnemar" or "sign-flip".
    """

    value: float
    interval: Interval
    instances: int
    p_value: float
    test: str


def success(outcomes: Sequence[Sequence[bool]], confidence: float = 0.95) -> Success:
    """Success rate with an interval clustered by instance.

    p̂ = mean of the instances' means, v = s²(means)/I, n_eff = clip(p̂(1 − p̂)/v, I, I·m), or I when v = 0; for p̂ near 0
    or 1 see `effective_n`. The interval is that of p̂·n_eff successes in n_eff: Clopper–Pearson's below 256 instances or
    where p̂ is outside [0.02, 0.98], else Wilson's (see `binomial.joined`).

    Args:
        outcomes: one sequence of attempts for each instance.

    Raises:
        ValueError: there are no instances, or one has no attempts.
    """
    means = instance_means(outcomes)
    instances, episodes = len(outcomes), sum(len(attempts) for attempts in outcomes)
    rate = float(means.mean())
    n = effective_n(means, episodes)
    exact = instances < EXACT_BELOW or binomial.is_extreme(rate)
    of_rate = binomial.clopper_pearson if instances < EXACT_BELOW else binomial.joined
    return Success(
        rate=rate,
        interval=of_rate(rate * n, n, confidence),
        instances=instances,
        episodes=episodes,
        effective_n=n,
        method="clopper-pearson" if exact else "wilson",
    )


def instance_means(outcomes: Sequence[Sequence[bool]]) -> Floats:
    """Share of attempts that succeeded, for each instance. Raises ValueError where there is nothing to average."""
    if not outcomes or any(len(attempts) == 0 for attempts in outcomes):
        raise ValueError("a success rate needs at least one instance, and at least one attempt on each")
    return np.array([sum(attempts) / len(attempts) for attempts in outcomes], dtype=np.float64)


def effective_n(means: Floats, episodes: int) -> float:
    """Independent episodes that these instance means are worth: clip(p̂(1 − p̂)/v, I, episodes); I when v = 0.

    A few successes, or failures, tell little of how much attempts on one instance are alike: where they happen to lie
    on instances of their own they look independent. So one instance that is always solved and one that never is are
    added, in full at p̂ = 0 and less and less up to 0.012, and likewise near 1.
    """
    instances = len(means)
    rate = float(means.mean())
    added = max(0.0, 1 - min(rate, 1 - rate) / _FEW)
    total = instances + 2 * added
    if total <= 1:
        return float(instances)
    p = (float(means.sum()) + added) / total
    variance = (float(np.square(means - p).sum()) + added * (p * p + (1 - p) ** 2)) / (total - 1) / total
    if variance <= 0.0:
        return float(instances)
    return min(max(p * (1 - p) / variance * instances / total, float(instances)), float(episodes))


def normalised(
    outcomes: Sequence[Sequence[bool]], floors: Sequence[float], ceilings: Sequence[float], confidence: float = 0.95
) -> Normalised:
    """ν = Σ(s_i − f_i)/Σ(c_i − f_i) with exact floors and ceilings of the instances played.

    SE = sd(s_i − f_i − ν(c_i − f_i))/(√I · mean(c − f)), interval ν ± t·SE with I − 1 degrees of freedom. Where the
    success interval is Clopper–Pearson's because the rate is extreme, the residuals have too little spread to tell
    anything (none at all when everything was solved); the interval is then that one's image.

    Raises:
        ValueError: lengths differ, fewer than two instances, or the mean ceiling is not above the mean floor.
    """
    scores, floor, ceiling = instance_means(outcomes), np.array(floors, float), np.array(ceilings, float)
    value = normalised_value(scores, floor, ceiling)
    instances, span = len(scores), float((ceiling - floor).mean())
    if instances < 2:
        raise ValueError("the spread of a normalised score needs at least two instances")
    residuals = scores - floor - value * (ceiling - floor)
    error = float(residuals.std(ddof=1)) / (math.sqrt(instances) * span)
    rate = success(outcomes, confidence)
    if not binomial.is_extreme(rate.rate):
        half = float(cast(float, stats.t.ppf((1 + confidence) / 2, instances - 1))) * error
        interval, method = Interval(value - half, value + half), "linearised"
    else:
        interval, method = _image(rate.interval, floor, ceiling), rate.method
    return Normalised(value, error, interval, float(floor.mean()), float(ceiling.mean()), method)


def normalised_by_bootstrap(
    outcomes: Sequence[Sequence[bool]],
    floors: Sequence[float],
    ceilings: Sequence[float],
    seed: int,
    resamples: int = 10_000,
    confidence: float = 0.95,
) -> Normalised:
    """ν with floors or ceilings that were themselves estimated by play on the same instances.

    Score, floor and ceiling of an instance are resampled together, so the floor's own noise is in the interval
    (percentile). Resamples whose ceiling is not above their floor are left out. Where the rate is extreme the interval
    is widened to the image of the success interval, for the reason given in `normalised`.

    Raises:
        ValueError: lengths differ, or the mean ceiling is not above the mean floor.
    """
    scores, floor, ceiling = instance_means(outcomes), np.array(floors, float), np.array(ceilings, float)
    value = normalised_value(scores, floor, ceiling)
    generator = np.random.Generator(np.random.Philox(key=seed))
    instances = len(scores)
    above, span = scores - floor, ceiling - floor
    values: list[Floats] = []
    for start in range(0, resamples, 500):  # 500 rows of indices at a time bound the memory at any I.
        picks = generator.integers(0, instances, size=(min(500, resamples - start), instances))
        numerator, denominator = above[picks].sum(axis=1), span[picks].sum(axis=1)
        usable = denominator > 0
        values.append(numerator[usable] / denominator[usable])
    draws = np.concatenate(values)
    low, high = (float(end) for end in np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2]))
    error = float(draws.std(ddof=1))
    rate = success(outcomes, confidence)
    if binomial.is_extreme(rate.rate):
        image = _image(rate.interval, floor, ceiling)
        low, high = min(low, image.low), max(high, image.high)
    return Normalised(value, error, Interval(low, high), float(floor.mean()), float(ceiling.mean()), "bootstrap")


def normalised_value(scores: Floats, floors: Floats, ceilings: Floats) -> float:
    """ν = Σ(s − f)/Σ(c − f). Raises ValueError where it is undefined."""
    if not len(scores) == len(floors) == len(ceilings):
        raise ValueError(f"{len(scores)} scores, {len(floors)} floors and {len(ceilings)} ceilings: expected as many")
    span = float((ceilings - floors).sum())
    if span <= 0:
        raise ValueError(
            f"mean ceiling {ceilings.mean():.4f} is not above mean floor {floors.mean():.4f}: nothing to normalise by"
        )
    return float((scores - floors).sum()) / span


def _image(rate: Interval, floors: Floats, ceilings: Floats) -> Interval:
    span = float((ceilings - floors).mean())
    return Interval((rate.low - float(floors.mean())) / span, (rate.high - float(floors.mean())) / span)


def paired_difference(
    first: Sequence[Sequence[bool]], second: Sequence[Sequence[bool]], confidence: float = 0.95
) -> Difference:
    """Success of `second` less that of `first` on the same instances.

    Interval of Bonett and Price: two instances are added, one won and one lost outright, and the normal interval of
    the enlarged sample's mean is taken; with no difference anywhere it is therefore not empty.

    Args:
        first, second: attempts for each instance, the instances in the same order and as many attempts on each.

    Raises:
        ValueError: the two do not hold the same instances and attempts, or none.
    """
    if [len(attempts) for attempts in first] != [len(attempts) for attempts in second]:
        raise ValueError("a paired difference needs the same instances, and as many attempts on each, of both agents")
    differences = instance_means(second) - instance_means(first)
    enlarged = np.concatenate([differences, [1.0, -1.0]])
    half = binomial.normal_quantile(confidence) * float(enlarged.std()) / math.sqrt(len(enlarged))
    centre = float(enlarged.mean())
    if all(len(attempts) == 1 for attempts in first):
        p_value, test = mcnemar(int((differences > 0).sum()), int((differences < 0).sum())), "mcnemar"
    else:
        common = math.lcm(*(len(attempts) for attempts in first))
        p_value, test = sign_flip([round(difference * common) for difference in differences.tolist()]), "sign-flip"
    interval = Interval(max(-1.0, centre - half), min(1.0, centre + half))
    return Difference(float(differences.mean()), interval, len(differences), p_value, test)


def disagreement(p_value: float, interval: Interval, instances: int, level: float = 0.05) -> str:
    """Where a difference's test and interval disagree on whether there is one: which is to be believed; else "".

    The interval is not made from the test, as the differences that the test does not refuse: six instances that all
    differ alike would leave a single one.
    """
    excludes = interval.low > 0 or interval.high < 0
    if excludes == (p_value <= level):
        return ""
    found = "leaves out 0, but the test finds no difference" if excludes else "holds 0, but the test finds a difference"
    return (
        f"The interval {found}: the test decides, since it is exact; the interval is an approximation (Bonett and "
        f"Price’s), rough over {instances} instances"
    )


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value of McNemar's test: is it a coin flip which agent solves what only one of them solves?"""
    if gained + lost == 0:
        return 1.0
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue)


def sign_flip(differences: Sequence[int]) -> float:
    """Exact two-sided p-value of the sign-flip permutation test on the sum of integer differences.

    Differences of success shares are integers once multiplied by the number of attempts.
    """
    magnitudes = np.abs(np.array(differences, dtype=np.int64))
    return flip_p_value(np.bincount(magnitudes).tolist(), sum(differences))


def flip_p_value(counts: Sequence[int], observed: int) -> float:
    """Chance that flipped differences, of which `counts[k]` have size k, sum to `observed` or farther from 0."""
    chances = flipped_sums(counts)
    total = len(chances) // 2
    tail = chances[: total + 1 - abs(observed)].sum() + chances[total + abs(observed) :].sum()
    return min(1.0, float(tail))


def flipped_sums(counts: Sequence[int]) -> Floats:
    """Distribution of the sum of differences whose signs are coin flips, of which `counts[k]` have size k.

    Element total + s is the chance of the sum s, total = Σ k·counts[k]. Exact over all sign patterns, and nothing is
    sampled: n equal sizes k sum to k·(2·Binomial(n, ½) − n), and sizes are put together by convolution.
    """
    chances = np.ones(1)
    for size, count in enumerate(counts):
        if size and count:
            spread = np.zeros(2 * size * count + 1)
            spread[:: 2 * size] = _coins(count)
            chances = np.convolve(chances, spread)
    return chances


@lru_cache(maxsize=4096)
def _coins(flips: int) -> Floats:
    """Chances of 0 … `flips` heads."""
    return cast(Floats, stats.binom.pmf(np.arange(flips + 1), flips, 0.5))


def pass_at_k(outcomes: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over instances of 1 − C(n−c, k)/C(n, k): at least one of k attempts succeeds.

    Raises:
        ValueError: an instance has fewer than k attempts.
    """
    return _mean_over_attempts(outcomes, k, lambda n, c: 1 - math.comb(n - c, k) / math.comb(n, k))


def pass_hat_k(outcomes: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over instances of C(c, k)/C(n, k): all of k attempts succeed.

    Raises:
        ValueError: an instance has fewer than k attempts.
    """
    return _mean_over_attempts(outcomes, k, lambda n, c: math.comb(c, k) / math.comb(n, k))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's adjusted p-values, in the order given: reject those at or under the level to hold the family-wise rate."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return tuple(adjusted)


def unresolved_bounds(outcomes: Sequence[Sequence[bool | None]]) -> Interval:
    """Success rate if every unresolved attempt (None) had failed, and if it had succeeded."""
    low, high = (
        float(instance_means([[fill if o is None else o for o in attempts] for attempts in outcomes]).mean())
        for fill in (False, True)
    )
    return Interval(low, high)


def mean_score(
    values: Sequence[float], standard_errors: Sequence[float], intervals: Sequence[Interval]
) -> tuple[float, float, Interval]:
    """Mean of independent scores with its standard error and interval, each counting alike.

    The interval is MOVER's: from the mean by the root of the summed squares of what each score's own interval leaves
    on that side. So it is as wide on each side as theirs are, and of one score it is that score's.

    Raises:
        ValueError: there are none, or not as many of each.
    """
    if not values or not len(values) == len(standard_errors) == len(intervals):
        raise ValueError(
            f"{len(values)} scores, {len(standard_errors)} errors, {len(intervals)} intervals: expected one or more, "
            "and as many of each"
        )
    count, mean = len(values), sum(values) / len(values)
    below = math.hypot(*(value - interval.low for value, interval in zip(values, intervals, strict=True)))
    above = math.hypot(*(interval.high - value for value, interval in zip(values, intervals, strict=True)))
    return mean, math.hypot(*standard_errors) / count, Interval(mean - below / count, mean + above / count)


def _mean_over_attempts(outcomes: Sequence[Sequence[bool]], k: int, of: Callable[[int, int], float]) -> float:
    shortest = min((len(attempts) for attempts in outcomes), default=0)
    if not 1 <= k <= shortest:
        raise ValueError(f"k = {k}, but the least attempts on an instance are {shortest}")
    return sum(of(len(attempts), sum(attempts)) for attempts in outcomes) / len(outcomes)
