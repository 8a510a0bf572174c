"""What is kept of an evaluation: one folder with `record.json` and `trajectories.jsonl`.

A record says what made its numbers: code, package versions, protocol, server, environment, seeds, actions and digests.
Every episode in it can be played again from it. Knows nothing of how episodes are played or shown.
"""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from turngym_client import Limits, Split
from turngym_leaderboard import statistics
from turngym_leaderboard.protocol import Decoding, Instance, Protocol, Selection

SCHEMA: Final = 1
RECORD: Final = "record.json"
TRAJECTORIES: Final = "trajectories.jsonl"
_PACKAGES: Final = (
    "turngym",
    "grpcio",
    "protobuf",
    "pydantic",
    "numpy",
    "scipy",
    "torch",
    "transformers",
    "tokenizers",
)
_TOLD: Final = {
    "checkpoint": ("folder", "context", "instructions", "max_response_tokens"),
    "endpoint": ("url", "model", "context", "instructions", "max_response_tokens"),
}
"""What is shown of an agent that samples, by its kind."""

Number = TypeVar("Number", int, float)

Seed = Annotated[int, Field(ge=0, lt=1 << 64), PlainSerializer(str, when_used="json")]
"""Written as a decimal string: JSON's readers keep 53 bits of a number, and a seed has 64."""


class RecordError(ValueError):
    """A folder or file that holds no record of this schema."""


class Model(BaseModel):
    """Base of a record's parts: frozen, an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TurnRecord(Model):
    """One turn. `observation` is what the agent read before it, `text` what it wrote."""

    observation: str
    text: str
    reasoning: str
    actions: tuple[str, ...]
    actions_executed: int
    reward: float
    action_valid: bool
    valid_format: bool
    cut_off: bool
    tokens: int | None
    tokens_in: int | None = None
    cost: float | None = None
    failure: str = ""


class EpisodeRecord(Model):
    """One episode of one agent.

    Attributes:
        outcome: "played" to its end; "agent_fault" and "environment_fault" (it recurred each time that the episode was
            played again) count as failures; "unresolved" counts as neither.
        fault: what went wrong, its kind before a colon; "" where nothing did.
        success: the environment's verdict; None where unresolved.
        truncated: by a limit of the environment, or because the agent could read no more.
        actions: as sent, for each turn.
        tokens, tokens_in, cost: written, read, and US dollars, of all turns that tell it; None where none does.
        failures: turns whose answer counts but was wrong in some way, by its kind.
        digest: hexadecimal, over the whole episode as far as it came.
        sealed: the server was given sealed seeds, which the digest tells: nobody comes to it again.
    """

    draw: int
    attempt: int
    level_seed: Seed
    noise_seed: Seed
    agent_seed: Seed
    instance_id: str
    world_id: str
    outcome: Literal["played", "agent_fault", "environment_fault", "unresolved"]
    fault: str = ""
    success: bool | None
    truncated: bool
    end_reason: str
    actions: tuple[tuple[str, ...], ...]
    rewards: tuple[float, ...]
    invalid_turns: int
    unparsed_turns: int
    cut_off_turns: int
    tokens: int | None
    tokens_in: int | None = None
    cost: float | None = None
    failures: dict[str, int] = {}
    digest: str
    sealed: bool = False

    @property
    def total_reward(self) -> float:
        return sum(self.rewards)


def total(amounts: Iterable[Number | None]) -> Number | None:
    """Sum of the amounts that are known; None where none is."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known[1:], start=known[0]) if known else None


def by_kind(reasons: Iterable[str]) -> dict[str, int]:
    """How many reasons there are of each kind, which stands before a colon; "" is none."""
    return dict(sorted(Counter(reason.partition(":")[0] for reason in reasons if reason).items()))


class Trajectory(Model):
    """One line of `trajectories.jsonl`: an episode as it was read and written."""

    agent: str
    draw: int
    attempt: int
    turns: tuple[TurnRecord, ...]
    last_observation: str


class LimitsRecord(Model):
    max_turns: int
    max_actions: int
    max_actions_per_turn: int
    wall_seconds: float

    @classmethod
    def of(cls, limits: Limits) -> Self:
        return cls(
            max_turns=limits.max_turns,
            max_actions=limits.max_actions,
            max_actions_per_turn=limits.max_actions_per_turn,
            wall_seconds=limits.wall_seconds,
        )

    def limits(self) -> Limits:
        return Limits(**self.model_dump())


