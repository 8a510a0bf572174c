"""Confidence intervals of one success rate. Pure functions of counts, which may be fractional, as effective ones are.

Sources: Wilson (JASA 1927); Clopper and Pearson (Biometrika 1934).
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from scipy import stats

EXACT_OUTSIDE: Final = (0.02, 0.98)
"""Rates beyond which an interval covers no less than it promises. Between them it covers about that."""
ABOUT: Final = 0.02
"""How far from what it promises: 93 to 97 % for 95 %."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Wilson's score interval."""
    z = normal_quantile(confidence)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def clopper_pearson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Clopper and Pearson's interval by quantiles of the beta distribution."""
    tail = (1 - confidence) / 2
    failures = n - successes
    # A sum of floats may miss 0 or n by a rounding error, and no beta distribution has a parameter of 0.
    low = 0.0 if successes < 1e-9 else float(cast(float, stats.beta.ppf(tail, successes, failures + 1)))
    high = 1.0 if failures < 1e-9 else float(cast(float, stats.beta.ppf(1 - tail, successes + 1, failures)))
    return Interval(low, high)


def is_extreme(rate: float) -> bool:
    """Whether a rate is one of those with an exact interval."""
    return not EXACT_OUTSIDE[0] <= rate <= EXACT_OUTSIDE[1]


def joined(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Clopper–Pearson's interval of an extreme rate, Wilson's of another.

    Wilson's leaves out extreme rates too often, so an end beyond 0.02 or 0.98 is the farther one of the two. Where the
    two methods meet their intervals together cover too much: with 256 episodes a true rate of 0.02 with 97.9 %, since
    there one still includes a count that the other does not need. What can be spared, is: see `_spared`.

    Args:
        successes, n: ends of fractional counts lie between those of whole ones.

    Raises:
        ValueError: more succeeded than there are, or fewer than none.
    """
    if not 0 <= successes <= n or n < 0.5:
        raise ValueError(f"{successes:g} of {n:g} cannot have succeeded")
    whole = round(n)
    count = successes / n * whole
    below = min(int(count + 1e-9), whole)
    part = max(0.0, count - below)
    first = _joined_of_counts(below, whole, confidence)
    if part < 1e-9:
        return first
    second = _joined_of_counts(below + 1, whole, confidence)
    return Interval(first.low + part * (second.low - first.low), first.high + part * (second.high - first.high))


def _joined_of_counts(successes: int, n: int, confidence: float) -> Interval:
    near = min(successes, n - successes)
    low, high = _spared(n, confidence)
    interval = Interval(float(low[near]), float(high[near])) if near < len(low) else _stretched(near, n, confidence)
    return interval if successes == near else Interval(1 - interval.high, 1 - interval.low)


def _stretched(successes: int, n: int, confidence: float) -> Interval:
    exact = clopper_pearson(successes, n, confidence)
    if is_extreme(successes / n):
        return exact
    low, high = EXACT_OUTSIDE
    score = wilson(successes, n, confidence)
    return Interval(
        min(score.low, exact.low) if exact.low < low else score.low,
        max(score.high, exact.high) if exact.high > high else score.high,
    )


@lru_cache(maxsize=1024)
def _spared(n: int, confidence: float) -> tuple[Floats, Floats]:
    """The ends for 0, 1, … successes, as far as any rate near the lower of EXACT_OUTSIDE is in doubt.

    One after the other is drawn in: first lower ends that had been stretched, where what is left covers enough on both
    sides; then upper ends of extreme rates, to the next end below, where more than enough was covered.
    """
    edge, counts = EXACT_OUTSIDE[0], range(n // 2 + 1)
    reach = _stretched(max(0, math.ceil(edge * n) - 1), n, confidence).high
    intervals = [_stretched(k, n, confidence) for k in counts[: int(stats.binom.isf(1e-12, n, reach)) + 1]]
    low, high = np.array([each.low for each in intervals]), np.array([each.high for each in intervals])

    def coverage(low: Floats, high: Floats, start: float, end: float) -> Floats:
        return _coverage(low, high, n, _between((*low, *high), start, end))

    for k, stretched in enumerate(low):
        own = wilson(k, n, confidence).low
        if is_extreme(k / n) or not stretched < min(own, edge):
            continue
        drawn_in = low.copy()
        drawn_in[k] = own
        beyond = coverage(drawn_in, high, stretched, min(own, edge))
        within = coverage(drawn_in, high, edge, own) if own > edge else np.ones(1)
        if beyond.min() >= confidence and within.min() >= confidence - ABOUT:
            low = drawn_in
    for k, end in enumerate(high):
        if end <= edge or not is_extreme(k / n):
            continue
        start = max(edge - 1e-12, *low[low < end])  # Below 0.02, which is a likely rate to ask for.
        drawn_in = high.copy()
        drawn_in[k] = start
        too_much = coverage(low, high, start, end).max() > confidence + ABOUT
        if too_much and coverage(low, drawn_in, start, end).min() >= confidence - ABOUT:
            high = drawn_in
    return low, high


def _between(ends: Iterable[float], start: float, end: float) -> Floats:
    """Rates from start to end: some between each end and the next, where the same counts cover them, and at both."""
    inner = sorted({start, end, *(each for each in ends if start < each < end)})
    within = np.linspace(1e-6, 1 - 1e-6, 9)
    return np.concatenate([a + (b - a) * within for a, b in itertools.pairwise(inner)])


def _coverage(low: Floats, high: Floats, n: int, rates: Floats) -> Floats:
    """How probably the interval of what is counted holds the true rate, for each of some true rates."""
    chances = stats.binom.pmf(np.arange(len(low)), n, rates[:, None])
    return (chances * ((low <= rates[:, None]) & (rates[:, None] <= high))).sum(axis=1)


def normal_quantile(confidence: float) -> float:
    """z of a two-sided interval."""
    return float(cast(float, stats.norm.ppf((1 + confidence) / 2)))
