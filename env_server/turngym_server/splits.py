"""Which split an instance belongs to: a function of its family and its world, and of nothing else.

The key is public. It keeps honest training away from held-out worlds; it proves nothing about dishonest training.
Knows nothing of environments, seeds or which splits a server serves.
"""

import enum
import hashlib
from typing import Final

HELD_OUT_SHARE: Final = 0.1
"""Of the worlds of a family, as many are expected in the split held_out."""


class Split(enum.Enum):
    """TRAIN, VALIDATION and HELD_OUT part the worlds of a family (80, 10 and 10 %); ALL is every world."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"
    ALL = "all"


def _digest(family: str, epoch: int, world: bytes) -> bytes:
    return hashlib.sha256(b"turngym-split/%d\0" % epoch + family.encode() + b"\0" + world).digest()


def split_of(family: str, epoch: int, world: bytes) -> Split:
    """The split of a world: TRAIN, VALIDATION or HELD_OUT, never ALL.

    Args:
        family: `EnvironmentSpec.family`.
        epoch: `EnvironmentSpec.split_epoch`.
        world: `Environment.world()`.
    """
    tenth = int.from_bytes(_digest(family, epoch, world)[:8], "big") % 10
    if tenth < 8:
        return Split.TRAIN
    return Split.VALIDATION if tenth == 8 else Split.HELD_OUT


def world_id(family: str, epoch: int, world: bytes) -> str:
    """A name for a world: 32 hexadecimal digits."""
    return _digest(family, epoch, world)[:16].hex()
