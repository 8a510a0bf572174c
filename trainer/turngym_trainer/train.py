"""StarPO and StarPO-S: the iteration of RAGEN (arXiv 2504.20073), from rollout to checkpoint.

`train` reads like the paper; each step is a function of a module of its own. Departures from the paper: every episode
has its own noise seed (RAGEN's groups share theirs), the penalty for an invalid turn is the trainer's and not the
environment's, and validation plays distinct worlds of a split that training never meets.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from turngym_client import Client, EnvironmentInfo, Split, TurngymError
from turngym_trainer.advantage import ADVANTAGES, Episodes, whiten
from turngym_trainer.batch import lay_out
from turngym_trainer.checkpoint import (
    TRAINING,
    CheckpointError,
    EnvironmentIdentity,
    Progress,
    State,
    check_same_environment,
    checkpoints,
    load_learner,
    read_state,
    roll_back,
    save_checkpoint,
    versions,
)
from turngym_trainer.collapse import write_report
from turngym_trainer.config import Config
from turngym_trainer.context import system_message
from turngym_trainer.distributed import Group, joined, processes_here
from turngym_trainer.evaluate import Evaluation, choose_levels, context_of, evaluate, pooled
from turngym_trainer.facts import Facts, write_facts
from turngym_trainer.grade import Graded, RunError, check_readable, complete_groups, grade
from turngym_trainer.guard import Alarm, Watch, watch
from turngym_trainer.held import Held, left_of_block, load_held
from turngym_trainer.lora import check_lora
from turngym_trainer.loss import kl_penalty
from turngym_trainer.memory import Episode, Shape, estimate, refuse_what_does_not_fit, told
from turngym_trainer.metrics import METRICS, NoLog, Number, RunLog, read_metrics
from turngym_trainer.mixture import environments
from turngym_trainer.policy import Policy, PolicyError, load_policy
from turngym_trainer.process import Judge, load_judge
from turngym_trainer.recompute import layers_to_recompute
from turngym_trainer.reward import lay_on_rows, shaping_signals
from turngym_trainer.rollout import first_prompt
from turngym_trainer.room import available
from turngym_trainer.sample import Sample, Source, planned, roll_out
from turngym_trainer.schedule import Phase, after_validation, turns_at
from turngym_trainer.seeds import Place
from turngym_trainer.settings import (
    ConfigError,
    changed_keys,
    check_processes,
    config_from_tree,
    config_tree,
    load_config,
    to_toml,
)
from turngym_trainer.signals import (
    episode_signals,
    explained_variance,
    signals_by_environment,
    smooth,
    token_signals,
)
from turngym_trainer.start import connected, served_environment, take_folder
from turngym_trainer.template import template_signs
from turngym_trainer.trajectory import Trajectory
from turngym_trainer.update import Learner, Lesson

_LOG = logging.getLogger(__name__)

CONFIG = "config.toml"
CHECKPOINTS = "checkpoints"
REFERENCE = "reference"

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "run.folder",
        "run.server",
        "run.iterations",
        "run.check_memory",
        "checkpoint.every",
        "checkpoint.keep",
        "guard.on_alarm",
        "guard.rollbacks",
    }
)
"""Settings that no number of a run depends on, so that a resumed run may change them."""


_TOLD = (RunError, PolicyError, ConfigError, CheckpointError, TurngymError, OSError)
"""Errors that one of several processes may have alone, all raised outside of updates."""


class _RolledBack(Exception):
    """The run goes on from an earlier checkpoint."""


Observer = Callable[[Mapping[str, Number]], None]
"""Is told each iteration's metrics as they are written."""


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


