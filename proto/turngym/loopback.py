"""Which hosts only this machine reaches: the one rule by which servers of ours tell whom they are open to."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`: a name, or a number without brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
