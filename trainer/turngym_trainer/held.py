"""Episodes that were played for iterations to come (`rollout.reuse`), and how a checkpoint keeps them.

One policy version plays the groups of several iterations; each iteration learns from those that are due. What is left
lies in checkpoints, arrays as safetensors and the rest as JSON, so that a run resumed in between learns from the same
episodes. Knows nothing of policies, rewards or servers.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from turngym_trainer.trajectory import Row, Trajectory, TurnRecord

_ARRAYS: Final = "held.safetensors"
_REST: Final = "held.json"
_ROW_ARRAYS: Final = tuple(field.name for field in fields(Row))
_ARRAY_FIELDS: Final = ("rows", "turns", "last_prompt", "old_logprobs")
"""Fields of a trajectory that JSON does not hold as they are."""


@dataclass(frozen=True, slots=True)
class Held:
    """Episodes that one policy version played.

    Attributes:
        iteration: for which they were played first; its groups come first, those of the next one follow, and so on.
        attempt: see `seeds`.
        max_turns: that they were allowed; 0: the environment's default.
        trajectories: those that are left.
    """

    iteration: int
    attempt: int
    max_turns: int
    trajectories: tuple[Trajectory, ...]

    def due(self, iteration: int, groups: int) -> tuple[Trajectory, ...]:
        """Episodes that an iteration learns from, where each iteration has so many groups."""
        return tuple(each for each in self.trajectories if self._for(each, groups) == iteration)

    def after(self, iteration: int, groups: int) -> "Held | None":
        """What is left after an iteration; None: nothing."""
        left = tuple(each for each in self.trajectories if self._for(each, groups) > iteration)
        return replace(self, trajectories=left) if left else None

    def _for(self, trajectory: Trajectory, groups: int) -> int:
        return self.iteration + trajectory.group // groups


def left_of_block(iteration: int, reuse: int) -> int:
    """Iterations from this one (from 1) to the last that learns from the same policy version's episodes."""
    return reuse - (iteration - 1) % reuse


def save_held(folder: Path, held: Held) -> None:
    """Writes what is held into a folder."""
    rows = [row for trajectory in held.trajectories for row in trajectory.rows]
    prompts = [each.last_prompt for each in held.trajectories if each.last_prompt is not None]
    old = [each.old_logprobs for each in held.trajectories if each.old_logprobs is not None]
    arrays = {name: np.concatenate([getattr(row, name) for row in rows]) for name in _ROW_ARRAYS}
    arrays["last_prompt"] = np.concatenate([np.zeros(0, np.int64), *prompts])
    arrays["old_logprobs"] = np.concatenate([np.zeros(0, np.float32), *old])
    save_file(arrays, folder / _ARRAYS)
    rest = {
        "iteration": held.iteration,
        "attempt": held.attempt,
        "max_turns": held.max_turns,
        "trajectories": [_plain(trajectory) for trajectory in held.trajectories],
    }
    (folder / _REST).write_text(json.dumps(rest, ensure_ascii=False), encoding="utf-8")


def load_held(folder: Path) -> Held | None:
    """What `save_held` wrote into a folder; None: nothing was held."""
    if not (folder / _REST).exists():
        return None
    rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
    cut = _Cutter(load_file(folder / _ARRAYS))
    trajectories: list[Trajectory] = []
    for plain in rest["trajectories"]:
        lengths, prompt, old = plain.pop("row_lengths"), plain.pop("prompt_length"), plain.pop("old_length")
        turns = tuple(TurnRecord(actions=tuple(turn.pop("actions")), **turn) for turn in plain.pop("turns"))
        trajectories.append(
            Trajectory(
                **plain,
                rows=tuple(Row(**{name: cut(name, length) for name in _ROW_ARRAYS}) for length in lengths),
                turns=turns,
                last_prompt=None if prompt is None else cut("last_prompt", prompt),
                old_logprobs=None if old is None else cut("old_logprobs", old),
            )
        )
    return Held(rest["iteration"], rest["attempt"], rest["max_turns"], tuple(trajectories))


class _Cutter:
    """Takes pieces off the front of each array."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._arrays = arrays

    def __call__(self, name: str, length: int) -> NDArray[Any]:
        piece, self._arrays[name] = np.split(self._arrays[name], [length])
        return piece.copy()


def _plain(trajectory: Trajectory) -> dict[str, object]:
    names = [field.name for field in fields(Trajectory) if field.name not in _ARRAY_FIELDS]
    return {
        **{name: getattr(trajectory, name) for name in names},
        "turns": [asdict(turn) for turn in trajectory.turns],
        "row_lengths": [len(row.ids) for row in trajectory.rows],
        "prompt_length": None if trajectory.last_prompt is None else len(trajectory.last_prompt),
        "old_length": None if trajectory.old_logprobs is None else len(trajectory.old_logprobs),
    }
