"""A fifth of the tiny policy, for experiments of many trainings: two layers of width 64, 0.16 million parameters."""

from pathlib import Path
from typing import Final

from turngym_trainer.policy import Shape, drawn_policy

SMALL: Final = Shape(hidden=64, layers=2, heads=2, feed_forward=128, positions=512)
SEED: Final = 0
"""What its weights are drawn from."""


def write_small_policy(folder: Path) -> None:
    """Writes the policy to a folder that `policy.model` can name."""
    drawn_policy(SMALL, SEED).save(folder)
