"""A server that does nothing: every step is answered with one and the same transition, over streams too.

What is left of a request's cost then is gRPC, protobuf and the client, which the real server is compared with.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc


class Echo(pb_grpc.EnvironmentServiceServicer):
    def __init__(self, started: pb.Started) -> None:
        self._started = started

    async def GetServer(self, request: pb.GetServerRequest, context: object) -> pb.GetServerResponse:
        return pb.GetServerResponse(max_batch_items=1024)

    async def Reset(self, request: pb.ResetRequest, context: object) -> pb.ResetResponse:
        response = pb.ResetResponse()
        for item in request.items:
            outcome = response.outcomes.add(request_id=item.request_id, started=self._started)
            outcome.started.session_id = f"{secrets.token_hex(4)}.{secrets.token_urlsafe(16)}"
        return response

    async def Step(self, request: pb.StepRequest, context: object) -> pb.StepResponse:
        state = self._started.state
        return pb.StepResponse(
            outcomes=[
                pb.StepOutcome(session_id=item.session_id, step_index=item.step_index, transition=state)
                for item in request.items
            ]
        )

    async def StepStream(
        self, requests: AsyncIterator[pb.StepStreamRequest], context: object
    ) -> AsyncIterator[pb.StepStreamResponse]:
        async for request in requests:
            yield pb.StepStreamResponse(id=request.id, step=await self.Step(request.step, context))

    async def Close(self, request: pb.CloseRequest, context: object) -> pb.CloseResponse:
        return pb.CloseResponse(
            outcomes=[pb.CloseOutcome(session_id=session_id, closed=True) for session_id in request.session_ids]
        )


async def main(started: pb.Started) -> None:
    server = grpc.aio.server()
    pb_grpc.add_EnvironmentServiceServicer_to_server(Echo(started), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"echo listening on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(pb.Started.FromString(Path(sys.argv[1]).read_bytes())))
