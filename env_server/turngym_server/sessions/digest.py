"""The chain of hashes that names an episode: the same digest means the same start, actions and results, byte by byte.

    d_0 = H(identity ‖ u64 noise seed ‖ observation)
    d_t = H(d_{t−1} ‖ u32 step index ‖ u32 count ‖ actions ‖ observation ‖ f64 reward ‖ flags ‖ u8 end reason)
    new noise from step s on:  d = H(d ‖ "noise" ‖ u32 s ‖ u64 noise seed)

H is SHA-256; numbers are little-endian; texts are UTF-8 behind their length in bytes (u32). Noise enters where it
begins, so a copy of an episode that draws other noise needs no history. Pure functions; knows nothing of sessions.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Final

FALSE: Final = 0
TRUE: Final = 1
UNSET: Final = 2
"""Bytes of the flags; only success can be unset."""

_FIRST_NOISE = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_ONE_ACTION = struct.Struct("<II")
_NEW_NOISE = struct.Struct("<IQ")
_TAIL = struct.Struct("<d5B")


def canonical_json(value: object) -> str:
    """JSON with sorted keys, no spaces and no escapes but the necessary ones.

    Raises:
        ValueError: `value` holds NaN or an infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def length_prefixed(text: str) -> bytes:
    """UTF-8 behind its length. Raises UnicodeEncodeError for lone surrogates."""
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded


def encode_actions(actions: Sequence[str]) -> bytes:
    """The actions of one turn, as they were sent."""
    if len(actions) == 1:  # As nearly all turns.
        encoded = actions[0].encode()
        return _ONE_ACTION.pack(1, len(encoded)) + encoded
    return _LENGTH.pack(len(actions)) + b"".join([length_prefixed(action) for action in actions])


def first_digest(identity: str, noise_seed: int, observation: str) -> bytes:
    """Digest after the reset. `identity` is canonical JSON of all that fixes the instance."""
    return hashlib.sha256(
        length_prefixed(identity) + _FIRST_NOISE.pack(noise_seed) + length_prefixed(observation)
    ).digest()


def noise_digest(previous: bytes, from_step: int, noise_seed: int) -> bytes:
    """Digest once noise of another seed has been set, before turn `from_step` is played."""
    return hashlib.sha256(previous + b"noise" + _NEW_NOISE.pack(from_step, noise_seed)).digest()


def turn_digest(
    previous: bytes,
    *,
    step_index: int,
    encoded_actions: bytes,
    observation: str,
    reward: float,
    terminated: bool,
    truncated: bool,
    success: bool | None,
    action_valid: bool,
    end_reason: int,
) -> bytes:
    """Digest after a turn. `encoded_actions` is what `encode_actions` returns for it."""
    return hashlib.sha256(
        previous
        + _LENGTH.pack(step_index)
        + encoded_actions
        + length_prefixed(observation)
        + _TAIL.pack(
            reward + 0.0,  # −0 becomes 0.
            terminated,
            truncated,
            UNSET if success is None else success,
            action_valid,
            end_reason,
        )
    ).digest()
