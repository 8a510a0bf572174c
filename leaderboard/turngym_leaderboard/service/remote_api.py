"""The calls of remote agents: begin a submission, ask for episodes, answer turns.

Nothing is lost by asking again: the same key begins the same submission, the same episodes go on at the same turn, and
the same answer to a turn gets the same answer.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Final, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Depends, Path, Response
from fastapi.concurrency import run_in_threadpool

from turngym_client import answer_form
from turngym_leaderboard.remote.proxy import Proxy
from turngym_leaderboard.service import messages
from turngym_leaderboard.service.access import CallerOf, OwnerOf, take
from turngym_leaderboard.service.api import PREFIX, Id, Key, Slug, known_submission, owned
from turngym_leaderboard.service.messages import Ask, NewRemote, Problem, Turn
from turngym_leaderboard.service.problems import problem
from turngym_leaderboard.service.state import Service, ServiceOf
from turngym_leaderboard.service.telling import told_submission
from turngym_leaderboard.store import boards, remote, submissions
from turngym_leaderboard.store.values import Board, Kind, RemoteEpisode, Submission

router: Final = APIRouter(
    prefix=PREFIX, responses={status: {"model": Problem} for status in (401, 403, 404, 409, 422, 429, 503)}
)

EpisodeId = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="Of an episode that was dealt.")]
T = TypeVar("T")


@router.post("/boards/{slug}/remote", status_code=201)
async def begin(
    service: ServiceOf, owner: OwnerOf, slug: Slug, wanted: NewRemote, idempotency_key: Key, response: Response
) -> messages.Submission:
    """Begins a submission that the caller's own program plays; it counts against the owner's number at once.

    Sent again with the same key it answers 200 with the submission that there is.
    """

    def work() -> messages.Submission:
        proxy = _proxy(service)
        board = boards.find(service.store, slug)
        public_id = submissions.public_id_of(owner, idempotency_key)
        known = known_submission(service, public_id)
        if known is None:
            take(service.beginnings, str(owner.id))
        else:
            response.status_code = 200
            if (known.kind, known.board_id, known.name) != (Kind.REMOTE, board.id, wanted.name):
                raise problem(409, "this key began another submission; take a new one")
        begun = proxy.open(board, owner, name=wanted.name, visibility=wanted.visibility, public_id=public_id)
        return told_submission(begun, board)

    return await _playing(service, work)


@router.post("/submissions/{id}/play")
async def ask(service: ServiceOf, caller: CallerOf, id: Id, wanted: Ask) -> messages.Dealt:
    """The episodes that go on, and further ones until so many do, at most the board's batch.

    Each is dealt once, whether it is played or not. Its time runs from now: ask for as many as are played at once.
    """

    def work() -> messages.Dealt:
        proxy = _proxy(service)
        submission, board = owned(service, caller.viewer, id)
        dealt = proxy.deal(submission, board, wanted.episodes)
        return messages.Dealt(
            episodes=tuple(_told(board, each) for each in dealt), left=remote.left(service.store, submission)
        )

    return await _playing(service, work)


@router.get("/submissions/{id}/play/{episode}")
async def read(service: ServiceOf, caller: CallerOf, id: Id, episode: EpisodeId) -> messages.RemoteEpisode:
    """An episode that was dealt, with what was read and answered so far."""

    def work() -> messages.RemoteEpisode:
        submission, board = owned(service, caller.viewer, id)
        return _told(board, _proxy(service).find(submission, episode))

    return await run_in_threadpool(work)


async def _arrived() -> datetime:
    """When the whole of a request was there, since its body has been read by then."""
    return datetime.now(UTC)


@router.post("/submissions/{id}/play/{episode}")
async def answer(
    # The first one, so that it waits for no other.
    arrived: Annotated[datetime, Depends(_arrived)],
    service: ServiceOf,
    caller: CallerOf,
    id: Id,
    episode: EpisodeId,
    turn: Turn,
) -> messages.Step:
    """Plays a turn, once. The same answer to the same turn gets the same; another one is refused with 409.

    It counts as given when it has arrived. 503 means that no environment server could be reached, or that the board's
    own database failed: no time runs then; send the same again.
    """

    def keep() -> tuple[Submission, Board, RemoteEpisode]:
        submission, board = owned(service, caller.viewer, id)
        kept = _proxy(service).keep(submission, episode, turn.turn, turn.written, arrived=arrived)
        return submission, board, kept

    # Whoever waits for environment servers holds up no other's answer.
    submission, board, kept = await run_in_threadpool(keep)

    def work() -> messages.Step:
        played = _proxy(service).answer(submission, board, kept, turn.turn, turn.written, arrived=arrived)
        return _step(played, turn.turn)

    return await _playing(service, work)


async def _playing(service: Service, work: Callable[[], T]) -> T:
    """Does it in a thread of those that may wait for environment servers."""
    return await anyio.to_thread.run_sync(work, limiter=service.playing)


def _proxy(service: Service) -> Proxy:
    if service.proxy is None:
        raise problem(409, "this service has no environment server, and so plays no remote agents; tell its operator")
    return service.proxy


def _told(board: Board, episode: RemoteEpisode) -> messages.RemoteEpisode:
    begun, played = episode.start, episode.played
    if begun is None:
        raise problem(409, "the episode has not begun; ask for episodes once more")
    return messages.RemoteEpisode(
        id=episode.public_id,
        environment=next(each.label for each in board.environments if each.id == episode.environment_id),
        instructions=begun.instructions,
        form=answer_form(begun.action_separator, begun.max_actions_per_turn),
        action_separator=begun.action_separator,
        max_actions_per_turn=begun.max_actions_per_turn,
        turns=tuple(messages.Exchange(observation=e.record.observation, text=e.record.text) for e in played),
        turn=len(played),
        observation=played[-1].observation if played else begun.observation,
        due=episode.due,
    )


def _step(episode: RemoteEpisode, turn: int) -> messages.Step:
    """What the answer to this turn came to, also where the episode has gone on since."""
    outcome = episode.turns[turn].outcome
    if outcome is None:
        return messages.Step(turn=turn + 1, observation="", done=True, due=None, fault=episode.fault)
    return messages.Step(
        turn=turn + 1,
        observation=outcome.observation,
        done=outcome.done,
        due=episode.due if turn + 1 == len(episode.turns) else None,
        fault="",
    )
