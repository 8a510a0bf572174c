"""Whether an address can be listened on, told by the system itself.

gRPC says only that it failed, after lines of its own on stderr. Knows nothing of servers.
"""

import errno
import socket


def check_free(host: str, port: int) -> None:
    """Returns where one of the host's addresses can be listened on at `port`; 0: at some port.

    Raises:
        OSError: none can. Says why and what to do.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(f"{host!r} names no address of this machine: {error.strerror}; give another --host") from error
    refusals: list[OSError] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: connections that linger from a server that is gone are no hindrance.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return
        except OSError as error:
            refusals.append(error)
    raise _explained(refusals[0], host, port) from refusals[0]


def _explained(error: OSError, host: str, port: int) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return OSError(f"port {port} of {host} is in use; choose another --port, or 0 for a free one")
    if error.errno == errno.EADDRNOTAVAIL:
        return OSError(f"{host} is no address of this machine; give another --host")
    if error.errno == errno.EACCES:
        return OSError(
            f"port {port} of {host} is not for this user ({error.strerror}); choose a --port of 1024 or more"
        )
    return OSError(f"cannot listen on port {port} of {host}: {error.strerror}")
