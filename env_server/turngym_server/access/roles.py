"""What each role may do. The one place where that is written.

    role      RPCs of EnvironmentService  Reset, by split                                      sealed  reflection
    train     all                         train, validation; `all` where too few divide        no      no
    evaluate  all                         train, validation, held_out, all                     yes     no
    admin     all                         train, validation, held_out, all                     yes     yes

Of those splits a caller gets the ones that the server serves at all. A Fork stays in the split of its original, and
Step, Fork, Advise, KeepAlive and Close reach the caller's own sessions only, whatever its role: another's is
SESSION_UNKNOWN. `all` of an environment that divides holds held-out worlds, so `train` does not have it. Where too few
worlds are there to divide, `train` has `all` without the worlds that are held out elsewhere in the family: a level file
may hold worlds that the generator makes, and so may options that leave few. Such a Reset is NOT_PERMITTED. Nothing is
held out of a family that does not divide by its default options. Health checks need no token.
"""

import enum
from collections.abc import Mapping
from typing import Final

from turngym_server.splits import Split


class Role(enum.Enum):
    """What a token is for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    ADMIN = "admin"


EVERY_ROLE: Final = frozenset(Role)

ROLES_OF_RPC: Final[Mapping[str, frozenset[Role]]] = {
    "GetServer": EVERY_ROLE,
    "ListEnvironments": EVERY_ROLE,
    "GetEnvironment": EVERY_ROLE,
    "Reset": EVERY_ROLE,
    "Step": EVERY_ROLE,
    "StepStream": EVERY_ROLE,
    "Fork": EVERY_ROLE,
    "Advise": EVERY_ROLE,
    "KeepAlive": EVERY_ROLE,
    "Close": EVERY_ROLE,
    "ServerReflectionInfo": frozenset({Role.ADMIN}),
}
"""Who may call what; an RPC that is not here is nobody's."""

ROLES_OF_SEALED: Final = frozenset({Role.EVALUATE, Role.ADMIN})
"""Who may reset to a board's sealed seeds."""

SPLITS_OF_ROLE: Final[Mapping[Role, frozenset[Split]]] = {
    Role.TRAIN: frozenset({Split.TRAIN, Split.VALIDATION}),
    Role.EVALUATE: frozenset(Split),
    Role.ADMIN: frozenset(Split),
}
"""Splits of environments that divide."""
