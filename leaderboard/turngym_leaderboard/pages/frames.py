"""One or two episodes as frames: what stands on the screen at once, turn by turn, and the state at the end.

Pure functions of views. Knows nothing of HTML.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from turngym_leaderboard.pages.grids import Cell, Shown, shown
from turngym_leaderboard.pages.views import EpisodeView, TurnView

MOST_FRAMES: Final = 100
"""On one page; longer episodes have several."""


@dataclass(frozen=True, slots=True)
class Pane:
    """One episode at one moment.

    Attributes:
        state: what the agent read; None: it was not kept.
        turn: what it then did; None: the episode is over.
    """

    state: Shown | None
    turn: TurnView | None


@dataclass(frozen=True, slots=True)
class Frame:
    """All episodes at one moment; None: that episode has long been over.

    Attributes:
        number: of the turn, from 1; the end has the number after the last one's.
        name: for a heading.
    """

    number: int
    name: str
    panes: tuple[Pane | None, ...]


@dataclass(frozen=True, slots=True)
class Frames:
    """A page of frames.

    Attributes:
        total: turns of the longest episode.
        legend: the kinds of cell on the boards of this page.
    """

    frames: tuple[Frame, ...]
    total: int
    page: int
    pages: int
    legend: tuple[Cell, ...]


def frames(episodes: Sequence[EpisodeView], page: int = 1, most: int = MOST_FRAMES) -> Frames:
    """The frames of a page of `most`; a page that is not there is the nearest one that is."""
    total = max(len(episode.turns) for episode in episodes)
    pages = 1 + total // most
    page = min(max(page, 1), pages)
    numbers = range((page - 1) * most, min(page * most, total + 1))
    made = tuple(
        Frame(
            number=at + 1,
            name=f"Turn {at + 1}" if at < total else "End",
            panes=tuple(_pane(episode, at) for episode in episodes),
        )
        for at in numbers
    )
    cells = {
        cell
        for frame in made
        for pane in frame.panes
        if pane is not None and pane.state is not None and pane.state.grid is not None
        for cell in pane.state.grid.cells()
    }
    return Frames(made, total, page, pages, tuple(cell for cell in Cell if cell in cells))


def _pane(episode: EpisodeView, at: int) -> Pane | None:
    """The episode at turn `at`, from 0; None after its end."""
    if at > len(episode.turns):
        return None
    if at == len(episode.turns):
        last = episode.last
        return Pane(None if last is None else shown(last, episode.environment, episode.symbols), None)
    turn = episode.turns[at]
    return Pane(shown(turn.observation, episode.environment, episode.symbols), turn)
