"""Chooses the solver that fits a board, and says what its answer is worth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from turngym_server.sokoban.board import DIRECTIONS, Board
from turngym_server.sokoban.search import NODE_LIMIT, fewest_pushes
from turngym_server.sokoban.solver import Moves, least_moves, state_bound

EXACT_STATES: Final = 60_000
"""Boards with at most so many places for player and boxes are searched whole, for least moves."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to solve a level.

    Attributes:
        moves: the moves; None: no solution was found.
        exact: no solution has fewer moves; with no moves, there is none at all.
    """

    moves: Moves | None
    exact: bool


@lru_cache(maxsize=4_096)
def plan(board: Board, player: int, boxes: int, node_limit: int = NODE_LIMIT) -> Plan:
    """Least moves where the board can be searched whole; else fewest pushes, within a number of nodes."""
    if state_bound(board) <= EXACT_STATES:
        return Plan(least_moves(board, player, boxes), exact=True)
    search = fewest_pushes(board, player, boxes, node_limit)
    return Plan(search.moves, exact=search.moves is None and search.exhausted)


def describe(board: Board, player: int, boxes: int, moves: Moves) -> str:
    """The next run of pushes on one box, in words: which box, to where, and from where it is pushed first.

    Cells are row,column from 1.
    """
    source = to = stand = first = -1
    for move in moves:
        ahead = player + board.deltas[move]
        if boxes >> ahead & 1:
            beyond = ahead + board.deltas[move]
            if to == -1:
                source, stand, first = ahead, player, move
            elif ahead != to:
                break
            to = beyond
            boxes ^= 1 << ahead | 1 << beyond
        player = ahead
    return f"Box {_place(board, source)} to {_place(board, to)}: push {DIRECTIONS[first]} from {_place(board, stand)}."


def _place(board: Board, cell: int) -> str:
    row, column = board.row_column(cell)
    return f"{row},{column}"
