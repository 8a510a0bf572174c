"""HTTP/2 by hand, for callers that no gRPC library would be: they stop in the middle, and answer nothing."""

import socket
import struct
import time
from typing import Final, Self

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW: Final = 4
_CANCEL: Final = 8
_HEAD: Final = 9


class RawConnection:
    """A connection that sends what it is told to, and reads only what it is asked to.

    Args:
        address: host:port. window: bytes that the server may send on a stream; None: HTTP/2's default.
    """

    def __init__(self, address: str, *, window: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        settings = b"" if window is None else struct.pack(">HI", _INITIAL_WINDOW, window)
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        self._next = 1
        self._received = bytearray()

    def call(self, path: str, body: bytes = b"", *metadata: tuple[str, str | bytes], ends: bool = False) -> int:
        """Opens a stream, and sends as much of its body as is given. Returns its number."""
        stream, self._next = self._next, self._next + 2
        fields: dict[str, str | bytes] = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path if path.startswith("/") else f"/turngym.v1.EnvironmentService/{path}",
            ":authority": "server",
            "te": "trailers",
            "content-type": "application/grpc",
            **dict(metadata),
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._socket.sendall(
            _frame(_HEADERS, _END_HEADERS, stream, block) + _frame(_DATA, _END_STREAM * ends, stream, body)
        )
        return stream

    def reset(self, stream: int) -> None:
        self._socket.sendall(_frame(_RESET, 0, stream, struct.pack(">I", _CANCEL)))

    def ended(self, stream: int, seconds: float) -> bool:
        """Whether a stream is answered, and its status told, in time."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                self._received += (received := self._socket.recv(65_536))
            except TimeoutError:
                return False
            if not received:
                return False
            while len(self._received) >= _HEAD and len(self._received) >= (
                size := _HEAD + int.from_bytes(self._received[:3], "big")
            ):
                kind, flags, of = struct.unpack(">BBI", self._received[3:_HEAD])
                del self._received[:size]
                if (kind, of) == (_HEADERS, stream) and flags & _END_STREAM:
                    return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def message(payload: bytes, *, length: int | None = None) -> bytes:
    """A gRPC message, or the beginning of one that is to have `length` bytes."""
    return struct.pack(">BI", 0, len(payload) if length is None else length) + payload


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(value: str | bytes) -> bytes:
    """A string of a header block, at most 126 bytes long."""
    encoded = value.encode() if isinstance(value, str) else value
    assert len(encoded) < 127
    return bytes([len(encoded)]) + encoded
