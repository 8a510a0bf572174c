"""The pages of a board's service: read-only, without login, of what everybody may see.

A router for the service's application, which has the JSON API and its own handlers. Knows nothing of the database.
"""

from collections.abc import Callable
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from turngym_leaderboard.pages import assets, board_pages
from turngym_leaderboard.pages.episode_list import episode_filter
from turngym_leaderboard.pages.from_store import BoardSource
from turngym_leaderboard.pages.render import HEADERS, Links
from turngym_leaderboard.store import NotFound

Chosen = Annotated[tuple[str, ...], Query()]


def pages_router(source: BoardSource) -> APIRouter:
    """All pages, and the files that they load."""
    links: Final = Links()
    router = APIRouter(include_in_schema=False)
    router.include_router(assets.router)

    def page(made: Callable[[], str]) -> HTMLResponse:
        """A page, or one that says that it is not there."""
        try:
            return HTMLResponse(made(), headers=dict(HEADERS))
        except NotFound as error:
            return _missing(links, str(error))

    @router.get("/")
    def home() -> HTMLResponse:
        return page(lambda: board_pages.home_page(links, source.boards()))

    @router.get("/boards/{slug}")
    def board(slug: str) -> HTMLResponse:
        return page(lambda: board_pages.board_page(links, source.board(slug)))

    @router.get("/boards/{slug}/submissions/{public_id}")
    def submission(slug: str, public_id: str) -> HTMLResponse:
        return page(lambda: board_pages.submission_page(links, source.submission(slug, public_id)))

    @router.get("/boards/{slug}/submissions/{public_id}/episodes")
    def episodes(request: Request, slug: str, public_id: str) -> HTMLResponse:
        wanted, number, problems = episode_filter(request.query_params)

        def made() -> str:
            shown = source.episode_list(slug, public_id, wanted, number)
            return board_pages.episodes_page(links, slug, public_id, shown, problems)

        return page(made)

    @router.get("/boards/{slug}/compare")
    def choose(slug: str, one: str = "", other: str = "") -> Response:
        if not one or not other:
            return _missing(links, "expected two submissions to compare")
        return RedirectResponse(links.comparison(slug, one, other), 303)

    @router.get("/boards/{slug}/compare/{one}/{other}")
    def comparison(slug: str, one: str, other: str) -> HTMLResponse:
        return page(lambda: board_pages.comparison_page(links, source.comparison(slug, one, other)))

    @router.get("/beside")
    def beside(e: Chosen = ()) -> Response:
        if len(e) != 2:
            return _missing(links, f"{len(e)} episodes were chosen; tick two")
        return RedirectResponse(links.episode(*e), 303)

    @router.get("/episodes/{key}")
    @router.get("/episodes/{key}/{other}")
    def episode(request: Request, key: str, other: str = "") -> HTMLResponse:
        _, number, _ = episode_filter(request.query_params)

        def made() -> str:
            shown = [source.episode(each) for each in (key, other) if each]
            owner = shown[0]
            return board_pages.episode_page(
                links,
                [each.view for each in shown],
                crumbs=board_pages.episode_crumbs(links, owner),
                beside=[] if other else source.beside(key),
                page=number,
            )

        return page(made)

    _ = (home, board, submission, episodes, choose, comparison, beside, episode)
    return router


def _missing(links: Links, told: str) -> HTMLResponse:
    return HTMLResponse(board_pages.problem_page(links, "There is nothing here", told), 404, dict(HEADERS))
