"""All starts of a board with one box: played backwards from the solved positions, all at once.

A set of states is one integer. It has a lane for each cell of the box, as wide as the board has cells inside the
walls (and a column and a row of guards); the bits of the lane are the cells of the player. One shift moves every
player of every lane; a pull moves box and player alike, so it is a shift too, by a lane and a cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from turngym_server.rng import Rng
from turngym_server.sokoban.board import cells, flood, neighbours, shift


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all boards of one size share.

    Attributes:
        stride: from a cell to the one below.
        lane: bits of a lane.
        ones: bit 0 of every lane.
        together: in every lane, the box's own cell, where no player stands.
        beside: for each direction of a push, in the order of `deltas`: the states whose player just pushed so.
    """

    stride: int
    lane: int
    ones: int
    together: int
    beside: tuple[int, int, int, int]

    @property
    def deltas(self) -> tuple[int, int, int, int]:
        return -self.stride, self.stride, -1, 1


@lru_cache(maxsize=64)
def _shape(width: int, height: int) -> _Shape:
    stride = width + 1
    lane = (height - 1) * stride
    boxes = range((height - 2) * stride)

    def standing(delta: int) -> int:
        return sum(1 << box * lane + box + delta for box in boxes if 0 <= box + delta < lane)

    return _Shape(
        stride=stride,
        lane=lane,
        ones=sum(1 << box * lane for box in boxes),
        together=standing(0),
        beside=(standing(stride), standing(-stride), standing(1), standing(-1)),
    )


def draw_start(
    rng: Rng,
    width: int,
    height: int,
    floor: int,
    target: int,
    max_moves: int,
    pushes: tuple[int, int | None],
    hardness: int,
) -> tuple[int, int] | None:
    """Cells of player and box, drawn with weight (least moves)^hardness; None: the floor and target allow none.

    Args:
        max_moves: of the least moves.
        pushes: the range of the least pushes; its upper end may be open.
    """
    shape = _shape(width, height)
    corner = shape.stride + 1
    starts = _Starts(shape, floor >> corner, target - corner)
    asked = starts.by_pushes(*pushes)
    layers: list[int] = []
    weights: list[int] = []
    for moves, layer in enumerate(starts.by_moves(max_moves, asked), start=1):
        layers.append(layer)
        weights.append(moves**hardness * (layer & asked).bit_count())
    total = sum(weights)
    if not total:
        return None
    left = rng.below(total)
    number = 0
    while left >= weights[number]:
        left -= weights[number]
        number += 1
    left //= (number + 1) ** hardness
    for box in starts.boxes(layers[: number + 1]):
        players = starts.players(layers[number] & asked, box)
        count = players.bit_count()
        if left < count:
            return corner + list(cells(players))[rng.below(count)], corner + box
        left -= count
    raise AssertionError("unreachable: the lanes of a layer hold all of it")


class _Starts:
    """The states of a floor and target from which the box can be brought home, by what that takes.

    Cells count from the corner inside the walls.
    """

    def __init__(self, shape: _Shape, floor: int, target: int) -> None:
        self._shape = shape
        self._target = target
        self._lane = (1 << shape.lane) - 1
        self._solved = floor << target * shape.lane
        # No start has its box on the target.
        self._open = floor * shape.ones & ~(shape.together | self._lane << target * shape.lane)
        self._last = self._pulled(self._solved)

    def _pulled(self, states: int) -> int:
        """The states that one push leads from into some of these."""
        stride, step = self._shape.stride, self._shape.lane + 1
        up, down, left, right = self._shape.beside
        return self._open & (
            (states & up) << stride * step
            | (states & down) >> stride * step
            | (states & left) << step
            | (states & right) >> step
        )

    def _walked(self, states: int) -> int:
        """The states that one move without a push leads from into some of these."""
        return neighbours(states, self._shape.stride) & self._open

    def by_pushes(self, least: int, most: int | None) -> int:
        """The states whose least pushes lie within a range; where it is open, some without a solution too."""
        fewer, edge = self._after_pushes(0, self._last, least - 1)
        if most is None:
            return self._open & ~fewer if edge else 0
        within, _ = self._after_pushes(fewer, edge, most - least + 1)
        return within & ~fewer

    def _after_pushes(self, seen: int, edge: int, count: int) -> tuple[int, int]:
        """Adds to the states seen those that take up to so many pushes more; and the edge of those beyond."""
        for _ in range(count):
            if not edge:
                break
            seen |= (found := flood(edge, self._open, self._shape.stride))
            edge = self._pulled(found) & ~seen
        return seen, edge

    def by_moves(self, most: int, asked: int) -> Iterator[int]:
        """The states whose least moves are 1, 2, … up to `most`, as far as those asked for go."""
        unseen, layer = self._open, self._last
        for _ in range(most):
            if not layer or not unseen & asked:
                return
            yield layer
            unseen ^= layer
            layer = (self._walked(layer) | self._pulled(layer)) & unseen

    def players(self, states: int, box: int) -> int:
        """Where the player stands in the states with this box."""
        return states >> box * self._shape.lane & self._lane

    def boxes(self, layers: Sequence[int]) -> Iterable[int]:
        """The boxes of the last of the layers by moves, in the order in which a search box by box meets them."""
        order: Iterable[int] = (self._target,)
        for before, after in itertools.pairwise((self._solved, *layers)):
            order = self._met(order, before, after)
        return order

    def _met(self, order: Iterable[int], before: int, after: int) -> Iterable[int]:
        """The boxes of a layer, from those of the layer before: each meets itself by walking, then others by pulls."""
        step = self._shape.lane + 1
        ways = [(0, self._walked(before) & after)]
        for delta, beside in zip(self._shape.deltas, self._shape.beside, strict=True):
            ways.append((delta, before & beside & shift(after, delta * step)))
        return dict.fromkeys(box - delta for box in order for delta, from_ in ways if self.players(from_, box))
