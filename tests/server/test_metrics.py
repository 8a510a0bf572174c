"""What /metrics says after a play whose every number is known."""

import asyncio
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Mapping

import grpc
import grpc.aio
import pytest
from proc import children
from prometheus_client.parser import text_string_to_metric_families
from sample_environments import DICE, FAULTY, GATE, THREADED_DICE, THREADED_FAULTY
from server_process import ServerProcess
from serving import Clock, request_id, reset_item, serving, start, step
from token_files import bearer, write_tokens

import turngym
from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc
from turngym_server.access.tokens import new_token
from turngym_server.watching.counts import BATCH_ITEMS, Histogram
from turngym_server.watching.metrics import METRICS_METHOD
from turngym_server.watching.snapshot import read

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(server) -> Samples:
    text = await asyncio.to_thread(_get, server.metrics_url)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return reply.read().decode()


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"turngym_{name}", frozenset(labels.items())]


def values(samples: Samples, name: str) -> dict[tuple[str, ...], float]:
    """Every series of a metric: label values, in the order of their labels' names, and its value."""
    return {
        tuple(text for _, text in sorted(labels)): number
        for (sample, labels), number in samples.items()
        if sample == f"turngym_{name}"
    }


async def close(stub, *sessions: str, reason: "pb.CloseReason" = pb.CLOSE_REASON_UNSPECIFIED) -> None:
    await stub.Close(pb.CloseRequest(session_ids=sessions, reason=reason))


async def test_turns_actions_and_ends():
    async with serving(DICE, THREADED_DICE, FAULTY, metrics_port=0) as (stub, server):
        first = (await start(stub)).session_id
        await step(stub, first, 1, "roll", "roll", "roll")
        await step(stub, first, 1, "roll", "roll", "roll")  # Sent again: played once.
        await step(stub, first, 2, "jump", "roll")  # An invalid action ends the turn: one action.
        await step(stub, first, 3, "stop")
        limited = (await start(stub, limits=pb.Limits(max_turns=1), split=pb.SPLIT_TRAIN)).session_id
        await step(stub, limited, 1, "roll")
        threaded = (await start(stub, environment_id="threaded_dice")).session_id
        await step(stub, threaded, 1, "roll", "roll")
        broken = (await start(stub, environment_id="faulty")).session_id
        await step(stub, broken, 1, "raise")
        await step(stub, broken, 1, "raise")
        samples = await scrape(server)
    assert values(samples, "turns_total") == {("dice",): 4, ("threaded_dice",): 1, ("faulty",): 0}
    assert values(samples, "actions_total") == {("dice",): 6, ("threaded_dice",): 2, ("faulty",): 0}
    assert values(samples, "episodes_ended_total") == {
        ("dice", "environment"): 1,
        ("dice", "max_turns"): 1,
        ("faulty", "environment_failed"): 1,
    }
    assert values(samples, "turn_seconds_count") == {("dice",): 0, ("threaded_dice",): 1, ("faulty",): 0}
    assert value(samples, "turn_seconds_sum", environment="threaded_dice") > 0
    assert value(samples, "reset_seconds_count", environment="dice", origin="reset") == 2
    assert values(samples, "sessions_started_total") == {
        ("dice", "reset", "all"): 1,
        ("dice", "reset", "train"): 1,
        ("threaded_dice", "reset", "all"): 1,
        ("faulty", "reset", "all"): 1,
    }
    assert values(samples, "item_errors_total") == {("INTERNAL", "ENVIRONMENT_FAILED", "Step"): 1}


async def test_how_sessions_begin_and_end():
    clock = Clock()
    async with serving(DICE, clock=clock, lease_seconds=100.0, metrics_port=0) as (stub, server):
        original = await start(stub)
        state = (await step(stub, original.session_id, 1, "roll")).transition
        resume = pb.Resume(turns=[pb.Actions(actions=["roll"])], noise=original.noise, digest=state.digest)
        resumed = await start(stub, reset_item(level_seed=7, noise_seed=None, resume=resume))
        fork = pb.ForkItem(request_id=request_id(), session_id=original.session_id, step_index=1)
        forked = (await stub.Fork(pb.ForkRequest(items=[fork]))).outcomes[0].started
        closed = [(await start(stub)).session_id for _ in range(7)]
        await close(stub, *closed[:1], reason=pb.CLOSE_REASON_FINISHED)
        await close(stub, *closed[1:3], reason=pb.CLOSE_REASON_ABANDONED)
        await close(stub, *closed[3:6], reason=pb.CLOSE_REASON_ERROR)
        await close(stub, closed[6], closed[0], "nobody's")  # Those that were not there are no departures.
        clock.now += 60
        await stub.KeepAlive(pb.KeepAliveRequest(session_ids=[forked.session_id]))
        clock.now += 60
        server.service.table.sweep()
        samples = await scrape(server)
        assert value(samples, "sessions", environment="dice", state="idle") == 1
        assert value(samples, "sessions_admitted") == 1
    assert resumed.step_index == 1
    assert values(samples, "sessions_started_total") == {
        ("dice", "reset", "all"): 8,
        ("dice", "resume", "all"): 1,
        ("dice", "fork", "all"): 1,
    }
    assert values(samples, "sessions_departed_total") == {
        ("dice", "finished"): 1,
        ("dice", "abandoned"): 2,
        ("dice", "error"): 3,
        ("dice", "closed"): 1,
        ("dice", "expired"): 2,
    }
    assert value(samples, "turns_total", environment="dice") == 1  # A replay's turns were counted where they happened.


