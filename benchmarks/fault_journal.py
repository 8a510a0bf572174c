"""What the fault matrix can know of an execution: marks on observations, and a journal of executed actions.

- The journal (the file that FAULT_JOURNAL names) has one line for each action, written before it is executed. A *life*
  is one environment object, so a session that is made again by replay begins another life; its name is random and
  drawn anew. A *mark* is the instance's, drawn from the level seed alone: every life of an episode has the same. A line
  is one `write` to a file opened for appending, so lines of several processes never mix, and a process that
  dies leaves what it had written.
- Every observation begins with the mark and the number of actions executed, so that whoever is handed another
  episode's reply, or another turn's, sees it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from turngym_server.rng import LEVEL_STREAM, Rng

SOKOBAN: Final = "noted_sokoban"
FROZEN_LAKE: Final = "noted_frozen_lake"
BANDIT: Final = "noted_bandit"
SLOW: Final = "noted_slow"
ISOLATED: Final = "noted_isolated"
UNSURE: Final = "noted_unsure"
IDS: Final = (SOKOBAN, FROZEN_LAKE, BANDIT, SLOW, ISOLATED, UNSURE)
OPTIONS: Final[Mapping[str, Mapping[str, object]]] = {BANDIT: {"names": "pairs"}}
"""Options to play with, where they are not the defaults."""

NEW_VERSION: Final = "FAULT_NEW_VERSION"
SAME_VERSION: Final = "FAULT_SAME_VERSION"
JOURNAL: Final = "FAULT_JOURNAL"


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the journal: the `place`-th action of a life; place 0 is its reset, with no action.

    `process` is the id of the process that has the life: the server, one of its workers, or one of theirs.
    """

    environment: str
    process: int
    life: str
    mark: str
    place: int
    action: str


def mark_of(level_seed: int) -> str:
    """What the instance's observations begin with. Of split `all`, where no level is redrawn."""
    return mark_from(Rng(level_seed, LEVEL_STREAM))


def mark_from(level: Rng) -> str:
    return f"{level.word():016x}"


def head(mark: str, executed: int) -> str:
    """The first line of an observation."""
    return f"[{mark} {executed}]\n"


def note_line(note: Note) -> bytes:
    return json.dumps(asdict(note)).encode() + b"\n"


def read_notes(lines: Sequence[bytes]) -> list[Note]:
    return [Note(**json.loads(line)) for line in lines]
