"""Floor and ceiling of environments on every split, and how many worlds each split has.

    python experiments/reference_scores.py --env sokoban

writes env_server/turngym_server/reference/<id>.json, from which a server's spec is read. An instance is the first draw
of a world not met before, as in the reference protocol (512 distinct worlds of a split, seeds in order); several
such blocks, over seeds of their own, make one estimate. Floors and ceilings are the environments' own exact values
of each instance, so that the half-width is that of the choice of instances alone (1.96 standard errors).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import turngym
from turngym_server.environment import REGISTRY, Environment, EnvironmentSpec, Left, Limits, Options
from turngym_server.envs import bandit, frozen_lake, sokoban
from turngym_server.frozen_lake.lake import Lake
from turngym_server.rng import LEVEL_STREAM, Rng
from turngym_server.sokoban.board import Board, canonical, cells
from turngym_server.sokoban.floors import connected_floors, ends_of_pushes
from turngym_server.splits import Split, split_of

FOLDER = Path(__file__).parents[1] / "env_server" / "turngym_server" / "reference"

BLOCK = 512
"""Distinct worlds of the reference protocol."""
DRAWS_PER_WORLD = 50
"""A block ends after so many draws for each world wanted, where a split has fewer worlds than that."""
CHAO_DRAWS = 20_000
FEW_WORLDS = 200
"""Options with fewer held-out worlds are not divided: only split `all` has scores."""

GRID_LIMITS = (Limits(5, 10, 5), Limits(10, 10, 1), Limits(2, 10, 5))


@dataclass(frozen=True)
class Setting:
    """Options and limits of one row of results."""

    options: Mapping[str, object]
    limits: tuple[Limits, ...]


SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    "bandit": (Setting({}, (Limits(1, 1, 1),)), Setting({"names": "pairs"}, (Limits(1, 1, 1),))),
    "bandit_reversed": (Setting({}, (Limits(1, 1, 1),)), Setting({"names": "pairs"}, (Limits(1, 1, 1),))),
    "frozen_lake": (Setting({}, GRID_LIMITS),),
    "sokoban": (Setting({}, GRID_LIMITS), Setting({"floors": "walk"}, GRID_LIMITS[:1])),
    "sokoban_large": (Setting({}, (sokoban.LARGE_LIMITS, GRID_LIMITS[0])),),
}


def bandit_worlds(options: bandit.BanditOptions) -> Iterator[bytes]:
    if options.names == "pairs":
        for steady in bandit.STEADY_NAMES:
            for bold in bandit.BOLD_NAMES:
                yield "\n".join(sorted((steady, bold))).encode()
    else:
        yield b"Dragon\nPhoenix"


def lake_worlds(options: frozen_lake.FrozenLakeOptions) -> Iterator[bytes]:
    """Every lake whose goal can be reached from some cell."""
    area = options.size**2
    for goal in range(area):
        for holes in range(1 << area):
            lake = Lake(options.size, holes, goal)
            if not holes >> goal & 1 and any(not holes >> lake.beside(goal, way) & 1 for way in range(4)):
                yield lake.world()


def sokoban_worlds(options: sokoban.SokobanOptions) -> Iterator[bytes]:
    """Every connected floor with every target that one push can end on; each of these has a start."""
    for floor in connected_floors(options.width, options.height):
        for target in cells(ends_of_pushes(floor, options.width + 1)):
            yield canonical(Board(options.width, options.height, floor, 1 << target), target)


def enumerator(spec: EnvironmentSpec, options: Options) -> Callable[[], Iterator[bytes]] | None:
    """All worlds of these options, where they can be listed in a minute."""
    if isinstance(options, bandit.BanditOptions):
        return lambda: bandit_worlds(options)
    if isinstance(options, frozen_lake.FrozenLakeOptions) and options.size <= 4:
        return lambda: lake_worlds(options)
    if isinstance(options, sokoban.SokobanOptions):
        inner = (options.width - 2) * (options.height - 2)
        plain = (options.boxes, options.min_pushes, options.max_pushes, options.floors) == (1, 1, None, "uniform")
        if plain and inner <= 16:
            return lambda: sokoban_worlds(options)
    return None


def draw(spec: EnvironmentSpec, environment: Environment[Any], split: Split, seed: int) -> bytes | None:
    """Starts the instance that a server gives for this level seed, and returns its world; None: no such instance."""
    for attempt in range(1_000):
        environment.reset(Rng(seed, LEVEL_STREAM + attempt))
        world = environment.world()
        if split is Split.ALL or split_of(spec.family, spec.split_epoch, world) is split:
            return world
    return None


@lru_cache(maxsize=8)
def exact_counts(environment_id: str, options_json: str) -> Counter[Split] | None:
    spec = REGISTRY[environment_id]
    worlds = enumerator(spec, spec.options.model_validate_json(options_json))
    if worlds is None:
        return None
    distinct = set(worlds())
    counts = Counter(split_of(spec.family, spec.split_epoch, world) for world in distinct)
    counts[Split.ALL] = len(distinct)
    return counts


def chao1(draws: Counter[bytes]) -> float:
    """Chao's bias-corrected lower estimate of the number of kinds, from how often each was drawn."""
    once = sum(1 for times in draws.values() if times == 1)
    twice = sum(1 for times in draws.values() if times == 2)
    return len(draws) + once * (once - 1) / (2 * (twice + 1))


