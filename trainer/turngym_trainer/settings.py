"""Where a run's settings come from and are kept.

Layers, later ones win: the defaults, a preset, a TOML file, `--set section.key=value`. What they come to is checked as
a whole, so that nothing that cannot work gets as far as a rollout: a bad setting is refused with the reason and what to
do, an unknown key with the nearest known one. Presets are sets of values, and nothing else knows that they exist.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import tomlkit
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from turngym_trainer.advantage import ADVANTAGES
from turngym_trainer.config import Config, Section
from turngym_trainer.filter import FILTERS
from turngym_trainer.rules import faults, faults_of_processes

Tree = dict[str, object]

CONFIG: Final = "config.toml"
"""A run's settings, in its folder."""

MAY_CHANGE_ON_RESUME: Final = frozenset(
    {
        "run.folder",
        "run.server",
        "run.patience",
        "run.iterations",
        "run.check_memory",
        "checkpoint.every",
        "checkpoint.keep",
        "guard.on_alarm",
        "guard.rollbacks",
    }
)
"""Settings that no number of a run depends on, so that a resumed run may change them."""


class ConfigError(ValueError):
    """Settings that cannot be used: every fault found, one a line, with what to do about it."""


PRESETS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "starpo": {
        "filter": {"kind": "none"},
        "advantage": {"kind": "gae"},
        "kl": {"coefficient": 0.001, "place": "reward", "estimator": "k1"},
        "update": {"clip_low": 0.2, "clip_high": 0.2},
    },
    "starpo_s": {
        "filter": {"kind": "std", "keep": 0.25},
        "advantage": {"kind": "gae"},
        "kl": {"coefficient": 0.0},
        "update": {"clip_low": 0.2, "clip_high": 0.28},
    },
    # RAGEN's own (config/base.yaml and verl's defaults), for pretrained models.
    "ragen": {
        "rollout": {"groups": 8, "group_size": 16, "max_response_tokens": 400},
        "filter": {"kind": "std", "keep": 0.25},
        "advantage": {"kind": "gae"},
        "critic": {"learning_rate": 1e-5, "clip": 0.5, "warmup_iterations": 0},
        "kl": {"coefficient": 0.001, "place": "loss", "estimator": "k1", "allow_k1_in_loss": True},
        "update": {"learning_rate": 1e-6, "minibatch_episodes": 32, "clip_low": 0.2, "clip_high": 0.28},
    },
    "grpo": {
        "filter": {"kind": "none"},
        "advantage": {"kind": "grpo"},
        "kl": {"coefficient": 0.001, "place": "loss", "estimator": "k3"},
        "update": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "seq-mean"},
    },
    # An episode is one action there, so its tokens are summed and not averaged.
    "rloo": {
        "filter": {"kind": "none"},
        "advantage": {"kind": "rloo"},
        "kl": {"coefficient": 0.001, "place": "loss", "estimator": "k3"},
        "update": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "length-limit"},
    },
    "reinforce_pp": {
        "filter": {"kind": "none"},
        "advantage": {"kind": "reinforce_pp"},
        "kl": {"coefficient": 0.001, "place": "reward", "estimator": "k1"},
        "update": {"clip_low": 0.2, "clip_high": 0.2},
    },
}
"""Named sets of values. Nothing in the trainer asks which preset a run came from."""


def load_config(
    *, preset: str | None = None, file: Path | None = None, settings: Sequence[str] = (), base: Tree | None = None
) -> Config:
    """Builds the settings of a run from `base` (empty: the defaults), a preset, a TOML file and `key=value` settings.

    A file may name its preset itself (`preset = "starpo_s"` at the top); the argument wins over it.

    Raises:
        ConfigError: naming every fault.
    """
    from_file = read_toml(file) if file else {}
    named = from_file.pop("preset", None)
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"{file}: preset must be a name, got {named!r}")
    tree: Tree = dict(base or {})
    if name := preset or named:
        if name not in PRESETS:
            raise ConfigError(f"unknown preset {name!r}{_nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
        tree = _merged(tree, cast(Tree, PRESETS[name]))
    tree = _merged(tree, from_file)
    for setting in settings:
        tree = _merged(tree, _setting_tree(setting))
    return config_from_tree(tree)


def config_from_tree(tree: Mapping[str, object]) -> Config:
    """Checks nested plain values and makes a Config of them.

    Raises:
        ConfigError: naming every fault.
    """
    config = _parsed(tree)
    if found := list(_unknown_kinds(config)) or list(faults(config)):
        raise ConfigError("\n".join(found))
    return config


def kept_config(file: Path) -> Config:
    """The settings that a run kept. Rules between them are not asked for: they may be stricter than they were then.

    Raises:
        ConfigError: they cannot be read.
    """
    return _parsed(read_toml(file))


def _parsed(tree: Mapping[str, object]) -> Config:
    try:
        return Config.model_validate(_lists_as_tuples(tree))
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(fault) for fault in error.errors())) from None


