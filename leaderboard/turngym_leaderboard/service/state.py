"""What a running service holds: its store, its limits and its counts of calls."""

from dataclasses import dataclass
from typing import Annotated, Final

import anyio
from fastapi import Depends, Request

from turngym_leaderboard.endpoints import Endpoints
from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.remote.proxy import Proxy
from turngym_leaderboard.service.rate_limits import RateLimiter
from turngym_leaderboard.store import Store

_PLAYING: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimits:
    """Calls a second and at once.

    Attributes:
        address_rate, address_burst: of an address, whatever it asks for.
        owner_rate, owner_burst: of an owner's tokens together.
        guess_rate, guess_burst: of an address, with tokens that are none.
        submissions_per_hour: that an owner may begin, and at once.
    """

    address_rate: float = 50.0
    address_burst: int = 200
    owner_rate: float = 20.0
    owner_burst: int = 100
    guess_rate: float = 1.0
    guess_burst: int = 20
    submissions_per_hour: int = 20


class Service:
    """What every call of a service shares.

    Attributes:
        endpoints: that may be submitted.
        proxy: plays remote agents' turns; None: without environment servers none are played.
        playing: calls that may do so at once; others wait, without holding up pages.
        calls: by owner. guesses: wrong tokens, by address. beginnings: of submissions, by owner.
    """

    def __init__(
        self, store: Store, intake: IntakeLimits, rates: RateLimits, proxy: Proxy | None, endpoints: Endpoints
    ) -> None:
        self.store = store
        self.endpoints = endpoints
        self.proxy = proxy
        self.playing = anyio.CapacityLimiter(_PLAYING)
        self.intake = intake
        self.rates = rates
        self.calls = RateLimiter(rates.owner_rate, rates.owner_burst)
        self.guesses = RateLimiter(rates.guess_rate, rates.guess_burst)
        self.beginnings = RateLimiter(rates.submissions_per_hour / 3600, rates.submissions_per_hour)


def service(request: Request) -> Service:
    """The one that `create_app` put there."""
    found: Service = request.app.state.service
    return found


ServiceOf = Annotated[Service, Depends(service)]
