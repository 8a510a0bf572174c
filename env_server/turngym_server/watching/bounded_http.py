"""A small HTTP server of a WSGI application that whoever connects cannot exhaust.

Each connection has a thread, brings one request and is closed after its reply. Their number is bounded: one more takes
the place of the oldest that has not sent its request yet, so that connections which send nothing keep nobody out, and
is refused where all are being answered. Whoever neither sends nor takes anything for a while is dropped.

Knows nothing of what is served.
"""

import contextlib
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MAX_CONNECTIONS: Final = 16
IDLE_SECONDS: Final = 5.0
"""How long a connection may stand still."""
_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"too many requests are being answered; ask again in a second\n"
)


class BoundedServer(socketserver.ThreadingMixIn, WSGIServer):
    """Listens from the start; `serve_forever` answers.

    Args:
        host: address to listen on. port: 0 takes a free one.
        application: WSGI; answers within a bounded time.

    Raises:
        OSError: the address cannot be bound.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, application: Callable[..., Any]) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        self._reading: dict[socket.socket, None] = {}
        self._answering: set[socket.socket] = set()
        self._changing = threading.Lock()
        super().__init__((str(found[4][0]), port), _Handler)
        self.set_app(application)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begins to serve a connection, if need be in another one's place."""
        with self._changing:
            busy = len(self._answering) >= MAX_CONNECTIONS
            if not busy:
                self._reading[request] = None
                if len(self._reading) + len(self._answering) > MAX_CONNECTIONS:
                    oldest = next(iter(self._reading))
                    del self._reading[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # Wakes its thread.
        if busy:
            with contextlib.suppress(OSError):
                request.settimeout(IDLE_SECONDS)
                request.sendall(_BUSY)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def has_request(self, connection: socket.socket) -> bool:
        """Notes that a connection's request has come. False: its place is taken."""
        with self._changing:
            if connection not in self._reading:
                return False
            del self._reading[connection]
            self._answering.add(connection)
            return True

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        super().shutdown_request(request)
        with self._changing:
            self._reading.pop(request, None)
            self._answering.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tells what went wrong, but for callers who go away or stand still."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = IDLE_SECONDS

    def parse_request(self) -> bool:
        return super().parse_request() and cast(BoundedServer, self.server).has_request(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""
