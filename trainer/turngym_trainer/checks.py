"""What a run is refused for that its settings do not show alone: by its folder, server, policy, machine and processes.

What settings show is in `rules`. Nothing here writes or plays anything but a first observation.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from turngym_client import Client, EnvironmentInfo, Split
from turngym_trainer.checkpoint import EnvironmentIdentity
from turngym_trainer.config import Config
from turngym_trainer.context import system_message
from turngym_trainer.distributed import Group, processes_here
from turngym_trainer.evaluate import context_of
from turngym_trainer.grade import RunError
from turngym_trainer.memory import Episode, Shape, estimate, refuse_what_does_not_fit, told
from turngym_trainer.metrics import METRICS
from turngym_trainer.policy import Policy
from turngym_trainer.rollout import first_prompt
from turngym_trainer.room import available
from turngym_trainer.sample import Source, planned
from turngym_trainer.schedule import Phase, turns_at
from turngym_trainer.seeds import Place
from turngym_trainer.settings import CONFIG, MAY_CHANGE_ON_RESUME, ConfigError, changed_keys, config_tree, load_config
from turngym_trainer.start import served_environment


def wanted_environment(client: Client, config: Config) -> EnvironmentInfo:
    """The one environment of some settings, once it serves what the run needs.

    Raises:
        RunError: it has another version than the settings ask for. ConfigError: see `served_environment`.
    """
    splits = {Split(config.environment.split)}
    if config.validation.every:
        splits.add(Split(config.validation.split))
    served = served_environment(client, config, splits)
    if config.environment.version and config.environment.version != served.version:
        raise RunError(
            f"the server has {served.id} {served.version}, environment.version asks for {config.environment.version}"
        )
    return served


def check_alike(group: Group, config: Config, newest: Path | None, environments: Sequence[EnvironmentIdentity]) -> None:
    """Refuses processes that would not make one run.

    Raises:
        RunError: they were given different settings, see different checkpoints, or meet different environments.
    """
    own = {
        "settings": config_tree(config),
        "checkpoint": newest.name if newest else None,
        "environments": [asdict(environment) for environment in environments],
    }
    first, *others = group.exchange(own)
    for rank, other in enumerate(others, 1):
        if differing := [name for name in own if first[name] != other[name]]:
            raise RunError(
                f"process {rank} has other {', '.join(differing)} than process 0: {other[differing[0]]} and "
                f"{first[differing[0]]}. Give all the same settings and servers, and a run.folder that all can read"
            )


def check_room(policy: Policy, client: Client, config: Config, environment: EnvironmentIdentity) -> int:
    """Refuses a context that does not hold one turn, by the first turn of the first episode.

    Returns:
        Tokens of that turn's prompt.
    """
    max_turns = turns_at(config.horizon, 1, Phase(), config.environment.max_turns)
    first = planned(Source("", config, environment.version, max_turns), Place(1), 0, 0)
    prompt = first_prompt(policy, client, first.request, context_of(config))
    answer = config.rollout.max_response_tokens
    if len(prompt) + answer > policy.max_positions:
        raise ConfigError(
            f"rollout.max_response_tokens: {config.policy.model} reads at most {policy.max_positions} tokens, but the "
            f"first turn of {environment.id} takes {len(prompt)} for the prompt and up to {answer} for the answer; "
            "lower it, set rollout.instructions=short, or take a policy with a longer context"
        )
    return len(prompt)


def check_memory(
    policy: Policy,
    served: EnvironmentInfo,
    config: Config,
    prompt: int,
    processes: int,
    tell: Callable[[str], None],
) -> None:
    """Tells what a process of the run will take of memory, and refuses it where there is less.

    `prompt`: tokens of the first turn's.

    Raises:
        ConfigError: it does not fit; names settings with which it would.
    """
    context = context_of(config)
    most = served.limits.max_actions_per_turn
    system = system_message(context.instructions, served.instructions, served.action_separator, most)
    opening = len(policy.encode(policy.chat_format(system).opening))
    turns = (config.horizon.turns or (served.limits.max_turns,))[-1]
    episode = Episode(prompt, max(1, prompt - opening), turns, policy.max_positions)
    shape = Shape.of(policy.model)
    there = available(policy.device)
    if there is not None:
        there //= 1 if policy.device.type == "cuda" else processes_here()
        # The policy is loaded already.
        there += 4 * shape.parameters
    of = "" if there is None else f"; there are {told(there)}"
    each = "" if processes == 1 else f" for each of {processes} processes"
    tell(f"memory: {estimate(shape, config, episode, processes).line()}{of}{each}")
    if there is not None and config.run.check_memory:
        refuse_what_does_not_fit(shape, config, episode, there, processes)


def check_horizon(config: Config, environment: EnvironmentIdentity) -> None:
    """Refuses phases of more turns than validations play. Raises ConfigError."""
    most = int(environment.limits["max_turns"])
    if config.horizon.turns and config.horizon.turns[-1] > most:
        raise ConfigError(
            f"horizon.turns: the last phase has {config.horizon.turns[-1]} turns, validations and the environment "
            f"{most}; set environment.max_turns to as many, as far as {environment.id} allows, or give fewer here"
        )


def check_folder(folder: Path, config: Config, *, resume: bool) -> None:
    """Refuses a folder that holds another run, or where one is resumed, none or one of other settings."""
    file = folder / CONFIG
    if resume:
        if not file.exists():
            raise RunError(f"{folder} holds no run to resume: there is no {CONFIG} in it")
        changed = set(changed_keys(load_config(file=file), config)) - MAY_CHANGE_ON_RESUME
        if "run.iterations" in changed_keys(load_config(file=file), config) and config.update.schedule != "constant":
            changed.add("run.iterations (the learning rate's schedule depends on it)")
        if changed:
            raise RunError(
                f"{', '.join(sorted(changed))}: cannot be changed on resume, the run would not be the one it was; "
                "start a new run from its checkpoint (policy.model=CHECKPOINT)"
            )
    elif (folder / METRICS).exists() and (folder / METRICS).stat().st_size > 0:
        raise RunError(f"{folder} holds a run already; resume it (--resume {folder}) or choose another run.folder")
