"""How many bytes a server holds: of requests that it has not answered yet, and of replies that are not sent yet.

gRPC keeps a reply until its caller takes it, which is never where the caller does not want to; and a stream's answers
wait for one that is not taken. Where there are no tokens a caller is who it says, so this keeps one that fails from
harming others, not one that means harm.

Knows nothing of what is asked for.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, cast

from turngym_server.errors import ItemError, Reason
from turngym_server.rpc.call import Context

COUNTED_FROM: Final = 64 * 1024
"""Smaller requests are not counted: they are under way for a moment, or wait in a bounded queue."""
REPLIES_COUNTED_FROM: Final = 4 * 1024
"""Smaller replies are not counted either: a call takes more than they do, and some are asked for to see who is well."""
MAX_BYTES_OF_CALLER: Final = 64 * 1024 * 1024
MAX_BYTES: Final = 512 * 1024 * 1024
RETRY_SECONDS: Final = 1.0


class Kept(NamedTuple):
    """An answer that waits to be written, and what is called once it is."""

    answer: bytes
    let_go: Callable[[], None] = lambda: None


class Room:
    """Room for requests and replies under way, a part of which is each caller's most.

    Attributes:
        held: bytes, of all callers.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self.held = 0

    @contextlib.contextmanager
    def hold(self, account: str, size: int) -> Generator[None]:
        """Counts a request of `size` bytes for as long as it is under way.

        Args:
            account: whose it is.

        Raises:
            ItemError: QUOTA_EXCEEDED, where there is no room for it now.
        """
        let_go = self._take(account, size)
        try:
            yield
        finally:
            let_go()

    def keep(self, account: str, answer: bytes) -> "Kept":
        """A stream's answer that waits to be written, counted until it is. Raises as `hold` does."""
        if len(answer) < REPLIES_COUNTED_FROM:
            return Kept(answer)
        return Kept(answer, self._take(account, len(answer)))

    def hold_until_sent(self, context: Context, account: str, size: int) -> None:
        """Counts a call's reply of `size` bytes until the call is over. Raises as `hold` does."""
        if size < REPLIES_COUNTED_FROM:
            return
        let_go = self._take(account, size)

        def over(context: Context) -> None:
            let_go()

        context.add_done_callback(cast("Any", over))  # The stubs want a class of their own.

    def _take(self, account: str, size: int) -> Callable[[], None]:
        """Counts bytes, until what is returned is called."""
        held = self._held[account]
        if held + size > MAX_BYTES_OF_CALLER or self.held + size > MAX_BYTES:
            raise ItemError(
                Reason.QUOTA_EXCEEDED,
                f"{held} bytes of requests and replies of this caller are under way, {self.held} in all; "
                f"with {size} more there may be {MAX_BYTES_OF_CALLER} and {MAX_BYTES}: ask again in a second",
                metadata={"quota": "bytes_under_way"},
                retry_after=RETRY_SECONDS,
            )
        self._held[account] += size
        self.held += size

        def let_go() -> None:
            self.held -= size
            self._held[account] -= size
            if not self._held[account]:
                del self._held[account]

        return let_go
