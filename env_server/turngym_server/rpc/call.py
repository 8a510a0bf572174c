"""One call of an RPC: who makes it, what it holds, and what of it fails; logs and metrics are written from it."""

from collections import Counter
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.rpc import status_pb2

from turngym_server.access.admission import Visit
from turngym_server.access.caller import Metadata
from turngym_server.errors import ItemError, Reason

Context = grpc.aio.ServicerContext[Any, Any]

_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

MAX_SESSION_CHARACTERS: Final = 100
"""What is kept of a session id that a caller names; real ones are shorter."""


def metadata_of(context: Context) -> Metadata:
    """What a caller sent along with a call."""
    return tuple(context.invocation_metadata() or ())


async def abort(context: Context, refusal: ItemError) -> NoReturn:
    """Ends a call."""
    status = refusal.status()
    await context.abort(
        _STATUS_CODES[status.code], status.message, (("grpc-status-details-bin", status.SerializeToString()),)
    )


class Call:
    """A call being answered.

    Attributes:
        visit: what it shows to be let in. caller: a stranger until it is.
        items: how many it holds; 0 where it is no batch, or could not be read.
        failures: how many of its items failed, by reason; None: none has. first: what the first was told.
        first_session: the session that it named, which need not exist.
        charged: whether the front counts it against its caller's quotas.
        environments: how many of its items are about each environment; None: nobody wants to know.
    """

    __slots__ = ("caller", "charged", "environments", "failures", "first", "first_session", "items", "visit")

    def __init__(self, visit: Visit, charged: bool = False) -> None:
        self.visit = visit
        self.charged = charged
        self.caller = visit.stranger
        self.items = 0
        self.first: ItemError | None = None
        self.first_session = ""
        self.failures: Counter[Reason] | None = None  # A Counter takes longer to make than the rest.
        self.environments: Counter[str] | None = None

    @property
    def rpc(self) -> str:
        """Its name."""
        return self.visit.rpc

    @property
    def metadata(self) -> Metadata:
        """What its caller sent along."""
        return self.visit.metadata

    def about(self, environment_id: str) -> None:
        """Notes which environment an item is about."""
        if self.environments is not None:
            self.environments[environment_id] += 1

    def failed(self, error: ItemError, session_id: str = "") -> status_pb2.Status:
        """Notes that an item failed, and returns what its outcome says."""
        if self.failures is None:
            self.failures = Counter()
            self.first, self.first_session = error, session_id[:MAX_SESSION_CHARACTERS]
        self.failures[error.reason] += 1
        return error.status()
