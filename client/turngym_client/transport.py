"""Servers as a client sees them: channels, deadlines, retries, and which address a new session goes to.

Every call has a deadline, and no failure is retried but these:

    RPC               deadline     tried again on                                     budget
    GetServer         5 s          UNAVAILABLE DEADLINE_EXCEEDED                      patience
    ListEnvironments  `deadline`   UNAVAILABLE DEADLINE_EXCEEDED                      patience
    GetEnvironment    `deadline`   UNAVAILABLE DEADLINE_EXCEEDED                      patience
    Reset             `deadline`   UNAVAILABLE DEADLINE_EXCEEDED RESOURCE_EXHAUSTED*  patience
    Step, StepStream  `deadline`   UNAVAILABLE DEADLINE_EXCEEDED NOT_FOUND**          patience
    Fork              `deadline`   UNAVAILABLE DEADLINE_EXCEEDED RESOURCE_EXHAUSTED* NOT_FOUND**  patience
    Advise            `deadline`   UNAVAILABLE DEADLINE_EXCEEDED NOT_FOUND**          patience
    KeepAlive         `deadline`   UNAVAILABLE DEADLINE_EXCEEDED NOT_FOUND**          patience
    Close             5 s          RESOURCE_EXHAUSTED*                                5 s

*  only with RetryInfo, and after the time it names; gRPC's own size errors look the same otherwise.
** of a session (EXPIRED, UNKNOWN): the episode is resumed by replay first, on any server.
RESOURCE_EXHAUSTED*, for want of quota or of room to wait, is tried again whatever the RPC. What Close cannot free, the
lease ends.
CANCELLED counts as UNAVAILABLE (a server that stops cancels its calls). Backoff is exponential, 0.1 s to 5 s, each
wait shortened by up to half at random. All of it is safe: Reset and Fork carry the same request id and item each
time, Step the same index and actions, and the others change nothing when repeated. A session's own address is tried
for `failover` seconds, then the episode moves, where there is another address; the one left alone gets no new
sessions for `AVOID_SECONDS`. Where no other one takes it, it goes back to an address that was only late. `patience`
counts anew for every call that an application makes. Steps go over one stream for each server; what the table says of
Step holds for each request of the stream (`turngym_client.stream`). A server without `StepStream` is sent calls of
Step, and so is an item too large to share a request.

Knows nothing of episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakSet

from google.rpc import code_pb2, status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc
from turngym_client.calls import result
from turngym_client.coalesce import Coalescer, Request
from turngym_client.credentials import NO_CREDENTIALS, Credentials
from turngym_client.errors import NotServed, ProtocolError, ServerBusy, ServerUnavailable
from turngym_client.messages import StatusError, Verdict, server_from_pb
from turngym_client.stream import StepStream
from turngym_client.types import ServerInfo, cut, told

if TYPE_CHECKING:
    from turngym.v1.environment_pb2_grpc import EnvironmentServiceAsyncStub

    _StepRequest = Request[pb.StepItem, pb.Transition]

SHORT_DEADLINE: Final = 5.0
BACKOFF_FIRST: Final = 0.1
BACKOFF_MOST: Final = 5.0
AVOID_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 30.0
"""Addresses that did not answer are asked again after so long."""
MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_BATCH_BYTES: Final = 16 << 20
"""Items in one request. One that is larger, or over MAX_BATCH_FIELDS, travels alone and is the server's to judge."""
MAX_BATCH_FIELDS: Final = 50_000
"""Fields in one request, each action being one: half of what the contract allows."""

KEEPALIVE_MS: Final = 20_000
"""How long nothing may come of calls that are open before the server is asked whether it is there."""

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A server that comes back on its port is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection that passes nothing on any more, and does not say so, is given up before patience is.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_pings_without_data", 0),
    # Each client finds out for itself, and the table above is the only retry there is.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

_HOST_PORT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s:/\[\],@?#]+):(?P<port>[0-9]{1,5})")
_SCHEME: Final = re.compile(r"dns:(//[^/]*/)?|ipv[46]:")
_PORTLESS_TARGET: Final = re.compile(r"(unix|unix-abstract|vsock):\S+")

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_jitter = random.SystemRandom()


