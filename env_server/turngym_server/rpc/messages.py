"""Turns our values into the contract's messages and back. Decides nothing."""

from collections.abc import Iterable

from google.rpc import status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_server.environment import ActionKind, Determinism, Limits
from turngym_server.reference import Score, WorldCount
from turngym_server.rpc.wire import bytes_field, varint_field
from turngym_server.sessions.episode import EndReason, LegalActions, NoiseSegment, Turn
from turngym_server.splits import Split

SPLITS = {
    Split.TRAIN: pb.SPLIT_TRAIN,
    Split.VALIDATION: pb.SPLIT_VALIDATION,
    Split.HELD_OUT: pb.SPLIT_HELD_OUT,
    Split.ALL: pb.SPLIT_ALL,
}
SPLIT_OF_NUMBER = {pb.SPLIT_UNSPECIFIED: Split.TRAIN, **{number: split for split, number in SPLITS.items()}}
ACTION_KINDS = {ActionKind.TEXT: pb.ACTION_KIND_TEXT, ActionKind.TOOL_CALL: pb.ACTION_KIND_TOOL_CALL}
DETERMINISMS = {Determinism.BYTES: pb.DETERMINISM_BYTES, Determinism.NONE: pb.DETERMINISM_NONE}


def transition(turn: Turn) -> pb.Transition:
    message = pb.Transition(
        observation=turn.observation,
        reward=turn.reward,
        action_rewards=turn.action_rewards,
        actions_executed=len(turn.action_rewards),
        action_valid=turn.action_valid,
        digest=turn.digest,
    )
    if turn.end_reason is not EndReason.NONE:
        message.terminated = turn.terminated
        message.truncated = turn.truncated
        message.end_reason = turn.end_reason.value  # pyright: ignore[reportAttributeAccessIssue]  # The same numbers.
        if turn.success is not None:
            message.success = turn.success
    # A loop: the maps' own update() takes twice as long.
    if turn.reward_components:
        components = message.reward_components
        for name, value in turn.reward_components.items():
            components[name] = value
    if turn.metrics:
        metrics = message.metrics
        for name, value in turn.metrics.items():
            metrics[name] = value
    return message


def transition_field(transition: bytes) -> bytes:
    """The `transition` field of a StepOutcome, from a serialised Transition."""
    return bytes_field(3, transition)


def error_field(status: status_pb2.Status) -> bytes:
    """The `error` field of a StepOutcome."""
    return bytes_field(4, status.SerializeToString())


PENDING_FIELD = bytes_field(5, b"")
"""The `pending` field of a StepOutcome."""


def legal_actions(legal: LegalActions) -> pb.LegalActions:
    return pb.LegalActions(actions=legal.actions, more=legal.more)


def legal_actions_field(legal: pb.LegalActions) -> bytes:
    """A StepOutcome's `transition` field with legal actions only.

    Behind a transition it adds them: protobuf merges a message field that comes twice.
    """
    return transition_field(pb.Transition(legal_actions=legal).SerializeToString())


def session_id_field(session_id: str) -> bytes:
    """The `session_id` field of a StepOutcome."""
    return bytes_field(1, session_id.encode())


def step_outcome(session_id_field: bytes, step_index: int, outcome: bytes) -> bytes:
    """A serialised StepOutcome, from serialised fields; `outcome` is one of those above."""
    return session_id_field + varint_field(2, step_index) + outcome


def transition_of(outcome: bytes) -> pb.Transition:
    """The transition in the fields of a StepOutcome; empty where they hold none."""
    return pb.StepOutcome.FromString(outcome).transition


def limits(limits: Limits) -> pb.Limits:
    return pb.Limits(
        max_turns=limits.max_turns,
        max_actions=limits.max_actions,
        max_actions_per_turn=limits.max_actions_per_turn,
        wall_seconds=limits.wall_seconds or 0.0,
    )


def noise(segments: Iterable[NoiseSegment]) -> list[pb.NoiseSegment]:
    return [pb.NoiseSegment(from_step=segment.from_step, noise_seed=segment.noise_seed) for segment in segments]


def world_count(count: WorldCount) -> pb.WorldCount:
    return pb.WorldCount(worlds=count.worlds, exact=count.exact, sample=count.sample, distinct=count.distinct)


def reference(score: Score) -> pb.Reference:
    return pb.Reference(value=score.value, half_width=score.half_width, instances=score.instances, exact=score.exact)
