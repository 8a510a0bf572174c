"""Submissions and their files, up to the queue. What happens to them from there is in `work`."""

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from turngym_leaderboard.boards import BoardDefinition
from turngym_leaderboard.store import reading
from turngym_leaderboard.store.database import Store
from turngym_leaderboard.store.errors import LimitReached, NoRoom, NotFound, Taken, WrongState
from turngym_leaderboard.store.models import BoardRow, FileRow, RemoteEpisodeRow, SubmissionRow
from turngym_leaderboard.store.values import (
    FINAL,
    NEXT,
    Board,
    Kind,
    Owner,
    State,
    Submission,
    SubmissionFile,
    Visibility,
)

MOST_REFUSED: Final = 10
"""Submissions of an owner that are tried in vain within REFUSED_WITHIN, so that nobody keeps the workers busy."""
REFUSED_WITHIN: Final = timedelta(days=1)
_BEGINNING: Final = 0x7475726F
"""Of PostgreSQL's advisory locks: only one submission is begun at a time."""
_TRIED: Final = func.coalesce(SubmissionRow.examined, SubmissionRow.queued)
"""When workers began to have work with a submission; NULL: not yet."""
_SET: Final = frozenset({State.VALIDATED, State.QUEUED, State.FAILED})
"""States that are not a worker's to give."""


def new_public_id() -> str:
    """Random: 64 bits, in hexadecimal."""
    return secrets.token_hex(8)


def public_id_of(owner: Owner, key: str) -> str:
    """The public id of whatever this owner begins with this key: the same however often it is asked for."""
    return hashlib.sha256(f"{owner.id}:{key}".encode()).hexdigest()[:16]


def create(
    store: Store,
    board: Board,
    owner: Owner,
    *,
    name: str,
    kind: Kind,
    visibility: Visibility = Visibility.PRIVATE,
    description: Mapping[str, str] | None = None,
    files: Sequence[SubmissionFile] = (),
    public_id: str | None = None,
    most_open: int | None = None,
    room: int | None = None,
) -> Submission:
    """A new submission, UPLOADED: its files are still to come.

    Args:
        public_id: None: a random one.
        most_open: submissions of the owner whose files are still to come or to be examined, this one included.
        room: bytes that all files which are still to come may have.

    Raises:
        Taken: there is a submission of this public id.
        WrongState: the season is over or ending, or too many of the owner's are open.
        LimitReached: the owner has none left in it, knows its levels from a remote agent, or had MOST_REFUSED refused
            within a day.
        NoRoom: the files do not fit.
    """
    with store.writing() as session:
        row = add(
            session,
            board,
            owner,
            name=name,
            kind=kind,
            visibility=visibility,
            description=description,
            files=files,
            public_id=public_id,
            most_open=most_open,
            room=room,
        )
        session.refresh(row)
        return reading.submission(row)


def add(
    session: Session,
    board: Board,
    owner: Owner,
    *,
    name: str,
    kind: Kind,
    visibility: Visibility,
    description: Mapping[str, str] | None,
    files: Sequence[SubmissionFile] = (),
    public_id: str | None = None,
    most_open: int | None = None,
    room: int | None = None,
) -> SubmissionRow:
    """The same as `create`, within a transaction."""
    now = reading.utc_now()
    _one_after_the_other(session)
    lock_board(session, board.id)
    row = _board(session, board.id)
    if row.closing is not None:
        ends = "is over" if row.closed is not None else "is ending"
        raise WrongState(f"the season of {row.slug} {ends}; nothing more is submitted to it")
    if public_id and session.scalar(select(SubmissionRow.id).where(SubmissionRow.public_id == public_id)):
        raise Taken(f"there is a submission {public_id} already")
    check_number(session, row, owner.id, kind)
    check_unseen(session, row.id, owner.id)
    _check_refused(session, owner.id, now)
    _check_open(session, owner.id, most_open)
    if room is not None and sum(file.size - file.received for file in files) + _promised(session) > room:
        raise NoRoom("the board has no room for these files; tell its operator")
    submission = SubmissionRow(
        public_id=public_id or new_public_id(),
        board_id=row.id,
        owner_id=owner.id,
        name=name,
        kind=kind,
        visibility=visibility,
        description=dict(description or {}),
        state=State.UPLOADED,
        total=board.definition.episodes,
        created=now,
        changed=now,
    )
    session.add(submission)
    try:
        session.flush()
    except IntegrityError as error:
        raise Taken(f"there is a submission {submission.public_id} already") from error
    session.add_all(
        FileRow(submission_id=submission.id, name=file.name, size=file.size, sha256=file.sha256, received=file.received)
        for file in files
    )
    return submission


