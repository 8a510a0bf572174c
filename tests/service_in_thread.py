"""A board's service on a free port, in a thread of the test's process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from turngym_leaderboard.endpoints import Endpoints
from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.remote.proxy import Proxy
from turngym_leaderboard.service.app import create_app
from turngym_leaderboard.service.serving import ServiceConfig, address_of, listen, make_server
from turngym_leaderboard.service.state import RateLimits
from turngym_leaderboard.store import Store

GENEROUS = RateLimits(address_rate=1e6, address_burst=10**6, owner_rate=1e6, owner_burst=10**6)


@contextmanager
def serving(
    store: Store,
    *,
    intake: IntakeLimits | None = None,
    rates: RateLimits = GENEROUS,
    proxy: Proxy | None = None,
    endpoints: Endpoints | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    forwarded_by: str = "",
) -> Iterator[str]:
    """Serves within the block; gives the address.

    Args:
        proxy: plays remote agents.
        endpoints: that may be submitted.
        wrap: puts something between the network and the app.
        forwarded_by: address of a reverse proxy that is believed.
    """
    config = ServiceConfig(port=0, proxy=forwarded_by)
    with listen(config) as listener:
        server = make_server(wrap(create_app(store, intake, rates, proxy, endpoints)), config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield address_of(listener, config)
        finally:
            server.should_exit = True
            thread.join()
