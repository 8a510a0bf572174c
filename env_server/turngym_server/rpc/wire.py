"""The few things about protobuf's wire format that the service does by hand.

Outcomes are kept as the bytes they leave as, so that a batch is answered by joining them; and a request with one
undecodable item is taken apart, so that the item fails alone. Knows nothing of what the messages mean.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_GROUP_START: Final = 3
_GROUP_END: Final = 4
_FIXED32: Final = 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4, _GROUP_START: 0, _GROUP_END: 0}

MAX_FIELDS: Final = 100_000
"""Fields in one request, those of its items included. A parsed field takes up to a hundred times its bytes."""
TOO_MANY_FIELDS: Final = f"more than {MAX_FIELDS} fields; send fewer items, or fewer actions in each"
COUNTED_FROM: Final = 64 * 1024
"""Smaller requests hold too few fields to do harm, and are not counted."""

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


def check_fields(kind: type[Message], data: bytes) -> None:
    """Looks at a request before it is parsed: a few megabytes of empty items would take gigabytes.

    Raises:
        DecodeError: it holds more than MAX_FIELDS.
    """
    if len(data) >= COUNTED_FROM:
        _count_fields(cast(Descriptor, kind.DESCRIPTOR), data, 0, len(data), MAX_FIELDS)


def _count_fields(kind: Descriptor, data: bytes, position: int, end: int, left: int) -> int:
    """How many of `left` fields are left after those of the message in data[position:end], the nested ones included.

    What is no message is counted as far as a parser would get: it is refused by the parser.
    """
    nested = _nested(kind)
    while position < end:
        left -= 1
        if left < 0:
            raise DecodeError(TOO_MANY_FIELDS)
        try:
            # Nearly all keys and lengths are one byte, and calls are what this would spend its time on.
            key, position = (data[position], position + 1) if data[position] < 0x80 else _read_varint(data, position)
            wire_type = key & 7
            if wire_type == _BYTES:
                short = position < end and data[position] < 0x80
                length, position = (data[position], position + 1) if short else _read_varint(data, position)
                if (inner := nested.get(key >> 3)) is not None:
                    left = _count_fields(inner, data, position, min(position + length, end), left)
                position += length
            elif wire_type == _VARINT:
                _, position = _read_varint(data, position)
            elif wire_type in _FIXED_BYTES:
                position += _FIXED_BYTES[wire_type]
            else:
                return left
        except _NoVarint:
            return left
    return left


@functools.cache
def _nested(kind: Descriptor) -> Mapping[int, Descriptor]:
    """The fields of a message that hold messages, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


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
        DecodeError: once it comes to what is no field, or to one too many.
    """
    position = 0
    left = MAX_FIELDS
    while position < len(data):
        start = position
        left -= 1
        if left < 0:
            raise DecodeError(TOO_MANY_FIELDS)
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


class _NoVarint(DecodeError):
    """Bytes that are no varint."""


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """A varint and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise _NoVarint("a number runs past the end of the message")
        byte = data[position]
        position += 1
        if byte < 0x80:
            return (value | byte << shift if shift else byte), position
        value |= (byte & 0x7F) << shift
    raise _NoVarint("a number is longer than ten bytes")