def begin_examination(store: Store, public_id: str) -> None:
    """Notes when a submission was examined first. Raises NotFound, or WrongState where its files do not wait for it."""
    with store.writing() as session:
        row = _row(session, public_id, lock=True)
        if row.state is not State.UPLOADED:
            raise WrongState(f"submission {public_id} is {row.state.value}; it is not examined any more")
        row.examined = row.examined or reading.utc_now()


def count_failure(store: Store, public_id: str) -> int:
    """Notes that a submission could not be examined; returns how often. Raises NotFound."""
    with store.writing() as session:
        row = _row(session, public_id, lock=True)
        row.failures += 1
        return row.failures


def find(store: Store, public_id: str) -> Submission:
    """Raises NotFound."""
    with store.reading() as session:
        return reading.submission(_row(session, public_id))


def of_id(store: Store, number: int) -> Submission:
    """Raises NotFound."""
    with store.reading() as session:
        row = session.get(SubmissionRow, number)
        if row is None:
            raise NotFound(f"there is no submission of number {number}")
        return reading.submission(row)


def of_board(store: Store, board: Board) -> list[Submission]:
    """All of a board, oldest first, whoever may see them: `visibility` says who."""
    with store.reading() as session:
        rows = session.scalars(
            select(SubmissionRow).where(SubmissionRow.board_id == board.id).order_by(SubmissionRow.id)
        )
        return [reading.submission(row) for row in rows]


def of_owner(store: Store, owner: Owner) -> list[Submission]:
    """All of an owner, on all boards, newest first."""
    with store.reading() as session:
        rows = session.scalars(
            select(SubmissionRow).where(SubmissionRow.owner_id == owner.id).order_by(SubmissionRow.id.desc())
        )
        return [reading.submission(row) for row in rows]


def arrived(store: Store) -> list[Submission]:
    """Those that have all their files and are not queued yet, in the order in which they are examined: VALIDATED ones,
    which a process that ended in between left there, then UPLOADED ones, of the owners in turns. An owner whose last
    examination ended in a refusal comes after the others, so that nobody's bad uploads hold them up.
    """
    with store.reading() as session:
        rows = session.scalars(
            select(SubmissionRow)
            .where(
                SubmissionRow.kind == Kind.CHECKPOINT,
                or_(and_(SubmissionRow.state == State.UPLOADED, is_whole()), SubmissionRow.state == State.VALIDATED),
            )
            .order_by(SubmissionRow.id)
        ).all()
        last = _last_examined(session, {row.owner_id for row in rows})
        return [reading.submission(row) for row in sorted(rows, key=lambda row: _turn(row, last.get(row.owner_id)))]


def examined_after(store: Store, submission: Submission) -> int | None:
    """How many submissions are examined before this one; None: it does not wait for that."""
    if submission.state is not State.UPLOADED:
        return None
    waiting = [each.id for each in arrived(store)]
    return waiting.index(submission.id) if submission.id in waiting else None


def is_whole() -> ColumnElement[bool]:
    """Whether a submission has files, and all of them."""
    files = select(FileRow).where(FileRow.submission_id == SubmissionRow.id)
    return and_(files.exists(), ~files.where(FileRow.received < FileRow.size).exists())


def abandoned(store: Store, age: timedelta) -> list[Submission]:
    """Those whose files are still to come after so long."""
    missing = select(FileRow).where(FileRow.submission_id == SubmissionRow.id, FileRow.received < FileRow.size)
    with store.reading() as session:
        rows = session.scalars(
            select(SubmissionRow).where(
                SubmissionRow.state == State.UPLOADED,
                SubmissionRow.created < reading.utc_now() - age,
                missing.exists(),
            )
        )
        return [reading.submission(row) for row in rows]


def describe(store: Store, public_id: str, facts: Mapping[str, str]) -> None:
    """Adds to what is told of a submission. Raises NotFound."""
    with store.writing() as session:
        row = _row(session, public_id, lock=True)
        row.description = {**row.description, **{key: clean(value) for key, value in facts.items()}}


