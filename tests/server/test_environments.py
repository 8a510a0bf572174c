"""The contract that every environment in `turngym_server.envs` keeps, a new one from the moment its file is there."""

import copy
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transcripts

from turngym_server.discovery import load_own
from turngym_server.environment import REGISTRY, Environment, EnvironmentSpec, Left
from turngym_server.rng import Rng

load_own()
OWN = sorted(name for name, spec in REGISTRY.items() if spec.environment.__module__.startswith("turngym_server.envs."))

VARIANTS: dict[str, list[dict[str, object]]] = {
    "bandit": [{"names": "pairs"}],
    "frozen_lake": [{"size": 5, "slip": 0.1, "symbols": "latin"}],
    "sokoban": [{"symbols": "xsb", "width": 7}, {"floors": "walk"}, {"boxes": 2, "width": 8, "max_solution": 20}],
}
CASES = [(name, {}) for name in OWN] + [(name, options) for name in OWN for options in VARIANTS.get(name, [])]

INVALID = [
    "",
    " ",
    "\n",
    "Fly",
    "Up Down",
    "🦆",
    "\u202eUp",
    "a" * 60_000,
    "Up||Down",
    "<answer>Up</answer>",
    "0",
    "None",
]


def left_at_start(spec: EnvironmentSpec) -> Left:
    return Left(spec.limits.max_turns, spec.limits.max_actions, spec.limits.max_actions_per_turn)


def cases(argument: str) -> Any:
    return pytest.mark.parametrize(
        (argument, "options"),
        CASES,
        ids=[name + "".join(f"-{k}={v}" for k, v in options.items()) for name, options in CASES],
    )


@pytest.mark.parametrize("id", OWN)
def test_the_spec_is_sane(id: str) -> None:
    spec = REGISTRY[id]
    assert spec.id == id
    assert spec.version
    assert spec.family
    assert spec.split_epoch >= 1
    assert spec.summary.endswith(".")
    for limit in ("max_turns", "max_actions", "max_actions_per_turn"):
        assert 1 <= getattr(spec.limits, limit) <= getattr(spec.caps, limit), limit
    assert (spec.action_separator == "") == (spec.limits.max_actions_per_turn == 1)
    schema = spec.options.model_json_schema()
    assert all("description" in field for field in schema.get("properties", {}).values()), "describe every option"


@pytest.mark.parametrize("id", OWN)
def test_options_survive_json(id: str) -> None:
    spec = REGISTRY[id]
    options = spec.options()
    assert spec.options.model_validate(json.loads(options.model_dump_json())) == options
    with pytest.raises(ValueError, match="no_such_option"):
        spec.options.model_validate({"no_such_option": 1})


@cases("id")
def test_instructions_tell_of_the_limits_and_the_separator(id: str, options: dict[str, object]) -> None:
    spec = REGISTRY[id]
    told = spec.environment.instructions(spec.options.model_validate(options), spec.limits)
    assert told.strip()
    told.encode()
    if spec.limits.max_turns > 1:
        assert str(spec.limits.max_turns) in told
        assert str(spec.limits.max_actions) in told
    assert spec.action_separator in told


@cases("id")
def test_the_same_seeds_and_actions_give_the_same_bytes(id: str, options: dict[str, object]) -> None:
    spec = REGISTRY[id]
    for seed in range(20):
        assert transcripts.transcript(spec, options, seed) == transcripts.transcript(spec, options, seed)


@cases("id")
def test_an_instance_can_be_reset_again(id: str, options: dict[str, object]) -> None:
    """A server resets until the instance is of the split asked for: nothing may stay from the draws before."""
    spec = REGISTRY[id]
    fresh = transcripts.made(spec, options, 5)
    used = transcripts.made(spec, options, 4)
    list(transcripts.random_play(used, 4, 5))
    used.reset(Rng(5, 0))
    assert used.world() == fresh.world()
    plays = [
        [transcripts.shown(r) for r in transcripts.random_play(environment, 5, 20)] for environment in (used, fresh)
    ]
    assert plays[0] == plays[1]


@cases("id")
def test_level_seeds_give_different_instances(id: str, options: dict[str, object]) -> None:
    assert len({tuple(transcripts.transcript(REGISTRY[id], options, seed)[:4]) for seed in range(20)}) > 1


@pytest.fixture(scope="module")
def elsewhere() -> list[dict[str, str]]:
    """Fingerprints made in two other processes, with other hash seeds than this one's."""
    script = str(Path(__file__).with_name("transcripts.py"))
    prints: list[dict[str, str]] = []
    for hash_seed in ("1", "4242"):
        environ = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, script, *OWN], capture_output=True, text=True, check=True, env=environ)
        prints.append(json.loads(done.stdout))
    return prints


