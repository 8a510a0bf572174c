"""gRPC's health service: whether a server serves, for whoever asks.

Nobody needs a token for it, so little is held of a call. The package grpc_health has such a service too, but there a
change waits until every watcher has taken the one before, so that a caller who takes nothing would keep a server from
draining; and a request that never ends is waited for.
"""

import asyncio
import contextlib
from collections.abc import Collection
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from turngym_server.listening import HEALTH
from turngym_server.rpc.call import Context

MAX_WATCHERS: Final = 64
"""Calls of Watch at once; they have no end."""
MAX_READING: Final = 16
"""Requests that are received at once."""
READ_SECONDS: Final = 2.0
"""How long a request may take to come."""


class Health:
    """The state of a server, NOT_SERVING at first, under each of the names that it is asked for by.

    Args:
        services: the names; of others it is said that they are unknown.
    """

    def __init__(self, services: Collection[str]) -> None:
        self._services = frozenset(services)
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._watchers = 0
        self._reading = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to answer for it."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            # As streams, whose requests are received only once they are read.
            "Check": grpc.stream_stream_rpc_method_handler(self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        return grpc.method_handlers_generic_handler(HEALTH, handlers)

    def set(self, serving: bool) -> None:
        """Changes the state, and wakes who watches it."""
        states = health_pb2.HealthCheckResponse
        self._status = states.SERVING if serving else states.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, _requests: object, context: Context) -> None:
        service = await self._asked(context)
        # Where it is not known, the state is told: it is the same for all services there are.
        if service is not None and service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {service[:100]!r} here")
        await self._tell(context, self._status)

    async def _watch(self, _requests: object, context: Context) -> None:
        if self._watchers >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} calls watch already; call Check instead"
            )
        self._watchers += 1
        try:
            service = await self._asked(context)
            if service is None:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the request did not come in time; try again")
            told = None
            while True:
                changed, status = self._changed, self._status
                if service not in self._services:
                    status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != told:
                    await self._tell(context, status)
                    told = status
                await changed.wait()
        finally:
            self._watchers -= 1

    async def _asked(self, context: Context) -> str | None:
        """The service that a call asks for; None where that does not come, or is not received for want of room."""
        if self._reading >= MAX_READING:
            return None
        self._reading += 1
        reading = asyncio.ensure_future(context.read())
        try:
            # gRPC must find its read where it left it: it ends with the call.
            await asyncio.wait({reading}, timeout=READ_SECONDS)
        finally:
            self._reading -= 1
            reading.add_done_callback(_take_error)
        if not reading.done() or reading.exception() is not None:
            return None
        try:
            return health_pb2.HealthCheckRequest.FromString(reading.result()).service
        except (DecodeError, TypeError):  # No message, or none at all.
            return None

    async def _tell(self, context: Context, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # The call is over.
            await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())


def _take_error(reading: "asyncio.Future[Any]") -> None:
    """Has nobody told that a read came to nothing."""
    if not reading.cancelled():
        reading.exception()
