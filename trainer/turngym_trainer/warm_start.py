"""Warm start: supervised training on the oracle's play, until the policy succeeds often enough for rewards to teach.

The oracle advises at the server (`Advise`), on split `train` like everything that is learnt from. A share of the turns
are detours: random legal actions, played but not learnt, so that demonstrations also begin where a policy's own
mistakes lead. Slips are random too, but learnt: a policy that imitates a fallible player knows more than it plays,
which rewards can bring out; one that imitates a perfect player can only be taught what it does not know. Success is
measured by sampling on split `validation`. Everything is a function of the settings and the seed.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch

from turngym_client import Advice, Client, Episode, EpisodeRequest, Split
from turngym_trainer import seeds
from turngym_trainer.batch import Batch
from turngym_trainer.config import Config
from turngym_trainer.context import Context, Conversation, demonstration, system_message
from turngym_trainer.evaluate import choose_levels, context_of, environment_limits, evaluate
from turngym_trainer.logprobs import Scorer, micro_batches
from turngym_trainer.masters import MasterWeights
from turngym_trainer.policy import Policy, load_policy
from turngym_trainer.recompute import recompute_layers
from turngym_trainer.settings import ConfigError, config_tree
from turngym_trainer.start import connected, served_environment, take_folder
from turngym_trainer.trajectory import Row

REPORT: Final = "warm_start.json"

_PURPOSE: Final = "warm-start"
_EPISODES_AT_ONCE: Final = 256
_ASTRAY_ACTIONS: Final = 3
"""A detour or slip is 1 to so many actions."""
_RAMP_STEPS: Final = 50
"""Optimiser steps over which the learning rate rises."""


class WarmStartError(RuntimeError):
    """A warm start that cannot be made; says what to do."""


@dataclass(frozen=True, slots=True)
class Check:
    """One measurement during a warm start.

    Attributes:
        step: optimiser steps taken.
        loss: mean negative log-probability of a demonstrated token since the last check.
        success: sampled, on split `validation`.
        valid_format: share of turns that could be parsed.
        seconds: since the beginning, collecting demonstrations included.
    """

    step: int
    loss: float
    success: float
    valid_format: float
    seconds: float


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a warm start came to.

    Attributes:
        folder: the policy, in Hugging Face's layout.
        reached: the target was met; else the steps ran out.
    """

    folder: Path
    rows: int
    reached: bool
    checks: tuple[Check, ...]


def warm_start(config: Config, *, observe: Callable[[Check], None] = lambda check: None) -> WarmStart:
    """Trains `policy.model` on demonstrations and writes it to `run.folder`.

    Args:
        config: sections run, environment, policy, rollout (context and sampling) and warm_start count.
        observe: told each check.

    Raises:
        WarmStartError: the folder is taken, or the oracle demonstrated nothing.
        PolicyError: the policy cannot be loaded.
        ConfigError: a split is not served, an address is none, or the folder cannot be written.
        TurngymError: the server cannot be used, or the environment has no oracle.
    """
    if config.mixture.environments:
        raise ConfigError(
            "mixture.environments: a warm start demonstrates one environment; leave the mixture out, and set "
            "environment.* to one of them (another warm start can go on from its folder, policy.model=FOLDER)"
        )
    folder = Path(config.run.folder)
    if folder.exists() and any(folder.iterdir()):
        raise WarmStartError(f"{folder} is not empty; name another run.folder, or remove it")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    began = time.perf_counter()
    settings = config.warm_start
    policy = load_policy(config.policy.model, device=config.run.device, seed=config.run.seed)
    checks: list[Check] = []
    with connected(config) as client:
        split = Split(config.validation.split)
        served_environment(client, config, {Split(config.environment.split), split})
        rows = demonstrate(policy, client, config)
        levels = choose_levels(
            client, config.environment, split, run_seed=config.run.seed, count=settings.check_episodes
        )
        take_folder(folder)
        trainer = _Trainer(policy, rows, config)
        while trainer.step < settings.max_steps:
            loss = trainer.train(min(settings.check_every, settings.max_steps - trainer.step))
            result = evaluate(policy, client, config, levels, split=split, greedy=False)
            checks.append(Check(trainer.step, loss, result.success, result.valid_format, time.perf_counter() - began))
            observe(checks[-1])
            if result.success >= settings.target_success:
                break
    reached = bool(checks) and checks[-1].success >= settings.target_success
    trainer.save(folder)
    report = {"reached": reached, "rows": len(rows), "checks": [asdict(check) for check in checks]}
    text = json.dumps({**report, "config": config_tree(config)}, indent=1, ensure_ascii=False)
    (folder / REPORT).write_text(text, encoding="utf-8")
    return WarmStart(folder, len(rows), reached, tuple(checks))


