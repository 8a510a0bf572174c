"""An agent that is somebody else's: whatever it raises is its own fault, and whatever it writes can be kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from turngym_leaderboard.agents import (
    Agent,
    AgentFault,
    AgentLost,
    AgentOverran,
    AgentUnavailable,
    Fault,
    Reply,
    Seat,
    View,
)
from turngym_leaderboard.protocol import Decoding

MOST_CHARACTERS: Final = 1 << 20
"""Of an answer: more than any agent has to say, and less than a server's request may have."""


class Guarded:
    """Wraps an agent.

    Args:
        most_characters: of an answer; a longer one ends its conversation.

    Attributes:
        overran: what an `AgentOverran` told since somebody made this empty.
    """

    def __init__(self, agent: Agent, *, most_characters: int = MOST_CHARACTERS) -> None:
        self._agent = agent
        self._most_characters = most_characters
        self._fault: AgentFault | None = None
        self.overran = ""
        self.name = agent.name
        self.description = agent.description
        self.samples = agent.samples
        self.wants_legal_actions = agent.wants_legal_actions
        self.wants_advice = agent.wants_advice

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        """Begins; what fails here is told at the first turn, when there are episodes that fail by it.

        Raises:
            AgentLost: as the agent does.
        """
        self._fault = None
        try:
            self._agent.start(seats, decoding)
        except AgentLost:
            raise
        except Exception as error:
            self._fault = self._noted(error)

    def act(self, views: Sequence[View]) -> Sequence[Reply | Fault]:
        """Raises AgentFault for everything but AgentUnavailable and AgentLost."""
        if self._fault is not None:
            raise self._fault
        try:
            return [self._kept(reply) for reply in self._agent.act(views)]
        except (AgentUnavailable, AgentLost):
            raise
        except Exception as error:
            raise self._noted(error) from error

    def _noted(self, error: Exception) -> AgentFault:
        """The same as a fault, whose text can be kept."""
        if isinstance(error, AgentOverran):
            self.overran = _utf8(str(error))
        told = str(error) if isinstance(error, AgentFault) else f"{type(error).__name__}: {error}"
        return AgentFault(_utf8(told))

    def _kept(self, answer: Reply | Fault) -> Reply | Fault:
        if isinstance(answer, Fault):
            return replace(answer, reason=_utf8(answer.reason))
        if len(answer.text) > self._most_characters:
            return Fault(f"too long: an answer of {len(answer.text)} characters; at most {self._most_characters}")
        return _writable(answer)


def _writable(answer: Reply) -> Reply:
    """Lone surrogates, which no UTF-8 can hold, are replaced."""
    return replace(
        answer,
        text=_utf8(answer.text),
        reasoning=_utf8(answer.reasoning),
        actions=tuple(map(_utf8, answer.actions)),
        failure=_utf8(answer.failure),
    )


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
