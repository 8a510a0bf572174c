"""What an iteration's episodes are worth, and which of them are learnt from.

Knows nothing of tokens, policies or updates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from turngym_trainer import seeds
from turngym_trainer.config import Config
from turngym_trainer.filter import FILTERS, Spreads, spreads
from turngym_trainer.mixture import reward_scales
from turngym_trainer.reward import turn_rewards
from turngym_trainer.seeds import Place
from turngym_trainer.trajectory import Trajectory

_SHOWN: Final = 200
"""Characters of an answer that an error shows."""


class RunError(RuntimeError):
    """A run that cannot start or go on; says what to do."""


@dataclass(frozen=True, slots=True)
class Graded:
    """Episodes with what they are worth and which of them are learnt from.

    Attributes:
        trajectories: B episodes of complete groups.
        turn_rewards: reward of each turn as it is learnt, scaled and shaping included, B arrays.
        rewards: their sums, [B].
        groups: group of each episode, [B].
        spread: how rewards spread in each group.
        kept: which episodes' groups the filter keeps, [B].
    """

    trajectories: tuple[Trajectory, ...]
    turn_rewards: tuple[NDArray[np.float64], ...]
    rewards: NDArray[np.float64]
    groups: NDArray[np.int64]
    spread: Spreads
    kept: NDArray[np.bool_]


def grade(trajectories: tuple[Trajectory, ...], config: Config, place: Place) -> Graded:
    """Rewards episodes and filters groups. A group that lost more than half of its members is dropped before.

    Raises:
        RunError: no group is left.
    """
    whole = complete_groups(trajectories, config.rollout.group_size)
    if not whole:
        raise RunError(
            f"all groups lost more than half of their {config.rollout.group_size} members; see to the server and resume"
        )
    by_turn = tuple(_learnt(whole, config))
    rewards = np.array([of_turns.sum() for of_turns in by_turn], dtype=np.float64)
    groups = np.array([trajectory.group for trajectory in whole], dtype=np.int64)
    spread = spread_of(whole, config)
    draws = seeds.group_uniforms(config.run.seed, place.iteration, place.attempt, spread.groups, purpose="filter")
    kept_groups = spread.groups[FILTERS[config.filter.kind](spread, config.filter, draws)]
    return Graded(whole, by_turn, rewards, groups, spread, np.isin(groups, kept_groups))


def spread_of(trajectories: Sequence[Trajectory], config: Config) -> Spreads:
    """How episodes of complete groups fared within each, by what `filter.on` says."""
    if config.filter.on == "reward":
        returns = [of_turns.sum() for of_turns in _learnt(trajectories, config)]
    else:
        returns = [trajectory.environment_return for trajectory in trajectories]
    return spreads(
        np.array(returns, dtype=np.float64),
        np.array([trajectory.group for trajectory in trajectories], dtype=np.int64),
        tuple(trajectory.environment for trajectory in trajectories),
    )


def _learnt(trajectories: Sequence[Trajectory], config: Config) -> Iterator[NDArray[np.float64]]:
    """The reward of each turn of each episode, as it is learnt."""
    scales = reward_scales(config)
    for trajectory in trajectories:
        yield turn_rewards(trajectory, config.reward, scales[trajectory.environment])


def check_readable(trajectories: Sequence[Trajectory], config: Config) -> None:
    """Refuses to go on with a policy that does not know the form of an answer: rewards would have nothing to go by.

    Raises:
        RunError: not one answer could be parsed.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if any(turn.valid_format for turn in turns):
        return
    read = "; ".join(repr(turn.response[:_SHOWN]) for turn in turns[:: max(1, len(turns) // 3)][:3])
    raise RunError(
        f"before the first update none of {len(turns)} answers could be parsed, so rewards have nothing to teach by. "
        f"Read were for example {read}. Warm start first (`trainer warm-start`, then policy.model=ITS FOLDER); where "
        f"answers are cut off, raise rollout.max_response_tokens (it is {config.rollout.max_response_tokens}). "
        "rollout.stop_unreadable=false goes on nevertheless"
    )


def complete_groups(trajectories: Sequence[Trajectory], group_size: int) -> tuple[Trajectory, ...]:
    """Episodes of groups that have at least half of their members, and at least one turn each."""
    played = [trajectory for trajectory in trajectories if trajectory.turns]
    members: dict[int, int] = {}
    for trajectory in played:
        members[trajectory.group] = members.get(trajectory.group, 0) + 1
    return tuple(trajectory for trajectory in played if 2 * members[trajectory.group] >= group_size)
