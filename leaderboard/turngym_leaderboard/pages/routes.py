"""The pages of a board's service: read-only, of what whoever looks may see.

A router for the service's application, which has the JSON API and its own handlers. Knows nothing of the database, or
of how somebody shows who they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from turngym_leaderboard.pages import assets, board_pages
from turngym_leaderboard.pages.episode_list import episode_filter
from turngym_leaderboard.pages.from_store import BoardSource
from turngym_leaderboard.pages.render import HEADERS, Links
from turngym_leaderboard.store import NotFound

Chosen = Annotated[tuple[str, ...], Query()]


@dataclass(frozen=True, slots=True)
class Look:
    """What whoever sent a request may see, and the addresses that are told."""

    source: BoardSource
    links: Links


def pages_router(source: BoardSource, look: Callable[[Request], Look] | None = None) -> APIRouter:
    """All pages, and the files that they load.

    Args:
        source: what everybody may see.
        look: what whoever sent a request may see; None: what everybody may.
    """
    everybody: Final = Look(source, Links())

    def looked(request: Request) -> Look:
        return look(request) if look is not None else everybody

    router = APIRouter(include_in_schema=False)
    router.include_router(assets.router)

    @router.get("/")
    def home(request: Request) -> HTMLResponse:
        seen = looked(request)
        return _page(seen.links, lambda: board_pages.home_page(seen.links, seen.source.boards()))

    @router.get("/boards/{slug}")
    def board(request: Request, slug: str) -> HTMLResponse:
        seen = looked(request)
        return _page(seen.links, lambda: board_pages.board_page(seen.links, seen.source.board(slug)))

    @router.get("/boards/{slug}/submissions/{public_id}")
    def submission(request: Request, slug: str, public_id: str) -> HTMLResponse:
        seen = looked(request)
        return _page(
            seen.links, lambda: board_pages.submission_page(seen.links, seen.source.submission(slug, public_id))
        )

    @router.get("/boards/{slug}/submissions/{public_id}/episodes")
    def episodes(request: Request, slug: str, public_id: str) -> HTMLResponse:
        seen = looked(request)
        wanted, number, problems = episode_filter(request.query_params)

        def made() -> str:
            shown = seen.source.episode_list(slug, public_id, wanted, number)
            return board_pages.episodes_page(seen.links, slug, public_id, shown, problems)

        return _page(seen.links, made)

    @router.get("/boards/{slug}/compare")
    def choose(request: Request, slug: str, one: str = "", other: str = "") -> Response:
        seen = looked(request)
        if not one or not other:
            return _missing(seen.links, "expected two submissions to compare")
        return RedirectResponse(seen.links.comparison(slug, one, other), 303)

    @router.get("/boards/{slug}/compare/{one}/{other}")
    def comparison(request: Request, slug: str, one: str, other: str) -> HTMLResponse:
        seen = looked(request)
        return _page(
            seen.links, lambda: board_pages.comparison_page(seen.links, seen.source.comparison(slug, one, other))
        )

    @router.get("/beside")
    def beside(request: Request, e: Chosen = ()) -> Response:
        seen = looked(request)
        if len(e) != 2:
            return _missing(seen.links, f"{len(e)} episodes were chosen; tick two")
        return RedirectResponse(seen.links.episode(*e), 303)

    @router.get("/episodes/{key}")
    @router.get("/episodes/{key}/{other}")
    def episode(request: Request, key: str, other: str = "") -> HTMLResponse:
        seen = looked(request)
        _, number, _ = episode_filter(request.query_params)

        def made() -> str:
            shown = [seen.source.episode(each) for each in (key, other) if each]
            owner = shown[0]
            return board_pages.episode_page(
                seen.links,
                [each.view for each in shown],
                crumbs=board_pages.episode_crumbs(seen.links, owner),
                beside=[] if other else seen.source.beside(key),
                page=number,
            )

        return _page(seen.links, made)

    _ = (home, board, submission, episodes, choose, comparison, beside, episode)
    return router


def _page(links: Links, made: Callable[[], str]) -> HTMLResponse:
    """A page, or one that says that it is not there."""
    try:
        return HTMLResponse(made(), headers=dict(HEADERS))
    except NotFound as error:
        return _missing(links, str(error))


def _missing(links: Links, told: str) -> HTMLResponse:
    return HTMLResponse(board_pages.problem_page(links, "There is nothing here", told), 404, dict(HEADERS))
