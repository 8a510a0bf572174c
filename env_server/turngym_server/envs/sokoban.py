"""Sokoban: push every box onto a target (after RAGEN's, arXiv 2504.20073, with levels of our own generator)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from turngym_server.environment import (
    ActionResult,
    Catalogue,
    Environment,
    Left,
    Limits,
    Options,
    Start,
    register,
)
from turngym_server.rng import Rng
from turngym_server.sokoban.board import DIRECTIONS, Level, canonical
from turngym_server.sokoban.generator import Difficulty, draw_level
from turngym_server.sokoban.level_file import parse_level, read_levels
from turngym_server.sokoban.oracle import Plan, describe, plan
from turngym_server.sokoban.solver import random_player_success, state_bound
from turngym_server.sokoban.symbols import Symbols, symbols_of
from turngym_server.wording import limits_told, listed

STEP_REWARD: Final = -0.1
BOX_REWARD: Final = 1.0
SOLVED_REWARD: Final = 10.0

LIMITS: Final = Limits(max_turns=5, max_actions=10, max_actions_per_turn=5)
LARGE_LIMITS: Final = Limits(max_turns=10, max_actions=20, max_actions_per_turn=5)

UNSOLVED_ACTIONS: Final = 200
"""Actions granted for a level of a file that the oracle did not solve; otherwise four times its moves."""

_FLOOR_WORK: Final = 500_000
"""The random player's odds are computed where states × actions stay under this."""

_MOVES: Final = {name.casefold(): index for index, name in enumerate(DIRECTIONS)}


@dataclass(frozen=True, slots=True)
class _Event:
    """What an action did, in rewards."""

    reward: float
    components: Mapping[str, float]


_STEP: Final = _Event(STEP_REWARD, {"step": STEP_REWARD})
_BOX_ON: Final = _Event(STEP_REWARD + BOX_REWARD, {"step": STEP_REWARD, "box": BOX_REWARD})
_BOX_OFF: Final = _Event(STEP_REWARD - BOX_REWARD, {"step": STEP_REWARD, "box": -BOX_REWARD})
_SOLVED: Final = _Event(
    STEP_REWARD + BOX_REWARD + SOLVED_REWARD, {"step": STEP_REWARD, "box": BOX_REWARD, "solved": SOLVED_REWARD}
)


class SokobanOptions(Options):
    width: int = Field(default=6, ge=3, le=20, description="Columns, the walls around included.")
    height: int = Field(default=6, ge=3, le=20, description="Rows, the walls around included.")
    boxes: int = Field(default=1, ge=1, le=10, description="Boxes, and targets.")
    max_solution: int = Field(default=10, ge=1, le=1_000, description="Every level can be solved in so many moves.")
    min_pushes: int = Field(default=1, ge=1, description="Least pushes that a level may need.")
    max_pushes: int | None = Field(
        default=None, ge=1, description="Most pushes that a level may need; null: any number."
    )
    floors: Literal["uniform", "walk"] = Field(
        default="uniform", description="Floor shapes: uniform, or a random walk's as in gym-sokoban and RAGEN."
    )
    symbols: str = Field(
        default="ragen",
        max_length=16,
        description="ragen, xsb, latin, digits, or seven characters: wall, floor, target, box on target, box, player, "
        "player on target.",
    )

    @field_validator("symbols")
    @classmethod
    def _known_symbols(cls, value: str) -> str:
        symbols_of(value)
        return value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        inner = (self.width - 2) * (self.height - 2)
        if max(self.width, self.height) < 5 or inner < 6 * self.boxes - 3:
            raise ValueError(
                f"a {self.width}×{self.height} board has no room for {self.boxes} boxes: needs a side of 5 or more, "
                f"and {6 * self.boxes - 3} cells inside the walls"
            )
        most = self.max_solution if self.max_pushes is None else min(self.max_pushes, self.max_solution)
        if self.min_pushes > most:
            raise ValueError(f"min_pushes {self.min_pushes} is over what max_pushes and max_solution allow, {most}")
        return self


