"""Requests as bytes, for texts that no client library would send."""

BAD_UTF8 = b"\xed\xa0\x80"
"""A lone surrogate, which UTF-8 does not have."""


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field, numbered 1 to 15: bytes, a string, or a message."""
    return bytes((number << 3 | 2,)) + _varint(len(payload)) + payload


def bad_text(number: int) -> bytes:
    """A string field that is no UTF-8."""
    return field(number, BAD_UTF8)


def items_field(*items: bytes) -> bytes:
    """A batched request of items that are serialised already, decodable or not."""
    return b"".join(field(1, item) for item in items)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))
