"""Who calls: a bearer token, looked up at each call, so that one that is revoked does not work once more.

Tokens come in the header Authorization alone, never in an address, where logs would keep them.
"""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import Depends, Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from turngym_leaderboard.service.problems import problem
from turngym_leaderboard.service.rate_limits import RateLimiter, network_of
from turngym_leaderboard.service.state import Service, ServiceOf
from turngym_leaderboard.store import owners
from turngym_leaderboard.store.values import Owner, Role
from turngym_leaderboard.visibility import EVERYBODY, Viewer

_bearer: Final = HTTPBearer(auto_error=False, description="A token of this board, as `leaderboard token` makes one.")
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="turngym leaderboard"'}
MAX_TOKEN_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `owner`: None of somebody without a token."""

    owner: Owner | None
    viewer: Viewer


async def caller(
    request: Request, service: ServiceOf, shown: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
) -> Caller:
    """Whoever the token belongs to, or nobody in particular without one."""
    if shown is None:
        if "authorization" in request.headers:
            raise problem(401, "the header Authorization is no bearer token; expected: Bearer tgb_…", _CHALLENGE)
        return Caller(None, EVERYBODY)
    return await known(service, request, shown.credentials)


async def known(service: Service, request: Request, text: str) -> Caller:
    """Whoever a token belongs to. Raises 401 for one that is none, and 429 for who calls, or guesses, too often."""
    address = network_of(request.client.host) if request.client else ""
    found = await run_in_threadpool(owners.token, service.store, text[:MAX_TOKEN_CHARACTERS], now=datetime.now(UTC))
    if found is None:
        take(service.guesses, address)
        raise problem(401, "the token is unknown, expired or revoked; ask the board's operator for another", _CHALLENGE)
    take(service.calls, str(found.owner.id))
    return Caller(found.owner, Viewer(found.owner.id, admin=found.role is Role.ADMIN))


def take(limiter: RateLimiter, key: str) -> None:
    """Takes one call of this key. Raises 429 where there is none."""
    if seconds := limiter.wait(key):
        wait = math.ceil(seconds)
        raise problem(429, f"too many requests; try again in {wait} s", {"Retry-After": str(wait)})


CallerOf = Annotated[Caller, Depends(caller)]


def submitter(told: CallerOf) -> Owner:
    """The owner who calls. Raises 401 for somebody without a token."""
    if told.owner is None:
        raise problem(401, "this needs a token; ask the board's operator for one", _CHALLENGE)
    return told.owner


OwnerOf = Annotated[Owner, Depends(submitter)]
