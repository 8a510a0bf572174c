"""Several worker processes behind one front: `env_server --workers`."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from proc import children, runs
from raw_http2 import RawConnection, message
from serving import CHANNEL_OPTIONS, call_status, details, reason, request_id, reset_item, start, step
from token_files import write_tokens

from turngym.lifeline import LAST_BREATH
from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc
from turngym_client import Episode, EpisodeRequest, Split, connect
from turngym_server.access.caller import stranger
from turngym_server.config import ServerConfig
from turngym_server.processes import assignments, front
from turngym_server.processes.assignments import CallerKey, Held, caller_key
from turngym_server.processes.workers import Worker, command, share
from turngym_server.rpc.call import Context

HERE = Path(__file__).parent
ENVIRONMENTS = ("--env", "third_party_environment:ThirdParty", "--env", "unruly_environment:Unruly")
PATIENCE = 30.0


class Process:
    """`env_server` as a process, and its workers."""

    def __init__(self, *arguments: str) -> None:
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "turngym_server.cli", "--splits", "all", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        found = re.match(r"env_server \S+ listening on (\S+) serving ", self.popen.stdout.readline())
        assert found, self.popen.communicate()
        self.address = found[1]

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        return children(self.popen.pid)

    def worker_of(self, address: str) -> int:
        """The worker that listens on this address."""
        port = int(address.rpartition(":")[2])
        (found,) = [pid for pid in self.workers() if port in listening_ports(pid)]
        return found

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


def listening_ports(pid: int) -> set[int]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It was closed meanwhile.
            if (found := re.match(r"socket:\[(\d+)]", str(descriptor.readlink()))) is not None:
                inodes.add(found[1])
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def eventually(condition: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.05)


@pytest.fixture
def begin() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def begin(*arguments: str, workers: int = 2) -> Process:
        processes.append(Process(*ENVIRONMENTS, "--workers", str(workers), *(arguments or ("--port", "0"))))
        return processes[-1]

    yield begin
    for process in processes:
        process.end()


@pytest.fixture(scope="module")
def four() -> Iterator[Process]:
    process = Process(*ENVIRONMENTS, "--workers", "4", "--port", "0", "--max-sessions", "402")
    yield process
    process.end()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Two workers, which tests may kill."""
    levels = tmp_path_factory.mktemp("levels") / "levels"
    levels.write_text("4 5")
    process = Process(*ENVIRONMENTS, "--workers", "2", "--port", "0", "--option", f"levels={levels}")
    yield process
    process.end()


@pytest.fixture
async def stub(four: Process):
    async with grpc.aio.insecure_channel(four.address, options=CHANNEL_OPTIONS) as channel:
        yield environment_pb2_grpc.EnvironmentServiceStub(channel)


def tag_of(session_id: str) -> str:
    return session_id.partition(".")[0]


def dice(**fields) -> pb.ResetItem:
    return reset_item("third_party", **fields)


async def one_of_each_worker(stub) -> list[pb.Started]:
    """As many new sessions as there are workers, each on another one."""
    return [await start(stub, dice()) for _ in range(4)]


async def settled(stub, items: Sequence[pb.StepItem]) -> Sequence[pb.StepOutcome]:
    """The items' outcomes, asked for until none is pending: a worker may be 5 ms later than the first one."""
    while True:
        outcomes = (await stub.Step(pb.StepRequest(items=items))).outcomes
        if not any(each.HasField("pending") for each in outcomes):
            return outcomes


async def close(stub, sessions: list[pb.Started]) -> None:
    await stub.Close(pb.CloseRequest(session_ids=[each.session_id for each in sessions]))


# Who gets what


async def test_what_the_front_says_of_the_server(four: Process, stub):
    info = await stub.GetServer(pb.GetServerRequest())
    assert len(set(info.addresses)) == 4
    assert four.address not in info.addresses
    assert info.max_sessions == 402
    for address in info.addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            own = await environment_pb2_grpc.EnvironmentServiceStub(channel).GetServer(pb.GetServerRequest())
        assert own.max_sessions in (100, 101)
        assert not own.addresses
    listed = await stub.ListEnvironments(pb.ListEnvironmentsRequest())
    assert [each.id for each in listed.environments] == ["third_party", "unruly"]
    described = await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="unruly"))
    assert described.environment.step_deadline_seconds == 1
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="unrul"))
    assert details(call_status(error.value))[0].metadata["nearest"] == "unruly"


async def test_health(four: Process):
    async with grpc.aio.insecure_channel(four.address) as channel:
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert check.status == health_pb2.HealthCheckResponse.SERVING


def test_the_client_spreads_its_episodes(four: Process):
    with connect(four.address) as client:
        episodes = client.reset_many([EpisodeRequest(environment_id="third_party", split=Split.ALL)] * 20)
        assert client.server().sessions == 20
        for address in client.server().addresses:
            with connect(address) as worker:
                assert worker.server().sessions == 5
        client.step_many([(episode, "roll") for episode in episodes])
        client.close_many(episodes)
        assert client.server().sessions == 0


