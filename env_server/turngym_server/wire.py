"""The few things about protobuf's wire format that the service does by hand.

Outcomes are kept as the bytes they leave as, so that a batch is answered by joining them; and a request with one
undecodable item is taken apart, so that the item fails alone. Knows nothing of what the messages mean.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5

ITEMS_FIELD: Final = 1
"""Number of the repeated field that holds a batch's items, in every batched message of the contract."""

_BYTE: Final = tuple([bytes((value,)) for value in range(256)])

MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class Undecodable:
    """An item that could not be parsed: its bytes, and why."""

    data: bytes
    error: str


@dataclass(frozen=True, slots=True)
class Batch(Generic[MessageT]):
    """A batched request whose items could not all be parsed: the request without items, and the items in order."""

    request: MessageT
    items: list[bytes]


def varint(value: int) -> bytes:
    """Base-128 encoding of 0 … 2^64 − 1."""
    if value < 0x4000:  # Nearly all: keys, indices, lengths of small messages.
        return _BYTE[value] if value < 0x80 else _BYTE[value & 0x7F | 0x80] + _BYTE[value >> 7]
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def bytes_field(number: int, payload: bytes) -> bytes:
    """A length-delimited field, numbered 1 to 15: bytes, a string, or a message."""
    return _BYTE[number << 3 | _BYTES] + varint(len(payload)) + payload


def varint_field(number: int, value: int) -> bytes:
    """A field, numbered 1 to 15, that holds a whole number."""
    return _BYTE[number << 3 | _VARINT] + varint(value)


def take_apart(kind: type[MessageT], data: bytes, items_field: int = ITEMS_FIELD) -> Batch[MessageT]:
    """Splits a batched request into its items and the rest.

    Raises:
        DecodeError: the bytes are no protobuf message, or what surrounds the items is undecodable.
    """
    items: list[bytes] = []
    rest = bytearray()
    for number, wire_type, start, payload_start, end in _fields(data):
        if number == items_field and wire_type == _BYTES:
            items.append(data[payload_start:end])
        else:
            rest += data[start:end]
    return Batch(kind.FromString(bytes(rest)), items)


def text_field(data: bytes, number: int) -> str:
    """The last value of a string field, or "" where it is absent or undecodable."""
    text = ""
    try:
        for field, wire_type, _, payload_start, end in _fields(data):
            if field == number and wire_type == _BYTES:
                text = data[payload_start:end].decode("utf-8", "ignore")
    except DecodeError:
        return text
    return text


def raw_field(data: bytes, number: int) -> bytes:
    """The last value of a bytes field, or b"" where it is absent."""
    raw = b""
    try:
        for field, wire_type, _, payload_start, end in _fields(data):
            if field == number and wire_type == _BYTES:
                raw = data[payload_start:end]
    except DecodeError:
        return raw
    return raw


def integer_field(data: bytes, number: int) -> int:
    """The last value of a varint field, or 0 where it is absent."""
    value = 0
    try:
        for field, wire_type, _, payload_start, _ in _fields(data):
            if field == number and wire_type == _VARINT:
                value, _ = _read_varint(data, payload_start)
    except DecodeError:
        return value
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """(field number, wire type, start of the field, start of its payload, end) of each top-level field.

    Raises:
        DecodeError: once it comes to what is no field.
    """
    position = 0
    while position < len(data):
        start = position
        key, position = _read_varint(data, position)
        number, wire_type = key >> 3, key & 7
        payload = position
        if wire_type == _VARINT:
            _, position = _read_varint(data, position)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _BYTES:
            length, payload = _read_varint(data, position)
            position = payload + length
        elif wire_type == _FIXED32:
            position += 4
        else:
            raise DecodeError(f"wire type {wire_type} at byte {start}")
        if position > len(data):
            raise DecodeError(f"the field at byte {start} runs past the end of the message")
        yield number, wire_type, start, payload, position


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A varint and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise DecodeError("a number runs past the end of the message")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("a number is longer than ten bytes")
