"""What a port may be sent that is no call: noise, HTTP/2 that stops in the middle, frames that lie, other protocols.

Everything but the random part of a TLS hello is drawn from an `Rng`, so that a case is known by its number. Knows
nothing of the server.
"""

from __future__ import annotations

import contextlib
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from turngym_server.rng import Rng

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS: Final = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
DATA_FRAME, HEADERS_FRAME, RESET_FRAME, SETTINGS_FRAME, PING_FRAME, WINDOW_FRAME, CONTINUATION_FRAME = (
    0,
    1,
    3,
    4,
    6,
    8,
    9,
)
FRAME_BYTES: Final = 16_384
"""The most that a frame may hold, unless both sides agree on more."""
END_STREAM: Final = 1
END_HEADERS: Final = 4
METHOD: Final = "/turngym.v1.EnvironmentService/Step"
ENDINGS: Final = ("close", "reset", "half", "hold")
"""How a connection ends: closed, broken off, closed for sending only, or left standing until others are through."""


@dataclass(frozen=True, slots=True)
class Attack:
    """What one connection sends.

    Attributes:
        inside: within a TLS session, where the server speaks TLS.
    """

    kind: str
    pieces: Sequence[bytes]
    ending: str
    inside: bool


def draw_attack(rng: Rng) -> Attack:
    name = rng.choice(tuple(_KINDS))
    data = _KINDS[name](rng)
    cut = rng.below(len(data) + 1)
    pieces = rng.choice(((data,), (data[:cut],), (data[:cut], data[cut:]), (data, *_KINDS[name](rng)[:3].split(b"\n"))))
    return Attack(name, pieces, rng.choice(ENDINGS), inside=bool(rng.below(2)))


