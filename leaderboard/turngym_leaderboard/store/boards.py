"""Boards: made with their instances and scripted rows in one transaction, then never changed but to be closed."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from turngym_leaderboard.agents import Agent
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.boards import BoardDefinition
from turngym_leaderboard.protocol import Instance
from turngym_leaderboard.store import reading
from turngym_leaderboard.store.database import Store
from turngym_leaderboard.store.errors import NotFound, Taken, WrongState
from turngym_leaderboard.store.models import BoardRow, EnvironmentRow, InstanceRow, SubmissionRow
from turngym_leaderboard.store.submissions import clean, is_whole, lock_board, new_public_id
from turngym_leaderboard.store.values import FINAL, Board, Deal, Kind, State, Submission, Visibility

_NAMED: Final = 5
"""Submissions that a refusal names."""


def create(store: Store, definition: BoardDefinition, secret: int, deals: Sequence[Deal]) -> Board:
    """A new board, whose scripted rows are queued.

    Args:
        secret: what its seeds follow from.
        deals: of each environment, in the definition's order.

    Raises:
        Taken: the board of this name and season exists.
    """
    now = reading.utc_now()
    digits = str(secret)
    board = BoardRow(
        slug=definition.slug,
        definition=definition.model_dump(mode="json"),
        secret=digits,
        secret_hash=hash_of(digits),
        created=now,
    )
    try:
        with store.writing() as session:
            session.add(board)
            session.flush()
            for position, (environment, deal) in enumerate(zip(definition.environments, deals, strict=True)):
                row = EnvironmentRow(
                    board_id=board.id,
                    position=position,
                    label=environment.label,
                    version=deal.scored.version,
                    split_epoch=deal.scored.split_epoch,
                    options_json=deal.scored.options_json,
                    limits=asdict(deal.scored.limits),
                    draws=deal.scored.draws,
                )
                session.add(row)
                session.flush()
                session.add_all(_instance_row(row.id, each, showcase=False) for each in deal.scored.instances)
                session.add_all(_instance_row(row.id, each, showcase=True) for each in deal.showcase)
            scripted: tuple[Agent, ...] = (RandomAgent(), OracleAgent())
            session.add_all(
                SubmissionRow(
                    public_id=new_public_id(),
                    board_id=board.id,
                    name=agent.name,
                    kind=Kind.SCRIPTED,
                    visibility=Visibility.PUBLIC,
                    description=agent.description,
                    state=State.QUEUED,
                    total=definition.episodes,
                    created=now,
                    changed=now,
                    queued=now,
                )
                for agent in scripted
            )
            session.refresh(board)
            return reading.board(board)
    except IntegrityError as error:
        raise _taken(definition) from error


def check_free(store: Store, definition: BoardDefinition) -> None:
    """Raises Taken where there is a board of this name and season, before its instances are dealt in vain."""
    with store.reading() as session:
        if session.scalar(select(BoardRow.id).where(BoardRow.slug == definition.slug)) is not None:
            raise _taken(definition)


def _taken(definition: BoardDefinition) -> Taken:
    return Taken(f"there is a board {definition.slug!r} already; a new season needs another name for it")


def find(store: Store, slug: str) -> Board:
    """Raises NotFound."""
    with store.reading() as session:
        return reading.board(_row(session, slug))


def of_id(store: Store, board_id: int) -> Board:
    """Raises NotFound."""
    with store.reading() as session:
        row = session.get(BoardRow, board_id)
        if row is None:
            raise NotFound(f"there is no board of number {board_id}")
        return reading.board(row)


def every(store: Store) -> list[Board]:
    """All boards, newest first."""
    with store.reading() as session:
        return [reading.board(row) for row in session.scalars(select(BoardRow).order_by(BoardRow.id.desc()))]


def secret(store: Store, board: Board) -> int:
    """What the board's seeds follow from: for whoever plays it, never for a page."""
    with store.reading() as session:
        return int(_row(session, board.slug).secret)


def deal(store: Store, environment_id: int) -> Deal:
    """The instances of one of a board's environments, with their seeds: for whoever plays it, never for a page.

    Raises:
        NotFound: there is no such environment.
    """
    with store.reading() as session:
        row = session.get(EnvironmentRow, environment_id)
        if row is None:
            raise NotFound(f"there is no environment of number {environment_id}")
        instances = session.scalars(select(InstanceRow).where(InstanceRow.environment_id == environment_id))
        return reading.deal(row, list(instances))


def instance(store: Store, environment_id: int, draw: int) -> Instance:
    """One instance of one of a board's environments, as `deal` has it. Raises NotFound."""
    with store.reading() as session:
        row = session.get(InstanceRow, (environment_id, draw))
        if row is None:
            raise NotFound(f"environment {environment_id} has no instance of draw {draw}")
        return reading.instance(row)


