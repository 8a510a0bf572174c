"""The generator written a second time, on sets of coordinates and one state after the other, to compare levels with."""

from collections.abc import Iterator

from plain_sokoban import Cell, Plain, least

from turngym_server.rng import Rng
from turngym_server.sokoban.generator import Difficulty

DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))
Floor = frozenset[Cell]
State = tuple[Cell, Cell]
"""Box and player."""


def beyond(cell: Cell, direction: Cell, steps: int) -> Cell:
    return cell[0] + steps * direction[0], cell[1] + steps * direction[1]


def spread(start: Cell, within: Floor) -> list[list[Cell]]:
    """The cells at distance 0, 1, … of the start, each layer in the order of rows and columns."""
    layers = [[start]]
    seen = {start}
    while layers[-1]:
        layers.append(
            sorted({at for cell in layers[-1] for d in DIRECTIONS if (at := beyond(cell, d, 1)) in within} - seen)
        )
        seen.update(layers[-1])
    return layers[:-1]


def component(start: Cell, within: Floor) -> Floor:
    return frozenset(cell for layer in spread(start, within) for cell in layer)


def in_word(bits: int, width: int, height: int) -> Floor:
    inside = [(y, x) for y in range(1, height - 1) for x in range(1, width - 1)]
    return frozenset(cell for place, cell in enumerate(inside) if bits >> place & 1)


def uniform_floor(rng: Rng, width: int, height: int) -> Floor:
    inner = (width - 2) * (height - 2)
    while True:
        if inner <= 16:
            word = rng.word()
            for place in range(0, 64 - inner + 1, inner):
                floor = in_word(word >> place, width, height)
                if floor and component(min(floor), floor) == floor:
                    return floor
        else:
            words = [rng.word() | rng.word() for _ in range(0, inner, 64)]
            floor = in_word(sum(word << 64 * place for place, word in enumerate(words)), width, height)
            for cell in sorted(floor):
                if len(main := component(cell, floor)) * 2 >= inner:
                    return main


BRUSHES = ("000111000", "010010010", "000110010", "000110110", "000011010")
"""Three rows of each."""


