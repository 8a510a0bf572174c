"""What a server counts about itself: plain integers, added to on the event loop, read whenever somebody asks.

Counting a turn must cost next to nothing beside playing it, so nothing here takes a lock or looks up a label. What is
counted has few values: environments served, splits, reasons. Never session ids, seeds or what a client wrote. Knows
nothing of how the numbers are published; `metrics.py` does that.
"""

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

from turngym_server.errors import Reason
from turngym_server.sessions.episode import EndReason
from turngym_server.splits import Split

SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper bounds of the buckets of durations."""
BATCH_ITEMS: Final = tuple(float(2**power) for power in range(11))
"""Upper bounds of the buckets of batch sizes: 1, 2, 4 … 1,024, the most that a call may hold."""


class Origin(enum.Enum):
    """How a session began."""

    RESET = "reset"
    RESUME = "resume"
    FORK = "fork"


class Departure(enum.Enum):
    """How a session ended: closed by its caller with or without a reason, by its lease, or with the server."""

    FINISHED = "finished"
    ABANDONED = "abandoned"
    ERROR = "error"
    CLOSED = "closed"
    EXPIRED = "expired"
    SHUTDOWN = "shutdown"


class Histogram:
    """How many values fell into each bucket, and their sum.

    Args:
        bounds: upper bounds of the buckets, ascending, each part of its bucket; one more holds what lies above.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class EnvironmentCounts:
    """What was counted of one environment.

    Attributes:
        turns: played, each once however often it was asked for; those of a replay are not among them.
        actions: run in those turns.
        started: sessions by split and origin. departed: sessions that are gone.
        ended: episodes that came to an end while they were played here. failed: those that an error ended.
        turn_seconds: turns played off the event loop, their wait for a thread included.
        reset_seconds: resets and, apart, resumptions, whether they succeeded or not.
    """

    __slots__ = ("actions", "departed", "ended", "failed", "reset_seconds", "started", "turn_seconds", "turns")

    def __init__(self) -> None:
        self.turns = 0
        self.actions = 0
        self.started: Counter[tuple[Split, Origin]] = Counter()
        self.departed: Counter[Departure] = Counter()
        self.ended: Counter[EndReason] = Counter()
        self.failed: Counter[Reason] = Counter()
        self.turn_seconds = Histogram(SECONDS)
        self.reset_seconds = {Origin.RESET: Histogram(SECONDS), Origin.RESUME: Histogram(SECONDS)}


class RpcCounts:
    """What was counted of one RPC.

    Attributes:
        seconds: of each call, refused ones included.
        items: of each call of a batched RPC that could be read.
        item_errors: items that failed, each time a caller was told so; turns that failed once, when they were played.
        refusals: calls that failed as a whole.
    """

    __slots__ = ("item_errors", "items", "refusals", "seconds")

    def __init__(self) -> None:
        self.seconds = Histogram(SECONDS)
        self.items = Histogram(BATCH_ITEMS)
        self.item_errors: Counter[Reason] = Counter()
        self.refusals: Counter[Reason] = Counter()


class Counts:
    """Everything that one server has counted since it started."""

    def __init__(self) -> None:
        self.environments: dict[str, EnvironmentCounts] = {}
        self.rpcs: dict[str, RpcCounts] = {}

    def environment(self, id: str) -> EnvironmentCounts:
        """Counts of an environment that is served; zero at first."""
        if (counts := self.environments.get(id)) is None:
            counts = self.environments[id] = EnvironmentCounts()
        return counts

    def rpc(self, name: str) -> RpcCounts:
        """Counts of an RPC; zero at first."""
        return self.rpcs.setdefault(name, RpcCounts())
