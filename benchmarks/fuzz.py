"""Hostile requests and hostile actions against a real server process, each case known by its number.

- `requests`: a valid request of some RPC, changed in its fields, its options' JSON and its bytes (`fuzz_requests.py`).
- `front`: the same, through the front of two workers.
- `access`: the same, through TLS, to a server with tokens (`fuzz_access.py`): callers of each role, and strangers, ask
  about a session that is theirs or another's.
- `bytes`, `tls`: what is no call at all (`fuzz_bytes.py`), on a port in the clear and on one with TLS, while episodes
  are played beside it.
- `actions`: a text (`fuzz_texts.py`) played as an action in two episodes of the same seeds, in every environment served
  and under several of its options.

What must hold, for every case: the server answers within the deadline; the status is one of the contract's, with its
reason, and none of INTERNAL, UNKNOWN or UNAVAILABLE; the reply is one, with an outcome for every item; an action is
play, never an error, and both episodes tell the same. Strangers are told UNAUTHENTICATED and nothing else; nobody is
told of another's session or does anything to it; neither replies nor the log hold a token's secret. And in the end: the
server lives, plays the episodes of the beginning byte for byte, holds no session, no connection and no thread more, has
logged no error, and its memory has stopped growing.

    python benchmarks/fuzz.py                         all kinds; writes fuzz.json and fuzz.txt
    python benchmarks/fuzz.py front access            these kinds; their part of both files is written
    python benchmarks/fuzz.py requests --case 4711    one case alone, told in full; nothing is written

Exit status 1 if a case fails. A case needs nothing from those before it: it starts the session that it is about.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

import grpc
import grpc.aio
import measure
from child import Child
from fuzz_access import CALLERS, ROLES, STRANGERS, Access, Metadata, trespass, withheld, write_access
from fuzz_bytes import Attack, draw_attack
from fuzz_requests import REPLIES, RPCS, STREAM, Served, Start, draw_request, draw_start, reset_item
from fuzz_texts import hostile_text
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_server.errors import CODES, Reason
from turngym_server.listening import is_refused
from turngym_server.rng import Rng
from turngym_server.splits import Split

HERE: Final = Path(__file__).parent
SERVICE: Final = "/turngym.v1.EnvironmentService/"
REQUEST_STREAM: Final = 1 << 50
OWN: Final = "admin"
"""Who starts what the cases of a server with tokens begin with."""
STEP: Final = "Step"
ACTION_STREAM: Final = 1 << 51
BYTES_STREAM: Final = 1 << 52
BLOCK: Final = 64
"""Cases at a time."""
STATUS_LOST: Final = "Internal error from Core"
"""What gRPC's client says, of itself, of a stream that was refused while it still wrote; it is asked again."""
ANSWER_SECONDS: Final = 45.0
"""A call may take so long: the environments' own deadline, 30 s, and some for a busy machine."""
UNAVAILABLE: Final[int] = grpc.StatusCode.UNAVAILABLE.value[0]
AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""What gRPC says where nobody listens, and of calls that were under way when that came."""
GONE_SECONDS: Final = 15.0
"""For how long nobody may listen, where what is no call may have ended gRPC's server."""
LEASE_SECONDS: Final = 20.0
WARM: Final = 0.4
"""After this share of the cases, memory is measured for the first time."""
GROWTH: Final = 1.5
"""The most that memory may grow from there to the end. Not all that was freed goes back to the system: how much stays
depends on the peak, and that on how fast the cases came. The soak looks for leaks."""
SETTLING_CASES: Final = 10_000
"""From so many cases on, memory is measured once all is forgotten, which takes SETTLE_SECONDS each time."""
SETTLE_SECONDS: Final = 70.0
"""A server remembers what has ended for 60 s, so what it holds depends on how fast the cases come."""
MORE_DESCRIPTORS: Final = 8
MORE_THREADS: Final = 8
"""So many more may be there in the end than after the first cases; gRPC keeps some of its own."""
CLOSING_SECONDS: Final = 60.0
"""In which connections that are over must be closed."""
HELD_SECONDS: Final = 0.2
"""For how long a connection that does nothing is held."""
TOLD: Final = 4_000
"""Bytes or characters of a case that are printed."""
MAX_ERROR_BYTES: Final = 8 * 1024
"""Of an item's error, and of a call's trailing metadata, of which many clients take no more."""
MAX_OBSERVATION_BYTES: Final = 256 * 1024
NEVER: Final = {Reason.ENVIRONMENT_FAILED, Reason.STEP_DEADLINE, Reason.DRAINING}

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "bandit": ("", '{"names":"pairs"}', '{"reversed":true,"high_pays":1.0}'),
    "frozen_lake": ("", '{"size":2}', '{"size":12,"slip":0.0}', '{"holes":0.6,"symbols":"latin"}'),
    "sokoban": ("", '{"symbols":"xsb"}', '{"width":5,"height":7,"max_solution":6}', '{"floors":"walk"}'),
    "sokoban_large": ("", '{"symbols":"digits","boxes":1}'),
}
"""What is asked for beside the defaults, in the environments of the registry; others are asked for their defaults."""


