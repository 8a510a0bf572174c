"""The flat numbering of action tokens, and rewards laid on it."""

import numpy as np
import pytest

from turngym_trainer.batch import lay_out
from turngym_trainer.config import RewardConfig
from turngym_trainer.reward import lay_on_rows, shaping, turn_rewards
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord


def row(turns, first=100):
    """A row whose token t has id first + t, and log-probability −t where it is an action."""
    turns = np.array(turns)
    ids = np.arange(first, first + len(turns))
    return Row(ids, turns >= 0, turns, np.where(turns >= 0, -np.arange(len(turns)), 0).astype(np.float32))


def turn(reward=0.0, valid_format=True, valid_action=True):
    return TurnRecord(
        prompt="p",
        response="r",
        reasoning="because",
        actions=("a",),
        reward=reward,
        valid_format=valid_format,
        valid_action=valid_action,
        actions_executed=1,
    )


def episode(rows, turns, group=0, member=0):
    return Trajectory(
        environment="e",
        group=group,
        member=member,
        level_seed=1,
        noise_seed=2,
        world_id="w",
        success=None,
        terminated=True,
        truncated=False,
        digest="",
        rows=tuple(rows),
        turns=tuple(turns),
    )


def two_episodes():
    """Full history: one row with two turns. Last-turn context: three rows of one turn each."""
    full = episode([row([-1, 0, 0, -1, -1, 1])], [turn(1.0), turn(2.0)])
    last = episode(
        [row([-1, 0, 0], 200), row([-1, -1, 1], 300), row([-1, 2, 2, -1], 400)], [turn(), turn(-1.0), turn(5.0)]
    )
    return full, last


def test_layout_by_hand():
    batch = lay_out(two_episodes())
    assert batch.row_episodes.tolist() == [0, 1, 1, 1]
    assert batch.row_offsets.tolist() == [0, 3, 5, 6, 8]
    assert batch.episode_offsets.tolist() == [0, 3, 8]
    assert batch.lengths.tolist() == [3, 5]
    assert batch.logprobs.tolist() == [-1, -2, -5, -1, -2, -2, -1, -2]
    assert batch.turns.tolist() == [0, 0, 1, 0, 0, 1, 2, 2]
    assert batch.turn_ends.tolist() == [False, True, True, False, True, True, False, True]
    assert batch.mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    padded = batch.padded(np.arange(1.0, 9.0))
    assert padded.tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
    np.testing.assert_array_equal(padded[batch.mask], np.arange(1.0, 9.0))
    assert batch.padded_turn_ends().tolist() == [[False, True, True, False, False], [False, True, True, False, True]]
    assert batch.rows_of(np.array([1])).tolist() == [1, 2, 3]
    assert batch.tokens_of(np.array([0])).tolist() == [True] * 3 + [False] * 5


def test_a_turns_reward_is_on_its_last_action_token():
    trajectories = two_episodes()
    batch = lay_out(trajectories)
    laid = [
        row
        for trajectory in trajectories
        for row in lay_on_rows(trajectory, turn_rewards(trajectory, RewardConfig(), 1.0))
    ]
    assert [row.tolist() for row in laid] == [[0, 0, 1, 0, 0, 2], [0, 0, 0], [0, 0, -1], [0, 0, 5, 0]]
    assert batch.gather(laid).tolist() == [0, 1, 2, 0, 0, -1, 0, 5]


@pytest.mark.parametrize("token", [0, 3], ids=["prompt", "observation after the last action"])
def test_a_reward_on_an_observation_token_raises(token):
    trajectories = two_episodes()
    laid = [np.zeros(len(row.ids)) for trajectory in trajectories for row in trajectory.rows]
    laid[3][token] = 0.5
    with pytest.raises(ValueError, match=f"row 3 of episode 1 has 0.5 on token {token}, which the policy did not"):
        lay_out(trajectories).gather(laid)


def test_a_turn_without_action_tokens_raises():
    with pytest.raises(ValueError, match=r"has 2 turns, but action tokens of turns \[0\]"):
        lay_out([episode([row([-1, 0])], [turn(), turn(1.0)])])


def test_nothing_to_lay_out_raises():
    with pytest.raises(ValueError, match="no episodes"):
        lay_out([])


@pytest.mark.parametrize(
    ("valid_format", "valid_action", "expected"),
    [(True, True, 0.0), (False, True, -0.1), (True, False, -0.1), (False, False, -0.1)],
)
def test_shaping_is_once_a_turn(valid_format, valid_action, expected):
    assert shaping(turn(valid_format=valid_format, valid_action=valid_action), RewardConfig()) == expected


def test_shaping_is_added_turn_by_turn():
    played = episode(
        [row([-1, 0, 1, 2])],
        [turn(-0.5), turn(10.0, valid_action=False), turn(0.25, valid_format=False, valid_action=False)],
    )
    np.testing.assert_allclose(turn_rewards(played, RewardConfig(invalid_turn=-0.3), 1.0), [-0.5, 9.7, -0.05])
    assert played.environment_return == 9.75
    # What the environment pays is scaled, what is added is not.
    np.testing.assert_allclose(turn_rewards(played, RewardConfig(invalid_turn=-0.3), 2.0), [-1.0, 19.7, 0.2])
