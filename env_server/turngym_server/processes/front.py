"""The front of several workers: one address for all of them.

Clients that know how call the workers directly, whose addresses GetServer lists. For all others the front passes calls
on: an item goes to the worker whose tag begins its session's id, a new one to each worker in turn, and the outcomes
come back in the order of the items. Requests and replies stay bytes, and the caller's token and name go with them: the
front refuses those whose token may not call, or has used up its quotas of requests and bytes, of which a call costs one
request however many workers it goes to; what else a caller may do is decided by the workers.

Of a Reset all new items go to one worker, so they are admitted as a whole or not at all; where it has no room, the next
one is asked. A retry goes where its request id went before, until that worker is gone: the front remembers, of each
caller by itself, the ids that a worker has, and apart from them those that a worker has not answered for; see
`turngym_server.processes.assignments`. A worker that is silent gets new sessions only where all are, and is not waited
for where another can answer.
A Fork goes to the workers of its sessions, each of which has to admit its own part. So before any of them begins a copy
each keeps the places for its part, and where one has no room the others let theirs go: the call is refused, and nothing
was begun. Whoever sends it again with the same request ids gets what it began, once. What remains: a worker that goes
away after it had room takes its part with it, whose sessions are unknown then, and the copies of the others are there;
and one that does not answer for a minute after it had room may have none any more.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from prometheus_client.core import Metric

from turngym.v1 import environment_pb2 as pb
from turngym_server.access.admission import TOKEN_KEY, Visit, access_of
from turngym_server.access.caller import CLIENT_KEY, Caller, can_be_sent, stranger
from turngym_server.errors import ItemError, Reason
from turngym_server.listening import (
    FRONT_SERVICE,
    HOLD_KEY,
    SERVICE,
    Listener,
    host_and_port,
)
from turngym_server.processes.assignments import Assignments, CallerKey, Held, caller_key
from turngym_server.processes.workers import ANSWER_SECONDS, Metadata, Order, Worker, WorkerLost, Workers
from turngym_server.rpc import wire
from turngym_server.rpc.batches import (
    MAX_BATCH_ITEMS,
    STREAMED_STEP_FIELD,
    first_then_stragglers,
    frame,
    reply,
    request_id_of,
    reset_error,
    session_id_of,
    step_error,
    step_pending,
    unframe,
)
from turngym_server.rpc.call import Call, Context, abort, metadata_of
from turngym_server.rpc.gate import Gate, count_refusal
from turngym_server.rpc.health import Health
from turngym_server.rpc.requests import MAX_WAIT_SECONDS, wait_seconds
from turngym_server.rpc.room import Kept, Room
from turngym_server.rpc.stream import RequestStream
from turngym_server.rpc.wire import Undecodable
from turngym_server.watching.counts import Counts
from turngym_server.watching.metrics import MetricsEndpoint, exposition, process_families, refusals, union

log: Final = logging.getLogger(__name__)

DETAILS_KEY: Final = "grpc-status-details-bin"
SLACK_SECONDS: Final = 1.0
"""How much longer than the workers the front waits for outcomes; a worker that is silent by then has pending ones."""
_SILENT: Final = status_pb2.Status(
    code=code_pb2.UNAVAILABLE, message="the worker that has this session does not answer now; try again"
)
_PASSED_ON: Final = frozenset({TOKEN_KEY, "traceparent", "tracestate"})
"""Metadata that workers read, besides the client's name. Theirs is no other's to give: HOLD_KEY among them."""


class Refusal(Exception):
    """A worker's answer to a call as a whole, to be given to the caller as it is."""

    def __init__(self, code: grpc.StatusCode, message: str, details: bytes) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    @property
    def status(self) -> status_pb2.Status:
        """The refusal as the status of an item."""
        if self.details:
            return status_pb2.Status.FromString(self.details)
        code: tuple[int, str] = self.code.value
        return status_pb2.Status(code=code[0], message=self.message)

    @property
    def is_of_this_worker(self) -> bool:
        """Whether it started nothing for a cause that another worker may not have."""
        reasons = (Reason.SESSION_LIMIT.value, Reason.QUEUE_FULL.value, Reason.DRAINING.value)
        return any(
            detail.TypeName() == "google.rpc.ErrorInfo"
            and error_details_pb2.ErrorInfo.FromString(detail.value).reason in reasons
            for detail in self.status.details
        )


