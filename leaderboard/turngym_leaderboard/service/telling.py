"""What the store gives, as the API tells it."""

from turngym_leaderboard.lifecycle import Visibility
from turngym_leaderboard.service.messages import Board, Environment, Submission
from turngym_leaderboard.store import values


def told_board(told: values.Board) -> Board:
    """A board as the API tells it."""
    definition = told.definition
    return Board(
        slug=told.slug,
        title=definition.title,
        season=definition.season,
        about=definition.about,
        sealed=definition.sealed,
        submissions_per_owner=definition.submissions_per_owner,
        remote_submissions_per_owner=definition.remote_submissions_per_owner if definition.sealed else 0,
        episodes=definition.episodes,
        secret_hash=told.secret_hash,
        secret=told.secret,
        created=told.created,
        closed=told.closed,
        environments=tuple(map(_environment, told.environments)),
    )


def _environment(told: values.Environment) -> Environment:
    definition = told.definition
    return Environment(
        label=told.label,
        id=definition.id,
        version=told.version,
        split_epoch=told.split_epoch,
        options_json=told.options_json,
        split=definition.split.value,
        instances=definition.instances,
        attempts=definition.attempts,
        showcase=definition.showcase,
        decoding=str(definition.decoding),
        overall=definition.overall,
        **definition.limits.model_dump(),
    )


def told_submission(told: values.Submission, board: values.Board) -> Submission:
    """A submission of this board as the API tells it."""
    return Submission(
        id=told.public_id,
        board=board.slug,
        name=told.name,
        kind=told.kind,
        owner=told.owner.name if told.owner else None,
        visibility=Visibility.PUBLIC if told.public else Visibility.PRIVATE,
        state=told.state,
        reason=told.reason_on(board),
        episodes=told.episodes,
        total=told.total,
        description=told.description,
        created=told.created,
        queued=told.queued,
        started=told.started,
        finished=told.finished,
    )
