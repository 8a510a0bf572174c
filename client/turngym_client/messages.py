"""Between the contract's messages and `turngym_client.types`, and from a status to an error. Pure functions only."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Final, cast

from google.rpc import code_pb2, error_details_pb2, status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_client.errors import (
    EnvironmentFailed,
    EpisodeEnded,
    InvalidRequest,
    NoOracle,
    NoSuchInstance,
    NotServed,
    ProtocolError,
    StepOrderError,
    TurngymError,
    Unauthenticated,
    UnknownEnvironment,
    VersionMismatch,
)
from turngym_client.types import (
    ActionKind,
    Advice,
    CloseReason,
    Determinism,
    EndReason,
    EnvironmentInfo,
    EnvironmentSummary,
    EpisodeRequest,
    Limits,
    NoiseSegment,
    Reference,
    ServerInfo,
    Split,
    SplitInfo,
    Transition,
    cut,
)

SPLIT_TO_PB: Final[Mapping[Split, pb.Split.ValueType]] = {
    Split.TRAIN: pb.SPLIT_TRAIN,
    Split.VALIDATION: pb.SPLIT_VALIDATION,
    Split.HELD_OUT: pb.SPLIT_HELD_OUT,
    Split.ALL: pb.SPLIT_ALL,
}
CLOSE_REASON_TO_PB: Final[Mapping[CloseReason, pb.CloseReason.ValueType]] = {
    CloseReason.FINISHED: pb.CLOSE_REASON_FINISHED,
    CloseReason.ABANDONED: pb.CLOSE_REASON_ABANDONED,
    CloseReason.ERROR: pb.CLOSE_REASON_ERROR,
}
_SPLITS: Final = {number: split for split, number in SPLIT_TO_PB.items()}
_END_REASONS: Final = {
    pb.END_REASON_UNSPECIFIED: EndReason.NONE,
    pb.END_REASON_ENVIRONMENT: EndReason.ENVIRONMENT,
    pb.END_REASON_MAX_TURNS: EndReason.MAX_TURNS,
    pb.END_REASON_MAX_ACTIONS: EndReason.MAX_ACTIONS,
    pb.END_REASON_WALL_CLOCK: EndReason.WALL_CLOCK,
}
_ACTION_KINDS: Final = {pb.ACTION_KIND_TEXT: ActionKind.TEXT, pb.ACTION_KIND_TOOL_CALL: ActionKind.TOOL_CALL}


# Towards the server.


def clean_text(text: str) -> str:
    """The text with every lone surrogate replaced by U+FFFD, since UTF-8 cannot hold one."""
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def options_to_json(options: Mapping[str, object]) -> str:
    """Options as a JSON object. Raises InvalidRequest naming what JSON cannot hold."""
    try:
        return clean_text(json.dumps(dict(options), ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"options {cut(repr(options))} are no JSON object: {cut(str(error))}", reason="INVALID_OPTIONS"
        ) from error


def limits_to_pb(limits: Limits) -> pb.Limits:
    return pb.Limits(
        max_turns=limits.max_turns,
        max_actions=limits.max_actions,
        max_actions_per_turn=limits.max_actions_per_turn,
        wall_seconds=limits.wall_seconds,
    )


def noise_to_pb(noise: Sequence[NoiseSegment]) -> list[pb.NoiseSegment]:
    return [pb.NoiseSegment(from_step=segment.from_step, noise_seed=segment.noise_seed) for segment in noise]


def request_to_pb(request: EpisodeRequest, request_id: bytes) -> pb.ResetItem:
    item = pb.ResetItem(
        request_id=request_id,
        environment_id=clean_text(request.environment_id),
        expected_version=clean_text(request.expected_version),
        options_json=options_to_json(request.options),
        limits=limits_to_pb(request.limits),
        split=SPLIT_TO_PB[request.split],
    )
    if request.level_seed is not None:
        item.level_seed = request.level_seed
    if request.noise_seed is not None:
        item.noise_seed = request.noise_seed
    if request.sealed_seed is not None:
        item.sealed_seed = request.sealed_seed
    return item


# From the server.


def split_from_pb(split: pb.Split.ValueType) -> Split:
    if (known := _SPLITS.get(split)) is None:
        raise ProtocolError(f"the server names a split of number {split}, which this client does not know")
    return known


def limits_from_pb(limits: pb.Limits) -> Limits:
    try:
        return Limits(
            max_turns=limits.max_turns,
            max_actions=limits.max_actions,
            max_actions_per_turn=limits.max_actions_per_turn,
            wall_seconds=limits.wall_seconds,
        )
    except ValueError as error:
        raise ProtocolError(f"the server sent limits that cannot be: {error}") from error


def noise_from_pb(noise: Sequence[pb.NoiseSegment]) -> tuple[NoiseSegment, ...]:
    return tuple(NoiseSegment(segment.from_step, segment.noise_seed) for segment in noise)


def transition_from_pb(message: pb.Transition) -> Transition:
    if (end_reason := _END_REASONS.get(message.end_reason)) is None:
        raise ProtocolError(f"the server names an end reason of number {message.end_reason}, unknown to this client")
    listed = message.HasField("legal_actions")
    return Transition(
        observation=message.observation,
        reward=message.reward,
        action_rewards=tuple(message.action_rewards),
        actions_executed=message.actions_executed,
        terminated=message.terminated,
        truncated=message.truncated,
        success=message.success if message.HasField("success") else None,
        end_reason=end_reason,
        action_valid=message.action_valid,
        reward_components=_floats(message.reward_components),
        metrics=_floats(message.metrics),
        digest=message.digest,
        legal_actions=tuple(message.legal_actions.actions) if listed else None,
        legal_actions_complete=listed and not message.legal_actions.more,
    )


def _floats(message: Mapping[str, float]) -> Mapping[str, float]:
    # A comprehension: dict() asks protobuf's maps in a way that takes three times as long.
    return {name: message[name] for name in message} if message else {}


def advice_from_pb(message: pb.Advice) -> Advice:
    return Advice(
        step_index=message.step_index,
        actions=tuple(message.actions),
        explanation=message.explanation,
        ceiling=message.ceiling if message.HasField("ceiling") else None,
        floor=message.floor if message.HasField("floor") else None,
    )


def server_from_pb(message: pb.GetServerResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        addresses=tuple(message.addresses),
        splits=tuple(split_from_pb(split) for split in message.splits),
        max_sessions=message.max_sessions,
        sessions=message.sessions,
        lease_seconds=message.lease_seconds,
        max_batch_items=message.max_batch_items,
        max_action_bytes=message.max_action_bytes,
        max_observation_bytes=message.max_observation_bytes,
        max_message_bytes=message.max_message_bytes,
    )


def summary_from_pb(message: pb.EnvironmentSummary) -> EnvironmentSummary:
    return EnvironmentSummary(id=message.id, version=message.version, family=message.family, summary=message.summary)


def environment_from_pb(message: pb.EnvironmentSpec) -> EnvironmentInfo:
    return EnvironmentInfo(
        id=message.id,
        version=message.version,
        family=message.family,
        summary=message.summary,
        options_schema=_json_object(message.options_schema_json),
        options_json=message.options_json,
        instructions=message.instructions,
        action_separator=message.action_separator,
        action_kind=_ACTION_KINDS.get(message.action_kind, ActionKind.TEXT),
        tools=tuple(_json_object(tool) for tool in message.tools_json),
        limits=limits_from_pb(message.limits),
        caps=limits_from_pb(message.caps),
        determinism=Determinism.BYTES if message.determinism == pb.DETERMINISM_BYTES else Determinism.NONE,
        splits={split_from_pb(split.split): _split_info(split) for split in message.splits},
        split_epoch=message.split_epoch,
        step_deadline_seconds=message.step_deadline_seconds,
    )


def _split_info(message: pb.SplitInfo) -> SplitInfo:
    return SplitInfo(
        served=message.served,
        worlds=message.worlds.worlds if message.HasField("worlds") else None,
        worlds_exact=message.worlds.exact,
        floor=_reference(message.floor) if message.HasField("floor") else None,
        ceiling=_reference(message.ceiling) if message.HasField("ceiling") else None,
    )


def _reference(message: pb.Reference) -> Reference:
    return Reference(
        value=message.value, half_width=message.half_width, instances=message.instances, exact=message.exact
    )


def _json_object(text: str) -> Mapping[str, object]:
    value: object = json.loads(text) if text else {}
    if not isinstance(value, dict):
        raise ProtocolError(f"the server sent {text[:80]!r} where a JSON object belongs")
    return cast("dict[str, object]", value)


# Statuses.


class Verdict(enum.Enum):
    """What to do about a status."""

    AWAY = "the server could not be reached or did not answer in time: try again"
    BUSY = "no capacity now: try again after the time it names"
    SESSION_GONE = "the session is not there any more: resume by replay"
    FINAL = "tell the caller"


class StatusError(Exception):
    """A google.rpc.Status that is not OK, of a whole call or of one item. Internal: callers meet a TurngymError.

    Attributes:
        of_item: it is one item's outcome, so the server itself answered it.
        retry_after: seconds of the RetryInfo; None where there is none.
    """

    def __init__(self, status: status_pb2.Status, *, of_item: bool) -> None:
        super().__init__(status.message)
        self.of_item = of_item
        self.code = status.code
        self.message = status.message
        self.reason = ""
        self.metadata: Mapping[str, str] = {}
        self.retry_after: float | None = None
        for detail in status.details:
            if detail.TypeName() == "google.rpc.ErrorInfo":
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                self.reason, self.metadata = info.reason, dict(info.metadata)
            elif detail.TypeName() == "google.rpc.RetryInfo":
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                self.retry_after = delay.seconds + delay.nanos / 1e9

    @property
    def code_name(self) -> str:
        return code_pb2.Code.Name(self.code) if self.code in code_pb2.Code.values() else str(self.code)

    @property
    def verdict(self) -> Verdict:
        if self.reason in ("SESSION_EXPIRED", "SESSION_UNKNOWN"):
            return Verdict.SESSION_GONE
        if self.code == code_pb2.RESOURCE_EXHAUSTED and self.retry_after is not None:
            return Verdict.BUSY
        if self.code == code_pb2.UNAVAILABLE:
            return Verdict.AWAY
        # A server that stops cancels its calls. A turn past its own deadline is a result and names its reason.
        if self.code in (code_pb2.DEADLINE_EXCEEDED, code_pb2.CANCELLED) and not self.reason:
            return Verdict.AWAY
        return Verdict.FINAL

    def to_error(self, where: str) -> TurngymError:
        """The error for a caller. `where` names environment, seeds and step, as far as they are known."""
        kind = _BY_REASON.get(self.reason) or self._kind_of_code()
        return kind(f"{where}: {self.message} [{self.code_name}]", reason=self.reason, metadata=self.metadata)

    def _kind_of_code(self) -> type[TurngymError]:
        match self.code:
            case code_pb2.INVALID_ARGUMENT | code_pb2.RESOURCE_EXHAUSTED:
                return InvalidRequest
            case code_pb2.PERMISSION_DENIED:
                return NotServed
            case code_pb2.UNAUTHENTICATED:
                return Unauthenticated
            case code_pb2.INTERNAL if self.of_item:
                return EnvironmentFailed
            case _:
                return ProtocolError


_BY_REASON: Final[Mapping[str, type[TurngymError]]] = {
    "UNKNOWN_ENVIRONMENT": UnknownEnvironment,
    "INVALID_ITEM": InvalidRequest,
    "INVALID_OPTIONS": InvalidRequest,
    "REQUEST_ID_REUSED": InvalidRequest,
    "WRONG_STEP_INDEX": StepOrderError,
    "STEP_RUNNING": StepOrderError,
    "EPISODE_ENDED": EpisodeEnded,
    "VERSION_MISMATCH": VersionMismatch,
    "NO_SUCH_INSTANCE": NoSuchInstance,
    "SEALED": NotServed,
    "SPLIT_NOT_SERVED": NotServed,
    "NO_ORACLE": NoOracle,
    "ENVIRONMENT_FAILED": EnvironmentFailed,
    "STEP_DEADLINE": EnvironmentFailed,
}
