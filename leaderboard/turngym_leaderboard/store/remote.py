"""Episodes of agents that their owners' own programs play through the board's service.

All of a submission's episodes are there from its beginning, in the order in which they are dealt. An answer is kept
before it is played, and what came of it before anybody is told, so that whoever goes on from here, after whatever
interruption, goes on from the same turn. The last episode to end puts the submission into the queue, to be scored.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from turngym_leaderboard.record import EpisodeRecord, Trajectory
from turngym_leaderboard.store import reading, submissions
from turngym_leaderboard.store.database import Store
from turngym_leaderboard.store.errors import NotFound, WrongState
from turngym_leaderboard.store.models import EpisodeRow, RemoteEpisodeRow, RemoteTurnRow, SubmissionRow
from turngym_leaderboard.store.submissions import clean, lock_board
from turngym_leaderboard.store.values import (
    Board,
    Kind,
    Owner,
    RemoteAnswer,
    RemoteEpisode,
    RemoteOutcome,
    RemoteStart,
    RemoteTurn,
    State,
    Submission,
    Visibility,
)
from turngym_leaderboard.store.work import UNRESOLVED, keep_episode

_PLAYED: Final = (
    SubmissionRow.kind == Kind.REMOTE,
    SubmissionRow.state == State.RUNNING,
    SubmissionRow.lease_until.is_(None),
)
"""Submissions that their owners play, and no worker scores."""


@dataclass(frozen=True, slots=True)
class Seat:
    """An episode that a submission is made of."""

    environment_id: int
    draw: int
    attempt: int
    showcase: bool


def begin(
    store: Store,
    board: Board,
    owner: Owner,
    *,
    name: str,
    visibility: Visibility,
    description: Mapping[str, str],
    public_id: str,
    seats: Sequence[Seat],
    now: datetime,
) -> Submission:
    """A new submission, RUNNING with all its episodes, or none: it counts against its owner's number from now on.

    Args:
        seats: all its episodes, in the order in which they are dealt.

    Raises:
        Taken: there is a submission of this public id.
        WrongState: the season is over or ending.
        LimitReached: the owner has none left in the season, knows the board's levels, or had too many refused.
    """
    with store.writing() as session:
        row = submissions.add(
            session,
            board,
            owner,
            name=name,
            kind=Kind.REMOTE,
            visibility=visibility,
            description=description,
            public_id=public_id,
        )
        session.add_all(
            RemoteEpisodeRow(
                public_id=secrets.token_hex(8),
                submission_id=row.id,
                environment_id=seat.environment_id,
                draw=seat.draw,
                attempt=seat.attempt,
                showcase=seat.showcase,
                place=place,
            )
            for place, seat in enumerate(seats)
        )
        row.state, row.total = State.RUNNING, len(seats)
        row.changed = row.queued = row.started = now
        session.flush()
        session.refresh(row)
        return reading.submission(row)


def deal(store: Store, public_id: str, most: int, *, now: datetime) -> list[RemoteEpisode]:
    """The episodes of a submission that have been dealt and go on, and further ones, up to `most` together; of one
    that was played to its end, none.

    Raises:
        NotFound: there is no such submission.
        WrongState: it is not played now.
    """
    with store.writing() as session:
        submission = _submission(session, public_id, State.RUNNING, State.QUEUED, State.SCORED, State.INCOMPLETE)
        of_it = (RemoteEpisodeRow.submission_id == submission.id, RemoteEpisodeRow.ended.is_(None))
        rows = list(
            session.scalars(
                select(RemoteEpisodeRow)
                .where(*of_it, RemoteEpisodeRow.dealt.is_not(None))
                .order_by(RemoteEpisodeRow.place)
            )
        )
        if (room := most - len(rows)) > 0:
            lock_board(session, submission.board_id)  # Whatever its owner submits from now on may know the levels.
            further = session.scalars(
                select(RemoteEpisodeRow)
                .where(*of_it, RemoteEpisodeRow.dealt.is_(None))
                .order_by(RemoteEpisodeRow.place)
                .limit(room)
            )
            for row in further:
                row.dealt = now
                rows.append(row)
        if rows:
            submission.changed = now
        session.flush()
        return [_read(session, row) for row in rows]


def find(store: Store, submission: Submission, public_id: str) -> RemoteEpisode:
    """An episode of a submission that has been dealt. Raises NotFound."""
    with store.reading() as session:
        return _read(session, _episode(session, submission, public_id))


def start(store: Store, episode: RemoteEpisode, begun: RemoteStart, *, due: datetime) -> RemoteEpisode:
    """Notes how an episode began; of one that has begun already nothing is changed."""
    with store.writing() as session:
        row = _locked(session, episode)
        if row.start is None and row.ended is None:
            row.start, row.due = begun.model_dump_json(), due
            session.flush()
        return _read(session, row)


def answer(store: Store, episode: RemoteEpisode, turn: int, told: RemoteAnswer, *, now: datetime) -> RemoteEpisode:
    """Keeps the answer to a turn, which stays to be played. The same answer to the same turn changes nothing.

    Raises:
        WrongState: the submission is not played now, the episode is over, its time ran out, or it is at another turn.
    """
    with store.writing() as session:
        row = _locked(session, episode)
        found = _read(session, row)
        if turn < len(found.turns):
            if found.turns[turn].answer != told:
                raise WrongState(f"turn {turn} was answered already, otherwise; the episode goes on from that answer")
            submission = session.get_one(SubmissionRow, row.submission_id)
            if found.pending and turn == len(found.played) and submission.state is not State.RUNNING:
                raise _not_played(submission)
            return found
        if row.ended is not None:
            raise WrongState(f"the episode is over{': ' + row.fault if row.fault else ''}; ask for the next ones")
        submission = session.get_one(SubmissionRow, row.submission_id)
        if submission.state is not State.RUNNING:
            raise _not_played(submission)
        if turn > len(found.turns) or found.pending:
            raise WrongState(f"the episode is at turn {len(found.played)}, not at turn {turn}")
        if row.due is None or row.due <= now:
            raise WrongState(f"the time for turn {turn} is over; the episode counts as a failure")
        row.due = None
        session.add(RemoteTurnRow(episode_id=row.id, turn=turn, answered=now, answer=told.model_dump_json()))
        session.flush()
        return _read(session, row)


def not_played(store: Store, submission: Submission) -> WrongState:
    """Why a submission is not played any more, to be raised."""
    with store.reading() as session:
        return _not_played(session.get_one(SubmissionRow, submission.id))


def outcome(store: Store, episode: RemoteEpisode, told: RemoteOutcome, *, due: datetime) -> RemoteEpisode:
    """Keeps what came of an episode's pending turn, after which it goes on; what is there already stays as it is."""
    with store.writing() as session:
        row = _locked(session, episode)
        if row.ended is None:
            _put_outcome(session, row, len(episode.played), told)
            row.due = row.due or due
            session.flush()
        return _read(session, row)


