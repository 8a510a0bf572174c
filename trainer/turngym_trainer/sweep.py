"""Many runs that differ in a few settings, over seeds: what to run, from a file.

    folder = "runs/diversity"            # where the runs and sweep.html go
    config = "sokoban.toml"              # settings of every run; beside this file
    seeds = [0, 1, 2]

    [settings]                           # more of them
    run.iterations = 50

    [[variants]]                         # settings that go together; each variant is run with every seed
    name = "few levels"
    rollout.groups = 4
    rollout.group_size = 32

    [[variants]]
    name = "many levels"
    rollout.groups = 32
    rollout.group_size = 4

    [grid]                               # lists of values: every combination, of each variant
    update.epochs = [1, 2]

Everything is checked before anything runs. Knows nothing of processes; `sweep_runs` starts them.
"""

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from turngym_trainer.config import Config
from turngym_trainer.settings import ConfigError, load_config, read_toml

Tree = dict[str, object]
Point = tuple[str, tuple[str, ...]]
"""A name, and settings as `key=value`."""

KEYS: Final = ("folder", "config", "preset", "seeds", "settings", "variants", "grid")
OWNED: Final = {"run.seed": "seeds", "run.folder": "folder"}
"""Settings that a sweep sets itself, and what in its file decides them."""
LONGEST_NAME: Final = 100
"""Characters of a folder's name."""


class SweepError(ValueError):
    """A sweep that cannot be run: every fault found, one a line, with what to do about it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of a sweep.

    Attributes:
        point: which of the sweep's points it is a run of; they differ in settings, their runs in the seed.
        arguments: of `trainer train`.
    """

    point: str
    seed: int
    config: Config
    arguments: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The run's."""
        return Path(self.config.run.folder)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.point}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep's file asks for.

    Attributes:
        points: their names, in the file's order.
        runs: every point with every seed; the seeds of a point one after another.
    """

    folder: Path
    points: tuple[str, ...]
    runs: tuple[Planned, ...]


def read_sweep(file: Path, settings: Sequence[str] = ()) -> Sweep:
    """Reads and checks a sweep.

    Args:
        settings: `key=value`, for every run; they win over the file.

    Raises:
        SweepError: naming every fault.
    """
    tree = _read(file)
    faults = list(_faults(tree, settings))
    if faults:
        raise SweepError("\n".join(f"{file}: {fault}" for fault in faults))
    folder = Path(cast(str, tree["folder"]))
    base = _base_arguments(file, tree)
    common = (*_assignments(cast(Tree, tree.get("settings", {}))), *settings)
    points = _named(list(_points(tree)))
    runs: list[Planned] = []
    for (name, chosen), seed in itertools.product(points, cast(list[int], tree["seeds"])):
        own = (f"run.seed={seed}", f"run.folder={as_toml(str(folder / name / f'seed-{seed}'))}")
        given = (*common, *chosen, *own)
        try:
            config = load_config(preset=base.preset, file=base.file, settings=given)
        except ConfigError as error:
            faults += [f"{name}: {line}" for line in str(error).splitlines()]
            continue
        if config.validation.every == 0:
            faults.append(f"{name}: validation.every: 0 leaves nothing to compare runs by; set it to at least 1")
        runs.append(Planned(name, seed, config, (*base.arguments, *(p for each in given for p in ("--set", each)))))
    if faults := list(dict.fromkeys([*faults, *_twins(runs)])):
        raise SweepError("\n".join(f"{file}: {fault}" for fault in faults))
    return Sweep(folder, tuple(name for name, _ in points), tuple(runs))


@dataclass(frozen=True, slots=True)
class _Base:
    preset: str | None
    file: Path | None

    @property
    def arguments(self) -> tuple[str, ...]:
        preset = ("--preset", self.preset) if self.preset else ()
        return (*preset, *(("--config", str(self.file)) if self.file else ()))


def _base_arguments(file: Path, tree: Tree) -> _Base:
    config = tree.get("config")
    return _Base(cast("str | None", tree.get("preset")), file.parent / cast(str, config) if config else None)


def _read(file: Path) -> Tree:
    try:
        return read_toml(file)
    except ConfigError as error:
        raise SweepError(str(error)) from error


def _faults(tree: Tree, settings: Sequence[str]) -> Iterator[str]:
    """What is wrong with the file itself; settings are checked where they come together."""
    for key in tree:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"a sweep has {', '.join(KEYS)}"
            yield f"unknown key {key!r}; {hint} Settings of every run belong under [settings]"
    if not isinstance(tree.get("folder"), str) or not tree["folder"]:
        yield f'folder: where the runs go, got {tree.get("folder")!r}; for example folder = "runs/sweep"'
    for key in ("config", "preset"):
        if not isinstance(tree.get(key, ""), str):
            yield f"{key}: expected a string, got {tree[key]!r}"
    seeds = tree.get("seeds")
    if not isinstance(seeds, list) or not seeds or not all(_is_seed(seed) for seed in cast(list[object], seeds)):
        yield f"seeds: expected a list of whole numbers from 0 on, got {seeds!r}; for example seeds = [0, 1, 2]"
    elif len(set(cast(list[int], seeds))) < len(cast(list[int], seeds)):
        yield f"seeds: {seeds} names a seed twice, which would be the same run twice; name each once"
    yield from _misplaced(tree, settings)


def _misplaced(tree: Tree, settings: Sequence[str]) -> Iterator[str]:
    """Tables that are none, lists that are none, and settings that the sweep or its grid decides."""
    tables, variants, grid = tree.get("settings", {}), tree.get("variants", []), tree.get("grid", {})
    if not isinstance(tables, dict):
        yield f"settings: expected a table, got {tables!r}"
        return
    if not isinstance(variants, list) or not all(isinstance(each, dict) for each in cast(list[object], variants)):
        yield f"variants: expected tables, each under [[variants]], got {variants!r}"
        return
    if not isinstance(grid, dict):
        yield f"grid: expected a table of lists, got {grid!r}"
        return
    swept: set[str] = set()
    for key, values in _leaves(cast(Tree, grid)):
        swept.add(key)
        if not isinstance(values, list) or not values:
            yield f"grid: {key}: expected a list of values, got {values!r}; one for every run belongs under [settings]"
        elif len({json.dumps(value, sort_keys=True, default=str) for value in cast(list[object], values)}) < len(
            cast(list[object], values)
        ):
            yield f"grid: {key}: {values!r} names a value twice, which would be the same runs twice"
    for at, variant in enumerate(cast(list[Tree], variants), 1):
        name = variant.get("name")
        if not isinstance(name, str) or not name.strip():
            yield f'variants: the {at}. has no name; give it one, for example name = "few levels"'
        swept |= {key for key, _ in _leaves({key: value for key, value in variant.items() if key != "name"})}
    fixed = {key for key, _ in _leaves(cast(Tree, tables))}
    given = {setting.partition("=")[0].strip() for setting in settings}
    for key, owner in OWNED.items():
        if key in swept | fixed | given:
            yield f"{key}: is decided by `{owner}` of the sweep; leave it out"
    for key in sorted(swept & given):
        yield f"--set {key}: the sweep varies it; leave it out, or take it from the file"


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _points(tree: Tree) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every variant with every combination of the grid, by a name that tells what it is."""
    variants = cast(list[Tree], tree.get("variants", [])) or [{}]
    axes = [[(key, value) for value in cast(list[object], v)] for key, v in _leaves(cast(Tree, tree.get("grid", {})))]
    for variant in variants:
        own = _assignments({key: value for key, value in variant.items() if key != "name"})
        for chosen in itertools.product(*axes):
            told = [str(variant["name"]).strip()] if "name" in variant else []
            told += [f"{key.rpartition('.')[2]}={value}" for key, value in chosen]
            yield " ".join(told) or "all", (*own, *(f"{key}={as_toml(value)}" for key, value in chosen))


