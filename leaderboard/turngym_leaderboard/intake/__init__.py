"""Whether a folder that a stranger sent may be played as a checkpoint, found out without running anything of it.

`names` says which files there may be, `documents` reads JSON within bounds, `weights` reads safetensors without torch,
`model` asks whether settings, tokenizer and weights fit together, `folder` does all of that in order. Only what passed
is loaded: `trial` lets it play one turn. `examination` does both in a process of its own, within bounds of time and
memory, which is what a board calls. Nothing here knows of boards, submissions or databases.
"""

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict

GIBIBYTE: Final = 1 << 30


class Refused(Exception):
    """The folder cannot be played on a board. The message is for whoever sent it: what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """How much a checkpoint may be.

    Attributes:
        max_bytes: of all files together.
        max_parameters: of the model.
    """

    max_bytes: int = 16 * GIBIBYTE
    max_parameters: int = 8_000_000_000


class Accepted(BaseModel):
    """What was found in a folder that may be played.

    Attributes:
        parameters: counted in the files, so tied weights once.
        vocabulary: tokens that the model tells apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: str
    parameters: int
    bytes: int
    vocabulary: int
