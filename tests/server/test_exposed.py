"""What callers who mean harm can make a server hold, and hold up, is bounded."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from raw_http2 import RawConnection, message
from sample_environments import DICE, GATE, PLAYED, THREADED_DICE
from server_process import ServerProcess
from serving import call_status, details, reason, reset_error, reset_item, serving, start, step
from token_files import write_tokens

from turngym.v1 import environment_pb2 as pb
from turngym_client import aconnect
from turngym_server.errors import Reason
from turngym_server.listening import MAX_REQUEST_BYTES, MAX_STREAMS
from turngym_server.rpc import room
from turngym_server.rpc.gate import MAX_STREAMS_OF_TOKEN
from turngym_server.rpc.requests import MAX_RESUME_BYTES
from turngym_server.rpc.stream import MAX_WAITING_BYTES

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


async def test_a_burst_of_calls_ends_none_of_anybody_else():
    async with serving(DICE) as (stub, server):
        with contextlib.ExitStack() as stack:
            # The event loop stands still meanwhile, so that all of them are pending.
            for connection in [stack.enter_context(RawConnection(server.address)) for _ in range(3)]:
                for _ in range(MAX_STREAMS):
                    connection.reset(connection.call("Step"))
            asked = [stub.GetServer(pb.GetServerRequest(), timeout=60) for _ in range(32)]
            assert all(answer.max_sessions for answer in await asyncio.gather(*asked))


@pytest.mark.parametrize("workers", ["1", "2"], ids=["server", "front"])
async def test_a_path_that_is_no_text_costs_nobody_a_session(workers):
    """It ends gRPC's server for Python, as of 1.85; ours goes on with another."""
    with ServerProcess("--env", "sokoban", "--workers", workers) as server:
        async with aconnect(server.address, patience=30) as client:
            episode = await client.reset("sokoban", level_seed=3)
            first = await episode.step("Up")
            with RawConnection(server.address) as connection:
                connection.call("Step", b"", (":path", b"/\x94\xda"))
                await asyncio.sleep(0.5)
                assert (await client.server()).max_sessions
            second = await episode.step("Left")
            assert first.digest != second.digest
            assert (await client.server()).sessions == 1, "it was not started again by replay"


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


@pytest.fixture
def closed_gate():
    GATE.clear()
    PLAYED.clear()
    yield
    GATE.set()


def large(session_id: str) -> pb.StepRequest:
    """A slow turn in a request of a mebibyte."""
    item = pb.StepItem(session_id=session_id, step_index=1, actions=["slow", "x" * MEBIBYTE])
    return pb.StepRequest(items=[item], max_wait_seconds=60)


async def test_bytes_that_wait_on_a_stream_are_bounded(closed_gate):
    async with serving(DICE, THREADED_DICE) as (stub, _):
        slow = (await start(stub, environment_id="threaded_dice")).session_id
        quick = (await start(stub)).session_id
        call = stub.StepStream()
        count = MAX_WAITING_BYTES // MEBIBYTE
        for number in range(count):
            await call.write(pb.StepStreamRequest(id=number, step=large(slow)))
        item = pb.StepItem(session_id=quick, step_index=1, actions=["roll"])
        await call.write(pb.StepStreamRequest(id=count, step=pb.StepRequest(items=[item])))
        answer = asyncio.ensure_future(call.read())
        await asyncio.sleep(0.3)
        assert not answer.done()
        GATE.set()
        answers = [await answer, *[await call.read() for _ in range(count)]]
        assert {each.id for each in answers} == set(range(count + 1))
        assert all(each.step.outcomes[0].HasField("transition") for each in answers)


