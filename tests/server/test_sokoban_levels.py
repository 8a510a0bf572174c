"""Solvers against a second, plain implementation; the generator's promises; level files."""

import hashlib
from collections import Counter
from pathlib import Path

import pytest
from plain_levels import plain_level
from plain_sokoban import STEPS, least, plain, random_success

from turngym_server.environment import Left, Limits, NoInstance
from turngym_server.envs.sokoban import Sokoban, SokobanOperatorOptions, SokobanOptions
from turngym_server.rng import Rng
from turngym_server.sokoban.board import DIRECTIONS, Board, Level, canonical, flood
from turngym_server.sokoban.floors import Floors, connected_floors, ends_of_pushes
from turngym_server.sokoban.generator import Difficulty, draw_level
from turngym_server.sokoban.level_file import parse_level, read_levels
from turngym_server.sokoban.oracle import Plan, plan
from turngym_server.sokoban.search import fewest_pushes, least_pushes
from turngym_server.sokoban.solver import least_moves, live_cells, random_player_success
from turngym_server.sokoban.symbols import symbols_of
from turngym_server.splits import Split, split_of

BOXOBAN = Path(__file__).with_name("data") / "boxoban-unfiltered-valid-50.txt"

DRAWS = [(6, 6, 1, Difficulty(10)), (7, 5, 2, Difficulty(12)), (8, 8, 1, Difficulty(20))]


def levels(width: int, height: int, boxes: int, difficulty: Difficulty, count: int) -> list[Level]:
    return [draw_level(Rng(seed, 0), width, height, boxes, difficulty, "uniform") for seed in range(count)]


def scattered(level: Level, seed: int) -> Level:
    """The same board with player and boxes anywhere, mostly where nothing can be solved any more."""
    rng = Rng(seed, 1)
    floor = [cell for cell in range(level.board.floor.bit_length()) if level.board.floor >> cell & 1]
    rng.shuffle(floor)
    boxes = level.boxes.bit_count()
    return Level(level.board, floor[0], sum(1 << cell for cell in floor[1 : 1 + boxes]))


@pytest.mark.parametrize("drawn", DRAWS, ids=["6×6", "7×5 with 2 boxes", "8×8"])
def test_least_moves_are_least(drawn: tuple[int, int, int, Difficulty]) -> None:
    unsolvable = 0
    for seed, level in enumerate(levels(*drawn, count=25)):
        for start in (level, scattered(level, seed)):
            moves = least_moves(start.board, start.player, start.boxes)
            expected = least(plain(start), pushes_only=False)
            assert (None if moves is None else len(moves)) == expected
            unsolvable += expected is None
            state = plain(start)
            for move in moves or ():
                state = state.after(DIRECTIONS[move])
            assert state.solved is (moves is not None)
    assert unsolvable > 0


@pytest.mark.parametrize("drawn", DRAWS, ids=["6×6", "7×5 with 2 boxes", "8×8"])
def test_the_search_finds_the_fewest_pushes(drawn: tuple[int, int, int, Difficulty]) -> None:
    for seed, level in enumerate(levels(*drawn, count=25)):
        for start in (level, scattered(level, seed)):
            search = fewest_pushes(start.board, start.player, start.boxes)
            expected = least(plain(start), pushes_only=True)
            assert (search.moves is not None, search.exhausted) == (expected is not None, True)
            assert least_pushes(start.board, start.player, start.boxes) == expected
            state = plain(start)
            pushes = 0
            for move in search.moves or ():
                following = state.after(DIRECTIONS[move])
                assert following != state
                pushes += following.boxes != state.boxes
                state = following
            if expected is not None:
                assert (state.solved, pushes, search.pushes) == (True, expected, expected)


def test_the_search_gives_up_after_so_many_nodes() -> None:
    level = parse_level(read_levels(BOXOBAN)[0])
    assert fewest_pushes(level.board, level.player, level.boxes).nodes > 10
    gave_up = fewest_pushes(level.board, level.player, level.boxes, node_limit=10)
    assert (gave_up.moves, gave_up.exhausted, gave_up.nodes) == (None, False, 10)
    assert plan(level.board, level.player, level.boxes, 10) == Plan(None, exact=False)