def _named(points: Sequence[Point]) -> list[Point]:
    """The points with names that folders can have; numbered where they would not be told apart."""
    names = [re.sub(r"[^\w.=,+-]+", "-", name).strip("-.") or "point" for name, _ in points]
    if len(set(names)) < len(names) or max(map(len, names)) > LONGEST_NAME:
        names = [f"{at:03d}-{name[:LONGEST_NAME]}" for at, name in enumerate(names, 1)]
    return [(name, settings) for name, (_, settings) in zip(names, points, strict=True)]


def _twins(runs: Sequence[Planned]) -> Iterator[str]:
    """Points that come to the same settings."""
    seen: dict[str, str] = {}
    for run in runs:
        content = run.config.model_dump_json(exclude={"run": {"folder"}})
        if (twin := seen.setdefault(content, run.point)) != run.point:
            yield f"{twin} and {run.point} come to the same settings; leave one of them out"


def _leaves(tree: Tree, above: str = "") -> Iterator[tuple[str, object]]:
    """(section.key, value) of nested tables. What lies deeper is the value of a setting."""
    for key, value in tree.items():
        if isinstance(value, dict) and not above and "." not in key:
            yield from _leaves(cast(Tree, value), key)
        else:
            yield f"{above}.{key}" if above else key, value


def _assignments(tree: Tree) -> tuple[str, ...]:
    return tuple(f"{key}={as_toml(value)}" for key, value in _leaves(tree))


def as_toml(value: object) -> str:
    """A plain value in TOML's notation, on one line."""
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, object], value).items()
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(held)}" for key, held in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, cast(list[object], value))) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