UnaryMethod = Callable[[bytes, Context], Awaitable[bytes]]
Answer = bytes | Refusal | WorkerLost | None
"""A worker's reply; None: not there yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """An RPC whose items live on several workers.

    Attributes:
        session_field: number of an item's field with the session id; 0: the item is the id.
        error: serialised outcome of an item whose worker refused, or is silent where nothing can be pending.
        pending: outcome of an item whose worker has not answered, or that no longer fits; None: workers are waited for
            unless they are silent.
    """

    name: str
    request: type[Message]
    response: type[Message]
    session_field: int
    error: Callable[[bytes, status_pb2.Status], bytes]
    pending: Callable[[bytes], Message] | None = None

    def tag(self, item: bytes) -> bytes:
        """The tag of the worker that has the item's session."""
        session_id = wire.raw_field(item, self.session_field) if self.session_field else item
        return session_id.partition(b".")[0]


def _item(data: bytes) -> Undecodable:
    """An item whose fields are looked up in its bytes."""
    return Undecodable(data, "")


def _reset_pending(item: bytes) -> Message:
    return pb.ResetOutcome(request_id=request_id_of(_item(item)), pending=pb.Pending())


def _reset_error(item: bytes, status: status_pb2.Status) -> bytes:
    return reset_error(request_id_of(_item(item)), status)


RESET: Final = Batched(
    name="Reset",
    request=pb.ResetRequest,
    response=pb.ResetResponse,
    session_field=0,
    error=_reset_error,
    pending=_reset_pending,
)
STEP: Final = Batched(
    name="Step",
    request=pb.StepRequest,
    response=pb.StepResponse,
    session_field=1,
    error=lambda item, status: step_error(_item(item), status),
    pending=lambda item: step_pending(_item(item)),
)
FORK: Final = Batched(
    name="Fork",
    request=pb.ForkRequest,
    response=pb.ForkResponse,
    session_field=2,
    error=_reset_error,
    pending=_reset_pending,
)
ADVISE: Final = Batched(
    name="Advise",
    request=pb.AdviseRequest,
    response=pb.AdviseResponse,
    session_field=1,
    error=lambda item, status: pb.AdviseOutcome(
        session_id=session_id_of(_item(item)), error=status
    ).SerializeToString(),
)
KEEP_ALIVE: Final = Batched(
    name="KeepAlive",
    request=pb.KeepAliveRequest,
    response=pb.KeepAliveResponse,
    session_field=0,
    error=lambda item, status: pb.KeepAliveOutcome(
        session_id=item.decode("utf-8", "replace"), error=status
    ).SerializeToString(),
)
CLOSE: Final = Batched(
    name="Close",
    request=pb.CloseRequest,
    response=pb.CloseResponse,
    session_field=0,
    error=lambda item, status: pb.CloseOutcome(session_id=item.decode("utf-8", "replace")).SerializeToString(),
)
BATCHED: Final = (RESET, STEP, FORK, ADVISE, KEEP_ALIVE, CLOSE)