class ProtocolRecord(Model):
    """`turngym_leaderboard.protocol.Protocol`; limits as they were asked for."""

    environment: str
    version: str
    options: dict[str, object]
    split: str
    instances: int
    limits: LimitsRecord
    attempts: int
    temperature: float
    greedy: bool
    seed: int

    @model_validator(mode="after")
    def _is_a_protocol(self) -> Self:
        self.protocol()
        return self

    @classmethod
    def of(cls, protocol: Protocol) -> Self:
        return cls(
            environment=protocol.environment,
            version=protocol.version,
            options=dict(protocol.options),
            split=protocol.split.value,
            instances=protocol.instances,
            limits=LimitsRecord.of(protocol.limits),
            attempts=protocol.attempts,
            temperature=protocol.decoding.temperature,
            greedy=protocol.decoding.greedy,
            seed=protocol.seed,
        )

    def protocol(self) -> Protocol:
        return Protocol(
            environment=self.environment,
            version=self.version,
            options=self.options,
            split=Split(self.split),
            instances=self.instances,
            limits=self.limits.limits(),
            attempts=self.attempts,
            decoding=Decoding(self.temperature, self.greedy),
            seed=self.seed,
        )


class InstanceRecord(Model):
    """One level; floor and ceiling are None where they are not known exactly."""

    draw: int
    level_seed: Seed
    instance_id: str
    world_id: str
    floor: float | None
    ceiling: float | None

    @classmethod
    def of(cls, instance: Instance) -> Self:
        return cls(
            draw=instance.draw,
            level_seed=instance.level_seed,
            instance_id=instance.instance_id,
            world_id=instance.world_id,
            floor=instance.floor,
            ceiling=instance.ceiling,
        )

    def instance(self) -> Instance:
        return Instance(**self.model_dump())


class EnvironmentRecord(Model):
    """What the server said of the environment under the protocol's options and limits, and the levels found in it."""

    version: str
    split_epoch: int
    options_json: str
    limits: LimitsRecord
    draws: int
    instances: tuple[InstanceRecord, ...]

    @model_validator(mode="after")
    def _has_options(self) -> Self:
        if not isinstance(json.loads(self.options_json), dict):
            raise ValueError(f"options_json is {self.options_json!r}; expected a JSON object")  # noqa: TRY004 — pydantic's
        return self

    @classmethod
    def of(cls, selection: Selection) -> Self:
        return cls(
            version=selection.version,
            split_epoch=selection.split_epoch,
            options_json=selection.options_json,
            limits=LimitsRecord.of(selection.limits),
            draws=selection.draws,
            instances=tuple(map(InstanceRecord.of, selection.instances)),
        )

    def selection(self) -> Selection:
        return Selection(
            instances=tuple(instance.instance() for instance in self.instances),
            draws=self.draws,
            version=self.version,
            split_epoch=self.split_epoch,
            options_json=self.options_json,
            limits=self.limits.limits(),
        )


class Rate(Model):
    """A success rate; see `statistics.Success`."""

    rate: float
    low: float
    high: float
    effective_n: float
    method: str

    @classmethod
    def of(cls, success: statistics.Success) -> Self:
        return cls(
            rate=success.rate,
            low=success.interval.low,
            high=success.interval.high,
            effective_n=success.effective_n,
            method=success.method,
        )


class Score(Model):
    """A normalised score; see `statistics.Normalised`.

    Attributes:
        floor_source, ceiling_source: "exact" (of each instance, by the server) or "played" (by the scripted rows).
    """

    value: float
    standard_error: float
    low: float
    high: float
    floor: float
    ceiling: float
    method: str
    floor_source: Literal["exact", "played"]
    ceiling_source: Literal["exact", "played"]


class Spent(Model):
    """What episodes took together, and how many of them were solved. Tokens written and read; cost in US dollars."""

    solved: int
    turns: int
    tokens: int | None
    tokens_in: int | None
    cost: float | None

    def per_solved(self, what: Literal["turns", "tokens", "tokens_in", "cost"]) -> float | None:
        """Spent over all episodes, for each solved one; None where that is not known, or none was solved."""
        amount: float | None = getattr(self, what)
        return amount / self.solved if amount is not None and self.solved else None


