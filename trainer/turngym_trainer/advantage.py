"""Advantages of action tokens. Adding an estimator is a function under `@register`.

Letters: B episodes, M most action tokens of an episode. The action tokens of an episode are laid out flat over all its
turns, [B, M], padded on the right; tokens of prompts and observations are not there, so they are in no return. All
numbers are float64. Knows nothing of models, rows or losses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym_trainer.config import AdvantageConfig
from turngym_trainer.filter import spreads

WHITENING_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class Episodes:
    """What estimators read.

    Attributes:
        mask: True where there is an action token, [B, M]; in each row True comes before False, and first is True.
        rewards: r_m, the turn's reward at its last action token, else 0, any penalty on tokens added, [B, M].
        turn_ends: True at the last action token of each turn, [B, M].
        returns: R_i, the episode's reward with shaping and without penalties on tokens, [B].
        groups: group index, [B]; members of a group played the same level.
        values: V_m, read at the position before token m, [B, M]; None without a critic.

    Raises:
        ValueError: a reward lies where there is no action token: no estimator would see it.
    """

    mask: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    turn_ends: NDArray[np.bool_]
    returns: NDArray[np.float64]
    groups: NDArray[np.int64]
    values: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        B, M = self.mask.shape
        assert self.rewards.shape == self.turn_ends.shape == (B, M), (self.rewards.shape, self.turn_ends.shape, (B, M))
        assert self.returns.shape == self.groups.shape == (B,), (self.returns.shape, self.groups.shape, B)
        assert self.values is None or self.values.shape == (B, M), self.values
        assert bool(self.mask[:, 0].all()), "an episode without action tokens"
        assert not bool((self.mask[:, 1:] & ~self.mask[:, :-1]).any()), "a hole between action tokens"
        if misplaced := np.argwhere((self.rewards != 0.0) & ~self.mask).tolist():
            raise ValueError(f"rewards where there is no action token, at (episode, token) {misplaced[:5]}")


@dataclass(frozen=True, slots=True)
class Advantages:
    """What the update learns from.

    Attributes:
        advantages: A_m, before whitening; 0 in the padding, [B, M].
        targets: what the critic should have said, A_m + V_m; 0 in the padding, [B, M]; None without a critic.
    """

    advantages: NDArray[np.float64]
    targets: NDArray[np.float64] | None = None


EstimatorFunction = Callable[[Episodes, AdvantageConfig], Advantages]


@dataclass(frozen=True, slots=True)
class Estimator:
    """A registered estimator.

    Attributes:
        needs_critic: it reads values, and rewards token by token; else only each episode's return.
        whiten: its advantages are whitened over all kept tokens before they are used.
    """

    function: EstimatorFunction
    needs_critic: bool
    whiten: bool


ADVANTAGES: dict[str, Estimator] = {}


def register(name: str, *, needs_critic: bool, whiten: bool) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Adds an estimator under the name that `advantage.kind` asks for it by."""

    def add(function: EstimatorFunction) -> EstimatorFunction:
        ADVANTAGES[name] = Estimator(function, needs_critic, whiten)
        return function

    return add


@register("gae", needs_critic=True, whiten=True)
def gae(episodes: Episodes, config: AdvantageConfig) -> Advantages:
    """Generalised advantage estimation over action tokens (arXiv 1506.02438, eq. 16).

    δ_m = r_m + γ_m V_{m+1} − V_m and A_m = δ_m + γ_m λ A_{m+1}, where γ_m is `gamma_turn` at a turn's last token and
    `gamma` elsewhere. V and A after the last token are 0: the agent is told of every limit, so a limit is an end.
    """
    assert episodes.values is not None, "gae without a critic's values"
    values = np.where(episodes.mask, episodes.values, 0.0)
    discounts = np.where(episodes.turn_ends, config.gamma_turn, config.gamma)
    advantages = np.zeros_like(values)
    next_value, next_advantage = np.zeros(len(values)), np.zeros(len(values))
    for m in reversed(range(values.shape[1])):
        # In the padding everything is 0, so an episode's last token meets 0 as its successor's value and advantage.
        delta = episodes.rewards[:, m] + discounts[:, m] * next_value - values[:, m]
        advantages[:, m] = next_advantage = delta + discounts[:, m] * config.lam * next_advantage
        next_value = values[:, m]
    return Advantages(advantages, advantages + values)


@register("grpo", needs_critic=False, whiten=False)
def grpo(episodes: Episodes, config: AdvantageConfig) -> Advantages:
    """Group-relative advantage (arXiv 2402.03300, 4.1.2): (R − mean)/(std + 1e-6) on every token of an episode.

    Mean and std (ddof 1) over the group's members; exactly 0 in a constant group.
    """
    per_episode = np.zeros_like(episodes.returns)
    of = spreads(episodes.returns, episodes.groups, ("",) * len(episodes.returns))
    for group, std, constant in zip(of.groups, of.std, of.constant, strict=True):
        if not constant:
            members = episodes.groups == group
            per_episode[members] = (episodes.returns[members] - episodes.returns[members].mean()) / (std + 1e-6)
    return Advantages(np.where(episodes.mask, per_episode[:, None], 0.0))


def whiten(advantages: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean 0 and standard deviation (ddof 0) 1 over all action tokens of the iteration; 0 in the padding.

    Left as they are when their standard deviation is under 1e-8: dividing would blow rounding up to a signal.
    """
    tokens = advantages[mask]
    std = float(tokens.std())
    if std < WHITENING_FLOOR:
        return advantages
    return np.where(mask, (advantages - tokens.mean()) / std, 0.0)