def end(
    store: Store,
    episode: RemoteEpisode,
    record: EpisodeRecord,
    trajectory: Trajectory,
    *,
    last: RemoteOutcome | None = None,
    told: str = "",
    now: datetime,
) -> RemoteEpisode:
    """Ends an episode with what it came to; one that has ended, or was answered meanwhile, stays as it is.

    Args:
        last: what came of its pending turn, if that is why.
        told: why it ended otherwise than by play, for its agent.
    """
    with store.writing() as session:
        # In this order everywhere, so that nobody waits for somebody who waits for him.
        submission = session.scalar(
            select(SubmissionRow).where(SubmissionRow.id == episode.submission_id).with_for_update(of=SubmissionRow)
        )
        row = _locked(session, episode)
        if row.ended is not None or submission is None or submission.state is not State.RUNNING:
            return _read(session, row)
        if row.due != episode.due:
            return _read(session, row)
        if last is not None:
            _put_outcome(session, row, len(episode.played), last)
        begun = RemoteStart.model_validate_json(row.start) if row.start is not None else None
        kept = EpisodeRow(
            submission_id=row.submission_id,
            environment_id=row.environment_id,
            draw=row.draw,
            attempt=row.attempt,
            showcase=row.showcase,
        )
        sealed = begun is not None and bool(begun.sealed_seed)
        keep_episode(session, kept, record, trajectory, sealed=sealed, now=now)
        row.ended, row.due, row.fault = now, None, clean(told)
        submission.episodes += record.outcome != UNRESOLVED
        submission.changed = now
        session.flush()
        if not _left(session, submission.id):
            submission.state = State.QUEUED
        return _read(session, row)


def left(store: Store, submission: Submission) -> int:
    """How many of a submission's episodes have not ended."""
    with store.reading() as session:
        return _left(session, submission.id)


def pending(store: Store, before: datetime) -> list[RemoteEpisode]:
    """Episodes whose last turn was answered before then and has not been played."""
    with store.reading() as session:
        rows = session.scalars(
            _going_on()
            .join(RemoteTurnRow, RemoteTurnRow.episode_id == RemoteEpisodeRow.id)
            .where(RemoteTurnRow.outcome.is_(None), RemoteTurnRow.answered <= before)
        )
        return [_read(session, row) for row in rows]


def overdue(store: Store, now: datetime) -> list[RemoteEpisode]:
    """Episodes whose next turn should have been there."""
    with store.reading() as session:
        return [_read(session, row) for row in session.scalars(_going_on().where(RemoteEpisodeRow.due <= now))]


