"""Listens for the service, until it is told to stop."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.service.exposure import check_exposure
from turngym_leaderboard.service.state import RateLimits

_BACKLOG: Final = 2048
_MAX_CONNECTIONS: Final = 4096
"""Open at once; the next one is answered 503."""
_MAX_HEADER_BYTES: Final = 32 << 10
_KEPT_ALIVE: Final = 75
"""Seconds that a connection may be idle. One that is closed as it is used again is an error for whoever uses it, so
this is longer than busy readers let one lie.
"""
_STOPS_WITHIN: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """How a board is served.

    Attributes:
        port: 0: a free one.
        tls_cert, tls_key: PEM files; None: in the clear.
        insecure: other machines may be served in the clear.
        proxy: address of a reverse proxy, whose word is taken for whom it calls on behalf of; "": nobody's is.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    proxy: str = ""
    intake: IntakeLimits = field(default_factory=IntakeLimits)
    rates: RateLimits = field(default_factory=RateLimits)


def run(app: ASGIApp, config: ServiceConfig, listening: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, which are raised once more when the last answer has been given.

    Args:
        listening: called with the address once connections are taken.

    Raises:
        ValueError: other machines would be served in the clear.
        OSError: the address cannot be bound, or a file of TLS cannot be read.
    """
    with listen(config) as listener:
        listening(address_of(listener, config))
        make_server(app, config).run(sockets=[listener])


def listen(config: ServiceConfig) -> socket.socket:
    """The socket that connections come to. Raises as `run` does."""
    check_exposure(config.host, tls_cert=config.tls_cert, tls_key=config.tls_key, insecure=config.insecure)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {config.host}:{config.port}: {error.strerror}; name another --port") from error


def address_of(listener: socket.socket, config: ServiceConfig) -> str:
    """Where a browser of this machine, or one that reaches the host, finds the service."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.tls_cert else 'http'}://{host}:{listener.getsockname()[1]}"


def make_server(app: ASGIApp, config: ServiceConfig) -> uvicorn.Server:
    """The server that runs the app."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=bool(config.proxy),
            forwarded_allow_ips=config.proxy or None,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=_KEPT_ALIVE,
            timeout_graceful_shutdown=_STOPS_WITHIN,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
    )
