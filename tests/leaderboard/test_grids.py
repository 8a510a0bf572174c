"""Which texts are boards, and what stands where on them."""

import pytest

from turngym_leaderboard.pages.grids import FROZEN_LAKE, PRESETS, SOKOBAN, Cell, shown
from turngym_server.envs.frozen_lake import PRESETS as LAKE_PRESETS
from turngym_server.sokoban.symbols import PRESETS as SOKOBAN_PRESETS
from turngym_server.sokoban.symbols import Symbols

SOKOBAN_BOARD = "#####\n#P_O#\n#_X_#\n#####"
LAKE_BOARD = "P_\nOG"


def translated(board, family, one, other):
    return board.translate(str.maketrans(PRESETS[family][one], PRESETS[family][other]))


def test_the_presets_are_the_environments_own() -> None:
    assert PRESETS == {"sokoban": SOKOBAN_PRESETS, "frozen_lake": LAKE_PRESETS}
    assert [cell.value.replace("-", "_") for cell in SOKOBAN] == list(Symbols.__dataclass_fields__)


@pytest.mark.parametrize("preset", PRESETS["sokoban"])
def test_a_sokoban_board_is_read_in_every_vocabulary_without_being_told_which(preset) -> None:
    grid = shown(translated(SOKOBAN_BOARD, "sokoban", "ragen", preset)).grid
    assert grid is not None
    assert grid.pieces() == ((1, 1, Cell.PLAYER), (3, 1, Cell.TARGET), (2, 2, Cell.BOX))
    assert grid.walls() == ((0, 0, 5), (0, 1, 1), (4, 1, 1), (0, 2, 1), (4, 2, 1), (0, 3, 5))
    assert grid.ground == "floor"


@pytest.mark.parametrize("preset", PRESETS["frozen_lake"])
@pytest.mark.parametrize(
    ("board", "pieces"),
    [
        (LAKE_BOARD, ((0, 0, Cell.PLAYER), (0, 1, Cell.HOLE), (1, 1, Cell.GOAL))),
        ("__\nXG", ((0, 1, Cell.PLAYER_IN_HOLE), (1, 1, Cell.GOAL))),
        ("__\nO√", ((0, 1, Cell.HOLE), (1, 1, Cell.PLAYER_AT_GOAL))),
    ],
)
def test_a_lake_is_read_in_every_vocabulary_without_being_told_which(preset, board, pieces) -> None:
    grid = shown(translated(board, "frozen_lake", "ragen", preset)).grid
    assert grid is not None
    assert grid.pieces() == pieces
    assert grid.ground == "ice"


def test_a_vocabulary_of_ones_own_is_read_where_it_is_known() -> None:
    board = SOKOBAN_BOARD.translate(str.maketrans("#_O√XPS", "abcdefg"))
    assert shown(board, "sokoban").grid is None
    assert shown(board, "sokoban", "abcdefg").grid == shown(SOKOBAN_BOARD).grid


def test_what_is_said_before_a_board_stays_text() -> None:
    read = shown(f"Not an action. Answer Up or Down.\n{SOKOBAN_BOARD}", "sokoban")
    assert read.before == "Not an action. Answer Up or Down."
    assert read.grid == shown(SOKOBAN_BOARD).grid


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "Guess a whole number.",
        "no\nor",
        "#####\n#__O#\n#_X_#\n#####",  # no player
        "#####\n#PPO#\n#_X_#\n#####",  # two
        "#####\n#P__#\n#_X_#\n#####",  # a box without a target
        "P__\nOG_",  # a lake that is no square
        "P_\nO_",  # without a goal
    ],
)
def test_what_is_no_board_of_a_known_kind_stays_the_text_that_it_is(text) -> None:
    read = shown(text)
    assert read.grid is None
    assert read.before == text


def test_a_named_environment_is_not_read_as_another() -> None:
    assert shown(LAKE_BOARD, "sokoban").grid is None
    assert shown(SOKOBAN_BOARD, "frozen_lake").grid is None
    assert shown(SOKOBAN_BOARD, "slippery").grid is not None


def test_a_board_is_told_in_words_the_player_first() -> None:
    grid = shown("#####\n#O_P#\n#_X_#\n#####").grid
    assert grid is not None
    assert grid.told() == (
        "Board of 4 rows and 5 columns: player at row 2, column 4; target at row 2, column 2; box at row 3, column 3"
    )


def test_a_huge_grid_stays_text() -> None:
    assert shown("\n".join(["P" + "_" * 99, *["_" * 100] * 98, "_" * 99 + "G"])).grid is None


def test_the_meanings_have_as_many_symbols_as_the_vocabularies() -> None:
    assert {len(word) for word in PRESETS["sokoban"].values()} == {len(SOKOBAN)}
    assert {len(word) for word in PRESETS["frozen_lake"].values()} == {len(FROZEN_LAKE)}