async def test_a_batch_over_all_workers(stub):
    sessions = await one_of_each_worker(stub)
    assert len({tag_of(each.session_id) for each in sessions}) == 4
    ids = [each.session_id for each in sessions]
    order = [2, 0, 3, 1]
    items = [pb.StepItem(session_id=ids[each], step_index=1, actions=["roll"]) for each in order]
    items.insert(2, pb.StepItem(session_id="nobody.at-all", step_index=1, actions=["roll"]))
    items.append(pb.StepItem(session_id=ids[2], step_index=1, actions=["roll"]))
    items.append(pb.StepItem(session_id=ids[0], step_index=7, actions=["roll"]))
    outcomes = await settled(stub, items)
    assert [each.session_id for each in outcomes] == [item.session_id for item in items]
    assert [each.step_index for each in outcomes] == [item.step_index for item in items]
    assert reason(outcomes[2]) == "SESSION_UNKNOWN"
    assert [reason(each) for each in outcomes[5:]] == ["INVALID_ITEM", "INVALID_ITEM"]
    assert all(outcomes[place].HasField("transition") for place in (0, 1, 3, 4))

    ids.append("nobody.at-all")
    kept = (await stub.KeepAlive(pb.KeepAliveRequest(session_ids=ids))).outcomes
    assert [each.WhichOneof("outcome") for each in kept] == ["lease_seconds"] * 4 + ["error"]
    advised = (await stub.Advise(pb.AdviseRequest(items=[pb.AdviseItem(session_id=each) for each in ids]))).outcomes
    assert [each.session_id for each in advised] == ids
    assert all(each.advice.actions for each in advised[:4])
    forks = [pb.ForkItem(request_id=request_id(), session_id=each, step_index=1, same_noise=True) for each in ids]
    forked = (await stub.Fork(pb.ForkRequest(items=forks))).outcomes
    assert [each.request_id for each in forked] == [item.request_id for item in forks]
    assert [tag_of(each.started.session_id) for each in forked[:4]] == [tag_of(each) for each in ids[:4]]
    assert reason(forked[4]) == "SESSION_UNKNOWN"
    assert (await stub.Fork(pb.ForkRequest(items=forks))).outcomes[:4] == forked[:4]
    await close(stub, [each.started for each in forked[:4]])
    closed = (await stub.Close(pb.CloseRequest(session_ids=ids))).outcomes
    assert [(each.session_id, each.closed) for each in closed] == [(each, each in ids[:4]) for each in ids]
    assert (await stub.GetServer(pb.GetServerRequest())).sessions == 0


async def test_a_stream_over_all_workers(stub):
    sessions = await one_of_each_worker(stub)
    call = stub.StepStream()
    for number, session in enumerate(sessions, start=1):
        item = pb.StepItem(session_id=session.session_id, step_index=1, actions=["roll"])
        await call.write(pb.StepStreamRequest(id=number, step=pb.StepRequest(items=[item])))
    await call.write(pb.StepStreamRequest(id=9))
    await call.done_writing()
    answers = {answer.id: answer async for answer in call}
    assert sorted(answers) == [1, 2, 3, 4, 9]
    assert reason(answers.pop(9).error) == "INVALID_ITEM"
    for number, answer in answers.items():
        (outcome,) = answer.step.outcomes
        assert outcome.session_id == sessions[number - 1].session_id
        assert outcome.HasField("transition")
    await close(stub, sessions)


async def test_an_undecodable_item_fails_alone(four: Process, stub):
    sessions = await one_of_each_worker(stub)
    items = [pb.StepItem(session_id=each.session_id, step_index=1, actions=["roll"]) for each in sessions]
    fields = [item.SerializeToString() for item in items]
    fields[0] = fields[0].replace(b"roll", b"\xff\xfe\xfd\xfc")
    async with grpc.aio.insecure_channel(four.address) as channel:
        call = channel.unary_unary(
            "/turngym.v1.EnvironmentService/Step", response_deserializer=pb.StepResponse.FromString
        )
        data = b"".join(b"\x0a" + bytes([len(each)]) + each for each in fields)
        while (outcomes := (await call(data)).outcomes)[0].HasField("pending"):
            pass
    assert [each.session_id for each in outcomes] == [each.session_id for each in sessions]
    assert reason(outcomes[0]) == "INVALID_ITEM"
    assert not any(each.HasField("error") for each in outcomes[1:])
    await close(stub, sessions)


