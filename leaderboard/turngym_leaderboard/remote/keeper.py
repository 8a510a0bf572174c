"""Has a proxy look after what nobody asks for, in a thread, while a service runs."""

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from turngym_client import TurngymError
from turngym_leaderboard.remote.proxy import Proxy, ServersAway
from turngym_leaderboard.store import StoreError

EVERY: Final = 5.0
"""Seconds between two looks."""
_log: Final = logging.getLogger(__name__)


@contextmanager
def kept(proxy: Proxy, every: float = EVERY) -> Generator[None]:
    """Within the block turns run out, and answers that no server could play are played."""
    proxy.renew()
    stop = threading.Event()
    keeper = threading.Thread(target=_keep, args=(proxy, stop, every), name="remote-keeper")
    keeper.start()
    try:
        yield
    finally:
        stop.set()
        keeper.join()


def _keep(proxy: Proxy, stop: threading.Event, every: float) -> None:
    while not stop.wait(every):
        try:
            proxy.sweep()
        except (ServersAway, StoreError, SQLAlchemyError, TurngymError) as error:
            _log.warning("remote agents' turns have to wait: %s", error)