async def test_bytes_under_way_are_bounded_for_each_caller_and_in_all(closed_gate, monkeypatch, tmp_path):
    monkeypatch.setattr(room, "MAX_BYTES_OF_CALLER", 3 * MEBIBYTE)
    monkeypatch.setattr(room, "MAX_BYTES", 5 * MEBIBYTE - 1)
    tokens = write_tokens(tmp_path / "tokens.toml", alice="train", bob="train")
    async with serving(DICE, THREADED_DICE, tokens=tmp_path / "tokens.toml") as (stub, _):

        async def begin(name: str) -> pb.StepRequest:
            item = reset_item("threaded_dice", split=pb.SPLIT_TRAIN)
            reply = await stub.Reset(pb.ResetRequest(items=[item]), metadata=tokens[name])
            return large(reply.outcomes[0].started.session_id)

        async def refused(name: str, request: pb.StepRequest) -> bool:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Step(request, metadata=tokens[name])
            info, delay = details(call_status(error.value))
            return (info.reason, info.metadata["quota"], delay) == ("QUOTA_EXCEEDED", "bytes_under_way", 1.0)

        under_way: list[asyncio.Future[pb.StepResponse]] = []
        for name in ("alice", "alice", "bob", "bob"):
            under_way.append(asyncio.ensure_future(stub.Step(await begin(name), metadata=tokens[name])))
            while len(PLAYED) < len(under_way):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        requests = {name: await begin(name) for name in tokens}
        for name, request in requests.items():
            assert await refused(name, request), "no room in all"
        quick = pb.StepRequest(items=[pb.StepItem(session_id="nobody", step_index=1, actions=["roll"])])
        assert reason((await stub.Step(quick, metadata=tokens["bob"])).outcomes[0]) == "SESSION_UNKNOWN"
        monkeypatch.setattr(room, "MAX_BYTES", 50 * MEBIBYTE)
        monkeypatch.setattr(room, "MAX_BYTES_OF_CALLER", 2 * MEBIBYTE)
        for name, request in requests.items():
            assert await refused(name, request), "no room for this caller"
        GATE.set()
        for reply in await asyncio.gather(*under_way):
            assert reply.outcomes[0].HasField("transition")
        for name, request in requests.items():
            assert (await stub.Step(request, metadata=tokens[name])).outcomes[0].HasField("transition")


async def test_replies_that_nobody_takes_are_bounded(monkeypatch):
    """gRPC keeps them: a caller who asks for much and reads nothing would have the server's memory."""
    monkeypatch.setattr(room, "MAX_BYTES_OF_CALLER", 100_000)
    monkeypatch.setattr(room, "REPLIES_COUNTED_FROM", 0)
    async with serving(DICE) as (stub, server):

        def ask(connection: RawConnection, client: str) -> int:
            body = message(pb.GetEnvironmentRequest(environment_id="dice").SerializeToString())
            return connection.call("GetEnvironment", body, ("turngym-client", client), ends=True)

        request = pb.GetEnvironmentRequest(environment_id="dice")
        size = (await stub.GetEnvironment(request)).ByteSize()
        with RawConnection(server.address, window=0) as silent:
            for _ in range(100_000 // size + 1):
                ask(silent, "silent")

            async def refused() -> grpc.aio.AioRpcError:
                """Once all of them are answered."""
                while True:
                    try:
                        await stub.GetEnvironment(request, metadata=(("turngym-client", "silent"),))
                    except grpc.aio.AioRpcError as error:
                        return error
                    await asyncio.sleep(0.01)

            async with asyncio.timeout(20):
                error = await refused()
            info, delay = details(call_status(error))
            assert (info.reason, info.metadata["quota"], delay) == ("QUOTA_EXCEEDED", "bytes_under_way", 1.0)
            await stub.GetEnvironment(request, metadata=(("turngym-client", "another"),))
        for _ in range(50):  # Those of a connection that has ended are no longer kept.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.GetEnvironment(request, metadata=(("turngym-client", "silent"),))
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("there is no room again")


async def test_compressed_requests_are_refused():
    """How large one is would only be known once it has been decompressed."""
    async with serving(DICE) as (stub, _):
        request = pb.GetEnvironmentRequest(environment_id="dice", options_json=" " * 10_000)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetEnvironment(request, compression=grpc.Compression.Gzip)
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="dice"))).environment.id == "dice"


async def test_a_streams_answers_that_nobody_takes_are_bounded(monkeypatch):
    """Those of large batches are made aside, and many may be ready while none is taken."""
    monkeypatch.setattr(room, "MAX_BYTES_OF_CALLER", 100_000)
    async with serving(DICE) as (stub, server):
        items = [pb.StepItem(session_id=f"nobody{number}", step_index=1, actions=["roll"]) for number in range(100)]
        request = pb.StepRequest(items=items)

        async def until(condition: Callable[[], object]) -> None:
            async with asyncio.timeout(20):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        silent = stub.StepStream()

        async def ask() -> None:
            for number in range(10_000):  # More than the connection takes by itself.
                await silent.write(pb.StepStreamRequest(id=number, step=request))

        asking = asyncio.ensure_future(ask())
        refusals = server.service.runtime.counts.rpc("StepStream").refusals
        await until(lambda: refusals[Reason.QUOTA_EXCEEDED])
        assert server.service.held_bytes <= 100_000
        asking.cancel()
        silent.cancel()
        await until(lambda: not server.service.held_bytes)
        stream = stub.StepStream()
        await stream.write(pb.StepStreamRequest(id=1, step=request))
        answer = await stream.read()
        assert {reason(outcome) for outcome in answer.step.outcomes} == {"SESSION_UNKNOWN"}
        await stream.done_writing()
