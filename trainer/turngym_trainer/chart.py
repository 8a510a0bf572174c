"""Curves as SVG that stands in a page: its colours are the page's, its text can be read out.

Pure functions of numbers. Knows nothing of runs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, Literal

from turngym_trainer.page import Html, joined, tag

WIDTH: Final = 440
HEIGHT: Final = 210
COLOURS: Final = 8
"""As many as the page has; further series begin again."""
MOST_POINTS: Final = 500
"""Points of a curve that are drawn, about one a pixel; of more, the extremes are kept."""
_LEFT: Final = 52
_RIGHT: Final = 16
_TOP: Final = 8
_BOTTOM: Final = 24


@dataclass(frozen=True, slots=True)
class Point:
    """One value, with its interval where it has one. y None: a gap."""

    x: float
    y: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. Intervals are drawn as bars at its points, or as a band."""

    label: str
    points: tuple[Point, ...]
    intervals: Literal["bars", "band"] = "bars"


@dataclass(frozen=True, slots=True)
class Chart:
    """Several curves over the same x, which the page names.

    Attributes:
        rules: horizontal lines with what they are.
        marks: x of vertical lines with what they are.
        bounds: y that is shown at least.
        log: logarithmic y; values that are not over 0 are gaps.
    """

    title: str
    series: tuple[Series, ...]
    rules: tuple[tuple[str, float], ...] = ()
    marks: tuple[tuple[str, float], ...] = ()
    bounds: tuple[float, ...] = ()
    log: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis: which values it spans and where its ends lie."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: tuple[float, ...] = field(default=())

    def place(self, value: float) -> float:
        low, high, at = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)


def figure(chart: Chart) -> Html:
    """A chart with its title and legend; without any point, says so."""
    curves = [_positive(series) for series in chart.series] if chart.log else chart.series
    values = [v for series in curves for p in series.points for v in (p.y, p.low, p.high) if v is not None]
    places = [point.x for series in curves for point in series.points]
    if not values:
        return tag("figure", tag("figcaption", chart.title), tag("p", "Nothing was measured yet.", class_="faint"))
    values += [*chart.bounds, *(value for _, value in chart.rules)]
    y = _axis(values, HEIGHT - _BOTTOM, _TOP, log=chart.log)
    x = _axis([*places, *(at for _, at in chart.marks)], _LEFT, WIDTH - _RIGHT, whole=True)
    drawn = [
        *_grid(x, y),
        *(_rule(label, y.place(value)) for label, value in chart.rules),
        *(_mark(label, x.place(at)) for label, at in chart.marks),
        *(part for at, series in enumerate(curves) for part in _curve(series, x, y, _colour(at))),
    ]
    said = f"{chart.title}: " + "; ".join(f"{series.label} {_last(series)}" for series in chart.series)
    return tag(
        "figure",
        tag("figcaption", chart.title),
        tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=said),
        tag("ul", *(_key(series, _colour(at)) for at, series in enumerate(chart.series)), class_="legend"),
    )


def interval_bar(value: float, low: float | None, high: float | None, rules: Iterable[float] = ()) -> Html:
    """A share between 0 and 1 as a dot on a line, with its interval, and ticks where `rules` are."""
    axis = _Axis(0.0, 1.0, 6, 214)
    drawn = [tag("line", x1=6, x2=214, y1=12, y2=12, stroke="var(--rule)")]
    drawn += [
        tag("line", x1=axis.place(at), x2=axis.place(at), y1=3, y2=21, stroke="var(--faint)", stroke_dasharray="3 2")
        for at in rules
    ]
    if low is not None and high is not None:
        ends = [axis.place(min(1.0, max(0.0, end))) for end in (low, high)]
        drawn.append(tag("line", x1=ends[0], x2=ends[1], y1=12, y2=12, stroke=_colour(0), stroke_width=3))
    drawn.append(tag("circle", cx=axis.place(value), cy=12, r=5, fill=_colour(0)))
    return tag("svg", *drawn, viewBox="0 0 220 24", role="img", aria_label=short(value))


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points: of each stretch its lowest and highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        known = [point for point in part if point.y is not None]
        ends = {id(choose(known, key=_height)) for choose in (min, max)} if known else {id(part[0])}
        kept += [point for point in part if id(point) in ends]
    return kept


def ticks(low: float, high: float, most: int = 5) -> tuple[float, ...]:
    """At most `most` round values from low to high, 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return tuple(round(at * step, 12) for at in range(first, math.floor(high / step + 1e-9) + 1))


def short(value: float) -> str:
    """A number in a few characters: three digits, thousands as k, M or G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}" if abs(value) < 1e12 else f"{value:.2g}"
    return f"{value:.3g}".replace("-", "−") if value else "0"


