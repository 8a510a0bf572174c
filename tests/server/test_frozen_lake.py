"""FrozenLake: moves and slips, ends, drawing, exact values against hand-worked ones and a plain recursion."""

import inspect
import itertools
from collections import Counter
from fractions import Fraction
from functools import cache

import pytest
from pydantic import ValidationError

from turngym_server.environment import ActionResult, Left, Limits
from turngym_server.envs.frozen_lake import FrozenLake, FrozenLakeOptions
from turngym_server.frozen_lake.lake import DIRECTIONS, Lake, draw_lake
from turngym_server.frozen_lake.values import BestPlay, random_player_success
from turngym_server.rng import NOISE_STREAM, Rng

WHOLE = Left(turns=5, actions=10, actions_per_turn=5)
STEPS = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
SIDES = {"Left": ("Up", "Down"), "Right": ("Up", "Down"), "Up": ("Left", "Right"), "Down": ("Left", "Right")}


def lake_of(*rows: str) -> tuple[Lake, int]:
    """A lake and the player's cell, from rows of P, _, O and G."""
    text = "".join(rows)
    holes = sum(1 << cell for cell, mark in enumerate(text) if mark == "O")
    return Lake(len(rows), holes, text.index("G")), text.index("P")


def standing(*rows: str, **options: object) -> FrozenLake:
    """The environment on the first drawn instance that looks like these rows."""
    environment = FrozenLake(FrozenLakeOptions.model_validate({"size": len(rows)} | options))
    for seed in itertools.count():
        if environment.reset(Rng(seed, 0)).observation == "\n".join(rows):
            return environment
    raise AssertionError


def played(environment: FrozenLake, action: str, seed: int = 0) -> ActionResult:
    return environment.step(action, Rng(seed, NOISE_STREAM))


def test_the_docstring_shows_seed_zero() -> None:
    start = FrozenLake(FrozenLakeOptions()).reset(Rng(0, 0))
    shown = "\n".join(f"    {row}" for row in start.observation.split("\n"))
    assert shown in inspect.getdoc(FrozenLake)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("action", "after"),
    [("Down", "__G\nP__\n___"), ("Right", "_PG\n___\n___"), ("Left", "P_G\n___\n___"), ("Up", "P_G\n___\n___")],
)
def test_without_slipping_the_player_goes_where_it_means_to_and_stays_at_the_edge(action: str, after: str) -> None:
    result = played(standing("P_G", "___", "___", slip=0.0), action)
    assert result.observation == after
    assert (result.reward, result.terminated, result.success, result.valid) == (0.0, False, False, True)


def test_the_goal_pays_one_and_ends_the_episode() -> None:
    result = played(standing("PG", "__", slip=0.0), "Right")
    assert result.observation == "_√\n__"
    assert (result.reward, result.terminated, result.success) == (1.0, True, True)


def test_a_hole_ends_the_episode_for_nothing() -> None:
    result = played(standing("PO", "_G", slip=0.0), "Right")
    assert result.observation == "_X\n_G"
    assert (result.reward, result.terminated, result.success) == (0.0, True, False)


@pytest.mark.parametrize("action", DIRECTIONS)
def test_each_side_is_slipped_to_in_a_third_of_the_moves(action: str) -> None:
    start = standing("___", "_P_", "__G")
    ends = Counter(played(start.fork(), action, seed).observation.replace("\n", "").find("P") for seed in range(900))
    expected = {4 + 3 * STEPS[way][0] + STEPS[way][1] for way in (action, *SIDES[action])}
    assert set(ends) == expected
    assert all(abs(count - 300) < 57 for count in ends.values())  # Standard deviation 14.1.


def test_slip_is_an_option() -> None:
    start = standing("___", "_P_", "__G", slip=0.1)
    straight = sum(played(start.fork(), "Up", seed).observation.startswith("_P") for seed in range(1_000))
    assert abs(straight - 800) < 51  # Standard deviation 12.6.


def test_what_is_no_action_costs_nothing_and_says_what_is_legal() -> None:
    result = played(standing("PG", "__"), "jump")
    assert result.observation == "Not an action. Answer Left, Down, Right or Up.\nPG\n__"
    assert (result.reward, result.terminated, result.success, result.valid) == (0.0, False, False, False)