class Statistics(Model):
    """What a row comes to.

    Attributes:
        success: over the resolved episodes; None where there is none.
        score: None where `score_missing` says why.
        instances: with at least one resolved episode.
        unresolved: episodes; any makes the row incomplete, more than 1 % make it unranked.
        low_bound, high_bound: success rate if all unresolved episodes had failed, or succeeded.
        score_low_bound, score_high_bound: the same of the score; None where there is none.
        turns_per_solved, tokens_per_solved: spent over all episodes, for each solved one; None where none was solved.
        spent: by all resolved episodes; None in records of turngym before it was told.
        faults: episodes that ended by the agent's fault, by its kind. failures: turns, as in `EpisodeRecord`.
        pass_at, pass_hat: by k, for an agent that samples, where there are several attempts.
    """

    success: Rate | None
    score: Score | None
    score_missing: str = ""
    instances: int
    episodes: int
    unresolved: int
    ranked: bool
    low_bound: float
    high_bound: float
    mean_return: float | None
    turns: float | None
    tokens: float | None
    turns_per_solved: float | None
    tokens_per_solved: float | None
    invalid_action_rate: float | None
    unparsed_rate: float | None
    truncation_rate: float | None
    cut_off_rate: float | None
    agent_faults: int
    environment_faults: int
    spent: Spent | None = None
    score_low_bound: float | None = None
    score_high_bound: float | None = None
    faults: dict[str, int] = {}
    failures: dict[str, int] = {}
    pass_at: dict[int, float] = {}
    pass_hat: dict[int, float] = {}


class Overall(Model):
    """What a row comes to in several environments together: the mean of its normalised scores, each counting alike.

    Attributes:
        value, standard_error, low, high: None where `missing` says why.
        ranked: it is in every environment.
        low_bound, high_bound: if all unresolved episodes had failed, or succeeded.
        spent: by all resolved episodes of all environments; None where one of them does not tell it.
    """

    value: float | None
    standard_error: float | None
    low: float | None
    high: float | None
    missing: str
    ranked: bool
    low_bound: float | None
    high_bound: float | None
    episodes: int
    unresolved: int
    spent: Spent | None


class RowRecord(Model):
    """One agent's play.

    Attributes:
        unavailable: why the agent could not play; then there are no episodes.
        decoding: how an agent that samples did so; "" for one that does not.
    """

    agent: str
    description: dict[str, str]
    decoding: str
    unavailable: str = ""
    statistics: Statistics | None
    episodes: tuple[EpisodeRecord, ...]

    @model_validator(mode="after")
    def _is_described(self) -> Self:
        told = self.description
        kind = told.get("kind", "")
        if missing := [key for key in _TOLD.get(kind, ()) if key not in told]:
            raise ValueError(f"the description of {kind} {self.agent!r} lacks {', '.join(missing)}")
        epoch = told.get("trained_split_epoch", "0")
        if not epoch.isdecimal():
            raise ValueError(f"trained_split_epoch of {self.agent!r} is {epoch!r}; expected a number")
        return self


class Comparison(Model):
    """Success of row `second` less that of row `first` on the same instances; see `statistics.Difference`.

    Attributes:
        holm_p_value: adjusted over all comparisons of the record.
    """

    first: str
    second: str
    difference: float
    low: float
    high: float
    instances: int
    p_value: float
    holm_p_value: float
    test: str


class CodeRecord(Model):
    """What made the numbers. `commit` is None outside of turngym's checkout; `modified`: it held other changes too."""

    commit: str | None
    modified: bool | None
    python: str
    platform: str
    packages: dict[str, str]


class FileRecord(Model):
    """A file as it was written: SHA-256 in hexadecimal, and bytes."""

    sha256: str
    size: int


class Record(Model):
    """An evaluation: see the module's docstring.

    Attributes:
        trajectories: the file beside it; None before `save`, and in records of turngym before it covered that file.
    """

    schema_version: Literal[1] = SCHEMA
    created: str
    code: CodeRecord
    server: tuple[str, ...]
    server_version: str
    protocol: ProtocolRecord
    environment: EnvironmentRecord
    sessions: int = Field(ge=1)
    rows: tuple[RowRecord, ...] = Field(min_length=1)
    comparisons: tuple[Comparison, ...]
    trajectories: FileRecord | None = None

    def row(self, agent: str) -> RowRecord:
        """The row of an agent's name. Raises KeyError."""
        for row in self.rows:
            if row.agent == agent:
                return row
        raise KeyError(agent)


