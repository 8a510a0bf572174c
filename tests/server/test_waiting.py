"""How much work of one caller may wait for threads."""

import asyncio
import json
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from sample_environments import CLOSED, GATE, THREADED_DICE, THREADED_FAULTY, make_spec
from serving import call_status, details, reason, request_id, reset_item, serving, start, step
from unruly import Unruly, UnrulyOptions

from turngym.v1 import environment_pb2 as pb
from turngym_client import Split, aconnect
from turngym_server.errors import Reason

SLEEPY = make_spec("sleepy", Unruly, UnrulyOptions, inline=False)
OTHER = (("turngym-client", "other"),)


@pytest.fixture
def gate():
    GATE.clear()
    yield GATE
    GATE.set()


def turn(session: pb.Started, action: str, step_index: int = 1) -> pb.StepRequest:
    item = pb.StepItem(session_id=session.session_id, step_index=step_index, actions=[action])
    return pb.StepRequest(items=[item], max_wait_seconds=0.01)


async def refused(call) -> None:
    """The whole call must be, for want of room to wait."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    status = call_status(error.value)
    assert (reason(status), details(status)[1]) == ("QUEUE_FULL", 0.1)


async def test_what_does_not_fit_is_refused_and_nothing_of_it_begun(gate):
    async with serving(THREADED_DICE, threads=8, max_queued_per_caller=3) as (stub, server):
        dice = [await start(stub, environment_id="threaded_dice") for _ in range(4)]
        for session in dice[:3]:
            assert (await stub.Step(turn(session, "slow"))).outcomes[0].HasField("pending")
        # A turn, the oracle, a reset and a fork too many.
        (outcome,) = (await stub.Step(turn(dice[3], "slow"))).outcomes
        assert (reason(outcome), details(outcome.error)[1]) == ("QUEUE_FULL", 0.1)
        advice = pb.AdviseRequest(items=[pb.AdviseItem(session_id=dice[3].session_id)])
        assert reason((await stub.Advise(advice)).outcomes[0]) == "QUEUE_FULL"
        reset = pb.ResetRequest(items=[reset_item("threaded_dice") for _ in range(2)])
        await refused(stub.Reset(reset))
        item = pb.ForkItem(request_id=request_id(), session_id=dice[3].session_id, same_noise=True)
        fork = pb.ForkRequest(items=[item])
        await refused(stub.Fork(fork))
        assert server.service.table.held == 4
        # Another caller has a queue of its own, and what is under way is collected.
        begun = (await stub.Reset(reset, metadata=OTHER)).outcomes
        assert all(each.HasField("started") for each in begun)
        assert (await stub.Step(turn(dice[0], "slow"))).outcomes[0].HasField("pending")
        ids = [each.started.session_id for each in begun]
        assert all(
            each.closed for each in (await stub.Close(pb.CloseRequest(session_ids=ids), metadata=OTHER)).outcomes
        )
        gate.set()
        for session in dice[:3]:
            assert (await step(stub, session.session_id, 1, "slow", max_wait_seconds=30)).HasField("transition")
        # What was refused was never played: another turn may come in its place, and request ids are as good as new.
        assert (await step(stub, dice[3].session_id, 1, "stop", max_wait_seconds=30)).HasField("transition")
        assert all(each.HasField("started") for each in (await stub.Reset(reset)).outcomes)
        assert reason((await stub.Fork(fork)).outcomes[0]) == "WRONG_STEP_INDEX"


async def test_more_than_ever_fits_is_refused_however_empty_the_queue():
    async with serving(THREADED_DICE, max_queued_per_caller=2) as (stub, _):
        await refused(stub.Reset(pb.ResetRequest(items=[reset_item("threaded_dice") for _ in range(3)])))
        for _ in range(3):  # What has been made waits no more.
            request = pb.ResetRequest(items=[reset_item("threaded_dice") for _ in range(2)])
            assert all(each.HasField("started") for each in (await stub.Reset(request)).outcomes)


async def test_work_that_fails_waits_no_more():
    async with serving(THREADED_FAULTY, max_queued_per_caller=1) as (stub, _):
        for _ in range(2):
            failed = reset_item("threaded_faulty", options_json='{"reset": "raise"}')
            outcomes = (await stub.Reset(pb.ResetRequest(items=[failed]))).outcomes
            assert reason(outcomes[0]) == "ENVIRONMENT_FAILED"
            session = await start(stub, environment_id="threaded_faulty")
            advice = pb.AdviseRequest(items=[pb.AdviseItem(session_id=session.session_id)])
            assert reason((await stub.Advise(advice)).outcomes[0]) == "NO_ORACLE"
            assert reason(await step(stub, session.session_id, 1, "raise")) == "ENVIRONMENT_FAILED"


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # Counts set no event.
            await asyncio.sleep(0.005)


async def test_the_client_tries_again(gate):
    async with serving(THREADED_DICE, max_queued_per_caller=1) as (_, server):
        counts = server.service.runtime.counts
        async with aconnect(server.address, patience=60.0) as client:
            first, second, third = [await client.reset("threaded_dice", split=Split.ALL) for _ in range(3)]
            under_way = asyncio.ensure_future(first.step("slow"))
            await until(lambda: any(session.running for session in server.service.table.living))
            turn, copy = asyncio.ensure_future(second.step("roll")), asyncio.ensure_future(third.fork(same_noise=True))
            await until(lambda: counts.rpc("StepStream").item_errors[Reason.QUEUE_FULL])
            await until(lambda: counts.rpc("Fork").refusals[Reason.QUEUE_FULL])
            gate.set()
            assert "Rolled" in (await under_way).observation
            assert "Rolled" in (await turn).observation
            assert (await copy).state == third.state


async def test_asking_again_and_again_leaves_nothing_waiting(gate):
    """Neither for the legal actions of a turn under way nor for a session that is still being made."""
    async with serving(THREADED_DICE, SLEEPY) as (stub, server):
        session = await start(stub, environment_id="threaded_dice")
        request = turn(session, "slow")
        request.want_legal_actions = True
        slow = reset_item("sleepy", options_json='{"reset": "sleep 1"}')
        for _ in range(30):
            assert (await stub.Step(request)).outcomes[0].HasField("pending")
            reset = pb.ResetRequest(items=[slow], max_wait_seconds=0.001, want_legal_actions=True)
            assert (await stub.Reset(reset)).outcomes[0].HasField("pending")
        assert len(server.service.runtime.tasks) <= 4
        gate.set()
        played = await step(stub, session.session_id, 1, "slow", want_legal_actions=True, max_wait_seconds=30)
        assert list(played.transition.legal_actions.actions) == ["roll", "slow", "stop"]
        await step(stub, session.session_id, 2, "stop", max_wait_seconds=30)
        again = await step(stub, session.session_id, 2, "stop", want_legal_actions=True, max_wait_seconds=30)
        assert again.transition.observation.startswith("Stopped")
        begun = await stub.Reset(pb.ResetRequest(items=[slow], max_wait_seconds=30, want_legal_actions=True))
        assert begun.outcomes[0].HasField("started")


async def hung_fork(stub, session_id: str) -> str:
    item = pb.ForkItem(request_id=request_id(), session_id=session_id, same_noise=True)
    return reason((await stub.Fork(pb.ForkRequest(items=[item]), timeout=60)).outcomes[0])


async def hung_advice(stub, session_id: str) -> str:
    advice = pb.AdviseRequest(items=[pb.AdviseItem(session_id=session_id)])
    return reason((await stub.Advise(advice, timeout=60)).outcomes[0])


@pytest.mark.parametrize(("hangs", "ask"), [("slow fork", hung_fork), ("slow oracle", hung_advice)])
async def test_what_waits_for_something_hung_has_a_deadline_too(gate, hangs, ask):
    async with serving(THREADED_FAULTY, max_sessions=2, max_queued_per_caller=3) as (stub, server):
        options = json.dumps({"reset": hangs})
        session_id = (await start(stub, environment_id="threaded_faulty", options_json=options)).session_id
        for _ in range(2):
            assert await ask(stub, session_id) == "STEP_DEADLINE"
        # Neither session places nor room to wait are lost, nor is a task that would end with the hung thread only.
        assert server.service.table.held == 1
        server.service.runtime.waiting.check(next(server.service.table.living).identity.caller.account, 3)
        await stub.Close(pb.CloseRequest(session_ids=[session_id]))
        await until(lambda: not server.service.runtime.tasks)
        CLOSED.clear()
        gate.set()
        await until(lambda: CLOSED)
        assert CLOSED == [False]


async def test_a_close_that_hangs_keeps_no_thread_from_others(gate):
    async with serving(THREADED_FAULTY, threads=1) as (stub, server):
        options = '{"reset": "slow close"}'
        hung = [await start(stub, environment_id="threaded_faulty", options_json=options) for _ in range(2)]
        await stub.Close(pb.CloseRequest(session_ids=[each.session_id for each in hung]))
        await start(stub, environment_id="threaded_faulty")
        await until(lambda: not server.service.runtime.tasks)
