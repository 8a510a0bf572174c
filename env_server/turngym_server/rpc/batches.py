"""A batch's items in, its outcomes out: decoding, waiting, encoding.

Knows nothing of what the items ask for.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_server.errors import ItemError, Reason
from turngym_server.rpc import messages, wire
from turngym_server.rpc.wire import Undecodable

MAX_BATCH_ITEMS: Final = 1_024
MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
"""Outcomes beyond this are pending; a single one is always sent."""
STREAMED_STEP_FIELD: Final = pb.StepStreamRequest.STEP_FIELD_NUMBER
STRAGGLER_SECONDS: Final = 0.005
"""How long a reply waits for the others once one item is done: a slow neighbour harms nobody."""

ItemT = TypeVar("ItemT", bound=Message)
RequestT = TypeVar("RequestT", bound=Message)
KeyT = TypeVar("KeyT")


def decode(kind: type[RequestT], item_kind: type[ItemT], data: bytes) -> tuple[RequestT, Sequence[ItemT | Undecodable]]:
    """A batched request and its items, those that cannot be parsed apart.

    Raises:
        ItemError: INVALID_ITEM, where the batch is empty or too large.
        DecodeError: the bytes are no protobuf message, or hold too many fields.
    """
    items: Sequence[ItemT | Undecodable]
    wire.check_fields(kind, data)
    try:
        request = kind.FromString(data)
        items = getattr(request, "items")  # noqa: B009  # Every batched request but those of session ids has them.
    except DecodeError:
        batch = wire.take_apart(kind, data)
        request, items = batch.request, [_parse(item_kind, item) for item in batch.items]
    _check_size(len(items))
    return request, items


def unframe(data: bytes) -> tuple[int, pb.StepRequest | bytes]:
    """The id of a StepStreamRequest, as far as it can be read, and what it asks for; undecodable: all its bytes."""
    try:
        wire.check_fields(pb.StepStreamRequest, data)
        framed = pb.StepStreamRequest.FromString(data)
    except DecodeError:
        return wire.integer_field(data, 1) & 0xFFFFFFFFFFFFFFFF, data
    return framed.id, framed.step


def decode_streamed(request: pb.StepRequest | bytes) -> tuple[pb.StepRequest, Sequence[pb.StepItem | Undecodable]]:
    """What `unframe` gave as `decode` gives it. Raises what that does."""
    if isinstance(request, bytes):
        # A message field that comes in pieces is their concatenation.
        pieces = wire.take_apart(pb.StepStreamRequest, request, STREAMED_STEP_FIELD).items
        return decode(pb.StepRequest, pb.StepItem, b"".join(pieces))
    _check_size(len(request.items))
    return request, request.items


def frame(request_id: int, field: int, outcome: bytes) -> bytes:
    """A serialised StepStreamResponse."""
    return wire.varint_field(1, request_id) + wire.bytes_field(field, outcome)


def decode_ids(kind: type[RequestT], data: bytes) -> tuple[RequestT, Sequence[str]]:
    """A request about session ids; an undecodable id is what can be read of it, which is no session's."""
    ids: Sequence[str]
    wire.check_fields(kind, data)
    try:
        request = kind.FromString(data)
        ids = getattr(request, "session_ids")  # noqa: B009
    except DecodeError:
        batch = wire.take_apart(kind, data)
        request, ids = batch.request, [item.decode("utf-8", "replace") for item in batch.items]
    _check_size(len(ids))
    return request, ids


def _check_size(items: int) -> None:
    if not 1 <= items <= MAX_BATCH_ITEMS:
        raise ItemError(Reason.INVALID_ITEM, f"a call of {items} items; expected 1 to {MAX_BATCH_ITEMS}")


def _parse(kind: type[ItemT], data: bytes) -> ItemT | Undecodable:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        return Undecodable(data, str(error))


def decoded(item: ItemT | Undecodable) -> ItemT:
    """The item, or INVALID_ITEM where it could not be parsed."""
    if isinstance(item, Undecodable):
        raise ItemError(
            Reason.INVALID_ITEM, f"the item cannot be decoded: {item.error}; texts must be UTF-8 without surrogates"
        )
    return item


def request_id_of(item: Any) -> bytes:
    return wire.raw_field(item.data, 1) if isinstance(item, Undecodable) else item.request_id


def session_id_of(item: Any) -> str:
    return wire.text_field(item.data, 1) if isinstance(item, Undecodable) else item.session_id


def step_index_of(item: pb.StepItem | Undecodable) -> int:
    return wire.integer_field(item.data, 2) & 0xFFFFFFFF if isinstance(item, Undecodable) else item.step_index


def reset_error(request_id: bytes, status: status_pb2.Status) -> bytes:
    return pb.ResetOutcome(request_id=request_id, error=status).SerializeToString()


def step_error(item: pb.StepItem | Undecodable, status: status_pb2.Status) -> bytes:
    return messages.step_outcome(
        messages.session_id_field(session_id_of(item)), step_index_of(item), messages.error_field(status)
    )


def step_pending(item: pb.StepItem | Undecodable) -> pb.StepOutcome:
    return pb.StepOutcome(session_id=session_id_of(item), step_index=step_index_of(item), pending=pb.Pending())


async def first_then_stragglers(tasks: Iterable["asyncio.Task[Any]"], one_is_done: bool, seconds: float) -> None:
    """Waits until all are done, or 5 ms after the first was, or `seconds`. Cancels nothing."""
    pending = set(tasks)
    if not pending:
        return
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    if not one_is_done:
        done, pending = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done or not pending:
            return
    await asyncio.wait(pending, timeout=max(min(STRAGGLER_SECONDS, end - loop.time()), 0.0))


def reply(outcomes: Sequence[bytes | None], pending: Callable[[int], Message]) -> bytes:
    """A serialised reply: outcomes in order; those that are not there, or no longer fit, are pending."""
    fields: list[bytes] = []
    size = 0
    for position, outcome in enumerate(outcomes):
        if outcome is None or (size + len(outcome) > MAX_REPLY_BYTES and fields):
            outcome = pending(position).SerializeToString()
        field = wire.bytes_field(wire.ITEMS_FIELD, outcome)
        size += len(field)
        fields.append(field)
    return b"".join(fields)


def once(key: KeyT, seen: set[KeyT], name: str) -> None:
    """Refuses what comes twice in a call (INVALID_ITEM)."""
    if key in seen:
        raise ItemError(Reason.INVALID_ITEM, f"{name} {key!r} comes twice in this call")
    seen.add(key)