def train(
    config: Config,
    *,
    resume: bool = False,
    observe: Observer = lambda metrics: None,
    tell: Callable[[str], None] = _LOG.info,
) -> Path:
    """Runs a training to its last iteration, or until its guard stops it. What that does on an alarm is `guard.*`.

    Args:
        config: everything that decides the run.
        resume: go on from the newest checkpoint in `run.folder` (from the beginning if there is none yet).
        observe: told each iteration's metrics.
        tell: told in a line what the run will take of memory, before its first rollout.

    Returns:
        The last checkpoint's folder, which transformers loads.

    Raises:
        RunError: the folder holds a run and `resume` is False, or holds none and it is True; settings changed; an
            iteration lost all its episodes; no answer before the first update could be parsed; the process reward
            raised or returned no finite number; or the guard stopped the run.
        PolicyError: the policy cannot be loaded.
        ConfigError: a split is not served, an address is none, the folder cannot be written, a turn does not fit
            the policy's context, the run does not fit the memory that there is, or `reward.process` cannot be imported.
        CheckpointError: the newest checkpoint cannot be used, or not with this environment.
        TurngymError: the server cannot be used.
        PeerError: this is one of several processes (see `distributed`), and another one has raised one of these.
        LostPeerError: another one is gone.

    Nothing is written before server, environment and policy have been found usable. Of several processes only the first
    one writes, and calls `observe` and `tell`.
    """
    with joined(config.run.device, _TOLD) as group:
        check_processes(config, group.size)
        if not group.first:
            observe, tell = (lambda metrics: None), (lambda line: None)
        while True:
            try:
                return _train(config, group, resume=resume, observe=observe, tell=tell)
            except _RolledBack as rolled:
                _LOG.warning("%s", rolled)
                resume = True  # From the checkpoint that is the newest now.


def _train(config: Config, group: Group, *, resume: bool, observe: Observer, tell: Callable[[str], None]) -> Path:
    """`train`, up to the first rollback."""
    with _open_run(config, group, resume=resume, tell=tell) as run:
        if config.guard.on_alarm == "rollback" and not group.from_first(lambda: checkpoints(run.folder / CHECKPOINTS)):
            _checkpoint(run)  # An alarm may go back to the beginning.
        while run.progress.iteration < config.run.iterations:
            iteration = run.progress.iteration + 1
            place = Place(iteration, run.progress.attempt)
            began = time.perf_counter()

            held, rollout = _collect(run, place)
            due, run.held = held.due(iteration, config.rollout.groups), held.after(iteration, config.rollout.groups)
            collected = time.perf_counter()

            if run.progress.update == 0 and config.rollout.stop_unreadable:
                check_readable(due, config)
            graded = grade(due, config, place)
            template = _template(run, graded, iteration)
            learnt = learn(run.learner, graded, config, place)
            updated = time.perf_counter()

            validated = validate(run, iteration) if _due(iteration, config.validation.every, config) else {}
            ended = time.perf_counter()

            metrics = {
                **episode_signals(graded.trajectories, graded.rewards, graded.spread),
                **(
                    signals_by_environment(graded.trajectories, graded.rewards, graded.spread)
                    if config.mixture.environments
                    else {}
                ),
                **shaping_signals(graded.trajectories, config.reward),
                "train/lost": len(rollout.lost),
                "train/dropped": rollout.dropped + len(due) - len(graded.trajectories),
                "train/rounds": rollout.rounds,
                "train/refilled_groups": rollout.refilled,
                **({"train/max_turns": held.max_turns} if config.horizon.turns else {}),
                **({"train/age": iteration - held.iteration} if config.rollout.reuse > 1 else {}),
                **template,
                **learnt,
                **validated,
            }
            metrics = _advance(run, iteration, metrics)
            alarms = _watch(run, metrics)
            clock = {
                "time": time.time(),
                "iteration_seconds": ended - began,
                "rollout_seconds": collected - began,
                "waiting_seconds": rollout.waiting_seconds,
                "update_seconds": updated - collected,
                "validation_seconds": ended - updated,
            }
            run.log.write_metrics(iteration, metrics, clock)
            if config.run.trajectories_every and iteration % config.run.trajectories_every == 0:
                rewards, kept = graded.rewards.tolist(), graded.kept.tolist()
                run.log.write_trajectories(iteration, zip(graded.trajectories, rewards, kept, strict=True))
            if _due(iteration, config.checkpoint.every, config):
                _checkpoint(run)
            observe(metrics)
            if alarms:
                _act(run, alarms, graded)
        return checkpoints(run.folder / CHECKPOINTS)[-1]


def _collect(run: Run, place: Place) -> tuple[Held, Sample]:
    """The episodes that an iteration and perhaps some after it learn from, and what was played for that just now.

    Where those that are held have no whole group for the iteration, they are played anew, as far as their use goes.
    """
    config, held = run.config, run.held
    if held is not None and complete_groups(
        held.due(place.iteration, config.rollout.groups), config.rollout.group_size
    ):
        return held, Sample((), (), 0, 0, 0, 0.0)
    phase = Phase.from_plain(run.progress.phase)
    sources = [arena.source(place.iteration, phase) for arena in run.arenas]
    sample = roll_out(
        run.learner.policy,
        run.client,
        config,
        place,
        sources=sources,
        judge=run.judge,
        group=run.group,
        iterations=left_of_block(place.iteration, config.rollout.reuse),
    )
    trajectories = sample.trajectories
    if config.rollout.reuse > 1 and config.update.old_logprobs == "recomputed":
        # Later the policy that played them is gone.
        trajectories = _with_old_logprobs(run.learner, trajectories)
    return Held(place.iteration, place.attempt, sources[0].max_turns, trajectories), sample