def demonstrate(policy: Policy, client: Client, config: Config) -> list[Row]:
    """Plays `warm_start.episodes` episodes by the oracle's advice, with detours.

    Returns:
        Rows whose action tokens are the advised answers. Detours are context at most; an episode that can no longer
        succeed ends.

    Raises:
        WarmStartError: the oracle advised nothing in any episode.
        TurngymError: the server cannot be used, or the environment has no oracle.
    """
    rows: list[Row] = []
    count = config.warm_start.episodes
    for start in range(0, count, _EPISODES_AT_ONCE):
        numbers = range(start, min(start + _EPISODES_AT_ONCE, count))
        requests = [
            EpisodeRequest(
                environment_id=config.environment.id,
                options=config.environment.options,
                limits=environment_limits(config.environment),
                split=Split(config.environment.split),
                level_seed=seeds.level_seed(config.run.seed, 0, 0, number, purpose=_PURPOSE),
                noise_seed=seeds.noise_seed(config.run.seed, 0, 0, number, 0, purpose=_PURPOSE),
                expected_version=config.environment.version,
            )
            for number in numbers
        ]
        episodes = client.reset_many(requests, want_legal_actions=True)
        lessons = [
            _Lesson(policy, episode, context_of(config), config, number)
            for episode, number in zip(episodes, numbers, strict=True)
        ]
        running = lessons
        while running:
            advised = client.advise_many([lesson.episode for lesson in running])
            turns = [lesson.turn(advice) for lesson, advice in zip(running, advised, strict=True)]
            going = [(lesson, turn) for lesson, turn in zip(running, turns, strict=True) if turn]
            client.step_many([(lesson.episode, turn) for lesson, turn in going], want_legal_actions=True)
            running = [lesson for lesson, _ in going if not lesson.episode.done]
        client.close_many(episodes)
        rows += [row for lesson in lessons for row in lesson.rows()]
    if not rows:
        raise WarmStartError(
            f"the oracle of {config.environment.id} advised nothing in {count} episodes: give the episodes more "
            "actions, or begin without a warm start"
        )
    return rows


class _Lesson:
    """One demonstrated episode."""

    def __init__(self, policy: Policy, episode: Episode, context: Context, config: Config, number: int) -> None:
        self.episode = episode
        self._policy = policy
        self._context = context
        self._config = config
        self._number = number
        separator, most = episode.action_separator, episode.limits.max_actions_per_turn
        system = system_message(context.instructions, episode.instructions, separator, most)
        self._conversation = Conversation(policy, policy.chat_format(system), context)
        self._detours: list[int] = []
        self._turns = 0

    def turn(self, advice: Advice) -> tuple[str, ...]:
        """What to play: the advice, or a detour. Empty: nobody could succeed from here, so nothing is learnt."""
        if not advice.actions or advice.ceiling == 0.0:
            return ()
        actions, explanation = advice.actions, advice.explanation
        if astray := self._astray():
            actions, learnt = astray
            if not learnt:
                self._detours.append(self._turns)
        self._conversation.show(self.episode.state.observation)
        self._conversation.answer(
            demonstration(
                self._policy,
                self._context,
                explanation if self._config.warm_start.explain else "",
                actions,
                self.episode.action_separator,
            )
        )
        self._turns += 1
        return actions

    def _astray(self) -> tuple[tuple[str, ...], bool] | None:
        """Random legal actions in a share of the turns, and whether they are learnt (a slip) or not (a detour)."""
        legal = self.episode.state.legal_actions
        settings = self._config.warm_start
        most = min(_ASTRAY_ACTIONS, self.episode.limits.max_actions_per_turn)
        draws = seeds.token_uniforms(
            self._config.run.seed, 0, 0, self._number, 0, self._turns, 2 + most, purpose=_PURPOSE
        )
        if not legal or draws[0] >= settings.slips + settings.detours:
            return None
        actions = tuple(legal[int(draw * len(legal))] for draw in draws[2 : 3 + int(draws[1] * most)])
        return actions, bool(draws[0] < settings.slips)

    def rows(self) -> list[Row]:
        """The token records, detours being no actions."""
        rows: list[Row] = []
        for row in self._conversation.rows():
            learnt = row.is_action & ~np.isin(row.turn, self._detours)
            if learnt.any():
                rows.append(Row(row.ids, learnt, np.where(learnt, row.turn, -1), row.logprobs))
        return rows


