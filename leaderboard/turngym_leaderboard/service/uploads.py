"""Receives the files of submissions, part by part, into DATA/submissions/<public id>/.

What counts as received is on the disk before the database says so, and whole files only once their SHA-256 is the one
that was announced. So an upload that was cut off anywhere, by the sender or by the end of this process, goes on from
what the database says. Names come from the database, where only those of `intake.names` are.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedRandom
from pathlib import Path
from typing import Final

import anyio
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from turngym_leaderboard.service.problems import DISK_FULL, STUMBLED_SECONDS, problem
from turngym_leaderboard.store import NotFound, Store, submissions
from turngym_leaderboard.store.values import State, Submission, SubmissionFile

SAVED_EVERY: Final = 32 << 20
"""Bytes after which what has arrived is noted in the middle of a part."""
STALLS_AFTER: Final = 60.0
"""Seconds without a byte after which a part is over."""
RESERVE_BYTES: Final = 1 << 30
"""That must stay free on the board's disk."""
MAX_OPEN: Final = 4
"""Submissions of an owner whose files are still to come."""
_BUFFER: Final = 1 << 20


def room(store: Store) -> int:
    """Bytes that the disk has for files that are still to come."""
    return shutil.disk_usage(store.data).free - RESERVE_BYTES


async def receive_part(
    store: Store, submission: Submission, name: str, offset: int, parts: AsyncIterator[bytes]
) -> SubmissionFile:
    """Receives a part of a file from `offset` on, and tells where the file stands.

    What arrives before the sender or the connection gives up is kept. A file that is whole but has another SHA-256
    than was announced is dropped, to be sent again from its beginning.

    Raises:
        HTTPException: 404 there is no such file, 409 the part does not begin where the file ends, or another one is
            arriving, 413 it goes beyond the file's end, 422 the hash differs, 408 nothing came for a minute, 503 the
            disk is full.
        WrongState: the submission takes no more files.
    """
    await run_in_threadpool(_file, store, submission, name)
    path = store.folder(submission.public_id) / name
    with _told_when_full(), _alone(path) as stream:
        file = await run_in_threadpool(_file, store, submission, name)
        if offset != file.received:
            raise problem(
                409, f"{name} goes on at byte {file.received}, not at {offset}; send the rest of it from there"
            )
        if file.received == file.size:
            return file
        arrival = _Arrival(store, submission, file, stream)
        await run_in_threadpool(stream.seek, offset)
        try:
            async for chunk in _in_time(parts):
                await arrival.take(chunk)
        except ClientDisconnect:
            pass  # Nobody hears the answer; what came is kept.
        except BaseException:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(arrival.save)
            raise
        return await run_in_threadpool(arrival.save)


class _Arrival:
    """A part that is arriving."""

    def __init__(self, store: Store, submission: Submission, file: SubmissionFile, stream: BufferedRandom) -> None:
        self._store = store
        self._submission = submission
        self._file = file
        self._stream = stream
        self._buffer = bytearray()
        self._written = file.received
        self._saved = file.received

    async def take(self, chunk: bytes) -> None:
        if self._written + len(self._buffer) + len(chunk) > self._file.size:
            raise problem(413, f"{self._file.name} was announced with {self._file.size} bytes; more came")
        self._buffer += chunk
        if len(self._buffer) >= _BUFFER:
            await run_in_threadpool(self._write)

    def _write(self) -> None:
        self._stream.write(self._buffer)
        self._written += len(self._buffer)
        self._buffer.clear()
        if self._written - self._saved >= SAVED_EVERY and self._written < self._file.size:
            self._note(self._written)

    def save(self) -> SubmissionFile:
        """Notes all that has arrived; of a whole file only if it is the one that was announced."""
        self._write()
        if self._written == self._file.size:
            self._stream.seek(0)
            if hashlib.file_digest(self._stream, "sha256").hexdigest() != self._file.sha256:
                self._stream.truncate(0)
                self._note(0)
                raise problem(
                    422, f"{self._file.name} arrived with another SHA-256 than was announced; send it again from byte 0"
                )
        return self._note(self._written)

    def _note(self, received: int) -> SubmissionFile:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        submissions.set_received(self._store, self._submission.public_id, self._file.name, received)
        self._saved = received
        return replace(self._file, received=received)


def _file(store: Store, submission: Submission, name: str) -> SubmissionFile:
    """A file that still may arrive."""
    now = submissions.find(store, submission.public_id)
    if now.state is not State.UPLOADED:
        raise problem(409, f"submission {now.public_id} is {now.state.value}; it takes no more files")
    for file in submissions.files(store, submission.public_id):
        if file.name == name:
            return file
    raise NotFound(f"submission {submission.public_id} announced no such file")


@contextmanager
def _alone(path: Path) -> Generator[BufferedRandom]:
    """The file, open to be written by nobody else meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise problem(409, f"a part of {path.name} is arriving already; wait for its end") from None
        yield stream


@contextmanager
def _told_when_full() -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise problem(503, DISK_FULL, {"Retry-After": str(STUMBLED_SECONDS)}) from error


async def _in_time(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same, given up when nothing comes for too long."""
    while True:
        try:
            with anyio.fail_after(STALLS_AFTER):
                chunk = await anext(parts, None)
        except TimeoutError:
            raise problem(408, f"nothing came for {STALLS_AFTER:g} s; send the rest of the file again") from None
        if chunk is None:
            return
        yield chunk
