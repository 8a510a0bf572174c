"""The committed floors, ceilings and world counts: there, readable, and what the script computes."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from turngym_server.discovery import load_own
from turngym_server.environment import REGISTRY
from turngym_server.reference import Reference, Score, read_reference
from turngym_server.sessions.digest import canonical_json
from turngym_server.splits import Split

load_own()
SCRIPT = Path(__file__).parents[2] / "experiments" / "reference_scores.py"
GRIDS = ["frozen_lake", "sokoban", "sokoban_large"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_scores", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def committed(name: str) -> tuple[Reference, str]:
    """What is measured of an environment, and its default options."""
    spec = REGISTRY[name]
    return read_reference(spec), canonical_json(spec.options().model_dump(mode="json"))


def test_chao1_by_hand(script: ModuleType) -> None:
    # 4 kinds seen, 2 of them once and 1 twice: 4 + 2·1 / (2·(1 + 1)) = 4.5.
    assert script.chao1(Counter(a=1, b=1, c=2, d=5)) == 4.5
    assert script.chao1(Counter(a=3, b=2)) == 2.0


def test_a_mean_and_its_half_width_by_hand(script: ModuleType) -> None:
    # Mean 0.5, s² = (4 · 0.25) / 3 = 1/3, standard error √(1/3 / 4) = 0.288675.
    assert script.reference([0.0, 1.0, 1.0, 0.0]) == {
        "value": 0.5,
        "half_width": round(1.96 * 0.288675, 6),
        "instances": 4,
        "exact": True,
    }
    assert script.reference([0.0, None]) is None
    assert script.reference([]) is None


@pytest.mark.parametrize("name", GRIDS)
def test_grids_have_scores_on_every_split_under_their_default_limits(name: str) -> None:
    reference, options = committed(name)
    assert reference.divides(options)
    for split in Split:
        floor, ceiling = reference.scores[options, REGISTRY[name].limits, split]
        assert floor is not None
        assert ceiling is not None
        assert floor.exact
        assert floor.instances == ceiling.instances >= 512
        assert floor.value + floor.half_width < ceiling.value
        assert 0 < floor.half_width < 0.03
        assert reference.worlds[options, split].worlds > 200


@pytest.mark.parametrize("name", ["bandit", "bandit_reversed"])
def test_one_pair_of_names_is_not_divided_and_many_are(name: str) -> None:
    reference, options = committed(name)
    assert not reference.divides(options)
    limits = REGISTRY[name].limits
    exact = (
        Score(value=0.5, half_width=0, instances=1, exact=True),
        Score(value=1, half_width=0, instances=1, exact=True),
    )
    assert reference.scores[options, limits, Split.ALL] == exact
    assert reference.scores[options, limits, Split.HELD_OUT] == (None, None)
    pairs = canonical_json(REGISTRY[name].options(names="pairs").model_dump(mode="json"))
    assert reference.divides(pairs)
    assert reference.worlds[pairs, Split.ALL].worlds == 4_096


@pytest.mark.parametrize("name", GRIDS)
def test_the_script_still_computes_them(script: ModuleType, name: str) -> None:
    """A block of 100 worlds lies around the committed figures."""
    spec = REGISTRY[name]
    reference, options_json = committed(name)
    options = spec.options()
    left = script.Left(spec.limits.max_turns, spec.limits.max_actions, spec.limits.max_actions_per_turn)
    standing = script.blocks_of_worlds(spec, options, Split.HELD_OUT, 100, 1)
    values = [(environment.floor(left), environment.ceiling(left)) for environment in standing]
    assert len(values) == 100
    for side, known in enumerate(reference.scores[options_json, spec.limits, Split.HELD_OUT]):
        assert known is not None
        again = script.reference([value[side] for value in values])
        # Early worlds are the likelier ones, and those are roomier: hence the margin beside four standard errors.
        assert abs(again["value"] - known.value) < 2 * again["half_width"] + 0.05
