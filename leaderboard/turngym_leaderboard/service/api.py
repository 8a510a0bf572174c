"""The calls of the API. Each reads as its rule does: who may, what is asked, what is told.

What a caller may not see answers as if it were not there.
"""

from typing import Annotated, Final

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from turngym_leaderboard import visibility
from turngym_leaderboard.examining import discard
from turngym_leaderboard.intake.folder import check_sizes
from turngym_leaderboard.service import messages, uploads
from turngym_leaderboard.service.access import CallerOf, OwnerOf, take
from turngym_leaderboard.service.messages import MAX_PAGE, Change, NewSubmission, Problem
from turngym_leaderboard.service.problems import problem
from turngym_leaderboard.service.state import Service, ServiceOf
from turngym_leaderboard.service.telling import told_board, told_submission
from turngym_leaderboard.store import NotFound, Taken, boards, episodes, submissions, values
from turngym_leaderboard.store.episodes import Filter
from turngym_leaderboard.store.values import Board, Kind, State, Submission, SubmissionFile
from turngym_leaderboard.visibility import Viewer

PREFIX: Final = "/api/v1"

router: Final = APIRouter(
    prefix=PREFIX,
    responses={status: {"model": Problem} for status in (401, 403, 404, 409, 422, 429)},
)

Id = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="Of a submission.")]
Slug = Annotated[str, Path(max_length=130, description="Of a board: its name and season.")]
Key = Annotated[
    str,
    Header(
        pattern="^[A-Za-z0-9_-]{22,64}$",
        description="Random, of the sender's choice: a request that is sent again with it begins nothing new.",
    ),
]


@router.get("/boards")
def list_boards(service: ServiceOf) -> list[messages.Board]:
    """All boards, newest first."""
    return [told_board(board) for board in boards.every(service.store)]


@router.get("/boards/{slug}")
def read_board(service: ServiceOf, slug: Slug) -> messages.Board:
    """A board: what is played on it, and how."""
    return told_board(boards.find(service.store, slug))


@router.get("/boards/{slug}/submissions")
def list_rows(service: ServiceOf, caller: CallerOf, slug: Slug) -> list[messages.Row]:
    """The submissions of a board with what they came to; of those that failed, only what the caller may change."""
    board = boards.find(service.store, slug)
    results = episodes.results(service.store, board)
    return [
        _row(each, board, results.get(each.id, []))
        for each in submissions.of_board(service.store, board)
        if visibility.may_see_listed(caller.viewer, each)
    ]


@router.post("/boards/{slug}/submissions", status_code=201)
def submit(
    service: ServiceOf, owner: OwnerOf, slug: Slug, wanted: NewSubmission, idempotency_key: Key, response: Response
) -> messages.Submission:
    """Begins a submission: what is announced here is then sent file by file.

    Sent again with the same key it answers 200 with the submission that there is.
    """
    store = service.store
    board = boards.find(store, slug)
    sizes = {file.name: file.size for file in wanted.files}
    if len(sizes) < len(wanted.files):
        raise problem(422, "a file is announced twice")
    check_sizes(sizes, service.intake)
    public_id = submissions.public_id_of(owner, idempotency_key)
    known = known_submission(service, public_id)
    if known is None:
        take(service.beginnings, str(owner.id))
        known = _create(service, owner, board, wanted, public_id)
    else:
        response.status_code = 200
    if not _same(service, known, board, wanted):
        raise problem(409, "this key began another submission; take a new one")
    return told_submission(known, board)


@router.get("/submissions")
def list_own(service: ServiceOf, owner: OwnerOf) -> list[messages.Submission]:
    """The caller's own submissions on all boards, newest first."""
    found = {board.id: board for board in boards.every(service.store)}
    return [told_submission(each, found[each.board_id]) for each in submissions.of_owner(service.store, owner)]


@router.get("/submissions/{id}")
def read_submission(service: ServiceOf, caller: CallerOf, id: Id) -> messages.Submission:
    """A submission and where it stands."""
    submission, board = seen(service, caller.viewer, id)
    before = submissions.examined_after(service.store, submission)
    return told_submission(submission, board).model_copy(update={"examined_after": before})


@router.patch("/submissions/{id}")
def change_submission(service: ServiceOf, caller: CallerOf, id: Id, change: Change) -> messages.Submission:
    """Shows a submission to everybody, or to its owner alone."""
    submission, board = owned(service, caller.viewer, id)
    if submission.hidden:
        raise problem(403, f"submission {id} is hidden by the board's operator; ask there")
    return told_submission(submissions.set_visibility(service.store, id, change.visibility), board)


@router.post("/submissions/{id}/withdraw")
def withdraw(service: ServiceOf, caller: CallerOf, id: Id) -> messages.Submission:
    """Ends a submission that is not scored yet. It goes on counting against its owner's number once it was played."""
    _, board = owned(service, caller.viewer, id)
    ended = submissions.set_state(service.store, id, State.FAILED, reason="withdrawn")
    discard(service.store, id)
    return told_submission(ended, board)


@router.get("/submissions/{id}/files")
def list_files(service: ServiceOf, caller: CallerOf, id: Id) -> list[messages.File]:
    """The files of a submission, and how much of each has arrived. For its owner."""
    owned(service, caller.viewer, id)
    return [messages.File.model_validate(file) for file in submissions.files(service.store, id)]


