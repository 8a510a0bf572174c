"""Sokoban as an agent meets it: moves, rewards, ends, symbols, options, advice."""

import inspect

import pytest
from pydantic import ValidationError

from turngym_server.environment import REGISTRY, ActionResult, Left, Limits
from turngym_server.envs.sokoban import Sokoban, SokobanOptions
from turngym_server.rng import NOISE_STREAM, Rng

NOISE = Rng(0, NOISE_STREAM)
WHOLE = Left(turns=5, actions=10, actions_per_turn=5)


def loaded(level: str, **options: object) -> Sokoban:
    """The environment on a level in XSB symbols."""
    environment = Sokoban(SokobanOptions.model_validate({"symbols": "xsb"} | options))
    environment.load(level)
    return environment


def played(environment: Sokoban, *actions: str) -> ActionResult:
    return [environment.step(action, NOISE) for action in actions][-1]


CORRIDOR = "#######\n#@$.  #\n#######"
TWO_BOXES = "########\n#@$.  $#\n#     .#\n########"


def test_the_docstring_shows_seed_zero() -> None:
    start = Sokoban(SokobanOptions()).reset(Rng(0, 0))
    shown = "\n".join(f"    {row}" for row in start.observation.split("\n"))
    assert shown in inspect.getdoc(Sokoban)  # type: ignore[operator]


def test_walking_costs_a_tenth() -> None:
    environment = loaded("#####\n#@ $#\n#  .#\n#####")
    result = played(environment, "Down")
    assert result.observation == "#####\n#--$#\n#@-.#\n#####"
    assert (result.reward, result.terminated, result.success, result.valid) == (-0.1, False, False, True)
    assert dict(result.reward_components) == {"step": -0.1}


@pytest.mark.parametrize("action", ["Up", "Left"])
def test_a_wall_is_a_legal_way_to_waste_a_step(action: str) -> None:
    environment = loaded(CORRIDOR)
    result = played(environment, action)
    assert result.observation == "#######\n#@$.--#\n#######"
    assert (result.reward, result.valid) == (-0.1, True)


def test_the_last_box_on_its_target_ends_the_episode() -> None:
    result = played(loaded(CORRIDOR), "Right")
    assert result.observation == "#######\n#-@*--#\n#######"
    assert (result.terminated, result.success) == (True, True)
    assert result.reward == pytest.approx(10.9)
    assert dict(result.reward_components) == {"step": -0.1, "box": 1.0, "solved": 10.0}


def test_a_box_onto_a_target_pays_one_and_off_it_costs_one() -> None:
    environment = loaded(TWO_BOXES)
    on = played(environment, "Right")
    assert on.observation == "########\n#-@*--$#\n#-----.#\n########"
    assert (on.reward, on.terminated) == (pytest.approx(0.9), False)
    off = played(environment, "Right")
    assert off.observation == "########\n#--+$-$#\n#-----.#\n########"
    assert (off.reward, off.terminated, off.success) == (pytest.approx(-1.1), False, False)
    assert dict(off.reward_components) == {"step": -0.1, "box": -1.0}


def test_a_push_from_target_to_target_pays_nothing() -> None:
    environment = loaded("#######\n#@*.  #\n#   $ #\n#######")
    result = played(environment, "Right")
    assert result.observation.split("\n")[1] == "#-+*--#"
    assert result.reward == -0.1


@pytest.mark.parametrize(
    ("level", "why"), [("#####\n#.@$#\n#####", "wall"), ("######\n#@$$ #\n#  ..#\n######", "second box")]
)
def test_a_box_that_cannot_move_stays(level: str, why: str) -> None:
    environment = loaded(level)
    before = environment.fork().step("fly", NOISE).observation.split("\n", 1)[1]
    result = played(environment, "Right")
    assert (result.observation, result.reward, result.valid) == (before, -0.1, True), why


def test_the_player_on_a_target_has_its_own_symbol() -> None:
    environment = loaded("######\n#@.  #\n# $  #\n######")
    assert played(environment, "Right").observation == "######\n#-+--#\n#-$--#\n######"
    assert played(environment, "Right").observation == "######\n#-.@-#\n#-$--#\n######"


def test_what_is_no_action_costs_a_step_and_says_what_is_legal() -> None:
    environment = loaded(CORRIDOR)
    result = played(environment, "Jump")
    assert result.observation == "Not an action. Answer Up, Down, Left or Right.\n#######\n#@$.--#\n#######"
    assert (result.reward, result.terminated, result.success, result.valid) == (-0.1, False, False, False)


@pytest.mark.parametrize("action", ["right", " RIGHT ", "Right\n"])
def test_case_and_blanks_around_an_action_do_not_matter(action: str) -> None:
    assert played(loaded(CORRIDOR), action).success


def test_vocabularies_show_the_same_board() -> None:
    boards = {
        symbols: Sokoban(SokobanOptions(symbols=symbols)).reset(Rng(3, 0)).observation
        for symbols in ("ragen", "xsb", "latin", "digits", "abcdefg")
    }
    to_ragen = {"ragen": "#_O√XPS", "xsb": "#-.*$@+", "latin": "WFTDBPQ", "digits": "0123456", "abcdefg": "abcdefg"}
    for symbols, board in boards.items():
        assert board.translate(str.maketrans(to_ragen[symbols], "#_O√XPS")) == boards["ragen"]
    assert len(set(boards.values())) == 5


def test_instructions_use_the_vocabulary_asked_for() -> None:
    told = Sokoban.instructions(SokobanOptions(symbols="abcdefg"), Limits(3, 7, 2))
    assert "a wall, b floor, c target, e box, d box on target, f you, g you on target" in told
    assert "You have 3 turns and 7 actions in all, at most 2 a turn, separated by ||." in told


