"""Exact play on boards small enough to search whole: least moves, and the odds of a random player.

Layers of the search hold, for each set of boxes, the set of cells where the player may stand, so that one shift moves
every player at once.
"""

from __future__ import annotations

import math
from functools import lru_cache

from turngym_server.sokoban.board import Board, neighbours, shift

Moves = tuple[int, ...]
"""Indices into `DIRECTIONS`."""


def state_bound(board: Board) -> int:
    """The number of ways to place the player and the boxes on the floor."""
    floor, boxes = board.floor.bit_count(), board.targets.bit_count()
    return floor * math.comb(floor - 1, boxes)


@lru_cache(maxsize=4_096)
def live_cells(board: Board) -> int:
    """Cells from which a box, alone on the board, can be pushed to some target."""
    live = board.targets
    frontier = live
    while frontier:
        found = 0
        for delta in board.deltas:
            # A box is pulled from `to` to `to − delta` by a player who ends on `to − 2·delta`.
            found |= shift(frontier, -delta) & board.floor & shift(board.floor, delta)
        frontier = found & ~live
        live |= frontier
    return live


def least_moves(board: Board, player: int, boxes: int) -> Moves | None:
    """A shortest solution, pushes and walking counted alike; None: there is none.

    Breadth first over all that can be reached: time and memory grow with `state_bound`.
    """
    if boxes == board.targets:
        return ()
    floor, targets, stride = board.floor, board.targets, board.stride
    live, deltas = live_cells(board), board.deltas
    seen = {boxes: 1 << player}
    layer = {boxes: 1 << player}
    layers = [layer]
    while layer:
        following: dict[int, int] = {}
        for at, players in layer.items():
            walked = neighbours(players, stride) & floor & ~at & ~seen[at]
            if walked:
                following[at] = following.get(at, 0) | walked
            for delta in deltas:
                pushed = shift(players, delta) & at & shift(live & ~at, -delta)
                while pushed:
                    box = pushed & -pushed
                    pushed ^= box
                    after = at ^ box ^ shift(box, delta)
                    if after == targets:
                        layers.append({after: box})
                        return _walk_back(layers, deltas)
                    if not seen.get(after, 0) & box:
                        following[after] = following.get(after, 0) | box
        for at, players in following.items():
            seen[at] = seen.get(at, 0) | players
        layers.append(following)
        layer = following
    return None


def _walk_back(layers: list[dict[int, int]], deltas: tuple[int, int, int, int]) -> Moves:
    """The moves that lead through the layers to the one state of the last."""
    ((boxes, last),) = layers[-1].items()
    player = last.bit_length() - 1
    moves: list[int] = []
    for layer in reversed(layers[:-1]):
        move, boxes = _move_into(layer, boxes, player, deltas)
        player -= deltas[move]
        moves.append(move)
    return tuple(reversed(moves))


def _move_into(layer: dict[int, int], boxes: int, player: int, deltas: tuple[int, int, int, int]) -> tuple[int, int]:
    """A move that leads from some state of the layer to this one, and that state's boxes."""
    for move, delta in enumerate(deltas):
        before, ahead = player - delta, player + delta
        if before < 0:
            continue
        if layer.get(boxes, 0) >> before & 1:
            return move, boxes
        if ahead >= 0 and boxes >> ahead & 1:
            pulled = boxes ^ (1 << ahead | 1 << player)
            if layer.get(pulled, 0) >> before & 1:
                return move, pulled
    raise AssertionError("every state of a layer was reached from the layer before")


def random_player_success(board: Board, player: int, boxes: int, moves: int) -> float:
    """Exact probability that `moves` uniform random moves solve the level on the way.

    Counts move sequences in integers: at most `state_bound` states for each move.
    """
    floor, targets, deltas, live = board.floor, board.targets, board.deltas, live_cells(board)
    counts = {(player, boxes): 1}
    solved = 0
    for left in range(moves - 1, -1, -1):
        following: dict[tuple[int, int], int] = {}
        for state, count in counts.items():
            at, on = state
            for delta in deltas:
                to = at + delta
                after = state
                if floor >> to & 1:
                    if not on >> to & 1:
                        after = (to, on)
                    else:
                        beyond = to + delta
                        if floor >> beyond & 1 and not on >> beyond & 1:
                            if not live >> beyond & 1:
                                continue
                            pushed = on ^ (1 << to | 1 << beyond)
                            if pushed == targets:
                                solved += count * 4**left
                                continue
                            after = (to, pushed)
                following[after] = following.get(after, 0) + count
        counts = following
    return solved / 4**moves
