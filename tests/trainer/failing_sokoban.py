"""Sokoban that raises in every turn."""

from turngym_server.environment import ActionResult, Limits, register
from turngym_server.envs.sokoban import Sokoban, SokobanOperatorOptions, SokobanOptions
from turngym_server.rng import Rng


@register(
    id="failing_sokoban",
    version="1.0",
    family="sokoban",
    summary="Sokoban that fails.",
    options=SokobanOptions,
    operator_options=SokobanOperatorOptions,
    limits=Limits(max_turns=5, max_actions=10, max_actions_per_turn=5),
    inline=True,
)
class FailingSokoban(Sokoban):
    def step(self, action: str, noise: Rng) -> ActionResult:
        raise RuntimeError("out of order")