class _Trainer:
    """Supervised steps over demonstrated rows, in an order that the seed decides."""

    def __init__(self, policy: Policy, rows: Sequence[Row], config: Config) -> None:
        self.step = 0
        self._policy = policy
        self._config = config
        self._batch = _lay_out(rows)
        # Demonstrations are learnt as they will be sampled: at the rollout's temperature.
        self._scorer = Scorer(policy.model, config.rollout.temperature)
        if config.policy.gradient_checkpointing:
            recompute_layers(policy.model)
        dtype = torch.bfloat16 if config.policy.dtype == "bfloat16" else torch.float32
        self._weights = MasterWeights(policy.model.parameters(), dtype)
        self._optimiser = torch.optim.AdamW(self._weights.masters, lr=0.0, weight_decay=0.0, fused=True)
        self._order = np.zeros(0, np.int64)
        self._epoch = 0

    def save(self, folder: Path) -> None:
        """Writes the policy in float32."""
        with self._weights.exposed():
            self._policy.save(folder)

    def train(self, steps: int) -> float:
        """Takes optimiser steps. Returns the mean loss of a token."""
        self._policy.model.train()
        losses = [self._step() for _ in range(steps)]
        self._policy.model.eval()
        return float(np.mean(losses))

    def _step(self) -> float:
        settings = self._config.warm_start
        self.step += 1
        for group in self._optimiser.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, self.step / _RAMP_STEPS)
        chosen = self._next(settings.batch_rows)
        tokens = int((self._batch.row_offsets[chosen + 1] - self._batch.row_offsets[chosen]).sum())
        total = 0.0
        budget = self._config.update.microbatch_tokens
        for part in micro_batches(self._batch, chosen, budget, self._policy.device):
            logprobs, _ = self._scorer.score(part)
            loss = -logprobs.sum() / tokens
            cast(None, loss.backward())  # pyright: ignore[reportUnknownMemberType]
            self._weights.take_gradients()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._weights.masters, self._config.update.gradient_clip)
        self._optimiser.step()
        self._weights.write_through()
        self._optimiser.zero_grad(set_to_none=True)
        return total

    def _next(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The next rows of the present pass, ascending; what a pass has left over begins the next one."""
        size = len(self._batch.rows)
        while len(self._order) < count:
            more = seeds.permutation(self._config.run.seed, 0, 0, self._epoch, size, purpose=_PURPOSE)
            self._order = np.concatenate([self._order, more])
            self._epoch += 1
        chosen, self._order = self._order[:count], self._order[count:]
        return np.unique(chosen)


def _lay_out(rows: Sequence[Row]) -> Batch:
    """Rows as a batch, each an episode of its own."""
    lengths = np.array([int(row.is_action.sum()) for row in rows], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    turns = np.concatenate([row.turn[row.is_action] for row in rows])
    turn_ends = np.ones(len(turns), np.bool_)
    turn_ends[:-1] = turns[1:] != turns[:-1]
    turn_ends[offsets[1:] - 1] = True
    return Batch(
        rows=tuple(rows),
        row_episodes=np.arange(len(rows)),
        row_offsets=offsets,
        episode_offsets=offsets,
        logprobs=np.zeros(len(turns), np.float32),
        turns=turns,
        turn_ends=turn_ends,
    )
