"""Text of agents and environments, made harmless for a page without hiding what it holds.

HTML's escaping keeps text from becoming markup; this keeps it from reordering, hiding or flooding what stands around
it. Knows nothing of HTML.
"""

import re
from typing import Final

MOST_CHARACTERS: Final = 20_000
"""Of one text; what is longer is cut, and says so."""
MOST_OF_A_NAME: Final = 80
"""Of a name, which stands in lines and headings."""

_HARMFUL: Final = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # Control characters, without tab and newline.
    "\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # Invisible or of direction.
    "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"  # Fillers, which are blank.
    "\ud800-\udfff"  # Half a pair: no encoding has it.
    "\ue000-\uf8ff"  # Private use: whatever the reader's font makes of it.
    "\U000e0000-\U000e0fff"  # Tags and selectors that are not seen.
    "]"
)
_SPACE: Final = re.compile(r"\s+")
_STACKED: Final = re.compile(
    "([\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20f0\ufe20-\ufe2f]{4})[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20f0\ufe20-\ufe2f]+"
)


def harmless(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text with what cannot be seen, or would reorder its surroundings, written out as ⟨U+202E⟩.

    Line ends are newlines. Marks that are stacked more than four high lose the rest. What is longer than `most`
    characters is cut, with how many there are.
    """
    more = len(text) - most
    kept = text[:most] if more > 0 else text
    kept = kept.replace("\r\n", "\n")
    kept = _STACKED.sub(r"\1", _HARMFUL.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", kept))
    return f"{kept}… ({more:,} more characters)" if more > 0 else kept


def name(text: str, most: int = MOST_OF_A_NAME) -> str:
    """A name for a line: harmless, on one line, never empty."""
    kept = harmless(_SPACE.sub(" ", text[: most + 1]).strip(), most + 1)
    return (kept if len(text) <= most else kept[:most] + "…") or "(no name)"