def noise(rng: Rng, count: int) -> bytes:
    return b"".join(rng.word().to_bytes(8, "big") for _ in range(count // 8 + 1))[:count]


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """An HTTP/2 frame; `length`: what it says of itself, where that is not the truth."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(method: str = METHOD, more: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """A header block without compression.

    Args:
        more: fields after those that a call has.
    """
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "server",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    pairs = [*((name.encode(), value.encode()) for name, value in fields.items()), *more]
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in pairs)


def _text(value: bytes) -> bytes:
    """HPACK's string literal, not Huffman-coded (RFC 7541, 5.2)."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    length, left = b"\x7f", len(value) - 127
    while left >= 128:
        length += bytes([left % 128 + 128])
        left //= 128
    return length + bytes([left]) + value


def _noise(rng: Rng) -> bytes:
    return noise(rng, rng.choice((0, 1, 3, 24, 1_000, 70_000)))


def _half_preface(rng: Rng) -> bytes:
    return PREFACE[: rng.below(len(PREFACE))] + rng.choice((b"", b"\0", noise(rng, 30)))


def _random_frames(rng: Rng) -> bytes:
    frames = [
        frame(rng.below(12), rng.below(256), rng.choice((0, 1, 2, 3, 2**31 - 1)), noise(rng, rng.below(100)))
        for _ in range(1 + rng.below(8))
    ]
    return PREFACE + SETTINGS + b"".join(frames)


def _lying_frame(rng: Rng) -> bytes:
    length = rng.choice((0, 1, 5, 16_384, 16_385, (1 << 24) - 1))
    kind = rng.choice((DATA_FRAME, HEADERS_FRAME, SETTINGS_FRAME, PING_FRAME, WINDOW_FRAME))
    return PREFACE + SETTINGS + frame(kind, rng.below(256), rng.below(4), noise(rng, rng.below(64)), length)


def _half_call(rng: Rng) -> bytes:
    """A call of which less than its length comes, or more."""
    body = noise(rng, rng.below(200))
    length = rng.choice((0, len(body), len(body) + 1, 1 << 20, (1 << 32) - 1))
    message = struct.pack(">BI", rng.choice((0, 0, 1, 7)), length) + body
    flags = rng.choice((0, END_STREAM))
    return PREFACE + SETTINGS + frame(HEADERS_FRAME, END_HEADERS, 1, headers()) + frame(DATA_FRAME, flags, 1, message)


def _header_block(rng: Rng) -> bytes:
    """Headers that are no HPACK, go on without end, or name what is in no table."""
    block = rng.choice(
        (
            noise(rng, 1 + rng.below(300)),
            b"\xff" * (1 + rng.below(20)),
            b"\x3f" + b"\xff" * 8 + b"\x01",
            headers() + b"\0" + _text(b"a") + b"\x7f\xff\xff\x7f",
            headers("/" + "x" * 100),
            (b"\x40" + _text(b"x" * 100) + _text(b"y" * 100)) * rng.choice((1, 50, 80)),
        )
    )
    ends = rng.choice((END_HEADERS, END_HEADERS | END_STREAM, 0))
    more = b"" if ends else frame(CONTINUATION_FRAME, 0, 1, noise(rng, 20)) * rng.choice((0, 1, 200))
    return PREFACE + SETTINGS + frame(HEADERS_FRAME, ends, 1, block) + more


def _floods(rng: Rng) -> bytes:
    """Many of what costs the sender little."""
    count = rng.choice((10, 1_000))
    kind = rng.below(4)
    if kind == 0:
        return PREFACE + SETTINGS + frame(PING_FRAME, 0, 0, bytes(8)) * count
    if kind == 1:
        return PREFACE + SETTINGS * count
    if kind == 2:
        streams = range(1, 2 * min(count, 300), 2)
        each = (frame(HEADERS_FRAME, END_HEADERS, n, headers()) + frame(RESET_FRAME, 0, n, bytes(4)) for n in streams)
        return PREFACE + SETTINGS + b"".join(each)
    return PREFACE + SETTINGS + frame(WINDOW_FRAME, 0, 0, b"\x7f\xff\xff\xff") * count


def _http_1(rng: Rng) -> bytes:
    return rng.choice(
        (
            b"GET / HTTP/1.1\r\nHost: server\r\n\r\n",
            b"POST /turngym.v1.EnvironmentService/Step HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
            b"GET / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n\r\n",
            b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n",
            b"GET /" + b"a" * 70_000,
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n",
        )
    )


def _hello(rng: Rng) -> bytes:
    """What a TLS client says first, whole or changed in a byte."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="server")
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    hello = bytearray(outgoing.read())
    if rng.below(2):
        hello[rng.below(len(hello))] ^= 1 + rng.below(255)
    return bytes(hello) + rng.choice((b"", noise(rng, 40), bytes(hello)))


def _odd_metadata(rng: Rng) -> bytes:
    """A whole call with metadata that no client of ours sends."""
    values = (b"", b"1", b"-1", b"9" * 20 + b"H", b"\xff\x00\r\n", b"gzip,,", "é".encode(), b"x" * 9_000)
    names = (
        *(b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"content-type", b"content-length", b"te"),
        *(b"authorization", b"turngym-client", b"traceparent", b"x-bin", b"grpc-status-details-bin", b"grpc-status"),
        *(b":path", b":method", b":unknown", b"Upper-Case", b"", b"with space", b"connection", b"cookie"),
    )
    block = headers(more=[(rng.choice(names), rng.choice(values)) for _ in range(rng.choice((1, 1, 2, 5, 60)))])
    parts = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    frames = [
        frame(CONTINUATION_FRAME if at else HEADERS_FRAME, 0 if at + 1 < len(parts) else END_HEADERS, 1, part)
        for at, part in enumerate(parts)
    ]
    return PREFACE + SETTINGS + b"".join(frames) + frame(DATA_FRAME, END_STREAM, 1, bytes(5))


def _plain_call(rng: Rng) -> bytes:
    """A whole call, good but for what it asks; on a port that speaks TLS it is noise."""
    return (
        PREFACE
        + SETTINGS
        + frame(HEADERS_FRAME, END_HEADERS, 1, headers())
        + frame(DATA_FRAME, END_STREAM, 1, bytes(5))
    )


_KINDS: Final[dict[str, Callable[[Rng], bytes]]] = {
    "noise": _noise,
    "half a preface": _half_preface,
    "random frames": _random_frames,
    "a frame that lies": _lying_frame,
    "half a call": _half_call,
    "a header block": _header_block,
    "a flood": _floods,
    "another protocol": _http_1,
    "a TLS hello": _hello,
    "odd metadata": _odd_metadata,
    "a plain call": _plain_call,
}
