"""Pages of boards: views into HTML, for the service and for files alike."""

from collections.abc import Sequence

from turngym_leaderboard.pages.episode_list import page_address
from turngym_leaderboard.pages.frames import MOST_FRAMES, frames
from turngym_leaderboard.pages.interval_chart import SHARES, Scale, scatter, score_scale, strip
from turngym_leaderboard.pages.render import Links, render
from turngym_leaderboard.pages.return_chart import return_chart
from turngym_leaderboard.pages.views import (
    BoardLine,
    BoardView,
    ComparisonView,
    EpisodeList,
    EpisodeRow,
    EpisodeView,
    Estimate,
    OwnLine,
    ShownEpisode,
    SubmissionView,
)

_ACROSS = 32
"""Instances in a row of the picture of a comparison."""
_MOST_DRAWN = 4_096
"""Instances that are drawn of each environment."""


def home_page(links: Links, boards: Sequence[BoardLine]) -> str:
    """All boards."""
    return render("home.html", links, {"boards": boards})


def board_page(links: Links, board: BoardView) -> str:
    """A board: its rows with intervals, what is still played, score against price, and how to read it."""
    scored = any(row.score for row in board.rows)
    estimates = [row.score if scored else row.successes[0] for row in board.rows]
    scale = score_scale(estimates) if scored else SHARES
    single = board.columns[0]
    marks = (0.0, 1.0) if scored else (single.floor, single.ceiling)
    return render(
        "board.html",
        links,
        {
            "board": board,
            "strips": [strip(each, scale) if each else None for each in estimates],
            "marks": [scale.at(mark) for mark in marks if mark is not None],
            "scored": scored,
            "scatter": scatter(board.rows) if board.price_unit else None,
        },
    )


def submission_page(links: Links, submission: SubmissionView) -> str:
    """A submission: how far it is, what it came to, and its episodes that may be seen."""

    def drawn(estimate: Estimate | None, scale: Scale) -> object:
        return strip(estimate, scale) if estimate else None

    return render(
        "submission.html",
        links,
        {
            "submission": submission,
            "strips": [drawn(result.success, SHARES) for result in submission.results],
            "marks": [
                [SHARES.at(mark) for mark in (result.floor, result.ceiling) if mark is not None]
                for result in submission.results
            ],
        },
    )


def comparison_page(links: Links, comparison: ComparisonView) -> str:
    """Two submissions on their common instances."""
    return render("comparison.html", links, {"comparison": comparison, "across": _ACROSS, "most": _MOST_DRAWN})


def episodes_page(links: Links, board: str, submission: str, shown: EpisodeList, problems: Sequence[str]) -> str:
    """A list of a submission's episodes.

    Args:
        board, submission: what they are called in addresses.
    """
    return render(
        "episodes.html",
        links,
        {
            "list": shown,
            "tabs": [],
            "problems": problems,
            "crumbs": [(board, links.board(board)), (shown.title, links.submission(board, submission))],
            "page_address": page_address(shown),
        },
    )


def episode_page(
    links: Links,
    episodes: Sequence[EpisodeView],
    *,
    crumbs: Sequence[tuple[str, str]],
    beside: Sequence[EpisodeRow] = (),
    page: int = 1,
    most: int = MOST_FRAMES,
) -> str:
    """One episode, or two side by side.

    Args:
        crumbs: what it belongs to: words and addresses.
        beside: others of the same instance.
        most: turns on a page.
    """
    return render(
        "episode.html",
        links,
        {
            "episodes": episodes,
            "pages": frames(episodes, page, most),
            "chart": return_chart(episodes),
            "crumbs": crumbs,
            "beside": beside,
            "neighbours": [],
            "choose": "",
        },
    )


def episode_crumbs(links: Links, shown: ShownEpisode) -> list[tuple[str, str]]:
    """The way to an episode."""
    return [
        (shown.board_title, links.board(shown.board)),
        (shown.name, links.submission(shown.board, shown.submission)),
    ]


def account_page(links: Links, own: Sequence[OwnLine] = (), told: str = "") -> str:
    """The submissions of whoever is logged in, or where to log in.

    Args:
        told: why that failed.
    """
    return render("account.html", links, {"own": own, "told": told})


def problem_page(links: Links, title: str, told: str) -> str:
    """Why there is nothing to see."""
    return render("problem.html", links, {"title": title, "told": told})
