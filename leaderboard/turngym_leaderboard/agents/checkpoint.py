"""A policy that the trainer wrote, or any causal language model in Hugging Face's layout, as an agent.

The only module of the leaderboard that imports the trainer (and torch with it): what the policy reads and how it
samples is the trainer's own code, so an agent is scored as it was trained. It is imported when a checkpoint is asked
for and not before.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from turngym_client import parse_answer
from turngym_leaderboard.agents import AgentFault, AgentUnavailable, Reply, Seat, View
from turngym_leaderboard.protocol import Decoding
from turngym_trainer.cache import Memory
from turngym_trainer.checkpoint import CheckpointError, State, read_state
from turngym_trainer.config import Config
from turngym_trainer.context import Context, Conversation, system_message
from turngym_trainer.evaluate import context_of
from turngym_trainer.generate import Response, generate
from turngym_trainer.mixture import environments
from turngym_trainer.policy import ChatFormat, load_policy
from turngym_trainer.seeds import token_uniforms
from turngym_trainer.settings import ConfigError, config_from_tree
from turngym_trainer.warm_start import REPORT as WARM_START

FOREIGN_TOKENS: Final = 256
"""Tokens that a model which is no checkpoint of this trainer may write in a turn."""

_PURPOSE: Final = "leaderboard"
"""Salts the sampling, so that no run's own draws are met again."""


class CheckpointAgent:
    """Answers conversations with a policy.

    A checkpoint of the trainer reads and writes as its run did (context, instructions, prefill, tokens a turn). A model
    folder from elsewhere reads all turns and the environment's instructions, and writes at most 256 tokens a turn.
    """

    samples = True
    wants_legal_actions = False
    wants_advice = False

    def __init__(self, folder: Path, *, name: str, device: str = "cpu", threads: int = 0, most_tokens: int = 0) -> None:
        """Loads the policy.

        Args:
            folder: a checkpoint, or a model in Hugging Face's layout with safetensors.
            device: cpu, cuda or cuda:N.
            threads: of torch; 0: as many as it takes by itself.
            most_tokens: that it may write in a turn, whatever its run allowed; 0: as its run did.

        Raises:
            AgentUnavailable: the folder holds neither, or the device is not there.
        """
        self.name = name
        if threads:
            torch.set_num_threads(threads)
        # The terminal belongs to the evaluation's own progress bars.
        transformers_logging.disable_progress_bar()
        config, origin = _settings(folder)
        try:
            self._policy = load_policy(str(folder), device=device)
        except (ValueError, OSError, RuntimeError) as error:
            raise AgentUnavailable(f"{folder} cannot be loaded as an agent: {error}") from error
        self._context = context_of(config) if config else Context()
        # With fewer turns of context a prompt does not begin with what was read before.
        self._keeps = self._context.turns == 0 and (config is None or config.rollout.keep_cache)
        asked = config.rollout.max_response_tokens if config else FOREIGN_TOKENS
        self._max_tokens = min(asked, most_tokens or asked)
        self._description = {
            "kind": "checkpoint",
            "folder": str(folder.resolve()),
            "sha256": _weights_hash(folder),
            "context": {0: "all turns", 1: "the last turn"}.get(
                self._context.turns, f"the last {self._context.turns} turns"
            ),
            "instructions": self._context.instructions,
            "prefill": self._context.prefill,
            "max_response_tokens": str(self._max_tokens),
            "device": device,
            "threads": str(torch.get_num_threads()),
            **origin,
        }

    @property
    def description(self) -> dict[str, str]:
        return self._description

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        self._seats = tuple(seats)
        self._decoding = decoding
        self._memory = Memory() if self._keeps else None
        chats: dict[str, ChatFormat] = {}
        self._conversations: list[Conversation] = []
        for seat in seats:
            system = system_message(
                self._context.instructions, seat.instructions, seat.action_separator, seat.max_actions_per_turn
            )
            if system not in chats:
                chats[system] = self._policy.chat_format(system)
            self._conversations.append(Conversation(self._policy, chats[system], self._context))

    def act(self, views: Sequence[View]) -> Sequence[Reply]:
        """Samples a turn in each conversation; one that has outgrown the model answers with an invalid action."""
        for view in views:
            self._conversations[view.seat].show(view.transition.observation)
        prompts = [self._conversations[view.seat].prompt() for view in views]
        room = self._policy.max_positions - self._max_tokens
        fitting = [k for k, prompt in enumerate(prompts) if len(prompt) <= room]
        responses = [_NOTHING] * len(views)
        try:
            sampled = generate(
                self._policy,
                [prompts[k] for k in fitting],
                None if self._decoding.greedy or not fitting else np.stack([self._uniforms(views[k]) for k in fitting]),
                max_new_tokens=self._max_tokens,
                temperature=self._decoding.temperature,
                memory=self._memory,
                names=[views[k].seat for k in fitting],
            )
        except RuntimeError as error:
            # Torch's name for all that a model can do wrong: out of memory, probabilities that are not finite, a size.
            raise AgentFault(f"the policy failed on {len(fitting)} conversations: {error}") from error
        for k, response in zip(fitting, sampled, strict=True):
            responses[k] = response
        if not all(np.isfinite(response.logprobs).all() for response in responses):
            raise AgentFault("the policy's log-probabilities are not finite")
        for view, response in zip(views, responses, strict=True):
            self._conversations[view.seat].answer(response)
        return [self._reply(self._seats[view.seat], r) for view, r in zip(views, responses, strict=True)]

    def _uniforms(self, view: View) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return token_uniforms(self._seats[view.seat].seed, 0, 0, 0, 0, view.turn, self._max_tokens, purpose=_PURPOSE)

    def _reply(self, seat: Seat, response: Response) -> Reply:
        text = self._context.prefill + self._policy.decode(response.ids) if len(response.ids) else ""
        parsed = parse_answer(
            text if response.complete else "", seat.action_separator, max_actions=seat.max_actions_per_turn or None
        )
        return Reply(
            text=text,
            reasoning=parsed.reasoning,
            actions=parsed.actions,
            valid_format=parsed.valid_format,
            cut_off=not response.complete,
            tokens=len(response.ids),
        )


