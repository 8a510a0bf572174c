"""What workers do: claim a submission by a lease, commit its episodes, finish it.

A lease that is not extended runs out, and any worker may claim the submission then; the one that lost it is told so at
its next transaction, and nothing of that is kept. Workers' clocks must agree within a fraction of a lease.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.orm import Session

from turngym_leaderboard.record import EpisodeRecord, Statistics, Trajectory
from turngym_leaderboard.store import reading
from turngym_leaderboard.store.database import Store
from turngym_leaderboard.store.errors import LeaseLost
from turngym_leaderboard.store.models import EpisodeRow, ResultRow, SubmissionRow, TrajectoryRow
from turngym_leaderboard.store.submissions import clean
from turngym_leaderboard.store.values import Environment, Kind, State, Submission

MOST_FAILURES: Final = 3
"""So often a worker may find that a submission cannot be played as it is, before it is played no more."""

_CLAIMING_ENDPOINTS: Final = 0x7475726D
"""Of PostgreSQL's advisory locks: only one endpoint is claimed at a time."""

Key = tuple[int, int]
"""Draw and attempt: an episode of a submission in one environment."""

UNRESOLVED: Final = "unresolved"
"""The outcome of episodes that a server failed in: the only ones that are ever played again."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What a worker holds a submission by.

    Attributes:
        holder: unique to the claim's worker process.
    """

    submission: Submission
    holder: str


@dataclass(frozen=True, slots=True)
class Commit:
    """What came of a commit of episodes.

    Attributes:
        new: episodes that were not there before, or were unresolved.
        differing: (draw, attempt) of those that were there and came out otherwise; they stay as they were.
    """

    new: int
    differing: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class NewResult:
    """A row's numbers in one environment, to be kept. `statistics` is None where `unavailable` says why."""

    environment_id: int
    statistics: Statistics | None
    unavailable: str = ""


def claim(
    store: Store,
    holder: str,
    kinds: Collection[Kind],
    *,
    without: Collection[int] = (),
    now: datetime,
    until: datetime,
) -> Lease | None:
    """The next submission to play, now RUNNING and this holder's; None: there is none.

    Scripted rows come first, since other rows are measured by them, then whichever was queued first. Submissions of one
    endpoint are played one after the other, so that its limits hold.

    Args:
        without: numbers of boards whose submissions are left to others.
    """
    with store.writing() as session:
        busy = _of_busy_endpoints(session) if Kind.ENDPOINT in kinds else []
        row = session.scalar(_claimable(kinds, without, busy, now))
        if row is None:
            return None
        row.state, row.changed, row.lease_holder, row.lease_until = State.RUNNING, now, holder, until
        row.started = row.started or now
        session.flush()
        return Lease(reading.submission(row), holder)


def extend(store: Store, lease: Lease, *, until: datetime) -> None:
    """Holds a submission for longer. Raises LeaseLost."""
    with store.writing() as session:
        _held(session, lease).lease_until = until


def release(store: Store, lease: Lease, *, now: datetime) -> None:
    """Puts a submission back into the queue, where it keeps its place and its episodes. Raises LeaseLost."""
    with store.writing() as session:
        row = _held(session, lease)
        row.state, row.changed, row.lease_holder, row.lease_until = State.QUEUED, now, None, None


def count_failure(store: Store, lease: Lease) -> int:
    """Notes that a submission cannot be played as it is; returns how often that was found. Raises LeaseLost."""
    with store.writing() as session:
        row = _held(session, lease)
        row.failures += 1
        return row.failures


def commit(
    store: Store,
    lease: Lease,
    environment: Environment,
    played: Sequence[tuple[EpisodeRecord, Trajectory]],
    *,
    showcase: bool,
    sealed: bool,
    now: datetime,
) -> Commit:
    """Keeps finished episodes. One that is there already stays as it is, unless it was unresolved.

    Raises:
        LeaseLost: nothing is kept.
    """
    new, differing = 0, list[Key]()
    with store.writing() as session:
        submission = _held(session, lease)
        there = _there(session, submission.id, environment.id, {record.draw for record, _ in played})
        for record, trajectory in played:
            known = there.get((record.draw, record.attempt))
            if known is not None and known.outcome != UNRESOLVED:
                if record.outcome != UNRESOLVED and _differ(known, record):
                    differing.append((record.draw, record.attempt))
                continue
            row = known or EpisodeRow(
                submission_id=submission.id,
                environment_id=environment.id,
                draw=record.draw,
                attempt=record.attempt,
                showcase=showcase,
            )
            keep_episode(session, row, record, trajectory, sealed=sealed, now=now)
            new += record.outcome != UNRESOLVED
        if new:
            submission.episodes += new
    return Commit(new, tuple(differing))


def describe(store: Store, lease: Lease, description: Mapping[str, str]) -> None:
    """Adds what was found of an agent when it was loaded to what its owner told of it. Raises LeaseLost."""
    with store.writing() as session:
        row = _held(session, lease)
        row.description = {**row.description, **{key: clean(value) for key, value in description.items()}}


def finish(
    store: Store, lease: Lease, state: State, *, results: Sequence[NewResult], reason: str = "", now: datetime
) -> None:
    """Ends a submission's play as SCORED, INCOMPLETE or FAILED, with its numbers. Raises LeaseLost."""
    with store.writing() as session:
        row = _held(session, lease)
        row.state, row.reason, row.changed, row.finished = state, clean(reason), now, now
        row.lease_holder = row.lease_until = None
        _keep(session, row.id, results, now)


