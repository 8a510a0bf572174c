"""Joins concurrent items into few requests, without a timer.

What is submitted while no request is under way leaves at once (with all else of the same turn of the event loop); what
comes while one is under way leaves together when it returns. So one caller pays no wait, and 64 share few requests.
Where there are enough items for two requests, two are under way at a time, so that the server plays one while this side
reads and writes the other.

An item that comes back unfinished (None) is sent again apart from the fresh ones, so that a slow item never holds a
quick one up: fresh requests ask for an answer within `FRESH_WAIT`, and only repeated ones wait long.

Knows nothing of gRPC or of what an item means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

FRESH_WAIT: Final = 0.01
"""Seconds that a request of fresh items lets the server wait for the last of them."""
REPEATED_WAIT: Final = 0.5
"""The same for a request of items that were unfinished before."""
SIDE_BY_SIDE: Final = 16
"""Least items of each of two requests that are under way at a time. Fewer would not pay for a request of their own."""
MAX_FRESH: Final = 4
"""Requests of fresh items under way; more than two only while each is full."""
MAX_REPEATED: Final = 8
"""Requests of repeated items under way."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Waiting(Generic[ItemT, ResultT]):
    item: ItemT
    size: int
    result: asyncio.Future[ResultT]


class Coalescer(Generic[ItemT, ResultT]):
    """One lane of items that may share requests. Belongs to one event loop.

    Args:
        send: sends items and gives their results in order, None for one that is unfinished and must be sent again.
            Its second argument is how many seconds the server may wait for all of them. What it raises is every
            item's outcome.
        max_items: items in one request; asked anew each time, as a server that comes back may say otherwise.
        max_size: sum of the items' `size` in one request; a larger item travels alone.
    """

    def __init__(
        self,
        send: Callable[[Sequence[ItemT], float], Awaitable[Sequence[ResultT | None]]],
        *,
        max_items: Callable[[], int],
        max_size: int,
        size: Callable[[ItemT], int],
    ) -> None:
        self._send = send
        self._max_items = max_items
        self._max_size = max_size
        self._size = size
        self._fresh: deque[_Waiting[ItemT, ResultT]] = deque()
        self._repeated: deque[_Waiting[ItemT, ResultT]] = deque()
        self._fresh_under_way = 0
        self._repeated_under_way = 0
        self._under_way: dict[asyncio.Task[None], list[_Waiting[ItemT, ResultT]]] = {}
        self._flush_is_due = False
        self._loop = asyncio.get_running_loop()  # Asked for once: it costs a system call each time.

    def submit(self, item: ItemT) -> asyncio.Future[ResultT]:
        """The item's result, in time. Cancelling it gives the item up: it is not sent again."""
        result: asyncio.Future[ResultT] = self._loop.create_future()
        self._fresh.append(_Waiting(item, self._size(item), result))
        self._flush_soon()
        return result

    async def close(self, error: Exception) -> None:
        """Gives up whatever is under way; everybody who waits gets `error`."""
        under_way = dict(self._under_way)
        for task, batch in under_way.items():
            task.cancel()
            _fail(batch, error)
        _fail(self._fresh, error)
        _fail(self._repeated, error)
        self._fresh.clear()
        self._repeated.clear()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _flush_soon(self) -> None:
        # Everything submitted in this turn of the loop leaves together.
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        while most := self._fresh_items():
            if batch := self._take(self._fresh, most):
                self._fresh_under_way += 1
                self._start(batch, FRESH_WAIT)
        while self._repeated and self._repeated_under_way < MAX_REPEATED:
            if batch := self._take(self._repeated, self._max_items()):
                self._repeated_under_way += 1
                self._start(batch, REPEATED_WAIT)

    def _fresh_items(self) -> int:
        """How many fresh items may leave now in one more request."""
        ready, most = len(self._fresh), self._max_items()
        if self._fresh_under_way == 0:
            return min(most, (ready + 1) // 2 if ready >= 2 * SIDE_BY_SIDE else ready)
        least = min(SIDE_BY_SIDE, most) if self._fresh_under_way == 1 else most
        return min(most, ready) if ready >= least and self._fresh_under_way < MAX_FRESH else 0

    def _take(self, queue: deque[_Waiting[ItemT, ResultT]], most: int) -> list[_Waiting[ItemT, ResultT]]:
        """The front of the queue, as much as fits in one request, without what nobody waits for any more."""
        batch: list[_Waiting[ItemT, ResultT]] = []
        size = 0
        while queue and len(batch) < most:
            if batch and size + queue[0].size > self._max_size:
                break
            waiting = queue.popleft()
            if not waiting.result.done():
                batch.append(waiting)
                size += waiting.size
        return batch

    def _start(self, batch: list[_Waiting[ItemT, ResultT]], wait: float) -> None:
        task = self._loop.create_task(self._exchange(batch, wait))
        self._under_way[task] = batch
        task.add_done_callback(self._under_way.pop)

    async def _exchange(self, batch: list[_Waiting[ItemT, ResultT]], wait: float) -> None:
        try:
            results = await self._send([waiting.item for waiting in batch], wait)
            for waiting, result in zip(batch, results, strict=True):
                if result is None:
                    self._repeated.append(waiting)
                elif not waiting.result.done():
                    waiting.result.set_result(result)
        except Exception as error:
            _fail(batch, error)
        finally:
            if wait == FRESH_WAIT:
                self._fresh_under_way -= 1
            else:
                self._repeated_under_way -= 1
            self._flush_soon()


def _fail(batch: Iterable[_Waiting[ItemT, ResultT]], error: Exception) -> None:
    for waiting in batch:
        if not waiting.result.done():
            waiting.result.set_exception(error)