async def test_what_is_wrong_with_a_whole_call(stub):
    session = await start(stub, dice())
    items = [pb.StepItem(session_id=each, step_index=1, actions=["roll"]) for each in (session.session_id, "x.y")]
    for call in (
        stub.Step(pb.StepRequest()),
        stub.Step(pb.StepRequest(items=items * 600)),
        stub.Step(pb.StepRequest(items=items, max_wait_seconds=float("nan"))),
        stub.Close(pb.CloseRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert reason(call_status(error.value)) == "INVALID_ITEM"
    await close(stub, [session])


async def test_a_slow_item_of_one_worker_holds_up_no_other(stub):
    sessions = [await start(stub, reset_item("unruly")) for _ in range(4)]
    ids = [each.session_id for each in sessions]
    items = [pb.StepItem(session_id=each, step_index=1, actions=["go"]) for each in ids]
    items[0].actions[:] = ["sleep 0.8"]
    request = pb.StepRequest(items=items, max_wait_seconds=10)
    outcomes = (await stub.Step(request)).outcomes
    assert outcomes[0].HasField("pending")
    assert any(each.HasField("transition") for each in outcomes[1:])
    collected = (await stub.Step(pb.StepRequest(items=items[:1], max_wait_seconds=10))).outcomes
    assert collected[0].transition.observation.startswith("1, ")
    # Whoever was pending is collected; nothing is played twice.
    assert all(each.transition.observation.startswith("1, ") for each in await settled(stub, items[1:]))
    await close(stub, sessions)


async def test_retries_of_reset_reach_the_worker_that_has_them(four: Process, stub):
    calls = [pb.ResetRequest(items=[dice() for _ in range(3)]) for _ in range(4)]
    replies = [await stub.Reset(call) for call in calls]
    tags = [{tag_of(each.started.session_id) for each in given.outcomes} for given in replies]
    assert [len(each) for each in tags] == [1, 1, 1, 1]  # One worker for all that a call begins.
    assert len(set.union(*tags)) == 4
    # Anew, through another connection, old ones of all workers mixed with a new one.
    old = [call.items[1] for call in calls]
    async with grpc.aio.insecure_channel(four.address) as channel:
        other = environment_pb2_grpc.EnvironmentServiceStub(channel)
        mixed = (await other.Reset(pb.ResetRequest(items=[*old, dice()]))).outcomes
        assert list(mixed[:4]) == [given.outcomes[1] for given in replies]
        reused = reset_item("third_party", level_seed=99)
        reused.request_id = old[0].request_id
        assert reason((await other.Reset(pb.ResetRequest(items=[reused]))).outcomes[0]) == "REQUEST_ID_REUSED"
    everything = [each.started for given in replies for each in given.outcomes] + [mixed[4].started]
    assert (await stub.GetServer(pb.GetServerRequest())).sessions == len(everything) == 13
    await close(stub, everything)


async def test_a_full_worker_leaves_new_sessions_to_the_next(begin):
    process = begin("--port", "0", "--max-sessions", "5", "--max-sessions-per-caller", "4")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)

        async def refused(count: int, caller: str = "") -> bool:
            request = pb.ResetRequest(items=[dice() for _ in range(count)])
            try:
                await stub.Reset(request, metadata=(("turngym-client", caller),))
            except grpc.aio.AioRpcError as error:
                info, delay = details(call_status(error))
                assert (info.reason, delay) == ("SESSION_LIMIT", 1.0)
                return True
            return False

        assert await refused(4)  # No worker has room for so many, and nothing is begun.
        assert (await stub.GetServer(pb.GetServerRequest())).sessions == 0
        assert [await refused(1) for _ in range(5)] == [False, False, False, False, True]
        assert not await refused(1, "another")
        assert await refused(1, "another")


def test_shares():
    config = ServerConfig(port=700, workers=3, max_sessions=8, max_sessions_per_caller=4)
    shares = [share(config, number) for number in (1, 2, 3)]
    assert [each.max_sessions for each in shares] == [3, 3, 2]
    assert [each.max_sessions_per_caller for each in shares] == [2, 1, 1]
    assert [each.port for each in shares] == [701, 702, 703]
    assert share(ServerConfig(workers=2), 2).port == 0
    assert share(ServerConfig(port=700, workers=2, worker_port=900), 2).port == 901
    assert share(ServerConfig(port=700, workers=2, worker_port=0), 2).port == 0
    assert share(ServerConfig(workers=2, metrics_port=900), 2).metrics_port is None  # The front tells for all.
    for wrong in (ServerConfig(workers=3, max_sessions=2), ServerConfig(port=65_534, workers=3)):
        with pytest.raises(ValueError, match="worker"):
            share(wrong, 3)


async def test_workers_check_the_tokens_that_the_front_passes_on(begin, tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", alice="train", bob="train", eve="evaluate")
    process = begin("--port", "0", "--tokens", str(tmp_path / "tokens.toml"), "--splits", "train,held_out")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        for call in (stub.GetServer(pb.GetServerRequest()), stub.Reset(pb.ResetRequest(items=[dice()]))):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED

        async def reset(name: str, split: pb.Split, count: int) -> list[pb.ResetOutcome]:
            request = pb.ResetRequest(items=[dice(split=split) for _ in range(count)])
            return list((await stub.Reset(request, metadata=tokens[name])).outcomes)

        assert reason((await reset("alice", pb.SPLIT_HELD_OUT, 1))[0]) == "SPLIT_NOT_SERVED"
        assert (await reset("eve", pb.SPLIT_HELD_OUT, 1))[0].HasField("started")
        sessions = [(await reset("alice", pb.SPLIT_TRAIN, 1))[0].started.session_id for _ in range(2)]
        assert len({tag_of(each) for each in sessions}) == 2
        turns = pb.StepRequest(
            items=[pb.StepItem(session_id=each, step_index=1, actions=["roll"]) for each in sessions],
            max_wait_seconds=5,
        )
        stolen = (await stub.Step(turns, metadata=tokens["bob"])).outcomes
        assert not any(each.HasField("transition") for each in stolen)
        assert "SESSION_UNKNOWN" in [reason(each) for each in stolen if each.HasField("error")]
        for item in turns.items:
            one = pb.StepRequest(items=[item], max_wait_seconds=5)
            (outcome,) = (await stub.Step(one, metadata=tokens["alice"])).outcomes
            assert outcome.HasField("transition")


async def test_nobody_makes_the_front_forget_anothers_request_ids(begin, tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", alice="train", bob="train")
    process = begin("--port", "0", "--tokens", str(tmp_path / "tokens.toml"), "--splits", "train")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        calls = [pb.ResetRequest(items=[dice(split=pb.SPLIT_TRAIN)]) for _ in range(2)]
        sessions = [(await stub.Reset(call, metadata=tokens["alice"])).outcomes for call in calls]
        assert all(outcomes[0].HasField("started") for outcomes in sessions)
        strange = pb.ResetRequest(items=[pb.ResetItem(request_id=request_id()) for _ in range(1_024)])
        for _ in range(130):
            for item in strange.items:
                item.request_id = request_id()
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Reset(strange)
        await stub.Reset(strange, metadata=tokens["bob"])  # Errors, one for each item.
        for place in (1, 0):  # Not in the order in which workers would take turns anyway.
            assert (await stub.Reset(calls[place], metadata=tokens["alice"])).outcomes == sessions[place]
        # Another's session under the same id is another one, and hides none.
        for call in calls:
            await stub.Reset(call, metadata=tokens["bob"])
        for call, first in zip(calls, sessions, strict=True):
            assert (await stub.Reset(call, metadata=tokens["alice"])).outcomes == first
        assert (await stub.GetServer(pb.GetServerRequest(), metadata=tokens["bob"])).sessions == 4


class Standing:
    """What assignments know of a worker."""

    serving = True


def test_what_is_remembered_of_request_ids(monkeypatch):
    monkeypatch.setattr(assignments, "CALLERS", 3)
    monkeypatch.setattr(assignments, "IDS_OF_CALLER", 4)
    known = assignments.Assignments()
    worker, other = cast("tuple[Worker, Worker]", (Standing(), Standing()))
    ids = [request_id() for _ in range(6)]
    alice, bob = caller_key("alice", "a"), caller_key("bob", "")

    def send(caller: CallerKey, each: bytes, held: Held, to: Worker = worker) -> None:
        known.end(known.begin(caller, each, to), held)

    send(alice, ids[0], Held.YES)
    send(alice, ids[1], Held.UNKNOWN)
    send(alice, ids[2], Held.NO)
    assert [known.find(alice, each) for each in ids[:3]] == [worker, worker, None]
    assert known.find(caller_key("alice", "b"), ids[0]) is None
    send(alice, ids[0], Held.NO)  # As of an id that is used for another item.
    assert known.find(alice, ids[0]) is worker
    for each in ids:
        send(bob, each, Held.YES)
    assert [known.find(bob, each) for each in ids] == [None, None, *[worker] * 4]
    for number in range(10):  # Whoever is not let in, or names many clients.
        send(caller_key(f"guess {number}", ""), ids[0], Held.UNKNOWN)
        send(caller_key("bob", f"client {number}"), ids[0], Held.YES)
    assert known.find(alice, ids[0]) is worker
    # While a call is under way, another with its id goes the same way; one that is refused changes nothing.
    flights = [known.begin(alice, ids[3], worker) for _ in range(2)]
    known.end(flights[0], Held.NO)
    assert known.find(alice, ids[3]) is worker
    known.end(flights[1], Held.NO)
    assert known.find(alice, ids[3]) is None
    worker.serving = False
    assert known.find(alice, ids[0]) is None
    send(alice, ids[0], Held.YES, other)
    assert known.find(alice, ids[0]) is other


async def test_a_silent_worker_holds_up_nothing_but_its_own(begin):
    process = begin("--port", "0", "--max-sessions", "100")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        stopped = process.workers()[0]
        os.kill(stopped, signal.SIGSTOP)
        calls = [pb.ResetRequest(items=[dice()], max_wait_seconds=0.1) for _ in range(2)]
        replies = await asyncio.gather(*(stub.Reset(call) for call in calls))
        outcomes = {reply.outcomes[0].WhichOneof("outcome"): place for place, reply in enumerate(replies)}
        assert sorted(outcomes) == ["pending", "started"]
        awake = tag_of(replies[outcomes["started"]].outcomes[0].started.session_id)
        held_up = calls[outcomes["pending"]]
        info = await stub.GetServer(pb.GetServerRequest(), timeout=PATIENCE)
        assert (info.sessions, info.max_sessions, len(info.addresses)) == (1, 50, 2)
        for _ in range(2):
            await stub.ListEnvironments(pb.ListEnvironmentsRequest(), timeout=PATIENCE)
            await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="unruly"), timeout=PATIENCE)
            assert tag_of((await start(stub, dice())).session_id) == awake
        # No other worker begins what the silent one may have.
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Reset(held_up, timeout=0.2)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await stub.Reset(held_up)).outcomes[0].HasField("pending")
        os.kill(stopped, signal.SIGCONT)
        while (outcome := (await stub.Reset(held_up)).outcomes[0]).HasField("pending"):
            pass
        assert tag_of(outcome.started.session_id) != awake
        while len({tag_of((await start(stub, dice())).session_id) for _ in range(2)}) == 1:
            pass


