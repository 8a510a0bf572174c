"""Advantages, worked by hand and against formulas that sum instead of recurring."""

from dataclasses import replace

import numpy as np
import pytest

from turngym_trainer.advantage import ADVANTAGES, Episodes, whiten
from turngym_trainer.config import AdvantageConfig


def episodes(mask, rewards, turn_ends, groups, values=None, returns=None, last_values=None):
    rewards = np.array(rewards, dtype=np.float64)
    return Episodes(
        mask=np.array(mask, dtype=bool),
        rewards=rewards,
        turn_ends=np.array(turn_ends, dtype=bool),
        returns=rewards.sum(axis=1) if returns is None else np.array(returns, dtype=np.float64),
        groups=np.array(groups, dtype=np.int64),
        values=None if values is None else np.array(values, dtype=np.float64),
        last_values=None if last_values is None else np.array(last_values, dtype=np.float64),
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


def test_gae_goes_on_with_the_last_value_where_a_limit_ended_the_episode():
    config = AdvantageConfig(gamma=0.5, gamma_turn=0.8, lam=0.5)
    result = ADVANTAGES["gae"].function(replace(by_hand(), last_values=np.array([10.0, 0.0])), config)
    # Episode 0. m=3: δ = 2 + 0.8·10 − (−1) = 11. m=2: −1.5 + 0.25·11 = 1.25. m=1: 1.3 + 0.4·1.25 = 1.8.
    np.testing.assert_allclose(result.advantages, [[1.8, 1.25, 11.0], [-1.25, -5.0, 0.0]], atol=1e-15)


def test_bi_level_gae_by_hand():
    # Episode 0: turns of 1 and 2 tokens; episode 1: one turn of 2 tokens, and a penalty on its first.
    of = replace(by_hand(), rewards=np.array([[1.0, 0.0, 2.0], [-0.5, -1.0, 0.0]]))
    config = AdvantageConfig(kind="bi_level_gae", gamma=0.5, gamma_turn=0.8, lam=0.5)
    result = ADVANTAGES["bi_level_gae"].function(of, config)
    # Episode 0. Turns: A(e_2) = 2 − (−1) = 3; A(e_1) = 1 + 0.8·(−1) − 0.5 + 0.8·0.5·3 = 0.9.
    # Tokens of turn 2: G = 3 − 1 = 2 at e_2, A = 3; before it δ = 0 + 0.5·(−1) − 1 = −1.5, A = −1.5 + 0.25·3 = −0.75.
    # Episode 1. A(e_1) = −1 − 4 = −5; before it δ = −0.5 + 0.5·4 − 2 = −0.5, A = −0.5 + 0.25·(−5) = −1.75.
    np.testing.assert_allclose(result.advantages, [[0.9, -0.75, 3.0], [-1.75, -5.0, 0.0]], atol=1e-15)
    np.testing.assert_allclose(result.targets, [[1.4, 0.25, 2.0], [0.25, -1.0, 0.0]], atol=1e-15)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        # γ = 0.5. Returns 3 and −1 in one group: mean 1. Episode 0: 2, 0 + 1, 1 + 0.5; episode 1: −1, −0.5.
        ("none", [[1.5, 1.0, 2.0], [-0.5, -1.0, 0.0]]),
        # Last rewards 2 − 1 and −1 − 1. Episode 0: 1, 0.5, 1.25; episode 1: −2, −1.
        ("group", [[1.25, 0.5, 1.0], [-1.0, -2.0, 0.0]]),
    ],
)
def test_reinforce_pp_by_hand(baseline, expected):
    of = replace(by_hand(), groups=np.array([3, 3]), values=None)
    result = ADVANTAGES["reinforce_pp"].function(of, AdvantageConfig(gamma=0.5, baseline=baseline))
    np.testing.assert_allclose(result.advantages, expected, atol=1e-15)
    assert result.targets is None


def random_episodes(rng, B, M, G=3):
    """Ragged episodes with a reward for each turn, penalties on tokens, and limits that ended every other one."""
    lengths = rng.integers(1, M + 1, size=B)
    lengths[0] = M
    mask = np.arange(M) < lengths[:, None]
    turn_ends = (rng.random((B, M)) < 0.3) & mask
    turn_ends[np.arange(B), lengths - 1] = True
    rewards = np.where(turn_ends, rng.normal(size=(B, M)), 0.0)
    return episodes(
        mask,
        rewards + np.where(mask, 0.1 * rng.normal(size=(B, M)), 0.0),
        turn_ends,
        rng.integers(0, G, size=B),
        values=rng.normal(size=(B, M)) * 10,
        returns=rewards.sum(axis=1),
        last_values=np.where(np.arange(B) % 2, rng.normal(size=B) * 10, 0.0),
    )


def summed_gae(rewards, values, discounts, lam):
    """Σ_j (Π_{m≤i<j} γ_i λ)·δ_j for each m; `values` has one more entry than `rewards`: what comes after."""
    errors = [r + g * after - v for r, g, v, after in zip(rewards, discounts, values, values[1:], strict=False)]
    return [
        sum(np.prod([g * lam for g in discounts[m:j]]) * errors[j] for j in range(m, len(rewards)))
        for m in range(len(rewards))
    ]


def summed_bi_level_gae(rewards, values, ends, config):
    at_ends = [values[e] for e in ends] + [values[-1]]
    of_turns = summed_gae([rewards[e] for e in ends], at_ends, [config.gamma_turn] * len(ends), config.lam)
    advantages, start = [], 0
    for e, of_turn in zip(ends, of_turns, strict=True):
        inside = [*rewards[start:e], of_turn + values[e]]
        steps = [config.gamma] * len(inside)
        advantages += summed_gae(inside, [*values[start : e + 1], 0.0], steps, config.lam)
        start = e + 1
    return advantages


