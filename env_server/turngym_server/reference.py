"""Reads what was measured of the environments: worlds in each split, floors and ceilings.

One JSON file for each environment id in `reference/`, written by `experiments/reference_scores.py`:

    {"environment": …, "version": …, "split_epoch": …, "made_by": {…},
     "entries": [{"options": {…}, "limits": {…}, "split": "held_out", "worlds": {…} | null,
                  "floor": {…} | null, "ceiling": {…} | null}, …]}

World counts depend on options and split only, scores on limits too. Figures of another version or split epoch are
not this environment's and are left out.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from turngym_server.environment import EnvironmentSpec, Limits
from turngym_server.sessions.digest import canonical_json
from turngym_server.splits import Split

FOLDER: Final = Path(__file__).parent / "reference"

LEAST_HELD_OUT_WORLDS: Final = 200
"""A family with fewer held-out worlds is not divided: it serves split `all` only."""


class WorldCount(BaseModel):
    """Distinct worlds of a split: the exact number, or Chao1's estimate from `distinct` worlds in `sample` draws."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worlds: float
    exact: bool
    sample: int = 0
    distinct: int = 0


class Score(BaseModel):
    """A success rate with half of its 95 % interval over `instances`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    half_width: float
    instances: int
    exact: bool


class _Limits(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_turns: int
    max_actions: int
    max_actions_per_turn: int
    wall_seconds: float | None = None


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    options: dict[str, object]
    limits: _Limits
    split: Split
    worlds: WorldCount | None = None
    floor: Score | None = None
    ceiling: Score | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    environment: str
    version: str
    split_epoch: int
    entries: list[_Entry]
    made_by: dict[str, object]


@dataclass(frozen=True, slots=True)
class Reference:
    """Everything measured of one environment.

    Attributes:
        worlds: by canonical options JSON and split.
        scores: (floor, ceiling) by canonical options JSON, limits and split.
    """

    worlds: dict[tuple[str, Split], WorldCount]
    scores: dict[tuple[str, Limits, Split], tuple[Score | None, Score | None]]

    def divides(self, options_json: str) -> bool:
        """Whether the worlds under these options are divided into splits. True where they were never counted."""
        held_out = self.worlds.get((options_json, Split.HELD_OUT))
        return held_out is None or held_out.worlds >= LEAST_HELD_OUT_WORLDS


NOTHING: Final = Reference({}, {})
"""Of an environment that was never measured."""


def read_reference(spec: EnvironmentSpec, folder: Path = FOLDER) -> Reference:
    """What was measured of `spec`.

    Raises:
        ValueError: its file is malformed.
    """
    path = folder / f"{spec.id.replace(':', '_')}.json"
    if not path.exists():
        return NOTHING
    try:
        content = _File.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: malformed reference file: {error}") from error
    if (content.version, content.split_epoch) != (spec.version, spec.split_epoch):
        return NOTHING
    worlds: dict[tuple[str, Split], WorldCount] = {}
    scores: dict[tuple[str, Limits, Split], tuple[Score | None, Score | None]] = {}
    for entry in content.entries:
        options_json = canonical_json(entry.options)
        if entry.worlds is not None:
            worlds[options_json, entry.split] = entry.worlds
        scores[options_json, Limits(**dict(entry.limits)), entry.split] = (entry.floor, entry.ceiling)
    return Reference(worlds, scores)
