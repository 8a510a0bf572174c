"""`board` served by OpenEnv, whose virtual environment runs this. Its argument is the kind of step: sync or async."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from board import Board
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 128


class BoardAction(Action):
    action: str


class BoardObservation(Observation):
    text: str


class SyncBoard(Environment[BoardAction, BoardObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._board = Board()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> BoardObservation:
        self._state = State()
        return BoardObservation(text=self._board.reset(), done=False, reward=0.0)

    def step(self, action: BoardAction, timeout_s: float | None = None, **more: Any) -> BoardObservation:
        text, reward = self._board.step(action.action)
        self._state.step_count += 1
        return BoardObservation(text=text, done=False, reward=reward)

    @property
    def state(self) -> State:
        return self._state


class AsyncBoard(SyncBoard):
    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **more: Any
    ) -> BoardObservation:
        return self.reset(seed, episode_id)

    async def step_async(self, action: BoardAction, timeout_s: float | None = None, **more: Any) -> BoardObservation:
        return self.step(action)


async def main(kind: str) -> None:
    app = create_app(
        {"sync": SyncBoard, "async": AsyncBoard}[kind], BoardAction, BoardObservation, max_concurrent_envs=SESSIONS
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"OpenEnv listening on 127.0.0.1:{listening.getsockname()[1]}", flush=True)
        await uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).serve(sockets=[listening])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
