"""Where the lines of the chart of returns lie. Pure functions of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from turngym_leaderboard.pages.views import EpisodeView

WIDTH: Final = 600
HEIGHT: Final = 72
_MARGIN: Final = 6


@dataclass(frozen=True, slots=True)
class ReturnChart:
    """Cumulated reward by frame, one line for each episode, in the units of the SVG.

    Attributes:
        lines: `points` of polylines.
        left: x of the first frame; step: from each to the next.
        zero: y of a return of 0.
        told: the chart in words.
    """

    lines: tuple[str, ...]
    left: float
    step: float
    zero: float
    told: str
    width: int = WIDTH
    height: int = HEIGHT


def return_chart(episodes: Sequence[EpisodeView]) -> ReturnChart:
    """The chart of one or two episodes."""
    longest = max(len(episode.turns) for episode in episodes)
    step = (WIDTH - 2 * _MARGIN) / max(longest, 1)
    totals = [[turn.total for turn in episode.turns] for episode in episodes]
    values = [0.0, *(total for line in totals for total in line)]
    low, high = min(values), max(values)
    # What never moves is drawn as a line in the middle.
    low, high = (low - 1, high + 1) if low == high else (low, high)

    def y(value: float) -> float:
        return round(_MARGIN + (high - value) / (high - low) * (HEIGHT - 2 * _MARGIN), 1)

    def points(line: Sequence[float]) -> str:
        held = [*line, line[-1] if line else 0.0]
        return " ".join(f"{round(_MARGIN + at * step, 1)},{y(total)}" for at, total in enumerate(held))

    return ReturnChart(
        lines=tuple(points(line) for line in totals),
        left=_MARGIN,
        step=round(step, 4),
        zero=y(0.0),
        told="Return by turn; at the end " + " and ".join(f"{line[-1] if line else 0.0:.4g}" for line in totals),
    )