@dataclass(slots=True)
class Tally:
    """What came of the cases.

    Attributes:
        outcomes: replies by status or reason.
        failures: what must not be, by case number.
        slowest: seconds of the slowest call, and its case.
    """

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    failures: dict[int, str] = field(default_factory=dict[int, str])
    slowest: tuple[float, int] = (0.0, -1)

    def fail(self, case: int, why: str) -> None:
        if case not in self.failures:
            self.failures[case] = why
            print(f"case {case}: {why}", file=sys.stderr, flush=True)


class Target:
    """The server, met with raw bytes.

    Attributes:
        rpcs: those to call. tells: each case is printed. access: of a server that needs tokens.
        patient: a call that finds nobody, or is cut off, is made again: what is no call may end gRPC's server, and ours
            then goes on with another.
        fronted: there are workers, one of which may not answer for a while; what it has is asked for again.
    """

    def __init__(self, address: str, channel: grpc.aio.Channel, tally: Tally, tells: bool, kind: Kind) -> None:
        self.address = address
        self._channel = channel
        self.rpcs = kind.rpcs
        self.tls = kind.tls
        self.patient = kind.run is run_bytes
        self.fronted = "--workers" in kind.server
        self.tells = tells
        self.tally = tally
        self.access: Access | None = None
        self.canaries: Mapping[str, str] = {}
        self.train_splits: dict[tuple[str, str], pb.Split.ValueType] = {}

    async def call(self, rpc: str, data: bytes, case: int, caller: str = OWN) -> bytes | status_pb2.Status:
        """The reply, or the status of a refused call. What must not be is noted.

        Args:
            caller: whose token is shown, where the server needs one.
        """
        began = time.monotonic()
        method = cast("Callable[..., Awaitable[bytes]]", self._channel.unary_unary(SERVICE + rpc))
        try:
            metadata = (("turngym-client", f"fuzz{case % 7}"), *self._shown(caller))
            while True:
                try:
                    reply = await method(data, timeout=ANSWER_SECONDS, metadata=metadata)
                    break
                except grpc.aio.AioRpcError as error:
                    waited = time.monotonic() - began
                    if not self.patient or error.code() not in AWAY or waited > GONE_SECONDS:
                        raise
                await asyncio.sleep(0.1)
        except grpc.aio.AioRpcError as error:
            return self._status(error, rpc, case)
        else:
            self._check_secrets(case, rpc, reply)
            return reply
        finally:
            self.tally.slowest = max(self.tally.slowest, (time.monotonic() - began, case))

    async def settled(self, rpc: str, data: bytes, case: int) -> bytes | status_pb2.Status:
        """What `call` gives, once all workers answer: that one does not now is the contract's word for trying again."""
        ends = time.monotonic() + GONE_SECONDS
        while True:
            answer = await self.call(rpc, data, case)
            if not self.fronted or not is_of_a_silent_worker(rpc, answer) or time.monotonic() > ends:
                return answer
            self.tally.outcomes[f"{rpc} asked again"] += 1
            await asyncio.sleep(0.1)

    async def stream(
        self, requests: Sequence[bytes], case: int, caller: str = OWN
    ) -> Sequence[bytes] | status_pb2.Status:
        """The answers to all requests of one stream, or the status that it ended with."""
        method: Any = cast("Any", self._channel.stream_stream)(SERVICE + STREAM)
        while True:
            try:
                call = method(iter(requests), timeout=ANSWER_SECONDS, metadata=self._shown(caller))
                answers: list[bytes] = [answer async for answer in call]
                break
            except grpc.aio.AioRpcError as error:
                if error.details() != STATUS_LOST:
                    return self._status(error, STREAM, case)
        self._check_secrets(case, STREAM, *answers)
        return answers

    def _shown(self, caller: str) -> Metadata:
        return self.access.shown[caller] if self.access else ()

    def _check_secrets(self, case: int, rpc: str, *told: bytes) -> None:
        if self.access and any(secret in each for each in told for secret in self.access.secrets):
            self.tally.fail(case, f"{rpc}: a token's secret is told")

    def _status(self, error: grpc.aio.AioRpcError, rpc: str, case: int) -> status_pb2.Status:
        metadata = error.trailing_metadata() or ()
        self._check_secrets(case, rpc, str(error.details()).encode(), *(str(value).encode() for _, value in metadata))
        for key, value in metadata:
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                status = status_pb2.Status.FromString(value)
                if len(quote(status.message)) + len(value) * 4 / 3 > MAX_ERROR_BYTES:
                    self.tally.fail(
                        case, f"{rpc}: an error of {len(value)} bytes, with a message of as many, in metadata"
                    )
                return status
        self.tally.fail(case, f"{rpc}: {error.code().name} without details: {str(error.details())[:200]}")
        return status_pb2.Status(code=error.code().value[0])

    async def ask(self, rpc: str, request: Message, case: int, caller: str = OWN) -> Any:
        """The reply to a request that must not be refused."""
        while True:
            answer = await self.call(rpc, request.SerializeToString(), case, caller)
            if isinstance(answer, bytes):
                return REPLIES[rpc].FromString(answer)
            if reason_of(answer) is not Reason.SESSION_LIMIT:
                raise RuntimeError(f"case {case}: a valid {rpc} was refused: {answer.message}")
            await asyncio.sleep(0.2)  # Others' sessions are about to be closed.