def test_a_box_can_reach_a_target_from_live_cells_only() -> None:
    level = parse_level("#######\n#@    #\n#  $  #\n#   . #\n#     #\n#######")
    # Every cell but those along the four walls: from there a box never comes off.
    inside = {(row, column) for row in (2, 3) for column in (2, 3, 4)}
    live = live_cells(level.board)
    assert {divmod(cell, level.board.stride) for cell in range(48) if live >> cell & 1} == inside


@pytest.mark.parametrize("drawn", DRAWS[:2], ids=["6×6", "7×5 with 2 boxes"])
def test_the_random_players_odds_are_those_of_all_sequences(drawn: tuple[int, int, int, Difficulty]) -> None:
    odds = set[float]()
    for level in levels(*drawn, count=8):
        exact = random_player_success(level.board, level.player, level.boxes, 7)
        assert exact == pytest.approx(random_success(plain(level), 7), abs=1e-12)
        odds.add(exact)
    assert len(odds) > 2


@pytest.mark.parametrize(
    ("width", "height", "boxes", "difficulty", "floors"),
    [
        (6, 6, 1, Difficulty(10), "uniform"),
        (6, 6, 1, Difficulty(10), "walk"),
        (6, 5, 1, Difficulty(20, 2, 3), "uniform"),
        (7, 5, 1, Difficulty(20, 3), "walk"),
        (9, 3, 1, Difficulty(8), "uniform"),
        (3, 7, 1, Difficulty(4), "walk"),
        (8, 8, 2, Difficulty(20), "uniform"),
        (8, 8, 2, Difficulty(20), "walk"),
        (7, 6, 2, Difficulty(20, 3, 5), "uniform"),
        (10, 10, 4, Difficulty(60), "uniform"),
        (12, 14, 3, Difficulty(40), "uniform"),
    ],
)
def test_levels_are_those_of_the_plain_generator(
    width: int, height: int, boxes: int, difficulty: Difficulty, floors: Floors
) -> None:
    for seed in range(40):
        rng, plain_rng = Rng(seed, 0), Rng(seed, 0)
        level = draw_level(rng, width, height, boxes, difficulty, floors)
        assert plain(level) == plain_level(plain_rng, width, height, boxes, difficulty, floors)
        assert rng.word() == plain_rng.word(), "as many words drawn"


GOLDEN: list[tuple[int, int, int, Difficulty, Floors, str]] = [
    (6, 6, 1, Difficulty(10), "uniform", "ff519c3c7a7191d9"),
    (6, 6, 1, Difficulty(10), "walk", "0e47a3bc125a2562"),
    (8, 8, 2, Difficulty(20), "uniform", "46418d253817b3c0"),
    (8, 8, 2, Difficulty(20), "walk", "86e7be6bce15435a"),
    (10, 10, 4, Difficulty(60), "uniform", "d179f44746848f05"),
    (9, 7, 1, Difficulty(30, 3, 6), "uniform", "612c36e74ecdcee2"),
    (7, 8, 2, Difficulty(40, 4), "uniform", "d01b5fc21fc31ffa"),
    (20, 20, 10, Difficulty(200), "uniform", "749ab8210b32f57a"),
]


@pytest.mark.parametrize(("width", "height", "boxes", "difficulty", "floors", "digest"), GOLDEN)
def test_seeds_keep_their_levels(
    width: int, height: int, boxes: int, difficulty: Difficulty, floors: Floors, digest: str
) -> None:
    """Committed scores are of these levels; others need another version of the environment."""
    drawn = [draw_level(Rng(seed, 0), width, height, boxes, difficulty, floors) for seed in range(200)]
    text = "\n\n".join("".join(symbols_of("ragen").draw(level)) for level in drawn)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("floors", ["uniform", "walk"])
