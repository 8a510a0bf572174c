"""Whoever holds a connection or a call open holds up no server that ends."""

import asyncio

import grpc.aio
import pytest
from raw_http2 import RawConnection, message
from sample_environments import DICE
from serving import serving

from turngym.v1 import environment_pb2 as pb

LONG = 600.0
PATIENCE = 30.0

EMPTY = message(b"")
HELD = {
    "no call": [],
    "a stream without a request": [("StepStream", b"", False)],
    "half a request of a stream": [("StepStream", message(b"half", length=1_000), False)],
    "a call without a request": [("Step", b"", False)],
    "half a request": [("Step", message(b"half", length=1_000), False)],
    "a reply not taken": [("GetServer", EMPTY, True)],
    "an answer not taken": [("StepStream", message(pb.StepStreamRequest(id=1).SerializeToString()), False)],
    "reflection": [("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"", False)],
    "a watch of its health": [("/grpc.health.v1.Health/Watch", EMPTY, True)],
}


@pytest.mark.parametrize("held", HELD)
async def test_nothing_idle_holds_up_a_draining_server(held: str):
    async with serving(DICE, grace_seconds=LONG) as (stub, server):
        idle = stub.StepStream()
        await idle.wait_for_connection()
        with RawConnection(server.address, window=0) as connection:
            for path, body, ends in HELD[held]:
                connection.call(path, body, ends=ends)
            await asyncio.sleep(0.1)  # The server has read what was sent.
            async with asyncio.timeout(PATIENCE):
                await server.drain()
        with pytest.raises(grpc.aio.AioRpcError):
            await idle.read()
