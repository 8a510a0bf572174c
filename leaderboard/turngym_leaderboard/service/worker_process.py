"""The worker that a service starts beside itself: a process of its own, started again when it dies.

It ends with the service, however that ends, and hands back what it plays. Workers that were started by themselves may
run beside it.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import Final

from turngym_leaderboard.worker import WorkerConfig, run_worker, start_logging

_FIRST_WAIT: Final = 1.0
_LONGEST_WAIT: Final = 60.0
_STOPS_WITHIN: Final = 55.0
"""Longer than the worker gives its slots."""
_log: Final = logging.getLogger(__name__)


@contextmanager
def kept_running(config: WorkerConfig) -> Generator[None]:
    """A worker within the block."""
    stop = threading.Event()
    keeper = threading.Thread(target=_keep, args=(config, stop))
    keeper.start()
    try:
        yield
    finally:
        stop.set()
        keeper.join()


def _keep(config: WorkerConfig, stop: threading.Event) -> None:
    """Starts the worker whenever there is none, ever more slowly while it dies at once."""
    wait = _FIRST_WAIT
    while not stop.is_set():
        # Spawned: a forked process cannot use the database or a client of its parent's.
        process = multiprocessing.get_context("spawn").Process(target=_work, args=(config,), name="worker")
        process.start()
        lived_long = not _ends_within(process, stop, _LONGEST_WAIT)
        _ends_within(process, stop, None)
        if stop.is_set():
            _end(process)
            return
        wait = _FIRST_WAIT if lived_long else min(_LONGEST_WAIT, 2 * wait)
        _log.error("the worker ended (exit code %s); it is started again in %g s", process.exitcode, wait)
        stop.wait(wait)


def _ends_within(process: SpawnProcess, stop: threading.Event, seconds: float | None) -> bool:
    """Whether it ends within so many seconds, or is to be stopped; None: waits for either."""
    waited = 0.0
    while not stop.is_set() and (seconds is None or waited < seconds):
        process.join(0.5)
        if process.exitcode is not None:
            return True
        waited += 0.5
    return stop.is_set()


def _end(process: SpawnProcess) -> None:
    process.terminate()
    process.join(_STOPS_WITHIN)
    if process.exitcode is None:
        process.kill()
        process.join()


def _work(config: WorkerConfig) -> None:
    """The worker's whole life."""
    start_logging()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    raise SystemExit(run_worker(config))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
