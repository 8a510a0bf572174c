"""gRPC's server reflection, for those whom it is for."""

from collections.abc import AsyncIterator, Callable
from typing import Any, Final, cast

import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from turngym_server.access.admission import Access, Visit
from turngym_server.errors import ItemError
from turngym_server.rpc.call import Context, abort, metadata_of

RPC: Final = "ServerReflectionInfo"


def serve_reflection(server: grpc.aio.Server, services: tuple[str, ...], access: Access) -> None:
    """Adds reflection of these services, and of itself, to a server."""
    servicer = _Reflection(ReflectionServicer((*services, reflection.SERVICE_NAME)), access)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(cast("Any", servicer), cast("Any", server))


class _Reflection:
    def __init__(self, servicer: ReflectionServicer, access: Access) -> None:
        # The stubs take it for a coroutine.
        self._answers = cast("Callable[[Any, Context], AsyncIterator[Any]]", servicer.ServerReflectionInfo)
        self._access = access

    async def ServerReflectionInfo(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        try:
            self._access.admit(Visit(RPC, metadata_of(context)), 0)
        except ItemError as error:
            await abort(context, error)
        async for answer in self._answers(requests, context):
            yield answer
