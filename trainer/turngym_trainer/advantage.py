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
        last_values: V_{M+1}, of what the policy would have read next where a limit ended its episode, [B]; 0 where the
            episode is over. None: every end counts as one.

    Raises:
        ValueError: a reward lies where there is no action token: no estimator would see it.
    """

    mask: NDArray[np.bool_]
    rewards: NDArray[np.float64]
    turn_ends: NDArray[np.bool_]
    returns: NDArray[np.float64]
    groups: NDArray[np.int64]
    values: NDArray[np.float64] | None = None
    last_values: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        B, M = self.mask.shape
        assert self.rewards.shape == self.turn_ends.shape == (B, M), (self.rewards.shape, self.turn_ends.shape, (B, M))
        assert self.returns.shape == self.groups.shape == (B,), (self.returns.shape, self.groups.shape, B)
        assert self.values is None or self.values.shape == (B, M), self.values
        assert self.last_values is None or self.last_values.shape == (B,), self.last_values
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
        needs_critic: it reads values.
        reads_token_rewards: it reads rewards token by token, with any penalty on tokens; else each episode's return.
        compares_members: an episode's advantage is what sets it apart from its group, so constant groups have none.
        whiten: its advantages are whitened over all kept tokens before they are used.
    """

    function: EstimatorFunction
    needs_critic: bool
    reads_token_rewards: bool
    compares_members: bool
    whiten: bool


ADVANTAGES: dict[str, Estimator] = {}


