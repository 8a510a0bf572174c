"""A bandit whose bold arm is the worse one: it pays 1, but one time in twenty."""

from collections.abc import Sequence
from typing import Final

from turngym_server.environment import ActionResult, Environment, Left, Limits, Options, Start, register
from turngym_server.rng import Rng

STEADY_PAY: Final = 0.1
BOLD_PAYS: Final = 0.05
"""Probability that the bold arm pays 1 rather than 0: half of what the steady arm is worth."""
ARMS: Final = ("Phoenix", "Dragon")


@register(
    id="rare_bandit",
    version="1.0",
    family="bandit",
    summary="One pull at one of two arms, the bold one of which is worth half as much.",
    options=Options,
    limits=Limits(max_turns=1, max_actions=1, max_actions_per_turn=1),
    action_separator="",
    inline=True,
)
class RareBandit(Environment[Options]):
    """One pull: Phoenix pays 0.1 always, Dragon 1 with probability 0.05.

    Observation and actions are those of `bandit`. Success: Phoenix was pulled. Floor 0.5, ceiling 1.
    """

    _shown: tuple[str, ...]

    @classmethod
    def instructions(cls, options: Options, limits: Limits) -> str:
        return "There are two arms. Answer with the name of the one that you expect to pay more on average."

    @classmethod
    def world_count(cls, options: Options) -> int:
        return 1

    def reset(self, level: Rng) -> Start:
        self._shown = ARMS if level.below(2) else ARMS[::-1]
        return Start(f"Arms: {', '.join(self._shown)}")

    def step(self, action: str, noise: Rng) -> ActionResult:
        steady, bold = ARMS
        name = action.strip().casefold()
        if name == steady.casefold():
            return ActionResult(f"{steady} paid {STEADY_PAY}.", STEADY_PAY, terminated=True, success=True)
        if name == bold.casefold():
            pay = 1.0 if noise.random() < BOLD_PAYS else 0.0
            return ActionResult(f"{bold} paid {pay:g}.", pay, terminated=True, success=False)
        return ActionResult("No such arm.", 0.0, success=False, valid=False)

    def world(self) -> bytes:
        return "\n".join(sorted(self._shown)).encode()

    def legal_actions(self) -> Sequence[str]:
        return self._shown

    def oracle(self, left: Left) -> Sequence[str]:
        return ARMS[:1] if left.reachable_actions else ()
