"""Serving an application to the browsers of this machine, until it is interrupted. Knows nothing of what is served."""

import socket
import webbrowser
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp


class CannotListen(Exception):
    """The port cannot be had. Says why, and what to do."""


def serve_on_loopback(
    make: Callable[[int], tuple[ASGIApp, str]], *, port: int, open_browser: bool, tell: Callable[[str], None]
) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        make: the application and the path that it begins at, given the port.
        port: 0: a free one.
        tell: told of the address.

    Raises:
        CannotListen: the port is taken.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listening:
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise CannotListen(
                f"port {port} cannot be listened on: {error.strerror}; --port 0 takes a free one"
            ) from error
        port = listening.getsockname()[1]
        app, path = make(port)
        address = f"http://127.0.0.1:{port}{path}"
        tell(address)
        # Listening already, so that the browser's first call is answered.
        listening.listen()
        if open_browser:
            webbrowser.open(address)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
