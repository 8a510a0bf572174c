"""Who may make a call is looked at before its request is received, so that nobody else's bytes are held.

Knows nothing of what is called.
"""

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, cast

import grpc

from turngym_server.access.admission import Access, Visit
from turngym_server.access.tokens import Token
from turngym_server.errors import ItemError
from turngym_server.rpc.call import Call, Context, abort
from turngym_server.watching.counts import Counts, RpcCounts
from turngym_server.watching.logs import Event

log: Final = logging.getLogger(__name__)

MAX_STREAMS_OF_TOKEN: Final = 64
"""Calls of StepStream that one token has open; more of its clients are to call Step."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
Stream = Callable[[object, Context], Awaitable[None]]


class Gate(grpc.GenericRpcHandler):
    """The handlers of a service, for those who may call them. With a token, its quotas are for the handlers to look at.

    Args:
        counts: of refused calls.
    """

    def __init__(self, handlers: grpc.GenericRpcHandler, access: Access, counts: Counts) -> None:
        self._handlers = handlers
        self._access = access
        self._counts = counts
        self._streams: Counter[str] = Counter()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        """What answers a call."""
        handler: Handler | None = self._handlers.service(handler_call_details)
        if handler is None or self._access.is_open:
            return handler
        began = time.perf_counter()
        rpc = handler_call_details.method.rpartition("/")[2]
        metadata = tuple(handler_call_details.invocation_metadata or ())
        try:
            token = self._access.check(rpc, metadata)
        except ItemError as refusal:
            counts = self._counts.rpc(rpc)
            counts.seconds.add(time.perf_counter() - began)
            count_refusal(Call(Visit(rpc, metadata)), counts, refusal)
            return _refusing(refusal)
        return self._bounded(handler, token) if handler.request_streaming else handler

    def _bounded(self, handler: "Handler", token: Token) -> "Handler":
        """The handler of a stream, as long as the token has not too many open."""
        answer = cast(Stream, handler.stream_stream)

        async def stream(requests: object, context: Context) -> None:
            if self._streams[token.owner] >= MAX_STREAMS_OF_TOKEN:
                await context.abort(
                    grpc.StatusCode.UNIMPLEMENTED,
                    f"token {token.name!r} has {MAX_STREAMS_OF_TOKEN} streams open here; call Step instead",
                )
            self._streams[token.owner] += 1
            try:
                await answer(requests, context)
            finally:
                self._streams[token.owner] -= 1
                if not self._streams[token.owner]:
                    del self._streams[token.owner]

        return grpc.stream_stream_rpc_method_handler(stream)


def count_refusal(call: Call, counts: RpcCounts, refusal: ItemError) -> None:
    """Counts and logs why a whole call is refused."""
    counts.refusals[refusal.reason] += 1
    log.info(
        "%s by %r refused: %s: %s",
        call.rpc,
        str(call.caller),
        refusal.reason.value,
        refusal.message,
        extra=Event(rpc=call.rpc, caller=str(call.caller), reason=refusal.reason.value),
    )


def _refusing(refusal: ItemError) -> "Handler":
    """Ends a call; as a stream, whose requests nobody reads."""

    async def refuse(_requests: object, context: Context) -> None:
        await abort(context, refusal)

    return grpc.stream_stream_rpc_method_handler(refuse)
