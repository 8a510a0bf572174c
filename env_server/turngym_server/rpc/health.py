"""gRPC's health service: whether a server serves, for whoever asks.

The package grpc_health has one too, but there a change waits until every watcher has taken the one before, so that a
caller who takes nothing would keep a server from draining.
"""

import asyncio
from collections.abc import Collection
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from turngym_server.listening import HEALTH
from turngym_server.rpc.call import Context

MAX_WATCHERS: Final = 64
"""Calls of Watch at once; they need no token and have no end."""


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

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to answer for it."""
        read, write = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, read, write),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, read, write),
        }
        return grpc.method_handlers_generic_handler(HEALTH, handlers)

    def set(self, serving: bool) -> None:
        """Changes the state, and wakes who watches it."""
        states = health_pb2.HealthCheckResponse
        self._status = states.SERVING if serving else states.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r} here")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        if self._watchers >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} calls watch already; call Check instead"
            )
        self._watchers += 1
        told = None
        try:
            while True:
                changed, status = self._changed, self._status
                if request.service not in self._services:
                    status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                await changed.wait()
        except grpc.aio.BaseError:  # The call is over.
            return
        finally:
            self._watchers -= 1
