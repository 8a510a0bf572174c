"""A TCP proxy for the fault matrix: passes bytes on, and is told by lines on stdin to cut or to hold them.

    cut SECONDS    breaks every connection off, and accepts none for so long
    hold SECONDS   passes nothing on for so long, in neither direction; then everything, in order

Each command is answered by `ok` when its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Final

CHUNK: Final = 1 << 16


class Proxy:
    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, port: int = 0) -> int:
        """Accepts connections; returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self._port: int = self._server.sockets[0].getsockname()[1]
        return self._port

    async def cut(self, seconds: float) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(seconds)
        await self.listen(self._port)

    async def hold(self, seconds: float) -> None:
        self._open.clear()
        await asyncio.sleep(seconds)
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        writers = {writer, there_writer}
        self._writers |= writers
        await asyncio.gather(self._pass_on(reader, there_writer), self._pass_on(there_reader, writer))
        self._writers -= writers

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


async def run(target: str) -> None:
    host, _, port = target.rpartition(":")
    proxy = Proxy(host, int(port))
    print(f"fault_proxy listening on 127.0.0.1:{await proxy.listen()}", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, seconds = line.split()
        await {"cut": proxy.cut, "hold": proxy.hold}[command](float(seconds))
        print("ok", flush=True)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