@pytest.mark.parametrize("id", OWN)
def test_the_bytes_are_the_same_in_other_processes_and_under_other_hash_seeds(
    id: str, elsewhere: list[dict[str, str]]
) -> None:
    assert [prints[id] for prints in elsewhere] == [transcripts.fingerprint(REGISTRY[id])] * 2


GOLDEN = {
    ("bandit", "1.0"): "6ce07ed82bc536f75553e30d5644f3af",
    ("bandit_reversed", "1.0"): "5a047971f423c9f41d6a54f7436e2731",
    ("frozen_lake", "1.0"): "19dfd54ec082c1bbeab22a7ed777dc5e",
    ("sokoban", "1.0"): "bc1c916f6be8ba868de8131944790001",
    ("sokoban_large", "1.0"): "9116a874699f25b9b9095b29398c8496",
}


@pytest.mark.parametrize(("name", "version"), GOLDEN)
def test_a_version_keeps_its_bytes(name: str, version: str) -> None:
    """Other bytes need another version: scores and checkpoints name it."""
    assert REGISTRY[name].version == version
    assert transcripts.fingerprint(REGISTRY[name]).startswith(GOLDEN[name, version])


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda environment: environment.fork()], ids=["deepcopy", "fork"])
@cases("id")
def test_a_copy_plays_on_alike_and_apart(id: str, options: dict[str, object], twin_of: Any) -> None:
    spec = REGISTRY[id]
    for seed in range(5):
        environment = transcripts.made(spec, options, seed)
        if any(result.terminated for result in transcripts.random_play(environment, seed, 2)):
            continue
        twin, bystander = twin_of(environment), twin_of(environment)
        played = [transcripts.shown(r) for r in transcripts.random_play(environment, seed, 20, first=2)]
        assert [transcripts.shown(r) for r in transcripts.random_play(twin, seed, 20, first=2)] == played
        assert [transcripts.shown(r) for r in transcripts.random_play(bystander, seed, 20, first=2)] == played


@cases("id")
def test_advice_changes_nothing(id: str, options: dict[str, object]) -> None:
    spec = REGISTRY[id]
    left = left_at_start(spec)
    for seed in range(5):
        asked, silent = transcripts.made(spec, options, seed), transcripts.made(spec, options, seed)
        plays = itertools.zip_longest(
            transcripts.random_play(asked, seed, 10), transcripts.random_play(silent, seed, 10), fillvalue=None
        )
        for one, other in plays:
            assert one is not None
            assert other is not None
            assert transcripts.shown(one) == transcripts.shown(other)
            if not one.terminated:
                asked.oracle(left), asked.explain(left), asked.ceiling(left), asked.floor(left), asked.world()


@cases("id")
@pytest.mark.parametrize("action", INVALID, ids=[ascii(action)[:24] for action in INVALID])
def test_what_is_no_action_is_play(id: str, options: dict[str, object], action: str) -> None:
    environment = transcripts.made(REGISTRY[id], options, 0)
    legal, world = environment.legal_actions(), environment.world()
    if legal is None and action.strip():
        return  # Any text may be an action.
    result = environment.step(action, transcripts.noise(0, 0))
    assert not result.valid
    assert not result.terminated
    assert math.isfinite(result.reward)
    assert result.observation.strip()
    assert len(result.observation) < 10_000, "what an agent sent must not come back at full length"
    assert (environment.legal_actions(), environment.world()) == (legal, world)


@cases("id")
def test_legal_actions_are_valid(id: str, options: dict[str, object]) -> None:
    for seed in range(5):
        environment = transcripts.made(REGISTRY[id], options, seed)
        for action in environment.legal_actions() or ():
            assert environment.fork().step(action, transcripts.noise(seed, 0)).valid, action


@cases("id")
def test_play_does_not_change_the_world(id: str, options: dict[str, object]) -> None:
    for seed in range(30):
        environment = transcripts.made(REGISTRY[id], options, seed)
        world = environment.world()
        for _ in transcripts.random_play(environment, seed, 30):
            assert environment.world() == world


@cases("id")
def test_results_are_sound(id: str, options: dict[str, object]) -> None:
    for seed in range(30):
        environment = transcripts.made(REGISTRY[id], options, seed)
        for result in transcripts.random_play(environment, seed, 30):
            assert math.isfinite(result.reward)
            result.observation.encode()
            if result.reward_components:
                assert math.isclose(sum(result.reward_components.values()), result.reward)


def oracle_wins(environment: Environment[Any], spec: EnvironmentSpec, seed: int) -> bool:
    """Plays the oracle's turns under the default limits."""
    left = left_at_start(spec)
    played = 0
    while left.turns and left.actions:
        turn = environment.oracle(left)
        assert turn is not None
        assert len(turn) <= min(left.actions, left.actions_per_turn)
        if not turn:
            return False
        for action in turn:
            legal = environment.legal_actions()
            assert legal is None or action in legal
            result = environment.step(action, transcripts.noise(seed, played))
            assert result.valid
            played += 1
            if result.terminated:
                return bool(result.success)
        left = Left(left.turns - 1, left.actions - len(turn), left.actions_per_turn)
    return False


