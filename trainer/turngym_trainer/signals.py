"""Signals by which a collapse is seen coming: what an iteration's episodes look like, in numbers.

Source: RAGEN's echo trap (arXiv 2504.20073, section 4.3) and RAGEN-2's template collapse (arXiv 2604.06268). Only
measures; decides nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from turngym_trainer.batch import Batch
from turngym_trainer.filter import Spreads
from turngym_trainer.trajectory import Trajectory

SMOOTHING = 0.9
SMOOTHED = (
    "train/reward",
    "train/success",
    "train/group_std",
    "train/valid_format",
    "update/entropy",
    "update/gradient_norm",
)
"""Signals that are also logged as moving averages."""


def episode_signals(
    trajectories: Sequence[Trajectory], rewards: NDArray[np.float64], spread: Spreads
) -> dict[str, float]:
    """How the policy fared and wrote. `rewards` are the episodes' returns with shaping, [B]."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    known = [trajectory.success for trajectory in trajectories if trajectory.success is not None]
    return {
        "train/reward": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/environment_return": float(np.mean([trajectory.environment_return for trajectory in trajectories])),
        **({"train/success": float(np.mean(known))} if known else {}),
        "train/truncated": float(np.mean([trajectory.truncated for trajectory in trajectories])),
        "train/turns": len(turns) / len(trajectories),
        "train/actions": sum(turn.actions_executed for turn in turns) / len(trajectories),
        "train/valid_format": float(np.mean([turn.valid_format for turn in turns])),
        "train/valid_action": float(np.mean([turn.valid_action for turn in turns])),
        "train/reasoning_words": float(np.mean([len(turn.reasoning.split()) for turn in turns])),
        "train/group_std": float(spread.std.mean()),
        "train/constant_groups": float(spread.constant.mean()),
        "train/groups": float(len(spread.groups)),
        "train/episodes": float(len(trajectories)),
    }


def signals_by_environment(
    trajectories: Sequence[Trajectory], rewards: NDArray[np.float64], spread: Spreads
) -> dict[str, float]:
    """`episode_signals` of each environment's episodes alone, as `train/NAME/…`."""
    signals: dict[str, float] = {}
    for name in sorted(set(spread.environments)):
        inside = np.array([trajectory.environment == name for trajectory in trajectories])
        groups = np.array([environment == name for environment in spread.environments])
        own = Spreads(spread.groups[groups], spread.std[groups], spread.constant[groups], (name,) * int(groups.sum()))
        told = episode_signals([each for each in trajectories if each.environment == name], rewards[inside], own)
        signals.update({f"train/{name}/{key.removeprefix('train/')}": value for key, value in told.items()})
    return signals


def token_signals(batch: Batch, groups: NDArray[np.int64]) -> dict[str, float]:
    """How long and how varied answers are. `groups` is each episode's group, [B].

    distinct-3 is the share of different 3-grams among all 3-grams of tokens within a turn: pooled over all prompts,
    and over each group's first turns, where its members answer the same prompt, averaged over groups.
    """
    ids = np.concatenate([row.ids[row.is_action] for row in batch.rows])
    episodes = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    signals = {
        "train/tokens": float(len(ids)),
        "train/response_tokens": len(ids) / float(batch.turn_ends.sum()),
    }
    place = batch.turns + episodes * (int(batch.turns.max()) + 1)
    whole = place[2:] == place[:-2]
    base = int(ids.max()) + 1
    grams = ((ids[:-2] * base + ids[1:-1]) * base + ids[2:])[whole]
    if len(grams) == 0:
        return signals
    first = batch.turns[2:][whole] == 0
    of_group = groups[episodes[2:][whole]]
    within = [distinct(grams[first & (of_group == group)]) for group in np.unique(of_group[first])]
    return {
        **signals,
        "train/distinct_3_across": distinct(grams),
        **({"train/distinct_3_within": float(np.mean(within))} if within else {}),
    }


def distinct(values: NDArray[np.int64]) -> float:
    """Share of different values among all of them."""
    return len(np.unique(values)) / len(values)


def explained_variance(values: NDArray[np.float64], targets: NDArray[np.float64]) -> float | None:
    """1 − Var(target − V)/Var(target): 1 is a perfect critic, 0 one that says the mean; None: targets do not vary."""
    variance = float(targets.var())
    return None if variance < 1e-12 else 1.0 - float((targets - values).var()) / variance


def smooth(averages: Mapping[str, float], signals: Mapping[str, float | int | None]) -> dict[str, float]:
    """Moving averages, 0.9·before + 0.1·now, after one more iteration; the first value starts one.

    A signal that is missing (no update was made) leaves its average as it was.
    """
    smoothed = dict(averages)
    for name in SMOOTHED:
        if (now := signals.get(name)) is not None and np.isfinite(now):
            smoothed[name] = SMOOTHING * smoothed[name] + (1.0 - SMOOTHING) * now if name in smoothed else float(now)
    return smoothed
