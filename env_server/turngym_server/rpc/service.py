"""The RPCs of `EnvironmentService`.

Requests and replies are handled as bytes: an undecodable item fails alone, and outcomes leave as they were stored.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from prometheus_client.core import Metric

import turngym
from turngym.v1 import environment_pb2 as pb
from turngym_server.access.admission import Visit, access_of
from turngym_server.access.caller import Caller
from turngym_server.access.ledger import Ledger
from turngym_server.config import ServerConfig
from turngym_server.environment import EnvironmentSpec, Limits
from turngym_server.errors import ENVIRONMENT_ERRORS, ItemError, Reason, exception_text
from turngym_server.host import EnvironmentHost, Plan, ResolvedOptions
from turngym_server.listening import FRONT_SERVICE, HOLD_KEY, MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, SERVICE
from turngym_server.processes.isolation import retried
from turngym_server.rpc import messages, wire
from turngym_server.rpc.batches import (
    MAX_BATCH_ITEMS,
    decode,
    decode_ids,
    decode_streamed,
    decoded,
    first_then_stragglers,
    frame,
    once,
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
from turngym_server.rpc.options import OptionChecks
from turngym_server.rpc.requests import (
    check_request_id,
    find_host,
    find_host_of_reset,
    item_fingerprint,
    read_reset,
    requested_limits,
    wait_seconds,
)
from turngym_server.rpc.room import COUNTED_FROM, Kept, Room
from turngym_server.rpc.stream import RequestStream
from turngym_server.rpc.wire import Undecodable
from turngym_server.sessions.digest import canonical_json, encode_actions
from turngym_server.sessions.episode import MAX_ACTION_BYTES, MAX_OBSERVATION_BYTES
from turngym_server.sessions.seeds import seeds_event, seeds_in_words
from turngym_server.sessions.session import (
    Identity,
    Runtime,
    Session,
    fingerprint_of,
    list_legal,
)
from turngym_server.sessions.table import Creation, SessionTable
from turngym_server.sessions.threads import Overrun
from turngym_server.splits import Split
from turngym_server.watching.counts import Departure, Origin, RpcCounts
from turngym_server.watching.logs import Event, without_text
from turngym_server.watching.metrics import families

if TYPE_CHECKING:
    from turngym_server.watching.tracing import Tracing

log: Final = logging.getLogger(__name__)

ITEMS_BETWEEN_YIELDS: Final = 64
"""Turns played on the event loop before others get it."""
MAX_PAGE: Final = 1_000
DEFAULT_PAGE: Final = 100

ItemT = TypeVar("ItemT", bound=Message)

Reply = bytes | Awaitable[bytes]
"""A serialised reply, or what will give it where it has to be waited for."""
UnaryMethod = Callable[[bytes, Context], Awaitable[bytes]]
Prepare = Callable[[ItemT], Awaitable[Callable[[], Awaitable[Session]]]]
"""Checks an item and returns what makes its session."""

_DEPARTURES: Final = {
    pb.CLOSE_REASON_FINISHED: Departure.FINISHED,
    pb.CLOSE_REASON_ABANDONED: Departure.ABANDONED,
    pb.CLOSE_REASON_ERROR: Departure.ERROR,
}


class EnvironmentService:
    """The RPCs, over sessions and hosts. Lives on one event loop."""

    def __init__(
        self,
        hosts: Sequence[EnvironmentHost],
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        now: Callable[[], float] = time.time,
        tracing: "Tracing | None" = None,
    ) -> None:
        self.hosts: Mapping[str, EnvironmentHost] = {
            host.spec.id: host for host in sorted(hosts, key=lambda host: host.spec.id)
        }
        ledger = None if config.ledger is None else Ledger(config.ledger, config.workers + 1, config.number)
        self.access = access_of(config, clock, now, ledger=ledger)
        self.draining = False
        self.runtime = Runtime(clock, config.threads, config.max_queued_per_caller)
        for environment_id in self.hosts:
            self.runtime.counts.environment(environment_id)
        self.table = SessionTable(
            max_sessions=config.max_sessions,
            max_sessions_per_caller=config.max_sessions_per_caller or config.max_sessions,
            lease_seconds=config.lease_seconds,
            clock=clock,
            tag=config.tag or secrets.token_hex(4),
            ledger=ledger,
        )
        self._splits = frozenset(config.splits)
        self._tracing = tracing
        self.streams: set[RequestStream] = set()
        self._streams_stopped = False
        self._room = Room()
        self._options = OptionChecks(self.runtime)
        self._seal_key = config.seal_key

    async def metrics(self) -> Iterable[Metric]:
        """All that Prometheus is told."""
        versions = {host.spec.id: host.spec.version for host in self.hosts.values()}
        return families(self.runtime.counts, self.table, versions)

    def handlers(self, charged: bool = False) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to serve the RPCs; `charged`: to a front, which counts calls against quotas."""
        methods: dict[str, Callable[[bytes, Call], Reply]] = {
            "GetServer": self.get_server,
            "ListEnvironments": self.list_environments,
            "GetEnvironment": self.get_environment,
            "Reset": self.reset,
            "Step": self.step,
            "Fork": self.fork,
            "Advise": self.advise,
            "KeepAlive": self.keep_alive,
            "Close": self.close,
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name, method, self.runtime.counts.rpc(name), charged)
            )
            for name, method in methods.items()
        }
        handlers["StepStream"] = grpc.stream_stream_rpc_method_handler(self.step_stream)
        return Gate(grpc.method_handlers_generic_handler(SERVICE, handlers), self.access, self.runtime.counts)

    # Every call

    def _guarded(
        self, rpc: str, method: Callable[[bytes, Call], Reply], counts: RpcCounts, charged: bool
    ) -> UnaryMethod:
        """The method, for those who may call it; what refuses a whole call is its status."""

        async def answer(data: bytes, context: Context) -> bytes:
            call = Call(Visit(rpc, metadata_of(context)), charged)
            reply = self._answer(call, len(data), lambda call: method(data, call), counts)
            if not isinstance(reply, bytes | ItemError):
                reply = await reply
            if isinstance(reply, bytes):
                try:
                    self._room.hold_until_sent(context, call.caller.account, len(reply))
                except ItemError as refusal:
                    count_refusal(call, counts, refusal)
                    reply = refusal
            return reply if isinstance(reply, bytes) else await abort(context, reply)

        return answer

    def _answer(
        self, call: Call, size: int, work: Callable[[Call], Reply], counts: RpcCounts
    ) -> bytes | ItemError | Awaitable[bytes | ItemError]:
        """The reply to a request, or why it is refused as a whole; counted, and traced where that is asked for.

        Args:
            size: of the request, in bytes.

        Returns:
            What will give it, where it has to be waited for.
        """
        if self._tracing is not None:
            return self._finished(call, counts, time.perf_counter(), self._traced(self._tracing, call, size, work))
        began = time.perf_counter()
        try:
            reply = self._admitted(call, size, work)
        except (ItemError, DecodeError) as error:
            return self._refused(call, counts, began, error)
        if not isinstance(reply, bytes):
            return self._finished(call, counts, began, reply)
        self._count(call, counts, began, reply)
        return reply

    def _admitted(self, call: Call, size: int, work: Callable[[Call], Reply]) -> Reply:
        """The reply, if the caller may have one."""
        call.caller = self.access.admit(call.visit, size, call.charged)
        return work(call) if size < COUNTED_FROM else self._held(call, size, work)

    async def _held(self, call: Call, size: int, work: Callable[[Call], Reply]) -> bytes:
        """The reply to a large request, if there is room for it."""
        with self._room.hold(call.caller.account, size):
            reply = work(call)
            return reply if isinstance(reply, bytes) else await reply

    async def _traced(self, tracing: "Tracing", call: Call, size: int, work: Callable[[Call], Reply]) -> bytes:
        with tracing.span(call):
            reply = self._admitted(call, size, work)
            return reply if isinstance(reply, bytes) else await reply

    async def _finished(
        self, call: Call, counts: RpcCounts, began: float, reply: Awaitable[bytes]
    ) -> bytes | ItemError:
        try:
            finished = await reply
        except (ItemError, DecodeError) as error:
            return self._refused(call, counts, began, error)
        self._count(call, counts, began, finished)
        return finished

    def _count(self, call: Call, counts: RpcCounts, began: float, reply: bytes = b"") -> None:
        counts.seconds.add(time.perf_counter() - began)
        if call.items:
            counts.items.add(call.items)
        if call.failures:
            counts.item_errors.update(call.failures)
            _log_failures(call)
        if not call.charged:
            self.access.charge(call.caller, len(reply))

    def _refused(self, call: Call, counts: RpcCounts, began: float, error: ItemError | DecodeError) -> ItemError:
        """Counts and logs why a whole call is refused."""
        self._count(call, counts, began)
        if isinstance(error, DecodeError):
            error = ItemError(Reason.INVALID_ITEM, f"the request is no valid message: {error}")
        count_refusal(call, counts, error)
        return error

    # What is served

    async def get_server(self, data: bytes, call: Call) -> bytes:
        pb.GetServerRequest.FromString(data)
        may_meet = call.caller.may_meet(self._splits)
        offered = {split for host in self.hosts.values() for split in host.splits(host.defaults, may_meet)}
        return pb.GetServerResponse(
            version=turngym.__version__,
            splits=[messages.SPLITS[split] for split in Split if split in offered],
            max_sessions=self.table.max_sessions,
            sessions=self.table.held,
            lease_seconds=self.table.lease_seconds,
            max_batch_items=MAX_BATCH_ITEMS,
            max_action_bytes=MAX_ACTION_BYTES,
            max_observation_bytes=MAX_OBSERVATION_BYTES,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_request_bytes=MAX_REQUEST_BYTES,
        ).SerializeToString()

    async def list_environments(self, data: bytes, call: Call) -> bytes:
        request = pb.ListEnvironmentsRequest.FromString(data)
        size = request.page_size or DEFAULT_PAGE
        if size > MAX_PAGE:
            raise ItemError(Reason.INVALID_ITEM, f"page_size {size}; expected at most {MAX_PAGE}")
        left = [host.spec for host in self.hosts.values() if host.spec.id > request.page_token]
        page = left[:size]
        return pb.ListEnvironmentsResponse(
            environments=[
                pb.EnvironmentSummary(id=spec.id, version=spec.version, family=spec.family, summary=spec.summary)
                for spec in page
            ],
            next_page_token=page[-1].id if len(left) > size else "",
        ).SerializeToString()

    async def get_environment(self, data: bytes, call: Call) -> bytes:
        request = pb.GetEnvironmentRequest.FromString(data)
        host = find_host(self.hosts, request.environment_id)
        spec = host.spec
        options = await self._options.check(host, request.options_json, call.caller.account)
        limits = host.resolve_limits(requested_limits(request.limits))
        served = host.splits(options, call.caller.may_meet(self._splits))
        return pb.GetEnvironmentResponse(
            environment=pb.EnvironmentSpec(
                id=spec.id,
                version=spec.version,
                family=spec.family,
                summary=spec.summary,
                options_schema_json=canonical_json(host.options_schema),
                options_json=options.json,
                instructions=await self._instructions(call, host, options, limits),
                action_separator=spec.action_separator,
                action_kind=messages.ACTION_KINDS[spec.action_kind],
                tools_json=spec.tools,
                limits=messages.limits(limits),
                caps=messages.limits(spec.caps),
                determinism=messages.DETERMINISMS[spec.determinism],
                splits=[_split_info(host, options.json, limits, split, split in served) for split in Split],
                split_epoch=spec.split_epoch,
                step_deadline_seconds=spec.step_deadline,
            )
        ).SerializeToString()

    async def _instructions(self, call: Call, host: EnvironmentHost, options: ResolvedOptions, limits: Limits) -> str:
        """What an agent has to be told, from a thread.

        Raises:
            ItemError: ENVIRONMENT_FAILED or STEP_DEADLINE.
        """
        spec = host.spec
        what = f"the instructions of {spec.id} for options {options.json}"
        try:
            return await self.runtime.threads(spec).run(
                lambda: host.instructions(options, limits), spec.step_deadline, account=call.caller.account
            )
        except ItemError:
            raise
        except Overrun:
            raise ItemError(
                Reason.STEP_DEADLINE, f"{what} ran past their deadline of {spec.step_deadline:g} s"
            ) from None
        except ENVIRONMENT_ERRORS as error:
            log.exception("%s failed", what, extra=Event(rpc=call.rpc, environment=spec.id, options=options.json))
            raise ItemError(Reason.ENVIRONMENT_FAILED, f"{what} failed: {exception_text(error)}") from error

    # Sessions that begin

    async def reset(self, data: bytes, call: Call) -> bytes:
        request, items = decode(pb.ResetRequest, pb.ResetItem, data)
        waiting = wait_seconds(request.max_wait_seconds)
        may_meet = call.caller.may_meet(self._splits)

        async def prepare(item: pb.ResetItem) -> Callable[[], Awaitable[Session]]:
            if item.HasField("sealed_seed") and not call.caller.may_unseal:
                role = call.caller.role.value
                raise ItemError(
                    Reason.NOT_PERMITTED, f"sealed seeds are not for role {role!r}", metadata={"role": role}
                )
            host = find_host_of_reset(self.hosts, item)
            options = await self._options.check(host, item.options_json, call.caller.account)
            plan = read_reset(item, host, options, may_meet, self._seal_key, call.caller.withheld_from)
            call.about(host.spec.id)
            return lambda: self._start(call.caller, host, plan, request.want_legal_actions)

        return await self._begin(items, call, prepare, waiting, request.want_legal_actions)

    async def fork(self, data: bytes, call: Call) -> bytes:
        return await self._fork(data, call)

    async def _fork(self, data: bytes, call: Call, held: str = "") -> bytes:
        """A serialised ForkResponse; `held` as for `_begin`."""
        request, items = decode(pb.ForkRequest, pb.ForkItem, data)
        prepare = self._copies(call)
        return await self._begin(items, call, prepare, wait_seconds(0), request.want_legal_actions, held)

    def _copies(self, call: Call) -> "Prepare[pb.ForkItem]":
        """What checks an item of a Fork and returns what makes its session."""

        async def prepare(item: pb.ForkItem) -> Callable[[], Awaitable[Session]]:
            session = self.table.find(item.session_id, call.caller.owner)
            call.about(session.identity.host.spec.id)
            noise_seed = _fork_noise(item)

            def copy() -> Awaitable[Session]:
                identity = replace(session.identity, session_id=self.table.new_id(), caller=call.caller)
                return session.fork(identity, item.step_index, noise_seed)

            return copy

        return prepare

    # A Fork of which other workers have to admit their parts

    def front_handlers(self) -> grpc.GenericRpcHandler:
        """What a worker's server needs so that its front can have a Fork admitted by several workers, or by none."""
        methods = {"Hold": self._hold, "Fork": self._fork_held, "LetGo": self._let_go}
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()
        }
        return grpc.method_handlers_generic_handler(FRONT_SERVICE, handlers)

    def _begun(self, context: Context) -> tuple[Call, RpcCounts, float]:
        """A front's call about a Fork, what it is counted on, and when it came."""
        return Call(Visit("Fork", metadata_of(context)), True), self.runtime.counts.rpc("Fork"), time.perf_counter()

    async def _hold(self, data: bytes, context: Context) -> bytes:
        """Keeps places for what a Fork asks for, and gives their name. Refused as the Fork would be."""
        call, counts, began = self._begun(context)
        try:
            call.caller = self.access.admit(call.visit, 0, True)
            _, items = decode(pb.ForkRequest, pb.ForkItem, data)
            asked = await self._asked(items, call, self._copies(call))
            if asked.new:
                self._admit(call.caller, len(asked.new))
            return self.table.hold(call.caller, len(asked.new)).encode()
        except (ItemError, DecodeError) as error:
            refusal = self._refused(call, counts, began, error)
        return await abort(context, refusal)

    async def _fork_held(self, data: bytes, context: Context) -> bytes:
        """A Fork whose places are kept; in the metadata is their name."""
        call, counts, began = self._begun(context)
        held = next((str(value) for key, value in call.metadata if key == HOLD_KEY), "")

        async def answer() -> bytes:
            # What it may do was looked at when the places were taken.
            holder = self.table.holder(held)
            call.caller = holder or self.access.admit(call.visit, 0, True)
            return await self._fork(data, call, held)

        reply = await self._finished(call, counts, began, answer())
        return reply if isinstance(reply, bytes) else await abort(context, reply)

    async def _let_go(self, data: bytes, _: Context) -> bytes:
        self.table.let_go(data.decode())
        return b""

    async def _asked(
        self,
        items: Sequence[ItemT | Undecodable],
        call: Call,
        prepare: "Prepare[ItemT]",
    ) -> "_Asked":
        """What a call asks to begin. Until something is awaited again, what is new in it stays new.

        Args:
            prepare: checks an item and returns what makes its session.
        """
        caller = call.caller
        call.items = len(items)
        asked = _Asked([None] * len(items))
        prepared: dict[int, _New] = {}
        seen: set[str] = set()
        for position, item in enumerate(items):
            if position:
                await asyncio.sleep(0)  # One item may take milliseconds to read.
            request_id = request_id_of(item)
            try:
                item = decoded(item)
                check_request_id(request_id)
                once(request_id.hex(), seen, "request id")
                fingerprint = item_fingerprint(item)
                creation = self.table.known(caller, request_id, fingerprint)
                if creation is not None:
                    asked.known[position] = creation
                else:
                    prepared[position] = _New(request_id, fingerprint, await prepare(item))
            except ItemError as error:
                asked.outcomes[position] = reset_error(request_id, call.failed(error))
        # While items were prepared, the same ones may have been opened by another call.
        for position, item in prepared.items():
            try:
                creation = self.table.known(caller, item.request_id, item.fingerprint)
                if creation is not None:
                    asked.known[position] = creation
                else:
                    asked.new[position] = item
            except ItemError as error:
                asked.outcomes[position] = reset_error(item.request_id, call.failed(error))
        return asked

    async def _begin(
        self,
        items: Sequence[ItemT | Undecodable],
        call: Call,
        prepare: "Prepare[ItemT]",
        waiting: float,
        want_legal: bool,
        held: str = "",
    ) -> bytes:
        """Makes sessions, all of a call or none, each of them once however often it is asked for.

        Args:
            prepare: checks an item and returns what makes its session.
            held: the name of places that are kept for this call; "": none are.
        """
        asked = await self._asked(items, call, prepare)
        # From here to the last `open` nothing is awaited: what is admitted is what is opened.
        is_held = bool(held) and self.table.let_go(held)
        if asked.new:
            self._admit(call.caller, len(asked.new), is_held)
        for position, new in asked.new.items():
            creation = self.table.open(call.caller, new.request_id, new.fingerprint)
            self.runtime.waiting.enter(call.caller.account)
            creation.task = self.runtime.spawn(self._make(creation, new.make))
            asked.known[position] = creation
        outcomes = asked.outcomes
        tasks = {
            position: self.runtime.spawn(self._reset_outcome(creation, want_legal, call))
            for position, creation in asked.known.items()
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=waiting)
        for position, task in tasks.items():
            outcomes[position] = task.result() if task.done() else None
            task.cancel()  # What it waits for goes on, and is waited for anew when it is asked for again.
        return reply(
            outcomes, lambda position: pb.ResetOutcome(request_id=request_id_of(items[position]), pending=pb.Pending())
        )

    def _admit(self, caller: Caller, count: int, is_held: bool = False) -> None:
        if self.draining and not is_held:
            raise ItemError(Reason.DRAINING, "the server is shutting down; start or resume episodes on another")
        if not is_held:
            self.runtime.waiting.check(caller.account, count)
        self.table.admit(caller, count)

    async def _make(self, creation: Creation, make: Callable[[], Awaitable[Session]]) -> None:
        """Makes the session, and says in the table what came of it."""
        try:
            session = await make()
        except ItemError as error:
            creation.error = error
            self.table.not_made(creation)
        except BaseException:
            self.table.not_made(creation)
            raise
        else:
            self.table.made(creation, session)
        finally:
            self.runtime.waiting.leave(creation.caller.account)
        creation.task = None

    async def _start(self, caller: Caller, host: EnvironmentHost, plan: Plan, want_legal: bool) -> Session:
        """Starts or resumes an episode in a thread.

        Raises:
            ItemError: what the host says, ENVIRONMENT_FAILED, or STEP_DEADLINE.
        """
        spec = host.spec
        session_id = self.table.new_id()

        def where() -> str:
            return (
                f"{spec.id} {spec.version}, options {plan.options.json}, split {plan.split.value}, "
                f"{seeds_in_words(plan.level_seed, plan.noise, plan.seal)}, {len(plan.turns)} turns to replay"
            )

        made: list[Session] = []

        def work() -> Session:
            started = host.start(plan, self.runtime.clock())
            identity = Identity(
                session_id=session_id,
                caller=caller,
                host=host,
                options_json=plan.options.json,
                split=plan.split,
                level_seed=started.level_seed,
                seal=plan.seal,
                instance_id=started.instance_id,
                world_id=started.world_id,
                instructions=started.instructions,
            )
            session = Session(
                identity,
                started.episode,
                self.runtime,
                state=messages.transition(started.state).SerializeToString(),
                last_actions=fingerprint_of(encode_actions(started.last_actions)) if started.last_actions else None,
                legal=list_legal(started.episode, identity) if want_legal else None,
            )
            made.append(session)
            return session

        def release() -> None:
            for session in made:
                session.release()

        deadline = spec.step_deadline * (1 + len(plan.turns))
        counts = self.runtime.counts.environment(spec.id)
        origin = Origin.RESUME if plan.turns else Origin.RESET
        began = time.perf_counter()
        try:
            session = await self.runtime.threads(spec).run(
                lambda: retried(work), deadline, late=release, account=caller.account
            )
        except ItemError:
            raise
        except Overrun:
            log.warning(
                "a reset ran past its deadline of %g s: %s",
                deadline,
                where(),
                extra={**_reset_event(caller, spec, plan), "reason": Reason.STEP_DEADLINE.value},
            )
            raise ItemError(
                Reason.STEP_DEADLINE, f"the reset of {spec.id} ran past its deadline of {deadline:g} s"
            ) from None
        except ENVIRONMENT_ERRORS as error:
            logged = error if plan.seal is None else without_text(error)
            log.exception(
                "a reset failed: %s",
                where(),
                exc_info=logged,
                extra={**_reset_event(caller, spec, plan), "reason": Reason.ENVIRONMENT_FAILED.value},
            )
            # What a level of a sealed seed made the environment say may quote that level.
            told = exception_text(error) if plan.seal is None else type(error).__name__
            raise ItemError(Reason.ENVIRONMENT_FAILED, f"{spec.id} failed in a reset: {told}") from logged
        finally:
            counts.reset_seconds[origin].add(time.perf_counter() - began)
        session.began(origin)
        return session

    async def _reset_outcome(self, creation: Creation, want_legal: bool, call: Call) -> bytes:
        """The serialised ResetOutcome of a creation, once it is made."""
        if (task := creation.task) is not None:
            await asyncio.wait({task})
            task.result()
        if creation.error is not None:
            return reset_error(creation.request_id, call.failed(creation.error))
        made = creation.session
        assert made is not None
        started = made.started()
        started.lease_seconds = self.table.lease_seconds
        if want_legal:
            # The environment of an ended session is freed; what it had listed by then is still the answer.
            index = made.start_index
            legal = made.listed_actions(index) if creation.ended else await made.legal_actions(index)
            if legal is not None:
                started.state.legal_actions.CopyFrom(legal)
        return pb.ResetOutcome(request_id=creation.request_id, started=started).SerializeToString()

    # Turns

    def step(self, data: bytes, call: Call) -> Reply:
        return self._step(*decode(pb.StepRequest, pb.StepItem, data), call)

    async def step_stream(self, _requests: object, context: Context) -> None:
        counts = self.runtime.counts.rpc("StepStream")
        visit = Visit("StepStream", metadata_of(context))

        def answer(data: bytes) -> bytes | Awaitable[Kept]:
            request_id, request = unframe(data)
            call = Call(visit)
            reply = self._answer(call, len(data), lambda call: self._step(*decode_streamed(request), call), counts)
            if isinstance(reply, bytes | ItemError):
                return _streamed(request_id, reply)
            return later(request_id, call, reply)

        async def later(request_id: int, call: Call, reply: Awaitable[bytes | ItemError]) -> Kept:
            answered = _streamed(request_id, await reply)
            try:
                return self._room.keep(call.caller.account, answered)
            except ItemError as refusal:
                count_refusal(call, counts, refusal)
                return Kept(_streamed(request_id, refusal))

        stream = RequestStream(context, answer)
        self.streams.add(stream)
        try:
            if not self._streams_stopped:
                await stream.run()
        finally:
            self.streams.discard(stream)
        if self._streams_stopped:
            await abort(context, ItemError(Reason.DRAINING, "the server is shutting down; resume episodes on another"))

    @property
    def held_bytes(self) -> int:
        """Of requests and replies under way, as far as they are counted."""
        return self._room.held

    def stop_streams(self) -> None:
        """Ends every stream once what it has read is answered."""
        self._streams_stopped = True
        for stream in self.streams:
            stream.stop()

    def _step(self, request: pb.StepRequest, items: Sequence[pb.StepItem | Undecodable], call: Call) -> Reply:
        """Plays one turn in each session; a serialised StepResponse, at once where none has to be waited for."""
        turns = _Turns(items, wait_seconds(request.max_wait_seconds), request.want_legal_actions)
        call.items = len(items)
        if len(items) > ITEMS_BETWEEN_YIELDS:
            return self._step_many(turns, call)
        self._play(turns, range(len(items)), call)
        return turns.collected() if turns.running else turns.reply()

    async def _step_many(self, turns: "_Turns", call: Call) -> bytes:
        """The same, with others between."""
        for first in range(0, len(turns.items), ITEMS_BETWEEN_YIELDS):
            self._play(turns, range(first, min(first + ITEMS_BETWEEN_YIELDS, len(turns.items))), call)
            await asyncio.sleep(0)
        return await turns.collected()

    def _play(self, turns: "_Turns", positions: range, call: Call) -> None:
        """Plays or begins the turns of some items."""
        find, owner = self.table.find, call.caller.owner
        items, outcomes, want_legal = turns.items, turns.outcomes, turns.want_legal
        for position in positions:
            try:
                item = decoded(items[position])
                session_id, step_index = item.session_id, item.step_index
                once(session_id, turns.seen, "session")
                session = find(session_id, owner)
                if call.environments is not None:
                    call.about(session.identity.host.spec.id)
                outcome = session.step(step_index, item.actions, want_legal)
                if isinstance(outcome, bytes):
                    outcomes[position] = messages.step_outcome(session.wire_id, step_index, outcome)
                else:
                    turns.running[position] = session.wire_id, step_index, outcome
            except ItemError as error:
                outcomes[position] = step_error(items[position], call.failed(error, session_id_of(items[position])))

    async def advise(self, data: bytes, call: Call) -> bytes:
        _, items = decode(pb.AdviseRequest, pb.AdviseItem, data)
        call.items = len(items)
        tasks = [self.runtime.spawn(self._advice(item, call)) for item in items]
        await asyncio.wait(tasks)
        return b"".join(wire.bytes_field(wire.ITEMS_FIELD, task.result()) for task in tasks)

    async def _advice(self, item: pb.AdviseItem | Undecodable, call: Call) -> bytes:
        """A serialised AdviseOutcome."""
        try:
            item = decoded(item)
            session = self.table.find(item.session_id, call.caller.owner)
            call.about(session.identity.host.spec.id)
            advice = await session.advise()
        except ItemError as error:
            return pb.AdviseOutcome(
                session_id=session_id_of(item), error=call.failed(error, session_id_of(item))
            ).SerializeToString()
        return pb.AdviseOutcome(session_id=item.session_id, advice=advice).SerializeToString()

    # Leases

    async def keep_alive(self, data: bytes, call: Call) -> bytes:
        _, session_ids = decode_ids(pb.KeepAliveRequest, data)
        call.items = len(session_ids)
        outcomes: list[pb.KeepAliveOutcome] = []
        for session_id in session_ids:
            try:
                call.about(self.table.find(session_id, call.caller.owner).identity.host.spec.id)
                outcome = pb.KeepAliveOutcome(session_id=session_id, lease_seconds=self.table.lease_seconds)
            except ItemError as error:
                outcome = pb.KeepAliveOutcome(session_id=session_id, error=call.failed(error, session_id))
            outcomes.append(outcome)
        return pb.KeepAliveResponse(outcomes=outcomes).SerializeToString()

    async def close(self, data: bytes, call: Call) -> bytes:
        request, session_ids = decode_ids(pb.CloseRequest, data)
        call.items = len(session_ids)
        departure = _DEPARTURES.get(request.reason, Departure.CLOSED)
        outcomes = [
            pb.CloseOutcome(session_id=session_id, closed=self.table.close(session_id, call.caller.owner, departure))
            for session_id in session_ids
        ]
        if departure is Departure.ERROR:
            log.info(
                "caller %r closed %d sessions because it failed",
                str(call.caller),
                len(outcomes),
                extra=Event(rpc=call.rpc, caller=str(call.caller), items=call.items, departure=departure.value),
            )
        return pb.CloseResponse(outcomes=outcomes).SerializeToString()


