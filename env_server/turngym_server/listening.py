"""What a server and a front have in common as gRPC servers: names, sizes, and where they listen.

Whoever reaches the port costs what gRPC spends on a connection and on a stream before the server is asked, token or
not. Streams of one connection are bounded here: calls that are opened and reset in bursts, which would keep the event
loop from everybody else, are refused by gRPC's core. What gRPC for Python does not offer is left to a reverse proxy or
a firewall, where the port is open to more than those who may use it: bounds of the connections of one address and of
how fast they are opened, of bytes that a connection may send in a second, and of memory in all.

Knows nothing of the RPCs.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import grpc
import grpc.aio

from turngym.v1 import environment_pb2 as pb
from turngym_server.access.admission import Access
from turngym_server.access.exposure import check_exposure, server_credentials
from turngym_server.address import check_free
from turngym_server.config import ServerConfig
from turngym_server.rpc.reflection import serve_reflection

log: Final = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often a server looks whether it still listens."""
END_SECONDS: Final = 5.0
SERVICE: Final = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
HEALTH: Final = "grpc.health.v1.Health"
FRONT_SERVICE: Final = "turngym.internal.Forks"
"""What a worker answers to its front alone: `Hold` and `Fork` take a ForkRequest, `LetGo` the name that `Hold` gave."""
HOLD_KEY: Final = "turngym-hold"
"""Metadata key by which `Fork` is told that name."""
REFLECTED: Final = (SERVICE, HEALTH)
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Of a reply, and what clients' channels should allow."""
MAX_REQUEST_BYTES: Final = 20 * 1024 * 1024
"""Of a request: the longest history that can be resumed, or a batch as clients make them, and what is around it. Up to
as much is held of a call whose request is sent in part."""
MAX_STREAMS: Final = 1_024
"""Calls of one connection at once. gRPC refuses more (UNAVAILABLE), and now and then some within the bound where it is
passed, so it lies far above what honest callers have open."""
MAX_PENDING: Final = 64 * MAX_STREAMS
"""Calls that gRPC has read and the server has not begun: honest ones wait among those of a burst."""
MAX_METADATA_BYTES: Final = 8 * 1024
PING_MS: Final = 5_000
"""Whoever asks more often whether the server is there, and nothing else, is hung up on."""
UNCOMPRESSED: Final = 1
"""Set of gRPC's compressions that holds none: requests that are compressed are refused (UNIMPLEMENTED)."""
FRONT_SOCKET_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Between the two gRPC would refuse calls at random.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)
"""Of a worker's socket for its front, whose one connection carries everybody's calls."""
SERVER_OPTIONS: Final = (
    *FRONT_SOCKET_OPTIONS,
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # Beyond it gRPC ends calls at random, whoever's they are, as CANCELLED.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
    # A small compressed request may be a large one, which is only known once it has been decompressed.
    ("grpc.compression_enabled_algorithms_bitset", UNCOMPRESSED),
    # Clients whose calls are open ask now and then whether anybody is there; by default that is too often.
    ("grpc.http2.min_ping_interval_without_data_ms", PING_MS),
    ("grpc.so_reuseport", 0),  # Else a second server would share the port unnoticed.
)


def bind(server: grpc.aio.Server, config: ServerConfig) -> int:
    """Has the server listen where the operator wants it, and returns the port.

    Raises:
        OSError: the address cannot be bound, or a file of TLS cannot be read.
        ValueError: it would be open to other machines without tokens and TLS, or the files of TLS are wrong.
    """
    check_exposure(config.host, tokens=bool(config.tokens), tls=bool(config.tls_cert), insecure=config.insecure)
    if (config.tls_cert is None) != (config.tls_key is None) or (config.client_ca and not config.tls_cert):
        raise ValueError("--tls-cert and --tls-key go together, and --client-ca with both")
    address = host_and_port(config.host, config.port)
    check_free(config.host, config.port)
    try:
        if config.tls_cert and config.tls_key:
            credentials = server_credentials(config.tls_cert, config.tls_key, config.client_ca)
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


class Listener:
    """A gRPC server that is made anew where it has stopped listening.

    gRPC for Python (1.85 and before) stops serving for good, in a process that goes on, when anybody asks for a path
    that is no UTF-8; nobody needs a token for that. Whatever it is that made it stop, the sessions are not its own: a
    new one on the same port goes on with them, and clients try again. Nothing of gRPC tells of it, so it is looked for.

    Args:
        handlers: of its RPCs. access: lets in who asks for reflection.
        config: where it listens.
    """

    def __init__(self, handlers: Sequence[grpc.GenericRpcHandler], access: Access, config: ServerConfig) -> None:
        self._handlers = handlers
        self._access = access
        self._config = config
        self._server = self._make()
        self._watching: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.port = 0

    def bind(self) -> int:
        """See `bind`."""
        self.port = bind(self._server, self._config)
        return self.port

    async def start(self) -> None:
        """Begins to serve."""
        await self._server.start()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, and gives those under way `grace_seconds`."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self._server.stop(grace_seconds)

    def _make(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers(self._handlers)
        serve_reflection(server, REFLECTED, self._access)
        return server

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if await is_refused(self._config.host, self.port):
                await self._renew()

    async def _renew(self) -> None:
        server = self._make()
        try:
            bind(server, replace(self._config, port=self.port))
        except OSError as error:
            log.warning("gRPC has stopped serving, and its port is not free yet: %s", error)
            return
        await server.start()
        before, self._server = self._server, server
        log.warning("gRPC had stopped serving; it was started anew, with all sessions")
        # What is broken may never say that it has stopped.
        ending = asyncio.get_running_loop().create_task(_end(before))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


async def _end(server: grpc.aio.Server) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(END_SECONDS):
            await server.stop(0)


async def is_refused(host: str, port: int) -> bool:
    """Whether nobody listens there; False where that cannot be told."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # Every address, as a place to go to.
    try:
        async with asyncio.timeout(END_SECONDS):
            _, writer = await asyncio.open_connection(reached, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
