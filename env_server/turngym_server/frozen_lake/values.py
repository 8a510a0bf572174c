"""Exact success probabilities on a lake, for the best player and for a random one.

The best player sees the lake before each turn, and commits to all of the turn's actions at once. So with t turns and
a actions left, V(t, a) = max over sequences of k ≤ min(a, actions a turn) actions of E V(t − 1, a − k), by cell.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from turngym_server.environment import Left
from turngym_server.frozen_lake.lake import Lake

Values = NDArray[np.float64]
"""By cell."""

Sequences = NDArray[np.float64]
"""By cell and sequence of actions; a sequence is a number in base 4, its first action the leading digit."""

_ENTRIES: Final = 1 << 20
"""Largest table of sequences: cells · 4^k."""

_TIE: Final = 1e-12
"""Values this close differ by rounding only."""

_TURNS: Final = 12
_ACTIONS: Final = 24
"""Furthest look ahead."""


class BestPlay:
    """The best player's values and turns on one lake; `slip` is the probability of each side."""

    def __init__(self, lake: Lake, slip: float) -> None:
        cells = lake.size**2
        self._beside = np.array([[lake.beside(cell, d) for cell in range(cells)] for d in range(4)])
        self._slip = slip
        self._holes = np.array([bool(lake.holes >> cell & 1) for cell in range(cells)])
        self._goal = lake.goal
        self._longest = max(k for k in range(1, 11) if cells * 4**k <= _ENTRIES)
        self._values: dict[tuple[int, int, int], Values] = {}

    def exact(self, left: Left) -> bool:
        """Whether values and turns for so much left look ahead to the end."""
        return self._within_reach(left) == _useful(left)

    def value(self, cell: int, left: Left) -> float:
        """Success probability from a cell; exact where `exact` says so, else that of a shorter look ahead."""
        return float(self._value(*self._within_reach(left))[cell])

    def best_turn(self, cell: int, left: Left) -> tuple[int, ...]:
        """A best next turn; of equally good ones a longest that wastes no action. Empty when nothing is left."""
        turns, actions, a_turn = self._within_reach(left)
        value = self._value(turns, actions, a_turn)[cell]
        while actions > 1 and self._value(turns, actions - 1, a_turn)[cell] > value - _TIE:
            actions -= 1
        for length in range(min(actions, a_turn), 0, -1):
            outcomes = self._sequences(self._value(turns - 1, actions - length, a_turn), length)[cell]
            index = int(np.argmax(outcomes))
            if outcomes[index] > value - _TIE:
                return tuple(index // 4**place % 4 for place in range(length - 1, -1, -1))
        return ()

    def _within_reach(self, left: Left) -> tuple[int, int, int]:
        turns, actions, a_turn = _useful(left)
        return min(turns, _TURNS), min(actions, _ACTIONS), min(a_turn, self._longest)

    def _value(self, turns: int, actions: int, a_turn: int) -> Values:
        turns, actions, a_turn = _useful(Left(turns, actions, a_turn))
        known = self._values.get((turns, actions, a_turn))
        if known is None:
            known = np.zeros(len(self._holes))
            known[self._goal] = 1.0
            for length in range(1, min(actions, a_turn) + 1):
                after = self._value(turns - 1, actions - length, a_turn)
                known = np.maximum(known, self._sequences(after, length).max(axis=1))
            self._values[turns, actions, a_turn] = known
        return known

    def _sequences(self, after: Values, length: int) -> Sequences:
        """Expected value of every sequence of so many actions, given the values after it."""
        outcomes = after[:, None]
        for _ in range(length):
            outcomes = np.concatenate([self._before(outcomes, direction) for direction in range(4)], axis=1)
        return outcomes

    def _before(self, outcomes: Sequences, direction: int) -> Sequences:
        """Expected outcomes before an action, given those after it."""
        ahead, one_side, other_side = (self._beside[(direction + turn) % 4] for turn in (0, 1, 3))
        expected = (1 - 2 * self._slip) * outcomes[ahead] + self._slip * (outcomes[one_side] + outcomes[other_side])
        expected[self._goal] = 1.0
        expected[self._holes] = 0.0
        return expected


def _useful(left: Left) -> tuple[int, int, int]:
    """Turns, actions and actions a turn, without those that can never be used."""
    actions = left.reachable_actions
    return min(left.turns, actions), actions, min(left.actions_per_turn, actions)


@lru_cache(maxsize=1_024)
def best_play(lake: Lake, slip: float) -> BestPlay:
    """The values of a lake, kept for the turns and the episodes to come."""
    return BestPlay(lake, slip)


def random_player_success(lake: Lake, start: int, actions: int) -> float:
    """Success probability of so many uniform random actions.

    Slipping does not matter: with a uniform direction, all four ways are equally likely whatever the slip.
    """
    value = [1.0 if cell == lake.goal else 0.0 for cell in range(lake.size**2)]
    ways = [[lake.beside(cell, direction) for direction in range(4)] for cell in range(lake.size**2)]
    for _ in range(actions):
        value = [
            value[cell] if cell == lake.goal or lake.holes >> cell & 1 else sum(value[to] for to in ways[cell]) / 4
            for cell in range(lake.size**2)
        ]
    return value[start]
