"""A server that breaks the contract in one way: a gRPC proxy in front of a real one, which alters what passes.

Bytes are passed on as they are wherever a defect does not look at them.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import CHANNEL_OPTIONS

from turngym.v1 import environment_pb2 as pb

SERVICE = "turngym.v1.EnvironmentService"
RPCS = ("GetServer", "ListEnvironments", "GetEnvironment", "Reset", "Step", "Fork", "Advise", "KeepAlive", "Close")
REQUESTS: dict[str, Any] = {"Reset": pb.ResetRequest, "Step": pb.StepRequest, "Fork": pb.ForkRequest}
REPLIES: dict[str, Any] = {"Reset": pb.ResetResponse, "Step": pb.StepResponse, "Fork": pb.ForkResponse}


class Passthrough:
    """Breaks nothing. A defect overrides the RPCs that it alters; `backend` asks the real server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def ask(self, rpc: str, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """The real server's answer, or its refusal."""
        method = self._channel.unary_unary(f"/{SERVICE}/{rpc}", request_serializer=bytes, response_deserializer=bytes)
        try:
            return await method(data, metadata=[each for each in context.invocation_metadata() if "client" in each[0]])
        except grpc.aio.AioRpcError as error:
            return await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))

    async def answer(self, rpc: str, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """What the broken server answers."""
        return await self.ask(rpc, data, context)

    async def stream(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """What the broken server answers on a stream."""
        method = self._channel.stream_stream(
            f"/{SERVICE}/StepStream", request_serializer=bytes, response_deserializer=bytes
        )
        async for answer in method(requests):
            yield answer

    async def ask_parsed(self, rpc: str, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """The real server's answer to a message, as a message."""
        return REPLIES[rpc].FromString(await self.ask(rpc, request.SerializeToString(), context))


class Altered(Passthrough):
    """Lets a defect look at each reply of Step."""

    async def answer(self, rpc, data, context):
        answer = await self.ask(rpc, data, context)
        if rpc != "Step":
            return answer
        reply = pb.StepResponse.FromString(answer)
        self.alter(reply)
        return reply.SerializeToString()

    def alter(self, reply: Any) -> None:
        raise NotImplementedError


class AlteredTransitions(Altered):
    """Lets a defect look at each transition of a Step."""

    def alter(self, reply):
        for outcome in reply.outcomes:
            if outcome.HasField("transition"):
                self.alter_transition(outcome.transition)

    def alter_transition(self, transition: pb.Transition) -> None:
        raise NotImplementedError


class Rewriting(Passthrough):
    """Lets a defect look at each request of one RPC that can be parsed."""

    rpc = "Reset"

    async def answer(self, rpc, data, context):
        if rpc != self.rpc:
            return await self.ask(rpc, data, context)
        try:
            request = REQUESTS[rpc].FromString(data)
        except DecodeError:
            return await self.ask(rpc, data, context)
        reply = await self.rewrite(request, context)
        return reply.SerializeToString()

    async def rewrite(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise NotImplementedError


class StandsIn(Rewriting):
    """Plays the steps of some sessions in others."""

    rpc = "Step"

    def __init__(self, channel):
        super().__init__(channel)
        self.stands_for: dict[str, str] = {}

    async def rewrite(self, request, context):
        names = [item.session_id for item in request.items]
        for item in request.items:
            item.session_id = self.stands_for.get(item.session_id, item.session_id)
        reply = await self.ask_parsed("Step", request, context)
        for name, outcome in zip(names, reply.outcomes, strict=True):
            outcome.session_id = name
        return reply


class PlaysDuplicates(Rewriting):
    """Plays a step again when it is sent again."""

    rpc = "Step"

    def __init__(self, channel):
        super().__init__(channel)
        self.last: dict[str, bytes] = {}
        self.more: Counter[str] = Counter()

    async def rewrite(self, request, context):
        indices = [item.step_index for item in request.items]
        for item in request.items:
            sent = item.SerializeToString()
            self.more[item.session_id] += self.last.get(item.session_id) == sent
            self.last[item.session_id] = sent
            item.step_index += self.more[item.session_id]
        reply = await self.ask_parsed("Step", request, context)
        for index, outcome in zip(indices, reply.outcomes, strict=True):
            outcome.step_index = index
        return reply


class ForgetsRequestIds(Rewriting):
    """Starts a session whenever it is asked to."""

    async def rewrite(self, request, context):
        ids = [item.request_id for item in request.items]
        for item in request.items:
            if len(item.request_id) == 16 and ids.count(item.request_id) == 1:
                item.request_id = secrets.token_bytes(16)
        reply = await self.ask_parsed("Reset", request, context)
        for request_id, outcome in zip(ids, reply.outcomes, strict=True):
            outcome.request_id = request_id
        return reply


class AnswersAsTheyCome(Altered):
    """Gives outcomes in another order than the items'."""

    def alter(self, reply):
        outcomes = list(reply.outcomes)
        del reply.outcomes[:]
        reply.outcomes.extend(reversed(outcomes))


class RewardsNaN(AlteredTransitions):
    """Rewards an invalid action with NaN."""

    def alter_transition(self, transition):
        if not transition.action_valid:
            transition.reward = float("nan")


class DigestsSomethingElse(AlteredTransitions):
    """Chains digests in another way."""

    def alter_transition(self, transition):
        transition.digest = hashlib.sha256(transition.digest).digest()


class SucceedsEarly(AlteredTransitions):
    """Says before the end that there is no success yet."""

    def alter_transition(self, transition):
        if not transition.truncated and not transition.terminated:
            transition.success = False


class DrawsItsOwnSeeds(Rewriting):
    """Draws the noise of each session, and says it was the one asked for."""

    async def rewrite(self, request, context):
        asked = [item.noise_seed if item.HasField("noise_seed") else None for item in request.items]
        for item in request.items:
            if item.HasField("noise_seed"):
                item.noise_seed = int.from_bytes(item.request_id[:8], "big")
        reply = await self.ask_parsed("Reset", request, context)
        for seed, outcome in zip(asked, reply.outcomes, strict=True):
            if seed is not None and outcome.HasField("started"):
                outcome.started.noise[0].noise_seed = seed
        return reply


class FailsAsAWhole(Passthrough):
    """Fails a whole call for one bad item."""

    async def answer(self, rpc, data, context):
        answer = await self.ask(rpc, data, context)
        if rpc == "Step":
            for outcome in pb.StepResponse.FromString(answer).outcomes:
                if outcome.HasField("error"):
                    details = (("grpc-status-details-bin", outcome.error.SerializeToString()),)
                    code = next(code for code in grpc.StatusCode if code.value[0] == outcome.error.code)
                    await context.abort(code, outcome.error.message, details)
        return answer


class ParsesAsAWhole(Passthrough):
    """Fails a whole call for one undecodable item."""

    async def answer(self, rpc, data, context):
        if rpc == "Step":
            try:
                pb.StepRequest.FromString(data)
            except DecodeError as error:
                await context.abort(grpc.StatusCode.INTERNAL, str(error))
        return await self.ask(rpc, data, context)


class ForksShareState(StandsIn):
    """A fork is another name of its original."""

    async def answer(self, rpc, data, context):
        answer = await super().answer(rpc, data, context)
        if rpc == "Fork":
            items = pb.ForkRequest.FromString(data).items
            for item, outcome in zip(items, pb.ForkResponse.FromString(answer).outcomes, strict=True):
                if outcome.HasField("started"):
                    self.stands_for[outcome.started.session_id] = item.session_id
        return answer


class AdviceDisturbs(StandsIn):
    """Asking the oracle draws noise: the episode goes on as a copy with other noise."""

    async def answer(self, rpc, data, context):
        answer = await super().answer(rpc, data, context)
        if rpc == "Advise":
            for outcome in pb.AdviseResponse.FromString(answer).outcomes:
                if outcome.HasField("advice"):
                    await self.disturb(outcome.session_id, outcome.advice.step_index, context)
        return answer

    async def disturb(self, session_id: str, step_index: int, context: grpc.aio.ServicerContext) -> None:
        item = pb.ForkItem(request_id=secrets.token_bytes(16), session_id=session_id, step_index=step_index)
        (outcome,) = (await self.ask_parsed("Fork", pb.ForkRequest(items=[item]), context)).outcomes
        if outcome.HasField("started"):
            self.stands_for[session_id] = outcome.started.session_id


class MixesUpRequests(Passthrough):
    """Answers the requests of a stream under each other's ids."""

    async def stream(self, requests, context):
        async for answer in super().stream(requests, context):
            response = pb.StepStreamResponse.FromString(answer)
            response.id ^= 1
            yield response.SerializeToString()


class EndsStreamsAtErrors(Passthrough):
    """Takes a refused request for the end of its stream."""

    async def stream(self, requests, context):
        async for answer in super().stream(requests, context):
            if pb.StepStreamResponse.FromString(answer).HasField("error"):
                return
            yield answer


class EndsTwice(AlteredTransitions):
    """Calls an end of the environment's own a truncation too."""

    def alter_transition(self, transition):
        transition.truncated |= transition.terminated


class SaysNotWhy(Altered):
    """Leaves the details out of item errors."""

    def alter(self, reply):
        for outcome in reply.outcomes:
            if outcome.HasField("error"):
                del outcome.error.details[:]


class MixesSplits(Rewriting):
    """Takes instances for validation from all worlds."""

    async def rewrite(self, request, context):
        validation = [item.split == pb.SPLIT_VALIDATION for item in request.items]
        for item, chosen in zip(request.items, validation, strict=True):
            if chosen:
                item.split = pb.SPLIT_ALL
        reply = await self.ask_parsed("Reset", request, context)
        for outcome, chosen in zip(reply.outcomes, validation, strict=True):
            if chosen and outcome.HasField("started"):
                outcome.started.split = pb.SPLIT_VALIDATION
        return reply


@contextlib.asynccontextmanager
async def in_front_of(
    address: str, defect: type[Passthrough], credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    """Serves `defect` before the server at `address`, with `credentials` by TLS; gives its own address."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        broken = defect(channel)
        server = grpc.aio.server(options=CHANNEL_OPTIONS)

        def handler(rpc: str) -> grpc.RpcMethodHandler:
            async def call(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
                return await broken.answer(rpc, data, context)

            return grpc.unary_unary_rpc_method_handler(call)

        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE,
                    {rpc: handler(rpc) for rpc in RPCS}
                    | {"StepStream": grpc.stream_stream_rpc_method_handler(broken.stream)},
                ),
                _Health(channel),
            )
        )
        here = "127.0.0.1:0"
        port = server.add_secure_port(here, credentials) if credentials else server.add_insecure_port(here)
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)


class _Health(grpc.GenericRpcHandler):
    """Asks the real server for its health."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)

    def service(self, handler_call_details):
        if handler_call_details.method != "/grpc.health.v1.Health/Check":
            return None

        async def check(request: health_pb2.HealthCheckRequest, context) -> health_pb2.HealthCheckResponse:
            return await self._stub.Check(request)

        return grpc.unary_unary_rpc_method_handler(
            check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
