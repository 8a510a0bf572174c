"""A page of a list of episodes out of a whole list and what a query asks for. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final
from urllib.parse import urlencode

from turngym_leaderboard.pages.views import EpisodeFilter, EpisodeList, EpisodeRow

PAGE: Final = 100
"""Rows on a page."""
_MOST_CHOICES: Final = 1_000
"""Of agents in a filter."""
_VERDICTS: Final = ("solved", "failed", "unknown")


def episode_filter(query: Mapping[str, str]) -> tuple[EpisodeFilter, int, tuple[str, ...]]:
    """What a query asks for: the filter, the page, and what of it could not be understood."""
    problems: list[str] = []

    def whole(field: str, words: str) -> int | None:
        told = query.get(field, "").strip()
        if not told:
            return None
        if told.isascii() and told.isdigit() and len(told) < 10:
            return int(told)
        problems.append(f"{words} {told!r}: expected a whole number; it is left out")
        return None

    verdict = query.get("verdict", "")
    if verdict not in ("", *_VERDICTS):
        problems.append(f"success {verdict!r}: expected {', '.join(_VERDICTS)}; it is left out")
        verdict = ""
    wanted = EpisodeFilter(
        verdict=verdict,
        environment=query.get("environment", ""),
        agent=query.get("agent", ""),
        instance=query.get("instance", ""),
        least_turns=whole("least", "turns from"),
        most_turns=whole("most", "turns to"),
    )
    return wanted, whole("page", "page") or 1, tuple(problems)


def episode_list(
    key: str,
    title: str,
    rows: Sequence[EpisodeRow],
    wanted: EpisodeFilter,
    page: int,
    notices: tuple[str, ...] = (),
) -> EpisodeList:
    """The page of a list; a page that is not there is the nearest one that is."""
    matching = [row for row in rows if wanted.lets(row)] if wanted else rows
    pages = max(1, -(-len(matching) // PAGE))
    page = min(max(page, 1), pages)
    # Dictionaries keep the order in which names first occur.
    agents = tuple(dict.fromkeys(row.agent for row in rows))
    return EpisodeList(
        key=key,
        title=title,
        rows=tuple(matching[(page - 1) * PAGE : page * PAGE]),
        filter=wanted,
        total=len(rows),
        matching=len(matching),
        solved=sum(row.verdict == "solved" for row in matching),
        failed=sum(row.verdict == "failed" for row in matching),
        agents=agents if len(agents) <= _MOST_CHOICES else (),
        environments=tuple(dict.fromkeys(row.environment for row in rows)),
        page=page,
        pages=pages,
        notices=notices,
    )


def page_address(shown: EpisodeList) -> str:
    """The query of this list's pages, but for the page's number."""
    names = {"least_turns": "least", "most_turns": "most"}
    held = {names.get(name, name): value for name, value in asdict(shown.filter).items() if value not in ("", None)}
    return f"?{urlencode({'list': shown.key, **held})}&"
