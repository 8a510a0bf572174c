"""Forms that a page sends. Knows nothing of what they ask for."""

from typing import Final
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.datastructures import ImmutableMultiDict

MOST_BYTES: Final = 1 << 20
_MOST_FIELDS: Final = 1_000


class BadForm(Exception):
    """What was sent is no form of ours. Says why."""


async def read_form(request: Request) -> ImmutableMultiDict[str, str]:
    """The fields of a form, in application/x-www-form-urlencoded.

    Raises:
        BadForm: it is none, or too large.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise BadForm(f"a form of the type {kind!r} came; expected application/x-www-form-urlencoded")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise BadForm(f"the form is larger than {MOST_BYTES:,} bytes")
    try:
        # Browsers send the ends of a text's lines as two characters.
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise BadForm(f"the form cannot be read: {error}") from error
    return ImmutableMultiDict([(name, value.replace("\r\n", "\n")) for name, value in pairs])