def set_state(store: Store, public_id: str, state: State, *, reason: str = "") -> Submission:
    """Moves a submission on; a worker that plays it notices when it has been failed meanwhile.

    Raises:
        NotFound: there is no such submission.
        WrongState: this state does not follow from its present one, or its season is over.
        LimitReached: it would be queued, and its owner has none left in the season. Queued again, it does not count
            again, unless it did not count because it had failed before its first episode.
    """
    now = reading.utc_now()
    with store.writing() as session:
        row = _row(session, public_id, lock=True)
        if state not in _SET or state not in NEXT[row.state]:
            raise WrongState(f"submission {public_id} is {row.state.value}; it cannot become {state.value}")
        if state is State.QUEUED:
            lock_board(session, row.board_id)
            board = _board(session, row.board_id)
            if board.closed is not None:
                raise WrongState(f"the season of {board.slug} is over; nothing more is played in it")
            if row.kind is Kind.REMOTE:
                raise WrongState(f"submission {public_id} was played by its owner; what came of that stays as it is")
            if row.state is State.FAILED and row.queued is None:
                raise WrongState(f"submission {public_id} was never found sound: {row.reason}; submit it anew")
            if row.owner_id is not None and (row.queued is None or _costs_nothing(row)):
                check_number(session, board, row.owner_id, row.kind)
            row.queued, row.finished, row.failures = row.queued or now, None, 0
        if state in FINAL:
            row.finished = now
        row.lease_holder = row.lease_until = None
        row.state, row.reason, row.changed = state, clean(reason), now
        session.flush()
        return reading.submission(row)


def set_visibility(store: Store, public_id: str, visibility: Visibility) -> Submission:
    """Raises NotFound."""
    with store.writing() as session:
        row = _row(session, public_id, lock=True)
        row.visibility, row.changed = visibility, reading.utc_now()
        session.flush()
        return reading.submission(row)


def set_hidden(store: Store, public_id: str, hidden: bool) -> Submission:
    """Keeps a submission from all but its owner and admins, whatever its visibility, or no longer. Raises NotFound."""
    with store.writing() as session:
        row = _row(session, public_id, lock=True)
        row.hidden, row.changed = hidden, reading.utc_now()
        session.flush()
        return reading.submission(row)


def files(store: Store, public_id: str) -> list[SubmissionFile]:
    """The files that a submission consists of, by name. Raises NotFound."""
    with store.reading() as session:
        submission = _row(session, public_id)
        rows = session.scalars(select(FileRow).where(FileRow.submission_id == submission.id).order_by(FileRow.name))
        return [reading.file(row) for row in rows]


def set_received(store: Store, public_id: str, name: str, received: int) -> None:
    """Notes how many bytes of a file have arrived.

    Raises:
        NotFound: there is no such submission or file.
        WrongState: the submission is past its upload.
        LimitReached: its owner has come to know the board's levels since it was begun.
    """
    with store.writing() as session:
        submission = _row(session, public_id, lock=True)
        if submission.state is not State.UPLOADED:
            raise WrongState(f"submission {public_id} is {submission.state.value}; it takes no more files")
        if submission.owner_id is not None:
            check_unseen(session, submission.board_id, submission.owner_id)
        changed = session.execute(
            update(FileRow)
            .where(FileRow.submission_id == submission.id, FileRow.name == name)
            .values(received=received)
            .returning(FileRow.name)
        )
        if not changed.all():
            raise NotFound(f"submission {public_id} has no file {name!r}")


def left_in_season(store: Store, board: Board, owner: Owner) -> int:
    """How many more submissions of this owner can be scored on this board."""
    with store.reading() as session:
        return board.definition.submissions_per_owner - _counted(session, board.id, owner.id)


