"""The sessions of one server: how many there may be, how long they live, and which request made them.

Runs on the event loop, on a clock that is handed in. Knows nothing of what a session plays.
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from turngym_server.access.caller import Caller
from turngym_server.access.ledger import Ledger, Usage
from turngym_server.errors import ItemError, Reason
from turngym_server.sessions.session import Session
from turngym_server.watching.counts import Departure

RETRY_AFTER: Final = 1.0
"""Seconds after which a caller who found no room should ask again."""
HOLD_SECONDS: Final = 60.0
"""How long places are kept for whoever had them held, and does not come."""
MEMORY_SECONDS: Final = 60.0
"""How long a session's request id, and that it expired, are remembered after its end."""


@dataclass(slots=True, eq=False)
class Creation:
    """A session that is being made, was made, or could not be.

    Attributes:
        fingerprint: of the item that asked for it.
        task: makes it; None once it has, as a finished task takes more memory than all the rest.
        session: once it is made. Kept after its end, so that the same request gets the same answer.
        error: why it could not be made.
        ended: the session has been closed, has expired, or could not be made.
        expired: its lease ran out.
    """

    caller: Caller
    request_id: bytes
    fingerprint: bytes
    task: "asyncio.Task[None] | None" = None
    session: Session | None = None
    error: ItemError | None = None
    ended: bool = False
    expired: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Places for sessions that are about to be asked for. `ends`: on the table's clock."""

    caller: Caller
    count: int
    ends: float


