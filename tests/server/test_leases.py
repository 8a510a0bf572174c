"""How many sessions there may be, and how long they live."""

import asyncio
import gc
import weakref

import grpc
import grpc.aio
import pytest
from sample_environments import DICE, FAULTY, GATE, THREADED_DICE
from serving import (
    Clock,
    call_status,
    details,
    reason,
    request_id,
    reset_error,
    reset_item,
    serving,
    start,
    step,
)

from turngym.v1 import environment_pb2 as pb
from turngym_server.listening import FRONT_SERVICE, HOLD_KEY


async def held(stub) -> int:
    return (await stub.GetServer(pb.GetServerRequest())).sessions


async def refused(call) -> tuple[str, float | None]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    status = call_status(error.value)
    return reason(status), details(status)[1]


async def test_a_call_is_admitted_as_a_whole_or_not_at_all():
    async with serving(DICE, max_sessions=4) as (stub, _):
        three = pb.ResetRequest(items=[reset_item() for _ in range(3)])
        first = await stub.Reset(three)
        session = first.outcomes[0].started.session_id
        two = pb.ResetRequest(items=[reset_item() for _ in range(2)])
        name, delay = await refused(stub.Reset(two))
        assert (name, delay) == ("SESSION_LIMIT", 1.0)
        assert await held(stub) == 3
        # What is there already takes no place again, nor does an item that is refused for itself.
        assert await stub.Reset(three) == first
        mixed = pb.ResetRequest(items=[*three.items, reset_item(), reset_item("nothing")])
        outcomes = (await stub.Reset(mixed)).outcomes
        assert [each.WhichOneof("outcome") for each in outcomes] == ["started"] * 4 + ["error"]
        fork = pb.ForkRequest(items=[pb.ForkItem(request_id=request_id(), session_id=session)])
        assert await refused(stub.Fork(fork)) == ("SESSION_LIMIT", 1.0)
        assert reason((await stub.Fork(pb.ForkRequest(items=[pb.ForkItem(request_id=request_id())]))).outcomes[0]) == (
            "SESSION_UNKNOWN"
        )
        await stub.Close(pb.CloseRequest(session_ids=[session, outcomes[3].started.session_id]))
        outcomes = (await stub.Reset(two)).outcomes
        assert all(each.HasField("started") for each in outcomes)
        assert await held(stub) == 4


async def test_more_than_there_can_ever_be():
    async with serving(DICE, max_sessions=4) as (stub, _):
        request = pb.ResetRequest(items=[reset_item() for _ in range(5)])
        assert await refused(stub.Reset(request)) == ("SESSION_LIMIT", 1.0)
        assert await held(stub) == 0


async def test_a_callers_own_bound():
    async with serving(DICE, max_sessions=4, max_sessions_per_caller=2) as (stub, _):

        def reset(name: str, count: int):
            request = pb.ResetRequest(items=[reset_item() for _ in range(count)])
            return stub.Reset(request, metadata=(("turngym-client", name),))

        await reset("greedy", 2)
        assert await refused(reset("greedy", 1)) == ("SESSION_LIMIT", 1.0)
        await reset("modest", 1)
        assert await refused(reset("modest", 2)) == ("SESSION_LIMIT", 1.0)
        await reset("third", 1)
        assert await refused(reset("modest", 1)) == ("SESSION_LIMIT", 1.0)


async def test_a_reset_that_fails_gives_its_place_back():
    async with serving(DICE, FAULTY, max_sessions=1) as (stub, _):
        error = await reset_error(stub, reset_item("faulty", options_json='{"reset": "raise"}'))
        assert reason(error) == "ENVIRONMENT_FAILED"
        await start(stub)
        assert await held(stub) == 1