def is_of_a_silent_worker(rpc: str, answer: bytes | status_pb2.Status) -> bool:
    """Whether an item's worker did not answer its front; elsewhere than in these RPCs such items are pending."""
    if rpc not in ("Advise", "KeepAlive") or not isinstance(answer, bytes):
        return False
    errors = [outcome.error for outcome in REPLIES[rpc].FromString(answer).outcomes if outcome.HasField("error")]
    return any(error.code == UNAVAILABLE and not error.details for error in errors)


def reason_of(status: status_pb2.Status) -> Reason | None:
    """The contract's reason of a status; None where it has none, or one of another code."""
    info = error_details_pb2.ErrorInfo()
    if not status.details or not status.details[0].Unpack(info) or info.reason not in Reason.__members__:
        return None
    reason = Reason[info.reason]
    return reason if CODES[reason] == status.code else None


def fault_of_status(status: status_pb2.Status) -> str:
    """What is wrong with an error, or ""."""
    reason = reason_of(status)
    if reason is None:
        return f"status {status.code} without a reason that goes with it: {status.message[:200]}"
    if reason in NEVER:
        return f"{reason.value}: {status.message[:300]}"
    if not status.message or status.ByteSize() > MAX_ERROR_BYTES:
        return f"{reason.value} with an error of {status.ByteSize()} bytes: {status.message[:100]!r}"
    return ""


def fault_of_transition(transition: pb.Transition) -> str:
    """What is wrong with a transition, or ""."""
    if not math.isfinite(transition.reward) or len(transition.digest) != 32:
        return f"reward {transition.reward}, digest of {len(transition.digest)} bytes"
    if len(transition.observation.encode()) > MAX_OBSERVATION_BYTES:
        return f"an observation of {len(transition.observation)} characters"
    return ""


# Requests.


async def run_requests(target: Target, seed: int, cases: Sequence[int], served: Sequence[Served]) -> None:
    """Runs a block of cases: starts the sessions they are about, sends each request, and closes what there is."""
    rngs = [Rng(seed, REQUEST_STREAM + case) for case in cases]
    sessions = await start_all(target, [draw_start(rng, served) for rng in rngs], rngs, cases[0])
    made = await asyncio.gather(
        *(
            send_one(target, case, rng, started, served)
            for case, rng, started in zip(cases, rngs, sessions, strict=True)
        )
    )
    await close_all(target, [started.session_id for started in sessions] + [each for ids in made for each in ids])


async def start_all(
    target: Target, starts: Sequence[Start], rngs: Sequence[Rng], case: int, caller: str = OWN
) -> Sequence[pb.Started]:
    items = [reset_item(rng, start) for rng, start in zip(rngs, starts, strict=True)]
    request = pb.ResetRequest(items=items, max_wait_seconds=ANSWER_SECONDS / 2, want_legal_actions=True)
    while True:
        reply = await target.ask("Reset", request, case, caller)
        if not any(outcome.HasField("pending") for outcome in reply.outcomes):
            break
    for outcome, start in zip(reply.outcomes, starts, strict=True):
        if not outcome.HasField("started"):
            raise RuntimeError(f"case {case}: {start} did not start: {outcome.error.message}")
    return [outcome.started for outcome in reply.outcomes]


async def close_all(target: Target, session_ids: Sequence[str], caller: str = OWN) -> None:
    for first in range(0, len(session_ids), 1_024):
        await target.ask("Close", pb.CloseRequest(session_ids=session_ids[first : first + 1_024]), -1, caller)


