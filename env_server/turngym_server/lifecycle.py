"""Runs a server until the process is told to end."""

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Protocol


class Running(Protocol):
    """What can be started, drained, and stopped at once."""

    async def start(self) -> None: ...
    async def drain(self) -> None: ...
    async def stop(self) -> None: ...


async def run(
    server: Running, announce: Callable[[], None], broken: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal stops at once.

    Args:
        announce: called once it serves; what it raises is raised once the server has stopped.
        broken: raises what makes it senseless to go on, should that happen.
    """
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    ends: set[asyncio.Task[Any]] = {loop.create_task(told.wait())}
    starting = loop.create_task(server.start())
    await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return
    starting.result()
    gc.freeze()  # What is imported and made by now stays, and need not be looked through again and again.
    try:
        announce()
    except BaseException:
        await server.stop()
        raise
    if broken is not None:
        ends.add(loop.create_task(broken()))
    done, waiting = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    told.clear()
    draining = loop.create_task(server.drain())
    hurried = loop.create_task(told.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await server.stop()
    hurried.cancel()
    for task in done:
        task.result()
