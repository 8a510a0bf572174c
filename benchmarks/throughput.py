"""Steps a second of Sokoban at 1, 16 and 64 concurrent episodes, beside a bare echo of the same messages.

Both servers are processes of their own, met through the same coalescing client. Measured in turns, real, echo, and
again; the ratio is taken within each turn. Episodes walk about and are reset outside the measured time.
Goal at 64: at least 0.5 of the echo.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from pathlib import Path

import grpc
import measure

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc
from turngym_client import AsyncClient, EpisodeRequest, Limits, aconnect

CONCURRENT = (1, 16, 64)
SECONDS = 1.0
REPEATS = 7
# The caps of the environment bound an episode to 1,000 turns: at these sizes more than `SECONDS` can play.
WALK = ("Up", "Down", "Left", "Right")
LIMITS = Limits(max_turns=1_000, max_actions=1_000, max_actions_per_turn=1)


def real_messages(address: str) -> bytes:
    """The bytes of a started Sokoban episode, for the echo to repeat."""
    with grpc.insecure_channel(address) as channel:
        item = pb.ResetItem(request_id=secrets.token_bytes(16), environment_id="sokoban", level_seed=1)
        response = pb_grpc.EnvironmentServiceStub(channel).Reset(pb.ResetRequest(items=[item]), timeout=30)
        return response.outcomes[0].started.SerializeToString()


async def speed(client: AsyncClient, count: int) -> float:
    episodes = await client.reset_many(
        [EpisodeRequest(environment_id="sokoban", level_seed=seed, limits=LIMITS) for seed in range(count)]
    )
    try:
        return await measure.steps_per_second(episodes, WALK, SECONDS)
    finally:
        await client.close_many(episodes)


async def run(real_address: str, echo_address: str) -> dict[str, object]:
    results: dict[str, object] = {"repeats": REPEATS}
    async with aconnect(real_address) as real, aconnect(echo_address) as echo:
        for count in CONCURRENT:
            await speed(real, count)
            await speed(echo, count)
            served, echoed = [], []
            for _ in range(REPEATS):
                served.append(await speed(real, count))
                echoed.append(await speed(echo, count))
            ratio = measure.summary([one / other for one, other in zip(served, echoed, strict=True)])
            results[f"at_{count}"] = {
                "real_steps_per_second": measure.summary(served),
                "echo_steps_per_second": measure.summary(echoed),
                "ratio": ratio,
            }
            print(f"{count:3} episodes: {measure.summary(served)['median']:8.0f} steps/s, of the echo {ratio}")
    return results


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        measure.process("-m", "turngym_server.cli", "--env", "sokoban", "--port", "0") as real,
    ):
        messages = Path(folder) / "started.bin"
        messages.write_bytes(real_messages(real))
        with measure.process(str(measure.HERE / "echo_server.py"), str(messages)) as echo:
            results = asyncio.run(run(real, echo))
    measure.write("throughput", results)


if __name__ == "__main__":
    main()