@pytest.mark.parametrize("answering", [True, False], ids=["beside another", "alone"])
async def test_what_is_asked_about_a_silent_workers_sessions_is_answered(begin, answering):
    process = begin("--port", "0")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        addresses = (await stub.GetServer(pb.GetServerRequest())).addresses
        sessions = [(await start(stub, dice())).session_id for _ in range(2)]
        async with grpc.aio.insecure_channel(addresses[0]) as own:
            ids = pb.KeepAliveRequest(session_ids=sessions)
            kept = (await environment_pb2_grpc.EnvironmentServiceStub(own).KeepAlive(ids)).outcomes
        held_up, free = sessions if kept[0].HasField("lease_seconds") else reversed(sessions)
        asked = [held_up, free] if answering else [held_up]
        advice = pb.AdviseRequest(items=[pb.AdviseItem(session_id=each) for each in asked])
        stopped = process.worker_of(addresses[0])
        os.kill(stopped, signal.SIGSTOP)
        kept = (await stub.KeepAlive(pb.KeepAliveRequest(session_ids=asked), timeout=PATIENCE)).outcomes
        advised = (await stub.Advise(advice, timeout=PATIENCE)).outcomes
        for outcomes in (kept, advised):
            assert [each.session_id for each in outcomes] == asked
            assert outcomes[0].error.code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert not any(each.HasField("error") for each in outcomes[1:])
        os.kill(stopped, signal.SIGCONT)
        kept = (await stub.KeepAlive(pb.KeepAliveRequest(session_ids=[held_up]), timeout=PATIENCE)).outcomes
        assert kept[0].HasField("lease_seconds")
        assert (await stub.Advise(advice, timeout=PATIENCE)).outcomes[0].advice.actions
        os.kill(stopped, signal.SIGSTOP)
        closed = (await stub.Close(pb.CloseRequest(session_ids=asked), timeout=PATIENCE)).outcomes
        assert [(each.session_id, each.closed) for each in closed] == list(zip(asked, [False, True], strict=False))


