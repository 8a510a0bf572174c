"""Boards, levels, and sets of cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from turngym_server.symmetry import least_symmetry

DIRECTIONS: Final = ("Up", "Down", "Left", "Right")


@dataclass(frozen=True, slots=True)
class Board:
    """What play does not change. `floor` and `targets` are sets of cells; targets are floor; no floor on the border."""

    width: int
    height: int
    floor: int
    targets: int

    @property
    def stride(self) -> int:
        """Distance from a cell to the one below."""
        return self.width + 1

    @property
    def deltas(self) -> tuple[int, int, int, int]:
        """What a move adds to a cell, in the order of `DIRECTIONS`."""
        stride = self.width + 1
        return -stride, stride, -1, 1

    def row_column(self, cell: int) -> tuple[int, int]:
        """Row and column of a cell, from 1."""
        row, column = divmod(cell, self.width + 1)
        return row + 1, column + 1

    def __deepcopy__(self, memo: object) -> Board:
        return self


@dataclass(frozen=True, slots=True)
class Level:
    """A start: a board, the player's cell, and the set of boxes, as many as targets."""

    board: Board
    player: int
    boxes: int


def cells(members: int) -> Iterator[int]:
    """The cells of a set, ascending."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def nth_cell(members: int, n: int) -> int:
    """The cell of a set that has `n` others before it."""
    for _ in range(n):
        members &= members - 1
    return (members & -members).bit_length() - 1


def shift(members: int, delta: int) -> int:
    """The set moved by a difference of cells; what would fall below cell 0 is dropped."""
    return members << delta if delta > 0 else members >> -delta


def neighbours(members: int, stride: int) -> int:
    """The cells next to a set; mask them by the floor."""
    return members << 1 | members >> 1 | members << stride | members >> stride


def flood(start: int, within: int, stride: int) -> int:
    """All cells of `within` that are connected to the set `start`."""
    reached = start
    while (
        grown := (reached | reached << 1 | reached >> 1 | reached << stride | reached >> stride) & within
    ) != reached:
        reached = grown
    return reached


def canonical(board: Board, player: int) -> bytes:
    """The floor that the player could reach without boxes and its targets: cropped, and the least of 8 symmetries.

    Rows of `#`, ` ` and `.` with newlines between. Neither boxes nor player enter it, so no play changes it.
    """
    stride = board.stride
    reached = flood(1 << player, board.floor, stride)
    places = [divmod(cell, stride) for cell in cells(reached)]
    top = min(row for row, _ in places)
    left = min(column for _, column in places)
    height = max(row for row, _ in places) - top + 1
    width = max(column for _, column in places) - left + 1
    rows = [["#"] * width for _ in range(height)]
    for row, column in places:
        rows[row - top][column - left] = "." if board.targets >> row * stride + column & 1 else " "
    return least_symmetry(["".join(row) for row in rows]).encode()
