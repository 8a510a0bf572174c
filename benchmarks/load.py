"""The load that every stack is put under: concurrent episodes, each stepping as fast as its own steps come back.

Standard library only: it runs in each stack's own virtual environment.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from board import ACTIONS

EPISODE_STEPS = 10
EpisodeT = TypeVar("EpisodeT")


@dataclass(frozen=True)
class Stack(Generic[EpisodeT]):
    """How a stack is used.

    Attributes:
        begin: starts so many episodes, or starts those given anew.
        step: plays an action in one.
    """

    begin: Callable[[int, Sequence[EpisodeT]], Awaitable[Sequence[EpisodeT]]]
    step: Callable[[EpisodeT, str], Awaitable[object]]


@dataclass(frozen=True)
class Order:
    """What to measure: so many episodes at once for so long. `whole`: ten steps each, then anew, resets included."""

    episodes: int
    seconds: float
    whole: bool


@dataclass(frozen=True)
class Measured:
    """Steps, how many a second, the median latency of one, and this process's CPU time for each."""

    steps: int
    steps_per_second: float
    median_ms: float
    cpu_us: float


async def measure(stack: Stack[EpisodeT], order: Order) -> Measured:
    """Carries an order out."""
    episodes = await stack.begin(order.episodes, ())
    latencies: list[float] = []
    ends = 0.0

    async def play(episode: EpisodeT, first: int, most: int) -> None:
        now = time.perf_counter()
        for turn in range(first, first + most):
            began = now
            await stack.step(episode, action(turn))
            now = time.perf_counter()
            latencies.append(now - began)
            if now >= ends:
                return

    cpu = _cpu_seconds()
    began = time.perf_counter()
    ends = began + order.seconds
    most = EPISODE_STEPS if order.whole else 10**9
    wave = 0
    while True:
        await asyncio.gather(*(play(episode, 7 * place + wave, most) for place, episode in enumerate(episodes)))
        if time.perf_counter() >= ends:
            break
        episodes = await stack.begin(order.episodes, episodes)
        wave += 1
    seconds = time.perf_counter() - began
    steps = len(latencies)
    return Measured(steps, steps / seconds, statistics.median(latencies) * 1e3, (_cpu_seconds() - cpu) / steps * 1e6)


async def obey(stack: Stack[EpisodeT]) -> None:
    """Carries out orders that come as lines of JSON, and answers in the same way."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(asdict(await measure(stack, Order(**json.loads(line))))), flush=True)


def action(turn: int) -> str:
    """The action of a turn."""
    # Scrambled, the same in every stack: a multiplicative hash's upper bits.
    return ACTIONS[(turn * 2654435761 >> 16) % len(ACTIONS)]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
