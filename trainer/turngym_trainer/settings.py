"""Where a run's settings come from, and which of them exclude each other.

Layers, later ones win: the defaults, a preset, a TOML file, `--set section.key=value`. What they come to is checked as
a whole, so that nothing that cannot work gets as far as a rollout: a bad setting is refused with the reason and what to
do, an unknown key with the nearest known one. Presets are sets of values, and nothing else knows that they exist.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import tomlkit
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from turngym_trainer.advantage import ADVANTAGES
from turngym_trainer.config import Config, Section
from turngym_trainer.filter import FILTERS
from turngym_trainer.mixture import environments

Tree = dict[str, object]


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
    if faults := list(_faults(config)):
        raise ConfigError("\n".join(faults))
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


def _faults(config: Config) -> Iterator[str]:
    """Rules between settings, each with its reason and what to do."""
    if config.filter.kind not in FILTERS:
        yield (
            f"filter.kind: unknown {config.filter.kind!r}{_nearest(config.filter.kind, FILTERS)}; "
            f"there are {', '.join(FILTERS)}"
        )
    estimator = ADVANTAGES.get(config.advantage.kind)
    if estimator is None:
        yield (
            f"advantage.kind: unknown {config.advantage.kind!r}{_nearest(config.advantage.kind, ADVANTAGES)}; "
            f"there are {', '.join(ADVANTAGES)}"
        )
        return
    if config.rollout.top_p != 1.0 or config.rollout.top_k != 0:
        yield (
            "rollout.top_p and rollout.top_k: log-probabilities are those of the whole distribution, and "
            f"truncated sampling (top_p={config.rollout.top_p}, top_k={config.rollout.top_k}) draws from another; "
            "use top_p=1.0 and top_k=0, and shape the distribution by rollout.temperature"
        )
    compares_members = estimator.compares_members or config.advantage.baseline == "group"
    if config.rollout.group_size < 2 and config.rollout.refills:
        yield "rollout.refills: a group of 1 has no spread, so all would be played again; set rollout.group_size to 2"
    if config.rollout.group_size < 2 and (config.filter.kind != "none" or compares_members):
        yield (
            f"rollout.group_size: {config.filter.kind} filtering and {config.advantage.kind} compare the members of a "
            "group, and a group of 1 has no spread; set it to at least 2"
        )
    episodes = config.rollout.groups * config.rollout.group_size
    if config.update.minibatch_episodes > episodes:
        yield (
            f"update.minibatch_episodes: {config.update.minibatch_episodes} is more than an iteration's {episodes} "
            f"episodes (rollout.groups times rollout.group_size); set it to at most {episodes}, or play more"
        )
    if config.advantage.baseline == "group" and config.advantage.kind != "reinforce_pp":
        yield (
            f"advantage.baseline: {config.advantage.kind} has a baseline of its own; set advantage.baseline=none, or "
            "advantage.kind=reinforce_pp"
        )
    if config.advantage.bootstrap_truncated and not estimator.needs_critic:
        yield (
            f"advantage.bootstrap_truncated: {config.advantage.kind} has no critic that could say what would have "
            "come; set it to false, or advantage.kind=gae"
        )
    if config.advantage.kind == "dr_grpo" and config.update.aggregation != "length-limit":
        yield (
            f"update.aggregation: {config.update.aggregation} weighs tokens by how long answers are, which dr_grpo is "
            "there to avoid; set update.aggregation=length-limit, or advantage.kind=rloo"
        )
    if config.kl.coefficient > 0.0:
        yield from _kl_faults(config, reads_token_rewards=estimator.reads_token_rewards)
    if config.critic.trunk == "shared" and config.critic.on == "all" and config.filter.kind != "none":
        yield (
            "critic.on: a shared trunk learns policy and value in one step, from the same episodes; "
            "set critic.on=kept or critic.trunk=own"
        )
    if config.lora.rank and config.critic.trunk == "own" and estimator.needs_critic:
        yield (
            "critic.trunk: a trunk of its own is trained whole, and LoRA is there to train few weights; set "
            "critic.trunk=shared, or an advantage without critic (advantage.kind=grpo)"
        )
    if config.policy.dtype != "float32" and config.update.old_logprobs == "sampled":
        yield (
            f"update.old_logprobs: in {config.policy.dtype} the sampler's log-probabilities differ from the trainer's, "
            "and the ratio would start away from 1; set update.old_logprobs=recomputed"
        )
    reach = config.checkpoint.keep * config.checkpoint.every
    if config.guard.on_alarm == "rollback" and reach < 4 * config.validation.every:
        yield (
            f"checkpoint.keep: a fall of success is told of after three validations, {3 * config.validation.every} "
            f"iterations, and the {config.checkpoint.keep} checkpoints kept reach back {reach}; set it to at least "
            f"{-(-4 * config.validation.every // config.checkpoint.every)}, or guard.on_alarm=warn"
        )
    yield from _reuse_faults(config)
    turns = config.horizon.turns
    if list(turns) != sorted(set(turns)):
        yield f"horizon.turns: {list(turns)} does not grow from phase to phase; give ascending numbers, as [10, 20, 30]"
    if len(turns) > 1 and config.horizon.until == "validation" and not config.validation.every:
        yield "horizon.until: without validations no phase would end; set validation.every, or horizon.until=iterations"
    if config.update.warmup_iterations >= config.run.iterations:
        yield (
            f"update.warmup_iterations: {config.update.warmup_iterations} of {config.run.iterations} iterations would "
            "never reach the learning rate; set it under run.iterations"
        )
    if config.update.dual_clip <= 1.0 + config.update.clip_high:
        yield (
            f"update.dual_clip: {config.update.dual_clip} must be over 1 + clip_high = {1 + config.update.clip_high}, "
            "else it acts before the clip does; 3.0 is usual"
        )
    if config.reward.length_floor and config.reward.below_floor < config.reward.invalid_turn:
        yield (
            f"reward.below_floor: {config.reward.below_floor} for short reasoning is worse than an answer that cannot "
            f"be parsed, {config.reward.invalid_turn}, and would teach those; set it to at least reward.invalid_turn"
        )
    if not config.warm_start.episodes and not config.warm_start.demonstrations:
        yield ("warm_start.episodes: 0 and no warm_start.demonstrations leave nothing to learn from; set one of them")
    yield from _mixture_faults(config)
    for alone in environments(config).values():
        yield from _split_faults(alone)


def check_processes(config: Config, processes: int) -> None:
    """Refuses what several processes cannot do together.

    Raises:
        ConfigError: naming every fault.
    """
    if processes == 1:
        return
    with_critic = ADVANTAGES[config.advantage.kind].needs_critic
    faults: list[str] = []
    if config.lora.rank:
        faults.append("lora.rank: LoRA trains in one process; set lora.rank=0, or start the run without torchrun")
    if with_critic and config.critic.trunk == "shared":
        faults.append(
            "critic.trunk: of several processes each holds a part of actor and critic, which run apart; set "
            "critic.trunk=own, or an advantage without critic (advantage.kind=grpo)"
        )
    if config.run.device.startswith("cuda:"):
        faults.append(f"run.device: each of {processes} processes takes a GPU of its own; set run.device=cuda")
    if faults:
        raise ConfigError("\n".join(faults))


def _split_faults(config: Config) -> Iterator[str]:
    if config.environment.split == "train" and config.validation.split == "all" and config.validation.every:
        yield (
            "validation.split: all contains the worlds of split train, so it would measure memory; set "
            "validation.split=validation, or environment.split=all where the environment cannot be divided"
        )
    if config.environment.split == "all" and config.validation.split == "validation" and config.validation.every:
        yield (
            "validation.split: an environment that is trained on split all has met the worlds of validation; "
            "set validation.split=all (a score on worlds that were trained on) or environment.split=train"
        )


def _mixture_faults(config: Config) -> Iterator[str]:
    mixed = config.mixture.environments
    if not mixed:
        return
    if own := changed_keys(Config(), Config(environment=config.environment)):
        yield f"{', '.join(own)}: a mixture names its environments itself; set it for each of mixture.environments"
    names = [each.name or each.id for each in mixed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"mixture.environments: {', '.join(twice)} is there more than once; give each a name of its own, for "
            f'example {{id = "{mixed[0].id}", name = "small"}}'
        )
    if any(sum(each.weight[at] for each in mixed) <= 0.0 for at in (0, -1)):
        yield "mixture.environments: the weights sum to 0, so no groups would be played; set one over 0"


def _reuse_faults(config: Config) -> Iterator[str]:
    reuse = config.rollout.reuse
    if config.run.iterations % reuse:
        yield (
            f"rollout.reuse: {config.run.iterations} iterations are no multiple of {reuse}, so the last groups would "
            "be played and never learnt from; set "
            f"run.iterations={-(-config.run.iterations // reuse) * reuse}, or another rollout.reuse"
        )
    horizon = config.horizon
    if len(horizon.turns) > 1 and horizon.until == "iterations" and horizon.iterations % reuse:
        yield (
            f"horizon.iterations: a phase of {horizon.iterations} ends while groups of {reuse} iterations "
            f"(rollout.reuse) are in use, which have its turns; set it to a multiple of {reuse}"
        )


def _kl_faults(config: Config, *, reads_token_rewards: bool) -> Iterator[str]:
    place, estimator = config.kl.place, config.kl.estimator
    if place == "loss" and estimator == "k1" and not config.kl.allow_k1_in_loss:
        yield (
            "kl.estimator: k1 in the loss has no gradient in expectation, so it would penalise nothing; "
            "set kl.estimator=k2 or k3, or kl.place=reward (kl.allow_k1_in_loss=true has it nevertheless, as RAGEN's "
            "own recipe does)"
        )
    if place == "reward" and estimator != "k1":
        yield f"kl.estimator: {estimator} in the reward is biased; set kl.estimator=k1, or kl.place=loss"
    if place == "reward" and not reads_token_rewards:
        yield (
            f"kl.place: {config.advantage.kind} reads one return an episode and never sees a penalty on tokens; "
            "set kl.place=loss and kl.estimator=k3"
        )


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
    return f"{key}: {fault['msg']}, got {fault['input']!r}"


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
