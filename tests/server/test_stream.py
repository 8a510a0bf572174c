"""`StepStream`: the rules of Step for each request, over one call that may break, be abused or end with its server."""

import asyncio

import grpc
import grpc.aio
import pytest
from sample_environments import DICE, GATE, PLAYED, THREADED_DICE
from serving import CHANNEL_OPTIONS, call_status, reason, serving, start, step

from turngym.v1 import environment_pb2 as pb
from turngym_server.rpc.stream import MAX_WAITING


@pytest.fixture(autouse=True)
def open_gate():
    GATE.set()
    PLAYED.clear()
    yield
    GATE.set()


def request(id: int, *items: tuple[str, int, str], **fields) -> pb.StepStreamRequest:
    """Steps of (session, step index, action) each."""
    steps = [pb.StepItem(session_id=session, step_index=index, actions=[action]) for session, index, action in items]
    return pb.StepStreamRequest(id=id, step=pb.StepRequest(items=steps, **fields))


async def until(reached) -> None:
    """Waits for a condition that the event loop or a thread brings about."""
    while not reached():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def ask(call, *requests: pb.StepStreamRequest) -> list[pb.StepStreamResponse]:
    """Sends them all, and gives as many answers, as they come."""
    for each in requests:
        await call.write(each)
    return [await call.read() for _ in requests]


async def test_requests_are_answered_under_their_ids_as_they_are_ready():
    async with serving(DICE, THREADED_DICE) as (stub, _):
        slow = (await start(stub, environment_id="threaded_dice")).session_id
        quick = (await start(stub)).session_id
        GATE.clear()
        call = stub.StepStream()
        await call.write(request(1, (slow, 1, "slow"), max_wait_seconds=60))
        for index in (1, 2, 3):
            (answer,) = await ask(call, request(1 + index, (quick, index, "roll")))
            assert answer.id == 1 + index
            assert answer.step.outcomes[0].transition.actions_executed == 1
        GATE.set()
        answer = await call.read()
        assert (answer.id, answer.step.outcomes[0].session_id) == (1, slow)
        assert answer.step.outcomes[0].HasField("transition")
        assert PLAYED.count("slow") == 1
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_the_same_outcomes_as_by_step():
    async with serving(DICE) as (stub, _):
        first, second = [(await start(stub, level_seed=5, noise_seed=6)).session_id for _ in range(2)]
        call = stub.StepStream()
        for index, action in enumerate(("roll", "nonsense", "roll", "stop"), start=1):
            (answer,) = await ask(call, request(index, (first, index, action), want_legal_actions=True))
            by_step = await step(stub, second, index, action, want_legal_actions=True)
            assert answer.step.outcomes[0].transition == by_step.transition
            assert by_step.transition.HasField("legal_actions")


async def test_the_same_id_twice_is_answered_twice_and_played_once():
    async with serving(DICE) as (stub, _):
        session = (await start(stub)).session_id
        first, second = await ask(stub.StepStream(), *[request(9, (session, 1, "roll"))] * 2)
        assert first == second
        assert first.id == 9
        assert first.step.outcomes[0].HasField("transition")
        assert PLAYED == ["roll"]


async def test_a_slow_item_is_pending_and_collected_by_asking_again():
    async with serving(DICE, THREADED_DICE) as (stub, _):
        slow = (await start(stub, environment_id="threaded_dice")).session_id
        quick = (await start(stub)).session_id
        GATE.clear()
        call = stub.StepStream()
        (answer,) = await ask(call, request(1, (slow, 1, "slow"), (quick, 1, "roll"), max_wait_seconds=60))
        assert [each.WhichOneof("outcome") for each in answer.step.outcomes] == ["pending", "transition"]
        (answer,) = await ask(call, request(2, (slow, 1, "slow"), max_wait_seconds=0.01))
        assert answer.step.outcomes[0].HasField("pending")
        GATE.set()
        (answer,) = await ask(call, request(3, (slow, 1, "slow")))
        assert answer.step.outcomes[0].HasField("transition")
        assert PLAYED.count("slow") == 1


