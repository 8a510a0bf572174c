"""Puts an OpenEnv server under load, by its own asynchronous client; OpenEnv's virtual environment runs this."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from load import Stack, obey
from openenv.core import GenericEnvClient


async def main(address: str) -> None:
    connected: list[Any] = []

    async def begin(count: int, _: Sequence[Any]) -> Sequence[Any]:
        while len(connected) < count:
            client = GenericEnvClient(base_url=f"http://{address}")
            await client.connect()
            connected.append(client)
        await asyncio.gather(*(client.reset() for client in connected[:count]))
        return connected[:count]

    async def step(client: Any, action: str) -> None:
        result = await client.step({"action": action})
        assert len(result.observation["text"]) == 200

    await obey(Stack(begin, step))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
