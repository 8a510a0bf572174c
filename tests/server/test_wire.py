"""The wire format by hand, against protobuf's own encoding."""

import pytest
from google.protobuf.message import DecodeError

from turngym.v1 import environment_pb2 as pb
from turngym_server.rpc import wire


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, b"\x00"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02"), (2**64 - 1, b"\xff" * 9 + b"\x01")],
)
def test_varint(value, encoded):
    assert wire.varint(value) == encoded
    assert wire.integer_field(wire.varint_field(2, value), 2) == value


def test_fields_are_protobufs():
    outcome = pb.StepOutcome(session_id="ß" * 100, step_index=300, pending=pb.Pending())
    by_hand = wire.bytes_field(1, ("ß" * 100).encode()) + wire.varint_field(2, 300) + wire.bytes_field(5, b"")
    assert by_hand == outcome.SerializeToString()


def test_take_apart():
    items = [pb.ResetItem(environment_id=name, level_seed=5, noise_seed=2**63) for name in ("a", "b")]
    request = pb.ResetRequest(items=items, max_wait_seconds=1.5, want_legal_actions=True)
    unknown = b"\xa0\x06\x07" + b"\xad\x06abcd"  # Fields 100 and 101, of types varint and fixed32.
    batch = wire.take_apart(pb.ResetRequest, request.SerializeToString() + unknown)
    assert [pb.ResetItem.FromString(item) for item in batch.items] == items
    assert (batch.request.max_wait_seconds, batch.request.want_legal_actions, len(batch.request.items)) == (
        1.5,
        True,
        0,
    )


@pytest.mark.parametrize("data", [b"\x0a\x05abc", b"\x0a", b"\x80", b"\xff" * 11, b"\x09abc", b"\x0b"])
def test_what_is_no_message(data):
    with pytest.raises(DecodeError):
        wire.take_apart(pb.StepRequest, data)


def test_what_can_be_read_of_a_bad_item():
    data = wire.bytes_field(1, b"id") + wire.varint_field(2, 9) + wire.bytes_field(3, b"\xff")
    assert (wire.text_field(data, 1), wire.raw_field(data, 1), wire.integer_field(data, 2)) == ("id", b"id", 9)
    assert (wire.text_field(data + b"\x0a", 3), wire.raw_field(data, 7), wire.integer_field(b"", 2)) == ("", b"", 0)


def counted(items: int, actions: int, size: int = 1, resume: bool = False) -> bytes:
    """A request of so many fields: each item has three and its actions."""
    turn = ["a" * size] * actions
    if resume:
        item = pb.ResetItem(request_id=b"1", resume=pb.Resume(turns=[pb.Actions(actions=turn)]))
        return pb.ResetRequest(items=[item] * items).SerializeToString()
    item = pb.StepItem(session_id="s", step_index=1, actions=turn)
    return pb.StepRequest(items=[item] * items).SerializeToString()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (pb.StepRequest, counted(1, wire.MAX_FIELDS - 2)),
        (pb.ResetRequest, counted(100, 1_000, resume=True)),
        (pb.StepRequest, b"\x0a\x00" * (wire.MAX_FIELDS + 1)),
        (pb.CloseRequest, b"\x0a\x00" * (wire.MAX_FIELDS + 1)),
        (pb.GetServerRequest, b"\x0b" * (wire.MAX_FIELDS // 2) + b"\x0c" * (wire.MAX_FIELDS // 2 + 1)),
        (pb.StepRequest, b"\xa0\x06\x07" * (wire.MAX_FIELDS + 1)),
        (pb.StepRequest, b"\x0a\x01\xff" + b"\xad\x06abcd" * wire.MAX_FIELDS),
    ],
)
def test_too_many_fields(kind, data):
    with pytest.raises(DecodeError, match="more than 100000 fields"):
        wire.check_fields(kind, data)


def test_no_more_fields_are_taken_apart_than_may_be():
    with pytest.raises(DecodeError, match="more than 100000 fields"):
        wire.take_apart(pb.StepRequest, b"\xa0\x06\x07" * (wire.MAX_FIELDS + 1))


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (pb.StepRequest, counted(1, wire.MAX_FIELDS - 3)),
        (pb.StepRequest, counted(1_000, 97)),
        (pb.StepRequest, counted(3, 100, size=100_000)),
        (pb.ResetRequest, counted(99, 1_000, resume=True)),
        # What the parser refuses is the parser's to refuse, also where its length is more than there is.
        (pb.StepRequest, b"\x0a\xff" + b"\xff" * 100_000),
        (pb.StepRequest, b"\x0f" * 100_000),
        (pb.StepRequest, counted(3, 100, size=1_000) + b"\x0a"),
        (pb.StepRequest, counted(3, 100, size=1_000) + b"\x80"),
    ],
)
def test_as_many_fields_as_may_be(kind, data):
    wire.check_fields(kind, data)