def _with_old_logprobs(learner: Learner, trajectories: tuple[Trajectory, ...]) -> tuple[Trajectory, ...]:
    batch = lay_out(trajectories)
    logprobs = np.split(learner.logprobs(batch), batch.episode_offsets[1:-1])
    return tuple(replace(each, old_logprobs=of) for each, of in zip(trajectories, logprobs, strict=True))


def learn(learner: Learner, graded: Graded, config: Config, place: Place) -> dict[str, Number]:
    """Advantages and update. Returns metrics.

    The actor learns from the kept groups, the critic from them or from all (`critic.on`); where none is kept, the
    critic still learns from all. Where members are compared, kept groups that are all constant teach nothing: no step
    is taken.
    """
    estimator = ADVANTAGES[config.advantage.kind]
    everything = estimator.needs_critic and (config.critic.on == "all" or not bool(graded.kept.any()))
    chosen = np.flatnonzero(graded.kept | everything)
    metrics: dict[str, Number] = {
        "update/kept_episodes": int(graded.kept.sum()),
        **token_signals(lay_out(graded.trajectories), graded.groups),
    }
    if len(chosen) == 0:
        return metrics
    batch = lay_out([graded.trajectories[int(episode)] for episode in chosen])
    kept = graded.kept[chosen]
    metrics["update/kept_tokens"] = int(batch.lengths[kept].sum())

    rewards = batch.gather(
        [
            row
            for episode in chosen
            for row in lay_on_rows(graded.trajectories[int(episode)], graded.turn_rewards[int(episode)])
        ]
    )
    old = batch.logprobs
    if config.update.old_logprobs == "recomputed":
        kept_old = [graded.trajectories[int(episode)].old_logprobs for episode in chosen]
        known = [logprobs for logprobs in kept_old if logprobs is not None]
        old = np.concatenate(known) if len(known) == len(chosen) else learner.logprobs(batch)
        metrics["update/sampler_gap"] = float(np.abs(old - batch.logprobs).mean())
    reference = learner.reference_logprobs(batch) if learner.reference is not None else None
    if reference is not None:
        metrics["update/reference_gap"] = float((old.astype(np.float64) - reference).mean())
        if config.kl.place == "reward":
            rewards = rewards + kl_penalty(old.astype(np.float64), reference.astype(np.float64), config.kl)
    values = learner.values(batch) if learner.critic is not None else None
    last_values = None
    if config.advantage.bootstrap_truncated:
        last_values = learner.last_values([graded.trajectories[int(episode)].last_prompt for episode in chosen])

    mask = batch.mask
    result = estimator.function(
        Episodes(
            mask=mask,
            rewards=batch.padded(rewards),
            turn_ends=batch.padded_turn_ends(),
            returns=graded.rewards[chosen],
            groups=graded.groups[chosen],
            values=None if values is None else batch.padded(values),
            last_values=last_values,
        ),
        config.advantage,
    )
    advantages = result.advantages
    if estimator.whiten and bool(kept.any()):
        advantages = whiten(advantages, mask & kept[:, None])
    targets = None if result.targets is None else result.targets[mask]
    if values is not None and targets is not None:
        metrics["update/explained_variance"] = explained_variance(values, targets)

    teaches = not estimator.compares_members or bool(advantages.any())
    warming = estimator.needs_critic and place.iteration <= config.critic.warmup_iterations
    report = learner.update(
        Lesson(
            batch=batch,
            old_logprobs=old,
            advantages=advantages[mask],
            values=values,
            targets=targets,
            sampler_logprobs=batch.logprobs if config.update.old_logprobs == "recomputed" else None,
            reference_logprobs=reference if config.kl.place == "loss" else None,
        ),
        actor_episodes=np.flatnonzero(kept & teaches & (not warming)),
        critic_episodes=np.arange(len(chosen)) if learner.critic is not None else np.arange(0),
        place=place,
    )
    return {**metrics, **_report_metrics(asdict(report), optimiser_steps=report.optimiser_steps)}


