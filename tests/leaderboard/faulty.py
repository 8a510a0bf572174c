"""An environment that fails on purpose: `--env faulty:Faulty` with this folder importable."""

import time
from typing import ClassVar

from turngym_server.environment import ActionResult, Environment, Limits, Options, Start, register
from turngym_server.rng import Rng


@register(
    id="faulty",
    version="1",
    family="faulty",
    summary="Fails when it is told to.",
    options=Options,
    limits=Limits(max_turns=3, max_actions=3, max_actions_per_turn=1),
)
class Faulty(Environment[Options]):
    """`win` wins, `linger` does so after a while, `crash` raises always, `stumble` raises once on each level,
    `shrug` ends without a verdict.
    """

    stumbled: ClassVar[set[int]] = set()

    @classmethod
    def instructions(cls, options: Options, limits: Limits) -> str:
        return "Say win."

    def reset(self, level: Rng) -> Start:
        self.number = level.below(1 << 32)
        return Start("What do you say?")

    def step(self, action: str, noise: Rng) -> ActionResult:
        if action == "crash" or (action == "stumble" and self.number not in self.stumbled):
            self.stumbled.add(self.number)
            raise RuntimeError("as told")
        if action == "linger":
            time.sleep(1.0)
        if action == "shrug":
            return ActionResult("Who knows.", 0.0, terminated=True, success=None)
        won = action in ("win", "linger", "stumble")
        return ActionResult("So be it.", float(won), terminated=won, success=won)

    def world(self) -> bytes:
        return str(self.number).encode()

    def legal_actions(self) -> None:
        return None
