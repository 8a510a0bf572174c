"""How much a token may ask for in a second.

Knows nothing of tokens or RPCs; runs on a clock that is handed in.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from turngym_server.access.ledger import Left, Usage

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

    @property
    def of_a_second(self) -> bool:
        """Whether any of them bounds what comes in a second."""
        return self.requests_per_second is not None or self.bytes_per_second is not None


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

    def wait(self, elsewhere: float) -> float:
        """Seconds until something is left; 0 where it is.

        Args:
            elsewhere: what other workers have let in since this was last asked; it is no more than what was refilled
                meanwhile unless they had some left.
        """
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._seen) * self._rate - elsewhere)
        self._seen = now
        return 0.0 if self._left > 0 else -self._left / self._rate + _AFTER_EMPTY

    def take(self, amount: float) -> None:
        self._left -= amount

    def learn(self, left: float, at: float) -> None:
        """There is no more left than another found at that time, and what was refilled since."""
        self._left = min(self._left, left + (self._seen - at) * self._rate)

    @property
    def left(self) -> float:
        """What was left when it was last asked or taken from."""
        return self._left


_AFTER_EMPTY = 0.001
"""Seconds after an empty bucket holds something again that a caller is asked to wait: so that it finds it."""


class Meter:
    """What is left of one token's quotas.

    Args:
        usage: where several workers count against them; None: nobody else does.
    """

    __slots__ = ("_bytes", "_clock", "_requests", "_usage")

    def __init__(self, quotas: Quotas, clock: Callable[[], float], usage: Usage | None = None) -> None:
        self._clock = clock
        self._usage = usage
        self._requests = None if quotas.requests_per_second is None else Bucket(quotas.requests_per_second, clock)
        self._bytes = None if quotas.bytes_per_second is None else Bucket(quotas.bytes_per_second, clock)
        if usage is not None:
            usage.taken_elsewhere()  # It is in what is left now.
            for left in usage.left_elsewhere():
                for bucket, found in ((self._requests, left.requests), (self._bytes, left.bytes)):
                    if bucket is not None:
                        bucket.learn(found, left.at)

    def admit(self, size: int) -> tuple[str, float]:
        """Counts a request of `size` bytes, unless a quota is used up.

        Returns:
            Which quota is, and seconds until the request may come again; ("", 0) where it is admitted.
        """
        requests, taken = (0.0, 0.0) if self._usage is None else self._usage.taken_elsewhere()
        # Both are asked, so that both learn what was taken elsewhere.
        waits = [
            (name, bucket.wait(elsewhere))
            for name, bucket, elsewhere in (
                ("requests_per_second", self._requests, requests),
                ("bytes_per_second", self._bytes, taken),
            )
            if bucket is not None
        ]
        for name, wait in waits:
            if wait:
                return name, wait
        self._take(1, size)
        return "", 0.0

    def charge(self, size: int) -> None:
        """Counts bytes that are not asked for leave: those of a reply."""
        self._take(0, size)

    def _take(self, requests: int, size: int) -> None:
        for bucket, amount in ((self._requests, requests), (self._bytes, size)):
            if bucket is not None:
                bucket.take(amount)
        if self._usage is not None:
            left = (math.inf if bucket is None else bucket.left for bucket in (self._requests, self._bytes))
            self._usage.take(requests, size, Left(*left, at=self._clock()))
