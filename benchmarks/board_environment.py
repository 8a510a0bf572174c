"""`board` as an environment of turngym, episodes of any length."""

from __future__ import annotations

from collections.abc import Sequence

from board import ACTIONS, Board

from turngym_server.environment import ActionResult, Environment, Limits, Options, Start, register
from turngym_server.rng import Rng

ID = "board"
ENDLESS = Limits(max_turns=10**6, max_actions=10**6, max_actions_per_turn=1)


class BoardOptions(Options):
    pass


@register(
    id=ID,
    version="1.0",
    family="board",
    summary="Sokoban in plain Python, for comparing stacks.",
    options=BoardOptions,
    limits=ENDLESS,
    caps=ENDLESS,
    action_separator="",
    inline=True,
)
class BoardEnvironment(Environment[BoardOptions]):
    @classmethod
    def instructions(cls, options: BoardOptions, limits: Limits) -> str:
        return "Push the box onto the target: Up, Down, Left, Right."

    def reset(self, level: Rng) -> Start:
        self._world = level.word().to_bytes(8, "big")
        self._board = Board()
        return Start(self._board.reset())

    def step(self, action: str, noise: Rng) -> ActionResult:
        observation, reward = self._board.step(action)
        return ActionResult(observation, reward)

    def world(self) -> bytes:
        return self._world

    def legal_actions(self) -> Sequence[str] | None:
        return ACTIONS