_NOTHING: Final = Response(np.empty(0, np.int64), np.empty(0, np.float32), complete=False)


def _settings(folder: Path) -> tuple[Config | None, dict[str, str]]:
    """The settings of the run that wrote a folder, and where it comes from; nothing for a model from elsewhere."""
    if not folder.is_dir():
        raise AgentUnavailable(f"{folder} is not a folder; expected a checkpoint such as runs/demo/checkpoints/…")
    if not (folder / "config.json").is_file():
        raise AgentUnavailable(
            f"{folder} is not a checkpoint: it has no config.json. Expected a folder that the trainer wrote, or a "
            "model in Hugging Face's layout with safetensors"
        )
    try:
        if (folder / "training").is_dir():
            state = read_state(folder)
            config = config_from_tree(state.config)
            return config, _origin(config, "training") | _training(state)
        if (folder / WARM_START).is_file():
            report = json.loads((folder / WARM_START).read_text(encoding="utf-8"))
            config = config_from_tree(report["config"])
            return config, _origin(config, "warm start")
    except (CheckpointError, ConfigError, OSError, ValueError, KeyError, TypeError) as error:
        raise AgentUnavailable(f"{folder} is a checkpoint that this version cannot read: {error}") from error
    return None, {}


def _origin(config: Config, made_by: str) -> dict[str, str]:
    alone = environments(config).values()
    return {
        "made_by": made_by,
        "trained_in": ", ".join(each.environment.id for each in alone),
        "trained_split": "all" if any(each.environment.split == "all" for each in alone) else "train",
        "run_seed": str(config.run.seed),
    }


def _training(state: State) -> dict[str, str]:
    """What a run's state tells. The split epoch says whether today's held-out worlds were held out then.

    Of a mixture, all environments in its order, and the least split epoch.
    """
    trained = (state.environment, *state.others)
    return {
        "iteration": str(state.progress.iteration),
        "trained_version": ", ".join(each.version for each in trained),
        "trained_options": ", ".join(each.options_json for each in trained),
        "trained_split_epoch": str(min(each.split_epoch for each in trained)),
        "trained_with": ", ".join(f"{name} {version}" for name, version in sorted(state.versions.items())),
    }


def _weights_hash(folder: Path) -> str:
    """SHA-256 over the weights' files, in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
