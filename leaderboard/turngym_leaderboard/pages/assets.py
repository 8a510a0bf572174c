"""The files that pages load: the style, the scripts, the icon. Knows nothing of pages."""

from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from turngym_leaderboard.pages.render import HEADERS, STATIC

TYPES: Final[Mapping[str, str]] = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
ASSETS: Final[Mapping[str, str]] = {file.name: TYPES[file.suffix] for file in sorted(STATIC.iterdir())}
"""Media types of the files, by name; nothing else is served."""

router: Final = APIRouter(include_in_schema=False)


@router.get("/static/{name}")
def asset(name: str) -> Response:
    """One of the files."""
    kind = ASSETS.get(name)
    if kind is None:
        return Response("there is no such file", 404, dict(HEADERS), "text/plain")
    return FileResponse(STATIC / name, headers={**HEADERS, "Cache-Control": "no-cache"}, media_type=kind)