def config_tree(config: Config) -> Tree:
    """The settings as nested plain values, JSON and TOML alike."""
    return config.model_dump(mode="json")


def to_toml(config: Config) -> str:
    """The settings as TOML that `load_config` reads back to the same settings."""
    return tomlkit.dumps(config_tree(config))


def settings_table() -> Iterator[tuple[str, str, str]]:
    """Every setting as (key, default, description), in the tree's order: what a command line can show."""
    defaults = Config()
    for section in Config.model_fields:
        values = cast(Section, getattr(defaults, section))
        for key, field in type(values).model_fields.items():
            yield f"{section}.{key}", str(getattr(values, key)), field.description or ""


def settings_that_differ(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """Settings that are not the defaults, as (key, value, default, description), in the tree's order."""
    values = cast(dict[str, Tree], config_tree(config))
    changed = set(changed_keys(Config(), config))
    for key, default, meaning in settings_table():
        if key in changed:
            section, _, name = key.partition(".")
            yield key, str(values[section][name]), default, meaning


def changed_keys(old: Config, new: Config) -> list[str]:
    """Dotted keys whose values differ."""
    old_tree, new_tree = cast(dict[str, Tree], config_tree(old)), cast(dict[str, Tree], config_tree(new))
    return [
        f"{section}.{key}"
        for section, values in new_tree.items()
        for key, value in values.items()
        if old_tree[section][key] != value
    ]


def check_processes(config: Config, processes: int) -> None:
    """Refuses what several processes cannot do together.

    Raises:
        ConfigError: naming every fault.
    """
    if found := list(faults_of_processes(config, processes)):
        raise ConfigError("\n".join(found))


def _unknown_kinds(config: Config) -> Iterator[str]:
    """Filters and estimators that nobody has registered."""
    for key, kind, known in (
        ("filter.kind", config.filter.kind, FILTERS),
        ("advantage.kind", config.advantage.kind, ADVANTAGES),
    ):
        if kind not in known:
            yield f"{key}: unknown {kind!r}{_nearest(kind, known)}; there are {', '.join(known)}"


def read_toml(file: Path) -> Tree:
    """A TOML file's values. Raises ConfigError where it cannot be read, or is none."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not TOML: {error}") from error


def _setting_tree(setting: str) -> Tree:
    """`a.b=value` as nested dictionaries; the value in TOML's notation, and where it is none, as a string."""
    key, equals, text = setting.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {setting!r}: expected section.key=value, for example rollout.groups=8")
    try:
        value: object = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in reversed(keys):
        value = {part: value}
    return cast(Tree, value)


def _merged(under: Tree, over: Mapping[str, object]) -> Tree:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            merged[key] = _merged(cast(Tree, below), cast(Mapping[str, object], value))
        else:
            merged[key] = value
    return merged


def _lists_as_tuples(value: Mapping[str, object]) -> Tree:
    """Servers, phases and files may be one value or a list; strict validation wants the tuple that the tree holds."""
    tree = dict(value)
    for name, key, kind in (
        ("run", "server", str),
        ("lora", "targets", str),
        ("horizon", "turns", int),
        ("warm_start", "demonstrations", str),
    ):
        section = tree.get(name)
        if isinstance(section, Mapping):
            section = dict(cast(Mapping[str, object], section))
            given = section.get(key)
            if isinstance(given, kind) and not isinstance(given, bool):
                section[key] = (given,)
            elif isinstance(given, list):
                section[key] = tuple(cast(list[object], given))
            tree[name] = section
    return tree


def _describe(fault: ErrorDetails) -> str:
    where = [str(part) for part in fault["loc"]]
    key = ".".join(where)
    if fault["type"] == "extra_forbidden":
        known = Config.model_fields if len(where) == 1 else (name for name, _, _ in settings_table())
        return f"unknown setting {key!r}{_nearest(key, known) or '; `trainer settings` lists them all'}"
    meaning = {name: f" ({meaning})" for name, _, meaning in settings_table()}.get(key, "")
    return f"{key}: {fault['msg']}, got {fault['input']!r}{meaning}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the name that was meant: nearly the same key in the same section, or the same key in another."""
    names = list(known)
    section, _, key = name.rpartition(".")
    # Sections are left out of the comparison: sharing one makes no two keys alike.
    siblings = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == section}
    close = [siblings[other] for other in difflib.get_close_matches(key, siblings, n=1, cutoff=0.65)]
    if not close:
        close = [other for other in names if other.rpartition(".")[2] == key][:1]
    return f"; did you mean {close[0]!r}?" if close else ""
