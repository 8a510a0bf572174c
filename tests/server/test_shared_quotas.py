"""A token's quotas over several workers: the sum keeps them, and each worker grants what the others leave."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest
from server_process import ServerProcess
from serving import Clock, call_status, details, reason, request_id, reset_item
from token_files import write_tokens

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc
from turngym_client import EpisodeRequest, Split, connect
from turngym_server.access import ledger
from turngym_server.access.admission import Access, Visit
from turngym_server.access.ledger import Ledger, Left
from turngym_server.access.tokens import TokenFile
from turngym_server.errors import ItemError

WORKERS = 4
PACED = 6
LEFT = Left(0.0, 0.0, 0.0)
QUOTAS = {
    "five": "max_sessions = 5",
    "crowd": "max_sessions = 5",
    "mortal": "max_sessions = 5",
    "busy": "max_sessions = 8",
    "slow": "requests_per_second = 4",
    "small": "bytes_per_second = 1000",
    **dict.fromkeys(
        ("GetServer", "KeepAlive", "Close", "Step", "Fork", "StepStream"), f"requests_per_second = {PACED}"
    ),
}


class Workers:
    """A server of four workers, and stubs of its front and of each of them."""

    def __init__(self, process: ServerProcess, tokens: dict[str, tuple[tuple[str, str], ...]]) -> None:
        self.process = process
        self.tokens = tokens
        self.front: pb_grpc.EnvironmentServiceStub
        self.each: Sequence[pb_grpc.EnvironmentServiceStub]

    async def reset(self, stub, token: str, count: int) -> list[str]:
        """New session ids; [] where the call is refused for the token's quota."""
        items = [reset_item("frozen_lake", split=pb.SPLIT_TRAIN) for _ in range(count)]
        try:
            reply = await stub.Reset(pb.ResetRequest(items=items), metadata=self.tokens[token])
        except grpc.aio.AioRpcError as error:
            info, delay = details(call_status(error))
            assert (info.reason, delay) == ("SESSION_LIMIT", 1.0)
            return []
        return [outcome.started.session_id for outcome in reply.outcomes]

    async def close(self, stub, token: str, ids: Sequence[str]) -> None:
        outcomes = (await stub.Close(pb.CloseRequest(session_ids=ids), metadata=self.tokens[token])).outcomes
        assert all(outcome.closed for outcome in outcomes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    tokens = write_tokens(path, **{name: f"role = 'train'\n{quota}" for name, quota in QUOTAS.items()}, free="train")
    environments = ("--env", "frozen_lake", "--env", "unruly_environment:Unruly")
    arguments = (*environments, "--workers", str(WORKERS), "--tokens", str(path))
    with ServerProcess(*arguments, path=Path(__file__).parent) as process:
        yield process, tokens


@pytest.fixture
async def workers(server) -> AsyncIterator[Workers]:
    process, tokens = server
    found = Workers(process, tokens)
    async with AsyncExitStack() as stack:

        async def stub(address: str):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            return pb_grpc.EnvironmentServiceStub(channel)

        found.front = await stub(process.address)
        info = await found.front.GetServer(pb.GetServerRequest(), metadata=tokens["free"])
        found.each = [await stub(address) for address in info.addresses]
        yield found


async def test_one_worker_grants_what_the_others_leave(workers: Workers):
    first, *others = workers.each
    held = await workers.reset(first, "five", 4)
    assert len(held) == 4
    assert await workers.reset(workers.front, "five", 2) == []
    assert len(await workers.reset(others[1], "five", 1)) == 1
    for stub in (*workers.each, workers.front):
        assert await workers.reset(stub, "five", 1) == []
    await workers.close(first, "five", held[:2])
    for stub in (first, others[0], others[2]):
        assert await workers.reset(stub, "five", 3) == []
    assert len(await workers.reset(others[0], "five", 2)) == 2
    assert await workers.reset(first, "five", 1) == []
    assert len(await workers.reset(first, "free", 8)) == 8


async def test_all_workers_asked_at_once_grant_no_more_than_the_quota(workers: Workers):
    granted = 0
    for _ in range(20):
        found = await asyncio.gather(*(workers.reset(stub, "crowd", 2) for stub in workers.each))
        ids = [(stub, each) for stub, each in zip(workers.each, found, strict=True) if each]
        assert sum(len(each) for _, each in ids) <= 5
        granted += len(ids)
        for stub, each in ids:
            await workers.close(stub, "crowd", each)
    assert granted
    # Whatever refused, nothing of it was kept.
    assert len(await workers.reset(workers.each[2], "crowd", 5)) == 5


def test_a_client_gets_its_whole_quota(server):
    process, tokens = server
    ((_, bearer),) = tokens["busy"]
    with connect(process.address, token=bearer.removeprefix("Bearer "), patience=10.0) as client:
        request = EpisodeRequest(environment_id="frozen_lake", split=Split.TRAIN)
        first = client.reset_many([request] * 3)
        copies = [first[0].fork() for _ in range(5)]  # All where their original is.
        client.close_many([*first, *copies])
        assert len(client.reset_many([request] * 8)) == 8


async def test_one_worker_grants_the_requests_that_the_quota_has(workers: Workers):
    began = time.monotonic()
    admitted = [await says_hello(workers.each[1], workers.tokens["slow"]) for _ in range(4)]
    assert all(admitted)
    admitted += [await says_hello(stub, workers.tokens["slow"]) for stub in (*workers.each,) * 10]
    # A second's worth in hand at first, and one more that each worker may find left in the same moment.
    assert sum(admitted) <= 4 * (1 + time.monotonic() - began) + WORKERS


@pytest.mark.parametrize("rpc", ["GetServer", "KeepAlive", "Close", "Step", "Fork", "StepStream"])
async def test_a_call_through_the_front_costs_one_request(workers: Workers, rpc: str):
    """However many workers it goes to: of as many calls as the quota has at first none is refused."""
    metadata = workers.tokens[rpc]
    ids = [session for stub in workers.each for session in await workers.reset(stub, "free", 1)]
    turns = pb.StepRequest(items=[pb.StepItem(session_id=each, step_index=1, actions=["Right"]) for each in ids])
    copies = [pb.ForkItem(request_id=request_id(), session_id=each) for each in ids]
    requests = {
        "GetServer": pb.GetServerRequest(),
        "KeepAlive": pb.KeepAliveRequest(session_ids=ids),
        "Close": pb.CloseRequest(session_ids=ids),
        "Step": turns,
        "Fork": pb.ForkRequest(items=copies),
    }
    if rpc == "StepStream":
        call = workers.front.StepStream(metadata=metadata)
        for number in range(PACED + 1):
            await call.write(pb.StepStreamRequest(id=number + 1, step=turns))
        answers = [await call.read() for _ in range(PACED + 1)]
        call.cancel()
        refused = [answer.error for answer in answers if answer.HasField("error")]
    else:
        refused = []
        for _ in range(PACED + 1):
            try:
                await getattr(workers.front, rpc)(requests[rpc], metadata=metadata)
            except grpc.aio.AioRpcError as error:
                refused.append(call_status(error))
    assert [reason(each) for each in refused] in ([], ["QUOTA_EXCEEDED"])  # Time has gone by, for one more at most.


async def says_hello(stub, metadata) -> bool:
    """Whether a call is let in; if not, it is for its quota."""
    try:
        await stub.GetServer(pb.GetServerRequest(), metadata=metadata)
    except grpc.aio.AioRpcError as error:
        refusal = call_status(error)
    else:
        return True
    assert reason(refusal) == "QUOTA_EXCEEDED"
    return False


async def test_bytes_that_one_worker_let_in_are_paid_for_at_all(workers: Workers):
    token = workers.tokens["small"]
    large = pb.GetEnvironmentRequest(environment_id="frozen_lake", options_json=" " * 60_000)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await workers.each[0].GetEnvironment(large, metadata=token)
    if reason(call_status(error.value)) != "INVALID_OPTIONS":  # Spaces are no options.
        raise error.value
    for stub in (*workers.each, workers.front):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetServer(pb.GetServerRequest(), metadata=token)
        info, delay = details(call_status(error.value))
        assert (info.reason, info.metadata["quota"]) == ("QUOTA_EXCEEDED", "bytes_per_second")
        assert delay is not None
        assert delay > 20


async def test_sessions_of_a_killed_worker_count_no_more(workers: Workers):
    """The last of this server, as it has one worker less for a while."""
    victim = workers.each[3]
    ids = await workers.reset(victim, "mortal", 5)
    assert len(ids) == 5
    assert await workers.reset(workers.each[0], "mortal", 1) == []
    os.kill(await _process_of(workers, victim), signal.SIGKILL)
    async with asyncio.timeout(60):
        while not (found := await workers.reset(workers.each[0], "mortal", 5)):  # noqa: ASYNC110  # Nothing says so.
            await asyncio.sleep(0.05)
    assert len(found) == 5


async def _process_of(workers: Workers, stub) -> int:
    """The worker's process id."""
    free = workers.tokens["free"]
    item = reset_item("unruly", split=pb.SPLIT_TRAIN)
    (begun,) = (await stub.Reset(pb.ResetRequest(items=[item]), metadata=free)).outcomes
    turn = pb.StepItem(session_id=begun.started.session_id, step_index=1, actions=["pid"])
    (outcome,) = (await stub.Step(pb.StepRequest(items=[turn], max_wait_seconds=10), metadata=free)).outcomes
    return int(outcome.transition.observation)


# The arithmetic, on a clock that stands still


def accesses(path: Path, quota: str, count: int) -> tuple[Clock, list[Access], object]:
    """As many workers' ways to let callers in, and the metadata of their one token."""
    metadata = write_tokens(path, one=f"role = 'train'\n{quota}")["one"]
    clock, memory = Clock(), ledger.make_memory(count)
    views = [Ledger(os.dup(memory), count, number) for number in range(1, count + 1)]
    os.close(memory)
    return clock, [Access(TokenFile(path), ledger=view, clock=clock) for view in views], metadata


def admits(access: Access, metadata) -> bool:
    try:
        access.admit(Visit("GetServer", metadata), 0)
    except ItemError:
        return False
    return True


def test_requests_over_all_workers_keep_to_the_quota(tmp_path):
    clock, (one, two, three), metadata = accesses(tmp_path / "tokens", "requests_per_second = 10", 3)
    assert [admits(one, metadata) for _ in range(11)] == [True] * 10 + [False]
    assert not admits(two, metadata)
    clock.now += 0.5
    assert [admits(three, metadata) for _ in range(6)] == [True] * 5 + [False]
    assert not admits(one, metadata)
    total = 0
    for second in range(50):
        clock.now += 1
        # Now one worker for long, now another.
        access = (one, two, three)[second // 7 % 3]
        total += sum(admits(access, metadata) for _ in range(40))
    assert 490 <= total <= 510
    clock.now += 100
    assert sum(admits(access, metadata) for access in (one, two, three) * 10) <= 12


def test_a_worker_that_comes_anew_begins_at_nothing(tmp_path):
    memory = ledger.make_memory(2)
    one, two = (Ledger(os.dup(memory), 2, number) for number in (1, 2))
    one.usage("ann").hold(3)
    one.usage("ann").take(7, 100, LEFT)
    seen = two.usage("ann")
    assert seen.sessions_elsewhere() == 3
    assert seen.taken_elsewhere() == (7, 100)
    one.usage("ann").take(1, 10, LEFT)
    assert seen.taken_elsewhere() == (1, 10)
    ledger.forget(memory, 1)
    assert (seen.sessions_elsewhere(), seen.taken_elsewhere()) == (0, (0, 0))
    again = Ledger(os.dup(memory), 2, 1)
    again.usage("bob").hold(9)
    again.usage("ann").take(2, 20, LEFT)
    assert (seen.sessions_elsewhere(), seen.taken_elsewhere()) == (0, (2, 20))
    os.close(memory)


def test_owners_beyond_the_memory_are_counted_by_their_worker_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "MOST_OWNERS", 1)
    memory = ledger.make_memory(2)
    one, two = (Ledger(os.dup(memory), 2, number) for number in (1, 2))
    os.close(memory)
    for owner, shared in (("ann", 2), ("bob", 0)):
        one.usage(owner).hold(2)
        assert two.usage(owner).sessions_elsewhere() == shared
