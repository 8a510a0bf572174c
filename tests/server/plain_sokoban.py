"""Sokoban written a second time, on rows of text and sets of coordinates, for tests to compare with."""

from collections import deque
from dataclasses import dataclass

from turngym_server.sokoban.board import Level

STEPS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
Cell = tuple[int, int]


@dataclass(frozen=True)
class Plain:
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    player: Cell
    boxes: frozenset[Cell]

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    def after(self, action: str) -> "Plain":
        (y, x), (down, right) = self.player, STEPS[action]
        ahead, beyond = (y + down, x + right), (y + 2 * down, x + 2 * right)
        if ahead in self.walls:
            return self
        if ahead not in self.boxes:
            return Plain(self.walls, self.targets, ahead, self.boxes)
        if beyond in self.walls or beyond in self.boxes:
            return self
        return Plain(self.walls, self.targets, ahead, self.boxes - {ahead} | {beyond})


def plain(level: Level) -> Plain:
    board = level.board

    def places(members: int) -> frozenset[Cell]:
        inside = range(board.width)
        return frozenset(
            (y, x) for y in range(board.height) for x in inside if members >> (y * (board.width + 1) + x) & 1
        )

    everywhere = frozenset((y, x) for y in range(board.height) for x in range(board.width))
    (player,) = places(1 << level.player)
    return Plain(everywhere - places(board.floor), places(board.targets), player, places(level.boxes))


def least(start: Plain, *, pushes_only: bool) -> int | None:
    """Least moves, or least pushes, of a solution; None: there is none."""
    costs = {(start.player, start.boxes): 0}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        cost = costs[state.player, state.boxes]
        if state.solved:
            return cost
        for action in STEPS:
            to = state.after(action)
            step = int(to.boxes != state.boxes) if pushes_only else 1
            key = (to.player, to.boxes)
            if costs.get(key, cost + step + 1) > cost + step:
                costs[key] = cost + step
                # Zero-one breadth first: what costs nothing goes first.
                (queue.append if step else queue.appendleft)(to)
    return None


def random_success(start: Plain, moves: int) -> float:
    """Probability that uniform moves solve it, by summing over every sequence."""
    if start.solved:
        return 1.0
    if not moves:
        return 0.0
    return sum(random_success(start.after(action), moves - 1) for action in STEPS) / 4
