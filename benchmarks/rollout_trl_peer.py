"""TRL's rollouts for `rollout_trl.py`, by its `GRPOTrainer`; TRL's virtual environment runs this.

The first line read holds the settings; it is answered with versions. Each further line asks for one rollout of all
episodes and is answered with what it took and what was played.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from turngym_client import AsyncClient, AsyncEpisode, Limits, aconnect

ResultT = TypeVar("ResultT")


class Link:
    """The connection that all environments share: turngym's client, on the event loop where TRL runs tools."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.client: AsyncClient | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.loop = aconnect(self.settings["address"]), loop

    def wait(self, coroutine: Coroutine[object, object, ResultT]) -> ResultT:
        """What a coroutine returns, for a caller outside the loop."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


class Board:
    """An episode, as TRL plays environments: `reset` begins it, and the other public method is the model's tool."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._steps = 0
        self._episode: AsyncEpisode | None = None

    def reset(self, level_seed: int, noise_seed: int, **_: object) -> str:
        """Begins an episode and returns its first observation."""
        settings, client = self._link.settings, self._link.client
        assert client is not None
        self._steps = 0
        self._episode = self._link.wait(
            client.reset(
                settings["environment"],
                options=settings["options"],
                limits=Limits(max_turns=settings["turns"]),
                level_seed=level_seed,
                noise_seed=noise_seed,
            )
        )
        return self._episode.state.observation

    async def play(self) -> str:
        """Plays a turn with an answer that could not be read, which noise never can."""
        assert self._episode is not None
        await self._episode.step("")
        self._steps += 1
        return self._episode.state.observation


class Timed(GRPOTrainer):
    """Notes when its completions were all there, and what they are."""

    ended: tuple[float, float]
    made: tuple[Any, ...]

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self.made = super()._generate(prompts)
        self.ended = time.perf_counter(), time.process_time()
        return self.made


def trainer_of(settings: Mapping[str, Any], link: Link, folder: str) -> Timed:
    """A trainer whose every answer is `answer_tokens` long and calls the tool."""
    tokenizer = AutoTokenizer.from_pretrained(settings["policy"])
    tokenizer.chat_template = settings["chat_template"]
    tokenizer.response_template = settings["response_template"]
    episodes = settings["episodes"]
    answer = settings["answer_tokens"]
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32),
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            per_device_train_batch_size=len(episodes),
            num_generations=settings["group_size"],
            max_completion_length=settings["completion_tokens"],
            max_tool_calling_iterations=settings["turns"],
            generation_kwargs={"max_new_tokens": answer, "min_new_tokens": answer},
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list(episodes),
        processing_class=tokenizer,
        environment_factory=lambda: Board(link),
    )
    trainer.model.train()
    return trainer


def play(trainer: Timed, link: Link, episodes: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """One rollout."""
    began, cpu_began = time.perf_counter(), time.process_time()
    trainer._generate_and_score_completions(list(episodes))
    ended, cpu_ended = trainer.ended
    prompts, completions, is_sampled, *_ = trainer.made
    boards: list[Board] = trainer.environments
    assert link.client is not None
    link.wait(link.client.close_many([board._episode for board in boards if board._episode is not None]))
    return {
        "seconds": ended - began,
        "cpu_seconds": cpu_ended - cpu_began,
        "turns": [board._steps for board in boards],
        "sampled": [sum(mask) for mask in is_sampled],
        "context": [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)],
    }


def main() -> None:
    # Libraries print; what is said to the other side must be alone on its line.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    transformers.logging.disable_progress_bar()
    settings = json.loads(sys.stdin.readline())
    torch.set_num_threads(settings["threads"])
    link = Link(settings)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(settings, link, folder)
        link.open(trainer.async_loop)
        print(json.dumps({name: version(name) for name in ("trl", "torch", "transformers")}), file=answers)
        for _ in sys.stdin:
            print(json.dumps(play(trainer, link, settings["episodes"])), file=answers)


if __name__ == "__main__":
    main()
