"""Sokoban that kills its own server, as `kill -9` would, in the n-th call of a method: DIE_IN=step:40."""

import os
import signal
from typing import Self

from turngym_server.environment import ActionResult, Limits, Start, register
from turngym_server.envs.sokoban import Sokoban, SokobanOperatorOptions, SokobanOptions
from turngym_server.rng import Rng

method, _, calls = os.environ.get("DIE_IN", "").partition(":")
calls_left = int(calls or 0)


def count(called: str) -> None:
    global calls_left
    if called == method:
        calls_left -= 1
        if calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@register(
    id="dying_sokoban",
    version="1.0",
    family="sokoban",
    summary="Sokoban whose server dies on demand.",
    options=SokobanOptions,
    operator_options=SokobanOperatorOptions,
    limits=Limits(max_turns=5, max_actions=10, max_actions_per_turn=5),
    inline=True,
)
class DyingSokoban(Sokoban):
    def reset(self, level: Rng) -> Start:
        count("reset")
        return super().reset(level)

    def step(self, action: str, noise: Rng) -> ActionResult:
        count("step")
        return super().step(action, noise)

    def fork(self) -> Self:
        count("fork")
        return super().fork()
