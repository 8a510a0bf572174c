"""Draws solvable levels.

One box: all starts of a floor and target are known from the solved positions backwards. Whether one push is to be
enough is drawn first, then a start, on uniform floors with weight (least moves)³. So 6×6 levels are as hard as RAGEN's:
a median of 4 moves, 29.5 % with one push, 17 to 19 % solved by 10 random moves.

Several boxes: random play backwards from the solved position; the way back is a solution, so its length bounds the
least moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from turngym_server.environment import NoInstance
from turngym_server.rng import Rng
from turngym_server.sokoban.board import Board, Level, nth_cell
from turngym_server.sokoban.floors import Floors, draw_floor, ends_of_pushes
from turngym_server.sokoban.one_box import draw_start
from turngym_server.sokoban.search import least_pushes

ONE_PUSH_PER_MILLE: Final = 295
"""Share of one-box levels that one push can solve, where `Difficulty` allows both: RAGEN's share at 6×6."""

_HARDNESS: Final[dict[Floors, int]] = {"uniform": 3, "walk": 0}
"""Power of its least moves with which a one-box start is weighted. Open rooms are hard enough without."""

_CELLS_TRIED: Final = 100_000
"""Floors are drawn until their cells add up to this: what does not exist is given up after seconds at any size."""

_TARGETS_TRIED: Final = 8
_SEARCH_NODES: Final = 500


@dataclass(frozen=True, slots=True)
class Difficulty:
    """What a level may ask for: at most `max_moves` moves, and least pushes within a range."""

    max_moves: int
    min_pushes: int = 1
    max_pushes: int | None = None


@dataclass(frozen=True, slots=True)
class _Room:
    """A floor, and those of its cells that a push can end on."""

    width: int
    height: int
    floor: int
    ends: int

    @property
    def stride(self) -> int:
        return self.width + 1


def draw_level(rng: Rng, width: int, height: int, boxes: int, difficulty: Difficulty, floors: Floors) -> Level:
    """A level that can be solved, of the difficulty asked for, with no box on a target.

    Raises:
        NoInstance: none was found on thousands of floors; the difficulty hardly exists at this size.
    """
    asked = _pushes_asked(rng, difficulty) if boxes == 1 else difficulty
    attempts = _CELLS_TRIED // ((width - 2) * (height - 2))
    for _ in range(attempts):
        floor = draw_floor(rng, width, height, floors)
        room = _Room(width, height, floor, ends_of_pushes(floor, width + 1))
        if room.ends.bit_count() < boxes:
            continue
        level = _one_box(rng, room, asked, _HARDNESS[floors]) if boxes == 1 else _several(rng, room, boxes, asked)
        if level is not None:
            return level
    raise NoInstance(
        f"no {width}×{height} level with {boxes} boxes, at most {asked.max_moves} moves and "
        f"{asked.min_pushes} to {asked.max_pushes or 'any number of'} pushes in {attempts} attempts: ask for fewer "
        "boxes or pushes, more moves, or a larger board"
    )


def _pushes_asked(rng: Rng, difficulty: Difficulty) -> Difficulty:
    """Parts one-push levels from the rest, so that their share is fixed where both are allowed."""
    if difficulty.min_pushes > 1 or difficulty.max_pushes == 1:
        return difficulty
    if rng.below(1_000) < ONE_PUSH_PER_MILLE:
        return replace(difficulty, max_pushes=1)
    return replace(difficulty, min_pushes=2)


def _one_box(rng: Rng, room: _Room, difficulty: Difficulty, hardness: int) -> Level | None:
    """A start on this floor, its target uniform among those that allow one; None: none of eight targets does."""
    left = room.ends
    for _ in range(min(_TARGETS_TRIED, left.bit_count())):
        target = nth_cell(left, rng.below(left.bit_count()))
        left ^= 1 << target
        start = draw_start(
            rng,
            room.width,
            room.height,
            room.floor,
            target,
            max_moves=difficulty.max_moves,
            pushes=(difficulty.min_pushes, difficulty.max_pushes),
            hardness=hardness,
        )
        if start is not None:
            player, box = start
            return Level(Board(room.width, room.height, room.floor, 1 << target), player, 1 << box)
    return None


