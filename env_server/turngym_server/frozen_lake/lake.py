"""Lakes: where the holes and the goal are. A cell is row · size + column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from turngym_server.rng import Rng
from turngym_server.symmetry import least_symmetry

DIRECTIONS: Final = ("Left", "Down", "Right", "Up")
"""Turning by one place is turning by a right angle: the sides of a direction are its neighbours here."""

_STEPS: Final = ((0, -1), (1, 0), (0, 1), (-1, 0))


@dataclass(frozen=True, slots=True)
class Lake:
    """A square of `size` rows; `holes` is a set of cells as bits."""

    size: int
    holes: int
    goal: int

    def beside(self, cell: int, direction: int) -> int:
        """The next cell that way; the cell itself at the edge."""
        row, column = divmod(cell, self.size)
        down, right = _STEPS[direction]
        row, column = row + down, column + right
        inside = 0 <= row < self.size and 0 <= column < self.size
        return row * self.size + column if inside else cell

    def world(self) -> bytes:
        """Holes and goal, the least of 8 symmetries: rows of `.`, `O` and `G`."""
        marks = ["G" if c == self.goal else "O" if self.holes >> c & 1 else "." for c in range(self.size**2)]
        rows = ["".join(marks[start : start + self.size]) for start in range(0, self.size**2, self.size)]
        return least_symmetry(rows).encode()


@lru_cache(maxsize=4096)
def moves_to_goal(lake: Lake) -> Mapping[int, int]:
    """The fewest moves to the goal without slipping and without a hole, of each cell from which there is a way."""
    moves, reached = {lake.goal: 0}, [lake.goal]
    for cell in reached:
        for direction in range(4):
            beside = lake.beside(cell, direction)
            if beside not in moves and not lake.holes >> beside & 1:
                moves[beside] = moves[cell] + 1
                reached.append(beside)
    return moves


def draw_lake(rng: Rng, size: int, hole_probability: float) -> tuple[Lake, int]:
    """A lake and a start from which the goal can be reached.

    Start and goal are two distinct uniform cells, every other cell is a hole with the given probability; what does not
    connect is drawn again.
    """
    while True:
        start = rng.below(size**2)
        goal = (start + 1 + rng.below(size**2 - 1)) % size**2
        holes = 0
        for cell in range(size**2):
            if cell not in {start, goal} and rng.random() < hole_probability:
                holes |= 1 << cell
        lake = Lake(size, holes, goal)
        if start in moves_to_goal(lake):
            return lake, start
