"""One call of `StepStream`: requests in as they come, answers out as they are ready.

Knows nothing of what is asked for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc.aio

from turngym_server.rpc.room import Kept

MAX_WAITING: Final = 64
"""Requests of one stream that wait for slow items; beyond them nothing is read, and the caller's writes stand still."""
MAX_WAITING_BYTES: Final = 16 * 1024 * 1024
"""The same of their bytes: what is read past it is one request."""

Context = grpc.aio.ServicerContext[Any, Any]


class RequestStream:
    """Answers the requests of one call until the caller has no more, or `stop`; what was read is always answered.

    gRPC must find its read where it left it when it completes, so nothing here cancels one.

    Args:
        context: of the call; its messages are bytes.
        answer: gives the answer to a request, or what will give it where it has to be waited for; asked in the order in
            which they come. What goes wrong is an answer too: it may not raise.
    """

    def __init__(self, context: Context, answer: Callable[[bytes], bytes | Awaitable[Kept]]) -> None:
        self._context = context
        self._answer = answer
        self._writing = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()
        self._waiting_bytes = 0
        self._at_rest = False
        self._stopped_at_rest: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopped = False

    async def run(self) -> None:
        """Serves the call. Where the caller is gone, gRPC cancels this: answers are dropped then, but no turn is."""
        reading = asyncio.get_running_loop().create_task(self._read_all())
        try:
            await asyncio.wait({reading, self._stopped_at_rest}, return_when=asyncio.FIRST_COMPLETED)
            if self._waiting:
                await asyncio.wait(self._waiting)
        finally:
            for task in self._waiting:
                task.cancel()
        if reading.done():
            reading.result()

    def stop(self) -> None:
        """Reads no further request."""
        self.stopped = True
        if self._at_rest and not self._stopped_at_rest.done():
            self._stopped_at_rest.set_result(None)

    async def _read_all(self) -> None:
        loop = asyncio.get_running_loop()
        while (request := await self._read()) is not None:
            answer = self._answer(request)
            if isinstance(answer, bytes):  # Written here: a task would do so a turn of the event loop later.
                await self._write(answer)
                continue
            self._waiting_bytes += len(request)
            task = loop.create_task(self._write_later(answer, len(request)))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
            while len(self._waiting) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES:
                await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)

    async def _read(self) -> bytes | None:
        """The next request; None after the last."""
        if self.stopped:
            return None
        self._at_rest = True
        try:
            request = await self._context.read()
        except grpc.aio.BaseError:  # The call is over.
            return None
        finally:
            self._at_rest = False
        return None if self.stopped or request is grpc.aio.EOF else request

    async def _write_later(self, answer: Awaitable[Kept], size: int) -> None:
        try:
            kept = await answer
            try:
                await self._write(kept.answer)
            finally:
                kept.let_go()
        finally:
            self._waiting_bytes -= size

    async def _write(self, answer: bytes) -> None:
        try:
            async with self._writing:
                await self._context.write(answer)
        except grpc.aio.BaseError:  # The call is over; its caller will ask again.
            self.stopped = True
