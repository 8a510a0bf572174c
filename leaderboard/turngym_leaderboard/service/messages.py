"""What the API and its client say to each other. Knows nothing of HTTP or of databases' tables.

Times are ISO 8601, UTC; seeds are decimal strings; hashes are SHA-256 in hexadecimal.
"""

from datetime import datetime
from typing import Annotated, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from turngym_leaderboard.intake.names import MAX_FILES
from turngym_leaderboard.lifecycle import FINAL, Kind, State, Visibility
from turngym_leaderboard.naming import checked_agent_name
from turngym_leaderboard.record import EpisodeRecord, Statistics, Trajectory

MAX_PAGE: Final = 1_000
"""Episodes that one call lists."""
MAX_FILE_BYTES: Final = 1 << 50
"""More than any board takes; what is beyond is not even told again."""


Name = Annotated[str, StringConstraints(min_length=1, max_length=120), AfterValidator(checked_agent_name)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Question(BaseModel):
    """Base of what a caller sends: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Answer(BaseModel):
    """Base of what is answered: a client overlooks keys that a newer service has."""

    model_config = ConfigDict(frozen=True, extra="ignore", from_attributes=True)


class Problem(Answer):
    """Every refusal. `detail`: a sentence that says what was wrong and what to do."""

    detail: str


class NewFile(Question):
    """A file that will be uploaded. `name`: within the checkpoint, as in `training/state.json`."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    size: int = Field(ge=1, le=MAX_FILE_BYTES)
    sha256: Sha256


class NewSubmission(Question):
    """A checkpoint that is to be scored, and the files that it consists of."""

    name: Name
    visibility: Visibility = Visibility.PRIVATE
    files: Annotated[tuple[NewFile, ...], Field(min_length=1, max_length=MAX_FILES)]


class Change(Question):
    """What an owner may change of a submission."""

    visibility: Visibility


class NewRemote(Question):
    """An agent that its owner's own program plays, through this service."""

    name: Name
    visibility: Visibility = Visibility.PRIVATE


class NewEndpoint(Question):
    """An endpoint that is to be scored; `endpoint` is what the board's operator registered it as."""

    name: Name
    visibility: Visibility = Visibility.PRIVATE
    endpoint: Annotated[str, StringConstraints(min_length=1, max_length=64)]


class Ask(Question):
    """How many episodes are played at once; those that go on are among them."""

    episodes: int = Field(default=1, ge=1, le=1_024)


class Turn(Question):
    """An agent's answer to what it read: its whole text, in the form that it was told, or its actions.

    `turn` is that of the observation. Of several actions those beyond the most that are run are left out.
    """

    turn: int = Field(ge=0, lt=1 << 31)
    text: Annotated[str, StringConstraints(max_length=65_536)] | None = None
    actions: (
        Annotated[tuple[Annotated[str, StringConstraints(max_length=1_024)], ...], Field(min_length=1, max_length=256)]
        | None
    ) = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.text is None) == (self.actions is None):
            raise ValueError("expected either text or actions")
        return self

    @property
    def written(self) -> str | tuple[str, ...]:
        """The text, or the actions."""
        return self.text if self.text is not None else self.actions or ()


class File(Answer):
    """`received`: bytes that have arrived of `size`; the next part begins there."""

    name: str
    size: int
    sha256: str
    received: int


class Environment(Answer):
    """An environment as a board has it; see `turngym_leaderboard.boards.EnvironmentDefinition`."""

    label: str
    id: str
    version: str
    split_epoch: int
    options_json: str
    split: str
    instances: int
    attempts: int
    showcase: int
    decoding: str
    max_turns: int
    max_actions: int
    max_actions_per_turn: int
    overall: bool


class Board(Answer):
    """A board. `secret_hash` is published from the first day, `secret`, which it is of, when the season has ended."""

    slug: str
    title: str
    season: str
    about: str
    sealed: bool
    submissions_per_owner: int
    remote_submissions_per_owner: int = 0
    episodes: int
    secret_hash: str
    secret: str | None
    created: datetime
    closed: datetime | None
    environments: tuple[Environment, ...]


class Submission(Answer):
    """An agent on a board. `episodes`: played so far, of `total`. `reason`: why it ended as it did, or why it waits.

    `examined_after`: where it is read by itself and waits for its examination, how many are before it.
    """

    id: str
    board: str
    name: str
    kind: Kind
    owner: str | None
    visibility: Visibility
    state: State
    reason: str
    episodes: int
    total: int
    description: dict[str, str]
    created: datetime
    queued: datetime | None
    started: datetime | None
    finished: datetime | None
    examined_after: int | None = None

    @property
    def done(self) -> bool:
        """Nothing more happens to it by itself."""
        return self.state in FINAL


class Result(Answer):
    """What a submission came to in one environment; `statistics` is null where `unavailable` says why."""

    environment: str
    statistics: Statistics | None
    unavailable: str
    computed: datetime


class Row(Answer):
    """A submission with its results."""

    submission: Submission
    results: tuple[Result, ...]


class EpisodeLine(Answer):
    """An episode in a list. `id` is what it is read by."""

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
    finished: datetime


class EpisodeList(Answer):
    """Some of a submission's episodes, from `offset` on; `total`: how many there are of those asked for."""

    total: int
    offset: int
    episodes: tuple[EpisodeLine, ...]


class Episode(Answer):
    """An episode with its seeds, actions and digest, and all that was read and written in it."""

    line: EpisodeLine
    record: EpisodeRecord
    trajectory: Trajectory


class Endpoint(Answer):
    """A model behind a server, by the name that it is submitted by. `url`: null for whoever is no admin."""

    name: str
    url: str | None
    model: str


class Exchange(Answer):
    """A turn of an episode: what was read, and what was answered."""

    observation: str
    text: str


class RemoteEpisode(Answer):
    """An episode that goes on.

    `form` says how a text has to be written. `turns` were answered before, `observation` is that of turn `turn`, whose
    answer must be there by `due`; it is null where the last answer still waits for a server.
    """

    id: str
    environment: str
    instructions: str
    form: str
    action_separator: str
    max_actions_per_turn: int
    turns: tuple[Exchange, ...]
    turn: int
    observation: str
    due: datetime | None


class Dealt(Answer):
    """The episodes that go on; `left` have not ended, these among them. None left: the submission is scored next."""

    episodes: tuple[RemoteEpisode, ...]
    left: int


class Step(Answer):
    """What an answer came to: the observation of the next turn. `fault`: why it ended otherwise than by play, or ""."""

    turn: int
    observation: str
    done: bool
    due: datetime | None
    fault: str
