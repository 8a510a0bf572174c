"""What submissions and owners may be called: names stand beside those of others, and must be told from them by eye.

Knows nothing of who has which name already.
"""

import re
import unicodedata
from typing import Final

from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent

_OWN_ROWS: Final = frozenset({RandomAgent.name, OracleAgent.name})
_UNSEEN: Final = re.compile(
    "["
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef"
    "\u2800\U00016fe4\U0001d159"
    "]"
)
"""Printable as far as Python knows, but Default_Ignorable_Code_Point in Unicode 15.1; and signs that are blank."""


def checked_name(text: str) -> str:
    """The same text. Raises ValueError where it turns a line around, breaks it, or has what cannot be seen."""
    if not text.isprintable() or text != text.strip():
        raise ValueError("expected one line of printable characters, without spaces around them")
    if unseen := _UNSEEN.search(text):
        sign = unicodedata.name(unseen[0], "without a name")
        raise ValueError(f"expected characters that can be seen; U+{ord(unseen[0]):04X} ({sign}) cannot")
    if text and unicodedata.category(text[0]).startswith("M"):
        raise ValueError("expected a name that does not begin with a mark, which would stand on what is before it")
    return text


def checked_agent_name(text: str) -> str:
    """The same text. Raises ValueError where `checked_name` does, or where the board's own rows are called so."""
    if folded(checked_name(text)) in _OWN_ROWS:
        raise ValueError(f"{text!r} is what a row of the board's own is called; give it another name")
    return text


def folded(name: str) -> str:
    """The same for names that differ in nothing but case, width or the like."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
