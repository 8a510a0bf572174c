"""A run in progress: what it holds open, made new or restored from its newest checkpoint.

Nothing is written before server, environment and policy have been found usable; what for is in `checks`.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from turngym_client import Client, EnvironmentInfo, Split
from turngym_trainer.advantage import ADVANTAGES
from turngym_trainer.checkpoint import (
    CHECKPOINTS,
    TRAINING,
    CheckpointError,
    EnvironmentIdentity,
    Progress,
    State,
    check_same_environment,
    checkpoints,
    load_learner,
    read_state,
    tell_other_versions,
)
from turngym_trainer.checks import (
    check_alike,
    check_folder,
    check_horizon,
    check_memory,
    check_room,
    wanted_environment,
)
from turngym_trainer.config import Config
from turngym_trainer.distributed import Group
from turngym_trainer.evaluate import choose_levels
from turngym_trainer.facts import Facts, write_facts
from turngym_trainer.held import Held, load_held
from turngym_trainer.lora import check_lora
from turngym_trainer.metrics import NoLog, RunLog
from turngym_trainer.mixture import environments
from turngym_trainer.policy import Policy, load_policy
from turngym_trainer.process import Judge, load_judge
from turngym_trainer.recompute import layers_to_recompute
from turngym_trainer.sample import Source
from turngym_trainer.schedule import Phase, turns_at
from turngym_trainer.settings import CONFIG, to_toml
from turngym_trainer.start import connected, take_folder
from turngym_trainer.update import Learner

REFERENCE = "reference"
"""The policy that a run began with, where it is needed later, in its folder."""


@dataclass(frozen=True, slots=True)
class Arena:
    """An environment of a run.

    Attributes:
        name: its id, or its name in the mixture.
        config: the run's settings, with this environment alone.
        ceiling: success rate of the best possible player on the worlds of validation; None: not known.
        levels: seeds that validations play.
    """

    name: str
    config: Config
    identity: EnvironmentIdentity
    ceiling: float | None
    levels: list[int]

    def source(self, iteration: int, phase: Phase) -> Source:
        """What an iteration's episodes are played with."""
        max_turns = turns_at(self.config.horizon, iteration, phase, self.config.environment.max_turns)
        return Source(self.name, self.config, self.identity.version, max_turns)


@dataclass(slots=True)
class Run:
    """A run in progress.

    Attributes:
        arenas: the environments, one or those of the mixture.
        judge: puts process rewards on episodes; None: there are none.
        held: episodes for iterations to come; None: the next one plays its own.
        group: the processes of the run.
    """

    config: Config
    folder: Path
    client: Client
    arenas: tuple[Arena, ...]
    learner: Learner
    progress: Progress
    log: RunLog | NoLog
    judge: Judge | None
    held: Held | None
    group: Group

    @property
    def ceiling(self) -> float | None:
        """Success of the best possible player in all environments, as validations pool them; None: not known."""
        if len(self.arenas) == 1:
            return self.arenas[0].ceiling
        known = [arena.ceiling for arena in self.arenas if arena.ceiling is not None]
        weights = [len(arena.levels) for arena in self.arenas]
        return float(np.average(known, weights=weights)) if len(known) == len(self.arenas) and sum(weights) else None


