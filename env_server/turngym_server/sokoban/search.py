"""Solutions of boards too large to search whole: A* over pushes, with deadlocks cut off.

It finds a solution with the fewest pushes, and walks the shortest way between them; that need not be a solution of
least moves. The effort is bounded in nodes, never in time, so the answer is the same everywhere.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from turngym_server.sokoban.board import Board, cells, flood, neighbours, shift
from turngym_server.sokoban.solver import Moves, live_cells

NODE_LIMIT: Final = 20_000
"""Nodes expanded before a search gives up."""

_ASSIGNED_BOXES: Final = 6
"""Up to so many boxes the estimate assigns boxes to targets; beyond, every box is sent to its nearest one."""

_FAR: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found.

    Attributes:
        moves: a solution, None where none was found.
        pushes: its number of pushes, the least possible.
        exhausted: the search saw everything: with no moves, the level cannot be solved.
        nodes: nodes expanded.
    """

    moves: Moves | None
    pushes: int
    exhausted: bool
    nodes: int


@dataclass(slots=True)
class _Node:
    boxes: int
    player: int
    pushes: int
    parent: _Node | None
    move: int


def fewest_pushes(board: Board, player: int, boxes: int, node_limit: int = NODE_LIMIT) -> Search:
    """Searches for a solution with the fewest pushes; see `Search`."""
    found, exhausted, nodes = _search(board, player, boxes, node_limit)
    if found is None:
        return Search(None, 0, exhausted, nodes)
    return Search(_all_moves(board, found), found.pushes, exhausted, nodes)


def least_pushes(board: Board, player: int, boxes: int, node_limit: int = NODE_LIMIT) -> int | None:
    """The pushes of `fewest_pushes`, without the walks between them; None: no solution was found."""
    found, _, _ = _search(board, player, boxes, node_limit)
    return None if found is None else found.pushes


def _search(board: Board, player: int, boxes: int, node_limit: int) -> tuple[_Node | None, bool, int]:
    """The last node of a solution with the fewest pushes; whether all was seen that had to be; nodes expanded."""
    floor, targets, stride, deltas = board.floor, board.targets, board.stride, board.deltas
    live = live_cells(board)
    estimate = _Estimate(board)
    frozen = _Freezing(board)
    root = _Node(boxes, player, 0, None, -1)
    if boxes == targets:
        return root, True, 0
    heap: list[tuple[int, int, int, _Node]] = [(estimate.of(boxes), 0, 0, root)]
    expanded: set[tuple[int, int]] = set()
    generated = {(boxes, player)}
    order = 0
    while heap:
        _, _, _, node = heapq.heappop(heap)
        at = node.boxes
        reach = flood(1 << node.player, floor & ~at, stride)
        key = (at, reach & -reach)
        if key in expanded:
            continue
        if len(expanded) >= node_limit:
            return None, False, len(expanded)
        expanded.add(key)
        free = live & ~at
        for move, delta in enumerate(deltas):
            pushable = shift(reach, delta) & at & shift(free, -delta)
            while pushable:
                box = pushable & -pushable
                pushable ^= box
                moved = shift(box, delta)
                after = at ^ box ^ moved
                stand = box.bit_length() - 1
                if (after, stand) in generated:
                    continue
                generated.add((after, stand))
                child = _Node(after, stand, node.pushes + 1, node, move)
                if after == targets:
                    return child, True, len(expanded)
                rest = estimate.of(after)
                if rest >= _FAR or frozen.off_target(after, moved.bit_length() - 1):
                    continue
                order -= 1
                heapq.heappush(heap, (child.pushes + rest, rest, order, child))
    return None, True, len(expanded)


class _Estimate:
    """A lower bound of the pushes left: boxes to targets, each alone on the board."""

    def __init__(self, board: Board) -> None:
        self._distances = _push_distances(board)
        self._known: dict[int, int] = {}

    def of(self, boxes: int) -> int:
        bound = self._known.get(boxes)
        if bound is None:
            rows = [self._distances.get(cell, ()) for cell in cells(boxes)]
            bound = self._known[boxes] = _assignment(rows) if len(rows) <= _ASSIGNED_BOXES else _nearest(rows)
        return bound


