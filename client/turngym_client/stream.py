"""Steps over one `StepStream` call: requests under ids, answers as they come, a deadline for each.

Knows nothing of items, and opens no other stream: whoever owns a broken one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import grpc.aio
from google.rpc import code_pb2, status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_client.calls import status_of
from turngym_client.messages import StatusError

if TYPE_CHECKING:
    StepStreamCall = grpc.aio.StreamStreamCall[pb.StepStreamRequest, pb.StepStreamResponse]

_ENDED: Final = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="the server ended the stream")
_CLOSED: Final = status_pb2.Status(code=code_pb2.CANCELLED, message="the stream was given up")

Answered = Callable[[pb.StepResponse | StatusError], None]
"""Is told the reply to a request; or that it was refused, was not answered in time, or the stream broke."""


class StepStream:
    """One call of `StepStream`, which ends with its first failure. Belongs to one event loop.

    Attributes:
        broken: the call is over; nothing more can be sent.
    """

    def __init__(self, call: StepStreamCall) -> None:
        self.broken = False
        self._call = call
        self._ids = itertools.count(1)
        self._writing = asyncio.Lock()
        self._being_written = 0
        self._waiting: dict[int, tuple[Answered, asyncio.TimerHandle]] = {}
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.create_task(self._open())
        self._reading = self._loop.create_task(self._read())

    async def send(self, request: pb.StepStreamRequest, deadline: float, answered: Answered) -> None:
        """Sends a request, unless it is answered before it can be.

        Args:
            request: gets its id here.
            deadline: seconds after which the request is given up; its answer is dropped when it comes.
            answered: called once.
        """
        request_id = request.id = next(self._ids)
        expiry = self._loop.call_later(deadline, self._expire, request_id, deadline)
        self._waiting[request_id] = answered, expiry
        if self.broken:
            self._answer(request_id, StatusError(_ENDED, of_item=False))
            return
        await self._write(request)

    async def close(self) -> None:
        """Ends the call; whoever still waits gets an error."""
        self._call.cancel()
        await self._reading

    async def _open(self) -> None:
        """Waits until gRPC takes messages. It would wait for ever for a call that is cancelled before."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._call.wait_for_connection()

    async def _write(self, request: pb.StepStreamRequest) -> None:
        """Sends a message. Where the stream is broken, `_read` says so to whoever waits."""
        if not self._opening.done():
            await asyncio.wait({self._opening})
        try:
            async with self._writing:
                if request.id in self._waiting:
                    self._being_written = request.id
                    await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        except asyncio.CancelledError:
            # gRPC also raises it where the call was cancelled; that is no cancellation of this task.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        finally:
            self._being_written = 0

    def _expire(self, request_id: int, deadline: float) -> None:
        """Gives up a request. One that gRPC has not taken by now takes the stream with it."""
        if self._being_written == request_id:
            self._call.cancel()
        status = status_pb2.Status(code=code_pb2.DEADLINE_EXCEEDED, message=f"no answer within {deadline:g} s")
        self._answer(request_id, StatusError(status, of_item=False))

    def _answer(self, request_id: int, answer: pb.StepResponse | StatusError) -> None:
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            answered, expiry = waiting
            expiry.cancel()
            answered(answer)

    async def _read(self) -> None:
        """Hands out answers until the stream breaks, and then says so to whoever waits."""
        status = _ENDED
        try:
            while isinstance(response := await self._call.read(), pb.StepStreamResponse):
                failed = response.HasField("error")
                self._answer(response.id, StatusError(response.error, of_item=False) if failed else response.step)
                if not self._waiting:
                    await asyncio.sleep(0)  # Who was answered goes on first: to begin another read takes as long.
        except grpc.aio.AioRpcError as error:
            status = status_of(error)
        except asyncio.CancelledError:  # The call was, by `close` or with its channel.
            status = _CLOSED
        self.broken = True
        self._call.cancel()
        self._opening.cancel()
        for request_id in list(self._waiting):
            self._answer(request_id, StatusError(status, of_item=False))
