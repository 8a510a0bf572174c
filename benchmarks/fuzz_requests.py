"""Mutated requests: a valid one for some RPC, then a few changes of its fields, of its options, and of its bytes.

Everything is drawn from an `Rng`, so that a case is known by its number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from fuzz_texts import hostile_text
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from turngym.v1 import environment_pb2 as pb
from turngym_server.rng import Rng

MAX_BYTES: Final = 4 << 20
"""A field is not multiplied beyond this."""
STREAM: Final = "StepStream"
RPCS: Final = (
    "GetServer",
    "ListEnvironments",
    "GetEnvironment",
    "Reset",
    "Reset",
    "Reset",
    "Step",
    "Step",
    "Step",
    "Fork",
    "Fork",
    "Advise",
    "KeepAlive",
    "Close",
    STREAM,
    STREAM,
)
"""Those with more in them come more often."""
REPLIES: Final[Mapping[str, type[Message]]] = {name: getattr(pb, f"{name}Response") for name in dict.fromkeys(RPCS)}


@dataclass(frozen=True, slots=True)
class Served:
    """An environment to be asked for, with options that it takes."""

    id: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """A session that a case begins with."""

    environment: str
    options: str
    level_seed: int
    split: pb.Split.ValueType = pb.SPLIT_ALL


def request_id(rng: Rng) -> bytes:
    return rng.word().to_bytes(8, "big") + rng.word().to_bytes(8, "big")


def reset_item(rng: Rng, start: Start) -> pb.ResetItem:
    return pb.ResetItem(
        request_id=request_id(rng),
        environment_id=start.environment,
        options_json=start.options,
        split=start.split,
        level_seed=start.level_seed,
        noise_seed=start.level_seed,
    )


def draw_start(rng: Rng, served: Sequence[Served]) -> Start:
    environment = rng.choice(served)
    return Start(environment.id, rng.choice(environment.options), rng.below(1_000))


def draw_request(rng: Rng, rpc: str, started: pb.Started, served: Sequence[Served]) -> bytes:
    """A mutated request about a session that has just begun, or about none."""
    message = _valid(rng, rpc, started, served)
    for _ in range(rng.below(4)):
        _mutate_field(rng, message)
    data = message.SerializeToString()
    for _ in range(max(rng.below(6) - 2, 0)):
        data = _mutate_bytes(rng, data)
    return data


def _valid(rng: Rng, rpc: str, started: pb.Started, served: Sequence[Served]) -> Message:
    session = started.session_id
    legal = started.state.legal_actions.actions or ["Up"]
    match rpc:
        case "ListEnvironments":
            return pb.ListEnvironmentsRequest(page_size=rng.below(3), page_token="bandit")
        case "GetEnvironment":
            start = draw_start(rng, served)
            return pb.GetEnvironmentRequest(
                environment_id=start.environment, options_json=start.options, limits=pb.Limits(max_turns=3)
            )
        case "Reset":
            items = [reset_item(rng, draw_start(rng, served)) for _ in range(1 + rng.below(3))]
            if rng.below(3) == 0:
                items.append(_resume(rng, started))
            return pb.ResetRequest(items=items, max_wait_seconds=1.0, want_legal_actions=bool(rng.below(2)))
        case "Step":
            actions = [rng.choice(legal) for _ in range(1 + rng.below(3))]
            step = pb.StepItem(session_id=session, step_index=1, actions=actions)
            return pb.StepRequest(items=[step], max_wait_seconds=1.0, want_legal_actions=bool(rng.below(2)))
        case "StepStream":
            step: Any = _valid(rng, "Step", started, served)
            return pb.StepStreamRequest(id=1 + rng.below(3), step=step)
        case "Fork":
            item = pb.ForkItem(request_id=request_id(rng), session_id=session, noise_seed=1)
            return pb.ForkRequest(items=[item], want_legal_actions=bool(rng.below(2)))
        case "Advise":
            return pb.AdviseRequest(items=[pb.AdviseItem(session_id=session)])
        case "KeepAlive":
            return pb.KeepAliveRequest(session_ids=[session])
        case "Close":
            return pb.CloseRequest(session_ids=[session], reason=pb.CLOSE_REASON_FINISHED)
        case _:
            return pb.GetServerRequest()


def _resume(rng: Rng, started: pb.Started) -> pb.ResetItem:
    legal = started.state.legal_actions.actions or ["Up"]
    return pb.ResetItem(
        request_id=request_id(rng),
        environment_id=started.environment_id,
        expected_version=started.version,
        options_json=started.options_json,
        limits=started.limits,
        split=started.split,
        level_seed=started.level_seed,
        resume=pb.Resume(
            turns=[pb.Actions(actions=[rng.choice(legal)]) for _ in range(rng.below(3))],
            noise=started.noise,
            digest=started.state.digest,
        ),
    )


# Fields.

INTEGERS: Final = (0, 1, 2, 5, 99, 1_001, 65_535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1, -1)
FLOATS: Final = (math.nan, math.inf, -math.inf, -0.0, -1.0, 1e-320, 1e308, 60.001, 86_401.0, 0.001)
SIZES: Final = (0, 1, 15, 16, 17, 31, 32, 33, 1_000, 70_000)
COUNTS: Final = (2, 3, 1_023, 1_024, 1_025, 5_000)


def _mutate_field(rng: Rng, message: Message) -> None:
    """Changes one field somewhere in the message, set or unset."""
    places = list(_places(message))
    if not places:
        return
    owner, field = rng.choice(places)
    if field.is_repeated:
        _mutate_repeated(rng, owner, field)
    elif field.message_type is not None:
        if rng.below(2):
            owner.ClearField(field.name)
        else:
            getattr(owner, field.name).SetInParent()
    else:
        setattr(owner, field.name, _value(rng, owner, field))


def _places(message: Message) -> Iterator[tuple[Message, Any]]:
    """Every field, as its owner and its descriptor, of the message and of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from _places(part)