async def send_one(target: Target, case: int, rng: Rng, started: pb.Started, served: Sequence[Served]) -> Sequence[str]:
    """Sends one mutated request; returns ids of sessions that it made."""
    rpc = rng.choice(target.rpcs)
    data = draw_request(rng, rpc, started, served)
    if target.tells:
        print(f"{rpc} in {started.environment_id} {started.options_json}: {len(data)} bytes\n{data[:TOLD]!r}")
    if rpc == STREAM:
        requests = [data, *(draw_request(rng, rpc, started, served) for _ in range(rng.below(4)))]
        target.tally.cases += 1
        check_stream(target.tally, case, requests, await target.stream(requests, case))
        return []
    answer = await target.settled(rpc, data, case)
    target.tally.cases += 1
    return check_answer(target.tally, case, rpc, data, answer)


def check_answer(tally: Tally, case: int, rpc: str, data: bytes, answer: bytes | status_pb2.Status) -> Sequence[str]:
    """Notes what is wrong with the answer to a call; returns ids of sessions that it tells of."""
    if isinstance(answer, status_pb2.Status):
        tally.outcomes[f"{rpc} {name_of(answer)}"] += 1
        if fault := fault_of_status(answer):
            tally.fail(case, f"{rpc}: {fault}")
        return []
    tally.outcomes[f"{rpc} OK"] += 1
    try:
        reply = REPLIES[rpc].FromString(answer)
    except DecodeError as error:
        tally.fail(case, f"{rpc}: the reply cannot be decoded: {error}")
        return []
    return check_reply(tally, case, rpc, data, reply)


def check_stream(
    tally: Tally, case: int, requests: Sequence[bytes], answers: Sequence[bytes] | status_pb2.Status
) -> None:
    """Notes what is wrong with the answers to the requests of one stream."""
    if isinstance(answers, status_pb2.Status):
        tally.outcomes[f"{STREAM} {name_of(answers)}"] += 1
        tally.fail(case, f"{STREAM}: the stream broke: {name_of(answers)}: {answers.message[:300]}")
        return
    if len(answers) != len(requests):
        tally.fail(case, f"{STREAM}: {len(requests)} requests, {len(answers)} answers")
    for data in answers:
        answer = pb.StepStreamResponse.FromString(data)
        if answer.HasField("error"):
            tally.outcomes[f"{STREAM} {name_of(answer.error)}"] += 1
            if fault := fault_of_status(answer.error):
                tally.fail(case, f"{STREAM}: {fault}")
        else:
            tally.outcomes[f"{STREAM} OK"] += 1
            check_outcomes(tally, case, STREAM, answer.step)


def name_of(status: status_pb2.Status) -> str:
    reason = reason_of(status)
    return reason.value if reason else f"code {status.code}"


def check_reply(tally: Tally, case: int, rpc: str, data: bytes, reply: Any) -> Sequence[str]:
    """Notes what is wrong with a reply; returns ids of sessions that it tells of."""
    if rpc not in ("Reset", "Step", "Fork", "Advise", "KeepAlive", "Close"):
        return []
    check_outcomes(tally, case, rpc, reply)
    if (items := items_in(rpc, data)) is not None and items != len(reply.outcomes):
        tally.fail(case, f"{rpc}: {items} items, {len(reply.outcomes)} outcomes")
    if rpc not in ("Reset", "Fork"):
        return []
    return [outcome.started.session_id for outcome in reply.outcomes if outcome.HasField("started")]


def check_outcomes(tally: Tally, case: int, rpc: str, reply: Any) -> None:
    for outcome in reply.outcomes:
        kind = "closed" if rpc == "Close" else outcome.WhichOneof("outcome")
        if kind == "error":
            tally.outcomes[f"{rpc} item {name_of(outcome.error)}"] += 1
            if fault := fault_of_status(outcome.error):
                tally.fail(case, f"{rpc} item: {fault}")
        elif kind in ("started", "transition"):
            tally.outcomes[f"{rpc} item OK"] += 1
            if fault := fault_of_transition(outcome.started.state if kind == "started" else outcome.transition):
                tally.fail(case, f"{rpc} item: {fault}")


def items_in(rpc: str, data: bytes) -> int | None:
    """Items of a request; None where it is no message."""
    request: Any = getattr(pb, f"{rpc}Request")()
    try:
        request.ParseFromString(data)
    except DecodeError:
        return None
    return len(request.session_ids if rpc in ("KeepAlive", "Close") else request.items)


# Access.


