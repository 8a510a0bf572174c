"""What changes as a run goes on: the turns that an episode may have, and learning rates.

ScalingInter-RL (AgentGym-RL, arXiv 2509.08755, section 4.2) begins with few turns and allows more phase by phase. A
phase ends after so many iterations, or once validation has stopped rising. Either way it is a function of the iteration
and of plain data that checkpoints hold, so that a resumed run has the phases of an undisturbed one.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from turngym_trainer.config import HorizonConfig, Schedule, UpdateConfig, WarmStartConfig

_RAMP_STEPS: Final = 50
"""Optimiser steps over which a warm start's learning rate rises."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Where a run stands among its phases, where validation ends them.

    Attributes:
        number: from 0.
        best: greatest success of a validation in this phase; None: there was none yet.
        stale: validations since then.
    """

    number: int = 0
    best: float | None = None
    stale: int = 0

    def plain(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, object]) -> "Phase":
        """What `plain` gave; empty: the first phase."""
        return cls(**plain)  # pyright: ignore[reportArgumentType]  # As it was written.


def phase_at(config: HorizonConfig, iteration: int, phase: Phase) -> int:
    """Number of the phase of an iteration (from 1).

    Args:
        phase: after the iteration before; only looked at where validation ends phases.
    """
    last = max(0, len(config.turns) - 1)
    return min(last, phase.number if config.until == "validation" else (iteration - 1) // config.iterations)


def turns_at(config: HorizonConfig, iteration: int, phase: Phase, otherwise: int) -> int:
    """Turns that an episode of an iteration may have; `otherwise` where there are no phases."""
    return config.turns[phase_at(config, iteration, phase)] if config.turns else otherwise


def after_validation(config: HorizonConfig, phase: Phase, success: float) -> Phase:
    """The phase after a validation: the next one, once `patience` validations in a row were no better than the best."""
    if phase.best is None or success > phase.best:
        return replace(phase, best=success, stale=0)
    if phase.stale + 1 < config.patience:
        return replace(phase, stale=phase.stale + 1)
    return Phase(phase.number + 1)


def rate_share(config: UpdateConfig, iteration: int, iterations: int) -> float:
    """Share of the learning rates at an iteration (from 1) of so many.

    It rises in equal steps over `warmup_iterations`, the last of which has all of it, and then follows `schedule`:
    `constant`; `linear`, as if to 0 after the last iteration; `cosine`, the same by half a cosine.
    """
    if iteration <= config.warmup_iterations:
        return iteration / config.warmup_iterations
    done = (iteration - 1 - config.warmup_iterations) / (iterations - config.warmup_iterations)
    return _left(config.schedule, done)


def warm_start_rate(config: WarmStartConfig, step: int) -> float:
    """Learning rate of a warm start's optimiser step (from 1): it rises over the first 50 while `schedule` goes on."""
    return config.learning_rate * min(1.0, step / _RAMP_STEPS) * _left(config.schedule, (step - 1) / config.max_steps)


def _left(schedule: Schedule, done: float) -> float:
    """Share of a learning rate that is left once this share of the time is over."""
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return (1.0 + math.cos(math.pi * done)) / 2
