"""What a run writes down as it goes: metrics.jsonl, trajectories.jsonl, validations.jsonl, TensorBoard's event files.

One line of metrics.jsonl is one iteration, one of validations.jsonl a validation with its levels one by one. What a
clock said is under the key `clock` of metrics.jsonl and nowhere else: all other fields of a resumed run equal those of
an undisturbed one. The JSON files are cut back to a checkpoint by their sizes.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.utils.tensorboard import SummaryWriter

from turngym_trainer.evaluate import LevelResult
from turngym_trainer.trajectory import Trajectory

METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories.jsonl"
VALIDATIONS = "validations.jsonl"
_FILES = (METRICS, TRAJECTORIES, VALIDATIONS)

Number = float | int | None


class RunLog:
    """The open files of a run. A context manager.

    Args:
        folder: the run's.
        sizes: bytes of each JSON file that belong to the run so far; what lies behind is cut off.
        iteration: the last one that belongs to the run so far.

    Raises:
        ValueError: a file is shorter than `sizes` says.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], iteration: int) -> None:
        for name in _FILES:
            _cut(folder / name, sizes.get(name, 0))
        self._files = {name: (folder / name).open("ab") for name in _FILES}
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._board.close()

    def write_metrics(self, iteration: int, metrics: Mapping[str, Number], clock: Mapping[str, float]) -> None:
        """Writes one iteration's line. Numbers that are not finite become null: JSON has none."""
        finite = {name: value for name, value in metrics.items() if value is None or math.isfinite(value)}
        record = {**{name: finite.get(name) for name in metrics}, "clock": dict(clock)}
        self._write(METRICS, record)
        for name, value in finite.items():
            if value is not None and "/" in name:
                self._board.add_scalar(name, value, iteration)
        for name, value in clock.items():
            self._board.add_scalar(f"clock/{name}", value, iteration)
        self._board.flush()

    def write_trajectories(self, iteration: int, graded: Iterable[tuple[Trajectory, float, bool]]) -> None:
        """Writes one line for each episode with its reward (shaping included) and whether its group was kept."""
        for trajectory, reward, kept in graded:
            self._write(TRAJECTORIES, {"iteration": iteration, **_episode(trajectory), "reward": reward, "kept": kept})

    def write_validation(self, iteration: int, levels: Iterable[LevelResult], environment: str = "") -> None:
        """Writes one line: what each level came to, so that runs can be compared on the same worlds.

        `environment` is the name of one among several; each has its line.
        """
        named = {"environment": environment} if environment else {}
        self._write(VALIDATIONS, {"iteration": iteration, **named, "levels": [asdict(level) for level in levels]})

    def sizes(self) -> dict[str, int]:
        """Bytes written so far, once they are safely on disk."""
        sizes: dict[str, int] = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
        return sizes

    def _write(self, name: str, record: Mapping[str, object]) -> None:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self._files[name].write(line.encode() + b"\n")
        self._files[name].flush()


class NoLog:
    """What a process has in place of a `RunLog` when another one of its run writes."""

    def write_metrics(self, iteration: int, metrics: Mapping[str, Number], clock: Mapping[str, float]) -> None:
        """Writes nothing."""

    def write_trajectories(self, iteration: int, graded: Iterable[tuple[Trajectory, float, bool]]) -> None:
        """Writes nothing."""

    def write_validation(self, iteration: int, levels: Iterable[LevelResult], environment: str = "") -> None:
        """Writes nothing."""

    def sizes(self) -> dict[str, int]:
        """Nothing: the one that writes keeps them."""
        return {}


def read_metrics(folder: Path) -> list[dict[str, object]]:
    """The lines of a run's metrics.jsonl, a last one that was cut off in writing left out."""
    lines = (folder / METRICS).read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def _cut(file: Path, size: int) -> None:
    held = file.stat().st_size if file.exists() else 0
    if held < size:
        raise ValueError(
            f"{file} has {held} bytes, but its checkpoint was made when it had {size}: it was changed since"
        )
    file.touch()
    os.truncate(file, size)


def _episode(trajectory: Trajectory) -> dict[str, object]:
    return {
        "environment": trajectory.environment,
        "group": trajectory.group,
        "member": trajectory.member,
        "level_seed": trajectory.level_seed,
        "noise_seed": trajectory.noise_seed,
        "world_id": trajectory.world_id,
        "success": trajectory.success,
        "terminated": trajectory.terminated,
        "truncated": trajectory.truncated,
        "outgrown": trajectory.outgrown,
        "digest": trajectory.digest,
        "environment_return": trajectory.environment_return,
        "turns": [
            {
                "observation": turn.prompt,
                "response": turn.response,
                "reasoning": turn.reasoning,
                "actions": turn.actions,
                "actions_executed": turn.actions_executed,
                "reward": turn.reward,
                "valid_format": turn.valid_format,
                "valid_action": turn.valid_action,
                **({} if turn.process is None else {"process": turn.process}),
            }
            for turn in trajectory.turns
        ],
        "last_observation": trajectory.turns[-1].observation if trajectory.turns else None,
    }
