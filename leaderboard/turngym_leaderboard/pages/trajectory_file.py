"""A trajectories.jsonl, of a training run or of an evaluation, as a list of episodes to look at.

The file may be far larger than memory, and may still be written: it is read once from end to end, line by line, and of
each line its place and a row are kept; an episode is read again when it is looked at. `refresh` reads on from where the
last whole line ended. Knows nothing of pages.
"""

import json
import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, cast

from pydantic import ValidationError

from turngym_leaderboard import record as records
from turngym_leaderboard.pages.episodes import (
    TrainingEpisode,
    evaluated_row,
    evaluated_view,
    training_row,
    training_view,
)
from turngym_leaderboard.pages.views import EpisodeRow, EpisodeView
from turngym_leaderboard.record import EpisodeRecord, Record, RecordError, Trajectory

MOST_BYTES: Final = 64 << 20
"""Of a line. What is longer is no episode that anybody could look at."""
RUN: Final = "run.json"
"""What a training run says of its environments, beside its trajectories."""
_UNREADABLE_NAMED: Final = 5


class CannotView(ValueError):
    """A file or episode that cannot be shown, and why."""


class TrajectoryFile:
    """One file; empty until `refresh`.

    Args:
        path: the file, or the folder of a run or record.
        key: addresses it among several.

    Attributes:
        rows: of the episodes that could be read, in the file's order; a row's number is that of its line.
        title: the file with the folder that it lies in.

    Raises:
        CannotView: there is no such file.
    """

    def __init__(self, path: Path, key: str = "a") -> None:
        self.path = path / records.TRAJECTORIES if path.is_dir() else path
        if not self.path.is_file():
            raise CannotView(f"{self.path} is no file; name a trajectories.jsonl, or the folder of a run or record")
        self.key = key
        self.title = str(Path(*self.path.resolve().parts[-2:]))
        self._identity = (0, 0)
        self._about = _Beside(self.path)
        self._begin()

    @property
    def notices(self) -> tuple[str, ...]:
        """What a reader has to know of the file."""
        said = [self._about.fault] if self._about.fault else []
        if bad := self._unreadable:
            named = ", ".join(map(str, bad[:_UNREADABLE_NAMED])) + (", …" if len(bad) > _UNREADABLE_NAMED else "")
            said.append(f"{len(bad)} of {self._lines} lines are no episodes and are left out: {named}.")
        if self._rest:
            said.append(
                f"The last line is not whole ({self._rest:,} bytes of it are there): the file is still being written, "
                "or was cut off."
            )
        if not self.rows:
            said.append("There is no episode in it yet.")
        return tuple(said)

    def refresh(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Reads what has been added since; begins anew where the file has been replaced or has become shorter.

        Args:
            progress: called now and then with the bytes that were read and those there are.

        Raises:
            CannotView: the file cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
                if identity != self._identity or found.st_size < self._end:
                    self._begin()
                    self._identity = identity
                file.seek(self._end)
                for line, size in _lines(file):
                    if not size:
                        self._rest = len(line)
                        return
                    self._rest = 0
                    self._add(line, size)
                    if self._lines % 256 == 0:
                        progress(self._end, found.st_size)
        except OSError as error:
            raise CannotView(f"{self.path} cannot be read: {error.strerror}") from error

    def at(self, number: int) -> int:
        """Where in `rows` a number stands.

        Raises:
            CannotView: there is none.
        """
        at = bisect_left(self.rows, number, key=lambda row: row.number)
        if at == len(self.rows) or self.rows[at].number != number:
            raise CannotView(f"{self.title} has no episode {number}")
        return at

    def episode(self, number: int) -> EpisodeView:
        """The episode with a row's number.

        Raises:
            CannotView: there is none, or it is no longer what was listed.
        """
        at = self.at(number)
        try:
            with self.path.open("rb") as file:
                file.seek(self._starts[at])
                parsed = _parse(file.read(self._sizes[at]))
        except OSError as error:
            raise CannotView(f"{self.path} cannot be read: {error.strerror}") from error
        key, title = self.rows[at].key, f"Episode {number}"
        if isinstance(parsed, Trajectory):
            about = self._about
            return evaluated_view(
                key,
                title,
                parsed,
                about.episode(parsed),
                environment=about.environment,
                options_json=about.options.get(about.environment, "{}"),
            )
        if isinstance(parsed, TrainingEpisode):
            return training_view(key, title, parsed, options_json=self._about.options.get(parsed.environment, "{}"))
        raise CannotView(f"episode {number} of {self.title} has been changed since it was listed")

    def _begin(self) -> None:
        self.rows: list[EpisodeRow] = []
        self._starts, self._sizes = array("Q"), array("Q")
        self._lines = self._end = self._rest = 0
        self._unreadable: list[int] = []

    def _add(self, line: bytes, size: int) -> None:
        self._lines += 1
        parsed = _parse(line)
        key = f"{self.key}-{self._lines}"
        if isinstance(parsed, Trajectory):
            # Names that come back in every line are kept once.
            parsed = parsed.model_copy(update={"agent": sys.intern(parsed.agent)})
            about = self._about
            row = evaluated_row(self._lines, key, parsed, about.episode(parsed), about.environment)
        elif isinstance(parsed, TrainingEpisode):
            parsed.environment = sys.intern(parsed.environment)
            row = training_row(self._lines, key, parsed)
        else:
            self._unreadable.append(self._lines)
            self._end += size
            return
        self.rows.append(row)
        self._starts.append(self._end)
        self._sizes.append(size)
        self._end += size


class _Beside:
    """What lies beside a file of trajectories and says more of its episodes.

    Attributes:
        environment: of an evaluation; "" of a training run, whose lines name theirs.
        options: resolved, as JSON, by environment.
        fault: a sentence where the record beside the file does not go with it.
    """

    def __init__(self, path: Path) -> None:
        self.environment = ""
        self.options: dict[str, str] = {}
        self.fault = ""
        self._episodes: dict[tuple[str, int, int], EpisodeRecord] = {}
        if (path.parent / records.RECORD).is_file():
            try:
                self._take(records.load(path.parent), path)
            except RecordError as error:
                self.fault = f"The record beside it cannot be read, so verdicts are not known: {error}"
        elif (path.parent / RUN).is_file():
            self.options = _options_of_run(path.parent / RUN)

    def episode(self, trajectory: Trajectory) -> EpisodeRecord | None:
        """What the record says of an episode; None: nothing."""
        return self._episodes.get((trajectory.agent, trajectory.draw, trajectory.attempt))

    def _take(self, record: Record, path: Path) -> None:
        self.environment = record.protocol.environment
        self.options = {self.environment: record.environment.options_json}
        for row in record.rows:
            for episode in row.episodes:
                self._episodes[row.agent, episode.draw, episode.attempt] = episode
        if path.name == records.TRAJECTORIES:
            self.fault = records.trajectories_fault(path.parent, record) or ""


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Each line with its size. A last one that is not whole has size 0; one that is too long is empty."""
    while line := file.readline(MOST_BYTES):
        size = len(line)
        if line.endswith(b"\n"):
            yield line, size
            continue
        if size < MOST_BYTES:
            yield line, 0
            return
        while more := file.readline(MOST_BYTES):
            size += len(more)
            if more.endswith(b"\n"):
                yield b"", size
                break
        else:
            yield line, 0


def _parse(line: bytes) -> Trajectory | TrainingEpisode | None:
    """The episode of a line; None: it is none."""
    models = (Trajectory, TrainingEpisode) if line.startswith(b'{"agent"') else (TrainingEpisode, Trajectory)
    for model in models:
        try:
            return model.model_validate_json(line)
        except ValidationError:
            continue
    return None


def _options_of_run(file: Path) -> dict[str, str]:
    """Options by environment, as far as a training run tells them; what cannot be read is not needed for showing."""
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        told = [held["environment"], *held.get("others", [])]
        return {str(each["id"]): str(each["options_json"]) for each in told}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return cast("dict[str, str]", {})
