"""Turns: played once, beside slow neighbours, in environments that fail, hang, or lie."""

import asyncio
import logging
from collections.abc import Sequence

import grpc
import grpc.aio
import pytest
from sample_environments import (
    CLOSED,
    DICE,
    FAULTY,
    GATE,
    PLAYED,
    THREADED_DICE,
    THREADED_FAULTY,
    Dice,
    DiceOptions,
    make_spec,
)
from serving import Clock, details, reason, request_id, reset_item, serving, start, step

from turngym.v1 import environment_pb2 as pb
from turngym_server.environment import Left
from turngym_server.rpc.batches import MAX_REPLY_BYTES


@pytest.fixture(autouse=True)
def open_gate():
    GATE.set()
    PLAYED.clear()
    yield
    GATE.set()


def step_item(session_id: str, step_index: int, *actions: str) -> pb.StepItem:
    return pb.StepItem(session_id=session_id, step_index=step_index, actions=actions)


async def test_a_clients_deadline_in_mid_step_loses_nothing():
    async with serving(THREADED_DICE) as (stub, _):
        session = (await start(stub, environment_id="threaded_dice")).session_id
        GATE.clear()
        request = pb.StepRequest(items=[step_item(session, 1, "roll", "slow", "roll")])
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await stub.Step(request, timeout=0.2)
        assert gone.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        running = await step(stub, session, 2, "roll")
        assert reason(running) == "STEP_RUNNING"
        assert reason(await step(stub, session, 1, "roll")) == "WRONG_STEP_INDEX"
        pending = await step(stub, session, 1, "roll", "slow", "roll", max_wait_seconds=0.01)
        assert pending.HasField("pending")
        GATE.set()
        outcome = await step(stub, session, 1, "roll", "slow", "roll")
        assert outcome.transition.actions_executed == 3
        assert PLAYED == ["roll", "slow", "roll"]
        assert (await step(stub, session, 2, "roll")).HasField("transition")


async def test_a_slow_neighbour_is_pending_and_the_others_are_not():
    async with serving(DICE, THREADED_DICE) as (stub, _):
        slow = (await start(stub, environment_id="threaded_dice")).session_id
        quick = [(await start(stub)).session_id for _ in range(63)]
        GATE.clear()
        items = [step_item(slow, 1, "slow"), *(step_item(each, 1, "roll") for each in quick)]
        outcomes = (await stub.Step(pb.StepRequest(items=items, max_wait_seconds=20))).outcomes
        assert [each.session_id for each in outcomes] == [slow, *quick]
        assert outcomes[0].HasField("pending")
        assert all(each.HasField("transition") for each in outcomes[1:])
        for index in (2, 3):
            items = [step_item(slow, 1, "slow"), *(step_item(each, index, "roll") for each in quick)]
            outcomes = (await stub.Step(pb.StepRequest(items=items, max_wait_seconds=20))).outcomes
            assert [each.WhichOneof("outcome") for each in outcomes] == ["pending"] + ["transition"] * 63
        GATE.set()
        assert (await step(stub, slow, 1, "slow")).HasField("transition")
        assert PLAYED.count("slow") == 1


async def test_the_first_that_is_done_ends_the_wait():
    """Two threaded sessions: the reply leaves soon after the quick one, long before max_wait."""
    async with serving(THREADED_DICE) as (stub, _):
        slow, quick = [(await start(stub, environment_id="threaded_dice")).session_id for _ in range(2)]
        GATE.clear()
        items = [step_item(slow, 1, "slow"), step_item(quick, 1, "roll")]
        call = stub.Step(pb.StepRequest(items=items, max_wait_seconds=60))
        outcomes = (await asyncio.wait_for(call, 20)).outcomes
        assert [each.WhichOneof("outcome") for each in outcomes] == ["pending", "transition"]