def test_vocabularies_show_the_same_lake() -> None:
    for seed in range(5):
        ragen, latin = (
            FrozenLake(FrozenLakeOptions(symbols=s)).reset(Rng(seed, 0)).observation for s in ("ragen", "latin")
        )
        assert latin.translate(str.maketrans("PIHG", "P_OG")) == ragen
    told = FrozenLake.instructions(FrozenLakeOptions(symbols="abcdef", slip=0.25), Limits(3, 7, 2))
    assert "a you, b ice, c hole, d goal, e you in a hole, f you at the goal" in told
    assert "with probability 0.25 you go to the left" in told
    assert "slippery" not in FrozenLake.instructions(FrozenLakeOptions(slip=0.0), Limits(3, 7, 2))


@pytest.mark.parametrize(
    "options", [{"symbols": "abc"}, {"symbols": "aabcde"}, {"size": 1}, {"slip": 0.6}, {"holes": 1}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FrozenLakeOptions.model_validate(options)


def test_lakes_are_drawn_as_ragens_are() -> None:
    starts: Counter[int] = Counter()
    holes = 0
    for seed in range(1_600):
        lake, start = draw_lake(Rng(seed, 0), 4, 0.2)
        assert start != lake.goal
        assert not lake.holes >> start & 1
        assert not lake.holes >> lake.goal & 1
        reached = {start}
        for _ in range(16):
            reached |= {
                row * 4 + column
                for cell in reached
                for down, right in STEPS.values()
                if 0 <= (row := cell // 4 + down) < 4
                and 0 <= (column := cell % 4 + right) < 4
                and not lake.holes >> (row * 4 + column) & 1
            }
        assert lake.goal in reached
        starts[start] += 1
        holes += lake.holes.bit_count()
    assert set(starts) == set(range(16))
    # 14 cells at 0.2 are 2.8; lakes that do not connect have more holes and are drawn again.
    assert 2.3 < holes / 1_600 < 2.8


def test_the_world_is_holes_and_goal_up_to_symmetry() -> None:
    base = lake_of("P_O", "___", "_G_")[0].world()
    # Of the 8 forms two begin with the one side that bears no mark: "... ..G O.." and "... G.. ..O".
    assert base == b"...\n..G\nO.."
    assert lake_of("__O", "_P_", "_G_")[0].world() == base, "the start does not enter"
    assert lake_of("O__", "___", "PG_")[0].world() == base, "mirrored"
    assert lake_of("___", "G_P", "__O")[0].world() == base, "turned"
    assert lake_of("P__", "__O", "_G_")[0].world() != base


def test_values_worked_by_hand() -> None:
    # Down and Right reach the goal in 1 of 3; after Right the player is still beside it in the other 2.
    lake, player = lake_of("_P", "_G")
    play = BestPlay(lake, 1 / 3)
    assert play.value(player, Left(1, 1, 1)) == pytest.approx(1 / 3)
    assert play.value(player, Left(2, 2, 1)) == pytest.approx(1 / 3 + 2 / 3 * 1 / 3)
    assert play.value(player, Left(1, 2, 1)) == pytest.approx(1 / 3)
    assert play.best_turn(player, Left(2, 2, 1)) == (DIRECTIONS.index("Right"),)
    assert play.value(player, Left(0, 5, 5)) == 0.0
    assert play.best_turn(player, Left(0, 5, 5)) == ()
    # A random player: Down 1/4, twice in place, once to the left, from where one action does not reach the goal.
    assert random_player_success(lake, player, 1) == 1 / 4
    assert random_player_success(lake, player, 2) == 1 / 4 + 2 / 4 * 1 / 4


def plain_value(lake: Lake, slip: Fraction, left: Left) -> list[Fraction]:
    """By cell, the success probability of the best player that commits to each turn, straight from that sentence."""
    cells = range(lake.size**2)

    def beside(cell: int, way: str) -> int:
        row, column = cell // lake.size + STEPS[way][0], cell % lake.size + STEPS[way][1]
        return row * lake.size + column if 0 <= row < lake.size and 0 <= column < lake.size else cell

    @cache
    def best(cell: int, turns: int, actions: int) -> Fraction:
        if cell == lake.goal:
            return Fraction(1)
        if lake.holes >> cell & 1 or not turns:
            return Fraction(0)
        lengths = range(1, min(actions, left.actions_per_turn) + 1)
        turns_to_try = (turn for length in lengths for turn in itertools.product(STEPS, repeat=length))
        return max((expected(cell, turn, turns, actions) for turn in turns_to_try), default=Fraction(0))

    def expected(cell: int, turn: tuple[str, ...], turns: int, actions: int) -> Fraction:
        odds = {cell: Fraction(1)}
        for way in turn:
            after: dict[int, Fraction] = {}
            for at, chance in odds.items():
                if at == lake.goal or lake.holes >> at & 1:
                    after[at] = after.get(at, Fraction(0)) + chance
                    continue
                for to, share in ((way, 1 - 2 * slip), *((side, slip) for side in SIDES[way])):
                    after[beside(at, to)] = after.get(beside(at, to), Fraction(0)) + chance * share
            odds = after
        return sum((chance * best(at, turns - 1, actions - len(turn)) for at, chance in odds.items()), Fraction(0))

    return [best(cell, left.turns, left.actions) for cell in cells]


@pytest.mark.parametrize("left", [Left(3, 3, 1), Left(2, 3, 2), Left(1, 3, 3), Left(3, 4, 2)])
@pytest.mark.parametrize("slip", [Fraction(1, 3), Fraction(1, 10)])
def test_values_are_those_of_the_plain_recursion(left: Left, slip: Fraction) -> None:
    for seed in range(3):
        lake, _ = draw_lake(Rng(seed, 0), 3, 0.2)
        play = BestPlay(lake, float(slip))
        expected = plain_value(lake, slip, left)
        assert play.exact(left)
        assert [play.value(cell, left) for cell in range(9)] == pytest.approx([float(value) for value in expected])


def test_a_turn_wastes_no_action() -> None:
    lake, player = lake_of("P__", "OO_", "G__")
    assert [DIRECTIONS[way] for way in BestPlay(lake, 0.0).best_turn(player, WHOLE)] == [
        "Right",
        "Right",
        "Down",
        "Down",
        "Left",
    ]
    assert len(BestPlay(lake, 0.0).best_turn(player, Left(5, 10, 3))) == 3


def test_more_than_can_be_looked_ahead_is_not_called_exact() -> None:
    environment = standing("PG", "__")
    assert environment.ceiling(Left(12, 24, 5)) is not None
    beyond = Left(40, 200, 5)
    assert environment.ceiling(beyond) is None
    assert environment.oracle(beyond)
    # What can never be used does not count.
    assert environment.ceiling(Left(500, 5, 5)) == environment.ceiling(Left(5, 5, 5))


@pytest.mark.parametrize(
    ("left", "published"), [(Left(10, 10, 1), 0.495), (Left(2, 10, 5), 0.449)], ids=["10 × 1", "2 × 5"]
)
def test_the_optimum_is_the_published_one(left: Left, published: float) -> None:
    environment = FrozenLake(FrozenLakeOptions())
    total = 0.0
    for seed in range(400):
        environment.reset(Rng(seed, 0))
        total += environment.ceiling(left) or 0.0
    assert abs(total / 400 - published) < 0.06  # Standard deviation between lakes 0.3: four standard errors.


def test_a_random_player_succeeds_in_a_fifth() -> None:
    draws = [draw_lake(Rng(seed, 0), 4, 0.2) for seed in range(2_000)]
    assert abs(sum(random_player_success(lake, start, 10) for lake, start in draws) / 2_000 - 0.21) < 0.02


def test_explanations_say_what_is_beside_and_how_far_the_goal_is_from_there() -> None:
    told = standing("_O_", "_P_", "G__", slip=0.0).explain(WHOLE)
    assert told == "Left 1, Down 1, Right 3, Up hole. Go Left."
    # At the edge one stays. Behind holes the goal is as far as the way around them.
    assert standing("P_O", "___", "__G", slip=0.0).explain(WHOLE).startswith("Left 4, Down 3, Right 3, Up 4. Go ")
    assert (
        standing("PO_", "__G", "___", slip=0.0).explain(WHOLE).startswith("Left 3, Down 2, Right hole, Up 3. Go Down.")
    )
    assert standing("GP", "__", slip=0.0).explain(WHOLE) == "Left goal, Down 2, Right 1, Up 1. Go Left."
    assert standing("GP", "__", slip=0.0).explain(Left(0, 0, 5)) == "Left goal, Down 2, Right 1, Up 1."
