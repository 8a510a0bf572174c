"""`leaderboard play`: serves a playground on the loopback. Knows nothing of its pages."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp

from turngym_leaderboard.pages.loopback import CannotListen, serve_on_loopback
from turngym_leaderboard.playground.app import playground
from turngym_leaderboard.playground.gate import Gate
from turngym_leaderboard.playground.kept import CannotKeep, KeptFile

__all__ = ["CannotKeep", "CannotListen", "play"]


def play(
    servers: Sequence[str],
    *,
    keep: Path | None,
    idle_seconds: float,
    port: int,
    open_browser: bool,
    tell: Callable[[str], None],
) -> None:
    """Serves a playground until it is interrupted.

    Args:
        servers: host:port of environment servers.
        keep: where episodes are kept; None: nowhere.
        idle_seconds: after which an episode that nobody looks at is closed.
        port: 0: a free one.
        tell: told of the address, which holds the secret that lets a browser in.

    Raises:
        CannotKeep: the file cannot be written. CannotListen: the port is taken.
    """
    file = KeptFile(keep) if keep else None
    secret = secrets.token_urlsafe(18)

    def make(port: int) -> tuple[ASGIApp, str]:
        app = playground(servers, file, secret, idle_seconds)
        return Gate(app, secret=secret, hosts=(f"127.0.0.1:{port}", f"localhost:{port}")), f"/{secret}/"

    serve_on_loopback(
        make,
        port=port,
        open_browser=open_browser,
        tell=lambda address: tell(f"play: {address} (Ctrl-C ends it)"),
    )
