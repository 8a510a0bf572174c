"""FrozenLake: reach the goal over slippery ice, between holes (after RAGEN's and Gymnasium's)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import Field, field_validator

from turngym_server.environment import ActionResult, Environment, Left, Limits, Options, Start, register
from turngym_server.frozen_lake.lake import DIRECTIONS, Lake, draw_lake, moves_to_goal
from turngym_server.frozen_lake.values import best_play, random_player_success
from turngym_server.rng import Rng
from turngym_server.wording import limits_told, listed

PRESETS: Final[Mapping[str, str]] = {"ragen": "P_OGX√", "latin": "PIHGDW", "digits": "012345"}

_MOVES: Final = {name.casefold(): index for index, name in enumerate(DIRECTIONS)}


class FrozenLakeOptions(Options):
    size: int = Field(default=4, ge=2, le=12, description="Rows, and columns.")
    holes: float = Field(default=0.2, ge=0.0, le=0.6, description="Probability that a cell is a hole.")
    slip: float = Field(
        default=1 / 3, ge=0.0, le=0.5, description="Probability of slipping to one side, and again to the other."
    )
    symbols: str = Field(
        default="ragen",
        max_length=16,
        description="ragen, latin, digits, or six characters: player, ice, hole, goal, player in a hole, player at the "
        "goal.",
    )

    @field_validator("symbols")
    @classmethod
    def _known_symbols(cls, value: str) -> str:
        characters = PRESETS.get(value, value)
        usable = all(character.isprintable() and not character.isspace() for character in characters)
        if len(characters) != 6 or len(set(characters)) != 6 or not usable:
            raise ValueError(
                f"symbols {value!r}: expected one of {', '.join(PRESETS)}, or six distinct printable characters for "
                "player, ice, hole, goal, player in a hole, player at the goal"
            )
        return value


@register(
    id="frozen_lake",
    version="1.0",
    family="frozen_lake",
    summary="Cross a slippery 4×4 lake to the goal without falling into a hole.",
    options=FrozenLakeOptions,
    limits=Limits(max_turns=5, max_actions=10, max_actions_per_turn=5),
    inline=True,
)
class FrozenLake(Environment[FrozenLakeOptions]):
    """Cross a slippery lake to the goal.

    Observation, as served for seed 0:

        PO__
        G___
        _O_O
        ____

    `P` player, `_` ice, `O` hole, `G` goal, `X` player in a hole, `√` player at the goal. Start, goal and holes are
    drawn; a way that avoids the holes always exists.

    Legal actions: Left, Down, Right, Up, in any case, always. With probability 1/3 each, the player goes where it meant
    to, to the left of that, or to the right of that; at the edge it stays.

    | event | reward |
    |---|---|
    | the goal is reached | 1 |
    | anything else | 0 |

    Ends at the goal, which is success, and in a hole.

    Floor 18.8 % ± 0.8 and ceiling 42.8 % ± 1.2 on held-out worlds (20.0 % ± 0.8 and 46.2 % ± 1.2 on training ones) with
    10 actions in 5 turns: 2,048 instances each, exact values. The ceiling is that of a player who sees the lake once a
    turn; with one action a turn it is 43.6 %. There are 64,960 worlds, 6,426 of them held out.
    """

    _lake: Lake
    _player: int

    @classmethod
    def instructions(cls, options: FrozenLakeOptions, limits: Limits) -> str:
        player, ice, hole, goal, drowned, arrived = PRESETS.get(options.symbols, options.symbols)
        told = (
            "Frozen lake: reach the goal without falling into a hole.\n"
            f"Symbols: {player} you, {ice} ice, {hole} hole, {goal} goal, {drowned} you in a hole, {arrived} you at "
            "the goal.\n"
            "Actions: Left, Down, Right, Up."
        )
        if options.slip:
            told += (
                f" The ice is slippery: with probability {options.slip:.3g} you go to the left of where you meant to, "
                f"with probability {options.slip:.3g} to the right of it."
            )
        return (
            f"{told} At the edge you stay where you are.\n"
            f"Reward: 1 at the goal, which ends the episode, as does a hole.\n{limits_told(limits, '||')}"
        )

    def reset(self, level: Rng) -> Start:
        self._lake, self._player = draw_lake(level, self.options.size, self.options.holes)
        return Start(self._observation())

    def step(self, action: str, noise: Rng) -> ActionResult:
        move = _MOVES.get(action.strip().casefold())
        if move is None:
            return ActionResult(
                f"Not an action. Answer {listed(DIRECTIONS)}.\n{self._observation()}", 0.0, success=False, valid=False
            )
        self._player = self._lake.beside(self._player, self._slipped(move, noise))
        arrived = self._player == self._lake.goal
        drowned = bool(self._lake.holes >> self._player & 1)
        return ActionResult(
            self._observation(), 1.0 if arrived else 0.0, terminated=arrived or drowned, success=arrived
        )

    def _slipped(self, move: int, noise: Rng) -> int:
        """Where a move really goes."""
        slip = self.options.slip
        if not slip:
            return move
        drawn = noise.random()
        if drawn < slip:
            return (move + 1) % 4
        return (move + 3) % 4 if drawn < 2 * slip else move

    def world(self) -> bytes:
        return self._lake.world()

    def legal_actions(self) -> Sequence[str]:
        return DIRECTIONS

    def oracle(self, left: Left) -> Sequence[str]:
        turn = best_play(self._lake, self.options.slip).best_turn(self._player, left)
        return [DIRECTIONS[direction] for direction in turn]

    def explain(self, left: Left) -> str:
        around = ", ".join(f"{name} {self._from_beside(direction)}" for direction, name in enumerate(DIRECTIONS))
        turn = self.oracle(left)
        return f"{around}." + (f" Go {turn[0]}." if turn else "")

    def _from_beside(self, direction: int) -> str:
        """What the next cell that way is, or how many moves the goal is away from there."""
        cell = self._lake.beside(self._player, direction)
        if self._lake.holes >> cell & 1:
            return "hole"
        moves = moves_to_goal(self._lake).get(cell)
        return "none" if moves is None else f"{moves}" if moves else "goal"

    def ceiling(self, left: Left) -> float | None:
        play = best_play(self._lake, self.options.slip)
        return play.value(self._player, left) if play.exact(left) else None

    def floor(self, left: Left) -> float:
        return random_player_success(self._lake, self._player, left.reachable_actions)

    def _observation(self) -> str:
        player, ice, hole, goal, drowned, arrived = PRESETS.get(self.options.symbols, self.options.symbols)
        lake = self._lake
        marks = [hole if lake.holes >> cell & 1 else ice for cell in range(lake.size**2)]
        marks[lake.goal] = goal
        marks[self._player] = {hole: drowned, goal: arrived}.get(marks[self._player], player)
        return "\n".join("".join(marks[at : at + lake.size]) for at in range(0, len(marks), lake.size))
