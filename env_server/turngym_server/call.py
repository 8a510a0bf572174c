"""One call of an RPC: who makes it, what it holds, and what of it fails; logs and metrics are written from it."""

from collections import Counter
from typing import Any, Final

import grpc.aio
from google.rpc import status_pb2

from turngym_server.errors import ItemError, Reason

Context = grpc.aio.ServicerContext[Any, Any]

CALLER_KEY: Final = "turngym-client"
"""Metadata key by which a client names itself."""

MAX_SESSION_CHARACTERS: Final = 100
"""What is kept of a session id that a caller names; real ones are shorter."""


def caller_of(context: Context) -> str:
    """Who calls: the id that the client chose for itself, or "" for all who chose none."""
    for key, value in context.invocation_metadata() or ():
        if key == CALLER_KEY:
            return value if isinstance(value, str) else value.hex()
    return ""


class Call:
    """A call being answered.

    Attributes:
        rpc: its name.
        items: how many it holds; 0 where it is no batch, or could not be read.
        failures: how many of its items failed, by reason. first: what the first of them was told.
        first_session: the session that it named, which need not exist.
        environments: how many of its items are about each environment; None: nobody wants to know.
    """

    __slots__ = ("_caller", "context", "environments", "failures", "first", "first_session", "items", "rpc")

    def __init__(self, rpc: str, context: Context) -> None:
        self.rpc = rpc
        self.context = context
        self.items = 0
        self.first: ItemError | None = None
        self.first_session = ""
        self.failures: Counter[Reason] = Counter()
        self.environments: Counter[str] | None = None
        self._caller: str | None = None

    @property
    def caller(self) -> str:
        """Who makes it. Read when first asked for: a step has no need of it."""
        if self._caller is None:
            self._caller = caller_of(self.context)
        return self._caller

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
