"""What an episode is worth: the environment's rewards and the trainer's shaping, turn by turn.

The environment charges an unparsable or illegal action nothing but its usual step; whether to charge more is decided
here. Knows nothing of tokens' probabilities, groups or advantages.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turngym_trainer.config import RewardConfig
from turngym_trainer.trajectory import Trajectory, TurnRecord


def shaping(turn: TurnRecord, config: RewardConfig) -> float:
    """What the trainer adds to a turn's reward.

    `invalid_turn`, once, for a turn that could not be parsed or held an invalid action; `below_floor` for one that
    reasons less than the floor; the weighted process reward.
    """
    added = 0.0 if turn.valid_format and turn.valid_action else config.invalid_turn
    if _is_short(turn, config):
        added += config.below_floor
    if turn.process is not None:
        added += config.process_weight * turn.process
    return added


def _is_short(turn: TurnRecord, config: RewardConfig) -> bool:
    """A turn that could not be parsed is no short one: it may have been cut off while it reasoned."""
    return turn.valid_format and turn.reasoning_tokens < config.length_floor


def shaping_signals(trajectories: Sequence[Trajectory], config: RewardConfig) -> dict[str, float]:
    """Share of turns under the floor, and the mean sum of process rewards of an episode, where there are such."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    signals: dict[str, float] = {}
    if config.length_floor:
        signals["train/below_floor"] = sum(_is_short(turn, config) for turn in turns) / len(turns)
    if config.process:
        signals["train/process_reward"] = sum(turn.process or 0.0 for turn in turns) / len(trajectories)
    return signals


def turn_rewards(trajectory: Trajectory, config: RewardConfig, scale: float) -> NDArray[np.float64]:
    """The environment's reward times its scale (`environment.reward_scale`), and shaping, of each turn.

    Shaping is not scaled, so that it means the same in all environments of a mixture. An estimator that divides by a
    group's spread (`grpo`) feels a scale beside shaping only; to all others it is how much an environment counts.
    """
    return np.array([scale * turn.reward + shaping(turn, config) for turn in trajectory.turns], dtype=np.float64)


def lay_on_rows(trajectory: Trajectory, rewards: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Each turn's reward on the turn's last action token, 0 elsewhere: one array [T] for each row."""
    assert rewards.shape == (len(trajectory.turns),), (rewards.shape, len(trajectory.turns))
    laid = [np.zeros(len(row.ids), dtype=np.float64) for row in trajectory.rows]
    for turn, reward in enumerate(rewards):
        row, token = [(r, t) for r, of in enumerate(trajectory.rows) for t in np.flatnonzero(of.turn == turn)[-1:]][-1]
        laid[row][token] = reward
    return laid
