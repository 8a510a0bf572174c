"""An environment that sleeps in every step, to be served beside itself awake."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pydantic import Field

from turngym_server.environment import ActionResult, Environment, Limits, Options, Start, register
from turngym_server.rng import Rng

ENDLESS = Limits(max_turns=10**6, max_actions=10**6, max_actions_per_turn=1)


class SleeperOptions(Options):
    seconds: float = Field(default=0.0, ge=0.0, description="How long a step sleeps.")


@register(
    id="sleeper",
    version="1.0",
    family="sleeper",
    summary="Sleeps.",
    options=SleeperOptions,
    limits=ENDLESS,
    caps=ENDLESS,
    action_separator="",
)
class Sleeper(Environment[SleeperOptions]):
    @classmethod
    def instructions(cls, options: SleeperOptions, limits: Limits) -> str:
        return "Say anything."

    def reset(self, level: Rng) -> Start:
        self._world = level.word().to_bytes(8, "big")
        return Start("zzz")

    def step(self, action: str, noise: Rng) -> ActionResult:
        if self.options.seconds:
            time.sleep(self.options.seconds)
        return ActionResult("zzz", reward=0.0)

    def world(self) -> bytes:
        return self._world

    def legal_actions(self) -> Sequence[str] | None:
        return None