def _template(run: Run, graded: Graded, iteration: int) -> dict[str, Number]:
    """Signs of template collapse in what the policy wrote, before it learns from it. Metrics, where they are due."""
    config = run.config.diagnostics
    if not _due(iteration, config.every, run.config):
        return {}
    signs = run.group.from_first(
        lambda: template_signs(
            run.learner.policy,
            run.learner.scorer,
            graded.trajectories,
            prompts=config.prompts,
            samples=config.samples,
            token_budget=run.config.update.microbatch_tokens,
        )
    )
    return {} if signs is None else {f"template/{name}": value for name, value in asdict(signs).items()}


def validate(run: Run, iteration: int) -> dict[str, Number]:
    """Plays the validation levels of every environment and writes down each. Returns metrics, of all and of each."""
    config, mixed = run.config.validation, len(run.arenas) > 1
    metrics: dict[str, Number] = {}
    results: list[Evaluation] = []
    for arena in run.arenas:
        result = evaluate(
            run.learner.policy,
            run.client,
            arena.config,
            arena.levels,
            split=Split(config.split),
            greedy=config.greedy,
            version=arena.identity.version,
            group=run.group,
        )
        results.append(result)
        run.log.write_validation(iteration, result.levels, arena.name if mixed else "")
        if mixed:
            metrics.update({f"validation/{arena.name}/{key}": value for key, value in result.metrics().items()})
    of_all = pooled(results) if mixed else results[0]
    return {**{f"validation/{name}": value for name, value in of_all.metrics().items()}, **metrics}


def _report_metrics(report: Mapping[str, Number], *, optimiser_steps: int) -> dict[str, Number]:
    return {**{f"update/{name}": value for name, value in report.items()}, "update/optimiser_steps": optimiser_steps}


