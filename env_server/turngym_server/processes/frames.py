"""What an isolated environment and its server say to each other: JSON behind its length, over a socket.

No pickle: whatever goes wrong in the environment's process, what comes from it is only data. Knows nothing of what the
values mean.
"""

import json
import socket
import time
from typing import Any, Final

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
_LENGTH_BYTES: Final = 4


def write(connection: socket.socket, value: object) -> None:
    """Sends a value.

    Raises:
        OSError: the other side is gone, or takes nothing for as long as the socket's own timeout.
        TypeError, ValueError: JSON cannot hold it.
    """
    data = json.dumps(value, default=_plain).encode()
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def read(connection: socket.socket, seconds: float | None = None) -> Any:
    """The next value; None where the other side is gone.

    Args:
        seconds: how long to wait for the whole of it; None: for ever.

    Raises:
        TimeoutError: it did not come.
        ValueError: what came is no value.
    """
    end = None if seconds is None else time.monotonic() + seconds
    length = int.from_bytes(_exactly(connection, _LENGTH_BYTES, end), "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes; expected at most {MAX_FRAME_BYTES}")
    data = _exactly(connection, length, end)
    return json.loads(data) if data else None


def _exactly(connection: socket.socket, count: int, end: float | None) -> bytes:
    """So many bytes; none where the other side is gone before all have come."""
    received = bytearray()
    while len(received) < count:
        if end is not None:
            connection.settimeout(max(end - time.monotonic(), 1e-6))
        try:
            piece = connection.recv(min(count - len(received), 1 << 20))
        except ConnectionError:
            piece = b""
        if not piece:
            return b""
        received += piece
    return bytes(received)


def _plain(value: Any) -> object:
    """A number of numpy's as Python's own."""
    if not hasattr(value, "item"):
        raise TypeError(f"{type(value).__name__} is neither text nor a number")
    return value.item()