async def run_access(target: Target, seed: int, cases: Sequence[int], served: Sequence[Served]) -> None:
    """Runs a block of cases: starts a session for a caller of some role, and sends a request of some caller's."""
    rngs = [Rng(seed, REQUEST_STREAM + case) for case in cases]
    owners = [rng.choice(ROLES) for rng in rngs]
    starts = [draw_start(rng, served) for rng in rngs]
    made: dict[str, list[str]] = {role: [] for role in ROLES}
    sent: list[Awaitable[None]] = []
    for owner in ROLES:
        places = [place for place, each in enumerate(owners) if each == owner]
        if not places:
            continue
        own = [starts[place] for place in places]
        if owner == "train":
            own = [dataclasses.replace(each, split=await train_split(target, each)) for each in own]
        sessions = await start_all(target, own, [rngs[place] for place in places], cases[0], owner)
        made[owner] += [started.session_id for started in sessions]
        for place, started in zip(places, sessions, strict=True):
            sent.append(send_as(target, cases[place], rngs[place], started, owner, served, made))
    await asyncio.gather(*sent)
    for owner, session_ids in made.items():
        await close_all(target, session_ids, owner)


async def train_split(target: Target, start: Start) -> pb.Split.ValueType:
    """The split that a token for training may start these options in."""
    place = start.environment, start.options
    if place not in target.train_splits:
        served = await served_splits(target, *place)
        target.train_splits[place] = pb.SPLIT_TRAIN if pb.SPLIT_TRAIN in served else pb.SPLIT_ALL
    return target.train_splits[place]


async def served_splits(target: Target, environment: str, options: str) -> Sequence[pb.Split.ValueType]:
    """What a token for training is told that it may start."""
    request = pb.GetEnvironmentRequest(environment_id=environment, options_json=options)
    reply: pb.GetEnvironmentResponse = await target.ask("GetEnvironment", request, -1, "train")
    return [each.split for each in reply.environment.splits if each.served]


async def send_as(
    target: Target,
    case: int,
    rng: Rng,
    started: pb.Started,
    owner: str,
    served: Sequence[Served],
    made: Mapping[str, list[str]],
) -> None:
    """Sends a mutated request about a session of `owner`, as some caller; adds the sessions it made to `made`."""
    caller = rng.choice(CALLERS)
    rpc = rng.choice(target.rpcs)
    data = draw_request(rng, rpc, started, served)
    tally = target.tally
    tally.cases += 1
    if target.tells:
        print(f"{caller} calls {rpc} about {owner}'s session: {len(data)} bytes\n{data[:TOLD]!r}")
    answers: Sequence[bytes | status_pb2.Status]
    if rpc == STREAM:
        streamed = await target.stream([data], case, caller)
        answers = [streamed] if isinstance(streamed, status_pb2.Status) else [answer_of(each) for each in streamed]
    else:
        answers = [await target.call(rpc, data, case, caller)]
    for answer in answers:
        reason = reason_of(answer) if isinstance(answer, status_pb2.Status) else None
        if (caller in STRANGERS) != (reason is Reason.UNAUTHENTICATED):
            told = name_of(answer) if isinstance(answer, status_pb2.Status) else "an answer"
            tally.fail(case, f"{rpc}: {caller} was given {told}")
        session_ids = check_answer(tally, case, rpc, data, answer)
        if caller in STRANGERS or not isinstance(answer, bytes):
            continue
        made[caller] += session_ids
        reply = REPLIES[STEP if rpc == STREAM else rpc].FromString(answer)
        if caller != owner and (fault := trespass(rpc, started.session_id, reply)):
            tally.fail(case, f"{caller} and {owner}: {fault}")
        if caller == "train" and (fault := withheld(rpc, reply) or await ungranted(target, rpc, reply)):
            tally.fail(case, f"a token for training is given {fault}")


async def ungranted(target: Target, rpc: str, reply: Any) -> str:
    """A session of a split that the server says is not for training; "": there is none."""
    for outcome in reply.outcomes if rpc == "Reset" else ():
        started = outcome.started
        place = started.environment_id, started.options_json
        if started.split == pb.SPLIT_ALL and pb.SPLIT_ALL not in await served_splits(target, *place):
            return f"split all of {' '.join(place)}"
    return ""


def answer_of(data: bytes) -> bytes | status_pb2.Status:
    """What one answer of a stream would be as the answer to a call."""
    answer = pb.StepStreamResponse.FromString(data)
    return answer.error if answer.HasField("error") else answer.step.SerializeToString()


# Bytes.


async def run_bytes(target: Target, seed: int, cases: Sequence[int], served: Sequence[Served]) -> None:
    """Runs a block of cases: sends what is no call on a connection each, while episodes are played on another."""
    attacks = [draw_attack(Rng(seed, BYTES_STREAM + case)) for case in cases]
    honest = asyncio.ensure_future(play_canaries(target, served, Rng(seed, 2 + cases[0])))
    await asyncio.gather(*(attack_once(target, case, each) for case, each in zip(cases, attacks, strict=True)))
    if await honest != target.canaries:
        target.tally.fail(cases[0], "episodes that were played meanwhile have other digests")


