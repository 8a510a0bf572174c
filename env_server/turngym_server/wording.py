"""Sentences that the instructions and observations of several environments share."""

from collections.abc import Sequence

from turngym_server.environment import Limits


def listed(words: Sequence[str]) -> str:
    """`A`, `A or B`, `A, B or C`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def count(number: int, noun: str) -> str:
    """`1 turn`, `5 turns`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def limits_told(limits: Limits, separator: str) -> str:
    """What an agent must know of its limits, and how to write several actions."""
    told = f"You have {count(limits.max_turns, 'turn')} and {count(limits.max_actions, 'action')} in all"
    if limits.max_actions_per_turn > 1:
        told += f", at most {limits.max_actions_per_turn} a turn, separated by {separator}"
    if limits.wall_seconds is not None:
        told += f", and {limits.wall_seconds:g} seconds"
    return told + "."
