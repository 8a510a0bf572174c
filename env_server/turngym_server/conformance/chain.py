"""The digest chain, from its definition at the head of environment.proto and from nothing else."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence

from turngym.v1 import environment_pb2 as pb

SPLIT_NAMES = {
    pb.SPLIT_TRAIN: "train",
    pb.SPLIT_VALIDATION: "validation",
    pb.SPLIT_HELD_OUT: "held_out",
    pb.SPLIT_ALL: "all",
}


def canonical(value: object) -> str:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def start(started: pb.Started) -> bytes:
    """d_0 of an episode that has just been reset. Raises ValueError where its options are no JSON."""
    limits = started.limits
    identity = canonical(
        {
            "environment": started.environment_id,
            "version": started.version,
            "split_epoch": started.split_epoch,
            "split": SPLIT_NAMES[started.split],
            "options": json.loads(started.options_json),
            "limits": {
                "max_turns": limits.max_turns,
                "max_actions": limits.max_actions,
                "max_actions_per_turn": limits.max_actions_per_turn,
                "wall_seconds": limits.wall_seconds or None,
            },
            "level_seed": str(started.level_seed),
        }
    )
    seed = struct.pack("<Q", started.noise[0].noise_seed)
    return hashlib.sha256(_text(identity) + seed + _text(started.state.observation)).digest()


def after_turn(digest: bytes, step_index: int, actions: Sequence[str], transition: pb.Transition) -> bytes:
    """d_t from d_{t-1}, the actions that were sent, and what came back."""
    success = transition.success if transition.HasField("success") else 2
    return hashlib.sha256(
        digest
        + struct.pack("<II", step_index, len(actions))
        + b"".join(map(_text, actions))
        + _text(transition.observation)
        + struct.pack("<d", transition.reward or 0.0)
        + bytes(
            (
                transition.terminated,
                transition.truncated,
                success,
                transition.action_valid,
                transition.end_reason,
            )
        )
    ).digest()


def after_noise(digest: bytes, segment: pb.NoiseSegment) -> bytes:
    """The digest once noise of another seed has been set."""
    return hashlib.sha256(digest + b"noise" + struct.pack("<IQ", segment.from_step, segment.noise_seed)).digest()


def split_of(world_id: str) -> pb.Split.ValueType:
    """The split of the world of that id: TRAIN, VALIDATION or HELD_OUT. Raises ValueError where it is no id."""
    tenth = int.from_bytes(bytes.fromhex(world_id)[:8], "big") % 10
    return pb.SPLIT_TRAIN if tenth < 8 else pb.SPLIT_VALIDATION if tenth == 8 else pb.SPLIT_HELD_OUT


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded
