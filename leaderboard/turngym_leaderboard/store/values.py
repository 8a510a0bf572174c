"""What the store gives and takes: frozen values, of which none is tied to a database.

Times are aware and UTC. Public ids are random and may stand in addresses; numbers (`id`) are the database's own.
"""

from dataclasses import dataclass
from datetime import datetime

from turngym_leaderboard.boards import BoardDefinition, EnvironmentDefinition
from turngym_leaderboard.lifecycle import FINAL, NEXT, Kind, Role, State, Visibility
from turngym_leaderboard.protocol import Instance, Selection
from turngym_leaderboard.record import EpisodeRecord, Model, Statistics, Trajectory, TurnRecord

__all__ = [
    "FINAL",
    "NEXT",
    "Board",
    "Deal",
    "Environment",
    "Episode",
    "Kind",
    "Owner",
    "PlayedEpisode",
    "RemoteAnswer",
    "RemoteEpisode",
    "RemoteOutcome",
    "RemoteStart",
    "RemoteTurn",
    "Result",
    "Role",
    "State",
    "Submission",
    "SubmissionFile",
    "Token",
    "Visibility",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    id: int
    name: str
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A bearer token without its text, of which only the SHA-256 is kept."""

    id: int
    owner: Owner
    role: Role
    created: datetime
    expires: datetime | None
    revoked: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A board, without its secret.

    Attributes:
        slug: name and season; unique.
        secret_hash: SHA-256 in hexadecimal of the secret's decimal digits, published from the first day.
        secret: decimal digits; None until the season is closed.
        closing: since when nothing more is submitted to it; workers may still play what there is.
        waits: why no worker plays it, for everybody to read; "": nothing is known to be in the way.
    """

    id: int
    slug: str
    definition: BoardDefinition
    secret_hash: str
    secret: str | None
    created: datetime
    closing: datetime | None
    closed: datetime | None
    waits: str
    environments: tuple["Environment", ...]

    def environment(self, label: str) -> "Environment":
        """Raises KeyError."""
        for environment in self.environments:
            if environment.label == label:
                return environment
        raise KeyError(label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A board's environment as it was dealt, without its instances.

    Attributes:
        version, split_epoch, options_json: what the server said; every submission is played under just these.
    """

    id: int
    label: str
    definition: EnvironmentDefinition
    version: str
    split_epoch: int
    options_json: str


@dataclass(frozen=True, slots=True)
class Deal:
    """The instances of an environment of a board.

    Attributes:
        scored: those that count, each played as often as the definition says.
        showcase: those that anybody may see, each played once; none of their worlds is scored.
    """

    scored: Selection
    showcase: tuple[Instance, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """An agent that is scored on a board.

    Attributes:
        id: the database's. public_id: in addresses.
        owner: None: the board itself, of its scripted rows.
        description: what it is, for the record; shown to whoever may see the submission.
        reason: why it failed or is incomplete, or which faults of its own ended episodes, or "".
        episodes: played so far, of `total`.
        hidden: by the board's operator: its visibility goes for nothing.
        queued: when it was queued first; that is when it began to count against its owner's number.
    """

    id: int
    public_id: str
    board_id: int
    owner: Owner | None
    name: str
    kind: Kind
    visibility: Visibility
    description: dict[str, str]
    state: State
    reason: str
    episodes: int
    total: int
    created: datetime
    changed: datetime
    queued: datetime | None
    started: datetime | None
    finished: datetime | None
    hidden: bool

    @property
    def public(self) -> bool:
        """Everybody may see it."""
        return self.visibility is Visibility.PUBLIC and not self.hidden

    def reason_on(self, board: Board) -> str:
        """Why it stands where it does on its board: of one that is queued, why no worker plays the board."""
        return f"waits: {board.waits}" if self.state is State.QUEUED and board.waits else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionFile:
    """A file of a submission. `sha256`: hexadecimal. `received`: bytes that have arrived of `size`."""

    name: str
    size: int
    sha256: str
    received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One line of a list of episodes: what can be listed and filtered without reading the episode.

    Attributes:
        environment: the label.
        sealed: its server was given sealed seeds, which its digest tells.
    """

    id: int
    environment: str
    draw: int
    attempt: int
    showcase: bool
    outcome: str
    success: bool | None
    total_reward: float
    turns: int
    tokens: int | None
    end_reason: str
    sealed: bool
    finished: datetime


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode with all that was read and written in it."""

    line: Episode
    record: EpisodeRecord
    trajectory: Trajectory


@dataclass(frozen=True, slots=True)
class Result:
    """What a submission came to in one environment.

    Attributes:
        statistics: None where `unavailable` says why it cannot play this environment.
    """

    environment: str
    statistics: Statistics | None
    unavailable: str
    computed: datetime


class RemoteStart(Model):
    """How an episode of a remote agent began.

    Attributes:
        sealed_seed: hexadecimal, of what its server was given instead of seeds; "": seeds. The digest depends on it.
    """

    instructions: str
    action_separator: str
    max_actions_per_turn: int
    observation: str
    digest: str
    sealed_seed: str = ""


class RemoteAnswer(Model):
    """A turn as a remote agent answered it; see `turngym_leaderboard.agents.Reply`."""

    text: str
    reasoning: str
    actions: tuple[str, ...]
    valid_format: bool
    failure: str = ""


class RemoteOutcome(Model):
    """What came of such a turn, and where the episode stands after it; see `turngym_client.Transition`."""

    record: TurnRecord
    observation: str
    digest: str
    done: bool
    success: bool | None
    truncated: bool
    end_reason: str


@dataclass(frozen=True, slots=True)
class RemoteTurn:
    """A turn that was answered. `outcome`: None: it is still to be played."""

    answer: RemoteAnswer
    outcome: RemoteOutcome | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEpisode:
    """An episode that its submission's owner plays.

    Attributes:
        public_id: random, all that is told of which one it is.
        start: None: no server has started it yet.
        due: when the next turn must be there; None while none is waited for.
        fault: why it ended otherwise than by play, or "".
    """

    id: int
    public_id: str
    submission_id: int
    environment_id: int
    draw: int
    attempt: int
    showcase: bool
    start: RemoteStart | None
    due: datetime | None
    ended: datetime | None
    fault: str
    turns: tuple[RemoteTurn, ...]

    @property
    def pending(self) -> bool:
        """A turn was answered and is still to be played."""
        return self.ended is None and bool(self.turns) and self.turns[-1].outcome is None

    @property
    def played(self) -> tuple[RemoteOutcome, ...]:
        """What came of the turns that have been played."""
        return tuple(turn.outcome for turn in self.turns if turn.outcome is not None)
