"""How a refusal reads: a status and `{"detail": "a sentence"}`, whatever went wrong, with nothing of what was sent.

Whoever looks for a page gets it as a page.
"""

import logging
import secrets
import sqlite3
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, cast

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from sqlalchemy import exc
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import HTTPConnection

from turngym_leaderboard.intake import Refused
from turngym_leaderboard.pages import board_pages
from turngym_leaderboard.pages.render import HEADERS, Links
from turngym_leaderboard.remote.proxy import ServersAway
from turngym_leaderboard.service.state import Service
from turngym_leaderboard.store import LimitReached, NoRoom, NotFound, StoreError

log: Final = logging.getLogger(__name__)
AWAY_SECONDS: Final = 2
"""After which an environment server that did not answer is asked again."""
STUMBLED_SECONDS: Final = 5
"""After which a database that failed is asked again."""
DISK_FULL: Final = "the board's disk is full, which its operator has to mend; send the same again"
_STATUS: Final[Mapping[type[StoreError], HTTPStatus]] = {
    NotFound: HTTPStatus.NOT_FOUND,
    LimitReached: HTTPStatus.FORBIDDEN,
    NoRoom: HTTPStatus.INSUFFICIENT_STORAGE,
}
"""Of the store's refusals; the others are about states, which are conflicts."""
_KEY: Final = "header.idempotency-key"
_KEY_IS: Final = (
    "expected 22 to 64 letters, digits, - or _ that are random, such as those of `openssl rand -hex 16`; sent again "
    "with the same, a request begins nothing new"
)


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> HTTPException:
    """A refusal, to be raised."""
    return HTTPException(status, detail, dict(headers or {}))


def add_handlers(app: FastAPI) -> None:
    """Has every refusal of the store, the intake and the framework told in one form."""

    @app.exception_handler(StarletteHTTPException)
    def http(request: Request, error: StarletteHTTPException) -> Response:
        return refusal(request, error.status_code, str(error.detail), error.headers)

    @app.exception_handler(StoreError)
    def store(request: Request, error: StoreError) -> Response:
        return refusal(request, _STATUS.get(type(error), HTTPStatus.CONFLICT), str(error))

    @app.exception_handler(ServersAway)
    def away(request: Request, error: ServersAway) -> Response:
        return refusal(request, HTTPStatus.SERVICE_UNAVAILABLE, str(error), {"Retry-After": str(AWAY_SECONDS)})

    @app.exception_handler(exc.InterfaceError)
    @app.exception_handler(exc.OperationalError)
    @app.exception_handler(exc.TimeoutError)
    def stumbled(request: Request, error: exc.SQLAlchemyError) -> Response:
        if getattr(error.__cause__, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
            raise error  # SQLite's for what was asked wrongly, which goes on failing.
        log.error("the database failed in %s %s: %s", request.method, request.url.path, error)
        found: Service = request.app.state.service
        if found.proxy is not None:
            found.proxy.stumbled()
        return refusal(
            request,
            HTTPStatus.SERVICE_UNAVAILABLE,
            _why(error),
            {"Retry-After": str(STUMBLED_SECONDS)},
        )

    @app.exception_handler(Refused)
    def refused(request: Request, error: Refused) -> Response:
        return refusal(request, HTTPStatus.UNPROCESSABLE_ENTITY, str(error))

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> Response:
        return refusal(request, HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(map(_fault, error.errors()[:5])))

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> Response:
        # The framework's own log of it follows; the number finds it.
        number = secrets.token_hex(4)
        log.error("failure %s in %s %s", number, request.method, request.url.path)
        return refusal(
            request,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"the service failed; its operator finds it as {number} in the log",
        )

    _ = (http, store, away, stumbled, refused, malformed, failed)


def _why(error: Exception) -> str:
    """What a database failed by, without its words, which may tell of rows and addresses."""
    told = str(error)
    if "disk is full" in told or "No space left" in told:
        return DISK_FULL
    if "is locked" in told or isinstance(error, exc.TimeoutError):
        return "the board's database is busy; send the same again"
    return "the board's database does not answer; send the same again"


def _fault(fault: Mapping[str, object]) -> str:
    """One fault of a request, without the value, which may be a secret."""
    where = ".".join(map(str, cast("tuple[object, ...]", fault.get("loc", ()))))
    if where.lower() == _KEY:
        return f"{where}: {'it is missing' if fault.get('type') == 'missing' else 'it cannot be used'}; {_KEY_IS}"
    if fault.get("type") == "extra_forbidden":
        return f"{where}: there is no such key; /api/v1/docs tells those that this call knows"
    return f"{where}: {fault.get('msg')}"


def refusal(request: HTTPConnection, status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """A refusal in its form: for a browser that looks for a page a page, for everybody else JSON."""
    looks = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")
    if looks:
        page = board_pages.problem_page(Links(reader=""), HTTPStatus(status).phrase, detail)
        return HTMLResponse(page, status, {**HEADERS, **(headers or {})})
    return JSONResponse({"detail": detail}, status, dict(headers or {}))
