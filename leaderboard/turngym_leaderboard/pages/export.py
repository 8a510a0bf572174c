"""`leaderboard export`: a board's pages as files that can be put anywhere, with the episodes that anybody may see.

Links are relative and nothing is loaded from elsewhere, so that the pages work from a folder as from a server. What is
asked of a service, such as filters, is left out. Knows nothing of how pages look.
"""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from turngym_leaderboard.pages import board_pages
from turngym_leaderboard.pages.assets import ASSETS
from turngym_leaderboard.pages.from_store import BoardSource
from turngym_leaderboard.pages.render import STATIC, Links
from turngym_leaderboard.pages.views import BoardView, EpisodeRow, ShownEpisode, SubmissionView

MOST_COMPARED: Final = 12
"""Submissions of a board whose pairs are written; of larger boards, these best ones."""
MOST_TURNS: Final = 2_000
"""Of an episode; there is nobody who could be asked for further pages."""
MARK: Final = ".turngym-export"
"""A file in a folder that may be replaced."""


class CannotExport(ValueError):
    """A folder that pages cannot be written into, and why."""


@dataclass(frozen=True, slots=True)
class Written:
    """What an export came to."""

    boards: int
    submissions: int
    episodes: int
    pages: int


def export(source: BoardSource, folder: Path) -> Written:
    """Writes the site. The folder is replaced whole once everything is written, and only if an export made it.

    Raises:
        CannotExport: the folder holds something else.
        OSError: it cannot be written.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder / MARK).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise CannotExport(f"{folder} holds something that no export made; name a new or an empty folder")
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        written = _Site(source, aside).write()
        (aside / MARK).write_text("leaderboard export replaces this folder\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return written


def links_from(address: str) -> Links:
    """Links of the page that lies at an address within the site."""
    return Links(root="../" * (len(PurePosixPath(address).parts) - 1), ending=".html", live=False)


class _Site:
    """One export into a new folder."""

    def __init__(self, source: BoardSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._pages = 0

    def write(self) -> Written:
        """Writes all pages and what they load."""
        (self._folder / "static").mkdir(parents=True)
        for name in ASSETS:
            shutil.copyfile(STATIC / name, self._folder / "static" / name)
        lines = self._source.boards()
        self._page("index.html", lambda links: board_pages.home_page(links, lines))
        boards = [self._source.board(line.slug) for line in lines]
        counts = [self._board(board) for board in boards]
        submissions, episodes = (sum(each[k] for each in counts) for k in (0, 1))
        return Written(len(boards), submissions, episodes, self._pages)

    def _board(self, board: BoardView) -> tuple[int, int]:
        """A board with its submissions, comparisons and episodes; returns how many submissions and episodes."""
        self._page(f"boards/{board.slug}.html", lambda links: board_pages.board_page(links, board))
        compared = [row.id for row in board.rows[:MOST_COMPARED]]
        shown = [
            _comparable(self._source.submission(board.slug, row.id), compared)
            for row in itertools.chain(board.rows, board.waiting)
        ]
        for submission in shown:
            self._page(
                f"boards/{board.slug}/submissions/{submission.id}.html",
                lambda links, of=submission: board_pages.submission_page(links, of),
            )
        for one, other in itertools.permutations(compared, 2):
            comparison = self._source.comparison(board.slug, one, other)
            self._page(
                f"boards/{board.slug}/compare/{one}/{other}.html",
                lambda links, of=comparison: board_pages.comparison_page(links, of),
            )
        rows = [(submission.id, row) for submission in shown for row in submission.showcase]
        self._episodes(rows, set(compared))
        return len(shown), len(rows)

    def _episodes(self, rows: Sequence[tuple[str, EpisodeRow]], compared: set[str]) -> None:
        """Each episode alone, and each pair of one instance whose submissions are compared.

        Args:
            rows: with the ids of their submissions.
        """
        shown = {row.key: self._source.episode(row.key) for _, row in rows}
        for owner, row in rows:
            beside = [
                each
                for other, each in rows
                if each.instance == row.instance and each.key != row.key and {owner, other} <= compared
            ]
            self._episode(f"episodes/{row.key}.html", [shown[row.key]], beside)
            for each in beside:
                self._episode(f"episodes/{row.key}/{each.key}.html", [shown[row.key], shown[each.key]], [])

    def _episode(self, address: str, shown: Sequence[ShownEpisode], beside: Sequence[EpisodeRow]) -> None:
        self._page(
            address,
            lambda links: board_pages.episode_page(
                links,
                [each.view for each in shown],
                crumbs=board_pages.episode_crumbs(links, shown[0]),
                beside=beside,
                most=MOST_TURNS,
            ),
        )

    def _page(self, address: str, made: Callable[[Links], str]) -> None:
        file = self._folder / address
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made(links_from(address)), encoding="utf-8")
        self._pages += 1


def _comparable(submission: SubmissionView, compared: Sequence[str]) -> SubmissionView:
    """The submission with links to those comparisons only that are written."""
    others = submission.others if submission.id in compared else ()
    return replace(submission, others=tuple((other, name) for other, name in others if other in compared))
