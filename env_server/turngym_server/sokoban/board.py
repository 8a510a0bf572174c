"""Boards, levels, and sets of cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from turngym_server.symmetry import least_symmetry

DIRECTIONS: Final = ("Up", "Down", "Left", "Right")

_FLOOR: Final = str.maketrans("01", "# ")


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
    top = ((reached & -reached).bit_length() - 1) // stride
    lines: list[int] = []
    columns = 0
    below = reached >> top * stride
    while below:
        lines.append(below & (1 << stride) - 1)
        columns |= lines[-1]
        below >>= stride
    left = (columns & -columns).bit_length() - 1
    width = columns.bit_length() - left
    rows = [f"{line >> left:0{width}b}"[::-1].translate(_FLOOR) for line in lines]
    for target in cells(board.targets & reached):
        row, column = divmod(target - left, stride)
        marked = rows[row - top]
        rows[row - top] = f"{marked[:column]}.{marked[column + 1 :]}"
    return least_symmetry(rows).encode()