_LIKELY_CAUSES: Final = (
    (
        re.compile(r"failed to connect .*Socket closed"),
        "the server may speak TLS: give tls=TlsConfig(…) or TURNGYM_TLS_ROOTS",
    ),
    (re.compile("WRONG_VERSION_NUMBER"), "the server may speak no TLS: give neither tls nor TURNGYM_TLS…"),
    (
        re.compile("CERTIFICATE_VERIFY_FAILED"),
        "the server's certificate is not signed by an authority of TURNGYM_TLS_ROOTS, or not for this address",
    ),
)
"""What gRPC says where one side speaks TLS and the other does not, or does not trust it, and what to do about it."""


def _likely_cause(message: str) -> str:
    return next((f" ({cause})" for pattern, cause in _LIKELY_CAUSES if pattern.search(message)), "")


class Patience:
    """The time one operation may go on trying, and its backoff."""

    __slots__ = ("_attempt", "_closing", "_ends", "_seconds")

    def __init__(self, seconds: float, closing: asyncio.Event) -> None:
        self._seconds = seconds
        self._closing = closing
        self._ends = time.monotonic() + seconds
        self._attempt = 0

    async def pause(self, error: StatusError, where: str) -> None:
        """Waits before the next try.

        Raises:
            ServerUnavailable, ServerBusy: time is up, or the client is closed.
        """
        left = self._ends - time.monotonic()
        if left <= 0:
            kind = ServerBusy if error.verdict is Verdict.BUSY else ServerUnavailable
            raise kind(
                f"{where}: gave up after {self._seconds:g} s and {self._attempt + 1} tries;"
                f" the last answer was {error.code_name}: {error.message}{_likely_cause(error.message)}",
                reason=error.reason,
                metadata=error.metadata,
            ) from error
        delay = min(BACKOFF_MOST, BACKOFF_FIRST * 2**self._attempt) * _jitter.uniform(0.5, 1.0)
        self._attempt += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left, max(delay, error.retry_after or 0.0))):
                await self._closing.wait()
                raise ServerUnavailable("the client was closed while this was under way")