async def test_states_of_sessions_held():
    async with serving(DICE, THREADED_DICE, FAULTY, max_sessions=9, metrics_port=0) as (stub, server):
        running = (await start(stub, environment_id="threaded_dice")).session_id
        await start(stub, environment_id="threaded_dice")
        ended = (await start(stub)).session_id
        await step(stub, ended, 1, "stop")
        failed = (await start(stub, environment_id="faulty")).session_id
        await step(stub, failed, 1, "raise")
        GATE.clear()
        try:
            assert (await step(stub, running, 1, "slow", max_wait_seconds=0.01)).HasField("pending")
            samples = await scrape(server)
        finally:
            GATE.set()
    assert {labels: number for labels, number in values(samples, "sessions").items() if number} == {
        ("threaded_dice", "running"): 1,
        ("threaded_dice", "idle"): 1,
        ("dice", "ended"): 1,
        ("faulty", "ended"): 1,
    }
    assert (value(samples, "sessions_admitted"), value(samples, "sessions_limit")) == (4, 9)


async def test_calls_batches_and_errors():
    async with serving(DICE, metrics_port=0, max_sessions=3) as (stub, server):
        sessions = [(await start(stub)).session_id for _ in range(3)]
        items = [pb.StepItem(session_id=session, step_index=1, actions=["roll"]) for session in sessions]
        await stub.Step(pb.StepRequest(items=items))
        await stub.Step(pb.StepRequest(items=[items[0]]))
        wrong = [
            pb.StepItem(session_id="nobody's", step_index=1, actions=["roll"]),
            pb.StepItem(session_id=sessions[0], step_index=9, actions=["roll"]),
            pb.StepItem(session_id=sessions[1], step_index=9, actions=["roll"]),
        ]
        await stub.Step(pb.StepRequest(items=wrong))
        for request in (pb.StepRequest(), pb.StepRequest(items=items, max_wait_seconds=-1)):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Step(request)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Reset(pb.ResetRequest(items=[reset_item()]))
        samples = await scrape(server)
    assert value(samples, "call_seconds_count", rpc="Step") == 5
    assert value(samples, "call_seconds_count", rpc="Reset") == 4
    assert value(samples, "call_seconds_count", rpc="Close") == 0
    assert value(samples, "call_items_sum", rpc="Step") == 3 + 1 + 3
    assert [value(samples, "call_items_bucket", rpc="Step", le=le) for le in ("1.0", "2.0", "4.0", "+Inf")] == [
        1,
        1,
        3,
        3,
    ]
    assert values(samples, "item_errors_total") == {
        ("NOT_FOUND", "SESSION_UNKNOWN", "Step"): 1,
        ("FAILED_PRECONDITION", "WRONG_STEP_INDEX", "Step"): 2,
    }
    assert values(samples, "calls_refused_total") == {
        ("INVALID_ARGUMENT", "INVALID_ITEM", "Step"): 2,
        ("RESOURCE_EXHAUSTED", "SESSION_LIMIT", "Reset"): 1,
    }


async def test_requests_of_a_stream_are_calls():
    async with serving(DICE, metrics_port=0) as (stub, server):
        sessions = [(await start(stub)).session_id for _ in range(2)]
        steps = [
            pb.StepRequest(items=[pb.StepItem(session_id=each, step_index=1, actions=["roll"]) for each in sessions]),
            pb.StepRequest(items=[pb.StepItem(session_id="nobody's", step_index=1, actions=["roll"])]),
            pb.StepRequest(),
        ]
        stream = stub.StepStream()
        for number, request in enumerate(steps, start=1):
            await stream.write(pb.StepStreamRequest(id=number, step=request))
            await stream.read()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        samples = await scrape(server)
    assert value(samples, "turns_total", environment="dice") == 2
    assert value(samples, "call_seconds_count", rpc="StepStream") == 3
    assert value(samples, "call_items_sum", rpc="StepStream") == 3
    assert values(samples, "item_errors_total") == {("NOT_FOUND", "SESSION_UNKNOWN", "StepStream"): 1}
    assert values(samples, "calls_refused_total") == {("INVALID_ARGUMENT", "INVALID_ITEM", "StepStream"): 1}


async def test_a_turn_past_its_deadline():
    async with serving(THREADED_FAULTY, metrics_port=0) as (stub, server):
        session = (await start(stub, environment_id="threaded_faulty")).session_id
        GATE.clear()
        try:
            await step(stub, session, 1, "hang")
        finally:
            GATE.set()
        samples = await scrape(server)
    assert values(samples, "episodes_ended_total") == {("threaded_faulty", "step_deadline"): 1}
    assert value(samples, "turn_seconds_count", environment="threaded_faulty") == 1
    assert value(samples, "turn_seconds_sum", environment="threaded_faulty") >= 0.3