def begin_closing(store: Store, slug: str) -> list[Submission]:
    """From now on nothing more is submitted to a board; what only its owner could bring to its end has failed.

    That are uploads whose files are not all there, and remote agents that have not played all their episodes: those
    are not scored, since some were never dealt. What a worker brings to its end stays.

    Returns:
        What has failed by this.

    Raises:
        NotFound: there is no such board.
    """
    now = reading.utc_now()
    with store.writing() as session:
        board_id = _row(session, slug).id
        lock_board(session, board_id)
        session.execute(update(BoardRow).where(BoardRow.id == board_id, BoardRow.closing.is_(None)).values(closing=now))
    # In a transaction of its own: whoever locks a submission and its board does so in this order.
    with store.writing() as session:
        of_it = (SubmissionRow.board_id == board_id, SubmissionRow.state.not_in(FINAL))
        rows = session.scalars(
            select(SubmissionRow).where(*of_it).order_by(SubmissionRow.id).with_for_update(of=SubmissionRow)
        ).all()
        whole = set(session.scalars(select(SubmissionRow.id).where(*of_it, is_whole())))
        ended = list[SubmissionRow]()
        for row in rows:
            if reason := _left_by_its_owner(row, row.id in whole):
                row.state, row.reason, row.changed, row.finished = State.FAILED, reason, now, now
                ended.append(row)
        session.flush()
        return [reading.submission(row) for row in ended]


def close(store: Store, slug: str) -> Board:
    """Ends the season, which begins by `begin_closing`: the secret is published, and nothing more is played.

    Raises:
        NotFound: there is no such board.
        WrongState: submissions are still to be examined, played or scored by a worker.
    """
    begin_closing(store, slug)
    with store.writing() as session:
        board_id = _row(session, slug).id
        lock_board(session, board_id)
        waiting = session.scalars(
            select(SubmissionRow)
            .where(SubmissionRow.board_id == board_id, SubmissionRow.state.not_in(FINAL))
            .order_by(SubmissionRow.id)
        ).all()
        if waiting:
            named = ", ".join(f"{row.name} ({row.public_id}, {row.state.value})" for row in waiting[:_NAMED])
            more = f" and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
            raise WrongState(
                f"nothing more is submitted to {slug}, but a worker has still to finish {named}{more}; close it again "
                "when that is done"
            )
        unclosed = (BoardRow.id == board_id, BoardRow.closed.is_(None))
        session.execute(update(BoardRow).where(*unclosed).values(closed=reading.utc_now()))
        row = _row(session, slug)
        session.refresh(row)
        return reading.board(row)


def note_waiting(store: Store, board_id: int, waits: str, *, now: datetime) -> None:
    """Notes why a worker cannot play a board, unless another one is playing it; "": it can."""
    played = select(SubmissionRow.id).where(
        SubmissionRow.board_id == board_id, SubmissionRow.state == State.RUNNING, SubmissionRow.lease_until > now
    )
    noted = update(BoardRow).where(BoardRow.id == board_id).values(waits=clean(waits))
    with store.writing() as session:
        session.execute(noted.where(~played.exists()) if waits else noted)


def _left_by_its_owner(row: SubmissionRow, whole: bool) -> str:
    """Why a submission is brought to its end by nobody when its season ends; "": a worker does it."""
    if row.state is State.RUNNING and row.kind is Kind.REMOTE and row.lease_until is None:
        return (
            f"the season ended before its owner had played it to its end; {row.episodes} of {row.total} episodes were"
        )
    if row.state is State.UPLOADED and not whole:
        return "the season ended before all of it had arrived"
    if row.state is State.VALIDATED and row.kind is not Kind.CHECKPOINT:
        return "the season ended before it was queued"
    return ""


def hash_of(digits: str) -> str:
    """What is published of a secret's decimal digits: SHA-256 in hexadecimal."""
    return hashlib.sha256(digits.encode()).hexdigest()


def _row(session: Session, slug: str) -> BoardRow:
    row = session.scalar(select(BoardRow).where(BoardRow.slug == slug))
    if row is None:
        raise NotFound(f"there is no board {slug!r}")
    return row


def _instance_row(environment_id: int, instance: Instance, *, showcase: bool) -> InstanceRow:
    return InstanceRow(
        environment_id=environment_id,
        draw=instance.draw,
        showcase=showcase,
        level_seed=str(instance.level_seed),
        instance_id=instance.instance_id,
        world_id=instance.world_id,
        floor=instance.floor,
        ceiling=instance.ceiling,
    )
