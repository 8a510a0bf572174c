"""Which worker has, or may have, the item of each request id of Reset.

Of every caller's ids by themselves, so that nobody can make the front forget another's: the least recently used of more
than `CALLERS` callers is forgotten, and of one caller the oldest of more than `IDS_OF_CALLER` ids. On a server with
tokens a caller is a token, whatever clients it names. Ids get here only where a worker has the item, which no stranger
to it can bring about; those that a worker has not answered for are kept apart, within the same bounds, as are those of
calls under way, of which there are no more than the calls hold. What a worker had is forgotten with it.
"""

import enum
import hashlib
from dataclasses import dataclass
from typing import Final

from turngym_server.processes.workers import Worker
from turngym_server.rpc.requests import REQUEST_ID_BYTES

CALLERS: Final = 1_024
IDS_OF_CALLER: Final = 8_192

CallerKey = tuple[bytes, bytes]
"""Whose bound an id counts against, and the client that begins its key there."""


def caller_key(token: str, client: str) -> CallerKey:
    """The caller who sends this token, "": none, and names this client. Hashed: the front keeps no token."""
    named = hashlib.sha256(client.encode()).digest()[:REQUEST_ID_BYTES]
    return (hashlib.sha256(token.encode()).digest() if token else named), named


class Held(enum.Enum):
    """Whether a worker has an item that it was sent."""

    YES = enum.auto()
    NO = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(slots=True)
class Flight:
    """An item under way to a worker, in as many calls."""

    caller: CallerKey
    request_id: bytes
    worker: Worker
    calls: int = 0


class Assignments:
    """The workers of the request ids of a front."""

    def __init__(self) -> None:
        self._flights: dict[tuple[CallerKey, bytes], Flight] = {}
        self._held = _Bounded()
        self._unanswered = _Bounded()

    def find(self, caller: CallerKey, request_id: bytes) -> Worker | None:
        """The worker that serves and may have this id's item."""
        flight = self._flights.get((caller, request_id))
        for worker in (
            flight and flight.worker,
            self._held.find(caller, request_id),
            self._unanswered.find(caller, request_id),
        ):
            if worker is not None and worker.serving:
                return worker
        return None

    def begin(self, caller: CallerKey, request_id: bytes, worker: Worker) -> Flight:
        """The item goes to this worker; `end` has to follow."""
        flight = self._flights.get((caller, request_id))
        if flight is None or flight.worker is not worker:
            flight = self._flights[caller, request_id] = Flight(caller, request_id, worker)
        flight.calls += 1
        return flight

    def end(self, flight: Flight, held: Held) -> None:
        """What came of it. NO leaves nothing behind, and takes nothing back that another call brought about."""
        flight.calls -= 1
        key = flight.caller, flight.request_id
        if not flight.calls and self._flights.get(key) is flight:
            del self._flights[key]
        if len(flight.request_id) != REQUEST_ID_BYTES or not flight.worker.serving:
            return
        if held is Held.YES:
            self._held.put(flight.caller, flight.request_id, flight.worker)
        elif held is Held.UNKNOWN:
            self._unanswered.put(flight.caller, flight.request_id, flight.worker)


class _Bounded:
    """Workers of ids by caller, within the bounds."""

    def __init__(self) -> None:
        self._callers: dict[bytes, dict[bytes, Worker]] = {}

    def find(self, caller: CallerKey, request_id: bytes) -> Worker | None:
        ids = self._callers.get(caller[0])
        return ids.get(caller[1] + request_id) if ids else None

    def put(self, caller: CallerKey, request_id: bytes, worker: Worker) -> None:
        ids = self._callers.pop(caller[0], None)
        self._callers[caller[0]] = ids = {} if ids is None else ids  # Last, as the most recently used.
        key = caller[1] + request_id
        ids.pop(key, None)
        ids[key] = worker
        if len(ids) > IDS_OF_CALLER:
            del ids[next(iter(ids))]
        if len(self._callers) > CALLERS:
            del self._callers[next(iter(self._callers))]
