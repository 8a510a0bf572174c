"""An unfinished warm start: what it needs to go on as if it had never stopped.

Kept in the warm start's own folder after each check, and gone once the policy is there. The weights are those that are
trained, beside the policy that `policy.model` names; what was shown is shown again, and compared by its digest.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from turngym_trainer.checkpoint import CheckpointError, EnvironmentIdentity, put_in_place, remove

UNFINISHED: Final = "unfinished"
"""Folder of these states, of which the newest counts."""
_PREFIX: Final = "step-"
_STATE: Final = "state.json"
_WEIGHTS: Final = "weights.safetensors"
_OPTIMISER: Final = "optimiser.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Where a warm start stands.

    Attributes:
        step: optimiser steps taken. epoch: passes over what is shown that have begun.
        order: rows that are left of those passes, in order.
        shown: digest of what is shown.
        checks: those made so far, as plain data.
        environments: of the settings, in their order.
        threads: torch's. versions: see `checkpoint.versions`.
        config: the settings as nested plain values.
    """

    step: int
    epoch: int
    order: tuple[int, ...]
    shown: str
    checks: tuple[dict[str, Any], ...]
    environments: tuple[EnvironmentIdentity, ...]
    threads: int
    versions: dict[str, str]
    config: dict[str, object]


def keep(folder: Path, state: Unfinished, weights: Sequence[Tensor], optimiser: dict[str, Tensor]) -> None:
    """Writes a state aside, forces it to disk, gives it its name and removes those before it.

    Args:
        folder: of the warm start.
        weights: those that are trained, in the order of the model's.
    """
    home = folder / UNFINISHED
    aside, final = home / ".writing", home / f"{_PREFIX}{state.step:08d}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file({str(index): weight.detach().contiguous() for index, weight in enumerate(weights)}, aside / _WEIGHTS)
    save_file(optimiser, aside / _OPTIMISER)
    (aside / _STATE).write_text(json.dumps(asdict(state), ensure_ascii=False), encoding="utf-8")
    put_in_place(aside, final)
    for earlier in _states(folder)[:-1]:
        remove(earlier)


def read(folder: Path) -> Unfinished:
    """The newest state of a warm start.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    states = _states(folder)
    if not states:
        raise CheckpointError(f"{folder} holds no unfinished warm start: none was stopped there after its first check")
    file = states[-1] / _STATE
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        return Unfinished(
            step=int(told["step"]),
            epoch=int(told["epoch"]),
            order=tuple(told["order"]),
            shown=told["shown"],
            checks=tuple(told["checks"]),
            environments=tuple(EnvironmentIdentity(**each) for each in told["environments"]),
            threads=int(told["threads"]),
            versions=told["versions"],
            config=told["config"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} holds no unfinished warm start that can be read: {file}: {error}") from error


def read_tensors(folder: Path) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Weights and optimiser of the newest state, as `keep` took them."""
    newest = _states(folder)[-1]
    weights = load_file(newest / _WEIGHTS)
    return [weights[str(index)] for index in range(len(weights))], load_file(newest / _OPTIMISER)


def discard(folder: Path) -> None:
    """Removes what was kept of a warm start that is finished."""
    remove(folder / UNFINISHED)


def _states(folder: Path) -> list[Path]:
    return sorted((folder / UNFINISHED).glob(f"{_PREFIX}*"))
