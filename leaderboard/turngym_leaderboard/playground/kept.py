"""What is kept of a person's episode: one line of JSON, appended whole to a file.

The form is that of a training run's trajectories.jsonl, with what a run tells beside it in the line itself: version,
options, limits, split and action separator. `trainer warm-start` learns from it and `leaderboard view` shows it. Knows
nothing of how an episode is played or shown.
"""

import fcntl
import os
from pathlib import Path
from typing import Literal

from turngym_leaderboard.record import LimitsRecord, Model, Seed


class CannotKeep(Exception):
    """The file cannot be written. Says why."""


class KeptTurn(Model):
    """One turn. `observation` is what was read before it.

    Attributes:
        advised: the oracle had been asked on this level, by then or in another episode; it may tell more than a turn.
    """

    observation: str
    reasoning: str
    actions: tuple[str, ...]
    actions_executed: int
    reward: float
    valid_format: Literal[True] = True
    valid_action: bool
    advised: bool


class KeptEpisode(Model):
    """One line.

    Attributes:
        player: "person", or "person and oracle" where the oracle was asked in any turn.
        digest: the server's, hexadecimal.
        kept_at: ISO 8601 in UTC.
    """

    player: Literal["person", "person and oracle"]
    environment: str
    version: str
    options_json: str
    limits: LimitsRecord
    split: str
    split_epoch: int
    action_separator: str
    level_seed: Seed
    noise_seed: Seed
    instance_id: str
    world_id: str
    success: bool | None
    terminated: bool
    truncated: bool
    end_reason: str
    digest: str
    environment_return: float
    turns: tuple[KeptTurn, ...]
    last_observation: str
    kept_at: str


class KeptFile:
    """A file of kept episodes, made where there is none. Several programs may append to it at once.

    Raises:
        CannotKeep: it cannot be appended to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._append(b"")

    def append(self, episode: KeptEpisode) -> None:
        """Writes one line, through to the disk. What cannot be written whole leaves nothing.

        Raises:
            CannotKeep: it could not be written.
        """
        self._append(episode.model_dump_json().encode() + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            made = not self.path.exists()
            with self.path.open("a+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = file.seek(0, os.SEEK_END)
                try:
                    _write(file.fileno(), b"\n" + line if line and size and not _ends_a_line(file.fileno()) else line)
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), size)
                    raise
            if made:
                _sync_folder(self.path.parent)
        except OSError as error:
            raise CannotKeep(f"{self.path} cannot be written: {error.strerror}") from error


def _write(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]


def _ends_a_line(file: int) -> bool:
    """Whether the last byte is a line end: a line that somebody else left unfinished must not swallow the next one."""
    return os.pread(file, 1, os.fstat(file).st_size - 1) == b"\n"


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
