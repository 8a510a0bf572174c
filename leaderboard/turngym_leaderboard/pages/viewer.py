"""The viewer of trajectories: a small application for one machine, over one or two files.

Knows nothing of boards. What it serves is read-only, and only to a browser of this machine: it answers to names of the
loopback alone, so that no page of another site can have it read by way of a name of its own.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from turngym_leaderboard.pages import assets
from turngym_leaderboard.pages.episode_list import episode_filter, episode_list, page_address
from turngym_leaderboard.pages.frames import frames
from turngym_leaderboard.pages.render import HEADERS, Links, render
from turngym_leaderboard.pages.return_chart import return_chart
from turngym_leaderboard.pages.trajectory_file import CannotView, TrajectoryFile
from turngym_leaderboard.pages.views import EpisodeRow, EpisodeView

HOSTS: Final = ("127.0.0.1", "localhost")
_MOST_BESIDE: Final = 12
"""Other episodes of the same level that are offered."""


def viewer(files: Sequence[TrajectoryFile]) -> FastAPI:
    """The application over files whose keys differ. Each request first reads what has been added to them."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS))
    app.include_router(assets.router)
    by_key = {file.key: file for file in files}
    links = Links()
    reading = threading.Lock()

    def file_of(key: str) -> tuple[TrajectoryFile, int]:
        """The file and number that an episode's key names."""
        letter, _, number = key.strip().rpartition("-")
        file = by_key.get(letter or next(iter(by_key)))
        if file is None or not (number.isascii() and number.isdigit() and len(number) < 12):
            raise CannotView(f"there is no episode {key!r}; expected a number, or one such as {next(iter(by_key))}-12")
        return file, int(number)

    def fresh(file: TrajectoryFile) -> TrajectoryFile:
        with reading:
            file.refresh()
        return file

    def page(template: str, values: Mapping[str, object], status: int = 200) -> HTMLResponse:
        return HTMLResponse(render(template, links, values), status, dict(HEADERS))

    @app.exception_handler(CannotView)
    def cannot_view(_request: Request, error: CannotView) -> HTMLResponse:
        return page("problem.html", {"title": "This cannot be shown", "told": str(error)}, 404)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(404)
    def not_found(_request: Request, _error: Exception) -> HTMLResponse:
        return page("problem.html", {"title": "There is no such page", "told": "The address leads nowhere."}, 404)

    @app.get("/")
    def episodes(request: Request, list: str = "") -> HTMLResponse:
        if list and list not in by_key:
            raise CannotView(f"there is no file {list!r}")
        file = fresh(by_key[list] if list else files[0])
        wanted, number, problems = episode_filter(request.query_params)
        shown = episode_list(file.key, file.title, file.rows, wanted, number, file.notices)
        tabs = [(each.title, f"{links.home()}?list={each.key}", each is file) for each in files]
        return page(
            "episodes.html",
            {"list": shown, "tabs": tabs, "problems": problems, "crumbs": [], "page_address": page_address(shown)},
        )

    @app.get("/beside")
    def choose(e: Annotated[tuple[str, ...], Query()] = ()) -> Response:
        if len(e) != 2:
            raise CannotView(f"{len(e)} episodes were chosen; tick two")
        keys = [f"{file.key}-{number}" for file, number in map(file_of, e)]
        return RedirectResponse(links.episode(*keys), 303)

    @app.get("/episodes/{key}")
    @app.get("/episodes/{key}/{other}")
    def episode(key: str, other: str = "", page_number: Annotated[int, Query(alias="page")] = 1) -> HTMLResponse:
        places = [file_of(each) for each in (key, other) if each]
        found = [fresh(file).episode(number) for file, number in places]
        file, number = places[0]
        return page(
            "episode.html",
            {
                **shown_episodes(found, page_number),
                "crumbs": [(file.title, f"{links.home()}?list={file.key}")],
                "beside": [] if other else beside(files, file.rows[file.at(number)]),
                "neighbours": [] if other else neighbours(file, number),
                "choose": "" if other else " or ".join(f"{f.key}-{f.rows[0].number}" for f in files if f.rows),
            },
        )

    return app


def shown_episodes(episodes: Sequence[EpisodeView], page: int = 1) -> dict[str, object]:
    """What the template of episodes needs of the episodes themselves."""
    return {"episodes": episodes, "pages": frames(episodes, page), "chart": return_chart(episodes)}


def beside(files: Sequence[TrajectoryFile], row: EpisodeRow) -> list[EpisodeRow]:
    """Other episodes of a row's level, of all files."""
    if not row.instance:
        return []
    others = (each for file in files for each in file.rows if each.instance == row.instance and each.key != row.key)
    return [each for each, _ in zip(others, range(_MOST_BESIDE), strict=False)]


def neighbours(file: TrajectoryFile, number: int) -> list[tuple[str, str, str]]:
    """The episodes before and after one: words, key, and what the keyboard calls it."""
    at = file.at(number)
    found: list[tuple[str, str, str]] = []
    if at > 0:
        found.append((f"← Episode {file.rows[at - 1].number}", file.rows[at - 1].key, "before"))
    if at + 1 < len(file.rows):
        found.append((f"Episode {file.rows[at + 1].number} →", file.rows[at + 1].key, "next"))
    return found