def idle(store: Store, before: datetime) -> list[Submission]:
    """Submissions of which nothing has been asked for or answered since then."""
    with store.reading() as session:
        rows = session.scalars(select(SubmissionRow).where(*_PLAYED, SubmissionRow.changed <= before))
        return [reading.submission(row) for row in rows]


def going_on(store: Store) -> set[str]:
    """Public ids of all episodes that have begun and have not ended."""
    with store.reading() as session:
        return {row.public_id for row in session.scalars(_going_on().where(RemoteEpisodeRow.start.is_not(None)))}


def played_boards(store: Store) -> list[int]:
    """Numbers of the boards on which submissions are played by their owners now."""
    with store.reading() as session:
        return list(session.scalars(select(SubmissionRow.board_id).where(*_PLAYED).distinct()))


def renew(store: Store, board_id: int, due: datetime, *, now: datetime) -> None:
    """Gives every episode of a board that goes on at least until then: while nobody could answer, no time counts."""
    # Submissions first, as in `end`.
    with store.writing() as session:
        of_it = (SubmissionRow.board_id == board_id, *_PLAYED)
        session.execute(update(SubmissionRow).where(*of_it).values(changed=now))
        session.execute(
            update(RemoteEpisodeRow)
            .where(
                RemoteEpisodeRow.submission_id.in_(select(SubmissionRow.id).where(*of_it)),
                RemoteEpisodeRow.ended.is_(None),
                RemoteEpisodeRow.due < due,
            )
            .values(due=due)
        )


def _going_on():
    return (
        select(RemoteEpisodeRow)
        .join(SubmissionRow, SubmissionRow.id == RemoteEpisodeRow.submission_id)
        .where(RemoteEpisodeRow.ended.is_(None), SubmissionRow.state == State.RUNNING)
    )


def _left(session: Session, submission_id: int) -> int:
    open_ones = select(func.count()).where(
        RemoteEpisodeRow.submission_id == submission_id, RemoteEpisodeRow.ended.is_(None)
    )
    return session.scalar(open_ones) or 0


def _submission(session: Session, public_id: str, *states: State) -> SubmissionRow:
    row = session.scalar(
        select(SubmissionRow).where(SubmissionRow.public_id == public_id).with_for_update(of=SubmissionRow)
    )
    if row is None:
        raise NotFound(f"there is no submission {public_id!r}")
    if row.kind is not Kind.REMOTE:
        raise WrongState(f"submission {public_id} is a {row.kind.value}, which the board plays itself")
    if row.state not in states:
        raise _not_played(row)
    return row


def _not_played(row: SubmissionRow) -> WrongState:
    why = f": {row.reason}" if row.reason else ""
    return WrongState(f"submission {row.public_id} is {row.state.value}{why}; it is not played now")


def _episode(session: Session, submission: Submission, public_id: str) -> RemoteEpisodeRow:
    row = session.scalar(
        select(RemoteEpisodeRow).where(
            RemoteEpisodeRow.public_id == public_id,
            RemoteEpisodeRow.submission_id == submission.id,
            RemoteEpisodeRow.dealt.is_not(None),
        )
    )
    if row is None:
        raise NotFound(f"submission {submission.public_id} was dealt no episode {public_id!r}")
    return row


def _locked(session: Session, episode: RemoteEpisode) -> RemoteEpisodeRow:
    return session.scalars(select(RemoteEpisodeRow).where(RemoteEpisodeRow.id == episode.id).with_for_update()).one()


def _put_outcome(session: Session, row: RemoteEpisodeRow, turn: int, told: RemoteOutcome) -> None:
    """Of two services that played the same turn, the first one's stays; play is deterministic, so they are equal."""
    answered = session.get_one(RemoteTurnRow, (row.id, turn))
    if answered.outcome is None:
        answered.outcome = told.model_dump_json()


def _read(session: Session, row: RemoteEpisodeRow) -> RemoteEpisode:
    turns = session.scalars(
        select(RemoteTurnRow).where(RemoteTurnRow.episode_id == row.id).order_by(RemoteTurnRow.turn)
    )
    return RemoteEpisode(
        id=row.id,
        public_id=row.public_id,
        submission_id=row.submission_id,
        environment_id=row.environment_id,
        draw=row.draw,
        attempt=row.attempt,
        showcase=row.showcase,
        start=RemoteStart.model_validate_json(row.start) if row.start is not None else None,
        due=row.due,
        ended=row.ended,
        fault=row.fault,
        turns=tuple(
            RemoteTurn(
                RemoteAnswer.model_validate_json(turn.answer),
                RemoteOutcome.model_validate_json(turn.outcome) if turn.outcome is not None else None,
            )
            for turn in turns
        ),
    )