def _advance(run: Run, iteration: int, metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Moves the counters and averages on. Returns the metrics with them in front."""
    before = run.progress
    steps, refused = int(metrics.get("update/optimiser_steps") or 0), int(metrics.get("update/refused") or 0)
    run.progress = replace(
        before,
        iteration=iteration,
        update=before.update + (steps > 0),
        optimiser_step=before.optimiser_step + steps,
        refused=before.refused + refused,
        averages=smooth(before.averages, metrics),
        phase=_phase(run, metrics),
    )
    return {
        "iteration": iteration,
        "update": run.progress.update,
        "optimiser_step": run.progress.optimiser_step,
        "refused": run.progress.refused,
        **metrics,
        **{f"average/{name}": value for name, value in run.progress.averages.items()},
    }


def _watch(run: Run, metrics: Mapping[str, Number]) -> list[Alarm]:
    """Shows an iteration to the guard."""
    seen, alarms = watch(Watch.from_plain(run.progress.seen), metrics, ceiling=_ceiling(run.arenas))
    run.progress = replace(run.progress, seen=asdict(seen))
    return alarms


def _act(run: Run, alarms: Sequence[Alarm], graded: Graded) -> None:
    """Tells of a collapse, and does about it what the settings say.

    Raises:
        RunError: the run stops here. _RolledBack: it goes on from an earlier checkpoint.
    """
    config, attempt = run.config.guard, run.progress.attempt
    report = run.group.from_first(
        lambda: write_report(run.folder, alarms, attempt, read_metrics(run.folder), graded.trajectories, graded.rewards)
    )
    told = f"iteration {run.progress.iteration}: {'; '.join(alarm.told for alarm in alarms)} (see {report})"
    if config.on_alarm == "warn":
        _LOG.warning("%s", told)
        return
    if config.on_alarm == "rollback" and attempt < config.rollbacks:
        before = min(alarm.since for alarm in alarms)
        sound = run.group.from_first(lambda: roll_back(run.folder / CHECKPOINTS, before, attempt + 1))
        if sound is not None:
            raise _RolledBack(f"{told}; back to {sound.name}, rollback {attempt + 1} of {config.rollbacks}")
        told += f"; there is no checkpoint from before iteration {before} to go back to"
    raise RunError(
        f"stopped by the guard at {told}. The run's checkpoints are in {run.folder / CHECKPOINTS}; start another from "
        "a sound one (policy.model=CHECKPOINT) with other settings, or let it go on with guard.on_alarm=warn"
    )


def _phase(run: Run, metrics: Mapping[str, Number]) -> dict[str, object]:
    """The horizon's phase after an iteration."""
    phase = Phase.from_plain(run.progress.phase)
    if (success := metrics.get("validation/success")) is not None:
        phase = after_validation(run.config.horizon, phase, success)
    return phase.plain()


def _due(iteration: int, every: int, config: Config) -> bool:
    """Every so many iterations and at the last one; 0: never."""
    return every > 0 and (iteration % every == 0 or iteration == config.run.iterations)


def _checkpoint(run: Run) -> None:
    run.progress = replace(run.progress, sizes=run.log.sizes())
    save_checkpoint(
        run.folder / CHECKPOINTS,
        run.learner,
        run.progress,
        [arena.identity for arena in run.arenas],
        config_tree(run.config),
        run.config.checkpoint.keep,
        run.held,
    )


@contextlib.contextmanager
def _open_run(config: Config, group: Group, *, resume: bool, tell: Callable[[str], None]) -> Generator[Run]:
    """Everything that a run holds open, restored from its newest checkpoint where it is resumed."""
    folder = Path(config.run.folder)
    judge = load_judge(config.reward.process)
    _check_folder(folder, config, resume=resume)
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
        served = [_served(client, each) for each in alone.values()]
        identities = [EnvironmentIdentity.of(info) for info in served]
        if state is not None:
            for then, now in zip((state.environment, *state.others), identities, strict=True):
                check_same_environment(then, now)
            _tell_other_versions(state)
        for each, info, identity in zip(alone.values(), served, identities, strict=True):
            _check_horizon(each, identity)
            prompt = _check_room(policy, client, each, identity)
            _check_memory(policy, info, each, prompt, group.size, tell)
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
        _check_alike(group, config, newest, identities)
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


def _check_alike(
    group: Group, config: Config, newest: Path | None, environments: Sequence[EnvironmentIdentity]
) -> None:
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


def _served(client: Client, config: Config) -> EnvironmentInfo:
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


def _ceiling(arenas: Sequence[Arena]) -> float | None:
    """Success of the best possible player in all environments, as validations pool them; None: not known."""
    if len(arenas) == 1:
        return arenas[0].ceiling
    known = [arena.ceiling for arena in arenas if arena.ceiling is not None]
    weights = [len(arena.levels) for arena in arenas]
    return float(np.average(known, weights=weights)) if len(known) == len(arenas) and sum(weights) else None


def _ceiling_of(served: EnvironmentInfo, config: Config) -> float | None:
    split = served.splits.get(Split(config.validation.split))
    return split.ceiling.value if split is not None and split.ceiling is not None else None


def _check_room(policy: Policy, client: Client, config: Config, environment: EnvironmentIdentity) -> int:
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


def _check_memory(
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


def _check_horizon(config: Config, environment: EnvironmentIdentity) -> None:
    """Refuses phases of more turns than validations play. Raises ConfigError."""
    most = int(environment.limits["max_turns"])
    if config.horizon.turns and config.horizon.turns[-1] > most:
        raise ConfigError(
            f"horizon.turns: the last phase has {config.horizon.turns[-1]} turns, validations and the environment "
            f"{most}; set environment.max_turns to as many, as far as {environment.id} allows, or give fewer here"
        )


def _check_folder(folder: Path, config: Config, *, resume: bool) -> None:
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


def _write_config(folder: Path, config: Config) -> None:
    """Takes the folder for this run, and keeps the settings in it."""
    take_folder(folder)
    aside = folder / f".{CONFIG}"
    aside.write_text(to_toml(config), encoding="utf-8")
    aside.replace(folder / CONFIG)


def _tell_other_versions(state: State) -> None:
    """Warns where the run goes on with other packages, and so may round otherwise than it did."""
    now = versions()
    if other := [
        f"{name} was {was}, is {now.get(name)}" for name, was in state.versions.items() if now.get(name) != was
    ]:
        _LOG.warning("resumed with other versions, so not bit for bit as it would have gone on: %s", "; ".join(other))


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


def resumable(folder: Path, settings: list[str]) -> Config:
    """Settings of the run in a folder, with some changed on the command line.

    Raises:
        RunError: the folder holds no run.
        ConfigError: the settings cannot be used.
    """
    file = folder / CONFIG
    if not file.exists():
        raise RunError(f"{folder} holds no run to resume: there is no {CONFIG} in it")
    return load_config(file=file, settings=[*settings, f"run.folder={str(folder)!r}"])


def checkpoint_config(checkpoint: Path) -> Config:
    """Settings of the run that a checkpoint is of.

    Raises:
        CheckpointError: the folder is no checkpoint of a training run.
    """
    return config_from_tree(read_state(checkpoint).config)
