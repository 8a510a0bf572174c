"""Boards out of observations: which part of a text is a grid whose symbols are known, and what stands in each cell.

Pure functions of text. What is no known grid stays text. Knows nothing of how a grid is drawn, and nothing of the
environments' code: their symbols are told again here, and a test holds both to be equal.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MOST_CELLS: Final = 4_096
"""A larger grid is shown as the text that it is."""


class Cell(StrEnum):
    """What stands in a cell. The values are names of shapes in the templates."""

    WALL = "wall"
    FLOOR = "floor"
    TARGET = "target"
    BOX = "box"
    BOX_ON_TARGET = "box-on-target"
    PLAYER = "player"
    PLAYER_ON_TARGET = "player-on-target"
    ICE = "ice"
    HOLE = "hole"
    GOAL = "goal"
    PLAYER_IN_HOLE = "player-in-hole"
    PLAYER_AT_GOAL = "player-at-goal"


SOKOBAN: Final = (
    Cell.WALL,
    Cell.FLOOR,
    Cell.TARGET,
    Cell.BOX_ON_TARGET,
    Cell.BOX,
    Cell.PLAYER,
    Cell.PLAYER_ON_TARGET,
)
"""Meaning of the characters of a Sokoban vocabulary, in their order."""

FROZEN_LAKE: Final = (Cell.PLAYER, Cell.ICE, Cell.HOLE, Cell.GOAL, Cell.PLAYER_IN_HOLE, Cell.PLAYER_AT_GOAL)
"""The same of FrozenLake."""

PRESETS: Final[Mapping[str, Mapping[str, str]]] = {
    "sokoban": {"ragen": "#_O√XPS", "xsb": "#-.*$@+", "latin": "WFTDBPQ", "digits": "0123456"},
    "frozen_lake": {"ragen": "P_OGX√", "latin": "PIHGDW", "digits": "012345"},
}
"""Vocabularies by family and name."""

_MEANINGS: Final = {"sokoban": SOKOBAN, "frozen_lake": FROZEN_LAKE}
_PLAYERS: Final = frozenset(cell for cell in Cell if cell.startswith("player"))


@dataclass(frozen=True, slots=True)
class Grid:
    """A board: rows of equal length."""

    rows: tuple[tuple[Cell, ...], ...]

    @property
    def width(self) -> int:
        return len(self.rows[0])

    @property
    def height(self) -> int:
        return len(self.rows)

    @property
    def ground(self) -> str:
        """What lies under everything: "ice" of a lake, else "floor"."""
        return "ice" if any(cell in FROZEN_LAKE[1:] for row in self.rows for cell in row) else "floor"

    def cells(self) -> tuple[Cell, ...]:
        """The kinds of cell that occur, in the order of `Cell`."""
        found = {cell for row in self.rows for cell in row}
        return tuple(cell for cell in Cell if cell in found)

    def walls(self) -> tuple[tuple[int, int, int], ...]:
        """(column, row, length) of each horizontal stretch of wall."""
        found: list[tuple[int, int, int]] = []
        for y, row in enumerate(self.rows):
            start = None
            for x, cell in enumerate((*row, Cell.FLOOR)):
                if cell is Cell.WALL and start is None:
                    start = x
                elif cell is not Cell.WALL and start is not None:
                    found.append((start, y, x - start))
                    start = None
        return tuple(found)

    def pieces(self) -> tuple[tuple[int, int, Cell], ...]:
        """(column, row, what) of each cell that is neither wall nor bare ground."""
        bare = (Cell.WALL, Cell.FLOOR, Cell.ICE)
        return tuple((x, y, cell) for y, row in enumerate(self.rows) for x, cell in enumerate(row) if cell not in bare)

    def told(self) -> str:
        """The board in words, for whoever cannot see it; rows and columns count from 1."""
        places = [
            f"{cell.replace('-', ' ')} at row {y + 1}, column {x + 1}"
            for x, y, cell in sorted(self.pieces(), key=lambda piece: piece[2] not in _PLAYERS)
        ]
        return f"Board of {self.height} rows and {self.width} columns: {'; '.join(places)}"


@dataclass(frozen=True, slots=True)
class Shown:
    """An observation as it is to be shown: text, a board, text. Without a known grid all of it is in `before`."""

    before: str
    grid: Grid | None = None
    after: str = ""


def shown(observation: str, environment: str = "", symbols: str = "") -> Shown:
    """Takes an observation apart.

    Args:
        environment: id, as far as it is known; one that names a family is read as that family's.
        symbols: the environment's option: a preset's name, or the characters themselves; empty: unknown, and the
            presets are tried.
    """
    lines = observation.split("\n")
    for start, end in _blocks(lines):
        grid = _grid(lines[start:end], environment, symbols)
        if grid is not None:
            return Shown("\n".join(lines[:start]), grid, "\n".join(lines[end:]))
    return Shown(observation)


def _blocks(lines: list[str]) -> list[tuple[int, int]]:
    """Stretches of at least two lines of the same length without spaces, last first: what was said comes before."""
    blocks: list[tuple[int, int]] = []
    start = 0
    for at in range(1, len(lines) + 1):
        if at == len(lines) or len(lines[at]) != len(lines[start]):
            if at - start >= 2 and lines[start] and not any(" " in line for line in lines[start:at]):
                blocks.append((start, at))
            start = at
    return blocks[::-1]


def _grid(lines: list[str], environment: str, symbols: str) -> Grid | None:
    if len(lines) * len(lines[0]) > MOST_CELLS:
        return None
    named = [family for family in PRESETS if environment.startswith(family)]
    for family in named or PRESETS:
        presets = PRESETS[family]
        tried = [presets.get(symbols, symbols)] if symbols else list(presets.values())
        for vocabulary in tried:
            grid = _read(lines, vocabulary, family)
            if grid is not None:
                return grid
    return None


def _read(lines: list[str], vocabulary: str, family: str) -> Grid | None:
    """The grid, where every character is of the vocabulary and the counts are those of a board of the family.

    The counts tell apart vocabularies that share characters: RAGEN's are nearly the same for both families.
    """
    meanings = _MEANINGS[family]
    if len(vocabulary) != len(meanings):
        return None
    meaning = dict(zip(vocabulary, meanings, strict=True))
    if any(character not in meaning for line in lines for character in line):
        return None
    rows = tuple(tuple(meaning[character] for character in line) for line in lines)
    count = Counter(cell for row in rows for cell in row)
    if sum(count[player] for player in _PLAYERS) != 1:
        return None
    if family == "sokoban":
        boxes = count[Cell.BOX]
        right = boxes + count[Cell.BOX_ON_TARGET] > 0 and boxes == count[Cell.TARGET] + count[Cell.PLAYER_ON_TARGET]
    else:
        right = len(rows) == len(rows[0]) and count[Cell.GOAL] + count[Cell.PLAYER_AT_GOAL] == 1
    return Grid(rows) if right else None
