"""Sokoban on a 6×6 board in plain Python: the same work under every stack that is compared. Standard library only.

Observations are 200 bytes. Play never ends by itself: a solved board begins anew, so that an episode's length is the
caller's choice.
"""

from __future__ import annotations

ACTIONS = ("Up", "Down", "Left", "Right")
LEVEL = """\
######
#____#
#_P__#
#_X__#
#__O_#
######
"""
LEGEND = (
    "# wall, _ floor, O target, X box, * box on target, P player, S player on target. Push the box onto the target. "
)
OBSERVATION_BYTES = 200
WIDTH = LEVEL.index("\n") + 1
_DELTAS = {"Up": -WIDTH, "Down": WIDTH, "Left": -1, "Right": 1}
_SYMBOLS = {(False, ""): "_", (True, ""): "O", (False, "X"): "X", (True, "X"): "*", (False, "P"): "P", (True, "P"): "S"}


class Board:
    """One board being played."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> str:
        """The first observation."""
        self._cells = list(LEVEL)
        self._player, self._box, self._target = (LEVEL.index(symbol) for symbol in "PXO")
        return self._observation()

    def step(self, action: str) -> tuple[str, float]:
        """Plays an action of ACTIONS: the observation, and the reward."""
        delta = _DELTAS[action]
        to = self._player + delta
        if LEVEL[to] == "#":
            return self._observation(), -0.1
        reward = -0.1
        if to == self._box:
            beyond = to + delta
            if LEVEL[beyond] == "#":
                return self._observation(), reward
            self._box = beyond
            self._draw(beyond, "X")
            if beyond == self._target:
                return self.reset(), 10.9
            if to == self._target:
                reward = -1.1
        self._draw(self._player, "")
        self._draw(to, "P")
        self._player = to
        return self._observation(), reward

    def _draw(self, cell: int, what: str) -> None:
        self._cells[cell] = _SYMBOLS[cell == self._target, what]

    def _observation(self) -> str:
        return f"{''.join(self._cells)}{LEGEND}".ljust(OBSERVATION_BYTES, ".")
