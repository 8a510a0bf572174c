"""Rewards of a user's own for what happens within an episode: `reward.process`, a function that sees finished turns.

For example whether reasoning names what then is done. The function is called once for every turn that training plays,
before groups are filtered, and never in validations. Where it is a function of the turn alone, resumed runs are exact.
"""

import importlib
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace

from turngym_trainer.grade import RunError
from turngym_trainer.settings import ConfigError
from turngym_trainer.trajectory import Trajectory, TurnRecord


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """What a process reward is given.

    Attributes:
        environment: its id, or its name in the mixture.
        prompt: what the policy was shown since its last turn, as text.
        reasoning: what it wrote between `<think>` and `</think>`; empty where the answer could not be parsed.
        actions: what was sent to the environment; none where the answer could not be parsed.
        observation: what the environment replied.
        reward: the environment's, for this turn, not scaled.
    """

    environment: str
    prompt: str
    reasoning: str
    actions: tuple[str, ...]
    observation: str
    reward: float


Judge = Callable[[tuple[Trajectory, ...]], tuple[Trajectory, ...]]
"""Puts the process reward on each turn of episodes."""


def load_judge(name: str) -> Judge | None:
    """Imports the function of `reward.process`, `package.module:function`; None for an empty name.

    Raises:
        ConfigError: there is no such function.
    """
    if not name:
        return None
    module, colon, attribute = name.partition(":")
    if not module or not colon or not attribute:
        raise ConfigError(f"reward.process: expected package.module:function, got {name!r}")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise ConfigError(f"reward.process {name}: {error}; name a function of {module}") from error
    except Exception as error:  # Whatever the user's module raises as it is imported.
        raise ConfigError(
            f"reward.process {name}: {module} cannot be imported: {error!r}; it is looked for where Python imports "
            "from, so install it, or set PYTHONPATH to its folder"
        ) from error
    if not callable(function):
        raise ConfigError(f"reward.process {name}: expected a function, got {function!r}")
    return lambda trajectories: tuple(_judged(trajectory, name, function) for trajectory in trajectories)


def _judged(trajectory: Trajectory, name: str, function: Callable[[FinishedTurn], object]) -> Trajectory:
    turns = tuple(
        replace(turn, process=_asked(trajectory, number, turn, name, function))
        for number, turn in enumerate(trajectory.turns, 1)
    )
    return replace(trajectory, turns=turns)


def _asked(
    trajectory: Trajectory, number: int, turn: TurnRecord, name: str, function: Callable[[FinishedTurn], object]
) -> float:
    """The function's value for one turn.

    Raises:
        RunError: it raised, or returned no finite number.
    """
    where = (
        f"turn {number} of an episode of {trajectory.environment} (level seed {trajectory.level_seed}, noise seed "
        f"{trajectory.noise_seed})"
    )
    finished = FinishedTurn(
        trajectory.environment, turn.prompt, turn.reasoning, turn.actions, turn.observation, turn.reward
    )
    try:
        value = function(finished)
    except Exception as error:
        raise RunError(f"reward.process {name} raised {error!r} on {where}; mend it and resume") from error
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RunError(
            f"reward.process {name} returned {value!r} for {where}; expected a finite number. Mend it and resume"
        )
    return float(value)
