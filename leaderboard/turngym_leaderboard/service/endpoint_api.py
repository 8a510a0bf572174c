"""The calls for endpoints: which ones the board's operator has registered, and submitting one of them."""

from typing import Final

from fastapi import APIRouter, Response

from turngym_leaderboard.endpoints import RegisteredEndpoint
from turngym_leaderboard.lifecycle import Kind, State
from turngym_leaderboard.service import messages
from turngym_leaderboard.service.access import Caller, CallerOf, OwnerOf, take
from turngym_leaderboard.service.api import PREFIX, Key, Slug, known_submission
from turngym_leaderboard.service.messages import NewEndpoint, Problem
from turngym_leaderboard.service.problems import problem
from turngym_leaderboard.service.state import Service, ServiceOf
from turngym_leaderboard.service.telling import told_submission
from turngym_leaderboard.store import Taken, boards, submissions
from turngym_leaderboard.store.values import Board, Owner, Submission

router: Final = APIRouter(
    prefix=PREFIX, responses={status: {"model": Problem} for status in (401, 403, 404, 409, 422, 429)}
)


@router.get("/endpoints")
def list_endpoints(service: ServiceOf, owner: OwnerOf, caller: CallerOf) -> list[messages.Endpoint]:
    """The endpoints that the caller may submit; where they are is told to admins."""
    return [
        messages.Endpoint(name=name, url=each.url if caller.viewer.admin else None, model=each.model)
        for name, each in service.endpoints.items()
        if _may_submit(caller, each)
    ]


@router.post("/boards/{slug}/endpoints", status_code=201)
def submit_endpoint(
    service: ServiceOf,
    owner: OwnerOf,
    caller: CallerOf,
    slug: Slug,
    wanted: NewEndpoint,
    idempotency_key: Key,
    response: Response,
) -> messages.Submission:
    """Submits an endpoint that the board's operator has registered; it is queued at once.

    Sent again with the same key it answers 200 with the submission that there is.
    """
    board = boards.find(service.store, slug)
    registered = service.endpoints.get(wanted.endpoint)
    if registered is None or not _may_submit(caller, registered):
        raise problem(404, f"there is no endpoint {wanted.endpoint!r} that you may submit; ask the board's operator")
    public_id = submissions.public_id_of(owner, idempotency_key)
    known = known_submission(service, public_id)
    if known is None:
        take(service.beginnings, str(owner.id))
        known = _create(service, board, owner, wanted, registered, public_id)
    else:
        response.status_code = 200
        told = (known.kind, known.board_id, known.name, known.description.get("endpoint"))
        if told != (Kind.ENDPOINT, board.id, wanted.name, wanted.endpoint):
            raise problem(409, "this key began another submission; take a new one")
    return told_submission(_queued(service, known), board)


def _create(
    service: Service, board: Board, owner: Owner, wanted: NewEndpoint, registered: RegisteredEndpoint, public_id: str
) -> Submission:
    try:
        return submissions.create(
            service.store,
            board,
            owner,
            public_id=public_id,
            name=wanted.name,
            kind=Kind.ENDPOINT,
            visibility=wanted.visibility,
            description={"kind": "endpoint", "endpoint": wanted.endpoint, "model": registered.model},
        )
    except Taken:
        # The same request at the same time; there is one now.
        return submissions.find(service.store, public_id)


def _queued(service: Service, submission: Submission) -> Submission:
    """There is nothing to examine. A process that ended in between left it on the way."""
    for before, after in ((State.UPLOADED, State.VALIDATED), (State.VALIDATED, State.QUEUED)):
        if submission.state is before:
            submission = submissions.set_state(service.store, submission.public_id, after)
    return submission


def _may_submit(caller: Caller, endpoint: RegisteredEndpoint) -> bool:
    return caller.viewer.admin or (caller.owner is not None and caller.owner.name in endpoint.owners)
