"""Where the marks of a board's charts lie. Pure functions of numbers and names."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from turngym_leaderboard.pages.views import BoardRow, Estimate

WIDTH: Final = 200
_EDGE: Final = 8
_PLOT: Final = (64, 16, 620, 300)
"""Left, top, right and bottom of the scatter's plot."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values on a line of an SVG. `low` and `high` are its ends, at `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies; what is beyond an end is drawn at it."""
        low, high, held = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        share = (held - low) / (high - low)
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class Strip:
    """An interval as a bar with a dot."""

    low: float
    value: float
    high: float
    told: str


def score_scale(estimates: Iterable[Estimate | None]) -> Scale:
    """The scale of normalised scores: from the floor, 0, to the ceiling, 1, and as far beyond as intervals reach."""
    known = [each for each in estimates if each is not None]
    return Scale(
        min([0.0, *(each.low for each in known)]), max([1.0, *(each.high for each in known)]), _EDGE, WIDTH - _EDGE
    )


SHARES: Final = Scale(0.0, 1.0, _EDGE, WIDTH - _EDGE)
"""Of success rates."""


def strip(estimate: Estimate, scale: Scale) -> Strip:
    """The marks of an estimate."""
    return Strip(
        scale.at(estimate.low),
        scale.at(estimate.value),
        scale.at(estimate.high),
        f"{estimate.value:.3f}, 95 % interval {estimate.low:.3f} to {estimate.high:.3f}",
    )


@dataclass(frozen=True, slots=True)
class Dot:
    """An agent on the scatter. `right`: its name stands to the right of the dot."""

    name: str
    x: float
    y: float
    low: float
    high: float
    right: bool


@dataclass(frozen=True, slots=True)
class Scatter:
    """Score against price.

    Attributes:
        across: prices that have a tick, and where. up: what the ticks of scores say, and where.
        lines: horizontal lines with what they are: floor and ceiling.
    """

    dots: tuple[Dot, ...]
    across: tuple[tuple[float, float], ...]
    up: tuple[tuple[str, float], ...]
    lines: tuple[tuple[str, float], ...]
    left: float = _PLOT[0]
    top: float = _PLOT[1]
    right: float = _PLOT[2]
    bottom: float = _PLOT[3]


def scatter(rows: Sequence[BoardRow]) -> Scatter | None:
    """Rows that have a score and a price, on a logarithmic price; None: there is none."""
    shown = [(row, row.score, row.price) for row in rows if row.score is not None and row.price is not None]
    priced = [(row, score, price) for row, score, price in shown if score and price > 0]
    if not priced:
        return None
    left, top, right, bottom = _PLOT
    prices = [price for _, _, price in priced]
    low, high = 10 ** math.floor(math.log10(min(prices))), 10 ** math.ceil(math.log10(max(prices)))
    # A single power of ten has room on both sides.
    low, high = (low / 10, high * 10) if low == high else (low, high)
    across = Scale(low, high, left + 12, right - 12, log=True)
    scores = score_scale(score for _, score, _ in priced)
    up = Scale(scores.low, scores.high, bottom - 8, top + 8)
    middle = (left + right) / 2
    dots = tuple(
        Dot(
            row.name,
            across.at(price),
            up.at(score.value),
            up.at(score.low),
            up.at(score.high),
            right=across.at(price) < middle,
        )
        for row, score, price in priced
    )
    powers = range(round(math.log10(low)), round(math.log10(high)) + 1)
    return Scatter(
        dots=dots,
        across=tuple((10.0**power, across.at(10.0**power)) for power in powers),
        up=tuple((f"{tenths / 10:.1f}".replace("-", "−"), up.at(tenths / 10)) for tenths in _tenths(scores)),
        lines=(("floor", up.at(0.0)), ("ceiling", up.at(1.0))),
    )


def _tenths(scale: Scale) -> range:
    """Ticks of a scale, in tenths, about five of them."""
    step = max(1, math.ceil((scale.high - scale.low) * 10 / 5))
    return range(math.ceil(scale.low * 10 / step) * step, math.floor(scale.high * 10) + 1, step)