async def test_a_full_worker_keeps_what_it_has(begin):
    """A retry together with new items that do not fit there: they go elsewhere, it does not."""
    process = begin("--port", "0", "--max-sessions", "4")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        first = pb.ResetRequest(items=[dice(), dice()])
        given = (await stub.Reset(first)).outcomes
        for _ in range(2):  # Whichever worker's turn it is.
            mixed = pb.ResetRequest(items=[*first.items, dice()])
            outcomes = (await stub.Reset(mixed)).outcomes
            assert list(outcomes[:2]) == list(given)
            assert tag_of(outcomes[2].started.session_id) != tag_of(given[0].started.session_id)
        assert (await stub.GetServer(pb.GetServerRequest())).sessions == 4


def fork_of(session: pb.Started) -> pb.ForkItem:
    return pb.ForkItem(request_id=request_id(), session_id=session.session_id, same_noise=True)


@pytest.mark.parametrize("full", [0, 1])
async def test_a_fork_is_admitted_by_all_its_workers_or_by_none(begin, full):
    process = begin("--port", "0", "--max-sessions", "8")
    async with contextlib.AsyncExitStack() as stack:

        async def stub_of(address: str):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            return environment_pb2_grpc.EnvironmentServiceStub(channel)

        stub = await stub_of(process.address)
        own = [await stub_of(address) for address in (await stub.GetServer(pb.GetServerRequest())).addresses]
        roomy = await start(own[1 - full], dice())
        crowd = [await start(own[full], dice()) for _ in range(3)]

        async def held() -> int:
            return (await stub.GetServer(pb.GetServerRequest())).sessions

        async def refused(request: pb.ForkRequest) -> None:
            before = await held()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Fork(request)
            assert details(call_status(error.value))[0].reason == "SESSION_LIMIT"
            while await held() != before:  # Places that were kept are let go at once, by another call.
                pass

        # One place is left where two are wanted.
        first = fork_of(roomy)
        both = pb.ForkRequest(items=[first, fork_of(crowd[0]), fork_of(crowd[1])])
        await refused(both)
        assert await held() == 4
        # What a call before it began stays, and is no part of what is refused.
        begun = (await stub.Fork(pb.ForkRequest(items=[first]))).outcomes[0]
        await refused(both)
        kept = await stub.KeepAlive(pb.KeepAliveRequest(session_ids=[begun.started.session_id]))
        assert kept.outcomes[0].HasField("lease_seconds")
        # With room it is begun whole, once.
        await close(stub, crowd[2:])
        outcomes = (await stub.Fork(both)).outcomes
        assert [each.request_id for each in outcomes] == [item.request_id for item in both.items]
        assert outcomes[0] == begun
        assert [tag_of(each.started.session_id) for each in outcomes[1:]] == [tag_of(crowd[0].session_id)] * 2
        assert (await stub.Fork(both)).outcomes == outcomes
        assert await held() == 6
        # What fails in it fails alone, and takes no place.
        gone = pb.ForkItem(request_id=request_id(), session_id=crowd[2].session_id, same_noise=True)
        late = fork_of(roomy)
        late.step_index = 9
        mixed = (await stub.Fork(pb.ForkRequest(items=[late, gone, fork_of(roomy)]))).outcomes
        assert [reason(each) for each in mixed[:2]] == ["WRONG_STEP_INDEX", "SESSION_UNKNOWN"]
        assert mixed[2].HasField("started")
        assert await held() == 7