class Server:
    """One address: its channel, its lanes for items that may share requests, and the sessions that live there."""

    def __init__(
        self, address: str, info: ServerInfo | None, client_id: str, deadline: float, credentials: Credentials
    ) -> None:
        self.address = address
        self.info = info
        self.sessions: WeakSet[object] = WeakSet()
        self._avoid_until = 0.0
        self._deadline = deadline
        self._channel = credentials.channel(address, CHANNEL_OPTIONS)
        self._stub = cast("EnvironmentServiceAsyncStub", pb_grpc.EnvironmentServiceStub(self._channel))
        self._metadata = (("turngym-client", client_id), *credentials.metadata)
        self._step_lanes: dict[tuple[str, bool], Coalescer[pb.StepItem, pb.Transition]] = {}
        self._advise_lane = self._lane(self._send_advise, _advise_size)
        self._stream: StepStream | None = None
        self._offers_stream = True

    @property
    def is_avoided(self) -> bool:
        return time.monotonic() < self._avoid_until

    def avoid(self) -> None:
        """Sends new sessions elsewhere for a while, where there is an elsewhere."""
        self._avoid_until = time.monotonic() + AVOID_SECONDS

    def max_batch_items(self) -> int:
        """Items that the server takes in one call; a cautious number until it has said so."""
        return (self.info.max_batch_items if self.info else 0) or 64

    async def get_server(self) -> pb.GetServerResponse:
        request = pb.GetServerRequest()
        return await result(self._stub.GetServer(request, timeout=SHORT_DEADLINE, metadata=self._metadata))

    async def list_environments(self, request: pb.ListEnvironmentsRequest) -> pb.ListEnvironmentsResponse:
        return await result(self._stub.ListEnvironments(request, timeout=self._deadline, metadata=self._metadata))

    async def get_environment(self, request: pb.GetEnvironmentRequest) -> pb.GetEnvironmentResponse:
        return await result(self._stub.GetEnvironment(request, timeout=self._deadline, metadata=self._metadata))

    async def reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        return await result(self._stub.Reset(request, timeout=self._deadline, metadata=self._metadata))

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResponse:
        return await result(self._stub.Fork(request, timeout=self._deadline, metadata=self._metadata))

    async def keep_alive(self, request: pb.KeepAliveRequest) -> pb.KeepAliveResponse:
        return await result(self._stub.KeepAlive(request, timeout=self._deadline, metadata=self._metadata))

    async def close_sessions(self, request: pb.CloseRequest) -> pb.CloseResponse:
        return await result(self._stub.Close(request, timeout=SHORT_DEADLINE, metadata=self._metadata))

    def step(self, environment_id: str, want_legal_actions: bool, item: pb.StepItem) -> asyncio.Future[pb.Transition]:
        """What the turn did; StatusError where the item failed. Shares requests with other steps of the environment."""
        key = (environment_id, want_legal_actions)
        if (lane := self._step_lanes.get(key)) is None:

            async def send(request: _StepRequest) -> None:
                await self._send_steps(request, want_legal_actions)

            lane = self._step_lanes[key] = self._lane(send, _step_size)
        return lane.submit(item)

    def advise(self, item: pb.AdviseItem) -> asyncio.Future[pb.Advice]:
        """The item's advice; StatusError where it has none. Shares requests with others."""
        return self._advise_lane.submit(item)

    async def close(self, error: Exception) -> None:
        """Closes the channel; whoever still waits gets `error`."""
        for lane in (*self._step_lanes.values(), self._advise_lane):
            await lane.close(error)
        if self._stream is not None:
            await self._stream.close()
        await self._channel.close()

    def _lane(
        self, send: Callable[[Request[ItemT, ResultT]], Coroutine[Any, Any, None]], size: Callable[[ItemT], int]
    ) -> Coalescer[ItemT, ResultT]:
        return Coalescer(send, max_items=self.max_batch_items, max_size=MAX_BATCH_BYTES, size=size)

    async def _send_steps(self, request: _StepRequest, want_legal_actions: bool) -> None:
        streamed = pb.StepStreamRequest()  # Filled in place, since a message that is put into another is copied.
        message = streamed.step
        message.items.extend(request.items)
        message.max_wait_seconds = request.wait
        message.want_legal_actions = want_legal_actions
        # What is refused for its bytes takes the stream with it, so a larger item is a call of its own.
        fits = len(request.items) > 1 or _step_size(request.items[0]) <= MAX_BATCH_BYTES
        if not (self._offers_stream and fits):
            await self._call_step(request, message)
            return
        if self._stream is None or self._stream.broken:
            self._stream = StepStream(self._stub.StepStream(metadata=self._metadata))
        await self._stream.send(streamed, self._deadline, lambda answer: self._streamed(answer, request, message))

    def _streamed(self, answer: pb.StepResponse | StatusError, request: _StepRequest, message: pb.StepRequest) -> None:
        """Takes what came over the stream; where that says nothing of the items, a call of Step asks for them."""
        if isinstance(answer, pb.StepResponse):
            _answer_steps(request, answer)
            return
        if answer.code == code_pb2.UNIMPLEMENTED:
            self._offers_stream = False
        # INTERNAL is what gRPC says of a write that came after the server had ended the stream, whatever it said then.
        elif answer.code != code_pb2.INTERNAL or answer.reason:
            request.fail(answer)
            return
        request.send(self._call_step(request, message))

    async def _call_step(self, request: _StepRequest, message: pb.StepRequest) -> None:
        _answer_steps(request, await result(self._stub.Step(message, timeout=self._deadline, metadata=self._metadata)))

    async def _send_advise(self, request: Request[pb.AdviseItem, pb.Advice]) -> None:
        message = pb.AdviseRequest(items=request.items)
        response = await result(self._stub.Advise(message, timeout=self._deadline, metadata=self._metadata))
        outcomes = matched(request.items, response.outcomes)
        request.answer([_failure(each.error) if each.HasField("error") else each.advice for each in outcomes])