@pytest.mark.parametrize("drawn", [*DRAWS, (8, 8, 2, Difficulty(20)), (10, 10, 4, Difficulty(60))])
def test_every_level_can_be_solved_in_time(drawn: tuple[int, int, int, Difficulty], floors: str) -> None:
    width, height, boxes, difficulty = drawn
    for seed in range(60):
        level = draw_level(Rng(seed, 0), width, height, boxes, difficulty, "walk" if floors == "walk" else "uniform")
        board = level.board
        assert (board.width, board.height) == (width, height)
        assert level.boxes.bit_count() == board.targets.bit_count() == boxes
        assert not level.boxes & board.targets
        assert not (level.boxes | board.targets | 1 << level.player) & ~board.floor
        assert not level.boxes >> level.player & 1
        assert flood(1 << level.player, board.floor, board.stride) == board.floor
        if boxes <= 2:
            moves = least_moves(board, level.player, level.boxes)
            assert moves is not None
            assert 1 <= len(moves) <= difficulty.max_moves
        else:
            assert fewest_pushes(board, level.player, level.boxes).moves is not None


def test_six_by_six_levels_are_as_hard_as_ragens() -> None:
    drawn = levels(6, 6, 1, Difficulty(10), count=1_500)
    moves = sorted(len(least_moves(level.board, level.player, level.boxes) or ()) for level in drawn)
    pushes = [fewest_pushes(level.board, level.player, level.boxes).pushes for level in drawn]
    floor = sum(random_player_success(level.board, level.player, level.boxes, 10) for level in drawn) / len(drawn)
    assert moves[750] == 4
    assert abs(pushes.count(1) / 1_500 - 0.295) < 0.047  # Four standard deviations.
    assert 0.15 < floor < 0.22


@pytest.mark.parametrize("boxes", [1, 2])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 2), (3, None), (2, 4)])
def test_least_pushes_are_an_option(boxes: int, low: int, high: int | None) -> None:
    if boxes == 2 and high == 1:
        low, high = 2, 3
    for level in levels(7, 7, boxes, Difficulty(20, low, high), count=20):
        pushes = least(plain(level), pushes_only=True)
        assert pushes is not None
        assert low <= pushes <= (high or pushes)


def test_what_hardly_exists_is_refused_by_name() -> None:
    with pytest.raises(NoInstance, match=r"no 5×3 level with 1 boxes, at most 10 moves and 9 to any number of pushes"):
        draw_level(Rng(0, 0), 5, 3, 1, Difficulty(10, 9), "uniform")


def test_small_floors_are_uniform_among_connected_ones() -> None:
    # Of the connected subsets of a 3×2 grid, those with three cells in a row can hold a level.
    usable = [floor for floor in connected_floors(5, 4) if ends_of_pushes(floor, 6)]
    drawn = Counter(
        draw_level(Rng(seed, 0), 5, 4, 1, Difficulty(10, 1, 1), "uniform").board.floor for seed in range(6_000)
    )
    assert set(drawn) == set(usable)
    expected = 6_000 / len(usable)
    assert all(abs(count - expected) < 4.5 * expected**0.5 for count in drawn.values())


def test_there_are_enough_held_out_worlds() -> None:
    """Every world of the default options, listed: the reference protocol plays 512 held-out ones."""
    worlds = {
        canonical(Board(6, 6, floor, 1 << target), target)
        for floor in connected_floors(6, 6)
        for target in range(floor.bit_length())
        if ends_of_pushes(floor, 7) >> target & 1
    }
    counts = Counter(split_of("sokoban", 1, world) for world in worlds)
    assert (len(worlds), counts[Split.HELD_OUT]) == (9_117, 918)


# Level files


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "levels.xsb"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        Sokoban.open_catalogue(SokobanOperatorOptions(levels=path))
    message = str(caught.value)
    assert message.startswith(f"{path}, line ")
    return message.removeprefix(f"{path}, ")


