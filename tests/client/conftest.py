"""A small server that keeps the contract and can be told to misbehave, and the real one as a process of its own."""

import asyncio
import hashlib
import secrets
from collections import deque
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from server_process import ServerProcess

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc


def status(code, reason="", retry_after=None, **metadata):
    """A google.rpc.Status as the contract describes it."""
    details = []
    if reason:
        info = error_details_pb2.ErrorInfo(domain="turngym", reason=reason, metadata=metadata)
        details.append(any_pb2.Any())
        details[-1].Pack(info)
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(retry_after * 1e9))
        details.append(any_pb2.Any())
        details[-1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code, message=f"told to: {reason or code}", details=details)


def statuses(failures):
    """Statuses from dictionaries of `status`'s arguments; None stays None."""
    return deque(failure and status(**failure) for failure in failures)


@dataclass
class ToySession:
    item: pb.ResetItem
    turns: list = field(default_factory=list)
    last: pb.StepOutcome | None = None

    def transition(self):
        played = repr((self.item.level_seed, self.turns))
        return pb.Transition(
            observation=played,
            reward=1.0 if self.turns else 0.0,
            action_rewards=[1.0] if self.turns else [],
            actions_executed=1 if self.turns else 0,
            action_valid=True,
            terminated=len(self.turns) == 100,
            end_reason=pb.END_REASON_ENVIRONMENT if len(self.turns) == 100 else pb.END_REASON_UNSPECIFIED,
            digest=hashlib.sha256(played.encode()).digest(),
        )


class StreamedRequest:
    """Stands for the context of a call where a request came over a stream."""

    def __init__(self, context):
        self.invocation_metadata = context.invocation_metadata
        self.status = status_pb2.Status()

    def time_remaining(self):
        return None

    def set_trailing_metadata(self, metadata):
        self.status.ParseFromString(dict(metadata)["grpc-status-details-bin"])

    async def abort(self, code, message):
        raise Refused


class Refused(Exception):
    """A streamed request is answered with its context's status."""


