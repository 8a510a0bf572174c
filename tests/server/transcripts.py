"""What an environment does under fixed seeds, as text that two processes can compare.

python transcripts.py ID …      prints a JSON object: id → SHA-256 of its transcript
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from turngym_server.discovery import load_own
from turngym_server.environment import REGISTRY, ActionResult, Environment, EnvironmentSpec
from turngym_server.rng import LEVEL_STREAM, NOISE_STREAM, Rng

CHOICE_STREAM = 1 << 40
"""Of a seed whose other streams are the level and the noise: what the player chooses."""


def made(spec: EnvironmentSpec, options: dict[str, object], seed: int) -> Environment[Any]:
    """An environment that stands at the start of this level seed."""
    environment = spec.environment(spec.options.model_validate(options))
    environment.reset(Rng(seed, LEVEL_STREAM))
    return environment


def noise(seed: int, action: int) -> Rng:
    return Rng(seed, NOISE_STREAM + action)


def random_play(environment: Environment[Any], seed: int, actions: int, first: int = 0) -> Iterator[ActionResult]:
    """Plays uniform legal actions until the end, from action `first` on; every fifth one is no action."""
    choices = Rng(seed, CHOICE_STREAM + first)
    for index in range(first, first + actions):
        legal = environment.legal_actions() or ["1 + 1"]
        result = environment.step("" if choices.below(5) == 0 else choices.choice(legal), noise(seed, index))
        yield result
        if result.terminated:
            return


def shown(result: ActionResult) -> str:
    """All that an agent, a trainer or a digest sees of an action."""
    facts = (
        result.observation,
        result.reward.hex(),
        result.terminated,
        result.success,
        result.valid,
        sorted(result.reward_components.items()),
        sorted(result.metrics.items()),
    )
    return repr(facts)


def transcript(spec: EnvironmentSpec, options: dict[str, object], seed: int, actions: int = 30) -> list[str]:
    environment = spec.environment(spec.options.model_validate(options))
    start = environment.reset(Rng(seed, LEVEL_STREAM))
    lines = [start.observation, repr(sorted(start.metrics.items())), environment.world().hex()]
    lines += [repr(list(environment.legal_actions() or ()))]
    return lines + [shown(result) for result in random_play(environment, seed, actions)]


def fingerprint(spec: EnvironmentSpec) -> str:
    lines = [line for seed in range(20) for line in transcript(spec, {}, seed)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    load_own()
    print(json.dumps({environment_id: fingerprint(REGISTRY[environment_id]) for environment_id in sys.argv[1:]}))