def _answer_steps(request: _StepRequest, response: pb.StepResponse) -> None:
    try:
        outcomes = matched(request.items, response.outcomes)
    except ProtocolError as error:
        request.fail(error)
    else:
        request.answer([_transition(outcome) for outcome in outcomes])


def _transition(outcome: pb.StepOutcome) -> pb.Transition | StatusError | None:
    """What a turn did, or why it failed; None: it is not over."""
    if outcome.HasField("transition"):
        return outcome.transition
    return None if outcome.HasField("pending") else _failure(outcome.error)


def _failure(status: status_pb2.Status) -> StatusError:
    return StatusError(status, of_item=True)


def matched(items: Sequence[object], outcomes: Sequence[ResultT]) -> Sequence[ResultT]:
    """The outcomes. Raises ProtocolError unless there is one for each item."""
    if len(outcomes) != len(items):
        raise ProtocolError(f"the server answered {len(items)} items with {len(outcomes)} outcomes")
    return outcomes


FIELD_BYTES: Final = MAX_BATCH_BYTES // MAX_BATCH_FIELDS
"""What a field takes up of a request at least, so that many small ones fill it too."""


def _step_size(item: pb.StepItem) -> int:
    size, least = item.ByteSize(), (3 + len(item.actions)) * FIELD_BYTES
    return size if size > least else least  # Not max(): every step comes this way.


def _advise_size(item: pb.AdviseItem) -> int:
    return max(item.ByteSize(), 2 * FIELD_BYTES)


