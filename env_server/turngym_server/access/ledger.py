"""What the processes of one server have used of each token's quotas, in memory that they share.

A quota is the token's, whichever worker its calls come to, and of those that the front passes on the front counts each
once. So the front is one of the workers that this is about, the last of them. Each worker writes down what it has
granted, in a part of the memory that is its own, and reads what the others have. Nobody waits for a lock: a worker that
is stopped, or was killed, holds up no other. Two workers that grant the last of a quota in the same moment do not both
see it left, since each writes what it is about to grant before it reads: both refuse then, and are asked again.

The memory is a file without a name, which the front makes and its workers inherit; it ends with them. A part is

    u64 generation ‖ u64 rows ‖ rows of: 16 bytes of SHA-256 of the owner ‖ u64 sessions ‖
    f64 requests ‖ f64 bytes ‖ f64 requests left ‖ f64 bytes left ‖ f64 seconds

where requests and bytes are all that were ever counted, and what was left is as of those seconds on the machine's
monotonic clock. A worker begins its part anew, as another generation.
"""

import hashlib
import math
import mmap
import os
import secrets
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

MOST_OWNERS: Final = 16_384
"""Owners of one worker's part; those beyond are counted by that worker alone."""
_KEY_BYTES: Final = 16
_HEADER: Final = struct.Struct("=QQ")
_ROW: Final = struct.Struct(f"={_KEY_BYTES}sQddddd")
_SESSIONS: Final = struct.Struct("=Q")
_TAKEN: Final = struct.Struct("=ddddd")
_SESSIONS_AT: Final = _KEY_BYTES
_TAKEN_AT: Final = _KEY_BYTES + _SESSIONS.size
_PART_BYTES: Final = _HEADER.size + MOST_OWNERS * _ROW.size


def make_memory(workers: int) -> int:
    """The file descriptor of memory for so many workers; whoever inherits it can be a worker."""
    with tempfile.TemporaryFile() as file:
        file.truncate(workers * _PART_BYTES)
        return os.dup(file.fileno())


class Ledger:
    """One worker's view of the memory.

    Args:
        descriptor: of the memory. Closed here.
        workers: of the server. number: this worker's, from 1.
    """

    def __init__(self, descriptor: int, workers: int, number: int) -> None:
        self._memory = mmap.mmap(descriptor, workers * _PART_BYTES)
        os.close(descriptor)
        self._begins = (number - 1) * _PART_BYTES
        self._others = [_Part(self._memory, each * _PART_BYTES) for each in range(workers) if each != number - 1]
        self._rows = 0
        self._usages: dict[str, Usage] = {}
        _HEADER.pack_into(self._memory, self._begins, secrets.randbits(64) | 1, 0)

    def usage(self, owner: str) -> "Usage":
        """What is used of an owner's quotas."""
        if (usage := self._usages.get(owner)) is None:
            key = hashlib.sha256(owner.encode()).digest()[:_KEY_BYTES]
            usage = self._usages[owner] = Usage(self._memory, self._new_row(key), key, self._others)
        return usage

    def _new_row(self, key: bytes) -> int | None:
        """Where the next row begins, once it is there; None: there is no room for more."""
        if self._rows == MOST_OWNERS:
            return None
        begins = self._begins + _HEADER.size + self._rows * _ROW.size
        _ROW.pack_into(self._memory, begins, key, 0, 0.0, 0.0, math.inf, math.inf, 0.0)
        self._rows += 1
        generation, _ = _HEADER.unpack_from(self._memory, self._begins)
        _HEADER.pack_into(self._memory, self._begins, generation, self._rows)
        return begins


def forget(descriptor: int, number: int) -> None:
    """Empties the part of a worker that is gone: its sessions are, too."""
    os.pwrite(descriptor, _HEADER.pack(0, 0), (number - 1) * _PART_BYTES)


class Usage:
    """What is used of one owner's quotas, by this worker and by the others."""

    __slots__ = ("_bytes", "_key", "_memory", "_others", "_requests", "_row", "_seen")

    def __init__(self, memory: mmap.mmap, row: int | None, key: bytes, others: "Sequence[_Part]") -> None:
        self._memory = memory
        self._row = row
        self._key = key
        self._others = others
        self._requests = 0.0
        self._bytes = 0.0
        self._seen = [(0, 0.0, 0.0)] * len(others)

    def hold(self, sessions: int) -> None:
        """Says how many sessions this worker holds, those that it is about to start included."""
        if self._row is not None:
            _SESSIONS.pack_into(self._memory, self._row + _SESSIONS_AT, sessions)

    def take(self, requests: float, size: float, left: "Left") -> None:
        """Says that this worker has let in requests and bytes, and what it finds left after them."""
        self._requests += requests
        self._bytes += size
        if self._row is not None:
            told = self._requests, self._bytes, left.requests, left.bytes, left.at
            _TAKEN.pack_into(self._memory, self._row + _TAKEN_AT, *told)

    def sessions_elsewhere(self) -> int:
        """Sessions that the other workers hold."""
        return sum(part.sessions(self._key) for part in self._others)

    def taken_elsewhere(self) -> tuple[float, float]:
        """Requests and bytes that the other workers have let in since this was last asked."""
        requests = size = 0.0
        for place, part in enumerate(self._others):
            taken_requests, taken_bytes, *_ = part.taken(self._key)
            generation, seen_requests, seen_bytes = self._seen[place]
            if generation != part.generation:
                seen_requests = seen_bytes = 0.0
            self._seen[place] = part.generation, taken_requests, taken_bytes
            requests += taken_requests - seen_requests
            size += taken_bytes - seen_bytes
        return requests, size

    def left_elsewhere(self) -> "Iterator[Left]":
        """What the other workers found left when each of them last let something in."""
        for part in self._others:
            _, _, requests, size, at = part.taken(self._key)
            yield Left(requests, size, at)


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of quotas, of requests and of bytes, at a time; infinite where that is not known."""

    requests: float
    bytes: float
    at: float


class _Part:
    """Another worker's part, and where its owners' rows are."""

    def __init__(self, memory: mmap.mmap, begins: int) -> None:
        self._memory = memory
        self._begins = begins
        self._known = 0
        self._rows: dict[bytes, int] = {}
        self.generation = 0

    def sessions(self, key: bytes) -> int:
        row = self._find(key)
        return 0 if row is None else _SESSIONS.unpack_from(self._memory, row + _SESSIONS_AT)[0]

    def taken(self, key: bytes) -> tuple[float, float, float, float, float]:
        row = self._find(key)
        return (0.0, 0.0, math.inf, math.inf, 0.0) if row is None else _TAKEN.unpack_from(self._memory, row + _TAKEN_AT)

    def _find(self, key: bytes) -> int | None:
        generation, rows = _HEADER.unpack_from(self._memory, self._begins)
        if generation != self.generation:
            self.generation, self._known, self._rows = generation, 0, {}
        while self._known < rows:
            begins = self._begins + _HEADER.size + self._known * _ROW.size
            self._rows[self._memory[begins : begins + _KEY_BYTES]] = begins
            self._known += 1
        return self._rows.get(key)
