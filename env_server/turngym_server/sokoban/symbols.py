"""How a board is written: one character a cell, RAGEN's by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from turngym_server.sokoban.board import Level, cells

PRESETS: Final[Mapping[str, str]] = {
    "ragen": "#_O√XPS",
    "xsb": "#-.*$@+",
    "latin": "WFTDBPQ",
    "digits": "0123456",
}


@dataclass(frozen=True, slots=True)
class Symbols:
    """Seven distinct characters."""

    wall: str
    floor: str
    target: str
    box_on_target: str
    box: str
    player: str
    player_on_target: str

    def legend(self) -> str:
        return (
            f"{self.wall} wall, {self.floor} floor, {self.target} target, {self.box} box, "
            f"{self.box_on_target} box on target, {self.player} you, {self.player_on_target} you on target"
        )

    def draw(self, level: Level) -> list[str]:
        """The board's text, one entry a cell, newlines included: `"".join` of it is the observation."""
        board = level.board
        text = [self.wall] * (board.height * board.stride - 1)
        text[board.width :: board.stride] = "\n" * (board.height - 1)
        for cell in cells(board.floor):
            on_target = board.targets >> cell & 1
            if level.boxes >> cell & 1:
                text[cell] = self.box_on_target if on_target else self.box
            elif cell == level.player:
                text[cell] = self.player_on_target if on_target else self.player
            else:
                text[cell] = self.target if on_target else self.floor
        return text


@lru_cache(maxsize=256)
def symbols_of(vocabulary: str) -> Symbols:
    """The symbols that an option names: a preset, or seven distinct characters in the order of `Symbols`.

    Raises:
        ValueError: neither.
    """
    characters = PRESETS.get(vocabulary, vocabulary)
    usable = all(character.isprintable() and not character.isspace() for character in characters)
    if len(characters) != 7 or len(set(characters)) != 7 or not usable:
        raise ValueError(
            f"symbols {vocabulary!r}: expected one of {', '.join(PRESETS)}, or seven distinct printable characters for "
            "wall, floor, target, box on target, box, player, player on target"
        )
    return Symbols(*characters)