def _mutate_repeated(rng: Rng, owner: Message, field: FieldDescriptor) -> None:
    values = getattr(owner, field.name)
    match rng.below(4):
        case 0:
            owner.ClearField(field.name)
        case 1 if len(values):
            size = max(owner.ByteSize(), 1)
            count = min(rng.choice(COUNTS), MAX_BYTES // size)
            values.extend([rng.choice(values)] * max(count - len(values), 1))
        case 2 if len(values):
            del values[rng.below(len(values)) :]
        case _ if field.message_type is None:
            values.append(_value(rng, owner, field))
        case _:
            values.add()


def _value(rng: Rng, owner: Message, field: FieldDescriptor) -> Any:
    kind = FieldDescriptor
    match field.cpp_type:
        case kind.CPPTYPE_STRING if field.type == kind.TYPE_BYTES:
            return rng.word().to_bytes(8, "big")[: rng.below(9)] + bytes(rng.choice(SIZES))
        case kind.CPPTYPE_STRING if field.name == "options_json":
            return hostile_options(rng, getattr(owner, field.name))
        case kind.CPPTYPE_STRING:
            return hostile_text(rng, [getattr(owner, field.name) or "Up"] if not field.is_repeated else ["Up", "Down"])
        case kind.CPPTYPE_DOUBLE:
            return rng.choice(FLOATS)
        case kind.CPPTYPE_BOOL:
            return bool(rng.below(2))
        case kind.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 5, 77, -1, (1 << 31) - 1))
        case kind.CPPTYPE_UINT32:
            return rng.choice(INTEGERS) % (1 << 32)
        case _:
            return rng.choice(INTEGERS) % (1 << 64)


# Options.


NO_OPTIONS: Final = ("", " ", "null", "[]", "1", '"a"', "{", "}", "{}{}", "\ufeff{}", "{'a': 1}", "{//\n}", "NaN")