async def test_leases():
    clock = Clock()
    async with serving(DICE, clock=clock, lease_seconds=10, max_sessions=3) as (stub, server):
        started = {name: await start(stub) for name in ("idle", "played", "kept")}
        assert {each.lease_seconds for each in started.values()} == {10}
        ids = {name: each.session_id for name, each in started.items()}
        clock.now += 9
        await step(stub, ids["played"], 1, "roll")
        (outcome,) = (await stub.KeepAlive(pb.KeepAliveRequest(session_ids=[ids["kept"]]))).outcomes
        assert outcome.lease_seconds == 10
        clock.now += 1
        assert reason(await step(stub, ids["idle"], 1, "roll")) == "SESSION_EXPIRED"
        assert (await step(stub, ids["played"], 2, "roll")).HasField("transition")
        clock.now += 9
        assert reason(await step(stub, ids["kept"], 1, "roll")) == "SESSION_EXPIRED"
        outcomes = (await stub.KeepAlive(pb.KeepAliveRequest(session_ids=list(ids.values())))).outcomes
        assert [each.WhichOneof("outcome") for each in outcomes] == ["error", "lease_seconds", "error"]
        assert reason(outcomes[0]) == "SESSION_EXPIRED"
        closed = (await stub.Close(pb.CloseRequest(session_ids=list(ids.values())))).outcomes
        assert [each.closed for each in closed] == [False, True, False]
        assert await held(stub) == 0
        # Forgotten 60 s after the end.
        clock.now += 60
        server.service.table.sweep()
        assert reason(await step(stub, ids["idle"], 1, "roll")) == "SESSION_UNKNOWN"


async def test_expired_sessions_make_room_without_a_sweep():
    clock = Clock()
    async with serving(DICE, clock=clock, lease_seconds=10, max_sessions=1) as (stub, _):
        await start(stub)
        clock.now += 10
        await start(stub)
        assert await held(stub) == 1


async def test_a_running_step_holds_its_lease():
    clock = Clock()
    async with serving(THREADED_DICE, clock=clock, lease_seconds=10) as (stub, server):
        session = (await start(stub, environment_id="threaded_dice")).session_id
        GATE.clear()
        assert (await step(stub, session, 1, "slow", max_wait_seconds=0.01)).HasField("pending")
        clock.now += 100
        server.service.table.sweep()
        GATE.set()
        assert (await step(stub, session, 1, "slow")).HasField("transition")


async def test_a_request_id_is_remembered_until_60_seconds_after_the_end():
    clock = Clock()
    async with serving(DICE, clock=clock, lease_seconds=1_000) as (stub, server):
        item = reset_item()
        started = await start(stub, item)
        clock.now += 900
        server.service.table.sweep()
        assert await start(stub, item) == started
        await stub.Close(pb.CloseRequest(session_ids=[started.session_id]))
        clock.now += 59
        server.service.table.sweep()
        assert await start(stub, item) == started
        assert reason(await step(stub, started.session_id, 1, "roll")) == "SESSION_UNKNOWN"
        clock.now += 1
        server.service.table.sweep()
        again = await start(stub, item)
        assert again.session_id != started.session_id
        assert again.state == started.state


async def test_a_retry_after_the_lease_still_gives_the_legal_actions():
    # The first reply was lost, and the caller slept past the lease.
    clock = Clock()
    request = pb.ResetRequest(items=[reset_item()], want_legal_actions=True)
    async with serving(DICE, clock=clock, lease_seconds=10.0) as (stub, _):
        first = await stub.Reset(request)
        assert first.outcomes[0].started.state.legal_actions.actions == ["roll", "slow", "stop"]
        clock.now += 20
        session_id = first.outcomes[0].started.session_id
        assert reason(await step(stub, session_id, 1, "roll")) == "SESSION_EXPIRED"
        assert await stub.Reset(request) == first


async def test_nothing_is_left_of_abandoned_sessions():
    clock = Clock()
    async with serving(DICE, clock=clock, lease_seconds=10) as (stub, server):
        table = server.service.table
        item = reset_item()
        started = await start(stub, item)
        environment = weakref.ref(table.find(started.session_id, "").episode.environment)
        clock.now += 10
        table.sweep()
        while server.service.runtime.tasks:
            await asyncio.wait(set(server.service.runtime.tasks))
        gc.collect()
        assert environment() is None
        assert await start(stub, item) == started
        clock.now += 60
        table.sweep()
        assert not table.__dict__["_sessions"]
        assert not table.__dict__["_creations"]
        assert not table.__dict__["_forget"]


