"""Reads an agent's answer: `<think>…</think><answer>action || action</answer>`, and says how to write one.

Knows nothing of environments, tokens or prompts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from turngym_client.types import check_type

_TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")
_ANSWER: Final = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """What an answer holds.

    Attributes:
        reasoning: the text between the think tags, stripped; "" where the format is invalid.
        actions: what to play, stripped, never empty: ("",), an invalid action, where the format is invalid.
        valid_format: see `parse_answer`.
    """

    reasoning: str
    actions: tuple[str, ...]
    valid_format: bool


INVALID: Final = ParsedAnswer(reasoning="", actions=("",), valid_format=False)


def parse_answer(text: str, separator: str = "||", max_actions: int | None = None) -> ParsedAnswer:
    """Cuts an answer into reasoning and actions.

    Valid is a text in which each of the four tags occurs exactly once, in order, with nothing but white space before,
    between and after the two parts, and at least one action. The reasoning may be empty.

    Args:
        text: the whole answer; where "<think>" was prefilled in the prompt, the caller puts it in front.
        separator: separates actions; empty parts are dropped. "": the whole answer is one action.
        max_actions: keep only the first so many; None: keep all.

    Raises:
        TypeError: text or separator is no string.
    """
    check_type("text", text, str)
    check_type("separator", separator, str)
    match = _ANSWER.fullmatch(text)
    if match is None or any(text.count(tag) != 1 for tag in _TAGS):
        return INVALID
    reasoning, answer = match.groups()
    parts = answer.split(separator) if separator else [answer]
    actions = tuple(stripped for part in parts if (stripped := part.strip()))[:max_actions]
    if not actions:
        return INVALID
    return ParsedAnswer(reasoning=reasoning.strip(), actions=actions, valid_format=True)


def answer_form(separator: str, actions_per_turn: int) -> str:
    """What an agent is told of the form that `parse_answer` reads, without a full stop.

    Args:
        separator: between the actions of a turn; "": one action a turn.
        actions_per_turn: the most that are run.
    """
    several = bool(separator) and actions_per_turn > 1
    answer = f"<answer>action {separator} action</answer>" if several else "<answer>action</answer>"
    form = f"Think first, then answer, in this form: <think>your reasoning</think>{answer}"
    if several:
        form += f" with at most {actions_per_turn} actions, separated by {separator}"
    return form
