"""Warm start: supervised training on shown play, until the policy succeeds often enough for rewards to teach.

What is shown is the oracle's play, kept episodes (`demonstrations`), or both, in that order. The oracle advises at the
server (`Advise`), on split `train` like everything that is learnt from. A share of the turns are detours: random legal
actions, played but not learnt, so that demonstrations also begin where a policy's own mistakes lead. Slips are random
too, but learnt: a policy that imitates a fallible player knows more than it plays, which rewards can bring out; one
that imitates a perfect player can only be taught what it does not know. Success is measured by sampling on split
`validation`. In a mixture every environment has its share of the oracle's episodes, and success is that in all of
them. Everything is a function of the settings, the files and the seed; one that was cut off goes on from its last check
to the same bytes.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from turngym_client import Advice, Client, Episode, EpisodeRequest, Split
from turngym_trainer import seeds, unfinished
from turngym_trainer.batch import Batch
from turngym_trainer.checkpoint import (
    EnvironmentIdentity,
    check_same_environment,
    optimiser_tensors,
    restore_optimiser,
    tell_other_versions,
    versions,
)
from turngym_trainer.config import Config
from turngym_trainer.context import Context, Conversation, system_message
from turngym_trainer.demonstrations import FileReport, answer, learn_from_files, learnt_rows
from turngym_trainer.evaluate import choose_levels, context_of, environment_limits, evaluate, pooled
from turngym_trainer.logprobs import Scorer, micro_batches
from turngym_trainer.lora import Adapters
from turngym_trainer.masters import MasterWeights
from turngym_trainer.mixture import demonstrated, environments
from turngym_trainer.policy import Policy, load_policy
from turngym_trainer.recompute import recompute_layers
from turngym_trainer.schedule import warm_start_rate
from turngym_trainer.settings import changed_keys, config_tree, load_config
from turngym_trainer.start import connected, served_environment, take_folder
from turngym_trainer.trajectory import Row
from turngym_trainer.unfinished import Unfinished

REPORT: Final = "warm_start.json"

_PURPOSE: Final = "warm-start"
_EPISODES_AT_ONCE: Final = 256
_ASTRAY_ACTIONS: Final = 3
"""A detour or slip is 1 to so many actions."""


class WarmStartError(RuntimeError):
    """A warm start that cannot be made; says what to do."""


@dataclass(frozen=True, slots=True)
class Check:
    """One measurement during a warm start.

    Attributes:
        step: optimiser steps taken.
        loss: mean negative log-probability of a demonstrated token since the last check.
        success: sampled, on split `validation`; in a mixture over the episodes of all environments.
        valid_format: share of turns that could be parsed.
        seconds: since the beginning, collecting demonstrations included.
        environments: success in each of a mixture's environments, by name; empty: there is one.
    """

    step: int
    loss: float
    success: float
    valid_format: float
    seconds: float
    environments: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a warm start came to.

    Attributes:
        folder: the policy, in Hugging Face's layout.
        reached: the target was met; else the steps ran out.
        files: what became of each file of kept episodes.
    """

    folder: Path
    rows: int
    reached: bool
    checks: tuple[Check, ...]
    files: tuple[FileReport, ...]


