"""A worker's slot: claims one submission after the other, holds it by a lease, plays and scores it. Between two parts
of its play it examines what has arrived.

Knows nothing of the process that it is, or of other slots but through the database.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from turngym.sealed import SealKey
from turngym_client import Client
from turngym_leaderboard import scoring
from turngym_leaderboard.agents import Agent, AgentUnavailable
from turngym_leaderboard.agents.confined_checkpoint import Bounds, ConfinedCheckpoint
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.anew import TOLD, play_anew
from turngym_leaderboard.endpoints import Endpoints, RegisteredEndpoint, registered_agent
from turngym_leaderboard.examining import examine_next
from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.playing import (
    CannotPlay,
    OverranTooOften,
    ServersGone,
    check_board,
    count_overrun,
    play_submission,
)
from turngym_leaderboard.remote.seats import not_dealt
from turngym_leaderboard.sealing import seal_of
from turngym_leaderboard.store import LeaseLost, Store, boards, work
from turngym_leaderboard.store.values import Board, Kind, State, Submission

PLAYED: Final = (Kind.SCRIPTED, Kind.CHECKPOINT, Kind.REMOTE)
"""What a slot plays; of remote agents, which are played by then, it computes the numbers."""

_IDLE_SECONDS: Final = 1.0
"""Between two looks into an empty queue."""
_GONE_SECONDS: Final = 5.0
"""Before a server that did not answer is tried again."""
_AGAIN_SECONDS: Final = 60.0
_AGAIN_AT_MOST: Final = 600.0
"""Before a board that these servers cannot play is looked at again; doubled each time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotConfig:
    """How a slot works.

    Attributes:
        device: where checkpoints run. threads: of torch. bounds: what one may take.
        intake: how much a submission may be.
        lease_seconds: after so long without a sign of life its submission is taken over.
        until_idle: end when nothing waits and nothing runs, instead of waiting for more.
        seal_key: the board's and the servers'; None: seeds are sent openly.
        endpoints: that are played; empty: submissions of endpoints are left to other workers.
    """

    device: str
    threads: int
    bounds: Bounds
    intake: IntakeLimits
    lease_seconds: float
    until_idle: bool
    seal_key: SealKey | None
    endpoints: Endpoints = field(default_factory=dict[str, RegisteredEndpoint])

    @property
    def lease(self) -> timedelta:
        return timedelta(seconds=self.lease_seconds)


@dataclass(frozen=True, slots=True)
class _Left:
    """A board that these servers could not play. `again`: monotonic time at which it is looked at again, `after` s."""

    told: str
    after: float
    again: float


