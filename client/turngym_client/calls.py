"""What a call comes to: its reply, or a StatusError in place of gRPC's own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar, cast

import grpc.aio
from google.rpc import status_pb2

from turngym_client.errors import ServerUnavailable
from turngym_client.messages import StatusError

ResultT = TypeVar("ResultT")


async def result(call: Awaitable[ResultT]) -> ResultT:
    """The call's reply; a StatusError in place of gRPC's own."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise StatusError(status_of(error), of_item=False) from error
    except asyncio.CancelledError:
        # gRPC also cancels the calls of a channel that is closed; that is no cancellation of the waiting task.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise ServerUnavailable("the client was closed while this was under way") from None


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    code = cast("tuple[int, str]", error.code().value)[0]
    return status_pb2.Status(code=code, message=error.details() or "")