async def test_a_worker_whose_queue_is_full_leaves_new_sessions_to_the_next(begin):
    process = begin("--port", "0", "--max-queued-per-caller", "1")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        busy = await start(stub, reset_item("unruly"))
        under_way = asyncio.ensure_future(step(stub, busy.session_id, 1, "sleep 0.9", max_wait_seconds=10))
        await asyncio.sleep(0.2)
        tags = {tag_of((await start(stub, dice())).session_id) for _ in range(3)}
        assert len(tags) == 1
        assert tag_of(busy.session_id) not in tags
        assert (await under_way).HasField("transition")


async def test_of_two_forks_that_want_the_last_places_one_gets_them(begin):
    process = begin("--port", "0", "--max-sessions", "6")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        sessions = [await start(stub, dice()) for _ in range(2)]
        assert len({tag_of(each.session_id) for each in sessions}) == 2
        for _ in range(10):
            calls = [
                pb.ForkRequest(items=[fork_of(each) for each in order * 2]) for order in (sessions, sessions[::-1])
            ]
            answers = await asyncio.gather(*(stub.Fork(call) for call in calls), return_exceptions=True)
            begun = [answer for answer in answers if isinstance(answer, pb.ForkResponse)]
            assert len(begun) == 1
            assert all(each.HasField("started") for each in begun[0].outcomes)
            await close(stub, [each.started for each in begun[0].outcomes])


# What dies


