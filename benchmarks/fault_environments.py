"""Environments for the fault matrix: they note every action before they execute it, and mark every observation.

Served are the registry's Sokoban, FrozenLake and bandit, played by the registry's own code, a slow one that is not
inline, one whose every instance has a process of its own, and one that promises no determinism. The journal and the
marks: `fault_journal`.

Two variables name, by commas, the environments that follow other rules: FAULT_NEW_VERSION under another version,
FAULT_SAME_VERSION under the same one. Forks would share their original's life: the matrix makes none.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from fault_journal import (
    BANDIT,
    FROZEN_LAKE,
    ISOLATED,
    JOURNAL,
    NEW_VERSION,
    SAME_VERSION,
    SLOW,
    SOKOBAN,
    UNSURE,
    Note,
    head,
    mark_from,
    note_line,
)

from turngym_server.environment import (
    ActionResult,
    Determinism,
    Environment,
    Isolation,
    Limits,
    Options,
    Start,
    register,
)
from turngym_server.envs.bandit import Bandit, BanditOptions
from turngym_server.envs.frozen_lake import FrozenLake, FrozenLakeOptions
from turngym_server.envs.sokoban import LIMITS, Sokoban, SokobanOperatorOptions, SokobanOptions
from turngym_server.rng import Rng

SLOW_STEP_SECONDS: Final = 0.05


def _named(variable: str) -> frozenset[str]:
    return frozenset(os.environ.get(variable, "").split(","))


def _version(id: str) -> str:
    return "2.0" if id in _named(NEW_VERSION) else "1.0"


_OTHER_RULES: Final = _named(NEW_VERSION) | _named(SAME_VERSION)
_JOURNAL: Final = os.open(os.environ.get(JOURNAL, os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


class Noted(Environment[Any]):
    """Mixed in before an environment: notes what it executes, and marks what it shows."""

    id: str

    def reset(self, level: Rng) -> Start:
        self._noted_mark = mark_from(level)
        self._noted_life = secrets.token_hex(8)
        self._noted_executed = 0
        self._note("")
        start = super().reset(level)
        return replace(start, observation=self._with_head(start.observation))

    def step(self, action: str, noise: Rng) -> ActionResult:
        self._noted_executed += 1
        self._note(action)
        result = super().step(action, noise)
        return replace(result, observation=self._with_head(result.observation))

    def _note(self, action: str) -> None:
        note = Note(self.id, os.getpid(), self._noted_life, self._noted_mark, self._noted_executed, action)
        os.write(_JOURNAL, note_line(note))

    def _with_head(self, observation: str) -> str:
        changed = "\nOther rules." if self.id in _OTHER_RULES else ""
        return head(self._noted_mark, self._noted_executed) + observation + changed


class TallyOptions(Options):
    """Nothing to choose."""


class Tally(Environment[TallyOptions]):
    """Counts; each action pays what the noise says."""

    @classmethod
    def instructions(cls, options: TallyOptions, limits: Limits) -> str:
        return "Say a, b or c."

    def reset(self, level: Rng) -> Start:
        self._world = level.word().to_bytes(8, "big")
        return Start("Begin.")

    def step(self, action: str, noise: Rng) -> ActionResult:
        if action not in self.legal_actions():
            return ActionResult("Say a, b or c.", 0.0, valid=False)
        return ActionResult(f"Heard {action}.", float(noise.below(6)))

    def world(self) -> bytes:
        return self._world

    def legal_actions(self) -> Sequence[str]:
        return ("a", "b", "c")


@register(
    id=SOKOBAN,
    version=_version(SOKOBAN),
    family=SOKOBAN,
    summary="The registry's Sokoban, with a journal.",
    options=SokobanOptions,
    operator_options=SokobanOperatorOptions,
    limits=LIMITS,
    inline=True,
)
class NotedSokoban(Noted, Sokoban):
    id = SOKOBAN


@register(
    id=FROZEN_LAKE,
    version=_version(FROZEN_LAKE),
    family=FROZEN_LAKE,
    summary="The registry's FrozenLake, with a journal.",
    options=FrozenLakeOptions,
    limits=LIMITS,
    inline=True,
)
class NotedFrozenLake(Noted, FrozenLake):
    id = FROZEN_LAKE


@register(
    id=BANDIT,
    version=_version(BANDIT),
    family=BANDIT,
    summary="The registry's bandit, with a journal.",
    options=BanditOptions,
    limits=Limits(max_turns=1, max_actions=1, max_actions_per_turn=1),
    inline=True,
)
class NotedBandit(Noted, Bandit):
    id = BANDIT


@register(
    id=SLOW,
    version=_version(SLOW),
    family=SLOW,
    summary="Takes its time, in a thread.",
    options=TallyOptions,
    limits=Limits(max_turns=6, max_actions=12, max_actions_per_turn=2),
)
class Slow(Noted, Tally):
    id = SLOW

    def step(self, action: str, noise: Rng) -> ActionResult:
        result = super().step(action, noise)
        time.sleep(SLOW_STEP_SECONDS)
        return result


@register(
    id=ISOLATED,
    version=_version(ISOLATED),
    family=ISOLATED,
    summary="Each instance in a process of its own.",
    options=TallyOptions,
    limits=Limits(max_turns=6, max_actions=12, max_actions_per_turn=2),
    isolation=Isolation(),
)
class Isolated(Noted, Tally):
    id = ISOLATED


@register(
    id=UNSURE,
    version=_version(UNSURE),
    family=UNSURE,
    summary="Promises no determinism, and has none.",
    options=TallyOptions,
    limits=Limits(max_turns=6, max_actions=12, max_actions_per_turn=2),
    determinism=Determinism.NONE,
)
class Unsure(Noted, Tally):
    id = UNSURE

    def step(self, action: str, noise: Rng) -> ActionResult:
        result = super().step(action, noise)
        return replace(result, observation=f"{result.observation} It is {secrets.randbelow(1_000)} o'clock.")
