"""The board's worker: plays and scores what is submitted, several submissions at once in slots.

Each slot is a process of its own, as is each checkpoint that it plays; a slot that dies is started again. When a slot,
the worker or the whole machine dies, the lease of its submission runs out and another slot, here or elsewhere, goes on
from what was committed. Asked to stop (SIGTERM, SIGINT, SIGHUP), slots put their submissions back into the queue.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from sqlalchemy.exc import SQLAlchemyError

from turngym.sealed import read_seal_key
from turngym_client import connect
from turngym_leaderboard.agents.confined_checkpoint import Bounds
from turngym_leaderboard.endpoints import check_keys, load_endpoints
from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.slot import Slot, SlotConfig
from turngym_leaderboard.store import open_store

_RESTART_SECONDS: Final = 2.0
"""Before a slot that died is started again."""
_STOPS_WITHIN: Final = 45.0
"""Longer than a slot waits for a database that somebody holds, and then for its turn."""
_TURN_ENDS_WITHIN: Final = 5.0
"""After a slot has put its submission back; a turn that takes longer is cut off."""
_LOOKS_EVERY: Final = 0.1
_OF_TERMINALS: Final = (signal.SIGINT, signal.SIGHUP)
_USED: Final = 0.8
"""Of the machine's memory, by checkpoints."""

_DONE: Final = 0
_UNPLAYABLE: Final = 3
_STOPPED: Final = 4
"""Exit codes of slots; Python's own, for an error that nobody expected, is 1."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker works.

    Attributes:
        data: the board's folder. database: URL of its PostgreSQL database; "": SQLite in the folder.
        servers: host:port of environment servers.
        devices: where checkpoints run. slots: submissions played at once on each.
        threads: torch threads of each slot. A policy's choices depend on them in their last bits, so all workers of a
            board want the same number.
        memory: bytes of a slot's checkpoint; 0: what one of its size needs, at most a slot's part of the machine's
            memory, less a fifth.
        seconds_per_token: that a checkpoint may take for a turn, per token of its answers.
        intake: how much a submission may be.
        lease_seconds: after so long without a sign of life a submission is taken over.
        until_idle: end when nothing waits and nothing runs, instead of waiting for more.
        seal_key: file of the key that the servers have too; None: seeds are sent openly.
        endpoints: file that registers endpoints; None: none are played.
    """

    data: Path
    database: str = field(default="", repr=False)
    servers: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    slots: int = 1
    threads: int = 1
    memory: int = 0
    seconds_per_token: float = 5.0
    intake: IntakeLimits = field(default_factory=IntakeLimits)
    lease_seconds: float = 60.0
    until_idle: bool = False
    seal_key: Path | None = None
    endpoints: Path | None = None

    def slot(self, device: str) -> SlotConfig:
        """Raises OSError or ValueError where the key or the endpoints cannot be read."""
        return SlotConfig(
            device=device,
            threads=self.threads,
            bounds=Bounds(
                memory=self.memory or self._share(),
                seconds_per_token=self.seconds_per_token,
                by_size=not self.memory,
            ),
            intake=self.intake,
            lease_seconds=self.lease_seconds,
            until_idle=self.until_idle,
            seal_key=read_seal_key(self.seal_key) if self.seal_key is not None else None,
            endpoints=load_endpoints(self.endpoints) if self.endpoints is not None else {},
        )

    def _share(self) -> int:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(_USED * machine) // (self.slots * len(self.devices))