async def test_a_fork_over_a_worker_that_dies(begin):
    """What lived there is unknown; the rest is copied."""
    process = begin("--port", "0")
    async with grpc.aio.insecure_channel(process.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        sessions = [await start(stub, dice()) for _ in range(4)]
        async with grpc.aio.insecure_channel((await stub.GetServer(pb.GetServerRequest())).addresses[0]) as own:
            ids = pb.KeepAliveRequest(session_ids=[each.session_id for each in sessions])
            kept = (await environment_pb2_grpc.EnvironmentServiceStub(own).KeepAlive(ids)).outcomes
        os.kill(process.worker_of((await stub.GetServer(pb.GetServerRequest())).addresses[0]), signal.SIGKILL)
        outcomes = (await stub.Fork(pb.ForkRequest(items=[fork_of(each) for each in sessions]))).outcomes
        for before, outcome in zip(kept, outcomes, strict=True):
            assert outcome.HasField("error") == before.HasField("lease_seconds")
        assert {reason(each) for each in outcomes if each.HasField("error")} == {"SESSION_UNKNOWN"}


def play(episodes: list[Episode], client, turns: int) -> None:
    for _ in range(turns):
        client.step_many([(episode, "go") for episode in episodes])


def digests_of(address: str, disturb: Callable[[int], None] = lambda turn: None) -> list[bytes]:
    """Digests of twelve episodes of six turns; `disturb` is called before each turn."""
    requests = [
        EpisodeRequest(environment_id="unruly", split=Split.ALL, level_seed=seed, noise_seed=seed) for seed in range(12)
    ]
    with connect(address, patience=PATIENCE) as client:
        episodes = client.reset_many(requests)
        for turn in range(6):
            disturb(turn)
            play(episodes, client, 1)
        client.close_many(episodes)
        return [episode.state.digest for episode in episodes]


def test_episodes_outlive_their_worker(four: Process, two: Process):
    undisturbed = digests_of(four.address)
    with connect(two.address) as client:
        addresses = list(client.server().addresses)
    killed: list[int] = []

    def kill(turn: int) -> None:
        if turn in (2, 4):
            killed.append(two.worker_of(addresses[turn // 4]))
            os.kill(killed[-1], signal.SIGKILL)
            if turn == 2:
                eventually(lambda: len(two.workers()) == 2 and listens(addresses[0]))

    assert digests_of(two.address, kill) == undisturbed
    eventually(lambda: all(map(listens, addresses)))
    assert not set(killed) & set(two.workers())
    with connect(two.address) as client:
        assert list(client.server().addresses) == addresses


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_a_worker_that_cannot_have_its_port_back_is_found_elsewhere(two: Process):
    with connect(two.address, patience=PATIENCE, failover=0.5) as client:
        addresses = list(client.server().addresses)
        episodes = client.reset_many([EpisodeRequest(environment_id="unruly", split=Split.ALL)] * 4)
        for address in addresses:
            # One after the other: each time the client knows one place at most, and has to ask the front.
            host, _, port = address.rpartition(":")
            with socket.socket() as squatter:
                squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                os.kill(two.worker_of(address), signal.SIGKILL)
                eventually(lambda squatter=squatter, place=(host, int(port)): binds(squatter, place))
                squatter.listen()
                eventually(lambda gone=address: gone not in client.server().addresses)
                play(episodes, client, 1)
                play(episodes, client, 1)
        assert not set(client.server().addresses) & set(addresses)
        assert all(episode.step_index == 4 for episode in episodes)


def binds(squatter: socket.socket, place: tuple[str, int]) -> bool:
    try:
        squatter.bind(place)
    except OSError:
        return False
    return True


async def test_a_call_under_way_survives_its_worker(two: Process):
    """The front says that the session is unknown, and goes on."""
    async with grpc.aio.insecure_channel(two.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        sessions = [(await start(stub, reset_item("unruly"))).session_id for _ in range(2)]
        worker = int((await step(stub, sessions[0], 1, "pid")).transition.observation)
        under_way = asyncio.ensure_future(step(stub, sessions[0], 2, "sleep 0.9", max_wait_seconds=10))
        await asyncio.sleep(0.3)
        os.kill(worker, signal.SIGKILL)
        assert reason(await under_way) == "SESSION_UNKNOWN"
        assert (await step(stub, sessions[1], 1, "go")).HasField("transition")


def test_sigterm_drains_all(begin):
    process = begin()
    workers = process.workers()
    with connect(process.address) as client:
        episode = client.reset("unruly", split=Split.ALL)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(timeout=PATIENCE) == 0
        episode.close()
    assert not any(map(runs, workers))
    assert process.popen.stderr.read() == ""


ODD_METADATA: tuple[tuple[str, bytes], ...] = (
    ("foo", b"\xff"),
    ("foo", b"a\x01b"),
    ("foo", b"\x7f"),
    ("foo-bin", b"\xff"),
    ("turngym-hold", b"\xff"),
    ("turngym-client", b"\xff"),
    ("turngym-client", b"a\x01b"),
    ("turngym-client", "é".encode()),
    ("authorization", b"Bearer \xff"),
    ("traceparent", b"\x7f"),
    ("tracestate", b"\xff"),
)


@pytest.mark.parametrize(("key", "value"), ODD_METADATA)
def test_whatever_metadata_a_call_has_is_answered(four: Process, key: str, value: bytes):
    reset = pb.ResetRequest(items=[reset_item("unruly"), reset_item("unruly")]).SerializeToString()
    with RawConnection(four.address) as connection:
        for rpc, request in (("GetServer", b""), ("ListEnvironments", b""), ("Reset", reset)):
            stream = connection.call(rpc, message(request), (key, value), ends=True)
            assert connection.ended(stream, PATIENCE), f"{rpc} is not answered"


def test_clients_with_odd_names_are_told_apart_wherever_they_call():
    names = [stranger((("turngym-client", name),)).client for name in (b"\xff", "a\x01", "a\x02", "é", "e")]
    assert len(set(names)) == len(names)
    for name in names:
        assert stranger((("turngym-client", name),)).client == name  # As a worker is told it by its front.


async def test_what_cannot_be_passed_on_is_refused_and_logged(caplog):
    class Unwell(Worker):
        """A worker whose connection raises what gRPC's server takes for the end of its own call."""

        def __init__(self) -> None:
            self.number = 3

        async def call(self, *_: object) -> bytes:
            raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch: 1")

    answer = await front._call(Unwell(), "GetServer", b"", cast("Context", Calling()))
    assert isinstance(answer, front.Refusal)
    assert answer.code is grpc.StatusCode.INTERNAL
    assert "GetServer was not passed on to worker 3" in caplog.text


class Calling:
    """Of a call, what the front looks at to pass it on."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        return None


def test_nothing_idle_holds_up_a_draining_front(begin):
    process = begin("--port", "0", "--grace-seconds", "600")
    with RawConnection(process.address, window=0) as connection:
        connection.call("/grpc.health.v1.Health/Watch", message(b""), ends=True)
        connection.call("StepStream")
        connection.call("Step", message(b"half", length=1_000))
        time.sleep(0.3)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(timeout=PATIENCE) == 0
    assert process.popen.stderr.read() == ""


def test_a_worker_ends_with_its_parent_before_it_has_its_order():
    script = (
        "import subprocess, time; from turngym_server.processes.workers import command; "
        "print(subprocess.Popen(command()).pid, flush=True); time.sleep(600)"
    )
    # Its stdin stays open whatever becomes of the parent.
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        eventually(lambda: not runs(worker))


def test_a_worker_whose_parent_has_ended_does_not_start():
    wrong = [*command()[:-2], str(os.getpid() + 1), command()[-1]]
    assert subprocess.run(wrong, stdin=subprocess.DEVNULL, timeout=PATIENCE).returncode == LAST_BREATH


def test_nothing_is_left_when_the_front_is_killed(begin, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = begin()
    workers = process.workers()
    assert len(workers) == 2
    stub_address = process.address
    with grpc.insecure_channel(stub_address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        session = stub.Reset(pb.ResetRequest(items=[reset_item("unruly")])).outcomes[0].started.session_id
        # A worker whose interpreter is held cannot notice anything itself.
        item = pb.StepItem(session_id=session, step_index=1, actions=["spin"])
        stub.Step.future(pb.StepRequest(items=[item]))
        time.sleep(0.3)
        process.popen.kill()
        eventually(lambda: not any(map(runs, workers)))
    assert list(tmp_path.iterdir()) == []


def test_a_drained_worker_is_replaced_too(two: Process):
    first = two.workers()[0]
    os.kill(first, signal.SIGTERM)
    eventually(lambda: first not in two.workers() and len(two.workers()) == 2)
    with connect(two.address, patience=PATIENCE) as client:
        episodes = client.reset_many([EpisodeRequest(environment_id="unruly", split=Split.ALL)] * 8)
        play(episodes, client, 1)


# What the operator says


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "turngym_server.cli", *ENVIRONMENTS, "--workers", "2", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_worker_that_cannot_start(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", "0", "--worker-port", str(port))
        assert (result.returncode, result.stdout) == (2, "")
        assert (
            result.stderr
            == f"env_server: port {port} of 127.0.0.1 is in use; choose another --port, or 0 for a free one\n"
        )
    result = run("--port", "0", "--option", f"levels={tmp_path / 'none'}")
    assert result.returncode == 2
    assert str(tmp_path / "none") in result.stderr
    assert result.stderr.count("\n") == 1
    result = run("--port", "0", "--max-sessions", "1")
    assert result.returncode == 2
    assert "--max-sessions 1 with --workers 2" in result.stderr


def test_a_front_whose_workers_cannot_come_back_ends(begin, tmp_path):
    levels = tmp_path / "levels"
    levels.write_text("4 5")
    process = begin("--port", "0", "--option", f"levels={levels}", workers=2)
    levels.unlink()
    for pid in process.workers():
        os.kill(pid, signal.SIGKILL)
    with grpc.insecure_channel(process.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        eventually(lambda: check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING)
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            stub.GetServer(pb.GetServerRequest())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert process.popen.wait(timeout=2 * PATIENCE) == 2
    last = process.popen.stderr.read().splitlines()[-1]
    assert last.startswith("env_server: ")
    assert str(levels) in last


def test_options_reach_the_workers_but_not_the_process_list(two: Process):
    with connect(two.address) as client:
        for _ in range(2):
            assert client.reset("third_party", split=Split.ALL, level_seed=1).state.observation == "Target 5."
    for pid in two.workers():
        assert "levels" not in Path(f"/proc/{pid}/cmdline").read_text()


def test_what_an_environment_prints_is_not_taken_for_a_report(two: Process):
    with connect(two.address) as client:
        assert client.reset("unruly", split=Split.ALL).step("print").observation.startswith("1, ")
