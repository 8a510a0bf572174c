"""The server's log in a file, for tests that run it in their own process."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from turngym_server.watching.logs import BackgroundHandler


@contextlib.contextmanager
def logged(path: Path, formatter: logging.Formatter, level: int = logging.DEBUG) -> Iterator[None]:
    """Writes the server's log to a file while it lasts."""
    log = logging.getLogger("turngym_server")
    with path.open("wb", buffering=0) as stream:
        handler = BackgroundHandler(stream)
        handler.setFormatter(formatter)
        log.addHandler(handler)
        log.setLevel(level)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(logging.NOTSET)
            handler.close()
