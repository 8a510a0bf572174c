"""How often somebody may call: token buckets, bounded in number. Knows nothing of HTTP.

A bucket holds up to `burst` calls and gains `rate` a second. Who has been quiet longest is forgotten first, which only
ever gives more than was due.
"""

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_BUCKETS: Final = 50_000
_IPV6_NETWORK: Final = 64
"""Bits of an address of IPv6 that name a subscriber, who has all that begin with them."""


class RateLimiter:
    """Buckets of one size, by key. May be shared by threads.

    Args:
        rate: calls a second. burst: calls at once, at least 1.
        clock: seconds, monotonic.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        if not rate > 0 or burst < 1:
            raise ValueError(f"{rate:g} calls a second, {burst} at once: expected over 0, and at least 1")
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, key: str) -> float:
        """Takes one call of this key: 0 if there was one, else the seconds until there is, and nothing is taken."""
        with self._lock:
            now = self._clock()
            held, since = self._buckets.pop(key, (float(self._burst), now))
            held = min(self._burst, held + (now - since) * self._rate)
            allowed = held >= 1
            self._buckets[key] = (held - 1 if allowed else held, now)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - held) / self._rate


def network_of(address: str) -> str:
    """Whom an address belongs to: itself, or for IPv6 its network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_NETWORK), strict=False))