class SokobanLargeOptions(SokobanOptions):
    width: int = Field(default=8, ge=3, le=20, description="Columns, the walls around included.")
    height: int = Field(default=8, ge=3, le=20, description="Rows, the walls around included.")
    boxes: int = Field(default=2, ge=1, le=10, description="Boxes, and targets.")
    max_solution: int = Field(default=20, ge=1, le=1_000, description="Every level can be solved in so many moves.")


class SokobanOperatorOptions(Options):
    levels: Path | None = Field(default=None, description="A level file (.xsb, .sok, Boxoban's .txt) to serve.")


@register(
    id="sokoban",
    version="1.0",
    family="sokoban",
    summary="Push one box onto its target, 6×6.",
    options=SokobanOptions,
    operator_options=SokobanOperatorOptions,
    limits=LIMITS,
    inline=True,
)
@register(
    id="sokoban_large",
    version="1.0",
    family="sokoban",
    summary="Push two boxes onto targets, 8×8.",
    options=SokobanLargeOptions,
    operator_options=SokobanOperatorOptions,
    limits=LARGE_LIMITS,
    inline=True,
)
class Sokoban(Environment[SokobanOptions]):
    """Push every box onto a target.

    Observation, as served for seed 0:

        ######
        #_#_##
        #_#P_#
        #_OX_#
        ##_###
        ######

    `#` wall, `_` floor, `O` target, `X` box, `√` box on target, `P` player, `S` player on target.

    Legal actions: Up, Down, Left, Right, in any case, always; into a wall, or a box that cannot move, nothing happens.

    | event | reward |
    |---|---|
    | each action, an invalid one too | −0.1 |
    | a box is pushed onto a target | +1 |
    | a box is pushed off a target | −1 |
    | all boxes are on targets | +10 |

    Ends when all boxes are on targets, which is success.

    Floor 17.1 % ± 1.1 on held-out worlds (19.1 % ± 1.1 on training ones), ceiling 100 %: 2,048 instances each, exact
    values, 10 actions. There are 9,117 worlds at 6×6, 918 of them held out. `sokoban_large`: floor 1.8 % ± 0.3, ceiling
    100 %, 20 actions, 2,048 instances; at least 4·10^7 held-out worlds. By `experiments/reference_scores.py`.
    """

    _level: Level
    _deltas: tuple[int, int, int, int]
    _player: int
    _boxes: int
    _symbols: Symbols
    _text: list[str]
    _plan: Plan | None
    """The oracle's plan for the state as it stands, kept while play follows it: two solutions must not be mixed."""

    @classmethod
    def instructions(cls, options: SokobanOptions, limits: Limits) -> str:
        return (
            "Sokoban: push every box onto a target.\n"
            f"Symbols: {symbols_of(options.symbols).legend()}.\n"
            "Actions: Up, Down, Left, Right. Walking into a box pushes it if the cell behind it is free; boxes cannot "
            "be pulled. Walking into a wall does nothing.\n"
            "Rewards: -0.1 each action, +1 a box onto a target, -1 a box off a target, +10 all boxes on targets, which "
            "ends the episode.\n" + limits_told(limits, "||")
        )

    @classmethod
    def open_catalogue(cls, operator: Options) -> Catalogue | None:
        assert isinstance(operator, SokobanOperatorOptions)
        if operator.levels is None:
            return None
        levels = read_levels(operator.levels)
        parsed = map(parse_level, levels)
        worlds = tuple(canonical(level.board, level.player) for level in parsed)
        return Catalogue(levels, worlds, options=frozenset({"symbols"}))

    def reset(self, level: Rng) -> Start:
        options = self.options
        difficulty = Difficulty(options.max_solution, options.min_pushes, options.max_pushes)
        return self._begin(draw_level(level, options.width, options.height, options.boxes, difficulty, options.floors))

    def load(self, level: str) -> Start:
        start = self._begin(parse_level(level))
        moves = self._planned().moves
        actions = UNSOLVED_ACTIONS if moves is None else 4 * len(moves)
        turns = math.ceil(actions * LIMITS.max_turns / LIMITS.max_actions)
        return Start(start.observation, limits=Limits(turns, actions, LIMITS.max_actions_per_turn))

    def _begin(self, level: Level) -> Start:
        self._level = level
        self._deltas = level.board.deltas
        self._player = level.player
        self._boxes = level.boxes
        self._symbols = symbols_of(self.options.symbols)
        self._text = self._symbols.draw(level)
        self._plan = None
        return Start("".join(self._text))

    def step(self, action: str, noise: Rng) -> ActionResult:
        move = _MOVES.get(action.strip().casefold())
        if move is None:
            return ActionResult(
                f"Not an action. Answer {listed(DIRECTIONS)}.\n{''.join(self._text)}",
                STEP_REWARD,
                success=False,
                valid=False,
                reward_components=_STEP.components,
            )
        event = self._move(move)
        return ActionResult(
            "".join(self._text),
            event.reward,
            terminated=event is _SOLVED,
            success=event is _SOLVED,
            reward_components=event.components,
        )

    def _move(self, move: int) -> _Event:
        """Moves the player, and the box before it, where there is room."""
        board = self._level.board
        delta = self._deltas[move]
        to = self._player + delta
        if not board.floor >> to & 1:
            return _STEP
        event = _STEP
        if self._boxes >> to & 1:
            beyond = to + delta
            if not board.floor >> beyond & 1 or self._boxes >> beyond & 1:
                return _STEP
            event = self._push(to, beyond)
        symbols = self._symbols
        self._text[self._player] = symbols.target if board.targets >> self._player & 1 else symbols.floor
        self._text[to] = symbols.player_on_target if board.targets >> to & 1 else symbols.player
        self._player = to
        self._follow_plan(move)
        return event

    def _push(self, source: int, to: int) -> _Event:
        targets = self._level.board.targets
        self._boxes ^= 1 << source | 1 << to
        was_on, is_on = targets >> source & 1, targets >> to & 1
        self._text[to] = self._symbols.box_on_target if is_on else self._symbols.box
        if self._boxes == targets:
            return _SOLVED
        if was_on == is_on:
            return _STEP
        return _BOX_ON if is_on else _BOX_OFF

    def _follow_plan(self, move: int) -> None:
        if self._plan is not None:
            moves = self._plan.moves
            self._plan = Plan(moves[1:], self._plan.exact) if moves and moves[0] == move else None

    def _planned(self) -> Plan:
        if self._plan is None:
            self._plan = plan(self._level.board, self._player, self._boxes)
        return self._plan

    def fork(self) -> Self:
        twin = copy.copy(self)
        twin._text = list(self._text)
        return twin

    def world(self) -> bytes:
        return canonical(self._level.board, self._level.player)

    def legal_actions(self) -> Sequence[str]:
        return DIRECTIONS

    def oracle(self, left: Left) -> Sequence[str]:
        moves = self._planned().moves or ()
        return [DIRECTIONS[move] for move in moves[: min(left.actions_per_turn, left.reachable_actions)]]

    def explain(self, left: Left) -> str:
        moves = self._planned().moves
        if moves is None:
            return "No way on."
        return describe(self._level.board, self._player, self._boxes, moves)

    def ceiling(self, left: Left) -> float | None:
        known = self._planned()
        if known.moves is not None and len(known.moves) <= left.reachable_actions:
            return 1.0
        return 0.0 if known.exact else None

    def floor(self, left: Left) -> float | None:
        board, moves = self._level.board, left.reachable_actions
        if state_bound(board) * moves > _FLOOR_WORK:
            return None
        return random_player_success(board, self._player, self._boxes, moves)
