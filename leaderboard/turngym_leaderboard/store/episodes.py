"""Reads episodes and results. Whoever calls decides by `turngym_leaderboard.visibility` who may see them."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, func, select

from turngym_leaderboard.record import EpisodeRecord, Trajectory
from turngym_leaderboard.store import reading
from turngym_leaderboard.store.database import Store
from turngym_leaderboard.store.errors import NotFound
from turngym_leaderboard.store.models import EnvironmentRow, EpisodeRow, ResultRow, SubmissionRow, TrajectoryRow
from turngym_leaderboard.store.values import Board, Episode, PlayedEpisode, Result, Submission

_AT_ONCE: Final = 64
"""Episodes that are read together."""

Outcomes = dict[int, list[bool | None]]
"""Success of each attempt, by draw; None: unresolved, or not played yet by a submission that still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which episodes of a submission are listed; None: whatever it is.

    Attributes:
        environments: labels.
    """

    environments: Collection[str] | None = None
    showcase: bool | None = None
    outcome: str | None = None
    success: bool | None = None
    draw: int | None = None


def listing(
    store: Store, submission: Submission, wanted: Filter = Filter(), *, offset: int = 0, limit: int = 100
) -> tuple[list[Episode], int]:
    """Some lines of a submission's episodes, by environment, draw and attempt, and how many there are in all."""
    where = _where(submission, wanted)
    with store.reading() as session:
        total = session.scalar(
            select(func.count()).select_from(EpisodeRow).join(EnvironmentRow, _of_environment()).where(*where)
        )
        rows = session.execute(
            select(EpisodeRow, EnvironmentRow.label)
            .join(EnvironmentRow, _of_environment())
            .where(*where)
            .order_by(EnvironmentRow.position, EpisodeRow.draw, EpisodeRow.attempt)
            .offset(offset)
            .limit(limit)
        )
        return [reading.episode(row, label) for row, label in rows], total or 0


def read(store: Store, submission: Submission, episode_id: int) -> PlayedEpisode:
    """An episode of a submission with all that was read and written in it.

    Raises:
        NotFound: it has no such episode.
    """
    with store.reading() as session:
        found = session.execute(
            select(EpisodeRow, EnvironmentRow.label, TrajectoryRow.trajectory)
            .join(EnvironmentRow, _of_environment())
            .join(TrajectoryRow, TrajectoryRow.episode_id == EpisodeRow.id)
            .where(EpisodeRow.id == episode_id, EpisodeRow.submission_id == submission.id)
        ).one_or_none()
        if found is None:
            raise NotFound(f"submission {submission.public_id} has no episode {episode_id}")
        row, label, trajectory = found
        return PlayedEpisode(
            reading.episode(row, label),
            EpisodeRecord.model_validate_json(row.record),
            Trajectory.model_validate_json(trajectory),
        )


def records(store: Store, submission: Submission, environment_id: int) -> list[EpisodeRecord]:
    """The scored episodes of a submission in one environment, by draw and attempt: a row of a record."""
    with store.reading() as session:
        texts = session.scalars(
            select(EpisodeRow.record)
            .where(
                EpisodeRow.submission_id == submission.id,
                EpisodeRow.environment_id == environment_id,
                EpisodeRow.showcase.is_(False),
            )
            .order_by(EpisodeRow.draw, EpisodeRow.attempt)
        )
        return [EpisodeRecord.model_validate_json(text) for text in texts]


def whole(store: Store, submission: Submission, environment_id: int) -> Iterator[tuple[EpisodeRecord, Trajectory]]:
    """The scored episodes of a submission in one environment with all that was read and written, one after the other,
    by draw and attempt. Whether its server was given sealed seeds stands in the record.
    """
    with store.reading() as session:
        rows = session.execute(
            select(EpisodeRow.record, EpisodeRow.sealed, TrajectoryRow.trajectory)
            .join(TrajectoryRow, TrajectoryRow.episode_id == EpisodeRow.id)
            .where(
                EpisodeRow.submission_id == submission.id,
                EpisodeRow.environment_id == environment_id,
                EpisodeRow.showcase.is_(False),
            )
            .order_by(EpisodeRow.draw, EpisodeRow.attempt)
            .execution_options(yield_per=_AT_ONCE)
        )
        for record, sealed, trajectory in rows:
            read = EpisodeRecord.model_validate_json(record)
            yield read.model_copy(update={"sealed": sealed}), Trajectory.model_validate_json(trajectory)


def outcomes(store: Store, board: Board, only: Collection[int] | None = None) -> dict[int, dict[str, Outcomes]]:
    """Of a board's submissions, by their number and the environment's label: success on the scored instances.

    Args:
        only: numbers of the submissions; None: all.
    """
    where = [EnvironmentRow.board_id == board.id, EpisodeRow.showcase.is_(False)]
    if only is not None:
        where.append(EpisodeRow.submission_id.in_(only))
    found: defaultdict[int, dict[str, Outcomes]] = defaultdict(dict)
    with store.reading() as session:
        rows = session.execute(
            select(EpisodeRow.submission_id, EnvironmentRow.label, EpisodeRow.draw, EpisodeRow.success)
            .join(EnvironmentRow, _of_environment())
            .where(*where)
            .order_by(EpisodeRow.submission_id, EnvironmentRow.position, EpisodeRow.draw, EpisodeRow.attempt)
        )
        for submission_id, label, draw, success in rows:
            found[submission_id].setdefault(label, {}).setdefault(draw, []).append(success)
    return dict(found)


def results(store: Store, board: Board) -> dict[int, list[Result]]:
    """Of a board's submissions, by their number: what they came to, in the order of its environments."""
    found: defaultdict[int, list[Result]] = defaultdict(list)
    with store.reading() as session:
        rows = session.execute(
            select(ResultRow, EnvironmentRow.label)
            .join(EnvironmentRow, EnvironmentRow.id == ResultRow.environment_id)
            .join(SubmissionRow, SubmissionRow.id == ResultRow.submission_id)
            .where(SubmissionRow.board_id == board.id)
            .order_by(EnvironmentRow.position)
        )
        for row, label in rows:
            found[row.submission_id].append(reading.result(row, label))
    return dict(found)


def _of_environment() -> ColumnElement[bool]:
    return EnvironmentRow.id == EpisodeRow.environment_id


def _where(submission: Submission, wanted: Filter) -> list[ColumnElement[bool]]:
    where: list[ColumnElement[bool]] = [EpisodeRow.submission_id == submission.id]
    if wanted.environments is not None:
        where.append(EnvironmentRow.label.in_(wanted.environments))
    if wanted.showcase is not None:
        where.append(EpisodeRow.showcase.is_(wanted.showcase))
    if wanted.outcome is not None:
        where.append(EpisodeRow.outcome == wanted.outcome)
    if wanted.success is not None:
        where.append(EpisodeRow.success.is_(wanted.success))
    if wanted.draw is not None:
        where.append(EpisodeRow.draw == wanted.draw)
    return where
