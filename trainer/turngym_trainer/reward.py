"""What an episode is worth: the environment's rewards and the trainer's shaping, turn by turn.

The environment charges an unparsable or illegal action nothing but its usual step; whether to charge more is decided
here. Knows nothing of tokens' probabilities, groups or advantages.
"""

import numpy as np
from numpy.typing import NDArray

from turngym_trainer.config import RewardConfig
from turngym_trainer.trajectory import Trajectory, TurnRecord


def shaping(turn: TurnRecord, config: RewardConfig) -> float:
    """`invalid_turn`, once, for a turn that could not be parsed or held an invalid action; else 0."""
    return 0.0 if turn.valid_format and turn.valid_action else config.invalid_turn


def turn_rewards(trajectory: Trajectory, config: RewardConfig) -> NDArray[np.float64]:
    """The environment's reward and shaping of each turn."""
    return np.array([turn.reward + shaping(turn, config) for turn in trajectory.turns], dtype=np.float64)


def lay_on_rows(trajectory: Trajectory, rewards: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Each turn's reward on the turn's last action token, 0 elsewhere: one array [T] for each row."""
    assert rewards.shape == (len(trajectory.turns),), (rewards.shape, len(trajectory.turns))
    laid = [np.zeros(len(row.ids), dtype=np.float64) for row in trajectory.rows]
    for turn, reward in enumerate(rewards):
        row, token = [(r, t) for r, of in enumerate(trajectory.rows) for t in np.flatnonzero(of.turn == turn)[-1:]][-1]
        laid[row][token] = reward
    return laid