async def test_drain():
    """No new sessions; what runs is finished and collected; then nothing is served."""
    async with serving(THREADED_DICE) as (stub, server):
        item = reset_item("threaded_dice")
        started = await start(stub, item)
        session = started.session_id
        GATE.clear()
        turn = asyncio.ensure_future(step(stub, session, 1, "slow"))
        await asyncio.sleep(0.05)
        draining = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0.05)
        name, delay = await refused(stub.Reset(pb.ResetRequest(items=[reset_item("threaded_dice")])))
        assert (name, delay) == ("DRAINING", None)
        assert await start(stub, item) == started
        other = pb.ForkItem(request_id=request_id(), session_id=session, step_index=1)
        assert (await refused(stub.Fork(pb.ForkRequest(items=[other]))))[0] == "DRAINING"
        assert not draining.done()
        GATE.set()
        assert (await turn).HasField("transition")
        await draining
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await stub.GetServer(pb.GetServerRequest())
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_drain_gives_up_after_its_grace():
    async with serving(THREADED_DICE, grace_seconds=0.1) as (stub, server):
        session = (await start(stub, environment_id="threaded_dice")).session_id
        GATE.clear()
        turn = asyncio.ensure_future(step(stub, session, 1, "slow"))
        await asyncio.sleep(0.05)
        await server.drain()
        with pytest.raises(grpc.aio.AioRpcError):
            await turn
        GATE.set()


async def test_places_that_are_kept_for_a_fork(tmp_path):
    """Nobody else has them until they are used, given back, or forgotten; and only the front can have them kept."""
    clock, socket = Clock(), f"unix:{tmp_path}/front"
    async with (
        serving(DICE, max_sessions=4, clock=clock, front_socket=f"{tmp_path}/front") as (stub, server),
        grpc.aio.insecure_channel(socket) as inside,
        grpc.aio.insecure_channel(server.address) as outside,
    ):

        def ask(channel: grpc.aio.Channel, rpc: str, data: bytes, name: bytes = b""):
            return channel.unary_unary(f"/{FRONT_SERVICE}/{rpc}")(data, metadata=((HOLD_KEY, name.decode()),))

        started = await start(stub)
        items = [pb.ForkItem(request_id=request_id(), session_id=started.session_id, same_noise=True) for _ in range(2)]
        fork = pb.ForkRequest(items=items).SerializeToString()
        for rpc, data in (("Hold", fork), ("Fork", fork), ("LetGo", b"name")):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await ask(outside, rpc, data)
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED

        first = await ask(inside, "Hold", fork)
        assert await held(stub) == 3
        assert (await refused(ask(inside, "Hold", fork)))[0] == "SESSION_LIMIT"
        assert (await refused(stub.Reset(pb.ResetRequest(items=[reset_item(), reset_item()]))))[0] == "SESSION_LIMIT"
        await ask(inside, "LetGo", first)
        await ask(inside, "LetGo", first)
        assert await held(stub) == 1
        # Not used for a minute, they are anybody's.
        late = await ask(inside, "Hold", fork)
        clock.now += 61
        assert await ask(inside, "Hold", fork) != late
        # Used, they are the copies' own, though nothing else would fit and the server has begun to drain.
        server.service.table.sweep()
        clock.now += 61
        kept = await ask(inside, "Hold", fork)
        other = await start(stub)
        server.service.draining = True
        copies = pb.ForkResponse.FromString(await ask(inside, "Fork", fork, kept)).outcomes
        assert all(each.HasField("started") for each in copies)
        assert await held(stub) == 4
        assert pb.ForkResponse.FromString(await ask(inside, "Fork", fork, kept)).outcomes == copies
        server.service.draining = False
        ids = [started.session_id, other.session_id, *(each.started.session_id for each in copies)]
        await stub.Close(pb.CloseRequest(session_ids=ids))
        assert await held(stub) == 0
