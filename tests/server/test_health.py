"""gRPC's health service, for those who ask and those who watch."""

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import RawConnection, message
from sample_environments import DICE, GATE, PLAYED, THREADED_DICE
from serving import serving, start, step

from turngym_server.listening import SERVICE
from turngym_server.rpc.health import MAX_READING, MAX_WATCHERS

STATES = health_pb2.HealthCheckResponse


def request(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def watched(calls: Sequence["grpc.aio.UnaryStreamCall"]) -> list[int]:
    return [(await call.read()).status for call in calls]


async def test_watchers_are_told_of_a_drain_whatever_others_take():
    async with serving(THREADED_DICE, grace_seconds=600) as (stub, server):
        session = (await start(stub, environment_id="threaded_dice")).session_id
        async with grpc.aio.insecure_channel(server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            with RawConnection(server.address, window=0) as deaf:
                for _ in range(3):
                    deaf.call("/grpc.health.v1.Health/Watch", message(b""), ends=True)
                calls = [health.Watch(request(service)) for service in ("", SERVICE, "another")]
                assert await watched(calls) == [STATES.SERVING, STATES.SERVING, STATES.SERVICE_UNKNOWN]
                assert (await health.Check(request(SERVICE))).status == STATES.SERVING
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await health.Check(request("another"))
                assert error.value.code() is grpc.StatusCode.NOT_FOUND
                GATE.clear()
                PLAYED.clear()
                turn = asyncio.ensure_future(step(stub, session, 1, "slow", max_wait_seconds=60))
                while not PLAYED:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                draining = asyncio.ensure_future(server.drain())
                async with asyncio.timeout(30):
                    assert await watched(calls[:2]) == [STATES.NOT_SERVING] * 2
                    assert (await health.Check(request(""))).status == STATES.NOT_SERVING
                    GATE.set()
                    assert (await turn).HasField("transition")
                    await draining


async def test_watchers_are_bounded():
    async with serving(DICE) as (_, server), grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        calls = [health.Watch(request("")) for _ in range(MAX_WATCHERS)]
        assert await watched(calls) == [STATES.SERVING] * MAX_WATCHERS
        one_more = health.Watch(request(""))
        assert await one_more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await health.Check(request(""))).status == STATES.SERVING
        calls[0].cancel()
        while await (again := health.Watch(request(""))).read() is grpc.aio.EOF:
            pass
        again.cancel()


async def test_a_request_that_does_not_come_is_not_waited_for():
    async with serving(DICE) as (_, server), grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with RawConnection(server.address) as connection:
            for _ in range(4 * MAX_READING):
                connection.call("/grpc.health.v1.Health/Check", message(b"half", length=10_000_000))
            open_ended = channel.stream_stream("/grpc.health.v1.Health/Check")(timeout=30)
            assert STATES.FromString(await open_ended.read()).status == STATES.SERVING
            assert (await health.Check(request(""))).status == STATES.SERVING
            watching = channel.stream_stream("/grpc.health.v1.Health/Watch")(timeout=30)
            assert await watching.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