class Front:
    """A running front and its workers.

    Args:
        order: what the workers serve, and where and how.

    Raises:
        OSError: on start, where the address cannot be bound or a worker cannot serve.
        ValueError: on start, where there is too little to share among the workers.
    """

    def __init__(self, order: Order) -> None:
        self.config = order.config
        self.port = 0
        self._order = order
        self._rotation = itertools.count()
        self._assignments = Assignments()
        self._draining = False
        self._streams: set[RequestStream] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._metrics: MetricsEndpoint | None = None
        self._counts = Counts()

    @property
    def address(self) -> str:
        """host:port that it listens on."""
        return host_and_port(self.config.host, self.port)

    @property
    def metrics_url(self) -> str | None:
        """Where it tells what its workers count; None where it does not."""
        return self._metrics and self._metrics.url

    async def start(self) -> None:
        """Binds, starts the workers, and begins to serve once all of them do."""
        self.workers = Workers(self._order, self._set_health)
        self._access = access_of(self.config, ledger=self.workers.ledger_of_front())
        self.workers.known_tokens = lambda: self._access.known_tokens
        self._room = Room()
        self._health = Health(("", SERVICE))
        self._server = Listener((self._handlers(), self._health.handlers()), self._access, self.config)
        self.port = self._server.bind()
        if self.config.metrics_port is not None:
            self._metrics = MetricsEndpoint(self.config.metrics_host, self.config.metrics_port, self._collect)
        await self.workers.start()
        await self._server.start()

    async def broken(self) -> None:
        """Raises CannotStart, should it come to that no worker serves and none can be started."""
        await self.workers.broken()

    async def drain(self) -> None:
        """Has the workers drain, passing calls on until they have ended, and stops."""
        self._draining = True
        self._set_health()
        await self.workers.drain()
        await self._end()

    async def stop(self) -> None:
        """Ends the workers and stops at once."""
        await self.workers.stop()
        await self._end()

    async def _end(self) -> None:
        for stream in self._streams:
            stream.stop()
        await self._server.stop(SLACK_SECONDS)
        if self._metrics is not None:
            await self._metrics.close()

    async def _collect(self) -> Iterable[Metric]:
        """All that Prometheus is told."""
        workers = self.workers.serving
        answers = await asyncio.gather(*(worker.metrics() for worker in workers), return_exceptions=True)
        told = zip(workers, answers, strict=True)
        texts = {str(worker.number): answer for worker, answer in told if isinstance(answer, str)}
        texts["front"] = exposition([*process_families(), refusals(self._counts.rpcs)]).decode()
        return union(texts, [str(number) for number in range(1, self.config.workers + 1)])

    def _set_health(self) -> None:
        self._health.set(bool(self.workers.serving) and not self._draining)

    # Calls

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, UnaryMethod] = {
            "GetServer": self._get_server,
            "ListEnvironments": functools.partial(self._to_anyone, "ListEnvironments"),
            "GetEnvironment": functools.partial(self._to_anyone, "GetEnvironment"),
            **{rpc.name: functools.partial(self._to_owners, rpc) for rpc in BATCHED},
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(self._guarded(name, method)) for name, method in methods.items()
        }
        handlers["StepStream"] = grpc.stream_stream_rpc_method_handler(self._step_stream)
        return Gate(grpc.method_handlers_generic_handler(SERVICE, handlers), self._access, self._counts)

    def _guarded(self, rpc: str, method: UnaryMethod) -> UnaryMethod:
        """The method, for those who have not used up their quotas; a Refusal is turned into the status of the call."""

        async def answer(data: bytes, context: Context) -> bytes:
            call = Call(Visit(rpc, metadata_of(context)))
            caller = self._admit(call, len(data))
            if isinstance(caller, ItemError):
                return await abort(context, caller)
            try:
                reply = await method(data, context)
            except Refusal as error:
                refusal = error
            else:
                self._access.charge(caller, len(reply))
                try:
                    self._room.hold_until_sent(context, caller.account, len(reply))
                except ItemError as no_room:
                    count_refusal(call, self._counts.rpc(rpc), no_room)
                    return await abort(context, no_room)
                return reply
            trailing = ((DETAILS_KEY, refusal.details),) if refusal.details else ()
            return await context.abort(refusal.code, refusal.message, trailing)

        return answer

    def _admit(self, call: Call, size: int) -> Caller | ItemError:
        """Whoever sent a request of `size` bytes, once it is counted; or why it is refused."""
        try:
            return self._access.admit(call.visit, size)
        except ItemError as refusal:
            count_refusal(call, self._counts.rpc(call.rpc), refusal)
            return refusal

    async def _get_server(self, data: bytes, context: Context) -> bytes:
        """What the workers that answer are together."""
        answers = await _ask_all(self._serving(), "GetServer", data, context)
        for answer in answers:
            if isinstance(answer, Refusal):
                raise answer
        infos = [pb.GetServerResponse.FromString(answer) for answer in answers if isinstance(answer, bytes)]
        if not infos:
            return await self._get_server(data, context)
        info = infos[0]
        info.addresses[:] = self.workers.addresses
        info.sessions = sum(each.sessions for each in infos)
        info.max_sessions = sum(each.max_sessions for each in infos)
        return info.SerializeToString()

    async def _to_anyone(self, rpc: str, data: bytes, context: Context) -> bytes:
        """The reply of any worker: of the one whose turn it is, or of another if that one is silent."""
        asked: dict[Worker, asyncio.Task[Answer]] = {}
        try:
            while True:
                left = [worker for worker in self._serving() if worker not in asked]
                if left:
                    worker = self._turn(left)
                    asked[worker] = asyncio.ensure_future(_call(worker, rpc, data, context))
                under_way = [task for task in asked.values() if not task.done()]
                if not under_way:
                    asked.clear()  # All were lost; others have come, or there is none.
                    continue
                done, _ = await asyncio.wait(
                    under_way, timeout=ANSWER_SECONDS if left else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    answer = task.result()
                    if isinstance(answer, Refusal):
                        raise answer
                    if isinstance(answer, bytes):
                        return answer
                if not done:
                    _note_silence(asked)
        finally:
            for task in asked.values():
                task.cancel()

    async def _to_owners(self, rpc: Batched, data: bytes, context: Context) -> bytes:
        """The outcomes of a batch, each from the worker that has the item's session or is to have it."""
        try:
            wire.check_fields(rpc.request, data)
            batch = wire.take_apart(rpc.request, data)
        except DecodeError:
            return await self._to_anyone(rpc.name, data, context)
        if not 1 <= len(batch.items) <= MAX_BATCH_ITEMS:
            return await self._to_anyone(rpc.name, data, context)
        rest = batch.request.SerializeToString()
        merged = _Merged(rpc, batch.items, _caller_of(context))
        left: Sequence[int] = range(len(batch.items))
        while left:
            parts = self._route(merged, left)
            if whole := len(parts) == 1 and len(left) == len(batch.items):
                requests = dict.fromkeys(parts, data)
            else:
                requests = {worker: rest + merged.items_field(places) for worker, places in parts.items()}
            if rpc is RESET:
                answers = await self._reset(merged, parts, requests, _waiting(batch.request), context)
            elif rpc is FORK and len(requests) > 1:
                answers = await self._fork(requests, _waiting(batch.request), context)
            else:
                answers = await _call_all(rpc, requests, _waiting(batch.request), context)
            if whole and isinstance(answer := answers[next(iter(parts))], bytes):
                return answer
            left = [place for worker in parts for place in merged.take(worker, parts[worker], answers[worker])]
        return merged.reply()

    async def _reset(
        self,
        merged: "_Merged",
        parts: Mapping[Worker, Sequence[int]],
        requests: Mapping[Worker, bytes],
        waiting: float | None,
        context: Context,
    ) -> Mapping[Worker, Answer]:
        """What `_call_all` gives; where the items went is known meanwhile, and afterwards of those that are held."""
        flights = {
            worker: [self._assignments.begin(merged.caller, merged.request_id(place), worker) for place in places]
            for worker, places in parts.items()
        }
        answers: Mapping[Worker, Answer] = {}
        try:
            answers = await _call_all(RESET, requests, waiting, context)
        finally:
            for worker, begun in flights.items():
                answer = answers.get(worker)  # Without one, as when the caller has gone, it may have them.
                for flight, held in zip(begun, _held(answer, len(begun)), strict=True):
                    self._assignments.end(flight, held)
        _note_silence(worker for worker, answer in answers.items() if answer is None)
        return answers

    async def _fork(
        self, requests: Mapping[Worker, bytes], waiting: float | None, context: Context
    ) -> Mapping[Worker, Answer]:
        """What `_call_all` gives of a Fork that several workers have to admit; where one does not, none begins one.

        A worker that is lost meanwhile has no session to copy, and is asked nothing more.
        """
        holds: dict[Worker, str] = {}
        lost: dict[Worker, Answer] = {}
        try:
            # In one order, so that of two callers who want the last places one gets through.
            for worker in sorted(requests, key=lambda worker: worker.number):
                answer = await _within(waiting, _call(worker, "Hold", requests[worker], context, FRONT_SERVICE))
                if isinstance(answer, bytes):
                    holds[worker] = answer.decode()
                elif isinstance(answer, WorkerLost):
                    lost[worker] = answer
                else:
                    _note_silence([worker] if answer is None else ())
                    return dict.fromkeys(requests, answer)
            names, holds = holds, {}
            held = {worker: requests[worker] for worker in names}
            return {**lost, **(await _call_all(FORK, held, waiting, context, names) if held else {})}
        finally:
            for worker, name in holds.items():
                self._let_go(worker, name)

    def _let_go(self, worker: Worker, name: str) -> None:
        """Has a worker free the places that it keeps. Where that does not reach it, it does so by itself, later."""

        async def tell() -> None:
            with contextlib.suppress(WorkerLost, grpc.aio.AioRpcError):
                await worker.call("LetGo", name.encode(), (), SLACK_SECONDS, FRONT_SERVICE)

        task = asyncio.ensure_future(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _step_stream(self, _requests: object, context: Context) -> None:
        """Passes each request of the stream on as a Step call."""

        visit = Visit("StepStream", metadata_of(context))

        async def answer(data: bytes) -> Kept:
            request_id, request = _streamed(data)
            call = Call(visit)
            caller = self._admit(call, len(data))
            if isinstance(caller, ItemError):
                return refused(request_id, caller.status())
            try:
                response = await self._to_owners(STEP, request, context)
            except Refusal as refusal:
                return refused(request_id, refusal.status)
            self._access.charge(caller, len(response))
            answered = frame(request_id, pb.StepStreamResponse.STEP_FIELD_NUMBER, response)
            try:
                return self._room.keep(caller.account, answered)
            except ItemError as no_room:
                count_refusal(call, self._counts.rpc(call.rpc), no_room)
                return refused(request_id, no_room.status())

        def refused(request_id: int, status: status_pb2.Status) -> Kept:
            return Kept(frame(request_id, pb.StepStreamResponse.ERROR_FIELD_NUMBER, status.SerializeToString()))

        stream = RequestStream(context, answer)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)

    def _route(self, merged: "_Merged", places: Iterable[int]) -> Mapping[Worker, Sequence[int]]:
        """Which worker each of these items goes to.

        Raises:
            Refusal: there is no worker, or none that has not refused new sessions.
        """
        parts: defaultdict[Worker, list[int]] = defaultdict(list)
        if merged.rpc is RESET:
            newcomers: Worker | None = None
            insisted = set(merged.insisted)
            for place in places:
                worker = self._assignments.find(merged.caller, merged.request_id(place))
                if worker is None:
                    worker = newcomers = newcomers or self._next(merged.full)
                elif worker in merged.full:
                    # It may have refused for want of room for new ones; no other may begin what it may have.
                    if worker in insisted:
                        raise merged.full[worker]
                    merged.insisted.add(worker)
                parts[worker].append(place)
            return parts
        by_tag = self.workers.by_tag()
        for place in places:
            # Whoever gets an id that is nobody's says that the session is unknown.
            worker = by_tag.get(merged.rpc.tag(merged.items[place])) or min(self._serving(), key=_is_silent)
            parts[worker].append(place)
        return parts

    def _next(self, refused: Mapping[Worker, Refusal]) -> Worker:
        """The worker whose turn it is, of those that have not refused. Raises Refusal where there is none."""
        left = [worker for worker in self._serving() if worker not in refused]
        if not left:
            raise tuple(refused.values())[-1]
        return self._turn(left)

    def _turn(self, workers: Sequence[Worker]) -> Worker:
        """The worker whose turn it is; a silent one where all are."""
        answering = [worker for worker in workers if not worker.silent] or workers
        return answering[next(self._rotation) % len(answering)]

    def _serving(self) -> Sequence[Worker]:
        if not (serving := self.workers.serving):
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "no worker of this server is there now; try again", b"")
        return serving


