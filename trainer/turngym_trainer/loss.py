"""Losses over action tokens, as sums of weighted terms.

Letters: K action tokens of a micro-batch, flat. Every mean is a sum with weights that were fixed for the whole
mini-batch (`token_weights`), so the sum over micro-batches is the mini-batch's loss whatever their size. Knows nothing
of models, rows or optimisers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from turngym_trainer.config import KlConfig, UpdateConfig

LOG_RATIO_BOUND = 20.0
SAMPLER_WEIGHT_BOUND = 2.0


def token_weights(lengths: NDArray[np.int64], aggregation: str, length_limit: int) -> NDArray[np.float64]:
    """Weight of each token of every episode of a mini-batch, [B] for episodes of `lengths` action tokens.

    `token-mean`: every token of the mini-batch weighs the same. `seq-mean`: every episode weighs the same, and within
    it every token. Both sum to 1. `length-limit`: every token weighs 1/(B·L_max), L_max the most that an episode may
    have, so that what a token weighs does not depend on how long answers are (arXiv 2503.20783).
    """
    assert lengths.ndim == 1
    assert bool(((lengths > 0) & (lengths <= length_limit)).all()), (lengths, length_limit)
    if aggregation == "token-mean":
        return np.full(len(lengths), 1.0 / lengths.sum())
    if aggregation == "length-limit":
        return np.full(len(lengths), 1.0 / (len(lengths) * length_limit))
    return 1.0 / (len(lengths) * lengths.astype(np.float64))


@dataclass(frozen=True, slots=True)
class SurrogateLoss:
    """A micro-batch's share of the policy loss, and what the clip did.

    Attributes:
        loss: −Σ w · surrogate, a scalar with a gradient.
        ratio: π/π_old, detached, [K].
        clipped_high: the upper bound took the gradient away (advantage above 0), bool [K].
        clipped_low: the lower bound did (advantage below 0), bool [K].
        clipped_dual: the dual bound did (advantage below 0), bool [K].
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_high: torch.Tensor
    clipped_low: torch.Tensor
    clipped_dual: torch.Tensor


def sequence_log_ratios(logprobs: torch.Tensor, episode_means: torch.Tensor) -> torch.Tensor:
    """Log-ratios of whole episodes, as their tokens carry them, [K] (GSPO, arXiv 2507.18071, eq. 7 and 14).

    The value is the mean of log π − log π_old over the episode's tokens, which `episode_means` holds for each of them;
    the gradient is that of the token's own log-probability. Summed over an episode whose tokens have the same
    advantage and weight that is the gradient of exp(mean log-ratio) itself, wherever micro-batches cut the episode.
    """
    assert logprobs.shape == episode_means.shape
    return episode_means + (logprobs - logprobs.detach())


def clipped_surrogate(
    log_ratios: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    config: UpdateConfig,
) -> SurrogateLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with bounds that differ and a dual clip (arXiv 1912.09729).

    s = min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)A), and where A < 0, max(s, c·A); ρ is the exponential of `log_ratios`,
    log π − log π_old or `sequence_log_ratios`, held within ±20. `weights` may hold a factor of its own for each token
    (see `sampler_weights`). All [K].
    """
    assert log_ratios.dim() == 1
    assert log_ratios.shape == advantages.shape == weights.shape
    ratio = log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    negative = advantages < 0
    surrogate = torch.where(negative, torch.maximum(surrogate, config.dual_clip * advantages), surrogate)
    ratio = ratio.detach()
    return SurrogateLoss(
        loss=-(weights * surrogate).sum(),
        ratio=ratio,
        clipped_high=(advantages > 0) & (ratio > 1.0 + config.clip_high),
        clipped_low=negative & (ratio < 1.0 - config.clip_low),
        clipped_dual=negative & (ratio > config.dual_clip),
    )


def sampler_weights(old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
    """min(π_old/π_sampler, 2), [K]: corrects for a sampler whose probabilities are not quite the trainer's."""
    log_ratio = (old_logprobs - sampler_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio.exp().clamp(max=SAMPLER_WEIGHT_BOUND)


def kl_penalty(logprobs: NDArray[np.float64], reference: NDArray[np.float64], config: KlConfig) -> NDArray[np.float64]:
    """What the reward of each action token loses to staying near the reference: −β·(log π − log π_ref), k1."""
    assert logprobs.shape == reference.shape, (logprobs.shape, reference.shape)
    return -config.coefficient * (logprobs - reference)


def kl_loss(logprobs: torch.Tensor, reference: torch.Tensor, weights: torch.Tensor, config: KlConfig) -> torch.Tensor:
    """β Σ w·k, a scalar; d = log π − log π_ref, k2 = d²/2 or k3 = e^{−d} + d − 1 (joschu.net/blog/kl-approx.html).

    k1 = d only with `allow_k1_in_loss`.

    Raises:
        ValueError: the estimator is k1, whose gradient is 0 in expectation, and it was not asked for twice.
    """
    assert logprobs.shape == reference.shape == weights.shape
    difference = (logprobs - reference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if config.estimator == "k2":
        estimate = difference.square() / 2
    elif config.estimator == "k3":
        estimate = (-difference).exp() + difference - 1.0
    elif config.allow_k1_in_loss:
        estimate = difference
    else:
        raise ValueError(f"{config.estimator} in the loss penalises nothing; use k2 or k3")
    return config.coefficient * (weights * estimate).sum()


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, clip: float
) -> torch.Tensor:
    """Σ w·max((V − target)², (V_clipped − target)²)/2, a scalar; V_clipped is V within `clip` of V_old (PPO's).

    A `clip` of 0 leaves the second term out. All in the critic's own scale.
    """
    assert values.shape == old_values.shape == targets.shape == weights.shape
    errors = (values - targets).square()
    if clip > 0.0:
        clipped = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        errors = torch.maximum(errors, (clipped - targets).square())
    return (weights * errors).sum() / 2
