"""How a request fails: a typed error and its `google.rpc.Status`.

Knows nothing of sessions or environments.
"""

import enum
from collections.abc import Mapping
from typing import Final

from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN: Final = "turngym"
"""Domain of every `google.rpc.ErrorInfo`."""

MAX_MESSAGE_BYTES: Final = 1_000
"""Longer messages are cut. A call's message travels in its trailing metadata, percent-encoded and again in its details,
and many clients take no more than 8 KiB of them."""


MAX_EXCEPTION_CHARACTERS: Final = 300
"""Of an environment's exception, as many are told to clients."""


MAX_RETRY_SECONDS: Final = 3_600.0
"""Longest delay that a RetryInfo names: who has to wait for longer asks in between, and is told again."""


class Reason(enum.Enum):
    """Why an item or a call failed; `environment.proto` says when each is given."""

    UNAUTHENTICATED = "UNAUTHENTICATED"
    NOT_PERMITTED = "NOT_PERMITTED"
    UNKNOWN_ENVIRONMENT = "UNKNOWN_ENVIRONMENT"
    SESSION_EXPIRED = "SESSION_EXPIRED"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    INVALID_ITEM = "INVALID_ITEM"
    INVALID_OPTIONS = "INVALID_OPTIONS"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    WRONG_STEP_INDEX = "WRONG_STEP_INDEX"
    EPISODE_ENDED = "EPISODE_ENDED"
    STEP_RUNNING = "STEP_RUNNING"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    NOT_REPLAYABLE = "NOT_REPLAYABLE"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    NO_SUCH_INSTANCE = "NO_SUCH_INSTANCE"
    SEALED = "SEALED"
    NO_ORACLE = "NO_ORACLE"
    SPLIT_NOT_SERVED = "SPLIT_NOT_SERVED"
    SESSION_LIMIT = "SESSION_LIMIT"
    QUEUE_FULL = "QUEUE_FULL"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    DRAINING = "DRAINING"
    ENVIRONMENT_FAILED = "ENVIRONMENT_FAILED"
    STEP_DEADLINE = "STEP_DEADLINE"


CODES: Final[Mapping[Reason, "code_pb2.Code"]] = {
    Reason.UNAUTHENTICATED: code_pb2.UNAUTHENTICATED,
    Reason.NOT_PERMITTED: code_pb2.PERMISSION_DENIED,
    Reason.UNKNOWN_ENVIRONMENT: code_pb2.NOT_FOUND,
    Reason.SESSION_EXPIRED: code_pb2.NOT_FOUND,
    Reason.SESSION_UNKNOWN: code_pb2.NOT_FOUND,
    Reason.INVALID_ITEM: code_pb2.INVALID_ARGUMENT,
    Reason.INVALID_OPTIONS: code_pb2.INVALID_ARGUMENT,
    Reason.REQUEST_ID_REUSED: code_pb2.INVALID_ARGUMENT,
    Reason.WRONG_STEP_INDEX: code_pb2.FAILED_PRECONDITION,
    Reason.EPISODE_ENDED: code_pb2.FAILED_PRECONDITION,
    Reason.STEP_RUNNING: code_pb2.FAILED_PRECONDITION,
    Reason.VERSION_MISMATCH: code_pb2.FAILED_PRECONDITION,
    Reason.NOT_REPLAYABLE: code_pb2.FAILED_PRECONDITION,
    Reason.DIGEST_MISMATCH: code_pb2.FAILED_PRECONDITION,
    Reason.NO_SUCH_INSTANCE: code_pb2.FAILED_PRECONDITION,
    Reason.SEALED: code_pb2.FAILED_PRECONDITION,
    Reason.NO_ORACLE: code_pb2.FAILED_PRECONDITION,
    Reason.SPLIT_NOT_SERVED: code_pb2.PERMISSION_DENIED,
    Reason.SESSION_LIMIT: code_pb2.RESOURCE_EXHAUSTED,
    Reason.QUEUE_FULL: code_pb2.RESOURCE_EXHAUSTED,
    Reason.QUOTA_EXCEEDED: code_pb2.RESOURCE_EXHAUSTED,
    Reason.DRAINING: code_pb2.UNAVAILABLE,
    Reason.ENVIRONMENT_FAILED: code_pb2.INTERNAL,
    Reason.STEP_DEADLINE: code_pb2.DEADLINE_EXCEEDED,
}


ENVIRONMENT_ERRORS: Final = (Exception, SystemExit, KeyboardInterrupt, GeneratorExit)
"""What an environment may raise without taking more than its own episode down. A person's Ctrl-C is not among it: the
command takes SIGINT through the event loop."""


class ItemError(Exception):
    """One item, or a whole call, is refused or has failed.

    Args:
        reason: decides the status code.
        message: what came, what was expected, what to do.
        metadata: facts that a program reads, by the names that `environment.proto` gives.
        retry_after: seconds after which the same may be tried again, cut to MAX_RETRY_SECONDS; None: not to be retried
            as it is.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = printable(message[:MAX_MESSAGE_BYTES]).encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")
        self.metadata = dict(metadata or {})
        self.retry_after = None if retry_after is None else min(MAX_RETRY_SECONDS, retry_after)

    @property
    def code(self) -> "code_pb2.Code":
        return CODES[self.reason]

    def status(self) -> status_pb2.Status:
        """The error as a message, details included."""
        details = [any_pb2.Any()]
        details[0].Pack(
            error_details_pb2.ErrorInfo(
                reason=self.reason.value,
                domain=DOMAIN,
                metadata={key: printable(value) for key, value in self.metadata.items()},
            )
        )
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(round(self.retry_after * 1e9))
            retry = any_pb2.Any()
            retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
            details.append(retry)
        return status_pb2.Status(code=self.code, message=self.message, details=details)


def exception_text(error: BaseException) -> str:
    """What clients are told of an environment's exception: its type, and its text bounded and on one line."""
    try:
        text = str(error)[:MAX_EXCEPTION_CHARACTERS]
    except Exception:  # An exception's own __str__ may fail, and it is the environment's.
        text = ""
    told = "".join(character if character.isprintable() else " " for character in text).strip()
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


def printable(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot hold, written out as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
