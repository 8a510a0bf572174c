"""Checkpoints: everything that a run needs to go on as if it had never stopped.

A checkpoint is a folder in Hugging Face's layout (`config.json`, `model.safetensors`, the tokenizer), so transformers
loads it as it is, with a folder `training` beside the model: optimisers and critic as safetensors, counters and the
like as JSON. Nothing is pickled. It is written aside, forced to disk and renamed: a folder with a checkpoint's name is
whole.
"""

import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

import turngym
from turngym_client import EnvironmentInfo
from turngym_trainer.held import Held, save_held
from turngym_trainer.sharded import like, whole
from turngym_trainer.update import Learner

CHECKPOINTS = "checkpoints"
"""Where a run's checkpoints are, in its folder."""
_PREFIX = "iteration-"
TRAINING = "training"
"""Folder of a checkpoint in which everything lies that is not the policy."""


ADAPTERS = "adapters.safetensors"

_LOG = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, or not for this run."""


@dataclass(frozen=True, slots=True)
class EnvironmentIdentity:
    """What must not change under a run: another of these makes other episodes from the same seeds."""

    id: str
    version: str
    split_epoch: int
    options_json: str
    limits: dict[str, float]

    @staticmethod
    def of(info: EnvironmentInfo) -> "EnvironmentIdentity":
        """Identity of an environment as the server resolved it."""
        return EnvironmentIdentity(info.id, info.version, info.split_epoch, info.options_json, asdict(info.limits))


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    Attributes:
        iteration: always advances; schedules, validations and checkpoints go by it.
        update: iterations that took at least one optimiser step.
        optimiser_step: optimiser steps taken.
        refused: steps refused because they were not finite.
        attempt: rollbacks so far.
        averages: moving averages of the signals.
        seen: by the guard, as plain data; see `guard.Watch`.
        phase: among those of the horizon, as plain data; see `schedule.Phase`.
        sizes: bytes of the run's files up to here.
    """

    iteration: int = 0
    update: int = 0
    optimiser_step: int = 0
    refused: int = 0
    attempt: int = 0
    averages: dict[str, float] = field(default_factory=dict[str, float])
    seen: dict[str, object] = field(default_factory=dict[str, object])
    phase: dict[str, object] = field(default_factory=dict[str, object])
    sizes: dict[str, int] = field(default_factory=dict[str, int])


def versions() -> dict[str, str]:
    """Versions that a run's last bits depend on."""
    return {
        "python": platform.python_version(),
        "turngym": turngym.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }


def tell_other_versions(then: Mapping[str, str]) -> None:
    """Warns where something goes on with other packages, and so may round otherwise than it did."""
    now = versions()
    if other := [f"{name} was {was}, is {now.get(name)}" for name, was in then.items() if now.get(name) != was]:
        _LOG.warning("resumed with other versions, so not bit for bit as it would have gone on: %s", "; ".join(other))


def save_checkpoint(
    folder: Path,
    learner: Learner,
    progress: Progress,
    environments: Sequence[EnvironmentIdentity],
    config: dict[str, object],
    keep: int,
    held: Held | None = None,
) -> Path:
    """Writes a checkpoint under `folder` and removes all but the newest `keep`.

    Of several processes all call it, and the first one writes; files are the same for any number of them.

    Returns:
        The checkpoint's folder.
    """
    final = folder / f"{_PREFIX}{progress.iteration:06d}"
    aside = folder / f".writing-{progress.iteration:06d}"
    training = aside / TRAINING
    if learner.group.first:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
    learner.save_policy(aside)
    for name, tensors in _learner_tensors(learner):
        if learner.group.first:
            training.mkdir(exist_ok=True)
            save_file(tensors, training / name)
    if learner.group.first:
        _finish(aside, final, progress, environments, config, held)
        for old in checkpoints(folder)[:-keep]:
            remove(old)
    learner.group.exchange(None)  # None of the others looks for it before it is there.
    return final


def _learner_tensors(learner: Learner) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What is kept of a learner beside its policy, file by file; empty but in the first process."""
    keep = learner.group.first
    with learner.float32_weights():
        if learner.adapters is not None:
            yield ADAPTERS, whole(learner.adapters.tensors(), keep=keep)
        if learner.critic is not None:
            yield "critic.safetensors", whole(learner.critic.state_dict(), keep=keep)
    for name, optimiser in learner.optimisers.items():
        yield f"{name}_optimiser.safetensors", whole(optimiser_tensors(optimiser), keep=keep)


def _finish(
    aside: Path,
    final: Path,
    progress: Progress,
    environments: Sequence[EnvironmentIdentity],
    config: dict[str, object],
    held: Held | None,
) -> None:
    """Writes what is no tensor of the learner's, forces all to disk and gives the checkpoint its name."""
    training = aside / TRAINING
    if held is not None:
        save_held(training, held)
    state = {
        "progress": asdict(progress),
        "environment": asdict(environments[0]),
        **({"others": [asdict(other) for other in environments[1:]]} if len(environments) > 1 else {}),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "config": config,
    }
    (training / "state.json").write_text(_as_json(state), encoding="utf-8")
    put_in_place(aside, final)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints under a folder, the newest last."""
    return sorted(folder.glob(f"{_PREFIX}*"))


def checkpoint_iteration(checkpoint: Path) -> int:
    """The iteration after which a checkpoint was made, by its name."""
    return int(checkpoint.name.removeprefix(_PREFIX))


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint says beside weights.

    Attributes:
        threads: torch threads that the run had; another number rounds otherwise.
        versions: see `versions`.
        config: the run's settings as nested plain values.
        others: the further environments of a mixture, in its order.
    """

    progress: Progress
    environment: EnvironmentIdentity
    threads: int
    versions: dict[str, str]
    config: dict[str, object]
    others: tuple[EnvironmentIdentity, ...] = ()