def warm_start(
    config: Config,
    *,
    resume: bool = False,
    observe: Callable[[Check], None] = lambda check: None,
    tell: Callable[[str], None] = lambda line: None,
) -> WarmStart:
    """Trains `policy.model` on demonstrations and writes it to `run.folder`.

    With `lora.rank` only small layers are trained, and what is written has them merged into its weights.

    Args:
        config: sections run, environment or mixture, policy, lora, rollout (context and sampling) and warm_start count.
        resume: go on from the last check of an unfinished one in `run.folder`; see `resumable_warm_start`.
        observe: told each check.
        tell: told what became of each file of kept episodes.

    Raises:
        WarmStartError: the folder is taken, the oracle demonstrated nothing, or on resume other than before.
        CheckpointError: there is nothing to resume, or the environment is another one than before.
        DemonstrationError: kept episodes cannot be learnt from, or the settings leave no room for what is shown.
        PolicyError: the policy cannot be loaded, or LoRA not be had.
        ConfigError: a split is not served, an address is none, or the folder cannot be written.
        TurngymError: the server cannot be used, or the environment has no oracle.
    """
    folder = Path(config.run.folder)
    before = unfinished.read(folder) if resume else None
    if before is None and folder.exists() and any(folder.iterdir()):
        raise WarmStartError(f"{folder} is not empty; {_what_to_do(folder)}")
    if threads := config.run.threads or (before.threads if before else 0):
        torch.set_num_threads(threads)
    began = time.perf_counter()
    settings = config.warm_start
    policy = load_policy(config.policy.model, device=config.run.device, seed=config.run.seed)
    trainer = _Trainer(policy, config)
    alone = environments(config)
    checks = [Check(**check) for check in before.checks] if before else []
    already = checks[-1].seconds if checks else 0.0
    with connected(config) as client:
        split = Split(config.validation.split)
        infos = [served_environment(client, each, {Split(each.environment.split), split}) for each in alone.values()]
        identities = tuple(EnvironmentIdentity.of(info) for info in infos)
        if before:
            tell_other_versions(before.versions)
            for then, now in zip(before.environments, identities, strict=True):
                check_same_environment(then, now)
        kept = learn_from_files(policy, config, infos)
        for report in kept.files:
            tell(report.told())
        rows = [*(demonstrate(policy, client, config) if settings.episodes else ()), *kept.rows]
        shown = _digest(rows)
        levels = {
            name: choose_levels(
                client, each.environment, split, run_seed=config.run.seed, count=settings.check_episodes
            )
            for name, each in alone.items()
        }
        if before is None:
            take_folder(folder)
        elif before.shown == shown:
            trainer.restore(before, *unfinished.read_tensors(folder))
        else:
            raise WarmStartError(f"{folder}: what is shown is not what it was, so this would be another warm start")
        lessons = _lay_out(rows)
        while trainer.step < settings.max_steps and not _reached(checks, settings.target_success):
            loss = trainer.train(lessons, min(settings.check_every, settings.max_steps - trainer.step))
            results = {
                name: evaluate(policy, client, each, levels[name], split=split, greedy=False)
                for name, each in alone.items()
            }
            result = pooled(list(results.values()))
            of_each = {name: of.success for name, of in results.items()} if config.mixture.environments else {}
            seconds = already + time.perf_counter() - began
            checks.append(Check(trainer.step, loss, result.success, result.valid_format, seconds, of_each))
            trainer.keep(folder, shown, checks, identities)
            observe(checks[-1])
    reached = _reached(checks, settings.target_success)
    trainer.save(folder)
    report = {
        "reached": reached,
        "rows": len(rows),
        "checks": [asdict(check) for check in checks],
        "demonstrations": [asdict(each) for each in kept.files],
    }
    text = json.dumps({**report, "config": config_tree(config)}, indent=1, ensure_ascii=False)
    (folder / REPORT).write_text(text, encoding="utf-8")
    unfinished.discard(folder)
    return WarmStart(folder, len(rows), reached, tuple(checks), kept.files)


def resumable_warm_start(folder: Path, settings: list[str]) -> Config:
    """Settings of the unfinished warm start in a folder, with some changed on the command line.

    Raises:
        CheckpointError: there is none.
        ConfigError: the settings cannot be used.
        WarmStartError: those changed would make another warm start of it.
    """
    before = unfinished.read(folder).config
    here = f"run.folder={str(folder)!r}"
    config = load_config(settings=[*settings, here], base=before)
    if changed := set(changed_keys(load_config(settings=[here], base=before), config)) - {"run.server", "run.patience"}:
        raise WarmStartError(
            f"{', '.join(sorted(changed))}: cannot be changed on resume, the warm start would not be the one it was"
        )
    return config


def _what_to_do(folder: Path) -> str:
    if (folder / unfinished.UNFINISHED).is_dir():
        return f"go on with the warm start in it (--resume {folder}), or name another run.folder"
    return "name another run.folder, or remove it"


def _reached(checks: Sequence[Check], target: float) -> bool:
    return bool(checks) and checks[-1].success >= target