def _axis(values: Sequence[float], start: float, end: float, *, log: bool = False, whole: bool = False) -> _Axis:
    low, high = min(values), max(values)
    if log:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        low, high = 10.0 ** exponents[0], 10.0 ** max(exponents[-1], exponents[0] + 1)
        marked = tuple(10.0**e for e in range(exponents[0], max(exponents[-1], exponents[0] + 1) + 1))
        return _Axis(low, high, start, end, log=True, ticks=marked[:: math.ceil(len(marked) / 6)])
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
        # Whatever does not move lies in the middle.
        half = 1.0 if whole else 0.5 * abs(low) or 0.5
        low, high = low - half, high + half
    marked = ticks(low, high)
    if whole:
        marked = tuple(tick for tick in marked if tick == round(tick))
        return _Axis(low, high, start, end, ticks=marked)
    pad = 0.04 * (high - low)
    return _Axis(low - pad, high + pad, start, end, ticks=marked)


def _positive(series: Series) -> Series:
    """The series as a logarithmic axis can show it."""
    points = (point if point.y is not None and point.y > 0 else Point(point.x, None) for point in series.points)
    return replace(series, points=tuple(points))


def _grid(x: _Axis, y: _Axis) -> list[Html]:
    lines = [
        part
        for tick in y.ticks
        for part in (
            tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y.place(tick), y2=y.place(tick), stroke="var(--rule)"),
            tag("text", short(tick), x=_LEFT - 6, y=y.place(tick) + 4, text_anchor="end"),
        )
    ]
    below = [tag("text", short(tick), x=x.place(tick), y=HEIGHT - 8, text_anchor="middle") for tick in x.ticks]
    return [*lines, *below]


def _rule(label: str, at: float) -> Html:
    return joined(
        [
            tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=at, y2=at, stroke="var(--faint)", stroke_dasharray="6 4"),
            # Under a line at the upper edge, over any other.
            tag("text", label, x=WIDTH - _RIGHT - 2, y=at + 14 if at < _TOP + 18 else at - 4, text_anchor="end"),
        ]
    )


def _mark(label: str, at: float) -> Html:
    line = {"x1": at, "x2": at, "y1": _TOP, "y2": HEIGHT - _BOTTOM}
    return tag(
        "g", tag("title", label), tag("line", **line, stroke="var(--alarm)", stroke_width=2, stroke_dasharray="2 3")
    )


def _curve(series: Series, x: _Axis, y: _Axis, colour: str) -> list[Html]:
    points = thinned(series.points)
    known = [point for point in points if point.y is not None]
    drawn: list[Html] = []
    if series.intervals == "band":
        drawn += _band(known, x, y, colour)
    else:
        drawn += [
            tag("line", x1=x.place(p.x), x2=x.place(p.x), y1=y.place(p.low), y2=y.place(p.high), stroke=colour)
            for p in known
            if p.low is not None and p.high is not None
        ]
    for gap, stretch in groupby(points, key=lambda point: point.y is None):
        if not gap:
            line = " ".join(f"{x.place(p.x)},{y.place(_height(p))}" for p in stretch)
            drawn.append(tag("polyline", points=line, fill="none", stroke=colour, stroke_width=1.6))
    if len(known) <= 40:
        drawn += [tag("circle", cx=x.place(p.x), cy=y.place(_height(p)), r=2.5, fill=colour) for p in known]
    return [tag("g", tag("title", series.label), *drawn)]


def _band(points: Sequence[Point], x: _Axis, y: _Axis, colour: str) -> list[Html]:
    bounded = [(point.x, point.low, point.high) for point in points if point.low is not None and point.high is not None]
    if len(bounded) < 2:
        return []
    edge = [(at, high) for at, _, high in bounded] + [(at, low) for at, low, _ in reversed(bounded)]
    corners = " ".join(f"{x.place(at)},{y.place(value)}" for at, value in edge)
    return [tag("polygon", points=corners, fill=colour, fill_opacity=0.15)]


def _key(series: Series, colour: str) -> Html:
    return tag("li", tag("span", class_="key", style=f"background:{colour}"), f"{series.label} {_last(series)}")


def _last(series: Series) -> str:
    known = [point.y for point in series.points if point.y is not None]
    return short(known[-1]) if known else "–"


def _colour(at: int) -> str:
    return f"var(--s{at % COLOURS})"


def _height(point: Point) -> float:
    assert point.y is not None
    return point.y
