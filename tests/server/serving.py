"""A real server on a free port, and short ways to ask it things."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc
from turngym_server.config import ServerConfig
from turngym_server.conformance.expect import CODES
from turngym_server.environment import EnvironmentSpec
from turngym_server.host import EnvironmentHost
from turngym_server.server import Server
from turngym_server.splits import Split

EVERY_SPLIT = frozenset(Split)
_ids = itertools.count(1)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def serving(
    *environments: EnvironmentSpec | EnvironmentHost, clock: Clock | None = None, now: Clock | None = None, **config
) -> AsyncIterator[tuple[environment_pb2_grpc.EnvironmentServiceStub, Server]]:
    hosts = [each if isinstance(each, EnvironmentHost) else EnvironmentHost(each) for each in environments]
    clocks = {name: each for name, each in {"clock": clock, "now": now}.items() if each}
    server = Server(hosts, ServerConfig(**{"splits": EVERY_SPLIT, **config}), **clocks)
    async with server, grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
        yield environment_pb2_grpc.EnvironmentServiceStub(channel), server


CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
)


def request_id() -> bytes:
    return next(_ids).to_bytes(16, "big")


def reset_item(environment_id: str = "dice", *, level_seed: int | None = 7, noise_seed: int | None = 11, **fields):
    if "resume" in fields:
        noise_seed = None
    return pb.ResetItem(
        **{
            "request_id": request_id(),
            "environment_id": environment_id,
            "split": pb.SPLIT_ALL,
            "level_seed": level_seed,
            "noise_seed": noise_seed,
            **fields,
        }
    )


async def start(stub, item: pb.ResetItem | None = None, **fields) -> pb.Started:
    """Starts one episode, which must succeed."""
    reply = await stub.Reset(pb.ResetRequest(items=[item or reset_item(**fields)]))
    (outcome,) = reply.outcomes
    assert outcome.HasField("started"), outcome
    return outcome.started


async def reset_error(stub, item: pb.ResetItem) -> status_pb2.Status:
    (outcome,) = (await stub.Reset(pb.ResetRequest(items=[item]))).outcomes
    assert outcome.request_id == item.request_id
    assert outcome.HasField("error"), outcome
    return outcome.error


async def step(stub, session_id: str, step_index: int, *actions: str, **fields) -> pb.StepOutcome:
    item = pb.StepItem(session_id=session_id, step_index=step_index, actions=actions)
    (outcome,) = (await stub.Step(pb.StepRequest(items=[item], **fields))).outcomes
    assert (outcome.session_id, outcome.step_index) == (session_id, step_index)
    return outcome


def details(status: status_pb2.Status) -> tuple[error_details_pb2.ErrorInfo, float | None]:
    """Reason and metadata, and the delay after which to try again."""
    info, delay = error_details_pb2.ErrorInfo(), None
    assert status.details[0].Unpack(info)
    assert info.domain == "turngym"
    for detail in status.details[1:]:
        retry = error_details_pb2.RetryInfo()
        assert detail.Unpack(retry)
        delay = retry.retry_delay.ToNanoseconds() / 1e9
    return info, delay


def reason(outcome) -> str:
    """Why an item failed; the code must be the one that goes with the reason."""
    status = outcome if isinstance(outcome, status_pb2.Status) else outcome.error
    assert status.code, outcome
    name = details(status)[0].reason
    assert grpc.StatusCode[CODES[name]].value[0] == status.code
    return name


def call_status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The status of a whole call that was refused, details included."""
    trailing: Sequence[tuple[str, str | bytes]] = tuple(error.trailing_metadata() or ())
    (value,) = [value for key, value in trailing if key == "grpc-status-details-bin"]
    assert isinstance(value, bytes)
    status = status_pb2.Status.FromString(value)
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    return status
