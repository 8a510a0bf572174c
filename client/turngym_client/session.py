"""Where an episode lives, and how it outlives that place.

A `Session` runs one operation at a time against the server that holds it. When the session is gone there, or the server
stays away, it is made again by replay on any server, and the operation goes on there. What is tried again, and for how
long, is the table in `turngym_client.transport`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.rpc import code_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_client.episode import Record, resume_item
from turngym_client.errors import EpisodeEnded, EpisodeLost
from turngym_client.messages import StatusError, Verdict, transition_from_pb
from turngym_client.transport import Patience, Pool, Server, matched

ResultT = TypeVar("ResultT")


async def start(
    pool: Pool, server: Server, items: Sequence[pb.ResetItem], *, want_legal_actions: bool = False
) -> Sequence[pb.ResetOutcome]:
    """Outcomes of reset items, none pending: what is still starting is sent again, which starts nothing twice."""
    outcomes: dict[bytes, pb.ResetOutcome] = {}
    while left := [item for item in items if item.request_id not in outcomes]:
        request = pb.ResetRequest(items=left, max_wait_seconds=pool.deadline / 2, want_legal_actions=want_legal_actions)
        response = await server.reset(request)
        for item, outcome in zip(left, matched(left, response.outcomes), strict=True):
            if not outcome.HasField("pending"):
                outcomes[item.request_id] = outcome
    return [outcomes[item.request_id] for item in items]


async def _start_one(pool: Pool, server: Server, item: pb.ResetItem) -> pb.Started:
    [outcome] = await start(pool, server, [item])
    if outcome.HasField("error"):
        raise StatusError(outcome.error, of_item=True)
    return outcome.started


@dataclass(frozen=True, slots=True)
class Home:
    """Where a session is, and its id there."""

    server: Server
    id: str


class Session:
    """One episode's session.

    Attributes:
        record: the episode so far; the owner adds what is played.
        server: where the session is; None while it is nowhere.
        id: its id there.
        closed: it is not made again.
    """

    def __init__(self, pool: Pool, record: Record, server: Server, id: str) -> None:
        self.record = record
        self.server: Server | None = None
        self.id = ""
        self.closed = False
        self._pool = pool
        self._enter(server, id)

    async def run(self, attempt: Callable[[Server, str], Awaitable[ResultT]]) -> ResultT:
        """What `attempt(server, session id)` gives, made again elsewhere as often as need be.

        Args:
            attempt: must be safe to repeat; raises StatusError.

        Raises:
            TurngymError: by the status; EpisodeLost where the episode cannot be played again; EpisodeEnded where it
                was closed meanwhile.
        """
        patience = self._pool.patience()
        away_since: float | None = None
        was_gone = False
        stalled: Home | None = None
        while True:
            self._pool.check_open()
            if self.closed:
                raise EpisodeEnded(f"{self.record.describe()}: closed; reset a new one")
            server = self.server or await self._resume(patience, stalled)
            try:
                return await attempt(server, self.id)
            except StatusError as error:
                match error.verdict:
                    case Verdict.FINAL:
                        raise error.to_error(self.record.describe()) from error
                    case Verdict.SESSION_GONE:
                        self._leave()
                        stalled = None
                        if was_gone:
                            # Sessions that go as soon as they are made are no better than a server that is away.
                            await patience.pause(error, self.record.describe())
                        was_gone = True
                    case Verdict.BUSY:
                        await patience.pause(error, self.record.describe())
                    case Verdict.AWAY:
                        away_since = away_since or time.monotonic()
                        if await self._pool.may_move(server, error, away_since):
                            # Who does not answer in time may have the session yet; who is not there has none.
                            late = error.code == code_pb2.DEADLINE_EXCEEDED
                            stalled = Home(server, self.id) if late and self.id else None
                            self._leave()
                            away_since = None
                        await patience.pause(error, self.record.describe())

    def end(self) -> None:
        """Marks the session closed and forgets where it was."""
        self.closed = True
        self._leave()

    def _leave(self) -> None:
        if self.server is not None:
            self.server.sessions.discard(self)
        self.server, self.id = None, ""

    def _enter(self, server: Server, id: str) -> None:
        self.server, self.id = server, id
        server.sessions.add(self)

    async def _resume(self, patience: Patience, stalled: Home | None) -> Server:
        """Makes the session again by replay, on whichever server takes it.

        Args:
            stalled: where the session may still be; gone back to where no other server takes the episode now.

        Raises:
            EpisodeLost: none does.
        """
        item = resume_item(self.record, secrets.token_bytes(16))
        refused = [stalled.server] if stalled else []
        while True:
            server = await self._pool.choose(patience, refused=refused)
            try:
                started = await _start_one(self._pool, server, item)
            except StatusError as error:
                if error.verdict is Verdict.FINAL:
                    if error.reason in ("", "ENVIRONMENT_FAILED", "STEP_DEADLINE"):
                        raise error.to_error(f"{self.record.describe()}: resuming by replay") from error
                    refused.append(server)
                    if not all(other in refused for other in await self._pool.usable(patience)):
                        continue
                    if stalled is None:
                        raise _lost(self.record, error) from error
                elif error.verdict is Verdict.AWAY:
                    server.avoid()
                if stalled is not None:
                    self._enter(stalled.server, stalled.id)
                    return stalled.server
                await patience.pause(error, f"{self.record.describe()}: resuming by replay")
            else:
                self._check_replay(started)
                self._enter(server, started.session_id)
                return server

    def _check_replay(self, started: pb.Started) -> None:
        state = transition_from_pb(started.state)
        if started.step_index != len(self.record.turns) or state.digest != self.record.state.digest:
            raise EpisodeLost(
                f"{self.record.describe()}: the replay ended at step {started.step_index} with digest"
                f" {state.digest.hex()}, not with {self.record.state.digest.hex()}",
                reason="DIGEST_MISMATCH",
            )


def _lost(record: Record, error: StatusError) -> EpisodeLost:
    return EpisodeLost(
        f"{record.describe()}: its server is gone and it cannot be played again: {error.message} [{error.reason}]",
        reason=error.reason,
        metadata=error.metadata,
    )