def _several(rng: Rng, room: _Room, boxes: int, difficulty: Difficulty) -> Level | None:
    """A start on this floor that was played backwards; None: a box stayed on a target, or it is too hard or easy."""
    least, most = difficulty.min_pushes, difficulty.max_pushes
    level, pulls = _backwards(rng, room, boxes, difficulty.max_moves)
    # The way back is a solution: where it has too few pushes, no search is needed to say so.
    if level is None or pulls < least:
        return None
    if (least, most) == (1, None):
        return level
    pushes = least_pushes(level.board, level.player, level.boxes, _SEARCH_NODES)
    return level if pushes is not None and least <= pushes <= (most or pushes) else None


def _backwards(rng: Rng, room: _Room, count: int, max_moves: int) -> tuple[Level | None, int]:
    """A start reached by random pulls from boxes on random targets, and their number; None: a box is on a target."""
    floor, stride = room.floor, room.stride
    left = room.ends
    for _ in range(count):
        left ^= 1 << nth_cell(left, rng.below(left.bit_count()))
    boxes = targets = room.ends ^ left
    budget = min(max_moves, 2 * count + rng.below(max(1, max_moves - 2 * count + 1)))
    # Before the first pull the player may stand anywhere.
    player, spent, pulls, layers = -1, 0, 0, [floor & ~boxes]
    while True:
        free = floor & ~boxes
        pull = _draw_pull(rng, boxes & targets, free, stride, layers) or _draw_pull(rng, boxes, free, stride, layers)
        if pull is None:
            break
        cost, box, delta = pull
        if spent + cost > budget:
            break
        spent += cost
        pulls += 1
        boxes ^= 1 << box | 1 << box - delta
        player = box - 2 * delta
        layers = _layers(player, floor & ~boxes, stride)
    if not pulls or boxes & targets:
        return None, pulls
    near = sum(layers[: max_moves - spent + 1])
    drawn = rng.below(near.bit_count())
    for layer in layers:
        if drawn < layer.bit_count():
            return Level(Board(room.width, room.height, floor, targets), nth_cell(layer, drawn), boxes), pulls
        drawn -= layer.bit_count()
    raise AssertionError("unreachable: the layers hold what was counted")


def _layers(player: int, free: int, stride: int) -> list[int]:
    """The cells at walking distance 0, 1, … of the player."""
    layer = 1 << player
    left = free ^ layer
    layers: list[int] = []
    while layer:
        layers.append(layer)
        # Written out, as a call would double the time of making levels with several boxes.
        layer = (layer << 1 | layer >> 1 | layer << stride | layer >> stride) & left
        left ^= layer
    return layers


def _draw_pull(rng: Rng, chosen: int, free: int, stride: int, layers: list[int]) -> tuple[int, int, int] | None:
    """Moves, box and direction of one of the pushes that could have been the last one of one of the chosen boxes.

    Uniform among them, in the order of moves, directions and cells; None: there is none.
    """
    reached = sum(layers)
    # Where the player stands after such a push, up, down, left and right: before the box, with room behind.
    up = chosen << stride & free >> stride & reached
    down = chosen >> stride & free << stride & reached
    left = chosen << 1 & free >> 1 & reached
    right = chosen >> 1 & free << 1 & reached
    count = up.bit_count() + down.bit_count() + left.bit_count() + right.bit_count()
    if not count:
        return None
    drawn = rng.below(count)
    standing = up | down | left | right
    for steps, layer in enumerate(layers):
        if not layer & standing:
            continue
        for stands, delta in ((up, -stride), (down, stride), (left, -1), (right, 1)):
            here = stands & layer
            if drawn < here.bit_count():
                return steps + 1, nth_cell(here, drawn) + delta, delta
            drawn -= here.bit_count()
    raise AssertionError("unreachable: the layers hold what was counted")
