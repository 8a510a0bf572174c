"""Who may talk to a playground: the browser that was given its address, and pages of its own.

The address holds a secret, made at each start, so that no other site's page can name one of its pages. The names that
it answers to are fixed, so that no site can give it a name of its own; what changes something has to come from a page
of its own. Knows nothing of games.
"""

import secrets
from collections.abc import Collection, Mapping
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turngym_leaderboard.pages.render import HEADERS

_HEADERS: Final[Mapping[str, str]] = {**HEADERS, "Cache-Control": "no-store"}


class Gate:
    """Lets through what belongs here, and puts the pages' headers on all answers.

    Args:
        secret: first part of every path.
        hosts: name and port, as browsers are to give it.
    """

    def __init__(self, app: ASGIApp, *, secret: str, hosts: Collection[str]) -> None:
        self._app = app
        self._secret = secret.encode()
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refused = self._refused(scope)
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refused(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return PlainTextResponse(f"This answers to {' and '.join(sorted(self._hosts))} only.\n", 403)
        given = scope["path"].partition("/")[2].partition("/")[0]
        if not secrets.compare_digest(given.encode(), self._secret):
            return PlainTextResponse("There is nothing here: use the address that `leaderboard play` printed.\n", 404)
        if scope["method"] in ("GET", "HEAD"):
            return None
        if headers.getlist("origin") != [f"http://{hosts[0]}"]:
            return PlainTextResponse("Only the playground's own pages may do that.\n", 403)
        return None