def run_worker(config: WorkerConfig) -> int:
    """Runs the slots until it is asked to stop, or until all is played.

    Returns:
        An exit code: 0, or 1 where some board could not be played with these servers. Asked to stop, 128 and the
        signal's number; but 0 where nothing else ends a worker than SIGTERM.

    Raises:
        StoreError: the database cannot be opened.
        OSError, ValueError: the seal key, the endpoints or their keys cannot be read.
    """
    check_keys(config.slot("cpu").endpoints)
    with open_store(config.data, config.database):
        pass  # Made and migrated before any slot needs it.
    devices = {f"{device}/{k}": device for device in config.devices for k in range(config.slots)}
    codes: list[int] = []
    with _asked_by(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as asked:
        slots = {name: _start(config, device) for name, device in devices.items()}
        try:
            while slots and asked.by is None:
                connection.wait([slot.sentinel for slot in slots.values()], timeout=1.0)
                for name, slot in list(slots.items()):
                    if slot.exitcode is None:
                        continue
                    if slot.exitcode in (_DONE, _UNPLAYABLE):
                        codes.append(slot.exitcode)
                        del slots[name]
                        continue
                    told = "was stopped" if slot.exitcode == _STOPPED else f"died (exit code {slot.exitcode})"
                    if asked.by is None:
                        _log.error("slot %s %s; it is started again", name, told)
                    if not asked.within(_RESTART_SECONDS):
                        slots[name] = _start(config, devices[name])
        finally:
            _stop(list(slots.values()))
    if asked.by is not None:
        return 0 if asked.by == signal.SIGTERM and not config.until_idle else 128 + asked.by
    return int(_UNPLAYABLE in codes)


def start_logging() -> None:
    """Lines of this program on standard error, with their time."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("turngym_leaderboard").setLevel(logging.INFO)


class _Asked:
    """Whether a signal has come. No event, whose lock its handler could find taken by what it interrupted.

    Attributes:
        by: the signal's number.
    """

    def __init__(self) -> None:
        self.by: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """As a signal's handler."""
        self.by = number

    def within(self, seconds: float) -> bool:
        """Waits until it is asked to stop, at most so long. Returns whether it was."""
        ends = time.monotonic() + seconds
        while self.by is None and time.monotonic() < ends:
            time.sleep(_LOOKS_EVERY)
        return self.by is not None


@contextmanager
def _asked_by(*signals: signal.Signals) -> Generator[_Asked]:
    asked = _Asked()
    # Under `nohup` a terminal that is closed ends nothing.
    heeded = [number for number in signals if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)]
    before = [signal.signal(number, asked.handle) for number in heeded]
    try:
        yield asked
    finally:
        for number, handler in zip(heeded, before, strict=True):
            signal.signal(number, handler)


def _start(config: WorkerConfig, device: str) -> SpawnProcess:
    # Spawned: a forked process cannot use a client of its parent's, nor its database.
    process = multiprocessing.get_context("spawn").Process(target=_run_slot, args=(config, device))
    # A terminal's signals reach every process of a worker. A slot that is still importing must not die of them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_TERMINALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _stop(slots: Sequence[SpawnProcess]) -> None:
    for slot in slots:
        slot.terminate()
    ends = time.monotonic() + _STOPS_WITHIN
    for slot in slots:
        slot.join(max(0.0, ends - time.monotonic()))
        if slot.exitcode is None:
            slot.kill()
            slot.join()


def _run_slot(config: WorkerConfig, device: str) -> NoReturn:
    """A slot's whole life. It plays in a thread: an exception that a signal raised in the middle of a transaction, or
    of a finaliser, which swallows it, would leave its submission held.
    """
    start_logging()
    for number in _OF_TERMINALS:
        signal.signal(number, signal.SIG_IGN)  # The worker passes them on as SIGTERM.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_TERMINALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with (
        _asked_by(signal.SIGTERM) as asked,
        open_store(config.data, config.database) as store,
        connect(config.servers) as client,
        ThreadPoolExecutor(1, "slot") as thread,
    ):
        slot = Slot(config.slot(device), store, client)
        played = thread.submit(slot.run)
        while not wait([played], _LOOKS_EVERY).done:
            if asked.by is None:
                continue
            try:
                slot.stop()
            except SQLAlchemyError:
                _log.exception("what is played here is held until its lease runs out")
            if not wait([played], _TURN_ENDS_WITHIN).done:
                os._exit(_STOPPED)
        played.result()
    if asked.by is not None:
        raise SystemExit(_STOPPED)
    raise SystemExit(_UNPLAYABLE if slot.unplayable else _DONE)


def _end_with_parent() -> None:
    """Stops this process when the worker that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOPS_WITHIN)
    os._exit(1)
