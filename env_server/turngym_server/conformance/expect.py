"""What rules say about replies: refused for this reason, one outcome for each item, a session, a transition."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message
from google.rpc import status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance.connection import CallFailed, code_name, describe_status, error_info
from turngym_server.conformance.rule import Violation

ItemOutcome = pb.ResetOutcome | pb.StepOutcome | pb.AdviseOutcome | pb.KeepAliveOutcome
OutcomeT = TypeVar("OutcomeT")

CODES: Final[Mapping[str, str]] = {
    "UNAUTHENTICATED": "UNAUTHENTICATED",
    "NOT_PERMITTED": "PERMISSION_DENIED",
    "UNKNOWN_ENVIRONMENT": "NOT_FOUND",
    "SESSION_EXPIRED": "NOT_FOUND",
    "SESSION_UNKNOWN": "NOT_FOUND",
    "INVALID_ITEM": "INVALID_ARGUMENT",
    "INVALID_OPTIONS": "INVALID_ARGUMENT",
    "REQUEST_ID_REUSED": "INVALID_ARGUMENT",
    "WRONG_STEP_INDEX": "FAILED_PRECONDITION",
    "EPISODE_ENDED": "FAILED_PRECONDITION",
    "STEP_RUNNING": "FAILED_PRECONDITION",
    "VERSION_MISMATCH": "FAILED_PRECONDITION",
    "NOT_REPLAYABLE": "FAILED_PRECONDITION",
    "DIGEST_MISMATCH": "FAILED_PRECONDITION",
    "NO_SUCH_INSTANCE": "FAILED_PRECONDITION",
    "SEALED": "FAILED_PRECONDITION",
    "NO_ORACLE": "FAILED_PRECONDITION",
    "SPLIT_NOT_SERVED": "PERMISSION_DENIED",
    "SESSION_LIMIT": "RESOURCE_EXHAUSTED",
    "QUEUE_FULL": "RESOURCE_EXHAUSTED",
    "QUOTA_EXCEEDED": "RESOURCE_EXHAUSTED",
    "DRAINING": "UNAVAILABLE",
    "ENVIRONMENT_FAILED": "INTERNAL",
    "STEP_DEADLINE": "DEADLINE_EXCEEDED",
}
"""The code that goes with each reason: the table at the head of environment.proto."""


def describe(outcome: ItemOutcome) -> str:
    """An outcome in a few words."""
    kind = outcome.WhichOneof("outcome")
    if kind == "error":
        return describe_status(outcome.error)
    return {
        None: "an empty outcome",
        "transition": "a transition",
        "started": "a session",
        "pending": "pending",
        "advice": "advice",
        "lease_seconds": "a lease",
    }[kind]


def describe_answer(answer: pb.StepStreamResponse) -> str:
    """An answer of a stream in a few words."""
    kind = answer.WhichOneof("outcome")
    return describe_status(answer.error) if kind == "error" else "outcomes" if kind == "step" else "an empty answer"


@contextlib.contextmanager
def case(name: str) -> Generator[None]:
    """Puts the name of one of several cases before what is found in it."""
    try:
        yield
    except Violation as violation:
        raise Violation(f"{name}: {violation}") from violation


def one_line(message: Message) -> str:
    """A small message in text format."""
    return " ".join(str(message).split())


def one_each(outcomes: Sequence[OutcomeT], items: Sequence[object]) -> Sequence[OutcomeT]:
    """The outcomes. Raises Violation unless there is one for each item."""
    if len(outcomes) != len(items):
        raise Violation(f"{len(items)} items were answered with {len(outcomes)} outcomes")
    return outcomes


def same(found: object, expected: object, what: str) -> None:
    """Raises Violation where they differ; of messages, it names the fields that do."""
    if found == expected:
        return
    if isinstance(found, Message) and isinstance(expected, Message):
        raise Violation(f"{what} differs in {'; '.join(_differences(found, expected))}")
    raise Violation(f"{what} is {_short(found)}, expected {_short(expected)}")


def true(holds: bool, found: str) -> None:
    """Raises Violation, saying what was found, unless it holds."""
    if not holds:
        raise Violation(found)


def started(outcome: pb.ResetOutcome) -> pb.Started:
    """The session. Raises Violation where it is anything else."""
    if not outcome.HasField("started"):
        raise Violation(f"a session was due; got {describe(outcome)}")
    return outcome.started


def transition(outcome: pb.StepOutcome) -> pb.Transition:
    """The transition. Raises Violation where it is anything else."""
    if not outcome.HasField("transition"):
        raise Violation(f"a transition was due; got {describe(outcome)}")
    return outcome.transition


def refused(outcome: ItemOutcome, *reasons: str, **metadata: str) -> None:
    """Raises Violation unless the item failed for one of `reasons`, with its code and with `metadata`."""
    if outcome.WhichOneof("outcome") != "error":
        raise Violation(f"{_expected(reasons)} was due; got {describe(outcome)}")
    failed(outcome.error, reasons, metadata)


def call_refused(call: Callable[[], object], *reasons: str, **metadata: str) -> None:
    """Raises Violation unless the whole call fails for one of `reasons`, with its code and with `metadata`."""
    try:
        call()
    except CallFailed as failure:
        failed(failure.status, reasons, metadata)
    else:
        raise Violation(f"{_expected(reasons)} was due for the whole call; it was answered")


def metadata(status: status_pb2.Status) -> Mapping[str, str]:
    """The metadata of the status's ErrorInfo; empty where it carries none."""
    info = error_info(status)
    return info.metadata if info else {}


def failed(status: status_pb2.Status, reasons: Sequence[str], metadata: Mapping[str, str] | None = None) -> None:
    """Raises Violation unless the status is one of `reasons`, with its code and with `metadata`."""
    info = error_info(status)
    if info is None or info.reason not in reasons or code_name(status.code) != CODES[info.reason]:
        raise Violation(f"{_expected(reasons)} was due; got {describe_status(status)}")
    for key, value in (metadata or {}).items():
        if info.metadata.get(key) != value:
            given = f"{info.metadata[key]!r}" if key in info.metadata else "missing"
            raise Violation(f"{info.reason} must carry {key} = {value!r} in its metadata; it is {given}")


def _expected(reasons: Sequence[str]) -> str:
    return " or ".join(f"{CODES[reason]} {reason}" for reason in reasons)


def _differences(found: Message, expected: Message) -> list[str]:
    """Each field of two messages of one kind that differs, with its values."""
    return [
        f"{name}, which is {_short(mine)}, expected {_short(other)}"
        for name in found.DESCRIPTOR.fields_by_name
        if (mine := getattr(found, name)) != (other := getattr(expected, name))
    ]


def _short(value: object) -> str:
    text = " ".join((value.hex() if isinstance(value, bytes) else str(value)).split()) or "nothing"
    return text if len(text) <= 200 else f"{text[:200]}…"