async def attack_once(target: Target, case: int, attack: Attack) -> None:
    """Sends one attack; the server may end the connection whenever it likes."""
    tally = target.tally
    tally.cases += 1
    inside = target.tls and attack.inside
    tally.outcomes[f"{attack.kind}{' in TLS' if inside else ''}, {attack.ending}"] += 1
    if target.tells:
        print(f"{attack.kind}, {attack.ending}, {inside=}: {[piece[:TOLD] for piece in attack.pieces]}")
    host, _, port = target.address.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await _until_somebody_listens(host, int(port))
            # Else asyncio would hold for half a minute what the server does not close.
            within = {"ssl": _unchecked(), "ssl_shutdown_timeout": HELD_SECONDS} if inside else {}
            reader, writer = await asyncio.open_connection(host, int(port), **within)
    except (OSError, TimeoutError) as error:
        tally.fail(case, f"no connection: {type(error).__name__}: {error}")
        return
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(HELD_SECONDS):
            for piece in attack.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if attack.ending == "half" and writer.can_write_eof():
                writer.write_eof()
            while attack.ending in ("half", "hold") and await reader.read(1 << 16):
                pass
    if attack.ending == "reset":
        writer.transport.abort()
    else:
        writer.close()


async def _until_somebody_listens(host: str, port: int) -> None:
    while await is_refused(host, port):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


@functools.cache
def _unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


# Actions.


async def run_actions(target: Target, seed: int, cases: Sequence[int], served: Sequence[Served]) -> None:
    """Runs a block of cases: plays each one's text in two episodes of the same seeds, and compares."""
    rngs = [Rng(seed, ACTION_STREAM + case) for case in cases]
    starts = [draw_start(rng, served) for rng in rngs]
    pairs = [await start_all(target, starts, rngs, cases[0]) for _ in range(2)]
    texts = [
        [hostile_text(rng, started.state.legal_actions.actions) for _ in range(1 + rng.below(2))]
        for rng, started in zip(rngs, pairs[0], strict=True)
    ]
    if target.tells:
        print(f"{starts[0]}: {str(texts[0])[:TOLD]}")
    played = [await play_all(target, sessions, texts, cases[0]) for sessions in pairs]
    for case, start, actions, first, second in zip(cases, starts, texts, *played, strict=True):
        check_play(target.tally, case, start, actions, first, second)
    await close_all(target, [started.session_id for sessions in pairs for started in sessions])


async def play_all(
    target: Target, sessions: Sequence[pb.Started], texts: Sequence[Sequence[str]], case: int
) -> Sequence[pb.StepOutcome]:
    """The outcome of the first step of each session."""
    outcomes: dict[str, pb.StepOutcome] = {}
    while left := [place for place, each in enumerate(sessions) if each.session_id not in outcomes]:
        items = [
            pb.StepItem(session_id=sessions[place].session_id, step_index=1, actions=texts[place]) for place in left
        ]
        reply: pb.StepResponse = await target.ask("Step", pb.StepRequest(items=items, max_wait_seconds=10), case)
        for outcome in reply.outcomes:
            if not outcome.HasField("pending"):
                outcomes[outcome.session_id] = outcome
    return [outcomes[started.session_id] for started in sessions]


def check_play(
    tally: Tally, case: int, start: Start, actions: Sequence[str], first: pb.StepOutcome, second: pb.StepOutcome
) -> None:
    tally.cases += 1
    if not first.HasField("transition"):
        tally.outcomes[f"{start.environment} {name_of(first.error)}"] += 1
        tally.fail(case, f"{start}: {first.error.message[:300]}; actions {str(actions)[:200]}")
        return
    tally.outcomes[f"{start.environment} {'valid' if first.transition.action_valid else 'invalid'}"] += 1
    if first.transition != second.transition:
        tally.fail(case, f"{start}: the same actions told two things: {str(actions)[:200]}")
    if fault := fault_of_transition(first.transition):
        tally.fail(case, f"{start}: {fault}; actions {str(actions)[:200]}")


# The server.

