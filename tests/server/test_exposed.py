"""What callers who mean harm can make a server hold, and hold up, is bounded."""

import asyncio

import grpc
import grpc.aio
import pytest
from raw_http2 import RawConnection
from sample_environments import DICE
from server_process import ServerProcess
from serving import call_status, reason, reset_error, reset_item, serving, start, step
from token_files import write_tokens

from turngym.v1 import environment_pb2 as pb
from turngym_client import aconnect
from turngym_server.listening import MAX_REQUEST_BYTES, MAX_STREAMS
from turngym_server.rpc.gate import MAX_STREAMS_OF_TOKEN
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


SERVICE = "/turngym.v1.EnvironmentService"


@pytest.mark.parametrize("workers", ["1", "2"], ids=["server", "front"])
async def test_nobody_without_a_token_is_waited_for(workers, tmp_path):
    """Neither a request that does not end nor a stream without one is received."""
    tokens = write_tokens(tmp_path / "tokens.toml", alice="train", kim="train")
    arguments = ("--env", "bandit", "--splits", "all", "--tokens", str(tmp_path / "tokens.toml"), "--workers", workers)
    with ServerProcess(*arguments) as server:
        write_tokens(tmp_path / "tokens.toml", alice="train")
        async with grpc.aio.insecure_channel(server.address) as channel:
            for rpc in ("Reset", "Step", "StepStream", "GetServer"):
                for metadata in (None, tokens["kim"]):
                    call = channel.stream_stream(f"{SERVICE}/{rpc}")(metadata=metadata, timeout=30)
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call.read()
                    assert reason(call_status(refused.value)) == "UNAUTHENTICATED"


async def test_streams_of_a_token_are_bounded_and_its_clients_play_without(tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", alice="train", bob="train")
    async with serving(DICE, tokens=tmp_path / "tokens.toml") as (stub, server):
        calls = [stub.StepStream(metadata=tokens["alice"]) for _ in range(MAX_STREAMS_OF_TOKEN)]
        while len(server.service.streams) < MAX_STREAMS_OF_TOKEN:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.StepStream(metadata=tokens["alice"]).read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        token = tokens["alice"][0][1].removeprefix("Bearer ")
        async with aconnect(server.address, token=token) as client:
            episode = await client.reset("dice")
            assert (await episode.step("roll")).actions_executed == 1
        others = stub.StepStream(metadata=tokens["bob"])
        await others.write(pb.StepStreamRequest(id=1))
        assert (await others.read()).id == 1
        calls[0].cancel()
        while len(server.service.streams) > MAX_STREAMS_OF_TOKEN:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        again = stub.StepStream(metadata=tokens["alice"])
        await again.write(pb.StepStreamRequest(id=1))
        assert (await again.read()).id == 1