@contextlib.contextmanager
def open_run(config: Config, group: Group, *, resume: bool, tell: Callable[[str], None]) -> Generator[Run]:
    """Everything that a run holds open, restored from its newest checkpoint where it is resumed."""
    folder = Path(config.run.folder)
    judge = load_judge(config.reward.process)
    check_folder(folder, config, resume=resume)
    found = checkpoints(folder / CHECKPOINTS) if resume else []
    newest = found[-1] if found else None
    state = read_state(newest) if newest else None
    _set_threads(config, state)
    policy = _load(_policy_to_load(folder, newest, config), config)
    if config.lora.rank:
        check_lora(policy.model, config.lora)
    if config.policy.gradient_checkpointing:
        layers_to_recompute(policy.model)
    with connected(config) as client:
        alone = environments(config)
        served = [wanted_environment(client, each) for each in alone.values()]
        identities = [EnvironmentIdentity.of(info) for info in served]
        if state is not None:
            for then, now in zip((state.environment, *state.others), identities, strict=True):
                check_same_environment(then, now)
            tell_other_versions(state.versions)
        for each, info, identity in zip(alone.values(), served, identities, strict=True):
            check_horizon(each, identity)
            prompt = check_room(policy, client, each, identity)
            check_memory(policy, info, each, prompt, group.size, tell)
        progress = state.progress if state else Progress()
        held = load_held(newest / TRAINING) if newest else None
        if held is not None and held.attempt != progress.attempt:
            held = None  # Rolled back: these were played on the way to the alarm.
        arenas = tuple(
            Arena(
                name,
                each,
                EnvironmentIdentity.of(info),
                _ceiling_of(info, config),
                group.from_first(functools.partial(_levels, client, each, info)),
            )
            for (name, each), info in zip(alone.items(), served, strict=True)
        )
        check_alike(group, config, newest, identities)
        if group.first:
            _write_config(folder, config)
            write_facts(folder, Facts.of(served, Split(config.validation.split)))
        learner = _make_learner(
            policy,
            config,
            folder,
            newest,
            group,
            turns=max(int(identity.limits["max_turns"]) for identity in identities),
        )
        with _log(folder, progress, group) as log:
            yield Run(config, folder, client, arenas, learner, progress, log, judge, held, group)


def _log(folder: Path, progress: Progress, group: Group) -> contextlib.AbstractContextManager[RunLog | NoLog]:
    if not group.first:
        return contextlib.nullcontext(NoLog())
    return RunLog(folder, progress.sizes, progress.iteration)


def _levels(client: Client, config: Config, info: EnvironmentInfo) -> list[int]:
    """The levels of an environment that validations play."""
    if not config.validation.every:
        return []
    return choose_levels(
        client,
        config.environment,
        Split(config.validation.split),
        run_seed=config.run.seed,
        count=config.validation.episodes,
        version=info.version,
    )


def _ceiling_of(served: EnvironmentInfo, config: Config) -> float | None:
    split = served.splits.get(Split(config.validation.split))
    return split.ceiling.value if split is not None and split.ceiling is not None else None


def _write_config(folder: Path, config: Config) -> None:
    """Takes the folder for this run, and keeps the settings in it."""
    take_folder(folder)
    aside = folder / f".{CONFIG}"
    aside.write_text(to_toml(config), encoding="utf-8")
    aside.replace(folder / CONFIG)


def _set_threads(config: Config, state: State | None) -> None:
    """A run keeps its number of torch threads: sums are split by threads, and rounded where they are split."""
    if threads := config.run.threads or (state.threads if state else 0):
        torch.set_num_threads(threads)


def _load(spec: str, config: Config, dtype: str = "float32") -> Policy:
    return load_policy(spec, device=config.run.device, dtype=dtype, seed=config.run.seed)


def _policy_to_load(folder: Path, checkpoint: Path | None, config: Config) -> str:
    """The policy that a run begins or goes on with. With LoRA that is what it began with: a checkpoint's is merged."""
    if checkpoint is None or not config.lora.rank:
        return str(checkpoint or config.policy.model)
    if not (folder / REFERENCE).exists():
        raise CheckpointError(f"{folder / REFERENCE} is gone: what this run trains stands beside its weights")
    return str(folder / REFERENCE)


def _make_learner(
    policy: Policy, config: Config, folder: Path, checkpoint: Path | None, group: Group, *, turns: int
) -> Learner:
    """The learner of a run, restored from `checkpoint`, whose policy is `policy`, where there is one.

    `turns` is the most that an episode may take.
    """
    reference = None
    kept = folder / REFERENCE
    if checkpoint is None and (config.kl.coefficient > 0.0 or config.lora.rank) and group.first:
        policy.save(kept)
    group.exchange(None)  # The others look for it now.
    if config.kl.coefficient > 0.0 and not config.lora.rank:
        if not kept.exists():
            raise CheckpointError(f"{kept} is gone: the KL divergence of this run was measured from it")
        reference = _load(str(kept), config, config.policy.dtype)
    learner = Learner(
        policy,
        config,
        length_limit=turns * config.rollout.max_response_tokens,
        with_critic=ADVANTAGES[config.advantage.kind].needs_critic,
        reference=reference,
        group=group,
    )
    if checkpoint is not None:
        load_learner(checkpoint, learner)
    return learner
