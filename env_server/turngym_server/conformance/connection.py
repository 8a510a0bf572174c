"""The server under test as its RPCs: one call each, whatever comes back kept for the rules about errors."""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc
from turngym_server.conformance.raw import field, items_field

SERVICE: Final = "turngym.v1.EnvironmentService"
CALL_SECONDS: Final = 30.0
PATIENCE_SECONDS: Final = 20.0
"""Long enough for sessions to end and quotas to fill up. What is in vain for so long is not tried again."""
MAX_MESSAGE_BYTES: Final = 64 << 20
CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
)

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)


def dial(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """A channel to host:port; with `credentials` by TLS."""
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


class CallFailed(Exception):
    """A whole call failed. `status` has the code in any case, and details where the server gave them."""

    def __init__(self, rpc: str, status: status_pb2.Status) -> None:
        super().__init__(f"{rpc} failed as a whole with {describe_status(status)}")
        self.status = status

    @property
    def reason(self) -> str:
        """Of its ErrorInfo; "" where it carries none."""
        info = error_info(self.status)
        return info.reason if info else ""


class Connection:
    """One server, called under one client's name.

    Args:
        channel: to the server.
        metadata: sent with each call, a token for example.
        dial: opens a channel to another address of the server.
        other_metadata: of another caller, one with another token; None: there is no other.
        patience: seconds for which a call is sent again where the server is too busy.
        name: the client's; "": one is drawn.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: Sequence[tuple[str, str]] = (),
        dial: Callable[[str], grpc.Channel] = dial,
        other_metadata: Sequence[tuple[str, str]] | None = None,
        patience: float = PATIENCE_SECONDS,
        name: str = "",
    ) -> None:
        self.channel = channel
        self.dial = dial
        self.errors: list[tuple[str, status_pb2.Status]] = []
        self._other = other_metadata
        self._patience = patience
        self._given_up: set[str] = set()
        self._given = tuple(metadata)
        self._metadata = (("turngym-client", name or secrets.token_hex(16)), *self._given)
        self._stub = pb_grpc.EnvironmentServiceStub(channel)

    def another_client(self, name: str = "") -> Connection:
        """The same server, called under another client's name: this one, or a fresh one."""
        return Connection(self.channel, self._given, self.dial, name=name)

    def another_caller(self) -> Connection | None:
        """The same server, called with another token; None where there is no other."""
        return None if self._other is None else Connection(self.channel, self._other, self.dial)

    @contextlib.contextmanager
    def at(self, address: str) -> Generator[Connection]:
        """Another address of the server, called by another client."""
        with self.dial(address) as channel:
            yield Connection(channel, self._given, self.dial)

    def get_server(self) -> pb.GetServerResponse:
        return self._call("GetServer", self._stub.GetServer, pb.GetServerRequest())

    def list_environments(self, page_size: int = 0, page_token: str = "") -> pb.ListEnvironmentsResponse:
        request = pb.ListEnvironmentsRequest(page_size=page_size, page_token=page_token)
        return self._call("ListEnvironments", self._stub.ListEnvironments, request)

    def get_environment(
        self, environment_id: str, options_json: str = "", limits: pb.Limits | None = None
    ) -> pb.EnvironmentSpec:
        request = pb.GetEnvironmentRequest(environment_id=environment_id, options_json=options_json, limits=limits)
        return self._call("GetEnvironment", self._stub.GetEnvironment, request).environment

    def reset(self, request: pb.ResetRequest, *, patient: bool = True) -> pb.ResetResponse:
        """One call. With `patient`, a server that has no room is asked again when it says so."""
        return self._call("Reset", self._stub.Reset, request, patient=patient)

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        return self._call("Step", self._stub.Step, request)

    def fork(self, request: pb.ForkRequest) -> pb.ForkResponse:
        return self._call("Fork", self._stub.Fork, request)

    def advise(self, request: pb.AdviseRequest) -> pb.AdviseResponse:
        return self._call("Advise", self._stub.Advise, request)

    def keep_alive(self, session_ids: Sequence[str]) -> pb.KeepAliveResponse:
        return self._call("KeepAlive", self._stub.KeepAlive, pb.KeepAliveRequest(session_ids=session_ids))

    def close(self, session_ids: Sequence[str]) -> pb.CloseResponse:
        request = pb.CloseRequest(session_ids=session_ids, reason=pb.CLOSE_REASON_FINISHED)
        return self._call("Close", self._stub.Close, request)

    def raw(self, rpc: str, request: bytes, reply: type[ReplyT]) -> ReplyT:
        """A call whose request is sent as these bytes, which need not be a message."""
        method = self.channel.unary_unary(
            f"/{SERVICE}/{rpc}",
            request_serializer=_as_they_are,
            response_deserializer=cast("Callable[[bytes], Message]", reply.FromString),
        )
        return cast("ReplyT", self._call(rpc, cast("Any", method), cast("Any", request)))

    def step_stream(self) -> Stream:
        """One call of StepStream, with nothing sent yet."""
        method = self.channel.stream_stream(
            f"/{SERVICE}/StepStream",
            request_serializer=_as_they_are,
            response_deserializer=pb.StepStreamResponse.FromString,
        )
        return Stream(method, self._metadata, self.errors)

    def steps_at_once(self, requests: Sequence[pb.StepRequest]) -> list[pb.StepResponse]:
        """Calls that are all under way before the first is answered."""
        calls = [self._stub.Step.future(each, timeout=CALL_SECONDS, metadata=self._metadata) for each in requests]
        return [self._answer("Step", call.result) for call in calls]

    def abandon_step(self, request: pb.StepRequest, after_seconds: float) -> None:
        """Sends a step and hangs up."""
        call = self._stub.Step.future(request, timeout=CALL_SECONDS, metadata=self._metadata)
        time.sleep(after_seconds)
        call.cancel()

    def _call(
        self,
        rpc: str,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ReplyT],
        request: RequestT,
        *,
        patient: bool = True,
    ) -> ReplyT:
        give_up = time.monotonic() + self._patience
        while True:
            try:
                return self._answer(rpc, lambda: method(request, timeout=CALL_SECONDS, metadata=self._metadata))
            except CallFailed as failure:
                delay = retry_seconds(failure.status)
                if delay is None or not patient or failure.reason in self._given_up:
                    raise
                if time.monotonic() + delay > give_up:
                    self._given_up.add(failure.reason)
                    raise
                time.sleep(delay)

    def _answer(self, rpc: str, answer: Callable[[], ReplyT]) -> ReplyT:
        """The reply, its errors noted. Raises CallFailed."""
        try:
            reply = answer()
        except grpc.RpcError as error:
            status = _status_of(cast("grpc.Call", error))
            self.errors.append((rpc, status))
            raise CallFailed(rpc, status) from error
        self.errors += [(rpc, error) for error in _errors_of_items(reply)]
        return reply