class _Merged:
    """The outcomes of one call's items, as the workers give them.

    Attributes:
        full: workers that had no room for new sessions, and what they said.
        insisted: those of them that are asked once more, for items that they may have.
    """

    def __init__(self, rpc: Batched, items: Sequence[bytes], caller: CallerKey) -> None:
        self.rpc = rpc
        self.items = items
        self.caller = caller
        self.full: dict[Worker, Refusal] = {}
        self.insisted: set[Worker] = set()
        self._outcomes: list[bytes | None] = [None] * len(items)
        self._refused: dict[int, Refusal] = {}

    def request_id(self, place: int) -> bytes:
        """The request id of an item of Reset."""
        return wire.raw_field(self.items[place], 1)

    def items_field(self, places: Iterable[int]) -> bytes:
        return b"".join([wire.bytes_field(wire.ITEMS_FIELD, self.items[place]) for place in places])

    def take(self, worker: Worker, places: Sequence[int], answer: Answer) -> Sequence[int]:
        """Takes a worker's answer for its items, and returns those to be sent to another one."""
        match answer:
            case None:
                return ()
            case WorkerLost():
                return places
            case Refusal() if self.rpc is RESET and answer.is_of_this_worker:
                self.full[worker] = answer
                return places
            case Refusal():
                self._refused.update(dict.fromkeys(places, answer))
            case bytes():
                outcomes = wire.take_apart(self.rpc.response, answer).items
                for place, outcome in zip(places, outcomes, strict=True):
                    self._outcomes[place] = outcome
        return ()

    def reply(self) -> bytes:
        """The serialised reply.

        Raises:
            Refusal: of one worker where all refused, or where the call is to be admitted as a whole.
        """
        if self._refused and (len(self._refused) == len(self.items) or self.rpc in (RESET, FORK)):
            raise next(iter(self._refused.values()))
        for place, refusal in self._refused.items():
            self._outcomes[place] = self.rpc.error(self.items[place], refusal.status)
        pending = self.rpc.pending
        if pending is None:
            outcomes = [
                self.rpc.error(self.items[place], _SILENT) if outcome is None else outcome
                for place, outcome in enumerate(self._outcomes)
            ]
            return b"".join([wire.bytes_field(wire.ITEMS_FIELD, outcome) for outcome in outcomes])
        return reply(self._outcomes, lambda place: pending(self.items[place]))


