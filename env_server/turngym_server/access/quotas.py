"""How much a token may ask for in a second.

Knows nothing of tokens or RPCs; runs on a clock that is handed in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MIN_REQUESTS_PER_SECOND: Final = 0.001
MAX_REQUESTS_PER_SECOND: Final = 1e9
MIN_BYTES_PER_SECOND: Final = 1.0
MAX_BYTES_PER_SECOND: Final = 1e15
MAX_SESSIONS: Final = 1_000_000_000
"""Quotas that an operator may set: whatever is shared among workers, or waited for, remains a number of sense."""

BURST_SECONDS = 1.0
"""Of unused quota, so much is kept for later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """What one token may use; None: not bounded.

    Attributes:
        max_sessions: held at once.
        requests_per_second: calls, each message of a stream counting as one.
        bytes_per_second: of requests and replies.
    """

    max_sessions: int | None = None
    requests_per_second: float | None = None
    bytes_per_second: float | None = None


class Bucket:
    """A token bucket that may be overdrawn: whatever comes is let in while something is left, however large it is.

    So a single message larger than the bucket gets through, and is paid for by waiting afterwards.

    Args:
        rate: refilled a second.
        clock: seconds, monotonic.
    """

    __slots__ = ("_clock", "_left", "_most", "_rate", "_seen")

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._most = rate * BURST_SECONDS
        self._left = self._most
        self._clock = clock
        self._seen = clock()

    def wait(self) -> float:
        """Seconds until something is left; 0 where it is."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._seen) * self._rate)
        self._seen = now
        return 0.0 if self._left > 0 else -self._left / self._rate + _AFTER_EMPTY

    def take(self, amount: float) -> None:
        self._left -= amount


_AFTER_EMPTY = 0.001
"""Seconds after an empty bucket holds something again that a caller is asked to wait: so that it finds it."""


class Meter:
    """What is left of one token's quotas."""

    __slots__ = ("_bytes", "_requests")

    def __init__(self, quotas: Quotas, clock: Callable[[], float]) -> None:
        self._requests = None if quotas.requests_per_second is None else Bucket(quotas.requests_per_second, clock)
        self._bytes = None if quotas.bytes_per_second is None else Bucket(quotas.bytes_per_second, clock)

    def admit(self, size: int) -> tuple[str, float]:
        """Counts a request of `size` bytes, unless a quota is used up.

        Returns:
            Which quota is, and seconds until the request may come again; ("", 0) where it is admitted.
        """
        for name, bucket in (("requests_per_second", self._requests), ("bytes_per_second", self._bytes)):
            if bucket is not None and (wait := bucket.wait()):
                return name, wait
        if self._requests is not None:
            self._requests.take(1)
        self.charge(size)
        return "", 0.0

    def charge(self, size: int) -> None:
        """Counts bytes that are not asked for leave: those of a reply."""
        if self._bytes is not None:
            self._bytes.take(size)
