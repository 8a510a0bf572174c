"""One call of an RPC: who makes it, what it holds, and what of it fails; logs and metrics are written from it."""

from collections import Counter
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.rpc import status_pb2

from turngym_server.access.caller import Metadata, stranger
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
        rpc: its name.
        metadata: what its caller sent along.
        caller: a stranger until it has been let in.
        items: how many it holds; 0 where it is no batch, or could not be read.
        failures: how many of its items failed, by reason. first: what the first of them was told.
        first_session: the session that it named, which need not exist.
        charged: whether the front counts it against its caller's quotas.
        environments: how many of its items are about each environment; None: nobody wants to know.
    """

    __slots__ = ("caller", "charged", "environments", "failures", "first", "first_session", "items", "metadata", "rpc")

    def __init__(self, rpc: str, metadata: Metadata, charged: bool = False) -> None:
        self.rpc = rpc
        self.charged = charged
        self.metadata = metadata
        self.caller = stranger(metadata)
        self.items = 0
        self.first: ItemError | None = None
        self.first_session = ""
        self.failures: Counter[Reason] = Counter()
        self.environments: Counter[str] | None = None

    def about(self, environment_id: str) -> None:
        """Notes which environment an item is about."""
        if self.environments is not None:
            self.environments[environment_id] += 1

    def failed(self, error: ItemError, session_id: str = "") -> status_pb2.Status:
        """Notes that an item failed, and returns what its outcome says."""
        self.failures[error.reason] += 1
        if self.first is None:
            self.first, self.first_session = error, session_id[:MAX_SESSION_CHARACTERS]
        return error.status()
