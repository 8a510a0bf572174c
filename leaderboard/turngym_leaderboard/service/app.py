"""Puts the service together: calls, pages, handlers and bounds, as one ASGI app."""

from typing import Final

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.types import ASGIApp

import turngym
from turngym_leaderboard.endpoints import Endpoints
from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.pages.from_store import BoardSource
from turngym_leaderboard.pages.routes import pages_router
from turngym_leaderboard.remote.proxy import Proxy
from turngym_leaderboard.service import api, endpoint_api, remote_api
from turngym_leaderboard.service.api_page import api_page
from turngym_leaderboard.service.bounds import Bounds
from turngym_leaderboard.service.login import Readers, login_router
from turngym_leaderboard.service.problems import add_handlers
from turngym_leaderboard.service.rate_limits import RateLimiter
from turngym_leaderboard.service.state import RateLimits, Service
from turngym_leaderboard.store import Store

_ABOUT: Final = (
    "Boards, submissions, results and episodes. Public ones need no token; others, and whatever changes something, "
    "need the header “Authorization: Bearer” with a token of the board. A refusal is a status and an object Problem. "
    "turngym_leaderboard.client is the same in Python."
)


def create_app(
    store: Store,
    intake: IntakeLimits | None = None,
    rates: RateLimits | None = None,
    proxy: Proxy | None = None,
    endpoints: Endpoints | None = None,
) -> ASGIApp:
    """The service over a store, which stays the caller's to close.

    Args:
        intake, rates: None: what they are by themselves.
        proxy: plays remote agents' turns; None: the service takes none.
        endpoints: that may be submitted; None: none.
    """
    app = FastAPI(
        title="turngym leaderboard",
        version=turngym.__version__,
        description=_ABOUT,
        openapi_url=f"{api.PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    service = Service(store, intake or IntakeLimits(), rates or RateLimits(), proxy, endpoints or {})
    app.state.service = service
    add_handlers(app)
    app.include_router(api.router)
    app.include_router(endpoint_api.router)
    app.include_router(remote_api.router)
    everybody = BoardSource(store)
    readers = Readers(service, everybody)
    app.include_router(login_router(service, readers))
    app.include_router(pages_router(everybody, readers.look))

    @app.get(f"{api.PREFIX}/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(api_page(app.openapi()))

    @app.get("/health", include_in_schema=False)
    def health() -> dict[str, str]:
        return {"version": turngym.__version__}

    _ = (docs, health)
    return Bounds(app, limiter=RateLimiter(service.rates.address_rate, service.rates.address_burst))
