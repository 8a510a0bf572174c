"""Rows of tables as the values that callers get."""

from datetime import UTC, datetime

from turngym_client import Limits
from turngym_leaderboard.boards import BoardDefinition
from turngym_leaderboard.protocol import Instance, Selection
from turngym_leaderboard.record import Statistics
from turngym_leaderboard.store.models import (
    BoardRow,
    EnvironmentRow,
    EpisodeRow,
    FileRow,
    InstanceRow,
    OwnerRow,
    ResultRow,
    SubmissionRow,
    TokenRow,
)
from turngym_leaderboard.store.values import (
    Board,
    Deal,
    Environment,
    Episode,
    Owner,
    Result,
    Submission,
    SubmissionFile,
    Token,
)


def utc_now() -> datetime:
    return datetime.now(UTC)


def owner(row: OwnerRow) -> Owner:
    return Owner(id=row.id, name=row.name, created=row.created)


def token(row: TokenRow) -> Token:
    return Token(
        id=row.id,
        owner=owner(row.owner),
        role=row.role,
        created=row.created,
        expires=row.expires,
        revoked=row.revoked,
    )


def board(row: BoardRow) -> Board:
    """Without the secret while the season lasts."""
    definition = BoardDefinition.model_validate(row.definition)
    return Board(
        id=row.id,
        slug=row.slug,
        definition=definition,
        secret_hash=row.secret_hash,
        secret=row.secret if row.closed is not None else None,
        created=row.created,
        closing=row.closing,
        closed=row.closed,
        waits=row.waits,
        environments=tuple(
            Environment(
                id=environment.id,
                label=environment.label,
                definition=definition.environments[environment.position],
                version=environment.version,
                split_epoch=environment.split_epoch,
                options_json=environment.options_json,
            )
            for environment in row.environments
        ),
    )


def deal(row: EnvironmentRow, instances: list[InstanceRow]) -> Deal:
    """Instances in the order of their draws."""
    ordered = sorted(instances, key=lambda each: each.draw)
    return Deal(
        scored=Selection(
            instances=tuple(instance(each) for each in ordered if not each.showcase),
            draws=row.draws,
            version=row.version,
            split_epoch=row.split_epoch,
            options_json=row.options_json,
            limits=Limits(**row.limits),  # pyright: ignore[reportArgumentType] — as `boards.create` wrote them
        ),
        showcase=tuple(instance(each) for each in ordered if each.showcase),
    )


def instance(row: InstanceRow) -> Instance:
    return Instance(
        draw=row.draw,
        level_seed=int(row.level_seed),
        instance_id=row.instance_id,
        world_id=row.world_id,
        floor=row.floor,
        ceiling=row.ceiling,
    )


def submission(row: SubmissionRow) -> Submission:
    return Submission(
        id=row.id,
        public_id=row.public_id,
        board_id=row.board_id,
        owner=owner(row.owner) if row.owner is not None else None,
        name=row.name,
        kind=row.kind,
        visibility=row.visibility,
        description=dict(row.description),
        state=row.state,
        reason=row.reason,
        episodes=row.episodes,
        total=row.total,
        created=row.created,
        changed=row.changed,
        queued=row.queued,
        started=row.started,
        finished=row.finished,
        hidden=row.hidden,
    )


def file(row: FileRow) -> SubmissionFile:
    return SubmissionFile(name=row.name, size=row.size, sha256=row.sha256, received=row.received)


def episode(row: EpisodeRow, label: str) -> Episode:
    return Episode(
        id=row.id,
        environment=label,
        draw=row.draw,
        attempt=row.attempt,
        showcase=row.showcase,
        outcome=row.outcome,
        success=row.success,
        total_reward=row.total_reward,
        turns=row.turns,
        tokens=row.tokens,
        end_reason=row.end_reason,
        sealed=row.sealed,
        finished=row.finished,
    )


def result(row: ResultRow, label: str) -> Result:
    return Result(
        environment=label,
        statistics=Statistics.model_validate_json(row.statistics) if row.statistics is not None else None,
        unavailable=row.unavailable,
        computed=row.computed,
    )