class ToyService(pb_grpc.EnvironmentServiceServicer):
    """Episodes whose observation is their history, so that a turn played twice, lost or swapped is seen.

    `before[rpc]` and `after[rpc]` hold statuses, one for each coming call, which it fails with before or after having
    done its work (None: let it pass). `items[rpc]` holds the same for the outcome of an item. `pending` is how many
    outcomes of steps still come as Pending. `forgets_turns` makes replays end where they began. `calls` and
    `deadlines` are those met; a request of a stream is a call of Step without a deadline. `streams` is how many streams
    were asked for.
    """

    def __init__(self, offers_stream):
        self.offers_stream = offers_stream
        self.streams = 0
        self.sessions = {}
        self.by_request = {}
        self.calls = []
        self.deadlines = {}
        self.before = {}
        self.after = {}
        self.items = {}
        self.workers = []
        self.pending = 0
        self.forgets_turns = False
        self.step_gate = None
        self.played = 0
        self.batch_sizes = []
        self.client_ids = set()

    def count(self, rpc):
        return self.calls.count(rpc)

    async def _enter(self, rpc, context):
        self.calls.append(rpc)
        if (deadline := context.time_remaining()) is not None:
            self.deadlines[rpc] = deadline
        self.client_ids.update(value for key, value in context.invocation_metadata() if key == "turngym-client")
        await self._fail(self.before.get(rpc), context)

    async def _fail(self, queue, context):
        if queue and (failure := queue.popleft()) is not None:
            code = next(code for code in grpc.StatusCode if code.value[0] == failure.code)
            context.set_trailing_metadata((("grpc-status-details-bin", failure.SerializeToString()),))
            await context.abort(code, failure.message)

    def _item_error(self, rpc):
        queue = self.items.get(rpc)
        return queue.popleft() if queue else None

    async def GetServer(self, request, context):
        await self._enter("GetServer", context)
        return pb.GetServerResponse(version="0", addresses=self.workers, max_batch_items=8, lease_seconds=60)

    async def GetEnvironment(self, request, context):
        await self._enter("GetEnvironment", context)
        return pb.GetEnvironmentResponse(environment=pb.EnvironmentSpec(id=request.environment_id))

    async def ListEnvironments(self, request, context):
        await self._enter("ListEnvironments", context)
        page = int(request.page_token or 0)
        names = [pb.EnvironmentSummary(id=f"toy{page}")]
        return pb.ListEnvironmentsResponse(environments=names, next_page_token="" if page == 2 else str(page + 1))

    async def Reset(self, request, context):
        await self._enter("Reset", context)
        outcomes = []
        for item in request.items:
            if error := self._item_error("Reset"):
                outcomes.append(pb.ResetOutcome(request_id=item.request_id, error=error))
                continue
            if item.request_id not in self.by_request:
                turns = [] if self.forgets_turns else [tuple(turn.actions) for turn in item.resume.turns]
                self._add(item.request_id, ToySession(item, turns))
            outcomes.append(self._started(item.request_id))
        await self._fail(self.after.get("Reset"), context)
        return pb.ResetResponse(outcomes=outcomes)

    async def Fork(self, request, context):
        await self._enter("Fork", context)
        outcomes = []
        for item in request.items:
            if (parent := self.sessions.get(item.session_id)) is None:
                error = status(code_pb2.NOT_FOUND, "SESSION_UNKNOWN")
                outcomes.append(pb.ResetOutcome(request_id=item.request_id, error=error))
                continue
            if item.request_id not in self.by_request:
                assert item.step_index == len(parent.turns)
                self._add(item.request_id, ToySession(parent.item, list(parent.turns)))
            outcomes.append(self._started(item.request_id))
        await self._fail(self.after.get("Fork"), context)
        return pb.ForkResponse(outcomes=outcomes)

    def _add(self, request_id, session):
        self.by_request[request_id] = session_id = f"toy.{secrets.token_hex(8)}"
        self.sessions[session_id] = session

    def _started(self, request_id):
        session_id = self.by_request[request_id]
        session = self.sessions[session_id]
        return pb.ResetOutcome(
            request_id=request_id,
            started=pb.Started(
                session_id=session_id,
                environment_id=session.item.environment_id,
                version="1",
                options_json="{}",
                split=pb.SPLIT_TRAIN,
                level_seed=session.item.level_seed,
                noise=session.item.resume.noise or [pb.NoiseSegment(from_step=1, noise_seed=9)],
                step_index=len(session.turns),
                state=session.transition(),
            ),
        )

    async def Step(self, request, context):
        await self._enter("Step", context)
        self.batch_sizes.append(len(request.items))
        outcomes = [self._step(item) for item in request.items]
        if self.step_gate is not None:
            await self.step_gate.wait()
        await self._fail(self.after.get("Step"), context)
        return pb.StepResponse(outcomes=outcomes)

    async def StepStream(self, requests, context):
        self.streams += 1
        if not self.offers_stream:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        writing = asyncio.Lock()

        async def answer(request):
            streamed = StreamedRequest(context)
            try:
                response = pb.StepStreamResponse(id=request.id, step=await self.Step(request.step, streamed))
            except Refused:
                response = pb.StepStreamResponse(id=request.id, error=streamed.status)
            async with writing:
                await context.write(response)

        async with asyncio.TaskGroup() as answers:
            async for request in requests:
                answers.create_task(answer(request))

    def _step(self, item):
        outcome = pb.StepOutcome(session_id=item.session_id, step_index=item.step_index)
        session = self.sessions.get(item.session_id)
        if error := self._item_error("Step"):
            outcome.error.CopyFrom(error)
        elif session is None:
            outcome.error.CopyFrom(status(code_pb2.NOT_FOUND, "SESSION_UNKNOWN"))
        elif item.step_index == len(session.turns) + 1:
            session.turns.append(tuple(item.actions))
            self.played += 1
            outcome.transition.CopyFrom(session.transition())
        else:
            assert item.step_index == len(session.turns)
            assert session.turns[-1] == tuple(item.actions)
            outcome.transition.CopyFrom(session.transition())
        if self.pending:
            self.pending -= 1
            outcome.pending.SetInParent()
        return outcome

    async def Advise(self, request, context):
        await self._enter("Advise", context)
        outcomes = [
            pb.AdviseOutcome(session_id=item.session_id, advice=pb.Advice(actions=["x"], ceiling=0.5))
            if item.session_id in self.sessions
            else pb.AdviseOutcome(session_id=item.session_id, error=status(code_pb2.NOT_FOUND, "SESSION_EXPIRED"))
            for item in request.items
        ]
        return pb.AdviseResponse(outcomes=outcomes)

    async def KeepAlive(self, request, context):
        await self._enter("KeepAlive", context)
        return pb.KeepAliveResponse(
            outcomes=[pb.KeepAliveOutcome(session_id=name, lease_seconds=60) for name in request.session_ids]
        )

    async def Close(self, request, context):
        await self._enter("Close", context)
        return pb.CloseResponse(
            outcomes=[
                pb.CloseOutcome(session_id=name, closed=self.sessions.pop(name, None) is not None)
                for name in request.session_ids
            ]
        )


class Toy:
    """A running toy server that can be stopped and started again on its port, its sessions kept or forgotten."""

    def __init__(self, offers_stream):
        self.service = ToyService(offers_stream)
        self.port = 0
        self._server = None

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    async def start(self, *, remember=True):
        if not remember:
            self.service.sessions.clear()
            self.service.by_request.clear()
        self._server = grpc.aio.server()
        pb_grpc.add_EnvironmentServiceServicer_to_server(self.service, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def stop(self):
        await self._server.stop(0)

    def fail_before(self, rpc, *failures):
        self.service.before[rpc] = statuses(failures)

    def fail_after(self, rpc, *failures):
        self.service.after[rpc] = statuses(failures)

    def fail_items(self, rpc, *failures):
        self.service.items[rpc] = statuses(failures)


@pytest.fixture(params=["stream", "unary"])
async def toys(request):
    """Starts toy servers, new ones or such as offer no streams; they stop with the test."""
    running = []

    async def start():
        running.append(await Toy(offers_stream=request.param == "stream").start())
        return running[-1]

    yield start
    await asyncio.gather(*(toy.stop() for toy in running))


@pytest.fixture
async def toy(toys):
    return await toys()


@pytest.fixture
def real_servers():
    """Starts real servers; they are killed with the test."""
    running = []

    def start(*arguments):
        running.append(ServerProcess(*arguments).start())
        return running[-1]

    yield start
    for server in running:
        server.kill()


@pytest.fixture(scope="module")
def server():
    """A real server of this repository's environments, shared by a module's tests."""
    with ServerProcess("--env", "all", "--splits", "train,validation,held_out,all") as running:
        yield running