@dataclass(frozen=True)
class WorldCount:
    """Worlds of a split: all of them, or Chao1's estimate from the distinct worlds of a sample."""

    worlds: int
    exact: bool
    sample: int = 0
    distinct: int = 0


def count_worlds(spec: EnvironmentSpec, options: Options, split: Split) -> WorldCount:
    counts = exact_counts(spec.id, options.model_dump_json())
    if counts is not None:
        return WorldCount(counts[split], exact=True)
    environment = spec.environment(options)
    draws = Counter(world for seed in range(CHAO_DRAWS) if (world := draw(spec, environment, split, seed)) is not None)
    return WorldCount(round(chao1(draws)), exact=False, sample=draws.total(), distinct=len(draws))


def reference(values: list[float | None]) -> dict[str, object] | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return {
        "value": round(statistics.fmean(known), 6),
        "half_width": round(1.96 * spread / math.sqrt(len(known)), 6),
        "instances": len(known),
        "exact": True,
    }


def blocks_of_worlds(
    spec: EnvironmentSpec, options: Options, split: Split, worlds: float, blocks: int
) -> Iterator[Any]:
    """The environment, standing at the start of each instance in turn."""
    environment = spec.environment(options)
    wanted = min(BLOCK, worlds)
    for block in range(blocks if wanted == BLOCK else 1):
        met: set[bytes] = set()
        for seed in range(block << 32, (block << 32) + DRAWS_PER_WORLD * wanted):
            world = draw(spec, environment, split, seed)
            if world is not None and world not in met:
                met.add(world)
                yield environment
            if len(met) == wanted:
                break


def entries(spec: EnvironmentSpec, blocks: int) -> Iterator[dict[str, object]]:
    for setting in SETTINGS[spec.id]:
        options = spec.options.model_validate(setting.options)
        counts = {split: count_worlds(spec, options, split) for split in Split}
        divided = counts[Split.HELD_OUT].worlds >= FEW_WORLDS
        for split, worlds in counts.items():
            instances = worlds.worlds if divided or split is Split.ALL else 0
            floors: dict[Limits, list[float | None]] = {limits: [] for limits in setting.limits}
            ceilings: dict[Limits, list[float | None]] = {limits: [] for limits in setting.limits}
            for environment in blocks_of_worlds(spec, options, split, instances, blocks):
                for limits in setting.limits:
                    left = Left(limits.max_turns, limits.max_actions, limits.max_actions_per_turn)
                    floors[limits].append(environment.floor(left))
                    ceilings[limits].append(environment.ceiling(left))
            for limits in setting.limits:
                entry = {
                    "options": options.model_dump(mode="json"),
                    "limits": {
                        "max_turns": limits.max_turns,
                        "max_actions": limits.max_actions,
                        "max_actions_per_turn": limits.max_actions_per_turn,
                        "wall_seconds": limits.wall_seconds,
                    },
                    "split": split.value,
                    "worlds": asdict(worlds),
                    "floor": reference(floors[limits]),
                    "ceiling": reference(ceilings[limits]),
                }
                print(
                    spec.id, setting.options, limits, split.value, worlds, entry["floor"], entry["ceiling"], flush=True
                )
                yield entry


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", action="append", choices=sorted(SETTINGS), help="environment id; all if not given")
    parser.add_argument("--blocks", type=int, default=4, help=f"blocks of {BLOCK} distinct worlds (default 4)")
    arguments = parser.parse_args()
    code = commit()
    for environment_id in arguments.env or sorted(SETTINGS):
        spec = REGISTRY[environment_id]
        result = {
            "environment": spec.id,
            "version": spec.version,
            "split_epoch": spec.split_epoch,
            "entries": list(entries(spec, arguments.blocks)),
            "made_by": {
                "command": f"python experiments/reference_scores.py --env {spec.id} --blocks {arguments.blocks}",
                "commit": code,
                "turngym": turngym.__version__,
                "python": platform.python_version(),
            },
        }
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{spec.id}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