@pytest.mark.parametrize("environment", ["faulty", "threaded_faulty"])
@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise", "KeyError: 'a missing wall'"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: a game's own"),
        ("cancel", "CancelledError"),
        ("timeout", "TimeoutError: a connection of its own"),
        ("nan", "reward nan"),
        ("long", "262146 bytes"),
        ("surrogate", "surrogates not allowed"),
    ],
)
async def test_what_an_environment_raises_is_the_result(environment, action, words, caplog):
    async with serving(FAULTY, THREADED_FAULTY) as (stub, _):
        started = await start(stub, environment_id=environment, level_seed=77, noise_seed=88)
        session = started.session_id
        assert (await step(stub, session, 1, "go")).HasField("transition")
        with caplog.at_level(logging.ERROR):
            failed = await step(stub, session, 2, "go", action)
        assert reason(failed) == "ENVIRONMENT_FAILED"
        assert words in failed.error.message
        assert environment in failed.error.message
        (record,) = caplog.records
        for part in ("step 2", "level seed 77", "88 from step 1", '{"reset":"",', session, "Traceback", words):
            assert part in caplog.text
        assert record.exc_info
        assert await step(stub, session, 2, "go", action) == failed
        assert reason(await step(stub, session, 3, "go")) == "EPISODE_ENDED"
        fork = pb.ForkItem(request_id=request_id(), session_id=session, step_index=2)
        assert reason((await stub.Fork(pb.ForkRequest(items=[fork]))).outcomes[0]) == "EPISODE_ENDED"
        other = (await start(stub, environment_id=environment)).session_id
        assert (await step(stub, other, 1, "longest")).HasField("transition")


async def test_a_turn_past_its_deadline_has_failed():
    CLOSED.clear()
    async with serving(THREADED_FAULTY, threads=1) as (stub, server):
        session, other = [(await start(stub, environment_id="threaded_faulty")).session_id for _ in range(2)]
        GATE.clear()
        failed = await step(stub, session, 1, "hang")
        assert reason(failed) == "STEP_DEADLINE"
        assert "0.3 s" in failed.error.message
        assert await step(stub, session, 1, "hang") == failed
        assert reason(await step(stub, session, 2, "go")) == "EPISODE_ENDED"
        # The only thread still hangs: another has taken its place.
        assert (await step(stub, other, 1, "go")).HasField("transition")
        assert (await stub.Close(pb.CloseRequest(session_ids=[session]))).outcomes[0].closed
        await asyncio.sleep(0.05)
        assert CLOSED == []
        GATE.set()
        while server.service.runtime.tasks:
            await asyncio.wait(set(server.service.runtime.tasks))
        assert CLOSED == [False]
        assert (await step(stub, other, 2, "go")).HasField("transition")


async def test_a_slow_oracle_keeps_turns_waiting_but_changes_nothing():
    async with serving(THREADED_FAULTY) as (stub, _):
        options = '{"reset": "slow oracle"}'
        session = (await start(stub, environment_id="threaded_faulty", options_json=options)).session_id
        GATE.clear()
        asked = stub.Advise(pb.AdviseRequest(items=[pb.AdviseItem(session_id=session)]))
        (outcome,) = (await asked).outcomes
        assert reason(outcome) == "STEP_DEADLINE"
        turn = asyncio.ensure_future(step(stub, session, 1, "go"))
        await asyncio.sleep(0.1)
        assert not turn.done()
        GATE.set()
        assert (await turn).HasField("transition")
        (outcome,) = (await stub.Advise(pb.AdviseRequest(items=[pb.AdviseItem(session_id=session)]))).outcomes
        assert (list(outcome.advice.actions), outcome.advice.step_index) == (["go"], 1)


@pytest.mark.parametrize("environment", ["dice", "threaded_dice"])
async def test_legal_actions_only_when_asked(environment):
    async with serving(DICE, THREADED_DICE) as (stub, _):
        item = reset_item(environment)
        assert not (await start(stub, item)).state.HasField("legal_actions")
        (outcome,) = (await stub.Reset(pb.ResetRequest(items=[item], want_legal_actions=True))).outcomes
        legal = pb.LegalActions(actions=["roll", "slow", "stop"])
        assert outcome.started.state.legal_actions == legal
        session = outcome.started.session_id
        first = (await step(stub, session, 1, "roll", want_legal_actions=True)).transition
        assert first.legal_actions == legal
        assert not (await step(stub, session, 2, "roll")).transition.HasField("legal_actions")
        assert (await step(stub, session, 2, "roll", want_legal_actions=True)).transition.legal_actions == legal
        again = (await step(stub, session, 2, "roll", want_legal_actions=True)).transition
        assert again.legal_actions == legal
        assert again.digest == (await step(stub, session, 2, "roll")).transition.digest
        last = (await step(stub, session, 3, "stop", want_legal_actions=True)).transition
        assert last.legal_actions == pb.LegalActions()
        assert last.HasField("legal_actions")
        assert reason(await step(stub, session, 4, "stop", want_legal_actions=True)) == "EPISODE_ENDED"