async def test_servers_count_apart_and_name_their_build():
    async with serving(DICE, metrics_port=0) as (stub, one), serving(FAULTY, metrics_port=0) as (_, other):
        await start(stub)
        samples, others = await scrape(one), await scrape(other)
    assert value(samples, "reset_seconds_count", environment="dice", origin="reset") == 1
    assert values(others, "reset_seconds_count") == {("faulty", "reset"): 0, ("faulty", "resume"): 0}
    assert values(samples, "environment_info") == {("dice", "1.0"): 1}
    ((_, _, version),) = values(samples, "build_info")
    assert version == turngym.__version__
    assert samples["process_open_fds", frozenset()] > 0
    with pytest.raises(urllib.error.URLError):  # The endpoint went with its server.
        _get(one.metrics_url)


async def test_no_client_chooses_a_label():
    hostile = 'x"}\n# injected'
    async with serving(DICE, metrics_port=0) as (stub, server):
        await stub.Reset(pb.ResetRequest(items=[reset_item(hostile)]), metadata=[("turngym-client", "hostile-name")])
        await stub.Step(pb.StepRequest(items=[pb.StepItem(session_id=hostile, step_index=1, actions=[hostile])]))
        text = await asyncio.to_thread(_get, server.metrics_url)
    assert "injected" not in text
    assert "hostile" not in text


async def test_who_is_turned_away_is_counted_and_no_token_told(tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", alice="train")
    async with serving(DICE, metrics_port=0, tokens=tmp_path / "tokens.toml") as (stub, server):
        held_out = pb.ResetRequest(items=[reset_item(split=pb.SPLIT_HELD_OUT)])
        for metadata in ((), bearer(new_token("alice"))):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Reset(held_out, metadata=metadata)
        await stub.Reset(held_out, metadata=tokens["alice"])
        text = await asyncio.to_thread(_get, server.metrics_url)
        samples = await scrape(server)
    assert values(samples, "calls_refused_total") == {("UNAUTHENTICATED", "UNAUTHENTICATED", "Reset"): 2}
    assert values(samples, "item_errors_total") == {("PERMISSION_DENIED", "SPLIT_NOT_SERVED", "Reset"): 1}
    assert "alice" not in text


async def test_a_port_that_is_taken():
    async with serving(DICE, metrics_port=0) as (_, server):
        port = int(server.metrics_url.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(OSError, match=rf"cannot serve metrics on 127.0.0.1:{port}"):
            async with serving(DICE, metrics_port=port):
                pass


def test_the_command_prints_where_metrics_are():
    with ServerProcess("--env", "bandit", "--metrics-port", "0") as server:
        line = server.process.stdout.readline()
        match = re.fullmatch(r"env_server \S+ metrics at (http://127\.0\.0\.1:\d+/metrics)\n", line)
        assert match, line
        assert 'turngym_turns_total{environment="bandit"} 0.0' in _get(match[1])
    assert server.process.returncode == 0


async def test_a_front_tells_what_its_workers_tell():
    arguments = ("--env", "bandit", "--splits", "all", "--workers", "2", "--metrics-port", "0", "--log-level", "error")
    with ServerProcess(*arguments) as server:
        url = re.search(r"metrics at (\S+)", server.process.stdout.readline())[1]
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            addresses = (await stub.GetServer(pb.GetServerRequest())).addresses
            sessions = [(await start(stub, environment_id="bandit")).session_id for _ in range(3)]
            items = [pb.StepItem(session_id=session, step_index=1, actions=["nothing"]) for session in sessions]
            await stub.Step(pb.StepRequest(items=items))
        samples = read(await asyncio.to_thread(_get, url), 0.0)
        assert sorted(samples.by("turns_total", "worker").values()) == [1, 2]
        assert samples.by("turns_total", "environment") == {("bandit",): 3}
        assert samples.by("worker_up", "worker") == {("1",): 1, ("2",): 1}
        assert samples.by("process_open_fds", "worker").keys() == {("1",), ("2",), ("front",)}
        for address in (server.address, *addresses):  # Only a front may ask a worker, through its own socket.
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(METRICS_METHOD)(b"")
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        os.kill(children(server.process.pid)[0], signal.SIGSTOP)
        stopped = read(await asyncio.to_thread(_get, url), 1.0)
        assert sorted(stopped.by("worker_up", "worker").values()) == [0, 1]
        assert len(stopped.by("turns_total", "worker")) == 1
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
    assert server.process.returncode == 0


def test_a_value_on_a_bound_belongs_to_its_bucket():
    histogram = Histogram(BATCH_ITEMS)
    for items in (1, 2, 3, 4, 1_024, 5_000):
        histogram.add(items)
    assert histogram.counts == [1, 1, 2, *[0] * 7, 1, 1]
    assert histogram.sum == 6_034