@pytest.mark.parametrize(
    "options",
    [
        {"symbols": "abcdef"},
        {"symbols": "aacdefg"},
        {"symbols": "ab defg"},
        {"symbols": "ab\ndefg"},
        {"width": 4, "height": 4},
        {"boxes": 5},
        {"width": 21},
        {"min_pushes": 3, "max_pushes": 2},
        {"min_pushes": 11},
        {"levels": "file.xsb"},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SokobanOptions.model_validate(options)


@pytest.mark.parametrize(
    ("options", "size", "boxes"),
    [
        ({}, (6, 6), 1),
        ({"width": 9, "height": 7, "boxes": 3, "max_solution": 40}, (9, 7), 3),
        ({"width": 3}, (3, 6), 1),
    ],
)
def test_size_and_boxes_are_options(options: dict[str, object], size: tuple[int, int], boxes: int) -> None:
    rows = Sokoban(SokobanOptions.model_validate(options)).reset(Rng(0, 0)).observation.split("\n")
    assert ({len(row) for row in rows}, len(rows)) == ({size[0]}, size[1])
    assert sum(row.count("X") for row in rows) == boxes


def test_sokoban_large_is_eight_by_eight_with_two_boxes() -> None:
    spec = REGISTRY["sokoban_large"]
    rows = spec.environment(spec.options()).reset(Rng(1, 0)).observation.split("\n")
    assert ({len(row) for row in rows}, len(rows)) == ({8}, 8)
    assert sum(row.count("X") for row in rows) == 2


def test_the_oracle_fills_a_turn_and_never_more_than_is_left() -> None:
    environment = loaded("#########\n#@$    .#\n#########")
    assert environment.oracle(WHOLE) == ["Right"] * 5
    assert environment.oracle(Left(1, 3, 5)) == ["Right"] * 3
    assert environment.oracle(Left(0, 3, 5)) == []


def test_the_oracle_goes_on_from_wherever_play_has_led() -> None:
    environment = loaded("#########\n#  @$ . #\n#########")
    assert environment.oracle(WHOLE) == ["Right", "Right"]
    played(environment, "Left")
    assert environment.oracle(WHOLE) == ["Right", "Right", "Right"]
    played(environment, "Right", "Up")
    assert environment.oracle(WHOLE) == ["Right", "Right"]


def test_ceiling_is_whether_the_least_moves_fit() -> None:
    environment = loaded("#########\n#@$    .#\n#########")
    assert environment.ceiling(Left(1, 10, 5)) == 1.0
    assert environment.ceiling(Left(1, 10, 4)) == 0.0
    assert environment.ceiling(Left(5, 4, 5)) == 0.0


def test_a_lost_level_has_no_way_on() -> None:
    environment = loaded("######\n#    #\n# $. #\n# @  #\n######")
    assert environment.ceiling(WHOLE) == 1.0
    played(environment, "Up")  # The box stands in no corner, but along a wall without targets.
    assert environment.oracle(WHOLE) == []
    assert environment.ceiling(WHOLE) == environment.floor(WHOLE) == 0.0
    assert environment.explain(WHOLE) == "No way on."


def test_the_floor_counts_the_ways_of_a_random_player() -> None:
    # One push solves it; until then Right is the only action that does anything: 1 − (3/4)^n.
    environment = loaded("#####\n#@$.#\n#####")
    assert environment.floor(Left(1, 1, 1)) == 1 / 4
    assert environment.floor(Left(2, 3, 2)) == 1 - (3 / 4) ** 3
    # Two pushes: at least two of n actions must be Right.
    two = loaded("######\n#@$ .#\n######")
    assert two.floor(Left(1, 2, 2)) == 1 / 16
    # Of three: Right Right x (4), Right x Right with x idle (Up, Down), x Right Right with x idle (Up, Down, Left);
    # Right Left Right walks back and pushes nothing.
    assert two.floor(Left(1, 3, 3)) == (4 + 2 + 3) / 64


def test_explanations_name_the_box_where_it_goes_and_from_where() -> None:
    assert loaded(CORRIDOR).explain(WHOLE) == "Box 2,3 to 2,4: push Right from 2,2."
    environment = loaded("######\n#    #\n# $@ #\n#.   #\n######")
    assert environment.oracle(WHOLE) == ["Left", "Up", "Left", "Down"]
    assert environment.explain(WHOLE) == "Box 3,3 to 4,2: push Left from 3,4."
    # The run of pushes ends where another box is pushed.
    environment = loaded("#######\n#@$ . #\n#  $. #\n#######")
    assert environment.explain(WHOLE).startswith("Box 2,3 to 2,5: push Right from 2,2.")


def test_worlds_are_told_apart_by_floor_and_targets_only() -> None:
    base = loaded("######\n#@ $.#\n#  # #\n######").world()
    assert base == b"  \n  \n #\n. "
    assert loaded("######\n# $@.#\n#  # #\n######").world() == base, "box and player are elsewhere"
    assert loaded("######\n#.$ @#\n# #  #\n######").world() == base, "mirrored"
    assert loaded("####\n#  #\n#@ #\n#$##\n#. #\n####").world() == base, "turned"
    assert loaded("########\n########\n##@ $.##\n##  # ##\n########").world() == base, "elsewhere on a larger board"
    assert loaded("########\n#@ $.# #\n#  # # #\n########").world() == base, "with floor that cannot be reached"
    assert loaded("######\n#  @ #\n#$ #.#\n######").world() != base, "the target is elsewhere"
    assert loaded("#######\n#@  $.#\n#   # #\n#######").world() != base, "one more column"
