"""Threads that may hang."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from turngym_server.sessions.threads import Abandoned, Overrun, Threads


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # What threads count sets no event.
            await asyncio.sleep(0.005)


async def test_results_and_errors():
    threads = Threads(2)
    assert await threads.run(lambda: 1 + 1) == 2

    def stop():
        raise StopIteration("neither end nor error of a generator")

    def leave():
        raise SystemExit(4)

    with pytest.raises(TimeoutError, match="its own"):
        await threads.run(lambda: (_ for _ in ()).throw(TimeoutError("its own")), 10)
    with pytest.raises(SystemExit):
        await threads.run(leave)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(stop)
    threads.close()


async def test_no_more_at_once_than_allowed():
    threads = Threads(3)
    lock, now, most = threading.Lock(), 0, 0
    gate = threading.Event()

    def work():
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        gate.wait(10)
        with lock:
            now -= 1

    tasks = [asyncio.ensure_future(threads.run(work)) for _ in range(10)]
    await until(lambda: now == 3)
    gate.set()
    await asyncio.gather(*tasks)
    assert most == 3
    threads.close()


async def test_a_hung_thread_is_replaced_and_comes_back():
    threads = Threads(1)
    gate = threading.Event()
    late = asyncio.Event()
    with pytest.raises(Overrun, match=r"0\.05 s"):
        await threads.run(lambda: gate.wait(10), 0.05, late=late.set)
    assert await threads.run(threading.get_ident, 10)
    assert not late.is_set()
    gate.set()
    await asyncio.wait_for(late.wait(), 10)
    assert await threads.run(lambda: "still", 10) == "still"
    threads.close()


async def test_work_that_nobody_waits_for_any_more():
    """Who was cancelled learns whether the work goes on; then, and only then, `late` is called, once."""
    threads = Threads(1)
    gate = threading.Event()
    late: list[str] = []
    ended = asyncio.Event()

    def told(name: str) -> Callable[[], None]:
        return lambda: (late.append(name), ended.set())[0]

    running = asyncio.ensure_future(threads.run(lambda: gate.wait(10), late=told("running")))
    queued = asyncio.ensure_future(threads.run(lambda: gate.wait(10), late=told("queued")))
    await asyncio.sleep(0)
    running.cancel()
    queued.cancel()
    with pytest.raises(Abandoned):
        await running
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await queued
    assert not isinstance(cancelled.value, Abandoned)
    assert late == []
    gate.set()
    await asyncio.wait_for(ended.wait(), 10)
    assert await threads.run(lambda: "still", 10) == "still"
    assert late == ["running"]
    threads.close()


async def test_work_done_in_the_moment_of_its_deadline():
    """What a turn came to is not lost, nor its lock kept, because the event loop learns of both at once."""
    threads = Threads(1)
    late: list[str] = []
    deadline = asyncio.ensure_future(threads.run(lambda: "done", 0.02, late=lambda: late.append("deadline")))
    cancelled = Threads(1)
    waiting = asyncio.ensure_future(cancelled.run(lambda: "done", late=lambda: late.append("cancelled")))
    await asyncio.sleep(0)
    time.sleep(0.05)  # noqa: ASYNC251  # The loop is held until the work is done and the deadline has passed.
    asyncio.get_running_loop().call_soon(waiting.cancel)
    with pytest.raises(Abandoned):
        await waiting
    assert await deadline == "done"
    assert late == ["cancelled"]
    threads.close()
    cancelled.close()


async def test_accounts_are_served_in_turn():
    """One account's thousand pieces of work, queued first, hold up another's single one by one piece."""
    threads = Threads(1)
    gate = threading.Event()
    order: list[str] = []
    first = asyncio.ensure_future(threads.run(lambda: gate.wait(10), account="greedy"))
    await asyncio.sleep(0)

    def queue(account: str, count: int):
        return [
            asyncio.ensure_future(threads.run(lambda: order.append(account), account=account)) for _ in range(count)
        ]

    tasks = queue("greedy", 1_000)
    await asyncio.sleep(0)
    tasks += queue("modest", 1) + queue("third", 2)
    await asyncio.sleep(0)
    for task in tasks[500:502]:
        task.cancel()
    gate.set()
    await asyncio.gather(first, *tasks, return_exceptions=True)
    assert order[:6] == ["greedy", "modest", "third", "greedy", "third", "greedy"]
    assert len(order) == 1_001  # Two were cancelled.
    assert await threads.run(lambda: "free again") == "free again"
    threads.close()


async def test_one_account_leaves_places_to_others():
    threads = Threads(4, share=3)
    gate = threading.Event()
    lock, now, most = threading.Lock(), 0, 0

    def hang():
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        gate.wait(10)
        with lock:
            now -= 1

    hung = [asyncio.ensure_future(threads.run(hang, account="greedy")) for _ in range(8)]
    await until(lambda: now == 3)
    assert await asyncio.wait_for(threads.run(lambda: "other", account="modest"), 10) == "other"
    gate.set()
    await asyncio.gather(*hung)
    assert most == 3
    threads.close()


async def test_what_no_longer_waits_is_passed_over():
    threads = Threads(1)
    gate = threading.Event()
    first = asyncio.ensure_future(threads.run(lambda: gate.wait(10)))
    await asyncio.sleep(0)
    given_up = [asyncio.ensure_future(threads.run(lambda: "given up")) for _ in range(3)]
    last = asyncio.ensure_future(threads.run(lambda: "last"))
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    gate.set()
    assert await asyncio.wait_for(last, 10) == "last"
    assert await first
    assert await asyncio.wait_for(threads.run(lambda: "next"), 10) == "next"
    threads.close()
