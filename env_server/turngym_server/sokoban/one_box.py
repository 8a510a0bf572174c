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
from turngym_server.sokoban.board import flood, neighbours, nth_cell, shift


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all boards of one size share.

    Attributes:
        stride: from a cell to the one below.
        lane: bits of a lane, whole bytes of them.
        places: for each cell of the box, its lane's bytes.
        ones: bit 0 of every lane.
        together: in every lane, the box's own cell, where no player stands.
        beside: for each direction of a push, in the order of `deltas`: the states whose player just pushed so.
    """

    stride: int
    lane: int
    places: tuple[slice, ...]
    ones: int
    together: int
    beside: tuple[int, int, int, int]

    @property
    def deltas(self) -> tuple[int, int, int, int]:
        return -self.stride, self.stride, -1, 1


@lru_cache(maxsize=64)
def _shape(width: int, height: int) -> _Shape:
    stride = width + 1
    lane_bytes = ((height - 1) * stride + 7) // 8
    lane = 8 * lane_bytes
    boxes = range((height - 2) * stride)

    def standing(delta: int) -> int:
        return sum(1 << box * lane + box + delta for box in boxes if 0 <= box + delta < lane)

    return _Shape(
        stride=stride,
        lane=lane,
        places=tuple(slice(box * lane_bytes, (box + 1) * lane_bytes) for box in boxes),
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
    *,
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
    drawn = layers[number] & asked
    box = starts.nth_box(layers[: number + 1], drawn, left // (number + 1) ** hardness)
    players = drawn >> box * shape.lane & (1 << shape.lane) - 1
    return corner + nth_cell(players, rng.below(players.bit_count())), corner + box


class _Starts:
    """The states of a floor and target from which the box can be brought home, by what that takes.

    Cells count from the corner inside the walls.
    """

    def __init__(self, shape: _Shape, floor: int, target: int) -> None:
        self._shape = shape
        self._target = target
        self._solved = floor << target * shape.lane
        # No start has its box on the target.
        self._open = floor * shape.ones & ~(shape.together | (1 << shape.lane) - 1 << target * shape.lane)
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

    def nth_box(self, layers: Sequence[int], states: int, n: int) -> int:
        """The box of the n-th of some states of the last layer, in the order in which a search box by box meets it."""
        lane = self._shape.lane
        box = ((states & -states).bit_length() - 1) // lane
        if states.bit_length() <= (box + 1) * lane:
            return box
        order: Iterable[int] = (self._target,)
        for before, after in itertools.pairwise((self._solved, *layers)):
            order = self._met(order, before, after)
        by_box = self._in_bytes(states)
        for box in order:
            count = int.from_bytes(by_box[self._shape.places[box]]).bit_count()
            if n < count:
                return box
            n -= count
        raise ValueError("fewer states than n in the lanes of the layer")

    def _in_bytes(self, states: int) -> bytes:
        return states.to_bytes(len(self._shape.places) * self._shape.lane // 8, "little")

    def _met(self, order: Iterable[int], before: int, after: int) -> Iterable[int]:
        """The boxes of a layer, from those of the layer before: each meets itself by walking, then others by pulls."""
        places, step = self._shape.places, self._shape.lane + 1
        none = bytes(self._shape.lane // 8)
        walks = self._in_bytes(self._walked(before) & after)
        pulls = [
            (delta, self._in_bytes(states))
            for delta, beside in zip(self._shape.deltas, self._shape.beside, strict=True)
            if (states := before & beside & shift(after, delta * step))
        ]
        met: dict[int, None] = {}
        for box in order:
            place = places[box]
            if walks[place] != none:
                met[box] = None
            for delta, states in pulls:
                if states[place] != none:
                    met[box - delta] = None
        return met
