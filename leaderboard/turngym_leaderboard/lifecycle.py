"""The words of a board's life: what a submission is, where it stands, who may see it, and what a token may do.

Knows nothing of databases or HTTP, which both speak in these words.
"""

import enum
from typing import Final


class Role(enum.StrEnum):
    """What a token may do. ADMIN: everything, and see everything."""

    SUBMIT = "submit"
    ADMIN = "admin"


class Kind(enum.StrEnum):
    """What plays a submission's episodes."""

    CHECKPOINT = "checkpoint"
    ENDPOINT = "endpoint"
    SCRIPTED = "scripted"
    REMOTE = "remote"


class Visibility(enum.StrEnum):
    """Who may see a submission: its owner and admins, or everybody."""

    PRIVATE = "private"
    PUBLIC = "public"


class State(enum.StrEnum):
    """Where a submission stands.

    UPLOADED: files are arriving. VALIDATED: all are there and sound. QUEUED: a worker may take it. RUNNING: one has.
    SCORED: every episode has its result. INCOMPLETE: some could not be played because the servers failed; it can be
    queued again. FAILED: it cannot be scored; the reason says why.
    """

    UPLOADED = "uploaded"
    VALIDATED = "validated"
    QUEUED = "queued"
    RUNNING = "running"
    SCORED = "scored"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


NEXT: Final[dict[State, frozenset[State]]] = {
    State.UPLOADED: frozenset({State.VALIDATED, State.FAILED}),
    State.VALIDATED: frozenset({State.QUEUED, State.FAILED}),
    State.QUEUED: frozenset({State.RUNNING, State.FAILED}),
    State.RUNNING: frozenset({State.QUEUED, State.SCORED, State.INCOMPLETE, State.FAILED}),
    State.SCORED: frozenset(),
    State.INCOMPLETE: frozenset({State.QUEUED}),
    State.FAILED: frozenset({State.QUEUED}),
}
"""From each state, those that may follow."""

FINAL: Final = frozenset({State.SCORED, State.INCOMPLETE, State.FAILED})
"""States in which nothing more happens by itself."""
