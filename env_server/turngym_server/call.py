"""One call of an RPC: who makes it, what it holds, and what of it fails; logs and metrics are written from it."""

from collections import Counter
from typing import Any, Final

import grpc.aio
from google.rpc import status_pb2

from turngym_server.errors import ItemError, Reason

Context = grpc.aio.ServicerContext[Any, Any]

CALLER_KEY: Final = "turngym-client"
"""Metadata key by which a client names itself."""


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
        environments: how many of its items are about each environment; None: nobody wants to know.
    """

    __slots__ = ("_caller", "context", "environments", "failures", "first", "items", "rpc")

    def __init__(self, rpc: str, context: Context) -> None:
        self.rpc = rpc
        self.context = context
        self.items = 0
        self.first: ItemError | None = None
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

    def failed(self, error: ItemError) -> status_pb2.Status:
        """Notes that an item failed, and returns what its outcome says."""
        self.failures[error.reason] += 1
        self.first = self.first or error
        return error.status()