def hostile_options(rng: Rng, valid: str) -> str:
    """Options that are no JSON, no object, or hold what no option expects."""
    try:
        given: object = json.loads(valid or "{}")
    except (ValueError, RecursionError):  # It may have been mutated before.
        given = {}
    named = cast("dict[str, object]", given) if isinstance(given, dict) else {}
    kind = rng.below(10)
    if kind == 0:
        depth = rng.choice((10, 1_000, 30_000))
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
        return f'{{"width": {opening * depth}{closing * depth if rng.below(2) else ""}}}'
    if kind == 1:
        return rng.choice(
            ("", " ", "null", "[]", "1", '"a"', "{", "}", "{}{}", "\ufeff{}", "{'a': 1}", "{//\n}", "NaN")
        )
    if kind == 2:
        return hostile_text(rng, ["{}", valid or "{}"])
    if kind == 3:
        at = rng.below(len(valid) + 1)
        return valid[:at] + rng.choice(('"', ",", ":", "\\", "\\ud800", "\\u0000", "1e999", "-")) + valid[at:]
    name = rng.choice([*named, "width", "size", "symbols", "names", "levels", "__class__", "model_config", ""])
    if kind == 4:
        name = hostile_text(rng, [name or "width"])
    text = json.dumps(named | {name: _json_value(rng)}, ensure_ascii=bool(rng.below(2)))
    return text.encode("utf-8", "replace").decode()  # Lone surrogates only as escapes: protobuf takes no others.


NO_VALUES: Final = cast("Sequence[object]", (None, True, False, [], {}, [[]], {"a": {}}))


def _json_value(rng: Rng) -> object:
    match rng.below(8):
        case 0:
            return rng.choice(NO_VALUES)
        case 1:
            return rng.choice((0, 1, 2, 3, 5, 12, 20, -1, 1 << 63, 1 << 64, 10**4_000))
        case 2:
            return rng.choice((0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 1.0000001))
        case 3:
            return "\ud800" + rng.choice(("", "a", "\udfff"))
        case 4:
            return [rng.below(10)] * rng.choice((1, 100, 20_000))
        case _:
            return hostile_text(rng, ["6", "ragen", "uniform", "pairs"])


# Bytes.


def _mutate_bytes(rng: Rng, data: bytes) -> bytes:
    if not data:
        return bytes(rng.below(256) for _ in range(rng.below(12)))
    return rng.choice(_BYTE_CHANGES)(rng, data, rng.below(len(data)))


def _flip(rng: Rng, data: bytes, at: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 1 << rng.below(8),)) + data[at + 1 :]


def _cut(rng: Rng, data: bytes, at: int) -> bytes:
    return data[:at]


def _insert(rng: Rng, data: bytes, at: int) -> bytes:
    return data[:at] + bytes(rng.below(256) for _ in range(1 + rng.below(8))) + data[at:]


def _drop(rng: Rng, data: bytes, at: int) -> bytes:
    return data[:at] + data[at + 1 + rng.below(8) :]


def _double(rng: Rng, data: bytes, at: int) -> bytes:
    end = at + 1 + rng.below(64)
    return data[:end] + data[at:end] * rng.choice((1, 2, 100)) + data[end:]


HUGE: Final = (b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\x80" * 9 + b"\x00", b"\x80\x00")


def _huge_number(rng: Rng, data: bytes, at: int) -> bytes:
    number = rng.choice(
        (b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\x80" * 9 + b"\x00", b"\x80\x00")
    )
    return data[:at] + number + data[at + 1 :]


def _no_utf8(rng: Rng, data: bytes, at: int) -> bytes:
    wrong = rng.choice((b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf5\x80\x80\x80", b"\xe2\x82"))
    return data[:at] + wrong + data[at + len(wrong) :]


def _unknown_field(rng: Rng, data: bytes, at: int) -> bytes:
    field = rng.choice(
        (
            b"\x00\x01",  # Number 0.
            b"\xfa\xff\xff\xff\x0f\x01a",  # The largest number.
            b"\x0b" * rng.choice((1, 50, 500)),  # Groups that begin.
            b"\x0c",  # A group that ends.
            b"\x0e",  # Wire types that do not exist.
            b"\x0f",
            b"\xa2\x01\x01a",  # Reserved.
            b"\x0a\x00",  # An empty item.
        )
    )
    return rng.choice((data + field, field + data, data[:at] + field + data[at:]))


def _nested(rng: Rng, data: bytes, at: int) -> bytes:
    """A message in a message in a message …, each as its first field."""
    nested = data[at : at + 32]
    for _ in range(rng.choice((3, 60, 200))):
        nested = b"\x0a" + _varint(len(nested)) + nested
    return nested


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


_BYTE_CHANGES: Final[Sequence[Callable[[Rng, bytes, int], bytes]]] = (
    _flip,
    _flip,
    _cut,
    _insert,
    _drop,
    _double,
    _huge_number,
    _no_utf8,
    _unknown_field,
    _nested,
)
