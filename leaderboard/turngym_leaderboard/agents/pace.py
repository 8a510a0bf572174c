"""How fast requests may follow each other. Pure arithmetic on a clock's readings; knows nothing of requests."""

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Spreads starts evenly, so that no minute sees more requests or tokens than allowed.

    Attributes:
        requests_per_minute, tokens_per_minute: 0: as many as there are.
    """

    requests_per_minute: float
    tokens_per_minute: float
    _next: float = 0.0

    def start(self, now: float, tokens: float) -> float:
        """When a request of about so many tokens may start, in the clock's seconds; what comes after waits for it."""
        begins = max(now, self._next)
        of_requests = 60 / self.requests_per_minute if self.requests_per_minute else 0.0
        self._next = begins + max(of_requests, self._seconds(tokens))
        return begins

    def correct(self, tokens: float) -> None:
        """A request took so many tokens more than `start` was told, or fewer."""
        self._next += self._seconds(tokens)

    def hold(self, until: float) -> None:
        """Nothing starts before that reading of the clock."""
        self._next = max(self._next, until)

    def _seconds(self, tokens: float) -> float:
        return 60 * tokens / self.tokens_per_minute if self.tokens_per_minute else 0.0
