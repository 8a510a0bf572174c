"""What plays: an agent sees conversations and answers them, many at once.

An agent never holds an episode: what it may know is handed to it, turn by turn. So it cannot look ahead, go back, or
see a seed, wherever it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from turngym_client import Advice, Transition
from turngym_leaderboard.protocol import Decoding

OVERRAN: Final = "overran"
"""The kind of fault that an `AgentOverran` tells, in the board's own words."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One conversation that begins.

    Attributes:
        instructions: what the environment tells an agent.
        action_separator: separates several actions in an agent's text; "": a turn is one action.
        max_actions_per_turn: actions of one turn that are run.
        seed: of the agent's own sampling, in [0, 2^64).
    """

    environment: str
    instructions: str
    action_separator: str
    max_actions_per_turn: int
    seed: int


@dataclass(frozen=True, slots=True)
class View:
    """What an agent is shown before a turn.

    Attributes:
        seat: index into the seats that `start` was given.
        turn: turns played before, from 0.
        transition: the last turn's outcome, or the state after the reset.
        advice: the oracle's, for an agent that wants it; None for others.
    """

    seat: int
    turn: int
    transition: Transition
    advice: Advice | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of an agent.

    Attributes:
        text: the whole answer as it was written.
        actions: what is sent to the environment.
        valid_format: the answer could be parsed.
        cut_off: the answer was longer than it might be.
        tokens: tokens sampled, those of the reasoning included; None for an agent without tokens.
        tokens_in: tokens read; None where that is not known.
        cost: US dollars; None where that is not known.
        failure: what was wrong with an answer that counts nonetheless, its kind before a colon; "": nothing.
    """

    text: str
    reasoning: str
    actions: tuple[str, ...]
    valid_format: bool = True
    cut_off: bool = False
    tokens: int | None = None
    tokens_in: int | None = None
    cost: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """An agent's failure in one conversation, which ends it. The episode counts as a failure.

    Attributes:
        reason: its kind before a colon, then what happened.
        truncated: the conversation outgrew what the agent can read.
    """

    reason: str
    truncated: bool = False


class AgentUnavailable(Exception):
    """This agent cannot be had, or cannot play this environment. The message says why and what to do."""


class AgentFault(Exception):
    """The agent failed in mid-play (out of memory, not finite, gone). The episodes it was playing count as failures."""


class AgentOverran(AgentFault):
    """It took more time or memory than it may, or brought down the process that it plays in."""


class AgentLost(Exception):
    """Somebody else ended the agent's process, which says nothing of the agent: what it was playing is played again."""


class Agent(Protocol):
    """Plays batches of conversations. Used for one batch after the other: `start`, then `act` until all have ended."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def description(self) -> dict[str, str]:
        """What it is, for the record: kind, where it came from, and what decides how it plays."""
        ...

    @property
    def samples(self) -> bool:
        """Whether the protocol's decoding matters to it."""
        ...

    @property
    def wants_legal_actions(self) -> bool: ...

    @property
    def wants_advice(self) -> bool: ...

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        """Begins a batch of conversations; those before are over."""
        ...

    def act(self, views: Sequence[View]) -> Sequence[Reply | Fault]:
        """One reply for each view, or the fault that ends its conversation, in their order.

        Every seat that goes on is shown once, in the order of the seats.

        Raises:
            AgentFault: the batch cannot be played on.
            AgentLost: it is to be played again.
            AgentUnavailable: the agent is of no use in this environment.
        """
        ...