class Stream:
    """One call of StepStream: requests go out under numbers, answers come in whatever order the server gives them.

    Args:
        method: of the channel; its requests are bytes.
        errors: where every error that comes is noted.
    """

    def __init__(
        self,
        method: grpc.StreamStreamMultiCallable[bytes, pb.StepStreamResponse],
        metadata: Sequence[tuple[str, str]],
        errors: list[tuple[str, status_pb2.Status]],
    ) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = method(iter(self._requests.get, None), timeout=CALL_SECONDS, metadata=tuple(metadata))
        self._errors = errors

    def send(self, number: int, request: pb.StepRequest) -> None:
        self._requests.put(pb.StepStreamRequest(id=number, step=request).SerializeToString())

    def send_items(self, number: int, *items: bytes) -> None:
        """Sends a request of items that are serialised already, decodable or not."""
        head = pb.StepStreamRequest(id=number).SerializeToString()
        self._requests.put(head + field(pb.StepStreamRequest.STEP_FIELD_NUMBER, items_field(*items)))

    def receive(self) -> pb.StepStreamResponse:
        """The next answer.

        Raises:
            CallFailed: the call is over, also without an error; or the server was too busy for the request.
        """
        answer = self._next()
        if answer is None:
            raise CallFailed("StepStream", status_pb2.Status(message="the stream ended before all was answered"))
        self._errors += [("StepStream", error) for error in _errors_of_items(answer.step)]
        if answer.HasField("error"):
            self._errors.append(("StepStream", answer.error))
            if retry_seconds(answer.error) is not None:
                raise CallFailed("StepStream", answer.error)
        return answer

    def half_close(self) -> None:
        """Sends no further request."""
        self._requests.put(None)

    def ended(self) -> bool:
        """Whether the server ends the call, without an error, before it answers anything else."""
        return self._next() is None

    def cancel(self) -> None:
        """Breaks the call off."""
        self._requests.put(None)
        self._call.cancel()

    def _next(self) -> pb.StepStreamResponse | None:
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            raise CallFailed("StepStream", _status_of(cast("grpc.Call", error))) from error


def _as_they_are(request: bytes) -> bytes:
    return request


def _errors_of_items(reply: Message) -> list[status_pb2.Status]:
    """The errors among a batch's outcomes."""
    return [
        outcome.error
        for outcome in getattr(reply, "outcomes", ())
        if "error" in outcome.DESCRIPTOR.fields_by_name and outcome.HasField("error")
    ]


def error_info(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    """The ErrorInfo among the details; None where there is none."""
    info = error_details_pb2.ErrorInfo()
    return info if any(detail.Unpack(info) for detail in status.details) else None


def retry_seconds(status: status_pb2.Status) -> float | None:
    """The delay of the RetryInfo among the details; None where there is none."""
    retry = error_details_pb2.RetryInfo()
    if any(detail.Unpack(retry) for detail in status.details):
        return retry.retry_delay.ToNanoseconds() / 1e9
    return None


def code_name(code: int) -> str:
    return code_pb2.Code.Name(code) if code in code_pb2.Code.values() else f"code {code}"


def describe_status(status: status_pb2.Status) -> str:
    """Code, reason and message in one line."""
    info = error_info(status)
    reason = info.reason if info else "(without ErrorInfo)"
    return f"{code_name(status.code)} {reason}: {status.message[:160]}"


def _status_of(error: grpc.Call) -> status_pb2.Status:
    """The status that a failed call carries; code and message alone where it carries none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    code = cast("tuple[int, str]", error.code().value)[0]
    return status_pb2.Status(code=code, message=error.details() or "")