@router.patch("/submissions/{id}/files/{name:path}")
async def send_part(
    service: ServiceOf,
    caller: CallerOf,
    id: Id,
    name: Annotated[str, Path(max_length=200)],
    upload_offset: Annotated[int, Header(ge=0, description="Byte of the file at which the body begins.")],
    request: Request,
) -> messages.File:
    """Brings a part of a file, as the request's body (application/octet-stream), and tells where the file stands.

    What arrived of a part that was cut off is kept: ask for `files`, and go on from there. When all files are whole the
    submission is examined and queued without a further call.
    """
    submission, _ = await run_in_threadpool(owned, service, caller.viewer, id)
    return messages.File.model_validate(
        await uploads.receive_part(service.store, submission, name, upload_offset, aiter(request.stream()))
    )


@router.get("/submissions/{id}/results")
def read_results(service: ServiceOf, caller: CallerOf, id: Id) -> list[messages.Result]:
    """What a submission came to, by environment; empty until it has been scored."""
    submission, board = seen(service, caller.viewer, id)
    found = episodes.results(service.store, board).get(submission.id, [])
    return [messages.Result.model_validate(result) for result in found]


@router.get("/submissions/{id}/episodes")
def list_episodes(
    service: ServiceOf,
    caller: CallerOf,
    id: Id,
    environment: Annotated[str | None, Query(description="Its label.", max_length=64)] = None,
    outcome: Annotated[str | None, Query(max_length=20)] = None,
    success: bool | None = None,
    showcase: bool | None = None,
    draw: Annotated[int | None, Query(ge=0, lt=1 << 31)] = None,
    offset: Annotated[int, Query(ge=0, lt=1 << 31)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> messages.EpisodeList:
    """Episodes of a submission that the caller may see: of a sealed board, those of its showcase."""
    submission, board = seen(service, caller.viewer, id)
    if not visibility.may_see_episode(caller.viewer, board, submission, showcase=False):
        if showcase is False:
            return messages.EpisodeList(total=0, offset=offset, episodes=())
        showcase = True
    wanted = Filter(
        environments=None if environment is None else [environment],
        showcase=showcase,
        outcome=outcome,
        success=success,
        draw=draw,
    )
    lines, total = episodes.listing(service.store, submission, wanted, offset=offset, limit=limit)
    return messages.EpisodeList(
        total=total, offset=offset, episodes=tuple(messages.EpisodeLine.model_validate(line) for line in lines)
    )


@router.get("/submissions/{id}/episodes/{number}")
def read_episode(
    service: ServiceOf, caller: CallerOf, id: Id, number: Annotated[int, Path(ge=0, lt=1 << 31)]
) -> messages.Episode:
    """An episode turn by turn."""
    submission, board = seen(service, caller.viewer, id)
    played = episodes.read(service.store, submission, number)
    if not visibility.may_see_episode(caller.viewer, board, submission, showcase=played.line.showcase):
        raise NotFound(f"submission {id} has no episode {number}")
    return messages.Episode.model_validate(played)


def _row(submission: Submission, board: Board, results: list[values.Result]) -> messages.Row:
    return messages.Row(
        submission=told_submission(submission, board),
        results=tuple(messages.Result.model_validate(result) for result in results),
    )


def seen(service: Service, viewer: Viewer, id: str) -> tuple[Submission, Board]:
    """A submission that this viewer may see, with its board; for others there is none."""
    submission = submissions.find(service.store, id)
    if not visibility.may_see_submission(viewer, submission):
        raise NotFound(f"there is no submission {id!r}")
    return submission, boards.of_id(service.store, submission.board_id)


def owned(service: Service, viewer: Viewer, id: str) -> tuple[Submission, Board]:
    """A submission that this viewer may change."""
    submission, board = seen(service, viewer, id)
    if not visibility.may_change(viewer, submission):
        raise problem(403, f"submission {id} is not yours")
    return submission, board


def _create(service: Service, owner: values.Owner, board: Board, wanted: NewSubmission, public_id: str) -> Submission:
    try:
        return submissions.create(
            service.store,
            board,
            owner,
            public_id=public_id,
            name=wanted.name,
            kind=Kind.CHECKPOINT,
            visibility=wanted.visibility,
            files=[
                SubmissionFile(name=file.name, size=file.size, sha256=file.sha256, received=0) for file in wanted.files
            ],
            most_open=uploads.MAX_OPEN,
            room=uploads.room(service.store),
        )
    except Taken:
        # The same request at the same time; there is one now.
        return submissions.find(service.store, public_id)


def known_submission(service: Service, public_id: str) -> Submission | None:
    try:
        return submissions.find(service.store, public_id)
    except NotFound:
        return None


def _same(service: Service, known: Submission, board: Board, wanted: NewSubmission) -> bool:
    """Whether a submission is the one that is wanted; its visibility may have been changed since."""
    there = {(file.name, file.size, file.sha256) for file in submissions.files(service.store, known.public_id)}
    asked = {(file.name, file.size, file.sha256) for file in wanted.files}
    return known.board_id == board.id and known.name == wanted.name and there == asked
