"""Small environments that do what the tests need. Not registered: the registry holds what is served."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator

from turngym_server.environment import (
    DEFAULT_CAPS,
    ActionKind,
    ActionResult,
    Catalogue,
    Determinism,
    Environment,
    EnvironmentSpec,
    Left,
    Limits,
    NoOperatorOptions,
    Options,
    Start,
)
from turngym_server.rng import Rng

GATE = threading.Event()
"""Dice roll slowly while it is cleared."""
GATE.set()

PLAYED: list[str] = []
"""Every action that a Dice environment was asked to play, in this process."""


class DiceOptions(Options):
    faces: int = Field(default=6, ge=2, le=1_000)
    worlds: int = Field(default=1_000_000, ge=1)


class Dice(Environment[DiceOptions]):
    """Roll (reward: the noise), slow (a roll that waits for GATE), stop (ends; success if the total is the target)."""

    @classmethod
    def instructions(cls, options: DiceOptions, limits: Limits) -> str:
        return f"Roll a die of {options.faces} in at most {limits.max_turns} turns."

    def reset(self, level: Rng) -> Start:
        self.target = level.below(self.options.worlds)
        self.total = 0
        return Start(f"Target {self.target}.", metrics={"target": float(self.target)})

    def step(self, action: str, noise: Rng) -> ActionResult:
        PLAYED.append(action)
        if action == "stop":
            return ActionResult(f"Stopped at {self.total}.", 1.0, terminated=True, success=self.total == self.target)
        if action not in ("roll", "slow"):
            return ActionResult("Say roll, slow or stop.", -0.1, valid=False)
        if action == "slow":
            GATE.wait()
        rolled = noise.below(self.options.faces)
        self.total += rolled
        return ActionResult(
            f"Rolled {rolled}, total {self.total}.",
            rolled - 2.5,
            success=False,
            reward_components={"roll": float(rolled)},
            metrics={"total": float(self.total)},
        )

    def world(self) -> bytes:
        return str(self.target).encode()

    def legal_actions(self) -> Sequence[str] | None:
        return ("roll", "slow", "stop")

    def oracle(self, left: Left) -> Sequence[str] | None:
        return ("stop",) if self.total == self.target else ("roll",) * min(left.actions_per_turn, left.actions)

    def explain(self, left: Left) -> str:
        return f"{self.total} of {self.target} with {left.turns} turns left."


class LevelOptions(Options):
    levels: Path | None = None


class Levels(Dice):
    """Dice whose targets can be given in a file, one a line."""

    @classmethod
    def open_catalogue(cls, operator: Options) -> Catalogue | None:
        assert isinstance(operator, LevelOptions)
        if operator.levels is None:
            return None
        lines = operator.levels.read_text(encoding="utf-8").split()
        for number, line in enumerate(lines, start=1):
            if not line.isdigit():
                raise ValueError(f"{operator.levels}:{number}: expected a whole number, got {line!r}")
        return Catalogue(tuple(lines), tuple(line.encode() for line in lines), options=frozenset({"faces"}))

    def load(self, level: str) -> Start:
        self.target = int(level)
        self.total = 0
        return Start(
            f"Target {self.target}.", limits=Limits(max_turns=int(level) + 1, max_actions=50, max_actions_per_turn=2)
        )


class CountedDice(Dice):
    """Dice whose worlds are known by construction."""

    @classmethod
    def world_count(cls, options: DiceOptions) -> int:
        return options.worlds


class FewOptions(DiceOptions):
    worlds: int = Field(default=30, ge=1)


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


CLOSED: list[bool] = []
"""For each Faulty environment that was closed, whether a step was being played in it."""


class FaultyOptions(Options):
    reset: str = ""
    told: str = ""

    @field_validator("told")
    @classmethod
    def _check(cls, told: str) -> str:
        if told == "type":
            raise TypeError("a validator's own")
        if told == "exit":
            raise SystemExit(3)
        if told == "cancel":
            raise asyncio.CancelledError
        if told.startswith("hanging check"):
            GATE.wait()
        return told


class Faulty(Environment[FaultyOptions]):
    """Does what an environment must not do, by the name of the action."""

    inside = False

    @classmethod
    def instructions(cls, options: FaultyOptions, limits: Limits) -> str:
        match options.told:
            case "raise":
                raise RuntimeError("nothing to say")
            case "nothing":
                return None
            case "surrogate":
                return "a\ud800"
            case "long":
                return "é" * 131_073
            case "longest":
                return "é" * 131_072
            case "hang":
                GATE.wait()
            case _:
                pass
        return "Break something."

    def reset(self, level: Rng) -> Start:
        if self.options.reset == "raise":
            raise RuntimeError("no level today")
        if self.options.reset == "nothing":
            return None
        return Start("x" * 300_000 if self.options.reset == "long" else "Ready.")

    def step(self, action: str, noise: Rng) -> ActionResult:
        match action:
            case "raise":
                raise KeyError("a missing wall")
            case "nothing":
                return None  # As who forgets a `return` does.
            case "stray":
                return ActionResult(self.nowhere, 0.0)
            case "quote":
                raise ValueError(f"SECRETWORLD{len(action)}") from KeyError(f"SECRETWORLD{len(action)}")
            case "ramble":
                raise RuntimeError("first\n\x1b[31msecond\x00" + "é" * 1_000)
            case "mute":
                raise MuteError
            case "exit":
                raise SystemExit(3)
            case "interrupt":
                raise KeyboardInterrupt("a game's own")
            case "cancel":
                raise asyncio.CancelledError
            case "timeout":
                raise TimeoutError("a connection of its own")
            case "nan":
                return ActionResult("Fine.", float("nan"))
            case "long":
                return ActionResult("é" * 131_073, 0.0)
            case "longest":
                return ActionResult("é" * 131_072, 0.0)
            case "surrogate":
                return ActionResult("\ud800", 0.0)
            case "hang":
                self.inside = True
                GATE.wait()
                self.inside = False
            case "sleep":
                time.sleep(0.05)
            case _:
                pass
        return ActionResult("Fine.", -0.0)

    def world(self) -> bytes:
        return b"one"

    def legal_actions(self) -> Sequence[str] | None:
        if not self.options.reset:
            return None
        raise RuntimeError("lost count")

    def oracle(self, left: Left) -> Sequence[str] | None:
        if self.options.reset == "oracle":
            raise RuntimeError("no idea")
        if self.options.reset == "slow oracle":
            GATE.wait()
            return ("go",)
        return None

    def fork(self) -> Self:
        if self.options.reset == "slow fork":
            GATE.wait()
        return super().fork()

    def close(self) -> None:
        if self.options.reset == "slow close":
            GATE.wait()
        CLOSED.append(self.inside)


def make_spec(id: str, environment: type[Environment[Any]], options: type[Options], **changes: Any) -> EnvironmentSpec:
    return replace(
        EnvironmentSpec(
            id=id,
            version="1.0",
            family=id,
            summary=f"{environment.__name__} for tests.",
            environment=environment,
            options=options,
            operator_options=NoOperatorOptions,
            limits=Limits(max_turns=20, max_actions=30, max_actions_per_turn=3),
            caps=DEFAULT_CAPS,
            action_separator="||",
            action_kind=ActionKind.TEXT,
            tools=(),
            determinism=Determinism.BYTES,
            split_epoch=1,
            inline=True,
            step_deadline=30.0,
        ),
        **changes,
    )


DICE = make_spec("dice", Dice, DiceOptions)
THREADED_DICE = make_spec("threaded_dice", Dice, DiceOptions, family="dice", inline=False)
UNSURE_DICE = make_spec("unsure_dice", Dice, DiceOptions, determinism=Determinism.NONE)
LEVELS = make_spec("levels", Levels, DiceOptions, operator_options=LevelOptions)
COUNTED_DICE = make_spec("counted_dice", CountedDice, DiceOptions)
FEW_DICE = make_spec("few_dice", CountedDice, FewOptions)
FAULTY = make_spec("faulty", Faulty, FaultyOptions)
THREADED_FAULTY = make_spec("threaded_faulty", Faulty, FaultyOptions, inline=False, step_deadline=0.3)