def _digest(rows: Sequence[Row]) -> str:
    """Of what is shown, and which of it is learnt."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.ids).to_bytes(8, "big") + row.ids.tobytes() + row.is_action.tobytes())
    return digest.hexdigest()


def demonstrate(policy: Policy, client: Client, config: Config) -> list[Row]:
    """Plays `warm_start.episodes` episodes by the oracle's advice, with detours; in a mixture by `demonstrated`.

    Returns:
        Rows whose action tokens are the advised answers. Detours are context at most; an episode that can no longer
        succeed ends.

    Raises:
        WarmStartError: the oracle advised nothing in any episode of an environment.
        TurngymError: the server cannot be used, or an environment has no oracle.
    """
    of = demonstrated(config, config.warm_start.episodes)
    rows: list[Row] = []
    for index, alone in enumerate(environments(config).values()):
        numbers = np.flatnonzero(of == index).tolist()
        shown = _demonstrate(policy, client, alone, numbers)
        if numbers and not shown:
            raise WarmStartError(
                f"the oracle of {alone.environment.id} advised nothing in {len(numbers)} episodes: give the episodes "
                "more actions, or begin without a warm start"
            )
        rows += shown
    return rows


def _demonstrate(policy: Policy, client: Client, config: Config, episodes: Sequence[int]) -> list[Row]:
    """`demonstrate` in one environment, for the episodes of some numbers."""
    rows: list[Row] = []
    for start in range(0, len(episodes), _EPISODES_AT_ONCE):
        numbers = episodes[start : start + _EPISODES_AT_ONCE]
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
        played = client.reset_many(requests, want_legal_actions=True)
        lessons = [
            _Lesson(policy, episode, context_of(config), config, number)
            for episode, number in zip(played, numbers, strict=True)
        ]
        running = lessons
        while running:
            advised = client.advise_many([lesson.episode for lesson in running])
            turns = [lesson.turn(advice) for lesson, advice in zip(running, advised, strict=True)]
            going = [(lesson, turn) for lesson, turn in zip(running, turns, strict=True) if turn]
            client.step_many([(lesson.episode, turn) for lesson, turn in going], want_legal_actions=True)
            running = [lesson for lesson, _ in going if not lesson.episode.done]
        client.close_many(played)
        rows += [row for lesson in lessons for row in lesson.rows()]
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
            answer(
                self._policy,
                self._context,
                explanation,
                actions,
                self.episode.action_separator,
                explain=self._config.warm_start.explain,
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
        return learnt_rows(self._conversation, self._detours)


class _Trainer:
    """Supervised steps over demonstrated rows, in an order that the seed decides.

    Raises:
        PolicyError: the policy cannot do gradient checkpointing or LoRA, which the settings ask for.
    """

    def __init__(self, policy: Policy, config: Config) -> None:
        self.step = 0
        self._policy = policy
        self._config = config
        # Demonstrations are learnt as they will be sampled: at the rollout's temperature.
        self._scorer = Scorer(policy.model, config.rollout.temperature)
        dtype = torch.bfloat16 if config.policy.dtype == "bfloat16" else torch.float32
        self._adapters = Adapters(policy, config.lora, dtype=dtype, seed=config.run.seed) if config.lora.rank else None
        if config.policy.gradient_checkpointing:
            recompute_layers(policy.model)
        self._weights = MasterWeights([weight for weight in policy.model.parameters() if weight.requires_grad], dtype)
        self._optimiser = torch.optim.AdamW(self._weights.masters, lr=0.0, weight_decay=0.0, fused=True)
        self._order = np.zeros(0, np.int64)
        self._epoch = 0

    def save(self, folder: Path) -> None:
        """Writes the policy in float32."""
        with self._weights.exposed():
            if self._adapters is None:
                self._policy.save(folder)
            else:
                self._adapters.save_merged(folder)

    def keep(
        self, folder: Path, shown: str, checks: Sequence[Check], identities: tuple[EnvironmentIdentity, ...]
    ) -> None:
        """Keeps all that `restore` needs."""
        state = Unfinished(
            step=self.step,
            epoch=self._epoch,
            order=tuple(self._order.tolist()),
            shown=shown,
            checks=tuple(asdict(check) for check in checks),
            environments=identities,
            threads=torch.get_num_threads(),
            versions=versions(),
            config=config_tree(self._config),
        )
        unfinished.keep(folder, state, self._weights.masters, optimiser_tensors(self._optimiser))

    def restore(self, state: Unfinished, weights: Sequence[Tensor], optimiser: dict[str, Tensor]) -> None:
        """Goes on from where `keep` was called."""
        self.step, self._epoch = state.step, state.epoch
        self._order = np.array(state.order, np.int64)
        with torch.no_grad():
            for master, weight in zip(self._weights.masters, weights, strict=True):
                master.copy_(weight)
        self._weights.write_through()
        restore_optimiser(self._optimiser, optimiser)

    def train(self, lessons: Batch, steps: int) -> float:
        """Takes optimiser steps on what is always the same batch. Returns the mean loss of a token."""
        self._policy.model.train()
        losses = [self._step(lessons) for _ in range(steps)]
        self._policy.model.eval()
        return float(np.mean(losses))

    def _step(self, lessons: Batch) -> float:
        settings = self._config.warm_start
        self.step += 1
        for group in self._optimiser.param_groups:
            group["lr"] = warm_start_rate(settings, self.step)
        chosen = self._next(settings.batch_rows, len(lessons.rows))
        tokens = int((lessons.row_offsets[chosen + 1] - lessons.row_offsets[chosen]).sum())
        total = 0.0
        budget = self._config.update.microbatch_tokens
        for part in micro_batches(lessons, chosen, budget, self._policy.device):
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

    def _next(self, count: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The next of `size` rows in the present pass, ascending; what a pass has left over begins the next one."""
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