def keep_results(store: Store, submission_id: int, results: Sequence[NewResult], *, now: datetime) -> None:
    """Replaces the numbers of a submission that is not played: what it is measured by has changed."""
    with store.writing() as session:
        _keep(session, submission_id, results, now)


def done(store: Store, submission_id: int, environment_id: int) -> dict[Key, str]:
    """The outcome of each (draw, attempt) that has been played, unresolved ones included."""
    with store.reading() as session:
        rows = session.execute(
            select(EpisodeRow.draw, EpisodeRow.attempt, EpisodeRow.outcome).where(
                EpisodeRow.submission_id == submission_id, EpisodeRow.environment_id == environment_id
            )
        )
        return {(draw, attempt): outcome for draw, attempt, outcome in rows}


def unfinished(store: Store, kinds: Collection[Kind], *, without: Collection[int] = ()) -> int:
    """Submissions of these kinds that are queued, or that a worker holds, on all boards but those."""
    held = and_(SubmissionRow.state == State.RUNNING, SubmissionRow.lease_until.is_not(None))
    with store.reading() as session:
        waiting = select(func.count()).where(
            or_(SubmissionRow.state == State.QUEUED, held),
            SubmissionRow.kind.in_(kinds),
            SubmissionRow.board_id.not_in(without),
        )
        return session.scalar(waiting) or 0


def _of_busy_endpoints(session: Session) -> list[int]:
    """Numbers of submissions that wait until another one of their endpoint has been played."""
    if session.connection().dialect.name == "postgresql":  # A transaction of SQLite's that writes is alone anyway.
        session.execute(select(func.pg_advisory_xact_lock(_CLAIMING_ENDPOINTS)))
    rows = session.execute(
        select(SubmissionRow.id, SubmissionRow.state, SubmissionRow.description).where(
            SubmissionRow.kind == Kind.ENDPOINT, SubmissionRow.state.in_((State.QUEUED, State.RUNNING))
        )
    ).all()
    busy = {description.get("endpoint") for _, state, description in rows if state is State.RUNNING}
    waiting = [(number, description) for number, state, description in rows if state is State.QUEUED]
    return [number for number, description in waiting if description.get("endpoint") in busy]


def _claimable(
    kinds: Collection[Kind], without: Collection[int], busy: Collection[int], now: datetime
) -> Select[SubmissionRow]:
    abandoned = and_(SubmissionRow.state == State.RUNNING, SubmissionRow.lease_until <= now)
    return (
        select(SubmissionRow)
        .where(
            or_(SubmissionRow.state == State.QUEUED, abandoned),
            SubmissionRow.kind.in_(kinds),
            SubmissionRow.board_id.not_in(without),
            SubmissionRow.id.not_in(busy),
        )
        .order_by((SubmissionRow.kind != Kind.SCRIPTED), SubmissionRow.queued, SubmissionRow.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=SubmissionRow)
    )


def _held(session: Session, lease: Lease) -> SubmissionRow:
    row = session.scalar(
        select(SubmissionRow)
        .where(
            SubmissionRow.id == lease.submission.id,
            SubmissionRow.state == State.RUNNING,
            SubmissionRow.lease_holder == lease.holder,
        )
        .with_for_update(of=SubmissionRow)
    )
    if row is None:
        raise LeaseLost(f"submission {lease.submission.public_id} is no longer this worker's")
    return row


def _there(session: Session, submission_id: int, environment_id: int, draws: Collection[int]) -> dict[Key, EpisodeRow]:
    rows = session.scalars(
        select(EpisodeRow).where(
            EpisodeRow.submission_id == submission_id,
            EpisodeRow.environment_id == environment_id,
            EpisodeRow.draw.in_(draws),
        )
    )
    return {(row.draw, row.attempt): row for row in rows}


def _differ(known: EpisodeRow, record: EpisodeRecord) -> bool:
    kept = EpisodeRecord.model_validate_json(known.record)
    return (kept.digest, kept.outcome, kept.actions) != (record.digest, record.outcome, record.actions)


def keep_episode(
    session: Session, row: EpisodeRow, record: EpisodeRecord, trajectory: Trajectory, *, sealed: bool, now: datetime
) -> None:
    """Keeps what an episode came to, within a transaction. `row` tells which one it is."""
    row.outcome = record.outcome
    row.success = record.success
    row.total_reward = record.total_reward
    row.turns = len(record.actions)
    row.tokens = record.tokens
    row.end_reason = record.end_reason
    row.sealed = sealed
    row.finished = now
    row.record = record.model_dump_json()
    session.add(row)
    session.flush()
    session.merge(TrajectoryRow(episode_id=row.id, trajectory=trajectory.model_dump_json()))


def _keep(session: Session, submission_id: int, results: Sequence[NewResult], now: datetime) -> None:
    for result in results:
        statistics = result.statistics
        session.merge(
            ResultRow(
                submission_id=submission_id,
                environment_id=result.environment_id,
                statistics=statistics.model_dump_json() if statistics is not None else None,
                unavailable=clean(result.unavailable),
                computed=now,
            )
        )
