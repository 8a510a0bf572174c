"""How much work each caller may have waiting for threads and for episodes, what is under way included.

Callers are served in turn, so one who has much waiting holds up nobody else; but what waits takes memory, and time
that it may not have. Runs on the event loop. Knows nothing of what the work is.
"""

from collections import Counter
from typing import Final

from turngym_server.errors import ItemError, Reason

RETRY_AFTER: Final = 0.1
"""Seconds after which a caller whose queue was full should ask again."""


class Waiting:
    """Counts the work of each account that has been let in and is not done.

    Args:
        most: of one account.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()

    def check(self, account: str, count: int = 1) -> None:
        """Makes sure that `count` more pieces of work may wait.

        Raises:
            ItemError: QUEUE_FULL, with a delay.
        """
        waiting = self._counts[account]
        if waiting + count > self._most:
            raise ItemError(
                Reason.QUEUE_FULL,
                f"{waiting} turns, resets, forks and oracles of this caller wait or are under way, of at most "
                f"{self._most}; collect some, wait, or ask for fewer at a time",
                retry_after=RETRY_AFTER,
            )

    def enter(self, account: str) -> None:
        """One piece of work is let in; `leave` has to follow."""
        self._counts[account] += 1

    def leave(self, account: str) -> None:
        self._counts[account] -= 1
        if not self._counts[account]:
            del self._counts[account]