def expected_advantages(kind, of, config):
    """Every estimator written out: explicit sums, one episode at a time."""
    B, M = of.mask.shape
    result = np.zeros((B, M))
    for b in range(B):
        length = int(of.mask[b].sum())
        r, v = of.rewards[b, :length].tolist(), [*of.values[b, :length].tolist(), of.last_values[b]]
        ends = np.flatnonzero(of.turn_ends[b]).tolist()
        members = [of.returns[o] for o in range(B) if of.groups[o] == of.groups[b]]
        N, mean = len(members), sum(members) / len(members)
        if kind == "gae":
            steps = [config.gamma_turn if m in ends else config.gamma for m in range(length)]
            result[b, :length] = summed_gae(r, v, steps, config.lam)
        elif kind == "bi_level_gae":
            result[b, :length] = summed_bi_level_gae(r, v, ends, config)
        elif kind == "reinforce_pp":
            if config.baseline == "group":
                r[-1] -= mean
            result[b, :length] = [sum(config.gamma ** (j - m) * r[j] for j in range(m, length)) for m in range(length)]
        elif kind == "rloo":
            result[b, :length] = of.returns[b] - (sum(members) - of.returns[b]) / (N - 1) if N > 1 else 0.0
        elif kind == "dr_grpo":
            result[b, :length] = of.returns[b] - mean
        elif kind == "grpo":
            std = (sum((x - mean) ** 2 for x in members) / (N - 1)) ** 0.5 if N > 1 else 1.0
            result[b, :length] = (of.returns[b] - mean) / (std + 1e-6)
    return result


@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("kind", ADVANTAGES)
def test_estimators_are_the_sums_they_stand_for(kind, baseline):
    estimator = ADVANTAGES[kind]
    config = AdvantageConfig(kind=kind, gamma=0.97, gamma_turn=0.9, lam=0.8, baseline=baseline)
    for seed, (B, M, G) in enumerate([(5, 11, 3), (9, 4, 2), (3, 7, 1), (1, 6, 1), (8, 1, 4)]):
        of = random_episodes(np.random.default_rng(seed), B, M, G)
        found = estimator.function(of, config)
        expected = expected_advantages(kind, of, config)
        np.testing.assert_allclose(found.advantages, expected, atol=1e-5)
        assert (found.advantages[~of.mask] == 0).all()
        assert (found.targets is not None) == estimator.needs_critic
        if found.targets is not None:
            np.testing.assert_allclose(found.targets, np.where(of.mask, expected + of.values, 0.0), atol=1e-5)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_flags_say_what_an_estimator_reads(kind):
    """Other token rewards, or values, change what comes out just where the flags say so."""
    estimator, config = ADVANTAGES[kind], AdvantageConfig(kind=kind)
    of = random_episodes(np.random.default_rng(7), B=6, M=5)
    before = estimator.function(of, config).advantages
    penalised = replace(of, rewards=of.rewards - 0.3 * of.mask)
    assert (estimator.function(penalised, config).advantages != before).any() == estimator.reads_token_rewards
    if not estimator.needs_critic:
        np.testing.assert_array_equal(estimator.function(replace(of, values=None), config).advantages, before)
    constant = replace(of, returns=np.full(6, 0.1))
    assert (estimator.function(constant, config).advantages == 0).all() == estimator.compares_members


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_no_estimator_is_given_a_reward_on_an_observation(kind):
    """It would be in no return: what they read cannot be made with one."""
    of = random_episodes(np.random.default_rng(3), B=4, M=6)
    with pytest.raises(ValueError, match="no action token"):
        ADVANTAGES[kind].function(replace(of, rewards=of.rewards + ~of.mask), AdvantageConfig(kind=kind))


def test_gae_without_discount_targets_the_return_to_go():
    of = replace(random_episodes(np.random.default_rng(1), B=4, M=7), last_values=None)
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


@pytest.mark.parametrize(("kind", "factor"), [("dr_grpo", 1.0), ("rloo", 1.5)])
def test_differences_from_the_mean_by_hand(kind, factor):
    # Group 4: returns 0, 3, 6: mean 3, and N/(N−1) = 3/2 (without 0 the others' mean is 4.5). Group 1: constant.
    of = episodes(
        mask=[[1, 1], [1, 0], [1, 1], [1, 0], [1, 0]],
        rewards=np.zeros((5, 2)),
        turn_ends=np.zeros((5, 2)),
        groups=[4, 1, 4, 4, 1],
        returns=[0.0, 5.0, 3.0, 6.0, 5.0],
    )
    result = ADVANTAGES[kind].function(of, AdvantageConfig(kind=kind))
    a = 3 * factor
    np.testing.assert_allclose(result.advantages, [[-a, -a], [0, 0], [0, 0], [a, 0], [0, 0]], atol=1e-15)


@pytest.mark.parametrize("kind", [kind for kind, of in ADVANTAGES.items() if of.compares_members])
def test_constant_group_gives_exactly_nothing(kind):
    # The mean of three times 0.1 is not 0.1 in floating point.
    of = episodes(np.ones((3, 1)), np.zeros((3, 1)), np.ones((3, 1)), [0, 0, 0], returns=[0.1, 0.1, 0.1])
    assert (ADVANTAGES[kind].function(of, AdvantageConfig(kind=kind)).advantages == 0).all()


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
