"""Reads Sokoban level files: .xsb and .sok collections, and Boxoban's `; n` format.

Levels are separated by blank lines, by comments (`; …`), or by `Key: value` lines. Rows may be ragged. Symbols: `#`
wall, space `-` `_` floor, `.` target, `$` box, `*` box on target, `@` player, `+` player on target.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from turngym_server.sokoban.board import Board, Level, cells, flood

_ROW: Final = re.compile(r"[ \-_#.$*@+]*#[ \-_#.$*@+]*")
_CAPTION: Final = re.compile(r";|::|[A-Za-z][A-Za-z ]*:")


def read_levels(path: Path) -> tuple[str, ...]:
    """The levels of a file in its order, each as `parse_level` takes it.

    Raises:
        ValueError: naming the file and the line: unreadable, no level, or a malformed one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text, as a level file is: {error}") from error
    levels: list[str] = []
    for line, rows in _blocks(text, path):
        level = "\n".join(rows)
        try:
            parse_level(level)
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: level {len(levels) + 1}: {error}") from error
        levels.append(level)
    if not levels:
        raise ValueError(f"{path}, line 1: no level in the file; expected rows of # . $ * @ + and spaces")
    return tuple(levels)


def _blocks(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of the first line, and the rows, of each level."""
    rows: list[str] = []
    start = 1
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.rstrip()
        if _ROW.fullmatch(line):
            start = start if rows else number
            rows.append(line)
            continue
        if line and not _CAPTION.match(line):
            raise ValueError(
                f"{path}, line {number}: {line[:40]!r} is neither a row of # . $ * @ + and spaces with a wall in it, "
                "nor a comment (; …), nor a key (Title: …)"
            )
        if rows:
            yield start, rows
            rows = []
    if rows:
        yield start, rows


def parse_level(text: str) -> Level:
    """A level from its rows.

    Floor that the player cannot reach is wall, unless a box or target is on it.

    Raises:
        ValueError: not one player, no box, boxes and targets differ in number, the border is open, or solved already.
    """
    rows = text.split("\n")
    width, height = max(map(len, rows)), len(rows)
    stride = width + 1
    marked: dict[str, int] = {}
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row.ljust(width)):
            marked[symbol] = marked.get(symbol, 0) | 1 << y * stride + x
    walls = marked.get("#", 0)
    boxes = marked.get("$", 0) | marked.get("*", 0)
    targets = marked.get(".", 0) | marked.get("*", 0) | marked.get("+", 0)
    players = list(cells(marked.get("@", 0) | marked.get("+", 0)))
    if len(players) != 1:
        raise ValueError(f"{len(players)} players (@ or +), expected 1")
    if not boxes:
        raise ValueError("no box ($ or *)")
    if boxes.bit_count() != targets.bit_count():
        raise ValueError(f"{boxes.bit_count()} boxes ($ or *) but {targets.bit_count()} targets (. * or +)")
    if boxes == targets:
        raise ValueError("every box is on a target already")
    grid = sum(marked.values())
    border = sum(
        1 << y * stride + x for y in range(height) for x in range(width) if x in {0, width - 1} or y in {0, height - 1}
    )
    reached = flood(1 << players[0], grid & ~walls, stride)
    floor = reached | boxes | targets
    if floor & border:
        row, column = divmod(next(cells(floor & border)), stride)
        raise ValueError(f"open border: the floor reaches row {row + 1}, column {column + 1} of the level")
    return Level(Board(width, height, floor, targets), players[0], boxes)
