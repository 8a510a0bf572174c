"""Small training runs for tests: their settings, where to cut them, and what makes two of them the same."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from turngym_trainer.checkpoint import checkpoints
from turngym_trainer.metrics import read_metrics
from turngym_trainer.settings import load_config

SMALL = [
    "environment.id=sokoban",
    "environment.max_turns=3",
    "environment.reward_range=10.0",
    "run.iterations=4",
    "rollout.groups=3",
    "rollout.group_size=4",
    "rollout.context_turns=1",
    "rollout.instructions=none",
    "rollout.max_response_tokens=12",
    "rollout.parts=2",
    "update.minibatch_episodes=5",
    "update.microbatch_tokens=500",
    "critic.warmup_iterations=1",
    "validation.every=2",
    "validation.episodes=4",
    "checkpoint.every=2",
]


def small(server, novice, folder, *settings, preset="starpo_s"):
    return load_config(
        preset=preset,
        settings=[*SMALL, f"run.server={server}", f"policy.model={novice}", f"run.folder={folder}", *settings],
    )


class Interruption(Exception):
    pass


def stop_at(iteration):
    def observe(metrics):
        if metrics["iteration"] == iteration:
            raise Interruption

    return observe


def timeless(folder):
    """A run's metrics without what a clock said."""
    return [{key: value for key, value in line.items() if key != "clock"} for line in read_metrics(folder)]


def assert_same_run(one: Path, other: Path):
    """Metrics, trajectories, validations, weights and optimiser states are equal to the last bit."""
    assert timeless(one) == timeless(other)
    for name in ("trajectories.jsonl", "validations.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    last, last_other = checkpoints(one / "checkpoints")[-1], checkpoints(other / "checkpoints")[-1]
    assert last.name == last_other.name
    files = sorted(path.relative_to(last) for path in last.rglob("*.safetensors"))
    assert files
    for file in files:
        tensors, others = load_file(last / file), load_file(last_other / file)
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, others[name]), f"{file}: {name}"


BREAKS = [
    "update.learning_rate=0.3",
    "run.iterations=8",
    "validation.every=0",
    "checkpoint.every=1",
    "checkpoint.keep=20",
]
"""A rate at which the novice forgets the form of an answer within a few updates."""


def breaking(server, novice, folder, *settings):
    return small(server, novice, folder, *BREAKS, *settings, preset="grpo")