async def test_what_is_refused_is_refused_alone():
    async with serving(DICE) as (stub, _):
        session = (await start(stub)).session_id
        good = request(1, (session, 1, "roll"))
        answers = await ask(
            stub.StepStream(),
            pb.StepStreamRequest(id=2),
            request(3, *[(session, 1, "roll")] * 1_025),
            request(4, (session, 1, "roll"), max_wait_seconds=-1),
            request(5, ("nobody", 1, "roll"), (session, 1, "roll")),
            good,
        )
        assert [answer.id for answer in answers] == [2, 3, 4, 5, 1]
        for answer, words in zip(answers, ("0 items", "1025 items", "max_wait_seconds -1"), strict=False):
            assert reason(answer.error) == "INVALID_ITEM"
            assert words in answer.error.message
        unknown, played = answers[3].step.outcomes
        assert reason(unknown) == "SESSION_UNKNOWN"
        assert played.HasField("transition")
        assert answers[4].step.outcomes[0] == played
        assert PLAYED == ["roll"]


async def test_bytes_that_are_no_request():
    async with (
        serving(DICE) as (stub, server),
        grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel,
    ):
        session = (await start(stub)).session_id
        good = request(1, (session, 1, "roll")).SerializeToString()
        bad_text = request(6, (session, 1, "???"), (session, 1, "roll")).SerializeToString().replace(b"???", b"\xff??")
        call = channel.stream_stream("/turngym.v1.EnvironmentService/StepStream")()
        answers = []
        many = request(8, *[(session, 1, "roll")] * 50_000).SerializeToString()
        bad = (b"\xff\xff\xff", request(7).SerializeToString() + b"\x0f", good + b"\x0f", many)
        for data in (*bad, bad_text, good):
            await call.write(data)
            answers.append(pb.StepStreamResponse.FromString(await call.read()))
        assert [answer.id for answer in answers] == [0, 7, 1, 8, 6, 1]
        assert [reason(answer.error) for answer in answers[:4]] == ["INVALID_ITEM"] * 4
        assert "more than 100000 fields" in answers[3].error.message
        undecodable, played = answers[4].step.outcomes
        assert reason(undecodable) == "INVALID_ITEM"
        assert (undecodable.session_id, undecodable.step_index) == (session, 1)
        assert answers[5].step.outcomes[0] == played
        assert PLAYED == ["roll"]


async def test_a_stream_that_breaks_in_mid_step_loses_nothing():
    async with serving(THREADED_DICE) as (stub, server):
        session = (await start(stub, environment_id="threaded_dice")).session_id
        GATE.clear()
        call = stub.StepStream()
        await call.write(request(1, (session, 1, "slow")))
        await until(lambda: PLAYED)
        call.cancel()
        again = stub.StepStream()
        await again.write(request(1, (session, 1, "slow")))
        GATE.set()
        assert (await again.read()).step.outcomes[0].HasField("transition")
        assert PLAYED == ["slow"]
        assert (await step(stub, session, 2, "roll")).HasField("transition")
        await until(lambda: len(server.service.streams) == 1)  # The broken one is forgotten.


async def test_what_waits_is_bounded():
    async with serving(DICE, THREADED_DICE, threads=1) as (stub, _):
        slow = (await start(stub, environment_id="threaded_dice")).session_id
        quick = (await start(stub)).session_id
        GATE.clear()
        call = stub.StepStream()
        for number in range(MAX_WAITING):
            await call.write(request(number, (slow, 1, "slow"), max_wait_seconds=60))
        await call.write(request(MAX_WAITING, (quick, 1, "roll")))
        answer = asyncio.ensure_future(call.read())
        await asyncio.sleep(0.1)
        assert not answer.done()
        GATE.set()
        answers = [await answer, *[await call.read() for _ in range(MAX_WAITING)]]
        assert {each.id for each in answers} == set(range(MAX_WAITING + 1))
        assert all(each.step.outcomes[0].HasField("transition") for each in answers)
        assert PLAYED.count("slow") == 1


async def test_a_draining_server_answers_what_it_has_read_and_ends_its_streams():
    async with serving(THREADED_DICE, grace_seconds=600) as (stub, server):
        session = (await start(stub, environment_id="threaded_dice")).session_id
        idle, call = stub.StepStream(), stub.StepStream()
        assert (await ask(idle, request(1)))[0].HasField("error")
        GATE.clear()
        await call.write(request(1, (session, 1, "slow"), max_wait_seconds=60))
        await until(lambda: PLAYED)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0.05)
        (refused,) = await ask(idle, request(2))
        assert refused.HasField("error"), "until the last turn is done, streams go on"
        GATE.set()
        assert (await call.read()).step.outcomes[0].HasField("transition")
        for each in (idle, call):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await each.read()
            assert reason(call_status(ended.value)) == "DRAINING"
        await draining
