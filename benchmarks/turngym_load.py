"""Puts a server of turngym's contract under load, by turngym's client; what is begun anew is closed meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from load import Stack, obey

from turngym_client import AsyncEpisode, EpisodeRequest, aconnect


async def main(address: str) -> None:
    async with aconnect(address) as client:

        async def begin(count: int, played: Sequence[AsyncEpisode]) -> Sequence[AsyncEpisode]:
            requests = [EpisodeRequest(environment_id="board", level_seed=seed) for seed in range(count)]
            _, episodes = await asyncio.gather(client.close_many(played), client.reset_many(requests))
            return episodes

        async def step(episode: AsyncEpisode, action: str) -> None:
            state = await episode.step(action)
            assert len(state.observation) == 200

        await obey(Stack(begin, step))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