def _nearest(rows: list[tuple[int, ...]]) -> int:
    return sum(min(row, default=_FAR) for row in rows)


def _assignment(rows: list[tuple[int, ...]]) -> int:
    """Least total of one entry a row, no column twice."""
    best = {0: 0}
    for row in rows:
        following: dict[int, int] = {}
        for used, total in best.items():
            for column, distance in enumerate(row):
                if distance < _FAR and not used >> column & 1:
                    taken = used | 1 << column
                    cost = total + distance
                    if cost < following.get(taken, _FAR):
                        following[taken] = cost
        best = following
    return min(best.values(), default=_FAR)


@lru_cache(maxsize=256)
def _push_distances(board: Board) -> Mapping[int, tuple[int, ...]]:
    """For each cell from which a lone box can reach a target: pushes to each target, in ascending order of targets."""
    columns: list[dict[int, int]] = []
    for target in cells(board.targets):
        distance = {target: 0}
        frontier = [target]
        while frontier:
            following: list[int] = []
            for to in frontier:
                for delta in board.deltas:
                    box, stand = to - delta, to - 2 * delta
                    if box not in distance and stand >= 0 and board.floor >> box & 1 and board.floor >> stand & 1:
                        distance[box] = distance[to] + 1
                        following.append(box)
            frontier = following
        columns.append(distance)
    return {cell: tuple(column.get(cell, _FAR) for column in columns) for cell in cells(live_cells(board))}


class _Freezing:
    """Finds boxes that no push can ever move again."""

    def __init__(self, board: Board) -> None:
        self._floor = board.floor
        self._live = live_cells(board)
        self._targets = board.targets
        self._stride = board.stride

    def off_target(self, boxes: int, pushed: int) -> bool:
        """Whether the box that was just pushed is frozen together with boxes of which one is off target."""
        stuck = self._stuck(boxes, pushed, 0)
        return stuck & ~self._targets != 0

    def _stuck(self, boxes: int, box: int, walls: int) -> int:
        """The set of boxes frozen with `box`, which is in it; 0: it can move. `walls` are boxes taken for frozen."""
        walls |= 1 << box
        along_row = self._blocked(boxes, box, 1, walls)
        if not along_row:
            return 0
        along_column = self._blocked(boxes, box, self._stride, walls | along_row)
        return along_row | along_column if along_column else 0

    def _blocked(self, boxes: int, box: int, delta: int, walls: int) -> int:
        """The boxes that keep `box` from moving along an axis, itself included; 0: nothing does."""
        here = 1 << box
        one, other = box - delta, box + delta
        solid = ~self._floor | walls
        if solid >> one & 1 or solid >> other & 1:
            return here | (walls & boxes & (1 << one | 1 << other))
        if not (self._live >> one & 1 or self._live >> other & 1):
            return here
        for beside in (one, other):
            if boxes >> beside & 1:
                stuck = self._stuck(boxes, beside, walls)
                if stuck:
                    return here | stuck
        return 0


def _all_moves(board: Board, last: _Node) -> Moves:
    """The pushes up to a node, with the shortest walks between them."""
    nodes: list[_Node] = []
    node: _Node | None = last
    while node is not None:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    moves: list[int] = []
    for before, after in itertools.pairwise(nodes):
        stand = after.player - board.deltas[after.move]
        moves += walk(board, before.boxes, before.player, stand)
        moves.append(after.move)
    return tuple(moves)


def walk(board: Board, boxes: int, start: int, to: int) -> list[int]:
    """A shortest walk between two cells that are connected around the boxes."""
    free = board.floor & ~boxes
    layers = [1 << start]
    reached = 1 << start
    while not reached >> to & 1:
        grown = neighbours(layers[-1], board.stride) & free & ~reached
        if not grown:
            raise ValueError(f"no way from cell {start} to cell {to}")
        layers.append(grown)
        reached |= grown
    moves: list[int] = []
    at = to
    for layer in reversed(layers[:-1]):
        move = next(m for m, delta in enumerate(board.deltas) if at - delta >= 0 and layer >> (at - delta) & 1)
        moves.append(move)
        at -= board.deltas[move]
    moves.reverse()
    return moves