class Slot:
    """Plays submissions: `run` in one thread, `stop` from another."""

    def __init__(self, config: SlotConfig, store: Store, client: Client) -> None:
        self._left: dict[int, _Left] = {}
        self._stopping = threading.Event()
        self._claiming = threading.Lock()
        self._lease: work.Lease | None = None
        self._config = config
        self._store = store
        self._client = client
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    @property
    def unplayable(self) -> set[int]:
        """Numbers of boards that these servers could not play, whose submissions are left to other workers."""
        return set(self._left)

    def run(self) -> None:
        """Plays until nothing waits, if that is what was asked for; else until it is stopped."""
        for board in boards.every(self._store):
            scoring.refresh(self._store, board)
        kinds = (*PLAYED, Kind.ENDPOINT) if self._config.endpoints else PLAYED
        while not self._stopping.is_set():
            lease = self._claim(kinds)
            if lease is not None:
                self._play(lease)
            if self._examine() or lease is not None:
                continue
            if self._config.until_idle and not work.unfinished(self._store, kinds, without=self.unplayable):
                return
            self._stopping.wait(_IDLE_SECONDS)

    def stop(self) -> None:
        """Puts what it plays back into the queue at once. `run` returns when it comes to keep something next, which it
        can no longer do; that may be a long turn later, and need not be waited for.
        """
        self._stopping.set()
        with self._claiming:
            if self._lease is not None:
                self._release(self._lease)

    def _claim(self, kinds: Collection[Kind]) -> work.Lease | None:
        now = datetime.now(UTC)
        until = now + self._config.lease
        left = {number for number, board in self._left.items() if board.again > time.monotonic()}
        with self._claiming:
            if self._stopping.is_set():
                return None
            self._lease = work.claim(self._store, self._holder, kinds, without=left, now=now, until=until)
            return self._lease

    def _play(self, lease: work.Lease) -> None:
        submission = lease.submission
        told = f"{submission.name} ({submission.public_id})"
        if submission.board_id not in self._left:
            _log.info("%s: %d of %d episodes are played", told, submission.episodes, submission.total)
        try:
            with _kept(self._store, lease, self._config.lease):
                board = boards.of_id(self._store, submission.board_id)
                state, reason = self._play_and_finish(lease, board)
            if self._left.pop(board.id, None) is not None:
                _log.info("%s can be played again", board.slug)
            _log.info("%s: %s", told, f"{state.value}: {reason}" if reason else state.value)
            scoring.refresh(self._store, board)
        except LeaseLost as error:
            if not self._stopping.is_set():
                _log.warning("%s: %s", told, error)
        except CannotPlay as error:
            self._leave(submission.board_id, str(error))
            self._release(lease, error.public)
        except ServersGone as error:
            _log.warning("%s: no server answers, it is tried again later: %s", told, error)
            self._release(lease, "no environment server answers")
            self._stopping.wait(_GONE_SECONDS)
        except SQLAlchemyError:
            raise  # The database's trouble, which is no submission's.
        except Exception as error:
            _log.exception("%s could not be played", told)
            self._failed(lease, error)

    def _examine(self) -> bool:
        """Whether there was something to examine. What fails in it is nothing of what is played meanwhile."""
        if self._stopping.is_set():
            return False
        try:
            return examine_next(self._store, self._config.intake, device=self._config.device) is not None
        except Exception:
            _log.exception("nothing could be examined")
            return False

    def _play_and_finish(self, lease: work.Lease, board: Board) -> tuple[State, str]:
        submission = lease.submission
        if submission.kind is Kind.REMOTE:
            return self._score(lease, board, not_dealt(board))
        check_board(self._client, board)
        if board.waits:
            boards.note_waiting(self._store, board.id, "", now=datetime.now(UTC))
        key = self._config.seal_key
        try:
            with agent_of(self._store, board, submission, self._config) as agent:
                work.describe(self._store, lease, agent.description)
                unavailable = play_submission(
                    self._client,
                    self._store,
                    lease,
                    board,
                    agent,
                    lambda environment: seal_of(key, environment),
                    whole_parts=submission.kind is not Kind.ENDPOINT,
                    between_parts=self._examine,  # What arrives does not wait until all that came before is played.
                )
                if submission.kind is Kind.CHECKPOINT:
                    self._play_anew(lease, board, agent)
        except AgentUnavailable as error:
            return self._finish(lease, State.FAILED, str(error))
        except OverranTooOften as error:
            told = f"{work.MOST_FAILURES} times it {error}; try it with `leaderboard evaluate`"
            return self._finish(lease, State.FAILED, told)
        return self._score(lease, board, unavailable)

    def _play_anew(self, lease: work.Lease, board: Board, agent: Agent) -> None:
        """Tells whether a sample of what was played comes out the same once more. Raises as `play_submission` does."""
        key = self._config.seal_key
        try:
            found = play_anew(
                self._client,
                self._store,
                board,
                lease.submission,
                agent,
                lambda environment: seal_of(key, environment),
                after_part=lambda guarded: count_overrun(self._store, lease, guarded),
            )
        except AgentUnavailable as error:
            told = f"it could not be had any more: {error}"
        else:
            if not found.played:
                return
            told = str(found)
        work.describe(self._store, lease, {TOLD: told})

    def _score(self, lease: work.Lease, board: Board, unavailable: Mapping[int, str]) -> tuple[State, str]:
        results = scoring.numbers(self._store, board, lease.submission, unavailable)
        state, reason = scoring.ending(self._store, board, lease.submission, results)
        return self._finish(lease, state, reason, results)

    def _finish(
        self, lease: work.Lease, state: State, reason: str, results: Sequence[work.NewResult] = ()
    ) -> tuple[State, str]:
        work.finish(self._store, lease, state, results=results, reason=reason, now=datetime.now(UTC))
        return state, reason

    def _failed(self, lease: work.Lease, error: Exception) -> None:
        """Ends a submission on which workers fail again and again."""
        with suppress(LeaseLost):
            if work.count_failure(self._store, lease) < work.MOST_FAILURES:
                work.release(self._store, lease, now=datetime.now(UTC))
                return
            told = (
                f"the board's worker failed on it {work.MOST_FAILURES} times ({type(error).__name__}); its operator "
                "finds more in the worker's log"
            )
            self._finish(lease, State.FAILED, told)

    def _leave(self, board_id: int, told: str) -> None:
        """Leaves a board to other workers for a while, a longer one each time."""
        before = self._left.get(board_id)
        if before is None or before.told != told:
            _log.error("%s; its submissions are left to other workers, and it is looked at again", told)
        after = _AGAIN_SECONDS if before is None else min(2 * before.after, _AGAIN_AT_MOST)
        self._left[board_id] = _Left(told, after, time.monotonic() + after)

    def _release(self, lease: work.Lease, waits: str = "") -> None:
        """Puts a submission back. `waits`: why its board cannot be played here, for everybody to read."""
        with suppress(LeaseLost):
            work.release(self._store, lease, now=datetime.now(UTC))
        if waits:
            boards.note_waiting(self._store, lease.submission.board_id, waits, now=datetime.now(UTC))