class SessionTable:
    """Sessions by id, and creations by caller and request id.

    Args:
        max_sessions: held at once, those being made included. max_sessions_per_caller: of one
            account: a token's sessions, or those of a client without one.
        lease_seconds: a session untouched for so long expires.
        clock: seconds, monotonic.
        tag: begins every session id; names the worker.
        ledger: of the sessions that each token holds, where several processes serve together; None: this one is alone.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        max_sessions_per_caller: int,
        lease_seconds: float,
        clock: Callable[[], float],
        tag: str,
        ledger: Ledger | None = None,
    ) -> None:
        self.max_sessions = max_sessions
        self.lease_seconds = lease_seconds
        self._max_per_caller = max_sessions_per_caller
        self._clock = clock
        self._tag = tag
        self._ledger = ledger
        self._sessions: dict[str, Creation] = {}
        self._creations: dict[tuple[str, str, bytes], Creation] = {}
        self._held: Counter[str] = Counter()
        self._holds: dict[str, Hold] = {}
        self._forget: deque[tuple[float, Creation]] = deque()

    @property
    def living(self) -> Iterator[Session]:
        """Sessions that are there. May be asked for in any thread."""
        for creation in list(self._sessions.values()):
            if creation.session is not None and not creation.ended:
                yield creation.session

    @property
    def held(self) -> int:
        """Sessions that live or are being made, and places that are kept for others."""
        return self._held.total()

    def new_id(self) -> str:
        return f"{self._tag}.{secrets.token_urlsafe(16)}"

    def known(self, caller: Caller, request_id: bytes, fingerprint: bytes) -> Creation | None:
        """What the same item, under the same request id, led to before.

        Raises:
            ItemError: REQUEST_ID_REUSED, where it was another item.
        """
        creation = self._creations.get((caller.owner, caller.client, request_id))
        if creation is not None and creation.fingerprint != fingerprint:
            raise ItemError(
                Reason.REQUEST_ID_REUSED,
                f"request id {request_id.hex()} was used for another item; draw 16 new random bytes for each item",
            )
        return creation

    def admit(self, caller: Caller, count: int) -> None:
        """Makes sure that there is room for `count` more sessions.

        Raises:
            ItemError: SESSION_LIMIT, with a delay.
        """
        usage = self._ledger.usage(caller.owner) if self._ledger and caller.owner else None
        if usage is not None:
            # Before the others' are read, so that no two workers both grant the last place.
            usage.hold(self._held[caller.account] + count)
        if self._lacks(caller, count, usage):
            self.sweep()
        if lack := self._lacks(caller, count, usage):
            if usage is not None:
                usage.hold(self._held[caller.account])
            whose, held, most = lack
            raise ItemError(
                Reason.SESSION_LIMIT,
                f"{count} more sessions are asked for and {whose} {held} of at most {most}; nothing was started: "
                "close sessions, wait, or ask for fewer at a time",
                retry_after=RETRY_AFTER,
            )

    def _lacks(self, caller: Caller, count: int, usage: Usage | None) -> tuple[str, int, int] | None:
        """Who holds too much for `count` more sessions, how much, and of how many; None: there is room."""
        mine = self._held[caller.account]
        bounds = [("all callers hold", self.held, self.max_sessions), ("this caller holds", mine, self._max_per_caller)]
        if caller.max_sessions is not None:
            everywhere = mine + (usage.sessions_elsewhere() if usage else 0)
            bounds.append(("this token holds", everywhere, caller.max_sessions))
        return next((bound for bound in bounds if bound[1] + count > bound[2]), None)

    def hold(self, caller: Caller, count: int) -> str:
        """Keeps places for `count` sessions that were admitted, under the name that is returned; see `let_go`."""
        self._held[caller.account] += count
        name = secrets.token_hex(16)
        self._holds[name] = Hold(caller, count, self._clock() + HOLD_SECONDS)
        return name

    def holder(self, name: str) -> Caller | None:
        """For whom places are kept under this name; None: there are none, or none any more."""
        hold = self._holds.get(name)
        return None if hold is None else hold.caller

    def let_go(self, name: str) -> bool:
        """Frees the places that are kept under this name. False: there are none, or none any more."""
        hold = self._holds.pop(name, None)
        if hold is not None:
            self._free(hold.caller, hold.count)
        return hold is not None

    def open(self, caller: Caller, request_id: bytes, fingerprint: bytes) -> Creation:
        """Takes the place of a session that is about to be made, one of those that were admitted."""
        creation = Creation(caller, request_id, fingerprint)
        self._creations[caller.owner, caller.client, request_id] = creation
        self._held[caller.account] += 1
        return creation

    def made(self, creation: Creation, session: Session) -> None:
        """The session is there; its lease begins."""
        creation.session = session
        self._sessions[session.identity.session_id] = creation
        self.touch(session)

    def not_made(self, creation: Creation) -> None:
        """There will be no session."""
        self._end(creation)

    def find(self, session_id: str, owner: str) -> Session:
        """A living session of this owner, its lease renewed.

        Raises:
            ItemError: SESSION_EXPIRED or SESSION_UNKNOWN. Another's session looks like one that never was.
        """
        creation = self._sessions.get(session_id)
        if creation is not None and creation.session is not None and creation.caller.owner == owner:
            if not creation.ended:
                now = self._clock()
                if creation.session.lease_end <= now:
                    self._expire(creation, creation.session)
                if not creation.ended:
                    creation.session.lease_end = now + self.lease_seconds
                    return creation.session
            if creation.expired:
                raise ItemError(
                    Reason.SESSION_EXPIRED,
                    f"session {session_id} is gone: untouched for {self.lease_seconds:g} s, or its process was killed; "
                    "resume it by replay",
                )
        raise ItemError(
            Reason.SESSION_UNKNOWN,
            f"session {session_id[:100]!r} is not known here: closed, forgotten, or another server's; "
            "resume it by replay",
        )

    def touch(self, session: Session) -> None:
        """Renews a lease."""
        session.lease_end = self._clock() + self.lease_seconds

    def close(self, session_id: str, owner: str, departure: Departure = Departure.CLOSED) -> bool:
        """Ends a session of this owner. False: it was not there any more, or never was."""
        creation = self._sessions.get(session_id)
        if creation is None or creation.ended or creation.session is None or creation.caller.owner != owner:
            return False
        self._end(creation)
        creation.session.depart(departure)
        return True

    def sweep(self) -> None:
        """Ends sessions whose lease is over, and forgets those that ended long ago."""
        now = self._clock()
        for creation in list(self._sessions.values()):
            session = creation.session
            if session is not None and not creation.ended and session.lease_end <= now:
                self._expire(creation, session)
        for name in [name for name, hold in self._holds.items() if hold.ends <= now]:
            self.let_go(name)
        while self._forget and self._forget[0][0] <= now:
            _, creation = self._forget.popleft()
            caller = creation.caller
            del self._creations[caller.owner, caller.client, creation.request_id]
            if creation.session is not None:
                del self._sessions[creation.session.identity.session_id]

    def close_all(self) -> None:
        """Ends every session."""
        for session_id, creation in list(self._sessions.items()):
            self.close(session_id, creation.caller.owner, Departure.SHUTDOWN)

    def _expire(self, creation: Creation, session: Session) -> None:
        if session.running:
            self.touch(session)  # Its result has yet to be collected.
            return
        creation.expired = True
        self._end(creation)
        session.depart(Departure.EXPIRED)

    def _end(self, creation: Creation) -> None:
        creation.ended = True
        self._free(creation.caller, 1)
        self._forget.append((self._clock() + MEMORY_SECONDS, creation))

    def _free(self, caller: Caller, count: int) -> None:
        account = caller.account
        self._held[account] -= count
        if not self._held[account]:
            del self._held[account]
        if self._ledger is not None and caller.owner:
            self._ledger.usage(caller.owner).hold(self._held[account])