@pytest.mark.parametrize("environment", ["faulty", "threaded_faulty"])
async def test_open_sets_and_lists_that_fail(environment):
    async with serving(FAULTY, THREADED_FAULTY) as (stub, _):
        session = (await start(stub, environment_id=environment)).session_id
        transition = (await step(stub, session, 1, "go", want_legal_actions=True)).transition
        assert transition.legal_actions == pb.LegalActions(more=True)
        session = (await start(stub, environment_id=environment, options_json='{"reset": "x"}')).session_id
        transition = (await step(stub, session, 1, "go", want_legal_actions=True)).transition
        assert not transition.HasField("legal_actions")
        assert transition.digest


async def test_limits_truncate():
    async with serving(DICE) as (stub, _):
        session = (await start(stub, limits=pb.Limits(max_turns=2))).session_id
        assert not (await step(stub, session, 1, "roll")).transition.truncated
        last = (await step(stub, session, 2, "roll")).transition
        assert (last.truncated, last.terminated, last.end_reason) == (True, False, pb.END_REASON_MAX_TURNS)
        assert (last.HasField("success"), last.success) == (True, False)

        session = (await start(stub, limits=pb.Limits(max_actions=4))).session_id
        first = (await step(stub, session, 1, "roll", "roll", "roll")).transition
        assert not first.HasField("success")
        last = (await step(stub, session, 2, "roll", "roll", "roll")).transition
        assert (last.actions_executed, last.end_reason) == (1, pb.END_REASON_MAX_ACTIONS)

        session = (await start(stub, limits=pb.Limits(max_turns=1))).session_id
        last = (await step(stub, session, 1, "stop")).transition
        assert (last.terminated, last.truncated, last.end_reason) == (True, False, pb.END_REASON_ENVIRONMENT)

        session = (await start(stub, limits=pb.Limits(max_turns=1))).session_id
        last = (await step(stub, session, 1, "nonsense")).transition
        assert (last.truncated, last.action_valid, last.HasField("success")) == (True, False, False)


async def test_wall_clock_ends_the_next_turn():
    clock = Clock()
    async with serving(DICE, clock=clock) as (stub, _):
        started = await start(stub, limits=pb.Limits(wall_seconds=5))
        assert started.limits.wall_seconds == 5
        assert (await start(stub)).limits.wall_seconds == 0
        session = started.session_id
        clock.now += 4.9
        assert not (await step(stub, session, 1, "roll")).transition.truncated
        clock.now += 0.1
        last = (await step(stub, session, 2, "roll")).transition
        assert (last.actions_executed, last.truncated, last.end_reason) == (1, True, pb.END_REASON_WALL_CLOCK)


async def test_rewards_components_metrics():
    async with serving(DICE) as (stub, _):
        started = await start(stub)
        assert dict(started.state.metrics) == {"target": float(started.state.observation.split()[1][:-1])}
        assert (started.state.reward, started.state.action_valid) == (0, True)
        transition = (await step(stub, started.session_id, 1, "roll", "roll")).transition
        total = transition.metrics["total"]
        assert transition.reward_components["roll"] == total
        assert transition.reward == sum(transition.action_rewards) == total - 5


async def test_advice():
    async with serving(DICE, FAULTY) as (stub, _):
        session = (await start(stub, options_json='{"worlds": 1}', limits=pb.Limits(max_actions=4))).session_id

        async def advise(session_id: str) -> pb.AdviseOutcome:
            (outcome,) = (await stub.Advise(pb.AdviseRequest(items=[pb.AdviseItem(session_id=session_id)]))).outcomes
            assert outcome.session_id == session_id
            return outcome

        assert (await advise(session)).advice == pb.Advice(
            actions=["stop"], explanation="0 of 0 with 20 turns left.", step_index=0
        )
        before = await step(stub, session, 1, "roll", "roll", "roll")
        advice = (await advise(session)).advice
        assert (advice.step_index, advice.explanation.endswith("with 19 turns left.")) == (1, True)
        assert await step(stub, session, 1, "roll", "roll", "roll") == before
        await step(stub, session, 2, "stop")
        assert reason(await advise(session)) == "EPISODE_ENDED"
        assert reason(await advise("nobody")) == "SESSION_UNKNOWN"
        assert reason(await advise((await start(stub, environment_id="faulty")).session_id)) == "NO_ORACLE"
        broken = await start(stub, environment_id="faulty", options_json='{"reset": "oracle"}')
        assert reason(await advise(broken.session_id)) == "ENVIRONMENT_FAILED"
        assert (await step(stub, broken.session_id, 1, "go")).HasField("transition")


