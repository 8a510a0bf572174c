"""Steps over one `StepStream` call: requests under ids, answers as they come, a deadline for each.

Knows nothing of items, and opens no other stream: whoever owns a broken one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
        self._waiting: dict[int, asyncio.Future[pb.StepStreamResponse]] = {}
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.create_task(self._open())
        self._reading = self._loop.create_task(self._read())

    async def exchange(self, request: pb.StepRequest, deadline: float) -> pb.StepResponse:
        """The reply to a request.

        Args:
            deadline: seconds after which the request is given up; its answer is dropped when it comes.

        Raises:
            StatusError: the request was refused, was not answered in time, or the stream broke.
        """
        request_id = next(self._ids)
        waiting = self._waiting[request_id] = self._loop.create_future()
        try:
            async with asyncio.timeout(deadline):
                await self._write(pb.StepStreamRequest(id=request_id, step=request))
                response = await waiting
        except TimeoutError:
            message = f"no answer within {deadline:g} s"
            raise StatusError(
                status_pb2.Status(code=code_pb2.DEADLINE_EXCEEDED, message=message), of_item=False
            ) from None
        finally:
            del self._waiting[request_id]
        if response.HasField("error"):
            raise StatusError(response.error, of_item=False)
        return response.step

    async def close(self) -> None:
        """Ends the call; whoever still waits gets an error."""
        self._call.cancel()
        await self._reading

    async def _open(self) -> None:
        """Waits until gRPC takes messages. It would wait for ever for a call that is cancelled before."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._call.wait_for_connection()

    async def _write(self, message: pb.StepStreamRequest) -> None:
        """Sends a message. Where the stream is broken, `_read` says so to whoever waits.

        Cut off in the middle by a deadline, it takes the stream with it, as gRPC has it.
        """
        if not self._opening.done():
            await asyncio.wait({self._opening})
        try:
            async with self._writing:
                if not self.broken:
                    await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        except asyncio.CancelledError:
            # gRPC also raises it where the call was cancelled; that is no cancellation of this task.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise

    async def _read(self) -> None:
        """Hands out answers until the stream breaks, and then says so to whoever waits."""
        status = _ENDED
        try:
            while isinstance(response := await self._call.read(), pb.StepStreamResponse):
                waiting = self._waiting.get(response.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(response)
        except grpc.aio.AioRpcError as error:
            status = status_of(error)
        except asyncio.CancelledError:  # The call was, by `close` or with its channel.
            status = _CLOSED
        self.broken = True
        self._call.cancel()
        self._opening.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(pb.StepStreamResponse(error=status))
