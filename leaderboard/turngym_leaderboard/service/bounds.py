"""What goes for every request, whatever it asks: how often an address may call, how much it may send, and the headers
that keep a browser from doing more with an answer than showing it.

Plain ASGI, so that neither uploads nor answers are held in memory here.
"""

import math
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turngym_leaderboard.service.problems import problem, refusal
from turngym_leaderboard.service.rate_limits import RateLimiter, network_of

MAX_BODY_BYTES: Final = 1 << 20
"""Of every request but the parts of files."""
_TOO_LARGE: Final = f"the request has more than {MAX_BODY_BYTES} bytes"
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
}


class Bounds:
    """Wraps an app."""

    def __init__(self, app: ASGIApp, *, limiter: RateLimiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if "authorization" in Headers(scope=scope) or "cookie" in Headers(scope=scope):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        if scope["method"] == "HEAD":
            # As GET; the server keeps the body to itself.
            scope = {**scope, "method": "GET"}
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            nul = refusal(HTTPConnection(scope), 422, "the address holds a NUL; nothing here is called so")
            await nul(scope, receive, guarded)
            return
        client = scope.get("client")
        if seconds := self._limiter.wait(network_of(client[0]) if client else ""):
            await too_often(HTTPConnection(scope), seconds)(scope, receive, guarded)
            return
        if is_part_of_a_file(scope):
            await self._app(scope, receive, guarded)
            return
        if (told := Headers(scope=scope).get("content-length", "")).isdecimal() and int(told) > MAX_BODY_BYTES:
            await _too_large()(scope, receive, guarded)
            return
        await self._app(scope, _counted(receive), guarded)


def is_part_of_a_file(scope: Scope) -> bool:
    """Whether a request brings bytes of a file, which `uploads` counts."""
    return scope["method"] == "PATCH" and "/files/" in scope["path"]


def too_often(request: HTTPConnection, seconds: float) -> Response:
    """The answer to somebody who calls too often, and may again after so many seconds."""
    wait = math.ceil(seconds)
    return refusal(request, 429, f"too many requests; try again in {wait} s", {"Retry-After": str(wait)})


def _counted(receive: Receive) -> Receive:
    """Receives no more than a body may have."""
    received = 0

    async def counted() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise problem(413, _TOO_LARGE, {"Connection": "close"})
        return message

    return counted


def _too_large() -> JSONResponse:
    return JSONResponse({"detail": _TOO_LARGE}, 413, {"Connection": "close"})
