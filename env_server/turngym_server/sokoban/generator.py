"""Draws solvable levels.

Floors: on an inner grid of at most 16 cells (6×6 boards), uniform among its connected subsets that admit a level;
larger boards take the main component of a random set. With `walk` a brush is moved at random instead, as gym-sokoban
does, which favours open rooms.

One box: all starts of a floor and target are known from the solved positions backwards. Whether one push is to be
enough is drawn first, then a start, on uniform floors with weight (least moves)³. So 6×6 levels are as hard as RAGEN's:
a median of 4 moves, 29.5 % with one push, 17 to 19 % solved by 10 random moves.

Several boxes: random play backwards from the solved position; the way back is a solution, so its length bounds the
least moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from turngym_server.environment import NoInstance
from turngym_server.rng import Rng
from turngym_server.sokoban.board import Board, Level, cells, flood, neighbours, shift
from turngym_server.sokoban.search import fewest_pushes

Floors = Literal["uniform", "walk"]

ONE_PUSH_PER_MILLE: Final = 295
"""Share of one-box levels that one push can solve, where `Difficulty` allows both: RAGEN's share at 6×6."""

_HARDNESS: Final[dict[Floors, int]] = {"uniform": 3, "walk": 0}
"""Power of its least moves with which a one-box start is weighted. Open rooms are hard enough without."""

_CELLS_TRIED: Final = 100_000
"""Floors are drawn until their cells add up to this: what does not exist is given up after seconds at any size."""

_TARGETS_TRIED: Final = 8
_UNIFORM_CELLS: Final = 16
_WALK_STEPS: Final = 25
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
    pushes = _pushes_asked(rng, difficulty) if boxes == 1 else (difficulty.min_pushes, difficulty.max_pushes)
    draw_floor = _draw_walk if floors == "walk" else _draw_uniform
    attempts = _CELLS_TRIED // ((width - 2) * (height - 2))
    for _ in range(attempts):
        floor = draw_floor(rng, width, height)
        room = _Room(width, height, floor, ends_of_pushes(floor, width + 1))
        if room.ends.bit_count() < boxes:
            continue
        if boxes == 1:
            level = _one_box(rng, room, difficulty.max_moves, pushes, _HARDNESS[floors])
        else:
            level = _backwards(rng, room, boxes, difficulty.max_moves)
            if level is not None and pushes != (1, None) and not _asks_for(level, pushes):
                continue
        if level is not None:
            return level
    raise NoInstance(
        f"no {width}×{height} level with {boxes} boxes, at most {difficulty.max_moves} moves and "
        f"{pushes[0]} to {pushes[1] or 'any number of'} pushes in {attempts} attempts: ask for fewer boxes or pushes, "
        "more moves, or a larger board"
    )


def _pushes_asked(rng: Rng, difficulty: Difficulty) -> tuple[int, int | None]:
    """Parts one-push levels from the rest, so that their share is fixed where both are allowed."""
    if difficulty.min_pushes > 1 or difficulty.max_pushes == 1:
        return difficulty.min_pushes, difficulty.max_pushes
    return (1, 1) if rng.below(1_000) < ONE_PUSH_PER_MILLE else (2, difficulty.max_pushes)


def _asks_for(level: Level, pushes: tuple[int, int | None]) -> bool:
    least = fewest_pushes(level.board, level.player, level.boxes, _SEARCH_NODES)
    return least.moves is not None and pushes[0] <= least.pushes <= (pushes[1] or least.pushes)


def connected_floors(width: int, height: int) -> Iterator[int]:
    """Every connected floor of an inner grid of at most 16 cells: what small boards are drawn from."""
    for cells_inside in range(1, 1 << (width - 2) * (height - 2)):
        floor = _inside(cells_inside, width, height)
        if flood(floor & -floor, floor, width + 1) == floor:
            yield floor


