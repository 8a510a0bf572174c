"""Intervals of what runs came to: of their difference on the same worlds, and of a mean over seeds.

Sources: Bonett and Price (2012) for the paired difference, McNemar's exact test for its p-value, Student (1908) for
the mean. Pure functions; knows nothing of runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Final

CONFIDENCE: Final = 0.95
_NORMAL: Final = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval; without one (a single seed), low and high are None."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Success of one policy less that of another on the same worlds.

    Attributes:
        value, low, high: mean difference, −1 to 1, with its 95 % interval.
        worlds: how many both were played on.
        p_value: two-sided, of the exact test that it is a coin flip which policy solves what only one of them solves.
    """

    value: float
    low: float
    high: float
    worlds: int
    p_value: float


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> Difference:
    """Success of `second` less that of `first`, the same worlds in the same order, an episode on each.

    Two worlds are added, one won and one lost outright, and the normal interval of the enlarged sample's mean is taken:
    so it is not empty where nothing differs.

    Raises:
        ValueError: there are no worlds, or not as many of both.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"a paired difference needs the same worlds twice, got {len(first)} and {len(second)}")
    gained = sum(after and not before for before, after in zip(first, second, strict=True))
    lost = sum(before and not after for before, after in zip(first, second, strict=True))
    enlarged = len(first) + 2
    centre = (gained - lost) / enlarged
    variance = (gained + lost + 2) / enlarged - centre * centre
    half = _NORMAL * math.sqrt(variance / enlarged)
    return Difference(
        value=(gained - lost) / len(first),
        low=max(-1.0, centre - half),
        high=min(1.0, centre + half),
        worlds=len(first),
        p_value=mcnemar(gained, lost),
    )


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value: twice the binomial tail of the rarer of the two, at most 1."""
    trials = gained + lost
    tail = sum(math.comb(trials, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**trials)


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Mean with Student's interval; without an interval where there is one value only.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("a mean over seeds needs at least one of them")
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None)
    half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def student_quantile(freedom: int) -> float:
    """t with P(|T| ≤ t) = 0.95 at a whole number of degrees of freedom."""
    low, high = 0.0, 20.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < CONFIDENCE else (low, middle)
    return (low + high) / 2


def _student_within(t: float, freedom: int) -> float:
    """P(|T| ≤ t), by the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