class _Turns:
    """The turns of one Step request.

    Attributes:
        waiting: seconds that the reply may wait for all of them.
        outcomes: serialised StepOutcomes, by item; None: not known yet.
        running: of items whose turn is being played, their session's id field, step index and turn.
        seen: sessions that the request has named.
    """

    __slots__ = ("items", "outcomes", "running", "seen", "waiting", "want_legal")

    def __init__(self, items: Sequence[pb.StepItem | Undecodable], waiting: float, want_legal: bool) -> None:
        self.items = items
        self.waiting = waiting
        self.want_legal = want_legal
        self.outcomes: list[bytes | None] = [None] * len(items)
        self.running: dict[int, tuple[bytes, int, asyncio.Task[bytes]]] = {}
        self.seen: set[str] = set()

    async def collected(self) -> bytes:
        """The reply, once the turns are over or have been waited for."""
        tasks = [task for _, _, task in self.running.values()]
        await first_then_stragglers(tasks, len(tasks) < len(self.items), self.waiting)
        for position, (wire_id, step_index, task) in self.running.items():
            if task.done():
                self.outcomes[position] = messages.step_outcome(wire_id, step_index, task.result())
        return self.reply()

    def reply(self) -> bytes:
        """A serialised StepResponse; what is not over is pending."""
        return reply(self.outcomes, lambda position: step_pending(self.items[position]))


