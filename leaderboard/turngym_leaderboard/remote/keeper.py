"""Has a proxy look after what nobody asks for, in a thread, while a service runs."""

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from turngym_client import TurngymError
from turngym_leaderboard.remote.proxy import Proxy, ServersAway
from turngym_leaderboard.store import StoreError

EVERY: Final = 5.0
"""Seconds between two rounds."""
LOOKS: Final = 1.0
"""Seconds between two looks at which boards can be played, at most."""
_log: Final = logging.getLogger(__name__)


@contextmanager
def kept(proxy: Proxy, every: float = EVERY) -> Generator[None]:
    """Within the block time runs where boards can be played, and answers that no server could play are played."""
    stop = threading.Event()
    # Two threads: what waits for a server must not keep the other from seeing that it is away.
    keepers = [
        threading.Thread(target=_keep, args=(proxy, work, stop, seconds), name=f"remote-{work.__name__}")
        for work, seconds in ((proxy.look, min(every, LOOKS)), (proxy.sweep, every))
    ]
    for keeper in keepers:
        keeper.start()
    try:
        yield
    finally:
        stop.set()
        for keeper in keepers:
            keeper.join()


def _keep(proxy: Proxy, work: Callable[[], None], stop: threading.Event, every: float) -> None:
    while not stop.wait(every):
        try:
            work()
        except SQLAlchemyError as error:
            proxy.stumbled()
            _log.warning("remote agents' turns have to wait: %s", error)
        except (ServersAway, StoreError, TurngymError) as error:
            _log.warning("remote agents' turns have to wait: %s", error)
