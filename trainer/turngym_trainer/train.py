"""StarPO and StarPO-S: the iteration of RAGEN (arXiv 2504.20073), from rollout to checkpoint.

`train` reads like the paper; each step is a function of a module of its own. Departures from the paper: every episode
has its own noise seed (RAGEN's groups share theirs), the penalty for an invalid turn is the trainer's and not the
environment's, and validation plays distinct worlds of a split that training never meets.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from turngym_client import Split, TurngymError
from turngym_trainer.batch import lay_out
from turngym_trainer.checkpoint import CHECKPOINTS, CheckpointError, checkpoints, roll_back, save_checkpoint
from turngym_trainer.collapse import write_report
from turngym_trainer.config import Config
from turngym_trainer.distributed import Group, joined
from turngym_trainer.evaluate import Evaluation, evaluate, pooled
from turngym_trainer.grade import Graded, RunError, check_readable, complete_groups, grade
from turngym_trainer.guard import Alarm, Watch, watch
from turngym_trainer.held import Held, left_of_block
from turngym_trainer.learn import learn
from turngym_trainer.metrics import Number, read_metrics
from turngym_trainer.policy import PolicyError
from turngym_trainer.reward import shaping_signals
from turngym_trainer.run import Run, open_run
from turngym_trainer.sample import Sample, roll_out
from turngym_trainer.schedule import Phase, after_validation
from turngym_trainer.seeds import Place
from turngym_trainer.settings import CONFIG, ConfigError, check_processes, config_tree, load_config
from turngym_trainer.signals import episode_signals, signals_by_environment, smooth
from turngym_trainer.template import template_signs
from turngym_trainer.trajectory import Trajectory
from turngym_trainer.update import Learner

_LOG = logging.getLogger(__name__)

_TOLD = (RunError, PolicyError, ConfigError, CheckpointError, TurngymError, OSError)
"""Errors that one of several processes may have alone, all raised outside of updates."""


class _RolledBack(Exception):
    """The run goes on from an earlier checkpoint."""


Observer = Callable[[Mapping[str, Number]], None]
"""Is told each iteration's metrics as they are written."""


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
    with open_run(config, group, resume=resume, tell=tell) as run:
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
    seen, alarms = watch(Watch.from_plain(run.progress.seen), metrics, ceiling=run.ceiling)
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