GOOD = "#####\n#@$.#\n#####\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no level in the file"),
        ("; only a comment\n\n", "line 1: no level in the file"),
        (GOOD + "\n#####\n# $.#\n#####\n", "line 5: level 2: 0 players (@ or +), expected 1"),
        ("#####\n#@+$#\n#####", "line 1: level 1: 2 players (@ or +), expected 1"),
        (GOOD + "; 1\n######\n#@$$.#\n######\n", "line 5: level 2: 2 boxes ($ or *) but 1 targets (. * or +)"),
        ("; 0\n####\n#@.#\n####", "line 2: level 1: no box ($ or *)"),
        ("#####\n#@* #\n#####", "line 1: level 1: every box is on a target already"),
        ("#####\n#@x.#\n#####", "line 2: '#@x.#' is neither a row"),
        (GOOD + "\nwhat is this\n", "line 5: 'what is this' is neither a row"),
        ("#####\n#@$. \n#####", "line 1: level 1: open border: the floor reaches row 2, column 5"),
        ("## ##\n#@$.#\n#####", "line 1: level 1: open border: the floor reaches row 1, column 3"),
    ],
)
def test_malformed_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    assert refused(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, r"levels\.xsb: cannot be read: No such file or directory$"),
        (b"\xff\xfe#", r"levels\.xsb: no UTF-8 text, as a level file is: .* position 0"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "levels.xsb"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        read_levels(path)


def test_collections_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "levels.sok"
    path.write_bytes(
        b"\xef\xbb\xbfTitle: Two levels\r\nAuthor: nobody\r\n\r\n"
        b"  ####\r\n###  #\r\n#@$. #\r\n######\r\nTitle: one\r\n; remark\r\n\r\n"
        b"######\r\n#+$*$.#\r\n#######\r\n::\r\n#####\r\n#@$.#\r\n#####"
    )
    assert read_levels(path) == (
        "  ####\n###  #\n#@$. #\n######",
        "######\n#+$*$.#\n#######",
        "#####\n#@$.#\n#####",
    )


def test_ragged_rows_and_every_symbol() -> None:
    environment = Sokoban(SokobanOptions())
    start = environment.load("  ####\n###_.#\n#+$$-#\n#  *###\n#####")
    # What the player cannot reach is wall.
    assert start.observation == "#######\n###_O##\n#SXX_##\n#__√###\n#######"


def test_a_level_gets_four_times_the_oracles_moves(tmp_path: Path) -> None:
    environment = Sokoban(SokobanOptions())
    assert environment.load("########\n#@$   .#\n########").limits == Limits(8, 16, 5)
    stuck = environment.load("######\n#@  $#\n#  . #\n#    #\n######")
    assert stuck.limits == Limits(100, 200, 5)


def test_boxoban_levels_are_served_and_solved() -> None:
    catalogue = Sokoban.open_catalogue(SokobanOperatorOptions(levels=BOXOBAN))
    assert catalogue is not None
    assert len(catalogue.levels) == len(catalogue.worlds) == 50
    assert catalogue.options == {"symbols"}
    assert catalogue.levels[0].startswith("##########\n#####  ..#")
    environment = Sokoban(SokobanOptions())
    solved = 0
    for level, world in zip(catalogue.levels, catalogue.worlds, strict=True):
        start = environment.load(level)
        assert environment.world() == world
        assert start.limits is not None
        left = Left(start.limits.max_turns, start.limits.max_actions, start.limits.max_actions_per_turn)
        state = plain(parse_level(level))
        while turn := environment.oracle(left):
            for action in turn:
                assert action in STEPS
                result = environment.step(action, Rng(0, 0))
                state = state.after(action)
            left = Left(left.turns - 1, left.actions - len(turn), left.actions_per_turn)
        assert result.terminated is state.solved
        solved += state.solved
        assert left.actions == start.limits.max_actions * 3 // 4
    assert solved == 50


def test_no_levels_no_catalogue() -> None:
    assert Sokoban.open_catalogue(SokobanOperatorOptions()) is None
