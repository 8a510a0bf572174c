"""Losses, worked by hand; their gradients tell which tokens a clip silenced."""

import math

import numpy as np
import pytest
import torch

from turngym_trainer.config import KlConfig, UpdateConfig
from turngym_trainer.loss import (
    clipped_surrogate,
    kl_loss,
    kl_penalty,
    sampler_weights,
    sequence_log_ratios,
    token_weights,
    value_loss,
)

CONFIG = UpdateConfig(clip_low=0.2, clip_high=0.3, dual_clip=3.0)


def surrogate(ratios, advantages, weights=None):
    logprobs = torch.tensor([math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)
    weights = torch.ones(len(ratios), dtype=torch.float64) if weights is None else torch.tensor(weights).double()
    result = clipped_surrogate(logprobs, torch.tensor(advantages).double(), weights, CONFIG)
    result.loss.backward()
    return result, logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.2, 2.0, -2.4, -2.4, ""),
        (1.5, 2.0, -2.6, 0.0, "high"),
        (0.5, 2.0, -1.0, -1.0, ""),
        (0.9, -2.0, 1.8, 1.8, ""),
        (0.5, -2.0, 1.6, 0.0, "low"),
        (2.5, -2.0, 5.0, 5.0, ""),
        (4.0, -2.0, 6.0, 0.0, "dual"),
        (4.0, 0.0, 0.0, 0.0, ""),
    ],
)
def test_one_token_by_hand(ratio, advantage, loss, gradient, clipped):
    # The gradient of −ρA by log π is −ρA itself, and 0 where a bound holds.
    result, found = surrogate([ratio], [advantage])
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert found == [pytest.approx(gradient, abs=1e-12)]
    assert result.ratio.tolist() == [pytest.approx(ratio)]
    sides = {"high": result.clipped_high, "low": result.clipped_low, "dual": result.clipped_dual}
    assert [side for side, hit in sides.items() if hit.item()] == ([clipped] if clipped else [])


def test_tokens_are_summed_by_weight():
    result, gradient = surrogate([1.0, 1.1, 1.0], [1.0, -1.0, 4.0], weights=[0.5, 0.25, 0.0])
    assert result.loss.item() == pytest.approx(-0.5 + 0.25 * 1.1)
    assert gradient == pytest.approx([-0.5, 0.275, 0.0])


def test_log_ratio_is_bounded():
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    old = torch.tensor([-500.0, 0.0])
    result = clipped_surrogate(logprobs - old, torch.tensor([-1.0, 1.0]), torch.ones(2), CONFIG)
    torch.testing.assert_close(result.ratio, torch.tensor([math.exp(20.0), math.exp(-20.0)]))
    result.loss.backward()
    assert torch.isfinite(logprobs.grad).all()


def test_ratio_of_an_episode_by_hand():
    # Two episodes, of three tokens and one. Mean log-ratios (0.3 − 0.6 + 0.9)/3 = 0.2 and −0.5.
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0], dtype=torch.float64)
    logprobs = (old + torch.tensor([0.3, -0.6, 0.9, -0.5])).requires_grad_()
    means = torch.tensor([0.2, 0.2, 0.2, -0.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, 2.0, -1.0], dtype=torch.float64)
    weights = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2], dtype=torch.float64)
    result = clipped_surrogate(sequence_log_ratios(logprobs, means), advantages, weights, CONFIG)
    s, t = math.exp(0.2), math.exp(-0.5)
    assert result.ratio.tolist() == pytest.approx([s, s, s, t])
    # t is under 1 − 0.2, so with A < 0 the low bound holds it.
    assert result.loss.item() == pytest.approx(-(s * 2 / 2) + 0.8 / 2)
    result.loss.backward()
    # d(s·A)/d log π_m = s·A/3 for each of the three tokens, times the episode's weight 1/2.
    assert logprobs.grad.tolist() == pytest.approx([-s * 2 / 6] * 3 + [0.0])
    assert result.clipped_low.tolist() == [False, False, False, True]


