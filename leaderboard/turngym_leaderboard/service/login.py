"""Who looks at pages: a token of the board, shown once in a form and then kept by the browser in a cookie.

The cookie is for pages alone, which only read: calls of the API take no cookie, so no page of somebody else's can make
a browser change anything. The token is looked up at each page, so one that is revoked shows nothing more.
"""

import threading
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import urlsplit

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from turngym_leaderboard.pages import board_pages
from turngym_leaderboard.pages.forms import BadForm, read_form
from turngym_leaderboard.pages.from_store import BoardSource
from turngym_leaderboard.pages.render import HEADERS, Links
from turngym_leaderboard.pages.routes import Look
from turngym_leaderboard.service.access import MAX_TOKEN_CHARACTERS, known
from turngym_leaderboard.service.state import Service
from turngym_leaderboard.store import owners
from turngym_leaderboard.store.values import Owner, Role
from turngym_leaderboard.visibility import EVERYBODY, Viewer

COOKIE: Final = "turngym_board"
_KEPT: Final = timedelta(days=30)
_MOST_READERS: Final = 64
"""Of whom what was ranked for them is kept; the one who was quiet longest is forgotten first."""


class Readers:
    """What each reader may see. May be shared by threads."""

    def __init__(self, service: Service, everybody: BoardSource) -> None:
        self._service = service
        self._everybody = everybody
        self._sources: OrderedDict[Viewer, BoardSource] = OrderedDict()
        self._guard = threading.Lock()

    def look(self, request: Request) -> Look:
        """What whoever sent a request may see: what everybody may, without a token that is good."""
        owner, viewer = self.reader(request)
        if owner is None:
            return Look(self._everybody, Links(reader=""))
        with self._guard:
            source = self._sources.pop(viewer, None) or BoardSource(self._service.store, viewer)
            self._sources[viewer] = source
            if len(self._sources) > _MOST_READERS:
                self._sources.popitem(last=False)
        return Look(source, Links(reader=owner.name))

    def reader(self, request: Request) -> tuple[Owner | None, Viewer]:
        """Who sent a request; None: nobody in particular."""
        text = request.cookies.get(COOKIE, "")[:MAX_TOKEN_CHARACTERS]
        found = owners.token(self._service.store, text, now=datetime.now(UTC)) if text else None
        if found is None:
            return None, EVERYBODY
        return found.owner, Viewer(found.owner.id, admin=found.role is Role.ADMIN)


def login_router(service: Service, readers: Readers) -> APIRouter:
    """The page on which one logs in and out, and finds one's own submissions."""
    router = APIRouter(prefix="/account", include_in_schema=False)

    @router.get("")
    def account(request: Request) -> HTMLResponse:
        look, (owner, _) = readers.look(request), readers.reader(request)
        return _page(board_pages.account_page(look.links, look.source.own(owner) if owner is not None else ()))

    @router.post("")
    async def log_in(request: Request) -> Response:
        if not _from_here(request):
            return _refused("a page of another site sent this", 403)
        try:
            token = (await read_form(request)).get("token", "").strip()
            await known(service, request, token)
        except BadForm as error:
            return _refused(str(error), 422)
        except HTTPException as error:
            return _refused(str(error.detail), error.status_code)
        answer = RedirectResponse(Links().account(), 303)
        answer.set_cookie(
            COOKIE,
            token,
            max_age=int(_KEPT.total_seconds()),
            httponly=True,
            secure=request.url.scheme == "https",
            samesite="lax",
        )
        return answer

    @router.post("/logout")
    def log_out(request: Request) -> Response:
        if not _from_here(request):
            return _refused("a page of another site sent this", 403)
        answer = RedirectResponse(Links().home(), 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="lax")
        return answer

    _ = (account, log_in, log_out)
    return router


def _from_here(request: Request) -> bool:
    """Whether a form was sent by a page of this service. Browsers tell where it comes from, other programs need not."""
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def _refused(told: str, status: int) -> HTMLResponse:
    return _page(board_pages.account_page(Links(reader=""), told=told), status)


def _page(html: str, status: int = 200) -> HTMLResponse:
    return HTMLResponse(html, status, {**HEADERS, "Cache-Control": "no-store"})
