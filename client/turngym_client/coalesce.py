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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

FRESH_WAIT: Final = 0.01
"""Seconds that a request of fresh items lets the server wait for the last of them."""
REPEATED_WAIT: Final = 0.5
"""The same for a request of items that were unfinished before."""
SIDE_BY_SIDE: Final = 8
"""Least items of each of two requests that are under way at a time. Fewer would not pay for a request of their own."""
MAX_FRESH: Final = 4
"""Requests of fresh items under way; more than two only while each is full."""
MAX_REPEATED: Final = 8
"""Requests of repeated items under way."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class _Waiting(Generic[ItemT, ResultT]):
    __slots__ = ("item", "result", "size")

    def __init__(self, item: ItemT, size: int, result: asyncio.Future[ResultT]) -> None:
        self.item = item
        self.size = size
        self.result = result


class Request(Generic[ItemT, ResultT]):
    """Items that travel together, until they are answered or given up; only the first of the two counts.

    Attributes:
        items: in the order in which they were submitted.
        wait: seconds that the server may wait for all of them.
    """

    __slots__ = ("_batch", "_lane", "items", "wait")

    def __init__(self, lane: Coalescer[ItemT, ResultT], batch: Sequence[_Waiting[ItemT, ResultT]], wait: float) -> None:
        self.items = [waiting.item for waiting in batch]
        self.wait = wait
        self._batch = batch
        self._lane = lane

    def answer(self, results: Sequence[ResultT | Exception | None]) -> None:
        """Hands out the items' results, or what they failed with, in order; one whose result is None is sent again."""
        if self._lane.ended(self):
            for waiting, result in zip(self._batch, results, strict=True):
                if result is None:
                    self._lane.repeat(waiting)
                elif waiting.result.done():
                    pass
                elif isinstance(result, Exception):
                    waiting.result.set_exception(result)
                else:
                    waiting.result.set_result(result)

    def send(self, sending: Coroutine[Any, Any, None]) -> None:
        """Sends it in another way. What `sending` raises is every item's outcome."""
        self._lane.send(self, sending)

    def fail(self, error: Exception) -> None:
        """Makes `error` every item's outcome."""
        if self._lane.ended(self):
            _fail(self._batch, error)


class Coalescer(Generic[ItemT, ResultT]):
    """One lane of items that may share requests. Belongs to one event loop.

    Args:
        send: sends a request, and sees to it that it is answered, then or later. What it raises is every item's
            outcome.
        max_items: items in one request; asked anew each time, as a server that comes back may say otherwise.
        max_size: sum of the items' `size` in one request; a larger item travels alone.
    """

    def __init__(
        self,
        send: Callable[[Request[ItemT, ResultT]], Coroutine[Any, Any, None]],
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
        self._fresh_under_way: set[Request[ItemT, ResultT]] = set()
        self._repeated_under_way: set[Request[ItemT, ResultT]] = set()
        self._sending: set[asyncio.Task[None]] = set()
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
        for request in (*self._fresh_under_way, *self._repeated_under_way):
            request.fail(error)
        for queue in (self._fresh, self._repeated):
            _fail(queue, error)
            queue.clear()
        sending = list(self._sending)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)

    def ended(self, request: Request[ItemT, ResultT]) -> bool:
        """Notes that a request is under way no more, which makes room for others. False: that was known."""
        under_way = self._under_way(request.wait)
        if request not in under_way:
            return False
        under_way.discard(request)
        if self._fresh or self._repeated:
            self._flush_soon()
        return True

    def repeat(self, waiting: _Waiting[ItemT, ResultT]) -> None:
        """Sends an unfinished item again."""
        self._repeated.append(waiting)
        self._flush_soon()

    def send(self, request: Request[ItemT, ResultT], sending: Coroutine[Any, Any, None]) -> None:
        """Sends a request in a task of its own."""
        self._start(_exchange(request, sending))

    def _under_way(self, wait: float) -> set[Request[ItemT, ResultT]]:
        return self._fresh_under_way if wait == FRESH_WAIT else self._repeated_under_way

    def _flush_soon(self) -> None:
        # Everything submitted in this turn of the loop leaves together.
        if not self._flush_is_due:
            self._flush_is_due = True
            self._start(self._flush())

    def _start(self, sending: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _flush(self) -> None:
        self._flush_is_due = False
        requests: list[Request[ItemT, ResultT]] = []
        while most := self._fresh_items():
            self._take(self._fresh, most, FRESH_WAIT, requests)
        while self._repeated and len(self._repeated_under_way) < MAX_REPEATED:
            self._take(self._repeated, self._max_items(), REPEATED_WAIT, requests)
        # The first is sent here and now: another task would begin a turn of the loop later.
        for request in requests[1:]:
            self.send(request, self._send(request))
        if requests:
            await _exchange(requests[0], self._send(requests[0]))

    def _fresh_items(self) -> int:
        """How many fresh items may leave now in one more request."""
        ready, most, under_way = len(self._fresh), self._max_items(), len(self._fresh_under_way)
        if under_way == 0:
            return min(most, (ready + 1) // 2 if ready >= 2 * SIDE_BY_SIDE else ready)
        least = min(SIDE_BY_SIDE, most) if under_way == 1 else most
        return min(most, ready) if ready >= least and under_way < MAX_FRESH else 0

    def _take(
        self,
        queue: deque[_Waiting[ItemT, ResultT]],
        most: int,
        wait: float,
        requests: list[Request[ItemT, ResultT]],
    ) -> None:
        """Makes one more request of the front of a queue: as much as fits, without what nobody waits for any more."""
        batch: list[_Waiting[ItemT, ResultT]] = []
        size = 0
        while queue and len(batch) < most:
            if batch and size + queue[0].size > self._max_size:
                break
            waiting = queue.popleft()
            if not waiting.result.done():
                batch.append(waiting)
                size += waiting.size
        if batch:
            request = Request(self, batch, wait)
            self._under_way(wait).add(request)
            requests.append(request)


async def _exchange(request: Request[ItemT, ResultT], sending: Coroutine[Any, Any, None]) -> None:
    try:
        await sending
    except Exception as error:
        request.fail(error)


def _fail(batch: Iterable[_Waiting[ItemT, ResultT]], error: Exception) -> None:
    for waiting in batch:
        if not waiting.result.done():
            waiting.result.set_exception(error)
