"""Process rewards that tests name by `reward.process`."""

from turngym_trainer.process import FinishedTurn

RATE = 0.5
"""No function."""


def of_the_turn(turn: FinishedTurn) -> float:
    """A number that tells everything that was given."""
    assert turn.environment == "sokoban"
    assert len(turn.observation.splitlines()) >= 6
    return RATE * len(turn.actions) + 0.01 * len(turn.reasoning) + 0.001 * turn.prompt.count("#") + turn.reward


def raising(turn: FinishedTurn) -> float:
    raise KeyError(turn.environment)


def not_finite(turn: FinishedTurn) -> float:
    return float("nan")


def no_number(turn: FinishedTurn) -> str:
    return "good"
