"""When trainings collapse, and whether those of one arm do so later than those of another.

A collapse is the first validation whose success is under half of the best before it and stays so for two more, where
that best is at least 10 points over the environment's floor. A training without one is censored at its last validation.
Pure functions; knows nothing of trainings.

Sources: Kaplan and Meier (1958) by scipy; the restricted mean, the area under their curve (Royston and Parmar, 2013);
over seeds the percentile bootstrap and the sign-flip test, both of paired differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from turngym_leaderboard.statistics import sign_flip

OVER_FLOOR: Final = 0.10
SHARE: Final = 0.5
CONFIRMED_BY: Final = 2
"""Further validations that must be as low."""
RESAMPLES: Final = 10_000
SEED: Final = 20


@dataclass(frozen=True, slots=True)
class Time:
    """How far a training came, by any clock. `collapsed`: it ended there; else it was sound as far as it went."""

    at: float
    collapsed: bool


@dataclass(frozen=True, slots=True)
class Later:
    """By how much one arm's collapses come after another's.

    Attributes:
        difference: of restricted mean times. low, high: 95 % percentile interval over bootstrapped seeds.
        p_value: two-sided, exact, of the sign-flip test over paired seeds.
    """

    difference: float
    low: float
    high: float
    p_value: float


def onset(successes: Sequence[float], floor: float) -> int | None:
    """Index of the validation with which a collapse began; None: there was none that two more validations confirm."""
    best = 0.0
    for index, success in enumerate(successes):
        after = successes[index : index + 1 + CONFIRMED_BY]
        if best >= floor + OVER_FLOOR and len(after) > CONFIRMED_BY and all(each < SHARE * best for each in after):
            return index
        best = max(best, success)
    return None


def kaplan_meier(times: Sequence[Time]) -> list[tuple[float, float]]:
    """(time, share that is still sound after it), at each time of a collapse, ascending."""
    collapsed = [time.at for time in times if time.collapsed]
    sound = [time.at for time in times if not time.collapsed]
    if not collapsed:
        return []
    curve = stats.ecdf(stats.CensoredData(uncensored=collapsed, right=sound)).sf
    return [
        (float(at), float(share))
        for at, share in zip(curve.quantiles, curve.probabilities, strict=True)
        if at in collapsed
    ]


def restricted_mean(times: Sequence[Time], until: float) -> float:
    """Area under the Kaplan–Meier curve from 0 to `until`: the mean time without collapse, as far as was looked."""
    area, before, share = 0.0, 0.0, 1.0
    for at, after in kaplan_meier(times):
        if at >= until:
            break
        area += share * (at - before)
        before, share = at, after
    return area + share * (until - before)


def later(first: Sequence[Time], second: Sequence[Time], until: int) -> Later:
    """How much later `second` collapses than `first`, the same seeds in the same order, up to `until`.

    The sign-flip test takes each seed's time up to `until`, a whole number; no training may be censored before.

    Raises:
        ValueError: there are no seeds, not as many of both, or a training was censored before `until`.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"paired seeds are needed, got {len(first)} and {len(second)}")
    if early := [time.at for time in (*first, *second) if not time.collapsed and time.at < until]:
        raise ValueError(f"trainings were censored at {early}, before {until}: their times cannot be compared")
    difference = restricted_mean(second, until) - restricted_mean(first, until)
    own = paired(first, second, until).tolist()
    low, high = mean_interval(own)
    return Later(difference, low, high, sign_flip([round(each) for each in own]))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % percentile interval of a mean over bootstrapped seeds, one value each."""
    draws = np.random.Generator(np.random.Philox(SEED)).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[draws].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def paired(first: Sequence[Time], second: Sequence[Time], until: float) -> NDArray[np.float64]:
    """Each seed's time with `second` less that with `first`, up to `until`. Its mean is that of restricted means."""
    return np.array([min(b.at, until) - min(a.at, until) for a, b in zip(first, second, strict=True)])