def _streamed(data: bytes) -> tuple[int, bytes]:
    """The id of a StepStreamRequest, and the StepRequest in it, as bytes."""
    request_id, step = unframe(data)
    if not isinstance(step, bytes):
        return request_id, step.SerializeToString()
    try:
        return request_id, b"".join(wire.take_apart(pb.StepStreamRequest, step, STREAMED_STEP_FIELD).items)
    except DecodeError:
        return request_id, step  # No more a StepRequest than it is anything else: a worker says so.


def _held(answer: Answer, items: int) -> Sequence[Held]:
    """For each item of a Reset, whether the worker has it, by its answer."""
    match answer:
        case None:
            return [Held.UNKNOWN] * items
        case Refusal() if not answer.details:  # Not the worker's own, as past the caller's deadline.
            return [Held.UNKNOWN] * items
        case bytes():
            outcomes = pb.ResetResponse.FromString(answer).outcomes
            return [Held.NO if outcome.HasField("error") else Held.YES for outcome in outcomes]
        case _:
            return [Held.NO] * items


def _caller_of(context: Context) -> CallerKey:
    """Whose request ids those of a call are."""
    metadata = metadata_of(context)
    token = "".join(repr(value) for key, value in metadata if key == TOKEN_KEY)
    return caller_key(token, stranger(metadata).client)


