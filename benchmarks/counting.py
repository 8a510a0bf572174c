"""What counting for /metrics adds to a step: server's CPU time in process, without gRPC, counted and not.

The same calls are answered in turns by the service as it is and with its counting taken out. What is left out here, the
network above all, costs several times as much, so the share of a real server's time is smaller.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import grpc
import measure
import sleeper  # noqa: F401  # Registers the environment.

from turngym.v1 import environment_pb2 as pb
from turngym_server.config import ServerConfig
from turngym_server.environment import REGISTRY
from turngym_server.host import EnvironmentHost
from turngym_server.listening import SERVICE
from turngym_server.rpc.call import Call
from turngym_server.rpc.service import EnvironmentService
from turngym_server.sessions.session import Session
from turngym_server.splits import Split
from turngym_server.watching.counts import Histogram

CALLS = {1: 2_000, 64: 100}
"""Calls of each measurement, by the number of their items."""
REPEATS = 40


class NoContext:
    """What the service asks of a call's context where nothing fails."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


def nothing(*_: object) -> None:
    """In place of what counts."""


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Takes out what is done for each item and for each call."""
    with (
        mock.patch.object(Session, "_count_turn", nothing),
        mock.patch.object(Histogram, "add", nothing),
        mock.patch.object(Call, "about", nothing),
    ):
        yield


class Player:
    """Plays the next turn of all its sessions in one call, again and again."""

    def __init__(self, service: EnvironmentService) -> None:
        self._service = service
        self._sessions: list[str] = []
        self._turns = 0

    async def start(self, items: int) -> None:
        resets = [
            pb.ResetItem(
                request_id=bytes([items]) + n.to_bytes(15, "big"), environment_id="sleeper", split=pb.SPLIT_ALL
            )
            for n in range(items)
        ]
        reply = await self._method("Reset")(pb.ResetRequest(items=resets).SerializeToString(), NoContext())
        self._sessions = [outcome.started.session_id for outcome in pb.ResetResponse.FromString(reply).outcomes]

    async def microseconds(self, calls: int) -> float:
        """CPU time of one call."""
        requests = [self._next() for _ in range(calls)]
        step = self._method("Step")
        began = time.process_time()
        for request in requests:
            await step(request, NoContext())
        return (time.process_time() - began) / calls * 1e6

    def _next(self) -> bytes:
        self._turns += 1
        items = [pb.StepItem(session_id=each, step_index=self._turns, actions=["a"]) for each in self._sessions]
        return pb.StepRequest(items=items).SerializeToString()

    def _method(self, name: str) -> Any:
        """The handler that gRPC would call."""
        details = mock.Mock(spec=grpc.HandlerCallDetails, method=f"/{SERVICE}/{name}")
        return self._service.handlers().service(details).unary_unary


async def run() -> dict[str, object]:
    config = ServerConfig(splits=frozenset(Split), max_sessions=10**6)
    spec = replace(REGISTRY["sleeper"], inline=True)  # No thread to wait for: what counting adds weighs most.
    service = EnvironmentService([EnvironmentHost(spec)], config)
    results: dict[str, object] = {"repeats": REPEATS}
    for items, calls in CALLS.items():
        player = Player(service)
        await player.start(items)
        await player.microseconds(calls)
        counted, plain, ratios = [], [], []
        for _ in range(REPEATS):
            counted.append(await player.microseconds(calls))
            with uncounted():
                plain.append(await player.microseconds(calls))
            ratios.append(counted[-1] / plain[-1])
        results[f"calls_of_{items}"] = {
            "counted_microseconds": measure.summary(counted),
            "uncounted_microseconds": measure.summary(plain),
            "ratio": measure.summary(ratios),
        }
        print(f"{items:3} items: {results[f'calls_of_{items}']}")
    return results


def main() -> None:
    measure.write("counting", asyncio.run(run()))


if __name__ == "__main__":
    main()
