"""Reads JSON that a stranger wrote: bounded in size, depth and names, and with one meaning for every reader."""

import json
from pathlib import Path
from typing import Final, cast

from turngym_leaderboard.intake import Refused

MAX_DEPTH: Final = 32
MAX_NUMBER_CHARACTERS: Final = 400

Document = dict[str, object]


def read_document(file: Path, max_bytes: int) -> Document:
    """The JSON object in a file.

    Raises:
        Refused: it is too large, no JSON object, nested too deeply, or has a key twice, which parsers read differently.
    """
    with file.open("rb") as stream:
        text = stream.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise Refused(f"{file.name} has more than {max_bytes} bytes; it cannot be what its name says")
    return parse_document(text, file.name)


def parse_document(text: bytes, name: str) -> Document:
    """The JSON object in bytes; `name` says in errors where it comes from.

    Raises:
        Refused: as `read_document` does.
    """
    try:
        document: object = json.loads(text.decode("utf-8"), object_pairs_hook=_once, parse_int=_integer)
    except RecursionError:
        raise Refused(f"{name} is nested too deeply; at most {MAX_DEPTH} levels are read") from None
    except ValueError as error:
        raise Refused(f"{name} is no JSON: {error}; save the checkpoint again") from None
    if not isinstance(document, dict):
        raise Refused(f"{name} holds a {type(document).__name__}; expected a JSON object")
    found = cast(Document, document)
    if _deeper_than(found, MAX_DEPTH):
        raise Refused(f"{name} is nested too deeply; at most {MAX_DEPTH} levels are read")
    return found


def _once(pairs: list[tuple[str, object]]) -> Document:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice in one object")
    return document


def _integer(text: str) -> int:
    if len(text) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _deeper_than(document: object, levels: int) -> bool:
    """Whether anything lies under more than so many levels. One level at a time: no recursion to run out of."""
    layer: list[object] = [document]
    for _ in range(levels):
        layer = [child for each in layer for child in _children(each)]
        if not layer:
            return False
    return True


def _children(node: object) -> list[object]:
    if isinstance(node, dict):
        return [child for child in cast(Document, node).values() if isinstance(child, dict | list)]
    return [child for child in cast("list[object]", node) if isinstance(child, dict | list)]