def random_wins(environment: Environment[Any], spec: EnvironmentSpec, seed: int) -> bool:
    """Plays uniform legal actions under the default limits, every turn filled."""
    choices = Rng(seed, transcripts.CHOICE_STREAM)
    for index in range(left_at_start(spec).reachable_actions):
        legal = environment.legal_actions()
        assert legal is not None
        result = environment.step(choices.choice(legal), transcripts.noise(seed, index))
        if result.terminated:
            return bool(result.success)
    return False


def assert_rate(wins: list[bool], chances: list[float]) -> None:
    """The wins are as many as their chances say, within four standard deviations."""
    deviation = math.sqrt(sum(chance * (1 - chance) for chance in chances))
    assert abs(sum(wins) - sum(chances)) <= 4 * deviation + 1e-6, (sum(wins), sum(chances), deviation)


@cases("id")
def test_the_oracle_succeeds_as_often_as_the_ceiling_says(id: str, options: dict[str, object]) -> None:
    spec = REGISTRY[id]
    wins: list[bool] = []
    chances: list[float] = []
    for seed in range(100):
        environment = transcripts.made(spec, options, seed)
        left = left_at_start(spec)
        chance = environment.ceiling(left)
        if environment.oracle(left) is None or chance is None:
            continue
        assert 0.0 <= chance <= 1.0 + 1e-9
        wins.append(oracle_wins(environment, spec, seed))
        chances.append(chance)
    assert_rate(wins, chances)


@cases("id")
def test_a_random_player_succeeds_as_often_as_the_floor_says(id: str, options: dict[str, object]) -> None:
    spec = REGISTRY[id]
    wins: list[bool] = []
    chances: list[float] = []
    for seed in range(100):
        environment = transcripts.made(spec, options, seed)
        left = left_at_start(spec)
        chance, ceiling = environment.floor(left), environment.ceiling(left)
        if chance is None:
            continue
        assert 0.0 <= chance <= 1.0
        assert ceiling is None or chance <= ceiling + 1e-9
        for attempt in range(10):
            wins.append(random_wins(environment.fork(), spec, 1_000 * attempt + seed))
            chances.append(chance)
    assert_rate(wins, chances)


@cases("id")
def test_explanations_are_one_short_line(id: str, options: dict[str, object]) -> None:
    spec = REGISTRY[id]
    left = left_at_start(spec)
    for seed in range(20):
        environment = transcripts.made(spec, options, seed)
        if environment.oracle(left):
            explanation = environment.explain(left)
            assert explanation.strip() == explanation
            assert 1 <= len(explanation) <= 120
            assert "\n" not in explanation


NEW_ENVIRONMENT = """
from pydantic import Field

from turngym_server.environment import ActionResult, Environment, Limits, Options, Start, register


class CoinOptions(Options):
    heads: int = Field(default=1, ge=1, description="Times heads must be called right.")


@register(id="coin", version="1.0", family="coin", summary="Call the coin.", options=CoinOptions,
          limits=Limits(max_turns=3, max_actions=3, max_actions_per_turn=1), action_separator="")
class Coin(Environment[CoinOptions]):
    @classmethod
    def instructions(cls, options, limits):
        return f"Call heads or tails. {limits.max_turns} turns, {limits.max_actions} actions."

    def reset(self, level):
        self.level = level.below(1000)
        return Start(f"Coin {self.level}")

    def step(self, action, noise):
        if action not in ("heads", "tails"):
            return ActionResult("Call heads or tails.", 0.0, success=False, valid=False)
        side = SIDE
        return ActionResult(f"{side}", float(action == side), terminated=action == side, success=action == side)

    def world(self):
        return str(self.level).encode()

    def legal_actions(self):
        return ("heads", "tails")
"""


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ('("heads", "tails")[noise.below(2)]', True),
        ('("heads", "tails")[hash(action + str(self.level)) % 2]', False),
        ('("heads", "tails")[__import__("random").getrandbits(1)]', False),
    ],
    ids=["sound", "hash of a string", "global random numbers"],
)
def test_a_file_dropped_into_envs_is_held_to_the_contract(tmp_path: Path, side: str, kept: bool) -> None:
    folder = tmp_path / "envs"
    folder.mkdir()
    (folder / "coin.py").write_text(NEW_ENVIRONMENT.replace("SIDE", side))
    (tmp_path / "dropped.py").write_text(
        f"import turngym_server.envs\nturngym_server.envs.__path__.append({str(folder)!r})\n"
    )
    # The other processes that the tests start find the file in the same way.
    (tmp_path / "sitecustomize.py").write_text("import dropped\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "coin", "--no-header", __file__],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode == 0) is kept, done.stdout[-3_000:]
    assert "passed" in done.stdout