def _is_silent(worker: Worker) -> bool:
    return worker.silent


def _note_silence(workers: Iterable[Worker]) -> None:
    """Has these workers, which did not answer in time, asked last."""
    for worker in workers:
        worker.silent = True


async def _ask_all(workers: Sequence[Worker], rpc: str, data: bytes, context: Context) -> Sequence[Answer]:
    """The answers of those workers that answer soon, or of the first to do so."""
    tasks = {worker: asyncio.ensure_future(_call(worker, rpc, data, context)) for worker in workers}
    try:
        waited = {task for worker, task in tasks.items() if not worker.silent} or set(tasks.values())
        await asyncio.wait(waited, timeout=ANSWER_SECONDS)
        _note_silence(worker for worker, task in tasks.items() if not task.done())
        if not any(task.done() for task in tasks.values()):
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        return [task.result() for task in tasks.values() if task.done()]
    finally:
        for task in tasks.values():
            task.cancel()


async def _call_all(
    rpc: Batched,
    requests: Mapping[Worker, bytes],
    waiting: float | None,
    context: Context,
    holds: Mapping[Worker, str] | None = None,
) -> Mapping[Worker, Answer]:
    """Each worker's answer to its request.

    Args:
        waiting: seconds after which the rest is pending; None: all are waited for that are not silent.
        holds: the names of the places that each worker keeps for its request; None: none does.
    """
    service = SERVICE if holds is None else FRONT_SERVICE
    tasks = {
        worker: asyncio.ensure_future(
            _call(worker, rpc.name, data, context, service, ((HOLD_KEY, holds[worker]),) if holds else ())
        )
        for worker, data in requests.items()
    }
    try:
        if rpc is STEP and waiting is not None:
            await first_then_stragglers(tasks.values(), False, waiting)
        elif waiting is not None:
            await asyncio.wait(tasks.values(), timeout=waiting)
        else:
            await _until_done_or_silent(tasks)
        return {worker: task.result() if task.done() else None for worker, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()


async def _until_done_or_silent(tasks: Mapping[Worker, "asyncio.Task[Answer]"]) -> None:
    """Waits for every worker's answer, but for a silent one only until it is known to be: seconds, by its probes."""
    while under_way := {worker: task for worker, task in tasks.items() if not task.done()}:
        await asyncio.wait(under_way.values(), timeout=ANSWER_SECONDS)
        if all(worker.silent for worker, task in under_way.items() if not task.done()):
            return


async def _within(seconds: float | None, answer: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer, if it comes in time."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        return None


async def _call(
    worker: Worker, rpc: str, data: bytes, context: Context, service: str = SERVICE, own: Metadata = ()
) -> Answer:
    """One worker's answer, within the caller's own deadline; `own` goes with what the caller sent along."""
    try:
        return await worker.call(rpc, data, (*_passed_on(context), *own), context.time_remaining(), service)
    except WorkerLost as error:
        return error
    except grpc.aio.AioRpcError as error:
        return _refusal_of(error)
    except Exception:
        # Some of what gRPC raises here its server would take for the end of the caller's own call, and never answer it.
        log.exception("%s was not passed on to worker %d", rpc, worker.number)
        return Refusal(grpc.StatusCode.INTERNAL, f"{rpc} could not be passed on to a worker; see the server's log", b"")


def _passed_on(context: Context) -> Metadata:
    """What the workers read of what the caller sent along."""
    metadata = metadata_of(context)
    passed = ((key, value) for key, value in metadata if key in _PASSED_ON and can_be_sent(value))
    client = stranger(metadata).client
    return (*passed, *(((CLIENT_KEY, client),) if client else ()))


def _waiting(request: Message) -> float | None:
    """How long the outcomes of a call are waited for; None: until all are there."""
    if isinstance(request, pb.StepRequest | pb.ResetRequest):
        try:
            return wait_seconds(request.max_wait_seconds) + SLACK_SECONDS
        except ItemError:
            return MAX_WAIT_SECONDS  # The workers refuse it.
    return wait_seconds(0) + SLACK_SECONDS if isinstance(request, pb.ForkRequest) else None


def _refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    details = b""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            details = value
    return Refusal(error.code(), error.details() or "", details)
