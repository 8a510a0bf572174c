"""From an iteration's graded episodes to an update: penalties, values, advantages, whitening, and who learns from what.

The formulas are in `advantage` and `loss`, the optimiser's steps in `update`. Knows nothing of environments or servers.
"""

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from turngym_trainer.advantage import ADVANTAGES, Episodes, whiten
from turngym_trainer.batch import lay_out
from turngym_trainer.config import Config
from turngym_trainer.grade import Graded
from turngym_trainer.loss import kl_penalty
from turngym_trainer.metrics import Number
from turngym_trainer.reward import lay_on_rows
from turngym_trainer.seeds import Place
from turngym_trainer.signals import explained_variance, token_signals
from turngym_trainer.update import OF_ACTOR, Learner, Lesson


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
    taught = np.flatnonzero(kept & teaches & (not warming))
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
        actor_episodes=taught,
        critic_episodes=np.arange(len(chosen)) if learner.critic is not None else np.arange(0),
        place=place,
    )
    measured = {name: value for name, value in asdict(report).items() if len(taught) or name not in OF_ACTOR}
    return {**metrics, **_report_metrics(measured, optimiser_steps=report.optimiser_steps)}


def _report_metrics(report: Mapping[str, Number], *, optimiser_steps: int) -> dict[str, Number]:
    return {**{f"update/{name}": value for name, value in report.items()}, "update/optimiser_steps": optimiser_steps}