class Pool:
    """The addresses that a client was given, and the workers found behind them.

    Args:
        addresses: host:port of one server or several that serve the same environments; see `check_address`.
        deadline: seconds of one call, by the table above.
        patience: seconds that an operation goes on trying.
        failover: seconds for which a session's own address is tried before its episode moves to another.
        credentials: shown to every address, those of workers too.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        deadline: float,
        patience: float,
        failover: float,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        if not addresses:
            raise ValueError("no address given; expected at least one host:port")
        for address in addresses:
            check_address(address)
            credentials.check(address)
        self._credentials = credentials
        self.failover = failover
        self.deadline = deadline
        self._patience = patience
        self._closing = asyncio.Event()
        self._given = tuple(dict.fromkeys(addresses))
        self._client_id = secrets.token_hex(16)
        self._servers: dict[str, Server] = {}
        self._usable: list[Server] = []
        self._discovery = asyncio.Lock()
        self._discovered_at = -REFRESH_SECONDS
        self._unanswered: StatusError | None = None
        self._refresh: asyncio.Task[None] | None = None

    @property
    def shows_token(self) -> bool:
        return bool(self._credentials.token)

    def patience(self) -> Patience:
        """What one operation may spend on trying."""
        return Patience(self._patience, self._closing)

    async def choose(
        self, patience: Patience, avoid: Collection[Server] = (), refused: Collection[Server] = ()
    ) -> Server:
        """The address with the fewest of this client's episodes, if possible neither in `avoid` nor known to be away.

        Args:
            refused: taken only where there is no other, be that away or not.

        Raises:
            ServerUnavailable: none answered within `patience`.
        """
        usable = await self.usable(patience)
        willing = [server for server in usable if server not in refused] or usable
        candidates = [server for server in willing if not server.is_avoided] or willing
        return min(
            [server for server in candidates if server not in avoid] or candidates,
            key=lambda server: len(server.sessions),
        )

    def front(self) -> Server:
        """A given address, which answers for its workers; if possible one not known to be away."""
        self.check_open()
        given = [self._server(address) for address in self._given]
        return next((server for server in given if not server.is_avoided), given[0])

    async def candidates(self, patience: Patience) -> Sequence[Server]:
        """Where new sessions may go: addresses not known to be away, or all where every one is."""
        usable = await self.usable(patience)
        return [server for server in usable if not server.is_avoided] or usable

    async def usable(self, patience: Patience) -> Sequence[Server]:
        """Every address that answered when last asked, at least one."""
        self.check_open()
        if self._unanswered and time.monotonic() - self._discovered_at > REFRESH_SECONDS:
            await self.discover()
        while not self._usable:
            await self.discover()
            if self._unanswered and not self._usable:
                where = f"connecting to {', '.join(self._given)}"
                if self._unanswered.verdict is Verdict.FINAL:
                    raise self._unanswered.to_error(where) from self._unanswered
                await patience.pause(self._unanswered, where)
            self.check_open()
        return self._usable

    async def discover(self) -> None:
        """Asks every given address for its workers."""
        began = time.monotonic()
        async with self._discovery:
            if self._discovered_at > began:
                return
            answers = await asyncio.gather(*map(self._ask, self._given))
            found = [server for answer in answers if not isinstance(answer, StatusError) for server in answer]
            errors = [answer for answer in answers if isinstance(answer, StatusError)]
            self._usable = list(dict.fromkeys(found)) or self._usable
            self._unanswered = errors[0] if errors else None
            self._discovered_at = time.monotonic()

    async def may_move(self, server: Server, error: StatusError, failing_since: float) -> bool:
        """Whether to give `server` up for another address, after `error`; if so, it is avoided from now on."""
        patient = time.monotonic() - failing_since < self.failover
        if patient and not server.is_avoided and error.reason != "DRAINING":
            return False
        if not self._has_other(server):
            # The front of this worker may have come back with other workers.
            await self.discover()
        elif (self._refresh is None or self._refresh.done()) and not server.is_avoided:
            # A worker may have been replaced by one at another address. The episode need not wait for that.
            self._refresh = asyncio.ensure_future(self._discover_aside())
        if self._has_other(server):
            server.avoid()
            return True
        return False

    async def _discover_aside(self) -> None:
        with contextlib.suppress(ServerUnavailable):  # The client was closed meanwhile.
            await self.discover()

    def _has_other(self, server: Server) -> bool:
        return any(other is not server for other in self._usable)

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def check_open(self) -> None:
        """Raises ServerUnavailable once the client is closed."""
        if self._closing.is_set():
            raise ServerUnavailable("the client is closed")

    async def close(self) -> None:
        """Closes every channel. Idempotent."""
        self._closing.set()
        if self._refresh is not None:
            self._refresh.cancel()
        error = ServerUnavailable("the client was closed while this was under way")
        servers, self._servers, self._usable = list(self._servers.values()), {}, []
        await asyncio.gather(*(server.close(error) for server in servers))

    async def _ask(self, given: str) -> Sequence[Server] | StatusError:
        try:
            front = self._server(given)
            front.info = server_from_pb(await front.get_server())
        except StatusError as error:
            return error
        reachable = [_reachable(address, given) for address in front.info.addresses]
        for address in reachable:
            try:
                self._credentials.check(address)
            except ValueError as error:
                raise NotServed(f"{given} names a worker at {address}, but {error}") from error
        workers = [self._server(address) for address in reachable] or [front]
        for worker in workers:
            worker.info = front.info
        return workers

    def _server(self, address: str) -> Server:
        self.check_open()
        if (server := self._servers.get(address)) is None:
            server = self._servers[address] = Server(address, None, self._client_id, self.deadline, self._credentials)
        return server


def check_address(address: object) -> None:
    """Raises TypeError or ValueError unless `address` is host:port or a gRPC target.

    gRPC itself takes a name without a port to mean port 443.
    """
    if not isinstance(address, str):
        raise TypeError(f"expected host:port, got {told(address)}")
    if _PORTLESS_TARGET.fullmatch(address):
        return
    endpoints = _SCHEME.sub("", address).split(",") if _SCHEME.match(address) else [address]
    for endpoint in endpoints:
        found = _HOST_PORT.fullmatch(endpoint)
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            raise ValueError(f"expected host:port, got {cut(repr(address))} (such as localhost:50051 or [::1]:50051)")


def _reachable(worker: str, given: str) -> str:
    """A worker's address as this client can reach it: one that listens on every interface is where its front is."""
    host, _, port = worker.rpartition(":")
    return f"{given.rpartition(':')[0]}:{port}" if host in ("", "0.0.0.0", "[::]") else worker  # noqa: S104
