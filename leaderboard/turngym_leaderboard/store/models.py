"""The tables of a board's database, for SQLite and PostgreSQL alike.

Seeds are text: they are unsigned numbers of 64 bits, which neither database has. What was read and written in episodes
lies in a table of its own, so that lists of episodes are short to read. A change here needs a migration beside it.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Enum,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from turngym_leaderboard.store.values import Kind, Role, State, Visibility

_CONVENTION: Final = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
"""Constraints have names, so that later migrations can name them."""


class Utc(TypeDecorator[datetime]):
    """An aware time, UTC. SQLite keeps no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _words(kind: type[StrEnum]) -> Enum:
    """A column of one of these words; further words need no migration."""
    return Enum(kind, native_enum=False, create_constraint=False, length=16, values_callable=_values)


def _values(kind: type[StrEnum]) -> list[str]:
    return [word.value for word in kind]


class Table(DeclarativeBase):
    metadata = MetaData(naming_convention=_CONVENTION)
    type_annotation_map: Mapping[Any, Any] = {
        datetime: Utc(),
        Role: _words(Role),
        Kind: _words(Kind),
        Visibility: _words(Visibility),
        State: _words(State),
        dict[str, object]: JSON(),
        dict[str, str]: JSON(),
    }


class OwnerRow(Table):
    __tablename__ = "owners"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    created: Mapped[datetime]


class TokenRow(Table):
    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(primary_key=True)
    owner_id: Mapped[int] = mapped_column(ForeignKey("owners.id"))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[Role]
    created: Mapped[datetime]
    expires: Mapped[datetime | None]
    revoked: Mapped[datetime | None]

    owner: Mapped[OwnerRow] = relationship(lazy="joined", innerjoin=True)


class BoardRow(Table):
    """A board.

    Attributes:
        closing: since when nothing more is submitted to it. closed: since when its secret is published.
        waits: why the last worker that looked at it could not play it, or "".
    """

    __tablename__ = "boards"

    id: Mapped[int] = mapped_column(primary_key=True)
    slug: Mapped[str] = mapped_column(String(130), unique=True)
    definition: Mapped[dict[str, object]]
    secret: Mapped[str] = mapped_column(String(80))
    secret_hash: Mapped[str] = mapped_column(String(64))
    created: Mapped[datetime]
    closing: Mapped[datetime | None]
    closed: Mapped[datetime | None]
    waits: Mapped[str] = mapped_column(Text, default="", server_default="")

    environments: Mapped[list["EnvironmentRow"]] = relationship(
        lazy="selectin", order_by="EnvironmentRow.position", back_populates="board"
    )


class EnvironmentRow(Table):
    """An environment of a board; `position` is its place in the definition. `limits`: as the server resolved them."""

    __tablename__ = "board_environments"
    __table_args__ = (UniqueConstraint("board_id", "label"), UniqueConstraint("board_id", "position"))

    id: Mapped[int] = mapped_column(primary_key=True)
    board_id: Mapped[int] = mapped_column(ForeignKey("boards.id"))
    position: Mapped[int]
    label: Mapped[str] = mapped_column(String(64))
    version: Mapped[str] = mapped_column(String(200))
    split_epoch: Mapped[int]
    options_json: Mapped[str] = mapped_column(Text)
    limits: Mapped[dict[str, object]]
    draws: Mapped[int]

    board: Mapped[BoardRow] = relationship(back_populates="environments")


class InstanceRow(Table):
    __tablename__ = "instances"

    environment_id: Mapped[int] = mapped_column(ForeignKey("board_environments.id"), primary_key=True)
    draw: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    showcase: Mapped[bool]
    level_seed: Mapped[str] = mapped_column(String(20))
    instance_id: Mapped[str] = mapped_column(Text)
    world_id: Mapped[str] = mapped_column(Text)
    floor: Mapped[float | None]
    ceiling: Mapped[float | None]


