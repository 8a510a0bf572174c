"""A run as its folder tells it, at any moment: finished, still going, or killed while it wrote a line.

Knows nothing of how a run is shown.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from turngym_trainer.checkpoint import CHECKPOINTS, checkpoint_iteration, checkpoints
from turngym_trainer.collapse import ALARMS
from turngym_trainer.config import Config
from turngym_trainer.facts import Facts, read_facts
from turngym_trainer.metrics import METRICS, TRAJECTORIES, VALIDATIONS
from turngym_trainer.settings import CONFIG, ConfigError, kept_config

Json = dict[str, object]


class RecordError(RuntimeError):
    """A folder that cannot be read as a run; says what to do."""


@dataclass(frozen=True, slots=True)
class AlarmRecord:
    """One alarm of the guard.

    Attributes:
        kind: which signal raised it.
        attempt: rollbacks of the run before it.
        iteration: in which it was raised; since: in which the signal was first out of bounds; None: not told.
        told: what the guard says of it.
    """

    kind: str
    attempt: int
    iteration: int
    since: int | None
    told: str


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run has written so far.

    Attributes:
        metrics: one mapping an iteration, in order; what a clock said is under `clock/`.
        facts: None: the run was started by a release that wrote none.
        checkpoint: iteration of the newest checkpoint; 0: there is none.
    """

    folder: Path
    config: Config
    metrics: tuple[Mapping[str, float | None], ...]
    facts: Facts | None
    alarms: tuple[AlarmRecord, ...]
    checkpoint: int

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def iteration(self) -> int:
        """The last one that was written down; 0: none was."""
        return int(self.metrics[-1]["iteration"] or 0) if self.metrics else 0

    @property
    def finished(self) -> bool:
        """Its last iteration has its checkpoint."""
        return self.checkpoint >= self.config.run.iterations

    def series(self, name: str) -> tuple[tuple[float, float | None], ...]:
        """(iteration, value) of every line that holds the metric; None where it was not finite."""
        return tuple((line["iteration"] or 0, line[name]) for line in self.metrics if name in line)

    def total(self, *names: str) -> float:
        """Sum of metrics over all iterations; what is missing counts as nothing."""
        return sum(line.get(name) or 0.0 for line in self.metrics for name in names)

    def validation(self) -> Mapping[str, float | None] | None:
        """The line of the last validation; None: there was none."""
        return next((line for line in reversed(self.metrics) if line.get("validation/success") is not None), None)

    def levels(self) -> dict[tuple[str, int, int], bool]:
        """Success of the last validation's episodes; empty where it was not kept.

        By (environment among several, else empty; level seed; noise seed).
        """
        last = self.validation()
        if last is None:
            return {}
        return {
            (str(line.get("environment", "")), cast(int, level["level_seed"]), cast(int, level["noise_seed"])): bool(
                level["success"]
            )
            for line in _lines(self.folder / VALIDATIONS)
            if line["iteration"] == last["iteration"]
            for level in cast(list[Json], line["levels"])
        }

    def episodes(self) -> Iterator[Json]:
        """The logged episodes in the order of play, read one at a time."""
        yield from _lines(self.folder / TRAJECTORIES)


def read_run(folder: Path) -> RecordedRun:
    """Reads a run's folder.

    Raises:
        RecordError: it holds no run, or a file in it is not what a run writes.
    """
    if not (folder / CONFIG).exists():
        raise RecordError(f"{folder} holds no run: there is no {CONFIG} in it; name the run.folder of a training")
    try:
        config = kept_config(folder / CONFIG)
        facts = read_facts(folder)
    except (ConfigError, ValueError) as error:
        raise RecordError(f"{folder}: its settings cannot be read: {error}") from error
    kept = checkpoints(folder / CHECKPOINTS)
    return RecordedRun(
        folder=folder,
        config=config,
        metrics=tuple(_flat(line) for line in _lines(folder / METRICS)),
        facts=facts,
        alarms=tuple(_alarm(line) for line in _lines(folder / ALARMS)),
        checkpoint=checkpoint_iteration(kept[-1]) if kept else 0,
    )


def labels(runs: Sequence[RecordedRun]) -> list[str]:
    """What to call each run: its folder's name, or where that is not one run's alone, the whole path."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.folder) for run, name in zip(runs, names, strict=True)]


def _lines(file: Path) -> Iterator[Json]:
    """Objects of a file of JSON lines, a last one that was cut off in writing left out; none where there is no file."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RecordError(f"{file}: line {number} is no JSON: {error}; it was changed since") from error
            if not isinstance(record, dict):
                raise RecordError(f"{file}: line {number} is no object; it was changed since")
            yield cast(Json, record)


def _flat(line: Json) -> dict[str, float | None]:
    """A line of metrics with its clock's values beside the others; what is no number is left out."""
    clock = line.get("clock")
    timed = {f"clock/{name}": value for name, value in cast(Json, clock).items()} if isinstance(clock, dict) else {}
    return {name: value for name, value in {**line, **timed}.items() if value is None or isinstance(value, int | float)}


def _alarm(line: Json) -> AlarmRecord:
    attempt, iteration, since = line.get("attempt"), line.get("iteration"), line.get("since")
    return AlarmRecord(
        kind=str(line.get("kind", "")),
        attempt=attempt if isinstance(attempt, int) else 0,
        iteration=iteration if isinstance(iteration, int) else 0,
        since=since if isinstance(since, int) else None,
        told=str(line.get("told", "")),
    )
