"""A gRPC server of environments: what is bound, started, swept, drained and stopped."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Self

import grpc.aio

from turngym_server.config import ServerConfig
from turngym_server.host import EnvironmentHost
from turngym_server.listening import FRONT_SOCKET_OPTIONS, SERVICE, Listener, host_and_port
from turngym_server.rpc.health import Health
from turngym_server.rpc.service import EnvironmentService
from turngym_server.watching.metrics import MetricsEndpoint, worker_handlers

if TYPE_CHECKING:
    from turngym_server.watching.tracing import Tracing

FLUSH_SECONDS: Final = 1.0
"""How long a server that ends waits for clients to take what was answered, and for those that never would, half-sent
requests, idle streams and silent connections among them."""


class Server:
    """A gRPC server of environments; `async with` starts and stops it.

    Args:
        environments: what is served.
        config: where and how.
        clock: seconds, monotonic; leases, wall-clock limits and quotas are counted on it.
        now: seconds since 1970; tokens expire by it.

    Raises:
        OSError: on entry, where an address cannot be bound, or a file cannot be read.
        ValueError: on entry, where traces are asked for that cannot be made, or the file of tokens is malformed.
    """

    def __init__(
        self,
        environments: Sequence[EnvironmentHost],
        config: ServerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._environments = environments
        self._clock = clock
        self._now = now
        self.config = config or ServerConfig()
        self.port = 0
        self._metrics: MetricsEndpoint | None = None
        self._tracing: Tracing | None = None

    @property
    def metrics_url(self) -> str | None:
        """Where it tells what it counts; None where it does not."""
        return self._metrics and self._metrics.url

    @property
    def address(self) -> str:
        """host:port that it listens on."""
        return host_and_port(self.config.host, self.port)

    async def start(self) -> None:
        """Binds and begins to serve."""
        if self.config.otlp_endpoint is not None:
            self._tracing = _open_tracing(self.config.otlp_endpoint)
        self.service = EnvironmentService(
            self._environments, self.config, self._clock, now=self._now, tracing=self._tracing
        )
        self._health = Health(("", SERVICE))
        health = self._health.handlers()
        listener = Listener((self.service.handlers(), health), self.service.access, self.config)
        self._servers: list[Listener | grpc.aio.Server] = [listener]
        self.port = listener.bind()
        try:
            await asyncio.gather(*(asyncio.to_thread(host.open) for host in self._environments))
        except OSError:
            await self._close_hosts()
            raise
        if self.config.front_socket:
            for_front = grpc.aio.server(options=FRONT_SOCKET_OPTIONS)
            internal = worker_handlers(self.service.metrics), self.service.front_handlers()
            for_front.add_generic_rpc_handlers((self.service.handlers(charged=True), health, *internal))
            for_front.add_insecure_port(f"unix:{self.config.front_socket}")
            self._servers.append(for_front)
        if self.config.metrics_port is not None:
            self._metrics = MetricsEndpoint(self.config.metrics_host, self.config.metrics_port, self.service.metrics)
        for each in self._servers:
            await each.start()
        self._health.set(True)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def drain(self) -> None:
        """Stops: starts no more sessions, lets running turns finish and be collected, then refuses all."""
        self.service.draining = True
        self._health.set(False)
        loop = asyncio.get_running_loop()
        end = loop.time() + self.config.grace_seconds
        while (tasks := set(self.service.runtime.tasks)) and loop.time() < end:
            await asyncio.wait(tasks, timeout=end - loop.time())
        await self.stop(min(max(end - loop.time(), 0.0), FLUSH_SECONDS))

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Refuses new calls, and gives those under way `grace_seconds`."""
        self.service.stop_streams()
        await asyncio.gather(*(server.stop(grace_seconds) for server in self._servers))
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper
        self.service.table.close_all()
        tasks = set(self.service.runtime.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=0.1)
        for task in self.service.runtime.tasks:
            task.cancel()
        if self.service.runtime.tasks:
            await asyncio.wait(set(self.service.runtime.tasks))
        self.service.runtime.close()
        await self._close_hosts()
        if self._metrics is not None:
            await self._metrics.close()
        if self._tracing is not None:
            await self._tracing.close()

    async def _close_hosts(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(host.close) for host in self._environments))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _sweep(self) -> None:
        pause = min(max(self.config.lease_seconds / 4, 0.1), 5.0)
        while True:
            await asyncio.sleep(pause)
            self.service.table.sweep()


def _open_tracing(endpoint: str) -> "Tracing":
    try:
        from turngym_server.watching.tracing import Tracing
    except ImportError as error:
        raise ValueError(
            "--otlp-endpoint needs OpenTelemetry, which is not installed: pip install 'turngym[otel]'"
        ) from error
    return Tracing(endpoint, SERVICE)