def _streamed(request_id: int, answer: bytes | ItemError) -> bytes:
    """A serialised StepStreamResponse."""
    if isinstance(answer, bytes):
        return frame(request_id, pb.StepStreamResponse.STEP_FIELD_NUMBER, answer)
    return frame(request_id, pb.StepStreamResponse.ERROR_FIELD_NUMBER, answer.status().SerializeToString())


@dataclass(frozen=True, slots=True)
class _New:
    """An item that nothing has been made of yet, and what makes its session."""

    request_id: bytes
    fingerprint: bytes
    make: Callable[[], Awaitable[Session]]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The items of a call that begins sessions, by position: outcomes of those that failed, those known, those new."""

    outcomes: list[bytes | None]
    known: dict[int, Creation] = field(default_factory=dict[int, Creation])
    new: dict[int, _New] = field(default_factory=dict[int, _New])


def _log_failures(call: Call) -> None:
    """One line about all items of a call that failed."""
    if call.failures is None or call.first is None or not log.isEnabledFor(logging.INFO):
        return
    event = Event(
        rpc=call.rpc,
        caller=str(call.caller),
        items=call.items,
        failed={reason.value: count for reason, count in call.failures.items()},
        reason=call.first.reason.value,
    )
    if call.first_session:
        event["session"] = call.first_session
    log.info(
        "%s by %r: %d of %d items failed: %s; first: %s",
        call.rpc,
        str(call.caller),
        call.failures.total(),
        call.items,
        ", ".join(f"{reason.value} ({count})" for reason, count in call.failures.items()),
        call.first.message,
        extra=event,
    )


def _reset_event(caller: Caller, spec: EnvironmentSpec, plan: Plan) -> Event:
    event = Event(
        rpc="Reset",
        caller=str(caller),
        environment=spec.id,
        version=spec.version,
        options=plan.options.json,
        split=plan.split.value,
        replayed=len(plan.turns),
    )
    return event | seeds_event(plan.level_seed, plan.noise, plan.seal)


def _fork_noise(item: pb.ForkItem) -> int | None:
    """Noise seed of the copy; None: the original's noise."""
    if item.same_noise:
        return None
    return item.noise_seed if item.HasField("noise_seed") else secrets.randbits(64)


def _split_info(host: EnvironmentHost, options_json: str, limits: Limits, split: Split, served: bool) -> pb.SplitInfo:
    info = pb.SplitInfo(split=messages.SPLITS[split], served=served)
    if (worlds := host.world_count(options_json, split)) is not None:
        info.worlds.CopyFrom(messages.world_count(worlds))
    floor, ceiling = host.scores(options_json, limits, split)
    if floor is not None:
        info.floor.CopyFrom(messages.reference(floor))
    if ceiling is not None:
        info.ceiling.CopyFrom(messages.reference(ceiling))
    return info
