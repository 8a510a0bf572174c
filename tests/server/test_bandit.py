"""The bandit: pays, names, order on show."""

from collections import Counter

import pytest
from pydantic import ValidationError

from turngym_server.environment import REGISTRY, Left, Limits
from turngym_server.envs.bandit import BOLD_NAMES, STEADY_NAMES, Bandit
from turngym_server.rng import NOISE_STREAM, Rng

ONE_PULL = Left(turns=1, actions=1, actions_per_turn=1)


def bandit(seed: int, environment_id: str = "bandit", **options: object) -> tuple[Bandit, str]:
    spec = REGISTRY[environment_id]
    environment = spec.environment(spec.options.model_validate(options))
    assert isinstance(environment, Bandit)
    return environment, environment.reset(Rng(seed, 0)).observation


def noise(seed: int) -> Rng:
    return Rng(seed, NOISE_STREAM)


def test_the_docstring_shows_seed_zero() -> None:
    assert bandit(0)[1] in (Bandit.__doc__ or "")


def test_the_low_arm_pays_a_tenth_always() -> None:
    results = [bandit(0)[0].step("Phoenix", noise(seed)) for seed in range(50)]
    assert {(r.reward, r.terminated, r.success, r.valid) for r in results} == {(0.1, True, False, True)}


def test_the_high_arm_pays_one_in_a_quarter_of_the_pulls_and_is_right_either_way() -> None:
    results = [bandit(0)[0].step("Dragon", noise(seed)) for seed in range(2_000)]
    pays = Counter(result.reward for result in results)
    assert set(pays) == {0.0, 1.0}
    assert abs(pays[1.0] - 500) < 78  # Standard deviation 19.4.
    assert all(result.success and result.terminated for result in results)
    assert {r.observation for r in results} == {"Dragon paid 0.", "Dragon paid 1."}


def test_the_pay_depends_on_the_noise_seed_not_on_the_level_seed() -> None:
    rewards = [bandit(level)[0].step("Dragon", noise(7)).reward for level in range(10)]
    assert len(set(rewards)) == 1


def test_high_pays_is_an_option() -> None:
    assert all(bandit(0, high_pays=1.0)[0].step("Dragon", noise(seed)).reward == 1.0 for seed in range(20))


@pytest.mark.parametrize("options", [{"high_pays": 0.1}, {"high_pays": 1.5}, {"names": "cats"}, {"arms": 3}])
def test_other_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        bandit(0, **options)


def test_reversed_swaps_the_names() -> None:
    environment, _ = bandit(0, "bandit_reversed")
    assert environment.options.reversed
    assert environment.oracle(ONE_PULL) == ("Phoenix",)
    assert environment.step("Dragon", noise(0)).success is False
    assert bandit(0)[0].oracle(ONE_PULL) == ("Dragon",)


def test_both_orders_are_shown_equally_often() -> None:
    shown = Counter(bandit(seed)[1] for seed in range(1_000))
    assert set(shown) == {"Arms: Dragon, Phoenix", "Arms: Phoenix, Dragon"}
    assert abs(shown["Arms: Dragon, Phoenix"] - 500) < 64  # Standard deviation 15.8.


def test_the_order_does_not_enter_the_world() -> None:
    assert {bandit(seed)[0].world() for seed in range(20)} == {b"Dragon\nPhoenix"}


def test_pairs_are_one_steady_and_one_bold_name() -> None:
    assert len(set(STEADY_NAMES)) == len(set(BOLD_NAMES)) == 64
    assert not set(STEADY_NAMES) & set(BOLD_NAMES)
    worlds: set[bytes] = set()
    for seed in range(500):
        environment, _ = bandit(seed, names="pairs")
        names = set(environment.legal_actions())
        assert len(names & set(STEADY_NAMES)) == len(names & set(BOLD_NAMES)) == 1
        assert environment.oracle(ONE_PULL)[0] in BOLD_NAMES
        worlds.add(environment.world())
    # 4,096 · (1 − (1 − 1/4,096)^500) = 470.6 distinct pairs are expected of 500 draws; standard deviation 5.
    assert 450 < len(worlds) < 491


@pytest.mark.parametrize("action", ["dragon", " DRAGON\n", "Dragon"])
def test_case_and_blanks_around_a_name_do_not_matter(action: str) -> None:
    assert bandit(0)[0].step(action, noise(0)).valid


@pytest.mark.parametrize("action", ["", "Pull Dragon", "Dragon, Phoenix", "2", "Drago"])
def test_anything_else_ends_nothing_and_says_what_is_legal(action: str) -> None:
    environment, start = bandit(0)
    result = environment.step(action, noise(0))
    assert (result.valid, result.reward, result.terminated, result.success) == (False, 0.0, False, False)
    assert result.observation == f"Not an arm. Answer Dragon or Phoenix.\n{start}"


def test_floor_and_ceiling() -> None:
    environment, _ = bandit(3)
    assert (environment.floor(ONE_PULL), environment.ceiling(ONE_PULL)) == (0.5, 1.0)
    spent = Left(turns=0, actions=1, actions_per_turn=1)
    assert (environment.floor(spent), environment.ceiling(spent), environment.oracle(spent)) == (0.0, 0.0, ())
    assert environment.explain(ONE_PULL) == "Dragon pays more on average than Phoenix."


def test_instructions_name_no_arm() -> None:
    spec = REGISTRY["bandit"]
    text = Bandit.instructions(spec.environment(spec.options()).options, Limits(1, 1, 1))
    assert "Dragon" not in text
    assert "name of one arm" in text