def read_state(checkpoint: Path) -> State:
    """Reads what a checkpoint says beside weights.

    Raises:
        CheckpointError: the folder is not a checkpoint of this trainer.
    """
    file = checkpoint / TRAINING / "state.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        return State(
            progress=Progress(**state["progress"]),
            environment=EnvironmentIdentity(**state["environment"]),
            threads=int(state["threads"]),
            versions=state["versions"],
            config=state["config"],
            others=tuple(EnvironmentIdentity(**other) for other in state.get("others", [])),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint} is no checkpoint of a training run: {file}: {error}") from error


def roll_back(folder: Path, before: int, attempt: int) -> Path | None:
    """Makes the newest checkpoint of an iteration under `before` the newest of all, from which the run goes on anew.

    Args:
        folder: of the checkpoints.
        attempt: rollbacks of the run, this one included.

    Returns:
        The checkpoint; None: there is none that old, and nothing was done.
    """
    sound = [each for each in checkpoints(folder) if read_state(each).progress.iteration < before]
    if not sound:
        return None
    # The newest first: wherever this is cut off, what is left is a run that comes to the same alarm again.
    for later in reversed(checkpoints(folder)[len(sound) :]):
        remove(later)
    file = sound[-1] / TRAINING / "state.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    state["progress"]["attempt"] = attempt
    aside = file.with_name(".state.json")
    aside.write_text(_as_json(state), encoding="utf-8")
    _force(aside)
    aside.replace(file)
    _force(file.parent)
    return sound[-1]


def load_learner(checkpoint: Path, learner: Learner) -> None:
    """Restores critic, adapters and optimisers of a learner whose policy was loaded from the same checkpoint.

    With adapters the policy is the one that they were put beside, since a checkpoint's has them merged.
    """
    training = checkpoint / TRAINING
    if learner.adapters is not None:
        with learner.float32_weights():
            learner.adapters.load(load_file(training / ADAPTERS))
    if learner.critic is not None:
        with learner.float32_weights():
            state = learner.critic.state_dict()
            read = load_file(training / "critic.safetensors")
            learner.critic.load_state_dict({name: like(tensor, state[name]) for name, tensor in read.items()})
    for name, optimiser in learner.optimisers.items():
        restore_optimiser(optimiser, load_file(training / f"{name}_optimiser.safetensors"))


def check_same_environment(then: EnvironmentIdentity, now: EnvironmentIdentity) -> None:
    """Refuses to go on in another environment than before.

    Raises:
        CheckpointError: naming what differs.
    """
    before, after = asdict(then), asdict(now)
    differences = [f"{key} was {before[key]}, is {after[key]}" for key in before if before[key] != after[key]]
    if differences:
        raise CheckpointError(
            f"the server's {now.id} is not what this run was trained on: {'; '.join(differences)}. The same seeds "
            "would make other episodes. Serve it as it was, or start a new run from this checkpoint (policy.model)"
        )


def _as_json(state: Mapping[str, object]) -> str:
    return json.dumps(state, indent=1, ensure_ascii=False)


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of each parameter under `index.name`; rates and the like are settings and come from there."""
    states = cast(dict[int, dict[str, Tensor]], optimiser.state_dict()["state"])
    return {f"{index}.{name}": tensor for index, of in states.items() for name, tensor in of.items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Takes over what `optimiser_tensors` returned."""
    parameters = [parameter for group in optimiser.param_groups for parameter in cast(list[Tensor], group["params"])]
    states: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        # A copy: what was read lies at whatever address it has in the file.
        copied = tensor.clone()
        of_each_weight = tensor.shape == parameters[int(index)].shape
        states.setdefault(int(index), {})[name] = like(copied, parameters[int(index)]) if of_each_weight else copied
    optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})


def put_in_place(aside: Path, final: Path) -> None:
    """Forces a folder that was written aside to disk and gives it its name, in place of what has it."""
    for path in [*aside.rglob("*"), aside]:
        _force(path)
    remove(final)
    aside.rename(final)
    _force(final.parent)


def _force(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint, renamed first: half of one must not have a checkpoint's name."""
    if checkpoint.exists():
        doomed = checkpoint.with_name(f".removing-{checkpoint.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)
