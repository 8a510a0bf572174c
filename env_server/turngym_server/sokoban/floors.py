"""Draws floors: the sets of cells inside the walls on which levels are made.

`uniform`: on an inner grid of at most 16 cells (6×6 boards), uniform among its connected subsets; larger boards take
the main component of a random set. `walk`: a brush is moved at random, as gym-sokoban does, which favours open rooms.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Literal

import numpy as np

from turngym_server.rng import Rng
from turngym_server.sokoban.board import flood

Floors = Literal["uniform", "walk"]

_UNIFORM_CELLS: Final = 16
_WALK_STEPS: Final = 25


def draw_floor(rng: Rng, width: int, height: int, floors: Floors) -> int:
    """A connected floor of a board of this size, none of it on the border."""
    if floors == "walk":
        return _draw_walk(rng, width, height)
    if (width - 2) * (height - 2) <= _UNIFORM_CELLS:
        return _draw_uniform(rng, width, height)
    return _draw_main_component(rng, width, height)


def connected_floors(width: int, height: int) -> Iterator[int]:
    """Every connected floor of an inner grid of at most 16 cells: what small boards are drawn from."""
    for bits, connected in enumerate(_connected(width - 2, height - 2)):
        if connected:
            yield _inside(bits, width, height)


def ends_of_pushes(floor: int, stride: int) -> int:
    """Cells onto which some straight push ends: the two cells before them are floor."""
    return floor & (
        floor << 1 & floor << 2
        | floor >> 1 & floor >> 2
        | floor << stride & floor << 2 * stride
        | floor >> stride & floor >> 2 * stride
    )


def _inside(bits: int, width: int, height: int) -> int:
    """A set of cells within the walls, from the low bits of a word, row by row."""
    inner = width - 2
    row = (1 << inner) - 1
    members = 0
    for place in range(width + 2, (height - 1) * (width + 1), width + 1):
        members |= (bits & row) << place
        bits >>= inner
    return members


@lru_cache(maxsize=8)
def _connected(columns: int, rows: int) -> bytes:
    """For each set of cells of a grid, written as bits row by row: 1 where it is connected, 0 where not or empty.

    All sets are flooded at once, each from its lowest cell.
    """
    sets = np.arange(1 << columns * rows, dtype=np.uint32)
    first = np.uint32(sum(1 << row * columns for row in range(rows)))
    last = first << np.uint32(columns - 1)
    reached = sets & (~sets + np.uint32(1))
    while True:
        grown = reached | reached << columns | reached >> columns | (reached & ~last) << 1 | (reached & ~first) >> 1
        grown &= sets
        if np.array_equal(grown, reached):
            return ((reached == sets) & (sets != 0)).tobytes()
        reached = grown


def _draw_uniform(rng: Rng, width: int, height: int) -> int:
    inner = (width - 2) * (height - 2)
    connected = _connected(width - 2, height - 2)
    cells_inside = (1 << inner) - 1
    while True:
        word = rng.word()
        for _ in range(64 // inner):
            bits = word & cells_inside
            if connected[bits]:
                return _inside(bits, width, height)
            word >>= inner


def _draw_main_component(rng: Rng, width: int, height: int) -> int:
    """The largest component of a set that holds each inner cell with probability 3/4, at least half of them all."""
    inner = (width - 2) * (height - 2)
    cells_inside = (1 << inner) - 1
    stride = width + 1
    while True:
        bits = 0
        for place in range(0, inner, 64):
            bits |= (rng.word() | rng.word()) << place
        left = floor = _inside(bits & cells_inside, width, height)
        while left.bit_count() * 2 >= inner:
            component = flood(left & -left, floor, stride)
            if component.bit_count() * 2 >= inner:
                return component
            left &= ~component


_BRUSHES: Final = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
"""Rows and columns, from the middle, that gym-sokoban's masks clear."""


@lru_cache(maxsize=64)
def _brushes(stride: int) -> tuple[int, ...]:
    """The brushes as sets of cells around cell stride + 1."""
    return tuple(sum(1 << (1 + row) * stride + 1 + column for row, column in brush) for brush in _BRUSHES)


def _draw_walk(rng: Rng, width: int, height: int) -> int:
    """gym-sokoban's room: 25 steps of a random walk, turning with probability 0.35, with a random brush at each."""
    steps = ((1, 0), (-1, 0), (0, 1), (0, -1))
    stride = width + 1
    brushes = _brushes(stride)
    y, x = rng.below(height - 2), rng.below(width - 2)
    down, right = rng.choice(steps)
    painted = 0
    for _ in range(_WALK_STEPS):
        if rng.below(100) < 35:
            down, right = rng.choice(steps)
        y = min(max(y + down, 0), height - 3)
        x = min(max(x + right, 0), width - 3)
        painted |= rng.choice(brushes) << y * stride + x
    floor = painted & _inside(-1, width, height)
    return flood(floor & -floor, floor, stride)
