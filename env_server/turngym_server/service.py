"""The RPCs of `EnvironmentService`, and the server that answers them.

Requests and replies are handled as bytes: an undecodable item fails alone, and outcomes leave as they were stored.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from prometheus_client.core import Metric

import turngym
from turngym.v1 import environment_pb2 as pb
from turngym_server import messages, wire
from turngym_server.access import Access
from turngym_server.address import check_free
from turngym_server.batches import (
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
from turngym_server.call import Call, Context, abort, metadata_of
from turngym_server.caller import Caller
from turngym_server.counts import Departure, Origin, RpcCounts
from turngym_server.digest import canonical_json, encode_actions
from turngym_server.environment import EnvironmentSpec, Limits
from turngym_server.episode import MAX_ACTION_BYTES, MAX_OBSERVATION_BYTES
from turngym_server.errors import ItemError, Reason, exception_text
from turngym_server.exposure import check_exposure, server_credentials
from turngym_server.host import EnvironmentHost, Plan
from turngym_server.logs import Event
from turngym_server.metrics import MetricsEndpoint, families, worker_handlers
from turngym_server.reflection import serve_reflection
from turngym_server.requests import (
    check_request_id,
    find_host,
    item_fingerprint,
    read_reset,
    requested_limits,
    wait_seconds,
)
from turngym_server.sealed import SealKey
from turngym_server.seeds import seeds_event, seeds_in_words
from turngym_server.session import (
    ENVIRONMENT_ERRORS,
    Identity,
    Runtime,
    Session,
    fingerprint_of,
    list_legal,
)
from turngym_server.splits import Split
from turngym_server.stream import RequestStream
from turngym_server.table import Creation, SessionTable
from turngym_server.threads import Overrun
from turngym_server.tokens import TokenFile
from turngym_server.wire import Undecodable

if TYPE_CHECKING:
    from turngym_server.tracing import Tracing

log: Final = logging.getLogger(__name__)

SERVICE: Final = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
ITEMS_BETWEEN_YIELDS: Final = 64
"""Turns played on the event loop before others get it."""
DEFAULT_SPLITS: Final = frozenset({Split.TRAIN, Split.VALIDATION})
MAX_PAGE: Final = 1_000
DEFAULT_PAGE: Final = 100

REFLECTED: Final = (SERVICE, "grpc.health.v1.Health")

SERVER_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # Else a second server would share the port unnoticed.
)

ItemT = TypeVar("ItemT", bound=Message)

_DEPARTURES: Final = {
    pb.CLOSE_REASON_FINISHED: Departure.FINISHED,
    pb.CLOSE_REASON_ABANDONED: Departure.ABANDONED,
    pb.CLOSE_REASON_ERROR: Departure.ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How a server runs.

    Attributes:
        port: 0 takes a free one.
        splits: offered to clients, where an environment has worlds enough to divide.
        max_sessions: held at once. max_sessions_per_caller: None: as many.
        lease_seconds: a session untouched for so long is dropped.
        grace_seconds: how long a draining server waits for running turns.
        threads: turns of environments that are not inline, played at once.
        seal_key: opens the sealed seeds of a board; None: none are opened.
        metrics_port: where Prometheus finds /metrics; 0 takes a free one; None: nowhere. metrics_host: its address.
        workers: processes of this server. With more than one, each is given its share of what is divided among them,
            and a front answers on `port`.
        worker_port: of the first worker, the others follow; None: those after `port`, or free ones where that is 0.
        tag: begins every session id; "": one is drawn.
        front_socket: path of a unix socket that is answered too; "": none.
        tokens: file of the tokens that callers need; see `turngym_server.tokens`. None: whoever reaches the port may
            do everything.
        tls_cert: PEM file of the certificate chain that the server shows, tls_key: of its key. None: no TLS.
        client_ca: PEM file of the authorities that clients' certificates must be signed by; None: they need none.
        insecure: serve other machines without tokens or in the clear.
        otlp_endpoint: URL of an OpenTelemetry collector that gets a span for every call; None: no traces are made.
    """

    host: str = "127.0.0.1"
    port: int = 0
    splits: Collection[Split] = DEFAULT_SPLITS
    max_sessions: int = 4_096
    max_sessions_per_caller: int | None = None
    lease_seconds: float = 600.0
    grace_seconds: float = 10.0
    threads: int = 64
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    workers: int = 1
    worker_port: int | None = None
    tag: str = ""
    front_socket: str = ""
    tokens: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    insecure: bool = False
    otlp_endpoint: str | None = None
    seal_key: SealKey | None = None


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
        self.access = access_of(config, clock, now)
        self.draining = False
        self.runtime = Runtime(clock, config.threads)
        for environment_id in self.hosts:
            self.runtime.counts.environment(environment_id)
        self.table = SessionTable(
            max_sessions=config.max_sessions,
            max_sessions_per_caller=config.max_sessions_per_caller or config.max_sessions,
            lease_seconds=config.lease_seconds,
            clock=clock,
            tag=config.tag or secrets.token_hex(4),
        )
        self._splits = frozenset(config.splits)
        self._tracing = tracing
        self.streams: set[RequestStream] = set()
        self._streams_stopped = False
        self._seal_key = config.seal_key

    async def metrics(self) -> Iterable[Metric]:
        """All that Prometheus is told."""
        versions = {host.spec.id: host.spec.version for host in self.hosts.values()}
        return families(self.runtime.counts, self.table, versions)

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to serve the RPCs."""
        methods: dict[str, Callable[[bytes, Call], Awaitable[bytes]]] = {
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
            name: grpc.unary_unary_rpc_method_handler(self._guarded(name, method, self.runtime.counts.rpc(name)))
            for name, method in methods.items()
        }
        handlers["StepStream"] = grpc.stream_stream_rpc_method_handler(self.step_stream)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    # Every call

    def _guarded(
        self, rpc: str, method: Callable[[bytes, Call], Awaitable[bytes]], counts: RpcCounts
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """The method, for those who may call it; what refuses a whole call is its status."""

        async def answer(data: bytes, context: Context) -> bytes:
            call = Call(rpc, metadata_of(context))
            reply = await self._answer(call, len(data), lambda call: method(data, call), counts)
            return reply if isinstance(reply, bytes) else await abort(context, reply)

        return answer

    async def _answer(
        self, call: Call, size: int, work: Callable[[Call], Awaitable[bytes]], counts: RpcCounts
    ) -> bytes | ItemError:
        """The reply to a request, or why it is refused as a whole; counted, and traced where that is asked for.

        Args:
            size: of the request, in bytes.
        """
        began = time.perf_counter()
        try:
            if self._tracing is None:
                return await self._admitted(call, size, work)
            with self._tracing.span(call):
                return await self._admitted(call, size, work)
        except ItemError as error:
            refusal = error
        except DecodeError as error:
            refusal = ItemError(Reason.INVALID_ITEM, f"the request is no valid message: {error}")
        finally:
            counts.seconds.add(time.perf_counter() - began)
            if call.items:
                counts.items.add(call.items)
            if call.failures:
                counts.item_errors.update(call.failures)
                _log_failures(call)
        counts.refusals[refusal.reason] += 1
        log.info(
            "%s by %r refused: %s: %s",
            call.rpc,
            str(call.caller),
            refusal.reason.value,
            refusal.message,
            extra=Event(rpc=call.rpc, caller=str(call.caller), reason=refusal.reason.value),
        )
        return refusal

    async def _admitted(self, call: Call, size: int, work: Callable[[Call], Awaitable[bytes]]) -> bytes:
        """The reply, if the caller may have one."""
        call.caller = self.access.admit(call.rpc, call.caller, call.metadata, size)
        reply = await work(call)
        self.access.charge(call.caller, len(reply))
        return reply

    # What is served

    async def get_server(self, data: bytes, call: Call) -> bytes:
        pb.GetServerRequest.FromString(data)
        may_meet = call.caller.may_meet(self._splits)
        offered = {
            split for host in self.hosts.values() for split in host.splits(host.resolve_options("").json, may_meet)
        }
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
        options_json = host.resolve_options(request.options_json).json
        limits = host.resolve_limits(requested_limits(request.limits))
        served = host.splits(options_json, call.caller.may_meet(self._splits))
        return pb.GetEnvironmentResponse(
            environment=pb.EnvironmentSpec(
                id=spec.id,
                version=spec.version,
                family=spec.family,
                summary=spec.summary,
                options_schema_json=canonical_json(host.options_schema()),
                options_json=options_json,
                instructions=host.instructions(options_json, limits),
                action_separator=spec.action_separator,
                action_kind=messages.ACTION_KINDS[spec.action_kind],
                tools_json=spec.tools,
                limits=messages.limits(limits),
                caps=messages.limits(spec.caps),
                determinism=messages.DETERMINISMS[spec.determinism],
                splits=[_split_info(host, options_json, limits, split, split in served) for split in Split],
                split_epoch=spec.split_epoch,
                step_deadline_seconds=spec.step_deadline,
            )
        ).SerializeToString()

    # Sessions that begin

    async def reset(self, data: bytes, call: Call) -> bytes:
        request, items = decode(pb.ResetRequest, pb.ResetItem, data)
        waiting = wait_seconds(request.max_wait_seconds)
        may_meet = call.caller.may_meet(self._splits)

        def prepare(item: pb.ResetItem) -> Callable[[], Awaitable[Session]]:
            if item.HasField("sealed_seed") and not call.caller.may_unseal:
                role = call.caller.role.value
                raise ItemError(
                    Reason.NOT_PERMITTED, f"sealed seeds are not for role {role!r}", metadata={"role": role}
                )
            host, plan = read_reset(item, self.hosts, may_meet, self._seal_key)
            call.about(host.spec.id)
            return lambda: self._start(call.caller, host, plan, request.want_legal_actions)

        return await self._begin(items, call, prepare, waiting, request.want_legal_actions)

    async def fork(self, data: bytes, call: Call) -> bytes:
        request, items = decode(pb.ForkRequest, pb.ForkItem, data)

        def prepare(item: pb.ForkItem) -> Callable[[], Awaitable[Session]]:
            session = self.table.find(item.session_id, call.caller.owner)
            call.about(session.identity.host.spec.id)
            noise_seed = _fork_noise(item)

            def copy() -> Awaitable[Session]:
                identity = replace(session.identity, session_id=self.table.new_id(), caller=call.caller)
                return session.fork(identity, item.step_index, noise_seed)

            return copy

        return await self._begin(items, call, prepare, wait_seconds(0), request.want_legal_actions)

    async def _begin(
        self,
        items: Sequence[ItemT | Undecodable],
        call: Call,
        prepare: Callable[[Any], Callable[[], Awaitable[Session]]],
        waiting: float,
        want_legal: bool,
    ) -> bytes:
        """Makes sessions, all of a call or none, each of them once however often it is asked for.

        Args:
            prepare: checks an item and returns what makes its session.
        """
        caller = call.caller
        call.items = len(items)
        outcomes: list[bytes | None] = [None] * len(items)
        known: dict[int, Creation] = {}
        new: dict[int, tuple[bytes, bytes, Callable[[], Awaitable[Session]]]] = {}
        seen: set[str] = set()
        for position, item in enumerate(items):
            request_id = request_id_of(item)
            try:
                item = decoded(item)
                check_request_id(request_id)
                once(request_id.hex(), seen, "request id")
                fingerprint = item_fingerprint(item)
                creation = self.table.known(caller, request_id, fingerprint)
                if creation is not None:
                    known[position] = creation
                else:
                    new[position] = (request_id, fingerprint, prepare(item))
            except ItemError as error:
                outcomes[position] = reset_error(request_id, call.failed(error))
        if new:
            self._admit(caller, len(new))
        for position, (request_id, fingerprint, make) in new.items():
            creation = self.table.open(caller, request_id, fingerprint)
            creation.task = self.runtime.spawn(self._make(creation, make))
            known[position] = creation
        tasks = {
            position: self.runtime.spawn(self._reset_outcome(creation, want_legal, call))
            for position, creation in known.items()
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=waiting)
        for position, task in tasks.items():
            outcomes[position] = task.result() if task.done() else None
        return reply(
            outcomes, lambda position: pb.ResetOutcome(request_id=request_id_of(items[position]), pending=pb.Pending())
        )

    def _admit(self, caller: Caller, count: int) -> None:
        if self.draining:
            raise ItemError(Reason.DRAINING, "the server is shutting down; start or resume episodes on another")
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
                level_seed=plan.level_seed,
                seal=plan.seal,
                instance_id=started.instance_id,
                world_id=started.world_id,
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
            session = await self.runtime.threads(spec).run(work, deadline, late=release, account=caller.account)
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
            log.exception(
                "a reset failed: %s",
                where(),
                extra={**_reset_event(caller, spec, plan), "reason": Reason.ENVIRONMENT_FAILED.value},
            )
            # What a level of a sealed seed made the environment say may quote that level.
            told = exception_text(error) if plan.seal is None else type(error).__name__
            raise ItemError(Reason.ENVIRONMENT_FAILED, f"{spec.id} failed in a reset: {told}") from error
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

    async def step(self, data: bytes, call: Call) -> bytes:
        return await self._step(*decode(pb.StepRequest, pb.StepItem, data), call)

    async def step_stream(self, _requests: object, context: Context) -> None:
        counts = self.runtime.counts.rpc("StepStream")
        metadata = metadata_of(context)

        async def answer(data: bytes) -> bytes:
            request_id, request = unframe(data)

            async def step(call: Call) -> bytes:
                return await self._step(*decode_streamed(request), call)

            reply = await self._answer(Call("StepStream", metadata), len(data), step, counts)
            if isinstance(reply, bytes):
                return frame(request_id, pb.StepStreamResponse.STEP_FIELD_NUMBER, reply)
            return frame(request_id, pb.StepStreamResponse.ERROR_FIELD_NUMBER, reply.status().SerializeToString())

        stream = RequestStream(context, answer)
        self.streams.add(stream)
        try:
            if not self._streams_stopped:
                await stream.run()
        finally:
            self.streams.discard(stream)
        if self._streams_stopped:
            await abort(context, ItemError(Reason.DRAINING, "the server is shutting down; resume episodes on another"))

    def stop_streams(self) -> None:
        """Ends every stream once what it has read is answered."""
        self._streams_stopped = True
        for stream in self.streams:
            stream.stop()

    async def _step(self, request: pb.StepRequest, items: Sequence[pb.StepItem | Undecodable], call: Call) -> bytes:
        """Plays one turn in each session; a serialised StepResponse."""
        waiting = wait_seconds(request.max_wait_seconds)
        want_legal = request.want_legal_actions
        call.items = len(items)
        find, owner = self.table.find, call.caller.owner
        outcomes: list[bytes | None] = [None] * len(items)
        running: dict[int, tuple[bytes, int, asyncio.Task[bytes]]] = {}
        seen: set[str] = set()
        for position, item in enumerate(items):
            if position and position % ITEMS_BETWEEN_YIELDS == 0:
                await asyncio.sleep(0)
            try:
                item = decoded(item)
                session_id, step_index = item.session_id, item.step_index
                once(session_id, seen, "session")
                session = find(session_id, owner)
                if call.environments is not None:
                    call.about(session.identity.host.spec.id)
                outcome = session.step(step_index, item.actions, want_legal)
                if isinstance(outcome, bytes):
                    outcomes[position] = messages.step_outcome(session.wire_id, step_index, outcome)
                else:
                    running[position] = session.wire_id, step_index, outcome
            except ItemError as error:
                outcomes[position] = step_error(items[position], call.failed(error, session_id_of(items[position])))
        if running:
            tasks = [task for _, _, task in running.values()]
            await first_then_stragglers(tasks, len(running) < len(items), waiting)
            for position, (wire_id, step_index, task) in running.items():
                if task.done():
                    outcomes[position] = messages.step_outcome(wire_id, step_index, task.result())
        return reply(outcomes, lambda position: step_pending(items[position]))

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


def access_of(
    config: ServerConfig, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
) -> Access:
    """Who may call a server, as its operator wants it; of quotas each worker grants its share.

    Raises:
        OSError, ValueError: the file of tokens cannot be read, or is malformed.
    """
    tokens = TokenFile(config.tokens) if config.tokens else None
    return Access(tokens, share=1 / config.workers, clock=clock, now=now)


def bind(server: grpc.aio.Server, config: ServerConfig) -> int:
    """Has the server listen where the operator wants it, and returns the port.

    Raises:
        OSError: the address cannot be bound, or a file of TLS cannot be read.
        ValueError: it would be open to other machines without tokens and TLS, or the files of TLS are wrong.
    """
    check_exposure(config.host, tokens=bool(config.tokens), tls=bool(config.tls_cert), insecure=config.insecure)
    if (config.tls_cert is None) != (config.tls_key is None) or (config.client_ca and not config.tls_cert):
        raise ValueError("--tls-cert and --tls-key go together, and --client-ca with both")
    address = host_and_port(config.host, config.port)
    check_free(config.host, config.port)
    try:
        if config.tls_cert and config.tls_key:
            credentials = server_credentials(config.tls_cert, config.tls_key, config.client_ca)
            return server.add_secure_port(address, credentials)
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server:
    """A gRPC server of environments; `async with` starts and stops it.

    Args:
        environments: what is served.
        config: where and how.
        clock: seconds, monotonic; leases, wall-clock limits and quotas are counted on it.
        now: seconds since 1970; tokens expire by it.

    Raises:
        OSError: on entry, where an address cannot be bound, or a file cannot be read.
        ValueError: on entry, where traces are asked for that cannot be made, or the file of tokens is malformed.
    """

    def __init__(
        self,
        environments: Sequence[EnvironmentHost],
        config: ServerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._environments = environments
        self._clock = clock
        self._now = now
        self.config = config or ServerConfig()
        self.port = 0
        self._metrics: MetricsEndpoint | None = None
        self._tracing: Tracing | None = None

    @property
    def metrics_url(self) -> str | None:
        """Where it tells what it counts; None where it does not."""
        return self._metrics and self._metrics.url

    @property
    def address(self) -> str:
        """host:port that it listens on."""
        return host_and_port(self.config.host, self.port)

    async def start(self) -> None:
        """Binds and begins to serve."""
        if self.config.otlp_endpoint is not None:
            self._tracing = _open_tracing(self.config.otlp_endpoint)
        self.service = EnvironmentService(
            self._environments, self.config, self._clock, now=self._now, tracing=self._tracing
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self.service.handlers(),))
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        serve_reflection(self._server, REFLECTED, self.service.access)
        self.port = bind(self._server, self.config)
        try:
            await asyncio.gather(*(asyncio.to_thread(host.open) for host in self._environments))
        except OSError:
            await self._close_hosts()
            raise
        if self.config.front_socket:
            self._server.add_generic_rpc_handlers((worker_handlers(self.service.metrics),))
            self._server.add_insecure_port(f"unix:{self.config.front_socket}")
        if self.config.metrics_port is not None:
            self._metrics = MetricsEndpoint(self.config.metrics_host, self.config.metrics_port, self.service.metrics)
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def drain(self) -> None:
        """Stops: starts no more sessions, lets running turns finish and be collected, then refuses all."""
        self.service.draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        loop = asyncio.get_running_loop()
        end = loop.time() + self.config.grace_seconds
        while (tasks := set(self.service.runtime.tasks)) and loop.time() < end:
            await asyncio.wait(tasks, timeout=end - loop.time())
        await self.stop(max(end - loop.time(), 0.0))

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Refuses new calls, and gives those under way `grace_seconds`."""
        self.service.stop_streams()
        await self._server.stop(grace_seconds)
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper
        self.service.table.close_all()
        tasks = set(self.service.runtime.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=0.1)
        for task in self.service.runtime.tasks:
            task.cancel()
        if self.service.runtime.tasks:
            await asyncio.wait(set(self.service.runtime.tasks))
        self.service.runtime.close()
        await self._close_hosts()
        if self._metrics is not None:
            await self._metrics.close()
        if self._tracing is not None:
            await self._tracing.close()

    async def _close_hosts(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(host.close) for host in self._environments))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _set_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def _sweep(self) -> None:
        pause = min(max(self.config.lease_seconds / 4, 0.1), 5.0)
        while True:
            await asyncio.sleep(pause)
            self.service.table.sweep()


def _open_tracing(endpoint: str) -> "Tracing":
    try:
        from turngym_server.tracing import Tracing
    except ImportError as error:
        raise ValueError(
            "--otlp-endpoint needs OpenTelemetry, which is not installed: pip install 'turngym[otel]'"
        ) from error
    return Tracing(endpoint, SERVICE)


def _log_failures(call: Call) -> None:
    """One line about all items of a call that failed."""
    if call.first is None or not log.isEnabledFor(logging.INFO):
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
