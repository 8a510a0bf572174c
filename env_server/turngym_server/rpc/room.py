"""How many bytes of requests a server holds that it has not answered yet.

Knows nothing of what is asked for.
"""

import contextlib
from collections import Counter
from collections.abc import Generator
from typing import Final

from turngym_server.errors import ItemError, Reason

COUNTED_FROM: Final = 64 * 1024
"""Smaller requests are not counted."""
MAX_BYTES_OF_CALLER: Final = 64 * 1024 * 1024
MAX_BYTES: Final = 512 * 1024 * 1024
RETRY_SECONDS: Final = 1.0


class Room:
    """Room for large requests under way, a part of which is each caller's most."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, account: str, size: int) -> Generator[None]:
        """Counts a request of `size` bytes for as long as it is under way.

        Args:
            account: whose it is.

        Raises:
            ItemError: QUOTA_EXCEEDED, where there is no room for it now.
        """
        if self._held[account] + size > MAX_BYTES_OF_CALLER or self._held.total() + size > MAX_BYTES:
            raise ItemError(
                Reason.QUOTA_EXCEEDED,
                f"{self._held[account]} bytes of requests of this caller are under way, {self._held.total()} in all; "
                f"with {size} more there may be {MAX_BYTES_OF_CALLER} and {MAX_BYTES}: ask again in a second",
                metadata={"quota": "bytes_under_way"},
                retry_after=RETRY_SECONDS,
            )
        self._held[account] += size
        try:
            yield
        finally:
            self._held[account] -= size
            if not self._held[account]:
                del self._held[account]
