"""An optimiser step of the trainer, beside a bare forward and backward pass over the same tokens.

Episodes of five turns with full history, one row each, a fifth of whose tokens are actions, of unequal lengths. The
trainer's step is `Learner.update` with one mini-batch of all episodes: micro-batches, clipped surrogate with its
statistics, gradient norm, AdamW. The bare pass reads the same rows in the same micro-batches, takes the output layer at
the same positions, and sends the mean log-probability back: no loss of reinforcement learning, no optimiser. The
log-probabilities that the ratio is taken against are computed before, and not timed. Both are timed in turns, and
ratios taken within a turn; one turn before is left out.

    python benchmarks/update_step.py

Goal: 1.15 times as long, for a policy of 100 million parameters or more. Prints the results; writes them beside this
file as .txt, and as .json with what made them. Exit status 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import os
import time
from importlib.metadata import version
from typing import Final, cast

import measure
import numpy as np
import torch
from numpy.typing import NDArray

from turngym_trainer import seeds
from turngym_trainer.batch import Batch, lay_out
from turngym_trainer.logprobs import hidden_states
from turngym_trainer.policy import load_policy
from turngym_trainer.settings import load_config
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord
from turngym_trainer.update import Learner, Lesson

GOAL: Final = 1.15
TURNS: Final = 5
OBSERVATION: Final = (30, 50)
"""Tokens of an observation, from and to."""
ACTION: Final = 10
"""Tokens of an answer."""
LEAST_PARAMETERS: Final = 100_000_000
LENGTH_LIMIT: Final = TURNS * ACTION


def episodes(count: int, vocabulary: int) -> Batch:
    """Random episodes; what their tokens are does not matter to how long a pass takes."""
    rng = np.random.default_rng(0)
    turn = TurnRecord("", "", "", ("a",), 0.0, True, True, 1)

    def row() -> Row:
        pieces = [
            np.full(length, number)
            for turn_number in range(TURNS)
            for length, number in ((rng.integers(*OBSERVATION), -1), (ACTION, turn_number))
        ]
        turns = np.concatenate(pieces)
        return Row(rng.integers(0, vocabulary, len(turns)), turns >= 0, turns, np.zeros(len(turns), dtype=np.float32))

    return lay_out(
        [
            Trajectory("none", number, 0, 0, 0, "", None, True, False, "", (row(),), (turn,) * TURNS)
            for number in range(count)
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--policy", default="smollm2", help="tiny, smollm2, or a folder")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--microbatch-tokens", type=int, default=1_024)
    parser.add_argument("--threads", type=int, default=0, help="torch's; 0: one for each core")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="update_step", help="of the files that are written")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or os.cpu_count() or 1)
    load = os.getloadavg()[0]

    policy = load_policy(arguments.policy, device=arguments.device)
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    batch = episodes(arguments.episodes, policy.model.config.vocab_size)
    settings = [
        f"update.microbatch_tokens={arguments.microbatch_tokens}",
        f"update.minibatch_episodes={arguments.episodes}",
        "update.epochs=1",
        "update.learning_rate=1e-6",
        "kl.coefficient=0",
    ]
    learner = Learner(
        policy, load_config(settings=settings), length_limit=LENGTH_LIMIT, with_critic=False, reference=None
    )
    everyone: NDArray[np.int64] = np.arange(int(arguments.episodes))
    nobody: NDArray[np.int64] = np.arange(0)
    rng = np.random.default_rng(1)
    lesson = Lesson(
        batch=batch,
        old_logprobs=learner.logprobs(batch),
        advantages=rng.normal(size=len(batch.logprobs)),
    )

    def wait() -> None:
        if policy.device.type == "cuda":
            torch.cuda.synchronize()

    def step() -> float:
        wait()
        began = time.perf_counter()
        report = learner.update(
            lesson, actor_episodes=everyone, critic_episodes=nobody, place=seeds.Place(iteration=1, attempt=0)
        )
        wait()
        if report.actor_steps != 1:
            raise RuntimeError(f"one optimiser step was to be timed, and {report.actor_steps} were taken")
        return time.perf_counter() - began

    def bare() -> float:
        wait()
        began = time.perf_counter()
        head = cast(torch.nn.Module, policy.model.get_output_embeddings())
        for part in learner.scorer.micro_batches(batch, np.arange(len(batch.rows)), arguments.microbatch_tokens):
            logits: torch.Tensor = head(hidden_states(policy.model.base_model, part))
            loss = torch.nn.functional.cross_entropy(logits.float(), part.targets)
            cast(None, loss.backward())  # pyright: ignore[reportUnknownMemberType]
        wait()
        taken = time.perf_counter() - began
        policy.model.zero_grad(set_to_none=True)
        return taken

    pairs: list[tuple[float, float]] = []
    for number in range(arguments.repeats + 1):
        if number % 2:
            ours, theirs = step(), bare()
        else:
            theirs, ours = bare(), step()
        pairs.append((ours, theirs))
    counted = pairs[1:]
    ratio = measure.summary([ours / theirs for ours, theirs in counted])
    reached = ratio["median"] <= GOAL
    judged = parameters >= LEAST_PARAMETERS
    tokens = sum(len(row.ids) for row in batch.rows)
    taken = {
        "step": measure.summary([ours for ours, _ in counted]),
        "bare": measure.summary([theirs for _, theirs in counted]),
    }
    text = "\n".join(
        [
            f"{arguments.policy}: {parameters / 1e6:.0f} M parameters, on {policy.device}",
            f"    {arguments.episodes} episodes, {tokens:,} tokens, {len(batch.logprobs):,} of them actions",
            f"    trainer's step {spread(taken['step'])} s, bare forward and backward {spread(taken['bare'])} s",
            f"    {spread(ratio)} times as long",
            f"    {'reached' if reached else 'MISSED'}: goal at most {GOAL} times"
            if judged
            else f"    the goal is for {LEAST_PARAMETERS / 1e6:.0f} M parameters or more",
        ]
    )
    print(text)
    measure.write(
        arguments.name,
        {
            "torch": version("torch"),
            "transformers": version("transformers"),
            "threads": torch.get_num_threads(),
            "load_before": load,
            "policy": arguments.policy,
            "parameters": parameters,
            "tokens": tokens,
            "action_tokens": len(batch.logprobs),
            "seconds": taken,
            "ratio": ratio,
            "goal": GOAL,
            "reached": reached if judged else None,
        },
        text,
        command=f"python benchmarks/update_step.py --policy {arguments.policy} --device {arguments.device}",
    )
    if judged and not reached:
        raise SystemExit(1)


def spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['least']:.2f} … {values['most']:.2f})"


if __name__ == "__main__":
    main()