@contextmanager
def agent_of(store: Store, board: Board, submission: Submission, config: SlotConfig) -> Generator[Agent]:
    """The agent that a submission is, within the block.

    Raises:
        AgentUnavailable: it cannot be loaded, whatever its files made of the attempt.
        CannotPlay: this worker plays no checkpoints.
    """
    if submission.kind is Kind.SCRIPTED:
        yield {agent.name: agent for agent in (RandomAgent(), OracleAgent())}[submission.name]
        return
    if submission.kind is Kind.ENDPOINT:
        most_tokens = board.definition.max_response_tokens
        yield registered_agent(config.endpoints, submission.name, submission.description["endpoint"], most_tokens)
        return
    assert submission.kind is Kind.CHECKPOINT, submission.kind
    if find_spec("torch") is None or find_spec("turngym_trainer") is None:
        raise CannotPlay(
            "checkpoints need the trainer: pip install 'turngym[trainer]'", "the worker here plays no checkpoints"
        )
    with ConfinedCheckpoint(
        store.folder(submission.public_id),
        name=submission.name,
        bounds=config.bounds,
        conversations=board.definition.batch,
        device=config.device,
        threads=config.threads,
        most_tokens=board.definition.max_response_tokens,
    ) as agent:
        yield agent


@contextmanager
def _kept(store: Store, lease: work.Lease, time_held: timedelta) -> Generator[None]:
    """Extends a lease within the block, three times in its time."""
    over = threading.Event()

    def extend() -> None:
        while not over.wait(time_held.total_seconds() / 3):
            try:
                work.extend(store, lease, until=datetime.now(UTC) + time_held)
            except LeaseLost:
                return  # The next commit says so.
            except SQLAlchemyError as error:
                _log.warning("the lease of %s could not be extended: %s", lease.submission.public_id, error)

    thread = threading.Thread(target=extend, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