class SubmissionRow(Table):
    """An agent on a board.

    Attributes:
        lease_holder, lease_until: the worker that plays it; while RUNNING only.
        failures: how often a worker found that it cannot be played as it is. That a worker ended does not count.
        examined: when its examination began first; None where it did not yet.
        hidden: by the board's operator, whatever its visibility is.
    """

    __tablename__ = "submissions"
    __table_args__ = (
        Index(None, "board_id", "state"),
        Index(None, "state", "queued"),
        Index(None, "owner_id", "board_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    public_id: Mapped[str] = mapped_column(String(32), unique=True)
    board_id: Mapped[int] = mapped_column(ForeignKey("boards.id"))
    owner_id: Mapped[int | None] = mapped_column(ForeignKey("owners.id"))
    name: Mapped[str] = mapped_column(String(120))
    kind: Mapped[Kind]
    visibility: Mapped[Visibility]
    description: Mapped[dict[str, str]]
    state: Mapped[State]
    reason: Mapped[str] = mapped_column(Text, default="")
    episodes: Mapped[int] = mapped_column(default=0)
    total: Mapped[int]
    created: Mapped[datetime]
    changed: Mapped[datetime]
    queued: Mapped[datetime | None]
    started: Mapped[datetime | None]
    finished: Mapped[datetime | None]
    lease_holder: Mapped[str | None] = mapped_column(String(120))
    lease_until: Mapped[datetime | None]
    failures: Mapped[int] = mapped_column(default=0)
    examined: Mapped[datetime | None]
    hidden: Mapped[bool] = mapped_column(default=False, server_default=false())

    owner: Mapped[OwnerRow | None] = relationship(lazy="joined")


class FileRow(Table):
    __tablename__ = "files"
    __table_args__ = (CheckConstraint("received >= 0 AND received <= size", name="received"),)

    submission_id: Mapped[int] = mapped_column(ForeignKey("submissions.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    received: Mapped[int] = mapped_column(BigInteger, default=0)


class EpisodeRow(Table):
    """One attempt of a submission on an instance, which is played once: the unique constraint is what holds that."""

    __tablename__ = "episodes"
    __table_args__ = (
        ForeignKeyConstraint(["environment_id", "draw"], ["instances.environment_id", "instances.draw"]),
        UniqueConstraint("submission_id", "environment_id", "draw", "attempt"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    submission_id: Mapped[int] = mapped_column(ForeignKey("submissions.id"))
    environment_id: Mapped[int]
    draw: Mapped[int]
    attempt: Mapped[int]
    showcase: Mapped[bool]
    outcome: Mapped[str] = mapped_column(String(20))
    success: Mapped[bool | None]
    total_reward: Mapped[float]
    turns: Mapped[int]
    tokens: Mapped[int | None]
    end_reason: Mapped[str] = mapped_column(String(20))
    sealed: Mapped[bool]
    finished: Mapped[datetime]
    record: Mapped[str] = mapped_column(Text)


class TrajectoryRow(Table):
    __tablename__ = "trajectories"

    episode_id: Mapped[int] = mapped_column(ForeignKey("episodes.id"), primary_key=True)
    trajectory: Mapped[str] = mapped_column(Text)


class RemoteEpisodeRow(Table):
    """An episode of a submission that its owner's own program plays, from before it is dealt; see `store.remote`.

    Attributes:
        place: in the order in which the submission's episodes are dealt.
        dealt: None: nobody has asked for it yet.
        start: how it began; None: no server has started it yet.
        due: when the next turn must be there; None while none is waited for.
        fault: why it ended otherwise than by play, or "".
    """

    __tablename__ = "remote_episodes"
    __table_args__ = (
        ForeignKeyConstraint(["environment_id", "draw"], ["instances.environment_id", "instances.draw"]),
        UniqueConstraint("submission_id", "environment_id", "draw", "attempt"),
        Index(None, "submission_id", "place"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    public_id: Mapped[str] = mapped_column(String(32), unique=True)
    submission_id: Mapped[int] = mapped_column(ForeignKey("submissions.id"))
    environment_id: Mapped[int]
    draw: Mapped[int]
    attempt: Mapped[int]
    showcase: Mapped[bool]
    place: Mapped[int]
    dealt: Mapped[datetime | None]
    start: Mapped[str | None] = mapped_column(Text)
    due: Mapped[datetime | None] = mapped_column(index=True)
    ended: Mapped[datetime | None]
    fault: Mapped[str] = mapped_column(Text, default="")


class RemoteTurnRow(Table):
    """A turn of such an episode: what was answered, and what came of it; None: it is still to be played."""

    __tablename__ = "remote_turns"

    episode_id: Mapped[int] = mapped_column(ForeignKey("remote_episodes.id"), primary_key=True)
    turn: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    answered: Mapped[datetime]
    answer: Mapped[str] = mapped_column(Text)
    outcome: Mapped[str | None] = mapped_column(Text)


class ResultRow(Table):
    """What a submission came to in one environment: derived from episodes, and computed again whenever they change."""

    __tablename__ = "results"

    submission_id: Mapped[int] = mapped_column(ForeignKey("submissions.id"), primary_key=True)
    environment_id: Mapped[int] = mapped_column(ForeignKey("board_environments.id"), primary_key=True)
    statistics: Mapped[str | None] = mapped_column(Text)
    unavailable: Mapped[str] = mapped_column(Text, default="")
    computed: Mapped[datetime]