def clean(text: str) -> str:
    """Without NUL and lone surrogates, which PostgreSQL or UTF-8 cannot hold: what it is made of may be an agent's."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _one_after_the_other(session: Session) -> None:
    """From here to the end of the transaction nobody else begins a submission: what is counted stays so."""
    if session.connection().dialect.name == "postgresql":  # A transaction of SQLite's that writes is alone anyway.
        session.execute(select(func.pg_advisory_xact_lock(_BEGINNING)))


def _last_examined(session: Session, owners: Collection[int | None]) -> dict[int | None, SubmissionRow]:
    """The submission of each owner that was examined last; without those of which none was."""
    rows = session.scalars(
        select(SubmissionRow)
        .where(SubmissionRow.owner_id.in_(owners), SubmissionRow.examined.is_not(None))
        .order_by(SubmissionRow.examined)
    )
    return {row.owner_id: row for row in rows}


def _turn(row: SubmissionRow, last: SubmissionRow | None) -> tuple[bool, bool, float, int]:
    """What submissions that wait are sorted by. `last`: that of its owner which was examined last."""
    refused = last is not None and last.state is State.FAILED and last.queued is None
    examined = last.examined.timestamp() if last is not None and last.examined is not None else 0.0
    return row.state is not State.VALIDATED, refused, examined, row.id


def _check_refused(session: Session, owner_id: int, now: datetime) -> None:
    examined = (
        SubmissionRow.owner_id == owner_id,
        SubmissionRow.state == State.FAILED,
        SubmissionRow.episodes == 0,
        _TRIED.between(now - REFUSED_WITHIN, now),
    )
    times = list(session.scalars(select(_TRIED).where(*examined).order_by(_TRIED)))
    if len(times) >= MOST_REFUSED:
        again = times[-MOST_REFUSED]
        raise LimitReached(
            f"{len(times)} of your submissions failed within a day before an episode was played; look at their "
            "reasons, try the agent with `leaderboard evaluate`, and submit it after "
            f"{again + REFUSED_WITHIN:%Y-%m-%d %H:%M} UTC"
        )


def _check_open(session: Session, owner_id: int, most: int | None) -> None:
    own = (SubmissionRow.owner_id == owner_id, SubmissionRow.state == State.UPLOADED)
    waiting = list(session.scalars(select(SubmissionRow.public_id).where(*own).order_by(SubmissionRow.id)))
    if most is not None and len(waiting) >= most:
        raise WrongState(
            f"{len(waiting)} of your submissions are still sent or examined; finish or withdraw {waiting[0]} first"
        )


def _promised(session: Session) -> int:
    """Bytes of files that are still to come."""
    coming = select(func.sum(FileRow.size - FileRow.received)).join(
        SubmissionRow, SubmissionRow.id == FileRow.submission_id
    )
    return int(session.scalar(coming.where(SubmissionRow.state == State.UPLOADED)) or 0)


def check_number(session: Session, board: BoardRow, owner_id: int, kind: Kind) -> None:
    """Raises LimitReached where an owner has none of this kind left in the season; within a transaction."""
    lock_board(session, board.id)  # So that of two at once both see the other's.
    definition = BoardDefinition.model_validate(board.definition)
    allowed = definition.submissions_per_owner
    if _counted(session, board.id, owner_id) >= allowed:
        raise LimitReached(f"{allowed} submissions of an owner are scored in a season of {board.slug}; none is left")
    remote = definition.remote_submissions_per_owner
    if kind is Kind.REMOTE and _counted(session, board.id, owner_id, Kind.REMOTE) >= remote:
        raise LimitReached(
            f"{remote} remote agents of an owner are scored in a season of {board.slug}, since a further one could "
            "know its levels; none is left"
        )


def check_unseen(session: Session, board_id: int, owner_id: int) -> None:
    """Raises LimitReached where an owner's remote agent was dealt episodes of the board; within a transaction."""
    lock_board(session, board_id)
    seen = session.execute(
        select(SubmissionRow.public_id, BoardRow.slug)
        .join(RemoteEpisodeRow, RemoteEpisodeRow.submission_id == SubmissionRow.id)
        .join(BoardRow, BoardRow.id == SubmissionRow.board_id)
        .where(
            SubmissionRow.board_id == board_id,
            SubmissionRow.owner_id == owner_id,
            RemoteEpisodeRow.dealt.is_not(None),
        )
        .limit(1)
    ).first()
    if seen is not None:
        public_id, slug = seen
        raise LimitReached(
            f"your remote agent {public_id} was dealt episodes of {slug}, so that you know its levels; in this season "
            "nothing further of yours is taken, submit other agents before a remote one asks for episodes"
        )


def lock_board(session: Session, board_id: int) -> None:
    """From here to the end of the transaction nobody else begins, receives, first deals or queues on the board.

    Whoever locks a submission does so before.
    """
    session.execute(select(BoardRow.id).where(BoardRow.id == board_id).with_for_update())


def _costs_nothing(row: SubmissionRow) -> bool:
    """Whether a submission that was queued does not count, as `_counted` has it."""
    return row.state is State.FAILED and not row.episodes and row.kind is not Kind.REMOTE


def _counted(session: Session, board_id: int, owner_id: int, kind: Kind | None = None) -> int:
    where = [
        SubmissionRow.board_id == board_id,
        SubmissionRow.owner_id == owner_id,
        SubmissionRow.queued.is_not(None),
        # What failed before its first episode showed its owner nothing; of a remote agent even a level that was dealt.
        or_(SubmissionRow.state != State.FAILED, SubmissionRow.episodes > 0, SubmissionRow.kind == Kind.REMOTE),
    ]
    if kind is not None:
        where.append(SubmissionRow.kind == kind)
    return session.scalar(select(func.count()).where(*where)) or 0


def _board(session: Session, board_id: int) -> BoardRow:
    row = session.get(BoardRow, board_id)
    if row is None:
        raise NotFound(f"there is no board of number {board_id}")
    return row


def _row(session: Session, public_id: str, *, lock: bool = False) -> SubmissionRow:
    wanted = select(SubmissionRow).where(SubmissionRow.public_id == public_id)
    row = session.scalar(wanted.with_for_update(of=SubmissionRow) if lock else wanted)
    if row is None:
        raise NotFound(f"there is no submission {public_id!r}")
    return row
