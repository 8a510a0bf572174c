"""Every random draw of a run, as a function of where it falls. Nothing draws from a stream, so nothing must be saved.

A draw is named by (purpose, run seed, iteration, attempt, group, member, turn, token). `attempt` counts the rollbacks
of a guard: it salts every seed, so a run that was rolled back does not repeat what went wrong. Rounds that refill an
iteration's groups are counted with it (`sample.round_place`), so they play other levels. `purpose` keeps
training, validation and the warm start from meeting each other's levels and noise by accident of numbering.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MANTISSA_BITS = 53


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run something falls: with the run's seed, what its draws are a function of. `attempt` is as above."""

    iteration: int
    attempt: int = 0


def level_seed(run_seed: int, iteration: int, attempt: int, group: int, *, purpose: str = "train") -> int:
    """Seed of the level that all members of a group play, in [0, 2^64)."""
    return int.from_bytes(_key("level", purpose, run_seed, iteration, attempt, group)[:8], "big")


def noise_seed(run_seed: int, iteration: int, attempt: int, group: int, member: int, *, purpose: str = "train") -> int:
    """Seed of one episode's noise, in [0, 2^64). Members of a group differ: else they would share their luck."""
    return int.from_bytes(_key("noise", purpose, run_seed, iteration, attempt, group, member)[:8], "big")


def token_uniforms(
    run_seed: int,
    iteration: int,
    attempt: int,
    group: int,
    member: int,
    turn: int,
    count: int,
    *,
    purpose: str = "train",
) -> NDArray[np.float64]:
    """Uniforms in [0, 1) for the first `count` tokens that one member samples in one turn, float64 [count].

    Asking for fewer gives a prefix of the same numbers. Made from raw Philox words: numpy's distributions may change
    between releases, its bit generators may not.
    """
    return _uniforms(_key("token", purpose, run_seed, iteration, attempt, group, member, turn), count)


def group_uniforms(
    run_seed: int, iteration: int, attempt: int, groups: NDArray[np.int64], *, purpose: str
) -> NDArray[np.float64]:
    """A uniform in [0, 1) for each of P groups, by its index alone, float64 [P]."""
    keys = [_key("group", purpose, run_seed, iteration, attempt, int(group)) for group in groups]
    return np.array([_uniforms(key, 1)[0] for key in keys], dtype=np.float64)


def permutation(
    run_seed: int, iteration: int, attempt: int, epoch: int, size: int, *, purpose: str
) -> NDArray[np.int64]:
    """An order of `size` things for one pass over a batch, int64 [size]."""
    return np.argsort(_uniforms(_key("order", purpose, run_seed, iteration, attempt, epoch), size), kind="stable")


def _key(kind: str, purpose: str, *numbers: int) -> bytes:
    """SHA-256 of the draw's name. Names are unambiguous: the strings hold no slash and numbers are decimal."""
    if "/" in purpose:
        raise ValueError(f"a seed's purpose must not hold a slash, got {purpose!r}")
    return hashlib.sha256("/".join(["turngym-seed", kind, purpose, *map(str, numbers)]).encode()).digest()


def _uniforms(key: bytes, count: int) -> NDArray[np.float64]:
    words = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(count)
    return (words >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float64) * 2.0**-_MANTISSA_BITS