Block = Callable[[Target, int, Sequence[int], Sequence[Served]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """What runs a block of cases, how many cases there are by default, arguments of the server, and RPCs it has.

    Attributes:
        tls: the server speaks TLS. tokens: it needs tokens, of whom `fuzz_access` makes some.
    """

    run: Block
    cases: int
    server: tuple[str, ...] = ()
    rpcs: Sequence[str] = RPCS
    tls: bool = False
    tokens: bool = False


KINDS: Final[Mapping[str, Kind]] = {
    "requests": Kind(run_requests, 200_000),
    "front": Kind(run_requests, 9_000, ("--workers", "2")),
    "access": Kind(run_access, 9_000, tls=True, tokens=True),
    "bytes": Kind(run_bytes, 9_000),
    "tls": Kind(run_bytes, 9_000, tls=True),
    "actions": Kind(run_actions, 50_000),
}


@asynccontextmanager
async def serving(
    folder: Path, kind: Kind, tally: Tally, tells: bool, *arguments: str
) -> AsyncGenerator[tuple[Child, Target]]:
    """Serves the whole registry."""
    access = write_access(folder) if kind.tls else None
    if access:
        arguments = (*arguments, *(access.server if kind.tokens else access.server[2:]))
    splits = ",".join(split.value for split in Split if kind.tokens or split is not Split.HELD_OUT)
    with (folder / "server.log").open("wb") as log:
        options = ("--env", "all", "--splits", splits, "--port", "0", *kind.server, *arguments)
        server = Child(["-m", "turngym_server.cli", *options], log, {})
    try:
        sizes = [(f"grpc.max_{way}_message_length", 64 << 20) for way in ("send", "receive")]
        address = server.address()
        if access:
            credentials = grpc.ssl_channel_credentials(access.certificate)
            opened = grpc.aio.secure_channel(address, credentials, options=sizes)
        else:
            opened = grpc.aio.insecure_channel(address, options=sizes)
        async with opened as channel:
            target = Target(address, channel, tally, tells, kind)
            target.access = access if kind.tokens else None
            yield server, target
    finally:
        server.process.kill()
        server.process.communicate()


async def find_served(target: Target) -> Sequence[Served]:
    reply: pb.ListEnvironmentsResponse = await target.ask("ListEnvironments", pb.ListEnvironmentsRequest(), -1)
    return [Served(each.id, OPTIONS.get(each.id, ("",))) for each in reply.environments]


async def play_canaries(target: Target, served: Sequence[Served], rng: Rng) -> Mapping[str, str]:
    """Digests of one episode's first turn in every environment."""
    starts = [Start(each.id, options, 7) for each in served for options in each.options]
    sessions = await start_all(target, starts, [rng] * len(starts), -1)
    outcomes = await play_all(
        target, sessions, [each.state.legal_actions.actions[:1] or ["a"] for each in sessions], -1
    )
    await close_all(target, [each.session_id for each in sessions])
    return {str(start): outcome.transition.digest.hex() for start, outcome in zip(starts, outcomes, strict=True)}


async def fuzz(
    kind: str, seed: int, cases: Sequence[int], lease_seconds: float = LEASE_SECONDS
) -> tuple[Tally, dict[str, object]]:
    """Runs the cases of a kind against a fresh server; returns what came of them, and what was measured.

    Args:
        lease_seconds: the server's; in the end all sessions that a case left behind must be over within three of it.
    """
    tally = Tally()
    began = time.monotonic()
    memory: list[int] = []
    course: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--lease-seconds", str(lease_seconds))
        async with serving(Path(folder), KINDS[kind], tally, len(cases) == 1, *arguments) as (server, target):
            served = await find_served(target)
            before = target.canaries = await play_canaries(target, served, Rng(seed, 0))
            resources = [resources_of(server)]
            split = int(WARM * len(cases)) // BLOCK * BLOCK
            for part in (cases[:split], cases[split:]):
                for first in range(0, len(part), BLOCK):
                    await KINDS[kind].run(target, seed, part[first : first + BLOCK], served)
                    if first // BLOCK % 100 == 99:
                        course.append(server.status("VmRSS"))
                        print(f"{tally.cases} {kind}", file=sys.stderr, flush=True)
                if len(cases) >= SETTLING_CASES:
                    await asyncio.sleep(SETTLE_SECONDS)
                memory.append(server.status("VmRSS"))
                resources.append(resources_of(server))
            if await play_canaries(target, served, Rng(seed, 1)) != before:
                tally.fail(-1, "the episodes of the beginning have other digests in the end")
            held = await sessions_left(target, 3 * lease_seconds)
            if held:
                tally.fail(-1, f"{held} sessions are left after their lease")
            if fault := await fault_of_resources(server, resources):
                tally.fail(-1, fault)
            if server.process.poll() is not None:
                tally.fail(-1, f"the server ended with {server.process.returncode}")
            peak, threads = server.status("VmHWM"), server.status("Threads")
        log = (Path(folder) / "server.log").read_text(errors="replace")
        if target.access and any(secret.decode() in log for secret in target.access.secrets):
            tally.fail(-1, "the log holds a token's secret")
    errors = [line for line in log.splitlines() if " ERROR " in line and not _of_a_path(line)]
    if errors:
        tally.fail(-1, f"the server logged {len(errors)} errors, the first: {errors[0][:500]}")
    warm, end = memory
    if len(cases) >= SETTLING_CASES and end > GROWTH * warm:
        tally.fail(-1, f"memory grew from {warm} to {end} KiB")
    return tally, {
        "seed": seed,
        "cases": tally.cases,
        "environments": [dataclasses.asdict(each) for each in served],
        "seconds": round(time.monotonic() - began),
        "slowest_seconds": tally.slowest[0],
        "slowest_case": tally.slowest[1],
        "memory_kib": {"warm": warm, "end": end, "peak": peak, "course": course},
        "threads": threads,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "failures": {str(case): why for case, why in sorted(tally.failures.items())},
    }


def _of_a_path(line: str) -> bool:
    """gRPC's own word of a path that is no UTF-8, which ends its server; ours says that it began another."""
    return "UnicodeDecodeError" in line or "cygrpc: 'utf-8' codec can't decode byte" in line


@dataclass(frozen=True, slots=True)
class Resources:
    """What a server has open."""

    descriptors: int
    threads: int


def resources_of(server: Child) -> Resources:
    return Resources(len(list(Path(f"/proc/{server.pid}/fd").iterdir())), server.status("Threads"))


async def fault_of_resources(server: Child, before: Sequence[Resources]) -> str:
    """What the server still has more of, some time after all is over; "": nothing.

    Args:
        before: at the beginning, and after each part of the cases. Threads come as they are needed, so those of the
            first part are no leak.
    """
    ends = time.monotonic() + CLOSING_SECONDS
    most = Resources(before[0].descriptors + MORE_DESCRIPTORS, max(each.threads for each in before[:2]) + MORE_THREADS)
    while (now := resources_of(server)).descriptors > most.descriptors or now.threads > most.threads:
        if time.monotonic() > ends:
            return f"{now} are left; expected at most {most}"
        await asyncio.sleep(0.5)
    return ""


async def sessions_left(target: Target, seconds: float) -> int:
    """Sessions that are still held after so long, when every lease is over."""
    ends = time.monotonic() + seconds
    while True:
        reply: pb.GetServerResponse = await target.ask("GetServer", pb.GetServerRequest(), -1)
        if not reply.sessions or time.monotonic() > ends:
            return reply.sessions
        await asyncio.sleep(0.5)


def text_of(kind: str, result: Mapping[str, Any]) -> str:
    memory = result["memory_kib"]
    made = f", commit {result['made_by']['commit'][:7]}" if "made_by" in result else ""
    lines = [
        f"{result['cases']} {kind}, seed {result['seed']}{made}: {len(result['failures'])} failures",
        f"  slowest call {result['slowest_seconds']:.2f} s (case {result['slowest_case']})",
        f"  memory {memory['warm'] >> 10} MiB warm, {memory['end'] >> 10} in the end, {memory['peak'] >> 10} at peak",
    ]
    lines += [f"  {count:8} {outcome}" for outcome, count in result["outcomes"].items()]
    lines += [f"  case {case}: {why}" for case, why in list(result["failures"].items())[:20]]
    return "\n".join(lines) + "\n"


def _kind(name: str) -> str:
    if name not in KINDS:
        raise argparse.ArgumentTypeError(f"no kind {name!r}; expected some of {', '.join(KINDS)}")
    return name


def write(kind: str, result: Mapping[str, Any], folder: Path = HERE) -> None:
    """Writes what came of a kind, beside what the files hold of the others, each with what made it."""
    path = folder / "fuzz.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    results = {each: result if each == kind else known[each] for each in KINDS if each == kind or each in known}
    path.write_text(json.dumps(results, indent=2) + "\n")
    path.with_suffix(".txt").write_text("".join(text_of(*each) for each in results.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", type=_kind, metavar="KIND", help=f"of {', '.join(KINDS)}; default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, help="how many; nothing is written then; default: see KINDS")
    parser.add_argument("--case", type=int, help="this one alone; nothing is written then")
    arguments = parser.parse_args()
    failed = False
    for kind in arguments.kinds or KINDS:
        count = arguments.cases or KINDS[kind].cases
        cases = range(count) if arguments.case is None else range(arguments.case, arguments.case + 1)
        tally, result = asyncio.run(fuzz(kind, arguments.seed, cases))
        print(text_of(kind, result), end="", flush=True)
        failed |= bool(tally.failures)
        if arguments.cases is None and arguments.case is None:
            write(kind, {"made_by": measure.made_by(f"python benchmarks/fuzz.py {kind}"), **result})
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