async def test_the_oracle_is_asked_once_a_turn():
    asked: list[int] = []

    class Asked(Dice):
        def oracle(self, left: Left) -> Sequence[str]:
            asked.append(left.turns)
            return ("roll",)

    async with serving(make_spec("asked", Asked, DiceOptions)) as (stub, _):
        session = (await start(stub, environment_id="asked")).session_id
        thousand = pb.AdviseRequest(items=[pb.AdviseItem(session_id=session)] * 1_000)
        outcomes = (await stub.Advise(thousand)).outcomes
        assert len(outcomes) == 1_000
        assert len({outcome.SerializeToString() for outcome in outcomes}) == 1
        await step(stub, session, 1, "roll")
        (advised,) = (await stub.Advise(pb.AdviseRequest(items=thousand.items[:1]))).outcomes
        assert (advised.advice.step_index, asked) == (1, [20, 19])


async def test_forks():
    async with serving(DICE) as (stub, _):
        original = await start(stub)
        before = await step(stub, original.session_id, 1, "roll")

        async def fork(**fields) -> pb.ResetOutcome:
            item = pb.ForkItem(
                **{"request_id": request_id(), "session_id": original.session_id, "step_index": 1, **fields}
            )
            (outcome,) = (await stub.Fork(pb.ForkRequest(items=[item]))).outcomes
            assert outcome.request_id == item.request_id
            return outcome

        same = (await fork(same_noise=True)).started
        other = (await fork(noise_seed=99)).started
        drawn = (await fork()).started
        assert same.state == before.transition
        assert [each.noise_seed for each in other.noise] == [11, 99]
        assert (other.noise[1].from_step, other.instance_id) == (2, original.instance_id)
        assert drawn.noise[1].noise_seed not in (11, 99)
        assert other.state.digest != before.transition.digest
        assert other.state.observation == before.transition.observation
        # What the copies do then does not touch the original.
        played = {}
        for name, started in (("same", same), ("other", other), ("original", original)):
            played[name] = (await step(stub, started.session_id, 2, "roll", "roll", "roll")).transition
        assert played["same"] == played["original"]
        assert played["other"].observation != played["original"].observation

        stale = await fork(same_noise=True)
        assert reason(stale) == "WRONG_STEP_INDEX"
        assert details(stale.error)[0].metadata["expected"] == "2"
        assert reason(await fork(session_id="nobody")) == "SESSION_UNKNOWN"
        assert reason(await fork(request_id=b"")) == "INVALID_ITEM"


async def test_a_fork_while_a_step_runs():
    async with serving(THREADED_DICE) as (stub, _):
        session = (await start(stub, environment_id="threaded_dice")).session_id
        GATE.clear()
        assert (await step(stub, session, 1, "slow", max_wait_seconds=0.01)).HasField("pending")
        for index in (0, 1):
            item = pb.ForkItem(request_id=request_id(), session_id=session, step_index=index)
            assert reason((await stub.Fork(pb.ForkRequest(items=[item]))).outcomes[0]) == "STEP_RUNNING"
        advice = await stub.Advise(pb.AdviseRequest(items=[pb.AdviseItem(session_id=session)]))
        assert reason(advice.outcomes[0]) == "STEP_RUNNING"


async def test_a_reply_is_cut_and_the_rest_collected():
    """80 observations of 256 KiB are 20 MiB: the reply stops at 16, and the rest comes when asked for again."""
    async with serving(FAULTY) as (stub, _):
        reply = await stub.Reset(pb.ResetRequest(items=[reset_item("faulty") for _ in range(80)]))
        items = [step_item(each.started.session_id, 1, "longest") for each in reply.outcomes]
        reply = await stub.Step(pb.StepRequest(items=items))
        assert reply.ByteSize() < MAX_REPLY_BYTES + 100_000
        kinds = [each.WhichOneof("outcome") for each in reply.outcomes]
        assert kinds == ["transition"] * 63 + ["pending"] * 17
        rest = await stub.Step(pb.StepRequest(items=items[63:]))
        assert [each.session_id for each in rest.outcomes] == [each.session_id for each in items[63:]]
        assert all(each.HasField("transition") for each in rest.outcomes)
