"""Nothing held out is met in training: no state of a training episode is an instance of a held-out world.

What a world is, is written here a second time, from the observations that agents read, as sets of coordinates.
"""

from collections.abc import Callable, Iterable
from functools import cache

import pytest
import transcripts

from turngym_server.discovery import load_own
from turngym_server.environment import REGISTRY, EnvironmentSpec
from turngym_server.rng import LEVEL_STREAM, NOISE_STREAM, Rng
from turngym_server.splits import Split, split_of

load_own()

HELD_OUT_SEEDS = 100_000
TRAINING_EPISODES = 10_000

Marked = tuple[tuple[int, int, str], ...]


def least_form(marked: Iterable[tuple[int, int, str]]) -> Marked:
    """Marked places up to turning, mirroring and moving."""
    places = list(marked)
    forms: list[Marked] = []
    for turn in (lambda y, x: (y, x), lambda y, x: (x, y)):
        for down in (1, -1):
            for right in (1, -1):
                turned = [(down * turn(y, x)[0], right * turn(y, x)[1], mark) for y, x, mark in places]
                top, left = min(y for y, _, _ in turned), min(x for _, x, _ in turned)
                forms.append(tuple(sorted((y - top, x - left, mark) for y, x, mark in turned)))
    return min(forms)


def sokoban_world(observation: str) -> object:
    """The floor that the player reaches and its targets, in RAGEN's symbols."""
    start = max(observation.find("P"), observation.find("S"))
    return sokoban_worlds(observation.translate(str.maketrans("X√PS", "_O_O")))[start]


@cache
def sokoban_worlds(board: str) -> dict[int, Marked]:
    """For each place in the text of a board without boxes: the form of what is connected to it."""
    width = board.index("\n") + 1
    forms: dict[int, Marked] = {}
    for start, mark in enumerate(board):
        if mark in "_O" and start not in forms:
            reached, edge = {start}, [start]
            while edge:
                at = edge.pop()
                beside = {at - 1, at + 1, at - width, at + width} - reached
                found = [place for place in beside if board[place] in "_O"]
                reached.update(found)
                edge += found
            form = least_form((*divmod(place, width), board[place]) for place in reached)
            forms |= dict.fromkeys(reached, form)
    return forms


def lake_world(observation: str) -> object:
    """Holes and goal; all places are marked, so that moving changes nothing."""
    return lake_form(observation.translate(str.maketrans("PX√", "_OG")))


@cache
def lake_form(lake: str) -> Marked:
    return least_form((y, x, mark) for y, row in enumerate(lake.split("\n")) for x, mark in enumerate(row))


CANONICAL: dict[str, Callable[[str], object]] = {
    "bandit": lambda observation: frozenset(observation.split("Arms: ")[-1].split(", ")),
    "frozen_lake": lake_world,
    "sokoban": sokoban_world,
}

CASES: list[tuple[str, dict[str, object]]] = [
    ("bandit", {"names": "pairs"}),
    ("bandit_reversed", {"names": "pairs"}),
    ("frozen_lake", {}),
    ("sokoban", {}),
    ("sokoban_large", {}),
]


def test_every_environment_is_here() -> None:
    own = {name for name, spec in REGISTRY.items() if spec.environment.__module__.startswith("turngym_server.envs.")}
    assert own == {name for name, _ in CASES}, "add the new environment, and what its world is, to this test"


def training_observations(spec: EnvironmentSpec, options: dict[str, object], seed: int) -> Iterable[str]:
    """What an agent reads in an episode that the split `train` gives for this seed, under random play."""
    environment = spec.environment(spec.options.model_validate(options))
    for attempt in range(1_000):
        start = environment.reset(Rng(seed, LEVEL_STREAM + attempt))
        if split_of(spec.family, spec.split_epoch, environment.world()) is Split.TRAIN:
            break
    yield start.observation
    choices = Rng(seed, transcripts.CHOICE_STREAM)
    for index in range(spec.limits.max_actions):
        action = choices.choice(environment.legal_actions() or [""])
        result = environment.step(action, Rng(seed, NOISE_STREAM + index))
        if result.terminated and spec.family == "bandit":
            return  # The pay, which shows no instance.
        yield result.observation
        if result.terminated:
            return


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_no_state_of_a_training_episode_is_of_a_held_out_world(name: str, options: dict[str, object]) -> None:
    spec = REGISTRY[name]
    canonical = CANONICAL[spec.family]
    environment = spec.environment(spec.options.model_validate(options))
    held_out: dict[bytes, object] = {}
    for seed in range(HELD_OUT_SEEDS):
        start = environment.reset(Rng(seed, LEVEL_STREAM))
        world = environment.world()
        if world not in held_out and split_of(spec.family, spec.split_epoch, world) is Split.HELD_OUT:
            held_out[world] = canonical(start.observation)
    forbidden = set(held_out.values())
    # The two notions of a world agree: as many worlds by one as by the other.
    assert len(forbidden) == len(held_out) > 200
    met: set[object] = set()
    for seed in range(TRAINING_EPISODES):
        met |= {canonical(observation) for observation in training_observations(spec, options, seed)}
    assert len(met) > 200
    assert not met & forbidden
