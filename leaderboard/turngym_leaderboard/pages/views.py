"""What pages show: plain values, complete before a template sees them.

Knows nothing of databases, files or HTML. Texts are as agents and environments wrote them; the templates make them
harmless. Shares lie between 0 and 1, times are ISO 8601 in UTC.
"""

from collections.abc import Mapping
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
        by_turns: it can be filtered by turns.
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
    by_turns: bool = True


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Column:
    """An environment of a board.

    Attributes:
        floor, ceiling: success of a random and of the best possible player on the scored instances; None: unknown.
        protocol: what is played, in a line.
        overall: it counts in the overall score.
    """

    label: str
    environment: str
    floor: float | None
    ceiling: float | None
    protocol: str
    overall: bool


@dataclass(frozen=True, slots=True)
class BoardRow:
    """A submission on a board.

    Attributes:
        owner: "" for the board's own rows.
        score: normalised, over all environments that count; None where `lacking` says why.
        ranks: best and worst rank that the tests leave open; None: not ranked.
        successes: by column; None where there is none.
        price: what a solved episode takes, in the unit of `BoardView.price_unit`; None: unknown.
        notes: what a reader must know of the row, such as episodes that are not resolved.
        private: its owner and admins alone see it.
    """

    id: str
    name: str
    kind: str
    owner: str
    score: Estimate | None
    lacking: str
    ranks: tuple[int, int] | None
    successes: tuple[Estimate | None, ...]
    price: float | None
    notes: tuple[str, ...] = ()
    private: bool = False


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A submission that has no result yet. `reason`: why it failed or waits, where it does."""

    id: str
    name: str
    kind: str
    owner: str
    state: str
    reason: str
    episodes: int
    total: int
    private: bool = False


@dataclass(frozen=True, slots=True)
class OwnLine:
    """A submission of whoever looks. `board`: its slug. `reason`: why it failed or waits, where it does."""

    id: str
    board: str
    name: str
    kind: str
    state: str
    reason: str
    private: bool


@dataclass(frozen=True, slots=True)
class BoardView:
    """A board.

    Attributes:
        closed: when its season ended; "" while it lasts.
        secret: published when the season has ended; "" before.
        rows: those with results, the best score first.
        names: of rows by id, such that no two are alike.
        waiting: those without.
        detectable: the smallest true difference of scores that a comparison here finds in 80 % of cases; None: there
            is nothing to compare.
        price_unit: of a solved episode: "$" or "tokens"; "" where no row tells either.
    """

    slug: str
    title: str
    season: str
    about: str
    sealed: bool
    created: str
    closed: str
    secret_hash: str
    secret: str
    columns: tuple[Column, ...]
    rows: tuple[BoardRow, ...]
    names: Mapping[str, str]
    waiting: tuple[WaitingRow, ...]
    detectable: float | None
    price_unit: str

    @property
    def live(self) -> bool:
        """Something is being played, or waits for it."""
        return any(row.state in ("queued", "running") for row in self.waiting)


@dataclass(frozen=True, slots=True)
class BoardLine:
    """A board in a list of boards. `submissions`: that everybody may see."""

    slug: str
    title: str
    season: str
    closed: str
    environments: tuple[str, ...]
    submissions: int


@dataclass(frozen=True, slots=True)
class EnvironmentResult:
    """What a submission came to in one environment.

    Attributes:
        unavailable: why it cannot play there; then there is no number.
        figures: further numbers: what and how much.
        faults, failures: counts of episodes, and of turns, by kind, most first.
        bounds: success if all unresolved episodes had failed, or succeeded; None where all are resolved.
    """

    label: str
    environment: str
    unavailable: str
    success: Estimate | None
    score: Estimate | None
    score_missing: str
    floor: float | None
    ceiling: float | None
    instances: int
    episodes: int
    unresolved: int
    bounds: tuple[float, float] | None
    figures: tuple[tuple[str, str], ...]
    faults: tuple[tuple[str, int], ...]
    failures: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SubmissionView:
    """A submission.

    Attributes:
        facts: what it is: name and value.
        times: what happened when.
        others: ids and names of those that it can be compared with; no two of these names are alike.
        showcase: its episodes that anybody may see.
        listed: all its episodes may be looked at.
    """

    id: str
    board: str
    board_title: str
    name: str
    kind: str
    owner: str
    state: str
    reason: str
    episodes: int
    total: int
    ranks: tuple[int, int] | None
    score: Estimate | None
    facts: tuple[tuple[str, str], ...]
    times: tuple[tuple[str, str], ...]
    results: tuple[EnvironmentResult, ...]
    others: tuple[tuple[str, str], ...]
    showcase: tuple[EpisodeRow, ...]
    listed: bool
    private: bool = False

    @property
    def live(self) -> bool:
        """Something about it will change by itself."""
        return self.state in ("uploaded", "validated", "queued", "running")


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """An episode with what it belongs to: slug and title of the board, id and name of the submission."""

    board: str
    board_title: str
    submission: str
    name: str
    view: EpisodeView


Side = Literal["one", "other", "both", "neither"]
"""Who did better on an instance; both: alike, and solved; neither: not solved by either."""


@dataclass(frozen=True, slots=True)
class InstancePair:
    """What two agents came to on an instance: attempts solved, and who did better."""

    instance: int
    one: int
    other: int
    side: Side


@dataclass(frozen=True, slots=True)
class EnvironmentComparison:
    """Two agents on their common instances of one environment.

    Attributes:
        difference: success of the other less that of the one; None: they have no instance in common.
        test: what the p-value is of.
        disagreement: which to believe where test and interval disagree; "" where they do not.
        instances: all of them, in order.
    """

    label: str
    one: Estimate | None
    other: Estimate | None
    difference: Estimate | None
    p_value: float | None
    test: str
    disagreement: str
    attempts: int
    instances: tuple[InstancePair, ...]

    def count(self, side: Side) -> int:
        """Instances of a side."""
        return sum(pair.side == side for pair in self.instances)


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """Two agents of a board.

    Attributes:
        adjusted: p-value of the difference of their scores, adjusted over all pairs of the board; None: not ranked.
        showcase: pairs of episodes of the same instance, that can be seen side by side.
    """

    board: str
    board_title: str
    one: str
    other: str
    one_name: str
    other_name: str
    adjusted: float | None
    environments: tuple[EnvironmentComparison, ...]
    showcase: tuple[tuple[EpisodeRow, EpisodeRow], ...]
