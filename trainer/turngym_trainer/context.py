"""How a conversation becomes tokens.

A conversation is what the environment showed (as text) and what the policy wrote (as the tokens it sampled). Text is
encoded once, when it is shown; sampled tokens are kept as they are: nothing is decoded and encoded again. Knows nothing
of sampling or the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turngym_client import answer_form
from turngym_trainer.generate import Response
from turngym_trainer.policy import ANSWER_END, ChatFormat, Policy
from turngym_trainer.trajectory import Row

Instructions = Literal["environment", "short", "none"]


@dataclass(frozen=True, slots=True)
class Context:
    """What a policy gets to read.

    Attributes:
        turns: how many of the last turns, the present one included; 0: all of them. With all of them an episode is one
            row that only ever grows; else each turn is a row of its own.
        instructions: `environment`: the server's text and how to answer; `short`: how to answer; `none`: nothing, for
            a policy that has learnt its task by demonstrations.
        prefill: begins every answer. It is prompt, not action.
    """

    turns: int = 0
    instructions: Instructions = "environment"
    prefill: str = "<think>"


def system_message(style: Instructions, instructions: str, separator: str, actions_per_turn: int) -> str:
    """The message that a conversation begins with; "" for style `none`.

    Args:
        style: as in `Context`.
        instructions: the environment's.
        separator: between the actions of a turn; "": one action a turn.
        actions_per_turn: the most that are run.
    """
    if style == "none":
        return ""
    form = answer_form(separator, actions_per_turn)
    return f"{form}." if style == "short" else f"{instructions}\n\n{form}."


class Conversation:
    """One episode as the policy reads and writes it.

    Turns alternate: `show` an observation, take `prompt`, `answer` with what was sampled.
    """

    def __init__(self, policy: Policy, chat: ChatFormat, context: Context) -> None:
        self._policy = policy
        self._chat = chat
        self._context = context
        self._shown: list[str] = []
        self._first: list[NDArray[np.int64]] = []
        self._next: list[NDArray[np.int64]] = []
        self._answers: list[Response] = []

    def show(self, observation: str) -> None:
        """Begins a turn."""
        assert len(self._first) == len(self._answers), "the turn before has no answer yet"
        said = self._policy.plain(observation) + self._chat.reply + self._context.prefill
        alone = self._context.turns == 1
        opens = alone or self._context.turns > 1 or not self._first
        self._first.append(self._policy.encode(self._chat.opening + said) if opens else np.empty(0, np.int64))
        follows = bool(self._answers) and not alone
        self._next.append(self._policy.encode(self._chat.following + said) if follows else np.empty(0, np.int64))

    def prompt(self) -> NDArray[np.int64]:
        """Tokens that the present turn's answer continues."""
        return np.concatenate([ids for ids, _ in self._pieces(len(self._first) - 1)])

    def answer(self, response: Response) -> None:
        """Ends a turn."""
        self._answers.append(response)

    def rows(self) -> tuple[Row, ...]:
        """The token records of the answered turns."""
        if not self._answers:
            return ()
        last = len(self._answers) - 1
        if self._context.turns == 0:
            return (_row(self._pieces(last, answered=True), self._answers, first_turn=0),)
        return tuple(
            _row(self._pieces(turn, answered=True), self._answers, first_turn=turn)
            for turn in range(len(self._answers))
        )

    def _pieces(self, turn: int, *, answered: bool = False) -> list[tuple[NDArray[np.int64], int]]:
        """What is read in a turn, each piece with the turn whose answer it is (−1: a prompt)."""
        window = self._context.turns or turn + 1
        start = max(0, turn + 1 - window)
        pieces: list[tuple[NDArray[np.int64], int]] = [(self._first[start], -1)]
        for earlier in range(start, turn):
            ids = self._answers[earlier].ids
            pieces.append((ids, earlier))
            following = self._next[earlier + 1]
            # A policy that ended its own turn has written what the template would write again.
            repeated = len(following) > 0 and int(ids[-1]) in self._policy.eos_ids and ids[-1] == following[0]
            pieces.append((following[1:] if repeated else following, -1))
        if answered:
            pieces.append((self._answers[turn].ids, turn))
        return pieces


def _row(pieces: Sequence[tuple[NDArray[np.int64], int]], answers: Sequence[Response], *, first_turn: int) -> Row:
    """Joins pieces to a row. Answers of turns before `first_turn` are context: they were actions in a row before."""
    turns = [turn if turn >= first_turn else -1 for _, turn in pieces]
    zeros = [np.zeros(len(ids), np.float32) for ids, _ in pieces]
    turn = np.concatenate([np.full(len(ids), index, np.int64) for (ids, _), index in zip(pieces, turns, strict=True)])
    logprobs = [answers[index].logprobs if index >= 0 else zero for index, zero in zip(turns, zeros, strict=True)]
    return Row(
        ids=np.concatenate([ids for ids, _ in pieces]),
        is_action=turn >= 0,
        turn=turn,
        logprobs=np.concatenate(logprobs),
    )


def demonstration(
    policy: Policy, context: Context, explanation: str, actions: Sequence[str], separator: str
) -> Response:
    """What a policy should have written: `<think>explanation</think><answer>a || b</answer>`, less what is prefilled.

    Raises:
        ValueError: the prefilled text is no beginning of such an answer.
    """
    text = f"<think>{explanation}</think><answer>{f' {separator} '.join(actions)}{ANSWER_END}"
    if not text.startswith(context.prefill):
        raise ValueError(f"prefill {context.prefill!r} does not begin a demonstration: {text!r}")
    ids = policy.encode(text[len(context.prefill) :])
    return Response(ids, np.zeros(len(ids), np.float32), complete=True)