def now() -> str:
    """The time, UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def code_record() -> CodeRecord:
    """The code that runs here."""
    # An installed copy may lie inside of somebody else's checkout.
    commit = _git("rev-parse", "HEAD") if _git("ls-files", "--error-unmatch", __file__) else None
    return CodeRecord(
        commit=commit,
        modified=bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else None,
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: version for name in _PACKAGES if (version := _installed(name))},
    )


def prepare(out: Path) -> None:
    """Makes the folder that records are written into, so that nothing is played whose record could not be kept.

    Raises:
        RecordError: it cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise RecordError(f"{out} cannot be written: {error.strerror}; name another folder with --out") from error


def save(record: Record, trajectories: Iterable[Trajectory], out: Path) -> Path:
    """Writes a record into a new folder under `out`, and returns it. The folder appears whole or not at all.

    The record that is written covers the trajectories beside it.
    """
    prepare(out)
    stamp = record.created.replace(":", "").replace("-", "")[:15]
    folder = out / f"{stamp}-{record.protocol.environment.replace(':', '_')}-{secrets.token_hex(3)}"
    aside = out / f".{folder.name}.part"
    aside.mkdir()
    written = _write(aside / TRAJECTORIES, (trajectory.model_dump_json() + "\n" for trajectory in trajectories))
    covering = record.model_copy(update={"trajectories": written})
    _write(aside / RECORD, [covering.model_dump_json(indent=1), "\n"])
    aside.rename(folder)
    return folder


def load(path: Path) -> Record:
    """Reads a record from its folder or file.

    Raises:
        RecordError: there is none, or it is of another schema.
    """
    if path.name == TRAJECTORIES:
        raise RecordError(f"{path} holds a record's trajectories; name its folder, {path.parent}, or {RECORD} in it")
    file = path / RECORD if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} holds no record: {error}") from error
    try:
        return Record.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise RecordError(f"{file} is no record of schema {SCHEMA}: {where}: {first['msg']}") from error


def load_trajectories(folder: Path) -> list[Trajectory]:
    """Reads the trajectories beside a record.

    Raises:
        RecordError: there are none, or they cannot be read.
    """
    try:
        with (folder / TRAJECTORIES).open(encoding="utf-8", newline="\n") as lines:
            return [Trajectory.model_validate_json(line) for line in lines]
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise RecordError(f"{folder} holds no trajectories: {error}") from error


def trajectories_fault(path: Path, record: Record) -> str | None:
    """What has become of the trajectories beside a record since it was saved.

    Args:
        path: the record's folder or file. record: what `load` read from it.

    Returns:
        A sentence; None: nothing, or the record does not cover them (`record.trajectories` is None).
    """
    saved = record.trajectories
    if saved is None:
        return None
    file = (path if path.is_dir() else path.parent) / TRAJECTORIES
    sha256, size = hashlib.sha256(), 0
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                sha256.update(chunk)
                size += len(chunk)
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if size < saved.size:
        return f"{file} was truncated: {size} bytes, but the record says {saved.size}"
    if sha256.hexdigest() != saved.sha256:
        return f"{file} was changed: SHA-256 {sha256.hexdigest()[:16]}…, but the record says {saved.sha256[:16]}…"
    return None


def find(folder: Path) -> Sequence[Path]:
    """Folders of records under `folder`, oldest first. `folder` may be one itself."""
    if (folder / RECORD).is_file():
        return [folder]
    return sorted(file.parent for file in folder.glob(f"*/{RECORD}"))


def _write(file: Path, parts: Iterable[str]) -> FileRecord:
    """Writes a file through to the disk."""
    sha256, size = hashlib.sha256(), 0
    with file.open("wb") as stream:
        for part in parts:
            encoded = part.encode()
            stream.write(encoded)
            sha256.update(encoded)
            size += len(encoded)
        stream.flush()
        os.fsync(stream.fileno())
    return FileRecord(sha256=sha256.hexdigest(), size=size)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git says about the checkout that this file lies in; None where there is no git or no checkout."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        # The arguments are this module's own, and git is the one on the user's path.
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
