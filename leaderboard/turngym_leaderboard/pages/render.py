"""Templates into pages. The one place that knows Jinja.

Whatever a template prints is escaped, and made harmless before that (`plain_text`), unless it is markup of a template's
own: a template cannot forget it. Pages run this package's script and no other, and load nothing from elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final, cast
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from turngym_leaderboard.pages.plain_text import harmless, name

STATIC: Final = Path(__file__).parent / "static"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'"
)
"""Content-Security-Policy of every page."""
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Of every page that a server sends."""


@dataclass(frozen=True, slots=True)
class Links:
    """Where pages lie.

    Attributes:
        root: begins every address: "/" of a service, "../" and the like in files that may lie anywhere.
        ending: of a page's address: ".html" in files.
        live: somebody answers forms and queries.
        reader: the owner who is logged in; "": nobody is; None: nobody can be.
    """

    root: str = "/"
    ending: str = ""
    live: bool = True
    reader: str | None = None

    def asset(self, file: str) -> str:
        return f"{self.root}static/{file}"

    def home(self) -> str:
        return self.root if self.live else f"{self.root}index.html"

    def account(self) -> str:
        """Where to log in, and out again."""
        return f"{self.root}account"

    def episode(self, key: str, other: str = "") -> str:
        """An episode, or two of them side by side."""
        return self._page("episodes", key, other)

    def board(self, board: str) -> str:
        return self._page("boards", board)

    def submission(self, board: str, submission: str) -> str:
        return self._page("boards", board, "submissions", submission)

    def submission_episodes(self, board: str, submission: str) -> str:
        return self._page("boards", board, "submissions", submission, "episodes")

    def comparison(self, board: str, one: str = "", other: str = "") -> str:
        return self._page("boards", board, "compare", one, other)

    def _page(self, *parts: str) -> str:
        return self.root + "/".join(quote(part, safe="") for part in parts if part) + self.ending


def number(value: float | None, digits: int = 2) -> str:
    """A number for people, with a true minus and no more zeros than it needs; – where there is none."""
    if value is None:
        return "–"
    told = f"{value:,.{digits}f}"
    told = told.rstrip("0").rstrip(".") if "." in told else told
    return "0" if told == "-0" else told.replace("-", "−")


def fixed(value: float, digits: int) -> str:
    """A number with so many digits and a true minus, for columns."""
    return f"{value:,.{digits}f}".replace("-", "−")


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign; 0 has none."""
    told = number(value, digits)
    return told if told == "0" or told.startswith("−") else f"+{told}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share between 0 and 1; – where there is none."""
    return "–" if share is None else f"{share * 100:.{digits}f} %"


def dollars(value: float) -> str:
    """A price to two digits; what a model's token costs is far under a cent."""
    return f"${Decimal(f'{value:.2g}'):,f}"


def chance(p_value: float) -> str:
    """A p-value after "p"; what is very small is not told as 0."""
    return "< 0.0001" if p_value < 0.0001 else f"= {p_value:.2g}"


def thousands(value: int) -> str:
    """A count."""
    return f"{value:,}"


def render(template: str, links: Links, values: Mapping[str, object]) -> str:
    """A page.

    Args:
        template: a file in `templates`.
        values: what it is told; it fails on whatever else it asks for.
    """
    return _environment.get_template(template).render(**values, links=links, policy=POLICY)


def _printed(value: object) -> object:
    """What an expression of a template prints: markup as it is, everything else harmless."""
    return value if isinstance(value, Markup) else harmless(str(value))


_environment: Final = Environment(
    loader=PackageLoader("turngym_leaderboard.pages"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_printed,
    trim_blocks=True,
    lstrip_blocks=True,
)
# Jinja's own type of this knows its own filters only.
cast("dict[str, object]", _environment.filters).update(
    {each.__name__: each for each in (name, number, fixed, signed, percent, dollars, chance, thousands)}
)