def walked_floor(rng: Rng, width: int, height: int) -> Floor:
    at = (1 + rng.below(height - 2), 1 + rng.below(width - 2))
    direction = ((1, 0), (-1, 0), (0, 1), (0, -1))[rng.below(4)]
    floor = set[Cell]()
    for _ in range(25):
        if rng.below(100) < 35:
            direction = ((1, 0), (-1, 0), (0, 1), (0, -1))[rng.below(4)]
        y, x = beyond(at, direction, 1)
        at = (min(max(y, 1), height - 2), min(max(x, 1), width - 2))
        brush = BRUSHES[rng.below(5)]
        floor |= {(at[0] + place // 3 - 1, at[1] + place % 3 - 1) for place, mark in enumerate(brush) if mark == "1"}
    inside = frozenset((y, x) for y, x in floor if 1 <= y <= height - 2 and 1 <= x <= width - 2)
    return component(min(inside), inside)


def before_push(state: State, floor: Floor) -> Iterator[State]:
    """The states from which one push leads to this one."""
    box, player = state
    for direction in DIRECTIONS:
        if player == beyond(box, direction, -1) and (stood := beyond(box, direction, -2)) in floor:
            yield player, stood


def starts_by_moves(floor: Floor, target: Cell) -> list[dict[Cell, list[Cell]]]:
    """For least moves 1, 2, …: for each box, in the order in which it is met, the cells of the player."""
    layer = {target: sorted(floor - {target})}
    seen = {(target, player) for player in floor}
    layers: list[dict[Cell, list[Cell]]] = []
    while layer:
        following: dict[Cell, set[Cell]] = {}
        for box, players in layer.items():
            walks = [(box, beyond(player, d, 1)) for player in players for d in DIRECTIONS]
            pulls = [
                state
                for direction in DIRECTIONS
                if (player := beyond(box, direction, -1)) in players
                for state in before_push((box, player), floor)
            ]
            for at, player in (*walks, *pulls):
                if player in floor and player != at and (at, player) not in seen:
                    following.setdefault(at, set()).add(player)
        layer = {box: sorted(players) for box, players in following.items()}
        seen |= {(box, player) for box, players in layer.items() for player in players}
        layers.append(layer)
    return layers[:-1]


def one_box(rng: Rng, board: Plain, floor: Floor, ends: list[Cell], asked: Difficulty, power: int) -> Plain | None:
    ends = list(ends)
    for _ in range(min(8, len(ends))):
        target = ends.pop(rng.below(len(ends)))
        groups: list[tuple[int, Cell, list[Cell]]] = []
        for moves, layer in enumerate(starts_by_moves(floor, target)[: asked.max_moves], start=1):
            for box, players in layer.items():
                starts = [Plain(board.walls, frozenset({target}), player, frozenset({box})) for player in players]
                fitting = [start.player for start in starts if fits(least(start, pushes_only=True), asked)]
                if fitting:
                    groups.append((moves**power * len(fitting), box, fitting))
        if groups:
            _, box, players = groups[rng.weighted([weight for weight, _, _ in groups])]
            return Plain(board.walls, frozenset({target}), players[rng.below(len(players))], frozenset({box}))
    return None


def fits(pushes: int | None, asked: Difficulty) -> bool:
    return pushes is not None and asked.min_pushes <= pushes <= (asked.max_pushes or pushes)


def several_boxes(
    rng: Rng, board: Plain, floor: Floor, ends: list[Cell], count: int, asked: Difficulty
) -> Plain | None:
    left = list(ends)
    targets = frozenset(left.pop(rng.below(len(left))) for _ in range(count))
    boxes = targets
    budget = min(asked.max_moves, 2 * count + rng.below(max(1, asked.max_moves - 2 * count + 1)))
    layers = [sorted(floor - boxes)]
    spent = 0
    while True:
        pulls = [
            (steps + 1, box, direction)
            for steps, layer in enumerate(layers)
            for direction in DIRECTIONS
            for player in layer
            if (box := beyond(player, direction, 1)) in boxes and beyond(player, direction, -1) in floor - boxes
        ]
        pulls = [pull for pull in pulls if pull[1] in targets] or pulls
        if not pulls:
            break
        cost, box, direction = pulls[rng.below(len(pulls))]
        if spent + cost > budget:
            break
        spent += cost
        boxes = boxes - {box} | {beyond(box, direction, -1)}
        layers = spread(beyond(box, direction, -2), floor - boxes)
    if boxes & targets:
        return None
    near = [cell for layer in layers[: asked.max_moves - spent + 1] for cell in layer]
    start = Plain(board.walls, targets, near[rng.below(len(near))], boxes)
    any_will_do = (asked.min_pushes, asked.max_pushes) == (1, None)
    return start if any_will_do or fits(least(start, pushes_only=True), asked) else None


def plain_level(rng: Rng, width: int, height: int, boxes: int, asked: Difficulty, floors: str) -> Plain:
    everywhere = frozenset((y, x) for y in range(height) for x in range(width))
    if boxes == 1 and asked.min_pushes == 1 and asked.max_pushes != 1:
        one_push = rng.below(1_000) < 295
        asked = Difficulty(asked.max_moves, 1 if one_push else 2, 1 if one_push else asked.max_pushes)
    while True:
        floor = walked_floor(rng, width, height) if floors == "walk" else uniform_floor(rng, width, height)
        ends = [
            cell for cell in sorted(floor) if any({beyond(cell, d, 1), beyond(cell, d, 2)} <= floor for d in DIRECTIONS)
        ]
        if len(ends) < boxes:
            continue
        board = Plain(everywhere - floor, frozenset(), (0, 0), frozenset())
        if boxes == 1:
            drawn = one_box(rng, board, floor, ends, asked, 0 if floors == "walk" else 3)
        else:
            drawn = several_boxes(rng, board, floor, ends, boxes, asked)
        if drawn is not None:
            return drawn
