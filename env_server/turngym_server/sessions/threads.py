"""Threads for what may take longer than the event loop can wait.

`concurrent.futures` will not do: a thread that hangs would keep its place in the pool for ever and the process from
exiting. Here a hung thread is written off, replaced, and dies with the process.
"""

import asyncio
import contextvars
import functools
import threading
from collections import Counter, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Overrun(Exception):
    """Work was not done by its deadline. Not a TimeoutError, which the work itself may raise.

    Attributes:
        goes_on: it is still under way in its thread. False: it was ended, and says so by raising this itself.
    """

    def __init__(self, message: str, *, goes_on: bool = True) -> None:
        super().__init__(message)
        self.goes_on = goes_on


class Abandoned(asyncio.CancelledError):
    """Whoever waited was cancelled after the work was given to a thread. It goes on there, and `late` is called."""


class _Done(Generic[T]):
    """What a piece of work came to."""

    __slots__ = ("error", "value")

    def __init__(self, value: T | None, error: BaseException | None) -> None:
        self.value = value
        self.error = error


class _Job:
    """Work, who waits for it, and what to do if nobody does any more."""

    __slots__ = ("future", "late", "work")

    def __init__(
        self, work: Callable[[], Any], future: asyncio.Future[_Done[Any]], late: Callable[[], None] | None
    ) -> None:
        self.work = work
        self.future = future
        self.late = late


class _Places:
    """A semaphore that serves accounts in turn: however much one of them has waiting, another's next work is next.

    Args:
        limit: places in all. share: the most that one account has at once.
    """

    def __init__(self, limit: int, share: int) -> None:
        self._free = limit
        self._share = share
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, account: str) -> None:
        if self._free and self._taken[account] < self._share:
            self._take(account)
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self.release(account)  # It was given just before.
            raise

    def release(self, account: str) -> None:
        self._free += 1
        self._taken[account] -= 1
        if not self._taken[account]:
            del self._taken[account]
        for waiting in list(self._waiting):
            if self._free and self._taken[waiting] < self._share:
                self._give(waiting)

    def _give(self, account: str) -> None:
        """A place to the first of the account that still waits."""
        queue = self._waiting.pop(account)
        while queue:
            place = queue.popleft()
            if not place.done():
                self._take(account)
                place.set_result(None)
                break
        if queue:
            self._waiting[account] = queue  # Behind the others.

    def _take(self, account: str) -> None:
        self._free -= 1
        self._taken[account] += 1


class Threads:
    """Runs at most `limit` pieces of work at once, hung ones not counted. Belongs to one event loop.

    Args:
        share: the most that one account has at once, so that what hangs for it leaves places to the others; None: all.
    """

    def __init__(self, limit: int, share: int | None = None) -> None:
        self._limit = limit
        self._places = _Places(limit, share or limit)
        self._idle: list[_Thread] = []

    async def run(
        self,
        work: Callable[[], T],
        deadline: float | None = None,
        late: Callable[[], None] | None = None,
        account: str = "",
    ) -> T:
        """Returns what `work` returns, or raises what it raises.

        Args:
            work: runs in a thread, in the context of whoever gives it, whose span its log lines then name.
            deadline: seconds that it may take once it has begun.
            late: called once on the event loop when work has ended whose outcome nobody got: it ran past its deadline,
                or whoever waited was cancelled.
            account: for whom; where work has to wait, accounts are served in turn.

        Raises:
            Overrun: the deadline passed. The work goes on, and nobody learns what it comes to.
            Abandoned: this was cancelled, as far as work had been given to a thread; else it is a CancelledError.
        """
        await self._places.acquire(account)
        try:
            future: asyncio.Future[_Done[T]] = asyncio.get_running_loop().create_future()
            thread = self._idle.pop() if self._idle else _Thread(self._returned)
            thread.give(_Job(functools.partial(contextvars.copy_context().run, work), future, late))
            try:
                async with asyncio.timeout(deadline):
                    done = await future
            except TimeoutError:
                if future.cancelled():
                    raise Overrun(f"still running after {deadline:g} s") from None
                done = future.result()  # It was done in the moment that the deadline passed.
            except asyncio.CancelledError:
                if not future.cancelled() and late is not None:
                    late()  # It was done in the moment of the cancellation.
                raise Abandoned from None
        finally:
            self._places.release(account)
        if isinstance(done.error, asyncio.CancelledError):
            # Raised on the loop it would cancel the caller.
            raise RuntimeError("the work raised CancelledError") from done.error  # noqa: TRY004
        if done.error is not None:
            raise done.error
        return done.value  # pyright: ignore[reportReturnType]  # No error: it holds what work returned.

    def close(self) -> None:
        """Ends idle threads; busy ones end with what they are doing."""
        self._limit = 0
        while self._idle:
            self._idle.pop().stop()

    def _returned(self, thread: "_Thread") -> None:
        if len(self._idle) < self._limit:
            self._idle.append(thread)
        else:
            thread.stop()


class _Thread:
    """One thread and its jobs, one at a time."""

    def __init__(self, returned: "Callable[[_Thread], None]") -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._returned = returned
        threading.Thread(target=self._work, name="turngym-step", daemon=True).start()

    def give(self, job: _Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                done = _Done[Any](job.work(), None)
            except BaseException as error:  # Whatever it is, it belongs to whoever gave the work.
                done = _Done[Any](None, error)
            try:
                job.future.get_loop().call_soon_threadsafe(self._deliver, job, done)
            except RuntimeError:
                return  # The loop is closed: nobody waits, and no more work will come.
            del job, done

    def _deliver(self, job: _Job, done: _Done[Any]) -> None:
        if not job.future.cancelled():
            job.future.set_result(done)
        elif job.late is not None:
            job.late()
        self._returned(self)
