"""Advantages, worked by hand and against a formula that sums instead of recurring."""

import numpy as np
import pytest

from turngym_trainer.advantage import ADVANTAGES, Episodes, whiten
from turngym_trainer.config import AdvantageConfig


def episodes(mask, rewards, turn_ends, groups, values=None, returns=None):
    rewards = np.array(rewards, dtype=np.float64)
    return Episodes(
        mask=np.array(mask, dtype=bool),
        rewards=rewards,
        turn_ends=np.array(turn_ends, dtype=bool),
        returns=rewards.sum(axis=1) if returns is None else np.array(returns, dtype=np.float64),
        groups=np.array(groups, dtype=np.int64),
        values=None if values is None else np.array(values, dtype=np.float64),
    )


def by_hand():
    """Two episodes: three tokens in turns of 1 and 2, and two tokens in one turn. What lies in the padding is noise."""
    return episodes(
        mask=[[1, 1, 1], [1, 1, 0]],
        rewards=[[1.0, 0.0, 2.0], [0.0, -1.0, 0.0]],
        turn_ends=[[1, 0, 1], [0, 1, 0]],
        groups=[0, 1],
        values=[[0.5, 1.0, -1.0], [2.0, 4.0, 99.0]],
    )


def test_gae_by_hand():
    config = AdvantageConfig(gamma=0.5, gamma_turn=0.8, lam=0.5)
    result = ADVANTAGES["gae"].function(by_hand(), config)
    # Episode 0. m=3: δ = 2 − (−1) = 3, A = 3. m=2, γ = 0.5: δ = 0 + 0.5·(−1) − 1 = −1.5, A = −1.5 + 0.25·3 = −0.75.
    # m=1 ends a turn, γ = 0.8: δ = 1 + 0.8·1 − 0.5 = 1.3, A = 1.3 + 0.8·0.5·(−0.75) = 1.0.
    # Episode 1. m=2: δ = −1 − 4 = −5, A = −5. m=1: δ = 0 + 0.5·4 − 2 = 0, A = 0 + 0.25·(−5) = −1.25.
    np.testing.assert_allclose(result.advantages, [[1.0, -0.75, 3.0], [-1.25, -5.0, 0.0]], atol=1e-15)
    np.testing.assert_allclose(result.targets, [[1.5, 0.25, 2.0], [0.75, -1.0, 0.0]], atol=1e-15)


def random_episodes(rng, B, M):
    lengths = rng.integers(1, M + 1, size=B)
    lengths[0] = M
    mask = np.arange(M) < lengths[:, None]
    turn_ends = (rng.random((B, M)) < 0.3) & mask
    turn_ends[np.arange(B), lengths - 1] = True
    rewards = np.where(turn_ends, rng.normal(size=(B, M)), 0.0)
    return episodes(mask, rewards, turn_ends, rng.integers(0, 3, size=B), values=rng.normal(size=(B, M)) * 10)


def test_gae_is_the_sum_of_discounted_errors():
    of = random_episodes(np.random.default_rng(0), B=5, M=11)
    config = AdvantageConfig(gamma=0.97, gamma_turn=0.9, lam=0.8)
    result = ADVANTAGES["gae"].function(of, config)
    for b in range(5):
        length = int(of.mask[b].sum())
        discounts = [config.gamma_turn if of.turn_ends[b, m] else config.gamma for m in range(length)]
        values = [*of.values[b, :length], 0.0]
        for m in range(length):
            expected, factor = 0.0, 1.0
            for j in range(m, length):
                expected += factor * (of.rewards[b, j] + discounts[j] * values[j + 1] - values[j])
                factor *= discounts[j] * config.lam
            assert result.advantages[b, m] == pytest.approx(expected, abs=1e-12)
        assert (result.advantages[b, length:] == 0).all()
        assert (result.targets[b, length:] == 0).all()


def test_gae_without_discount_targets_the_return_to_go():
    of = random_episodes(np.random.default_rng(1), B=4, M=7)
    result = ADVANTAGES["gae"].function(of, AdvantageConfig())
    to_go = np.cumsum(of.rewards[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(result.targets, np.where(of.mask, to_go, 0.0), atol=1e-12)


def test_grpo_by_hand():
    # Group 4: returns 0, 3, 6: mean 3, std (ddof 1) 3. Group 1: 5, 5: constant. Unequal lengths and groups.
    of = episodes(
        mask=[[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]],
        rewards=np.zeros((5, 3)),
        turn_ends=np.zeros((5, 3)),
        groups=[4, 1, 4, 4, 1],
        returns=[0.0, 5.0, 3.0, 6.0, 5.0],
    )
    result = ADVANTAGES["grpo"].function(of, AdvantageConfig(kind="grpo"))
    a = 3 / (3 + 1e-6)
    np.testing.assert_allclose(
        result.advantages, [[-a, -a, 0], [0, 0, 0], [0, 0, 0], [a, a, 0], [0, 0, 0]], rtol=1e-12, atol=1e-15
    )
    assert result.targets is None


def test_constant_group_gives_exactly_nothing():
    # The mean of three times 0.1 is not 0.1 in floating point.
    of = episodes(np.ones((3, 1)), np.zeros((3, 1)), np.ones((3, 1)), [0, 0, 0], returns=[0.1, 0.1, 0.1])
    assert (ADVANTAGES["grpo"].function(of, AdvantageConfig(kind="grpo")).advantages == 0).all()


def test_whitening_counts_action_tokens_only():
    # Tokens 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9)/4 = 5.
    mask = np.array([[True, True, False], [True, True, False]])
    whitened = whiten(np.array([[1.0, 3.0, 99.0], [5.0, 7.0, 0.0]]), mask)
    np.testing.assert_allclose(whitened, np.array([[-3, -1, 0], [1, 3, 0]]) / 5**0.5, rtol=1e-15)


def test_whitening_leaves_equal_advantages_alone():
    advantages = np.array([[2.0, 2.0 + 1e-9], [2.0, 0.0]])
    np.testing.assert_array_equal(whiten(advantages, np.array([[True, True], [True, False]])), advantages)


def test_reward_where_no_action_is_raises():
    with pytest.raises(ValueError, match=r"no action token, at \(episode, token\) \[\[1, 2\]\]"):
        episodes([[1, 1, 1], [1, 1, 0]], [[0, 0, 1], [0, 0, 1]], [[0, 0, 1], [0, 1, 0]], [0, 0])


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[0, 1, 1]]], ids=["hole", "padded on the left"])
def test_layout_is_checked(mask):
    with pytest.raises(AssertionError):
        episodes(mask, np.zeros((1, 3)), np.zeros((1, 3)), [0])
