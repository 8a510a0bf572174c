"""Boards: made with their instances and scripted rows in one transaction, then never changed but to be closed."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import func, select
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
from turngym_leaderboard.store.submissions import new_public_id
from turngym_leaderboard.store.values import Board, Deal, Kind, State, Visibility

_UNFINISHED = (State.QUEUED, State.RUNNING)
_UNTRIED = (State.UPLOADED, State.VALIDATED)


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
        raise Taken(f"there is a board {definition.slug!r} already; a new season needs another name for it") from error


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


def close(store: Store, slug: str) -> Board:
    """Ends the season: the secret is published, nothing more is submitted, and what is not queued yet has failed.

    Raises:
        NotFound: there is no such board.
        WrongState: submissions are still played, or wait for it.
    """
    now = reading.utc_now()
    with store.writing() as session:
        row = _row(session, slug)
        waiting = session.scalar(
            select(func.count()).where(SubmissionRow.board_id == row.id, SubmissionRow.state.in_(_UNFINISHED))
        )
        if waiting:
            raise WrongState(f"{waiting} submissions of {slug} are queued or running; let a worker finish them first")
        untried = select(SubmissionRow).where(SubmissionRow.board_id == row.id, SubmissionRow.state.in_(_UNTRIED))
        for submission in session.scalars(untried):
            submission.state, submission.reason = State.FAILED, "the season ended before it was queued"
            submission.changed = submission.finished = now
        row.closed = row.closed or now
        session.flush()
        return reading.board(row)


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