def register(
    name: str,
    *,
    needs_critic: bool = False,
    reads_token_rewards: bool = False,
    compares_members: bool = False,
    whiten: bool = False,
) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Adds an estimator under the name that `advantage.kind` asks for it by; see `Estimator` for the flags."""

    def add(function: EstimatorFunction) -> EstimatorFunction:
        ADVANTAGES[name] = Estimator(function, needs_critic, reads_token_rewards, compares_members, whiten)
        return function

    return add


@register("gae", needs_critic=True, reads_token_rewards=True, whiten=True)
def gae(episodes: Episodes, config: AdvantageConfig) -> Advantages:
    """Generalised advantage estimation over action tokens (arXiv 1506.02438, eq. 16).

    δ_m = r_m + γ_m V_{m+1} − V_m and A_m = δ_m + γ_m λ A_{m+1}, where γ_m is `gamma_turn` at a turn's last token and
    `gamma` elsewhere. A after the last token is 0, and so is V unless `last_values` says otherwise: the agent is told
    of every limit, so a limit is an end.
    """
    assert episodes.values is not None, "gae without a critic's values"
    mask, values = episodes.mask, np.where(episodes.mask, episodes.values, 0.0)
    discounts = np.where(episodes.turn_ends, config.gamma_turn, config.gamma)
    advantages = np.zeros_like(values)
    next_value, next_advantage = _last_values(episodes), np.zeros(len(values))
    for m in reversed(range(values.shape[1])):
        here = mask[:, m]
        delta = episodes.rewards[:, m] + discounts[:, m] * next_value - values[:, m]
        next_advantage = np.where(here, delta + discounts[:, m] * config.lam * next_advantage, 0.0)
        next_value = np.where(here, values[:, m], next_value)
        advantages[:, m] = next_advantage
    return Advantages(advantages, advantages + values)


@register("bi_level_gae", needs_critic=True, reads_token_rewards=True, whiten=True)
def bi_level_gae(episodes: Episodes, config: AdvantageConfig) -> Advantages:
    """GAE over turns, then over the tokens within each (VAGEN's, arXiv 2510.16907).

    e_k is the last action token of turn k. Over turns Δ_k = r(e_k) + γ_turn V(e_{k+1}) − V(e_k) and
    A(e_k) = Δ_k + γ_turn λ A(e_{k+1}), with V and A after the last turn as in `gae`. Within turn k the reward at e_k is
    G_k = A(e_k) + V(e_k), and GAE(γ, λ) runs over its tokens with nothing after e_k. A penalty on another token than a
    turn's last counts within that turn only.
    """
    assert episodes.values is not None, "bi_level_gae without a critic's values"
    mask, values = episodes.mask, np.where(episodes.mask, episodes.values, 0.0)
    advantages = np.zeros_like(values)
    end_value, end_advantage = _last_values(episodes), np.zeros(len(values))
    next_value, next_advantage = np.zeros(len(values)), np.zeros(len(values))
    for m in reversed(range(values.shape[1])):
        here, value, reward = mask[:, m], values[:, m], episodes.rewards[:, m]
        of_turn = reward + config.gamma_turn * (end_value + config.lam * end_advantage) - value
        of_token = reward + config.gamma * (next_value + config.lam * next_advantage) - value
        ends = here & episodes.turn_ends[:, m]
        advantages[:, m] = next_advantage = np.where(ends, of_turn, np.where(here, of_token, 0.0))
        next_value = value
        end_value, end_advantage = np.where(ends, value, end_value), np.where(ends, of_turn, end_advantage)
    return Advantages(advantages, advantages + values)


def _last_values(episodes: Episodes) -> NDArray[np.float64]:
    return np.zeros(len(episodes.mask)) if episodes.last_values is None else episodes.last_values


@register("reinforce_pp", reads_token_rewards=True, whiten=True)
def reinforce_pp(episodes: Episodes, config: AdvantageConfig) -> Advantages:
    """REINFORCE++ (arXiv 2501.03262): the discounted sum of the rewards to come, A_m = Σ_{j≥m} γ^{j−m} r_j.

    With `baseline=group` the mean return of the episode's group is taken off at its last token first, so that without
    discount every token has the rewards to come less the group's mean.
    """
    rewards = episodes.rewards.copy()
    if config.baseline == "group":
        last = episodes.mask.sum(axis=1) - 1
        rewards[np.arange(len(rewards)), last] -= _group_means(episodes)
    advantages = np.zeros_like(rewards)
    to_come = np.zeros(len(rewards))
    for m in reversed(range(rewards.shape[1])):
        advantages[:, m] = to_come = rewards[:, m] + config.gamma * to_come
    return Advantages(advantages)


def _group_means(episodes: Episodes) -> NDArray[np.float64]:
    """Mean return of each episode's group, [B]."""
    _, of = np.unique(episodes.groups, return_inverse=True)
    return (np.bincount(of, weights=episodes.returns) / np.bincount(of))[of]


@register("grpo", compares_members=True)
def grpo(episodes: Episodes, config: AdvantageConfig) -> Advantages:
    """Group-relative advantage (arXiv 2402.03300, 4.1.2): (R − mean)/(std + 1e-6), std with ddof 1."""
    return _compared(episodes, lambda members, std: (members - members.mean()) / (std + 1e-6))


@register("dr_grpo", compares_members=True)
def dr_grpo(episodes: Episodes, config: AdvantageConfig) -> Advantages:
    """GRPO done right (arXiv 2503.20783): R − mean; its loss divides by a length that no answer decides."""
    return _compared(episodes, lambda members, std: members - members.mean())


@register("rloo", compares_members=True)
def rloo(episodes: Episodes, config: AdvantageConfig) -> Advantages:
    """Leave one out (arXiv 2402.14740): R less the others' mean, which is N/(N−1)·(R − mean) of N members."""
    return _compared(episodes, lambda members, std: len(members) / (len(members) - 1) * (members - members.mean()))


def _compared(episodes: Episodes, advantage: Callable[[NDArray[np.float64], float], NDArray[np.float64]]) -> Advantages:
    """What `advantage` makes of a group's returns and their std, on every token; exactly 0 in constant groups."""
    per_episode = np.zeros_like(episodes.returns)
    of = spreads(episodes.returns, episodes.groups, ("",) * len(episodes.returns))
    for group, std, constant in zip(of.groups, of.std, of.constant, strict=True):
        if not constant:
            members = episodes.groups == group
            per_episode[members] = advantage(episodes.returns[members], float(std))
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