def _inside(bits: int, width: int, height: int) -> int:
    """A set of cells within the walls, from the low bits of a word, row by row."""
    row = (1 << width - 2) - 1
    members = 0
    for y in range(1, height - 1):
        members |= (bits & row) << y * (width + 1) + 1
        bits >>= width - 2
    return members


def _draw_uniform(rng: Rng, width: int, height: int) -> int:
    inner = (width - 2) * (height - 2)
    if inner > _UNIFORM_CELLS:
        return _draw_main_component(rng, width, height)
    while True:
        word = rng.word()
        for _ in range(64 // inner):
            floor = _inside(word, width, height)
            if floor and flood(floor & -floor, floor, width + 1) == floor:
                return floor
            word >>= inner


def _draw_main_component(rng: Rng, width: int, height: int) -> int:
    """The largest component of a set that holds each inner cell with probability 3/4, at least half of them all."""
    inner = (width - 2) * (height - 2)
    while True:
        bits = 0
        for place in range(0, inner, 64):
            bits |= (rng.word() | rng.word()) << place
        left = floor = _inside(bits, width, height)
        while left.bit_count() * 2 >= inner:
            component = flood(left & -left, floor, width + 1)
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


def _draw_walk(rng: Rng, width: int, height: int) -> int:
    """gym-sokoban's room: 25 steps of a random walk, turning with probability 0.35, with a random brush at each."""
    steps = ((1, 0), (-1, 0), (0, 1), (0, -1))
    y, x = 1 + rng.below(height - 2), 1 + rng.below(width - 2)
    down, right = rng.choice(steps)
    floor = 0
    for _ in range(_WALK_STEPS):
        if rng.below(100) < 35:
            down, right = rng.choice(steps)
        y = min(max(y + down, 1), height - 2)
        x = min(max(x + right, 1), width - 2)
        for row, column in rng.choice(_BRUSHES):
            if 1 <= y + row <= height - 2 and 1 <= x + column <= width - 2:
                floor |= 1 << (y + row) * (width + 1) + x + column
    return flood(floor & -floor, floor, width + 1)


def ends_of_pushes(floor: int, stride: int) -> int:
    """Cells onto which some straight push ends: the two cells before them are floor."""
    return floor & (
        floor << 1 & floor << 2
        | floor >> 1 & floor >> 2
        | floor << stride & floor << 2 * stride
        | floor >> stride & floor >> 2 * stride
    )


Players = dict[int, int]
"""For each cell of the one box, the set of cells where the player may stand."""


def _one_box(rng: Rng, room: _Room, max_moves: int, pushes: tuple[int, int | None], hardness: int) -> Level | None:
    """A start on this floor, its target uniform among those that allow one; None: none of eight targets does."""
    targets = list(cells(room.ends))
    for _ in range(min(_TARGETS_TRIED, len(targets))):
        target = targets.pop(rng.below(len(targets)))
        asked = _starts_by_pushes(room.floor, target, room.stride, pushes)
        starts = [
            (moves, box, allowed)
            for moves, layer in enumerate(_starts_by_moves(room.floor, target, room.stride, max_moves), start=1)
            for box, players in layer.items()
            if (allowed := players & asked.get(box, 0))
        ]
        if starts:
            drawn = rng.weighted([moves**hardness * allowed.bit_count() for moves, _, allowed in starts])
            _, box, players = starts[drawn]
            player = list(cells(players))[rng.below(players.bit_count())]
            return Level(Board(room.width, room.height, room.floor, 1 << target), player, 1 << box)
    return None


def _before_push_onto(cell: int, players: int, floor: int, stride: int) -> list[tuple[int, int]]:
    """Box and player before each push that puts a box onto a cell and leaves the player in a set of cells."""
    return [
        (cell - delta, cell - 2 * delta)
        for delta in (-stride, stride, -1, 1)
        if players >> cell - delta & 1 and floor >> cell - 2 * delta & 1
    ]


def _add_unseen(to: Players, starts: list[tuple[int, int]], seen: Players) -> None:
    for box, player in starts:
        if not seen.get(box, 0) >> player & 1:
            to[box] = to.get(box, 0) | 1 << player


def _starts_by_moves(floor: int, target: int, stride: int, max_moves: int) -> list[Players]:
    """The starts with least moves 1, 2, … up to `max_moves`."""
    seen: Players = {target: -1}
    layers: list[Players] = []
    layer: Players = {}
    _add_unseen(layer, _before_push_onto(target, floor, floor, stride), seen)
    while layer and len(layers) < max_moves:
        for box, players in layer.items():
            seen[box] = seen.get(box, 1 << box) | players
        layers.append(layer)
        following: Players = {}
        for box, players in layer.items():
            walked = neighbours(players, stride) & floor & ~seen[box]
            if walked:
                following[box] = following.get(box, 0) | walked
            _add_unseen(following, _before_push_onto(box, players, floor, stride), seen)
        layer = following
    return layers


def _starts_by_pushes(floor: int, target: int, stride: int, pushes: tuple[int, int | None]) -> Players:
    """The starts whose least pushes lie within the range; the upper end may be open."""
    least, most = pushes
    seen: Players = {target: -1}
    fewer: Players = {}
    layer: Players = {}
    _add_unseen(layer, _before_push_onto(target, floor, floor, stride), seen)
    count = 0
    while layer and (most is None or count < most):
        count += 1
        if count == least:
            fewer = dict(seen)
        found: Players = {}
        for box, players in layer.items():
            spread = flood(players, floor & ~(1 << box), stride)
            found[box] = spread & ~seen.get(box, 0)
            seen[box] = seen.get(box, 0) | spread
        layer = {}
        for box, players in found.items():
            _add_unseen(layer, _before_push_onto(box, players, floor, stride), seen)
    if count < least:
        return {}
    del seen[target]
    return {box: players & ~fewer.get(box, 0) for box, players in seen.items()}


def _backwards(rng: Rng, room: _Room, count: int, max_moves: int) -> Level | None:
    """A start reached by random pulls from boxes on random targets; None: a box stayed on a target."""
    floor, stride = room.floor, room.stride
    candidates = list(cells(room.ends))
    targets = 0
    for _ in range(count):
        targets |= 1 << candidates.pop(rng.below(len(candidates)))
    boxes = targets
    budget = min(max_moves, 2 * count + rng.below(max(1, max_moves - 2 * count + 1)))
    # Before the first pull the player may stand anywhere.
    player, spent, layers = -1, 0, [floor & ~boxes]
    while True:
        free = floor & ~boxes
        pulls = _pulls(boxes & targets, free, stride, layers) or _pulls(boxes, free, stride, layers)
        if not pulls:
            break
        cost, box, delta = rng.choice(pulls)
        if spent + cost > budget:
            break
        spent += cost
        boxes ^= 1 << box | 1 << box - delta
        player = box - 2 * delta
        layers = _layers(player, floor & ~boxes, stride)
    if player == -1 or boxes & targets:
        return None
    near = [cell for layer in layers[: max_moves - spent + 1] for cell in cells(layer)]
    return Level(Board(room.width, room.height, floor, targets), rng.choice(near), boxes)


def _layers(player: int, free: int, stride: int) -> list[int]:
    """The cells at walking distance 0, 1, … of the player."""
    reached = layer = 1 << player
    layers: list[int] = []
    while layer:
        layers.append(layer)
        layer = neighbours(layer, stride) & free & ~reached
        reached |= layer
    return layers


def _pulls(chosen: int, free: int, stride: int, layers: list[int]) -> list[tuple[int, int, int]]:
    """Moves, box and direction of every push that could have been the last one of one of the chosen boxes."""
    return [
        (steps + 1, before + delta, delta)
        for steps, layer in enumerate(layers)
        for delta in (-stride, stride, -1, 1)
        if (befores := shift(chosen, -delta) & layer & shift(free, delta))
        for before in cells(befores)
    ]
