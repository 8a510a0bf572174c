"""How a refusal reads: a status and `{"detail": "a sentence"}`, whatever went wrong, with nothing of what was sent."""

import logging
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, cast

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from turngym_leaderboard.intake import Refused
from turngym_leaderboard.remote.proxy import ServersAway
from turngym_leaderboard.store import LimitReached, NoRoom, NotFound, StoreError

log: Final = logging.getLogger(__name__)
AWAY_SECONDS: Final = 2
"""After which an environment server that did not answer is asked again."""
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
        return _told(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(StoreError)
    def store(request: Request, error: StoreError) -> Response:
        return _told(_STATUS.get(type(error), HTTPStatus.CONFLICT), str(error))

    @app.exception_handler(ServersAway)
    def away(request: Request, error: ServersAway) -> Response:
        return _told(HTTPStatus.SERVICE_UNAVAILABLE, str(error), {"Retry-After": str(AWAY_SECONDS)})

    @app.exception_handler(Refused)
    def refused(request: Request, error: Refused) -> Response:
        return _told(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> Response:
        return _told(HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(map(_fault, error.errors()[:5])))

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> Response:
        # The framework's own log of it follows; the number finds it.
        number = secrets.token_hex(4)
        log.error("failure %s in %s %s", number, request.method, request.url.path)
        return _told(
            HTTPStatus.INTERNAL_SERVER_ERROR, f"the service failed; its operator finds it as {number} in the log"
        )

    _ = (http, store, away, refused, malformed, failed)


def _fault(fault: Mapping[str, object]) -> str:
    """One fault of a request, without the value, which may be a secret."""
    where = ".".join(map(str, cast("tuple[object, ...]", fault.get("loc", ()))))
    if where.lower() == _KEY:
        return f"{where}: {'it is missing' if fault.get('type') == 'missing' else 'it cannot be used'}; {_KEY_IS}"
    if fault.get("type") == "extra_forbidden":
        return f"{where}: there is no such key; /api/v1/docs tells those that this call knows"
    return f"{where}: {fault.get('msg')}"


def _told(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail}, status, dict(headers or {}))