def test_weights_of_tokens():
    lengths = np.array([1, 3, 6])
    np.testing.assert_allclose(token_weights(lengths, "token-mean", 8), [0.1, 0.1, 0.1])
    np.testing.assert_allclose(token_weights(lengths, "seq-mean", 8), [1 / 3, 1 / 9, 1 / 18])
    np.testing.assert_allclose(token_weights(lengths, "length-limit", 8), [1 / 24, 1 / 24, 1 / 24])
    for aggregation in ("token-mean", "seq-mean"):
        assert (token_weights(lengths, aggregation, 8) * lengths).sum() == pytest.approx(1.0)


def test_sampler_weight_is_truncated_above_only():
    # Ratios 1/4, 3/2 and 5.
    old = torch.tensor([0.25, 0.75, 1.0]).log()
    sampler = torch.tensor([1.0, 0.5, 0.2]).log()
    torch.testing.assert_close(sampler_weights(old, sampler), torch.tensor([0.25, 1.5, 2.0]))


def test_kl_by_hand():
    # d = log 2 and −log 2, weights 1/4 and 3/4, β = 2.
    logprobs = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([math.log(0.25), math.log(0.5)], dtype=torch.float64)
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    d = math.log(2)
    k2 = kl_loss(logprobs, reference, weights, KlConfig(coefficient=2.0, place="loss", estimator="k2"))
    assert k2.item() == pytest.approx(2 * d * d / 2)
    k3 = kl_loss(logprobs, reference, weights, KlConfig(coefficient=2.0, place="loss", estimator="k3"))
    assert k3.item() == pytest.approx(2 * (0.25 * (0.5 + d - 1) + 0.75 * (2 - d - 1)))
    k3.backward()
    # k3' = 1 − e^{−d}: 1/2 and −1.
    assert logprobs.grad.tolist() == pytest.approx([2 * 0.25 * 0.5, 2 * 0.75 * -1.0])
    penalty = kl_penalty(logprobs.detach().numpy(), reference.numpy(), KlConfig(coefficient=2.0))
    np.testing.assert_allclose(penalty, [-2 * d, 2 * d])


def test_k1_in_the_loss_must_be_asked_for():
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="k1"):
        kl_loss(zeros, zeros, zeros, KlConfig(coefficient=1.0, place="loss", estimator="k1"))
    config = KlConfig(coefficient=2.0, place="loss", estimator="k1", allow_k1_in_loss=True)
    loss = kl_loss(torch.tensor([0.5, -1.0]), torch.zeros(2), torch.tensor([0.25, 0.75]), config)
    assert loss.item() == pytest.approx(2 * (0.125 - 0.75))


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 3.0, 0.0], requires_grad=True)
    old = torch.full((3,), 100.0)
    loss = value_loss(values, old, torch.tensor([2.0, 0.0, 5.0]), torch.tensor([0.5, 0.25, 0.0]), clip=0.0)
    assert loss.item() == pytest.approx((0.5 * 1 + 0.25 * 9) / 2)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([-0.5, 0.75, 0.0])


def test_value_clip_by_hand():
    # Old values 0, clip 0.5. V = 1 with target 2: clipped 0.5, errors 1 and 2.25: the clipped one, without gradient.
    # V = 1 with target 0: errors 1 and 0.25: V's own. V = 0.25: within the bound, so both are the same.
    values = torch.tensor([1.0, 1.0, 0.25], requires_grad=True)
    loss = value_loss(values, torch.zeros(3), torch.tensor([2.0, 0.0, 1.25]), torch.tensor([0.5, 0.25, 1.0]), clip=0.5)
    assert loss.item() == pytest.approx((0.5 * 2.25 + 0.25 * 1 + 1.0 * 1) / 2)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, 0.25, -1.0])
