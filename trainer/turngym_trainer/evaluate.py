"""Measuring a policy on levels that it does not train on.

The levels of a run's validations are the same every time, and so are the noise and the draws of every token: what moves
between two validations is the policy. Knows nothing of updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from turngym_client import Client, EpisodeRequest, Limits, Split
from turngym_trainer import seeds
from turngym_trainer.config import Config, EnvironmentConfig
from turngym_trainer.context import Context
from turngym_trainer.distributed import ALONE, Group
from turngym_trainer.policy import Policy
from turngym_trainer.rollout import Planned, Sampling, collect

_PURPOSE = "validation"
_DRAWS_PER_WORLD = 20
_RESETS_AT_ONCE = 128


class EvaluationError(RuntimeError):
    """There is nothing to judge a policy by. Says why."""


@dataclass(frozen=True, slots=True)
class LevelResult:
    """What one episode of an evaluation came to. A level seed is one world, in an environment and split."""

    level_seed: int
    noise_seed: int
    world_id: str
    success: bool
    environment_return: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy's results over episodes that were played to their end.

    Attributes:
        levels: the episodes one by one, in the order of the levels.
        episodes: played to their end; lost: taken by infrastructure, in no result.
        success: share of episodes that accomplished the task. low, high: Wilson's 95 % interval of it.
        environment_return: mean sum of the environment's rewards.
        valid_format: share of turns that could be parsed. valid_action: without an invalid action. Of no turns, where
            every context outgrew the model: 0.
    """

    episodes: int
    lost: int
    successes: int
    success: float
    low: float
    high: float
    environment_return: float
    valid_format: float
    valid_action: float
    levels: tuple[LevelResult, ...]

    def metrics(self) -> dict[str, float]:
        """The numbers over all levels, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "levels"}


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion; z is the normal quantile, 95 % by default."""
    assert 0 <= successes <= trials
    assert trials > 0
    share = successes / trials
    center = share + z * z / (2 * trials)
    half = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, float((center - half) / scale)), min(1.0, float((center + half) / scale))


def environment_limits(config: EnvironmentConfig) -> Limits:
    """Limits to ask for; 0 is the environment's default."""
    return Limits(
        max_turns=config.max_turns,
        max_actions=config.max_actions,
        max_actions_per_turn=config.max_actions_per_turn,
    )


def context_of(config: Config) -> Context:
    """What the policy reads."""
    rollout = config.rollout
    return Context(turns=rollout.context_turns, instructions=rollout.instructions, prefill=rollout.prefill)


def choose_levels(
    client: Client, environment: EnvironmentConfig, split: Split, *, run_seed: int, count: int, version: str = ""
) -> list[int]:
    """Level seeds to evaluate on: of `count` distinct worlds, or draws where the split is `all`.

    Fewer, if 20 · count draws do not hold so many distinct worlds.

    Raises:
        TurngymError: the environment cannot be started on that split.
    """
    candidates = [
        seeds.level_seed(run_seed, 0, 0, index, purpose=_PURPOSE) for index in range(_DRAWS_PER_WORLD * count)
    ]
    if split is Split.ALL:
        return candidates[:count]
    chosen: dict[str, int] = {}
    for start in range(0, len(candidates), _RESETS_AT_ONCE):
        requests = [
            EpisodeRequest(
                environment_id=environment.id,
                options=environment.options,
                limits=environment_limits(environment),
                split=split,
                level_seed=seed,
                noise_seed=0,
                expected_version=version,
            )
            for seed in candidates[start : start + _RESETS_AT_ONCE]
        ]
        episodes = client.reset_many(requests)
        for seed, episode in zip(candidates[start : start + _RESETS_AT_ONCE], episodes, strict=True):
            chosen.setdefault(episode.world_id, seed)
        client.close_many(episodes)
        if len(chosen) >= count:
            break
    return list(chosen.values())[:count]


def evaluate(
    policy: Policy,
    client: Client,
    config: Config,
    levels: Sequence[int],
    *,
    split: Split,
    greedy: bool,
    version: str = "",
    group: Group = ALONE,
) -> Evaluation:
    """Plays one episode on each level. `group`: processes that share them; each gets the whole result.

    Raises:
        EvaluationError: every episode was lost.
        TurngymError: what concerns the whole evaluation and not an episode.
    """
    plan = [
        Planned(
            EpisodeRequest(
                environment_id=config.environment.id,
                options=config.environment.options,
                limits=environment_limits(config.environment),
                split=split,
                level_seed=level,
                noise_seed=seeds.noise_seed(config.run.seed, 0, 0, index, 0, purpose=_PURPOSE),
                expected_version=version,
            ),
            group=index,
            member=0,
        )
        for index, level in enumerate(levels)
    ]
    rollout = collect(
        policy,
        client,
        plan,
        context=context_of(config),
        sampling=Sampling(config.rollout.max_response_tokens, config.rollout.temperature, greedy),
        uniforms=lambda group, member, turn, count: seeds.token_uniforms(
            config.run.seed, 0, 0, group, member, turn, count, purpose=_PURPOSE
        ),
        parts=config.rollout.parts,
        keep_cache=config.rollout.keep_cache,
        group=group,
    )
    played = rollout.trajectories
    if not played:
        raise EvaluationError(f"all {len(plan)} evaluation episodes were lost, the first to: {rollout.lost[0].error}")
    turns = [turn for trajectory in played for turn in trajectory.turns]
    successes = sum(trajectory.success is True for trajectory in played)
    low, high = wilson(successes, len(played))
    return Evaluation(
        episodes=len(played),
        lost=len(rollout.lost),
        successes=successes,
        success=successes / len(played),
        low=low,
        high=high,
        environment_return=float(np.mean([trajectory.environment_return for trajectory in played])),
        valid_format=_share([turn.valid_format for turn in turns]),
        valid_action=_share([turn.valid_action for turn in turns]),
        levels=tuple(
            LevelResult(
                trajectory.level_seed,
                trajectory.noise_seed,
                trajectory.world_id,
                trajectory.success is True,
                trajectory.environment_return,
            )
            for trajectory in sorted(played, key=lambda trajectory: trajectory.group)
        ),
    )


def pooled(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Results of several environments in all: means weigh each by its episodes, shares of turns too."""
    episodes = [each.episodes for each in evaluations]
    successes = sum(each.successes for each in evaluations)
    low, high = wilson(successes, sum(episodes))

    def mean(of: Sequence[float]) -> float:
        return float(np.average(of, weights=episodes))

    return Evaluation(
        episodes=sum(episodes),
        lost=sum(each.lost for each in evaluations),
        successes=successes,
        success=successes / sum(episodes),
        low=low,
        high=high,
        environment_return=mean([each.environment_return for each in evaluations]),
        valid_format=mean([each.valid_format for each in evaluations]),
        valid_action=mean([each.valid_action for each in evaluations]),
        levels=tuple(level for each in evaluations for level in each.levels),
    )


def _share(true: Sequence[bool]) -> float:
    return sum(true) / len(true) if true else 0.0
