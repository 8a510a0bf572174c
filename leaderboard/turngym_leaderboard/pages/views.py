"""What pages show: plain values, complete before a template sees them.

Knows nothing of databases, files or HTML. Texts are as agents and environments wrote them; the templates make them
harmless. Shares lie between 0 and 1, times are ISO 8601 in UTC.
"""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["solved", "failed", "unknown"]
"""Of an episode: the environment's word, or that it gave none."""


def verdict(success: bool | None) -> Verdict:
    """`success` in a word."""
    return "unknown" if success is None else "solved" if success else "failed"


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn: what the agent read, thought and did, and what it got for it.

    Attributes:
        written: the whole answer, where reasoning and actions do not tell it: it could not be parsed.
        executed: actions that were run; fewer than `actions` where the episode ended or one was invalid.
        process: reward of the trainer's own function; None: there is none.
        total: rewards so far, this turn's included.
        faults: what was wrong with the answer, in words.
    """

    observation: str
    reasoning: str
    actions: tuple[str, ...]
    written: str
    executed: int
    reward: float
    total: float
    faults: tuple[str, ...] = ()
    tokens: int | None = None
    process: float | None = None


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One episode, turn by turn.

    Attributes:
        key: what addresses it, such as `a-12`.
        agent: who played.
        environment: id; "" where it is not known.
        symbols: the environment's option of that name; "": unknown.
        ended: how it ended, in words; "" where that is not known.
        facts: what else is known of it: name and value.
        last: the observation after the last turn; None: it was not kept.
    """

    key: str
    title: str
    agent: str
    environment: str
    symbols: str
    verdict: Verdict
    ended: str
    facts: tuple[tuple[str, str], ...]
    turns: tuple[TurnView, ...]
    last: str | None

    @property
    def total(self) -> float:
        """Sum of the environment's rewards."""
        return self.turns[-1].total if self.turns else 0.0


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """One episode in a list.

    Attributes:
        number: its place in the list's source, from 1; it never changes.
        label: what else tells it from the others, such as its iteration or attempt.
        instance: the same for episodes of the same level, in whatever file; "" where it is not known.
    """

    number: int
    key: str
    agent: str
    environment: str
    label: str
    instance: str
    verdict: Verdict
    turns: int
    total: float
    faults: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Which episodes of a list are shown. Empty and None: all.

    Attributes:
        instance: of one level.
    """

    verdict: str = ""
    environment: str = ""
    agent: str = ""
    instance: str = ""
    least_turns: int | None = None
    most_turns: int | None = None

    def __bool__(self) -> bool:
        return self != EpisodeFilter()

    def lets(self, row: EpisodeRow) -> bool:
        """Whether a row is shown."""
        return (
            (not self.verdict or row.verdict == self.verdict)
            and (not self.environment or row.environment == self.environment)
            and (not self.agent or row.agent == self.agent)
            and (not self.instance or row.instance == self.instance)
            and (self.least_turns is None or row.turns >= self.least_turns)
            and (self.most_turns is None or row.turns <= self.most_turns)
        )


@dataclass(frozen=True, slots=True)
class EpisodeList:
    """A page of a list of episodes.

    Attributes:
        key: of the source.
        matching: episodes that the filter lets through, of `total`.
        solved, failed: of the matching ones.
        agents, environments: what can be filtered by; empty where there are too many to choose from.
        notices: what the reader has to know of the source.
    """

    key: str
    title: str
    rows: tuple[EpisodeRow, ...]
    filter: EpisodeFilter
    total: int
    matching: int
    solved: int
    failed: int
    agents: tuple[str, ...]
    environments: tuple[str, ...]
    page: int
    pages: int
    notices: tuple[str, ...] = field(default=())
