"""What callers who mean harm can make a server hold, and hold up, is bounded."""

import asyncio

import grpc
import grpc.aio
import pytest
from raw_http2 import RawConnection
from sample_environments import DICE
from serving import reason, reset_error, reset_item, serving, start, step

from turngym.v1 import environment_pb2 as pb
from turngym_server.listening import MAX_REQUEST_BYTES, MAX_STREAMS
from turngym_server.rpc.requests import MAX_RESUME_BYTES

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE


async def test_calls_of_one_connection_are_bounded():
    async with serving(DICE) as (stub, server):
        with RawConnection(server.address) as connection:
            for _ in range(2 * MAX_STREAMS):
                connection.call("StepStream")
            while len(server.service.streams) < MAX_STREAMS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            session = (await start(stub)).session_id
            assert (await step(stub, session, 1, "roll")).HasField("transition")
            assert len(server.service.streams) == MAX_STREAMS


async def test_a_request_has_room_for_what_is_asked_honestly_and_no_more():
    async with serving(DICE) as (stub, _):
        turns = [pb.Actions(actions=["x" * 64 * KIBIBYTE])] * (MAX_RESUME_BYTES // (64 * KIBIBYTE))
        resume = pb.Resume(turns=turns, noise=[pb.NoiseSegment(from_step=1)], digest=bytes(32))
        assert resume.ByteSize() > MAX_RESUME_BYTES
        error = await reset_error(stub, reset_item(resume=resume))
        assert reason(error) == "INVALID_ITEM", "the server itself has read it"
        session = (await start(stub)).session_id
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await step(stub, session, 1, *["x" * MEBIBYTE] * (MAX_REQUEST_BYTES // MEBIBYTE))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await step(stub, session, 1, "roll")).HasField("transition")
