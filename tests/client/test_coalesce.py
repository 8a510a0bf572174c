"""The coalescer against a `send` that the test answers by hand."""

import asyncio

import pytest

from turngym_client.coalesce import FRESH_WAIT, MAX_FRESH, REPEATED_WAIT, SIDE_BY_SIDE, Coalescer


class Line:
    """Records every request and lets the test answer it."""

    def __init__(self):
        self.requests = []
        self.waits = []

    async def send(self, request):
        reply = asyncio.get_running_loop().create_future()
        self.requests.append((request.items, reply))
        self.waits.append(request.wait)
        request.answer(await reply)

    def sent(self):
        return [items for items, _ in self.requests]

    async def answer(self, number, *results):
        self.requests[number][1].set_result(results)
        await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def coalescer(line, max_items=64, max_size=1_000, size=len):
    return Coalescer(line.send, max_items=lambda: max_items, max_size=max_size, size=size)


async def test_what_is_submitted_together_leaves_together():
    line = Line()
    lane = coalescer(line)
    results = [lane.submit(item) for item in ("a", "b", "c")]
    await settle()
    assert line.sent() == [["a", "b", "c"]]
    await line.answer(0, 1, 2, 3)
    assert [result.result() for result in results] == [1, 2, 3]


async def test_what_comes_meanwhile_leaves_when_the_request_returns():
    line = Line()
    lane = coalescer(line)
    first = lane.submit("a")
    await settle()
    late = [lane.submit("b")]
    await settle()
    late.append(lane.submit("c"))
    await settle()
    assert line.sent() == [["a"]]
    await line.answer(0, 1)
    assert first.result() == 1
    assert line.sent() == [["a"], ["b", "c"]]
    await line.answer(1, 2, 3)
    assert [result.result() for result in late] == [2, 3]


async def test_an_unfinished_item_does_not_hold_up_fresh_ones():
    line = Line()
    lane = coalescer(line)
    slow, quick = lane.submit("slow"), lane.submit("quick")
    await settle()
    await line.answer(0, None, 1)
    assert quick.result() == 1
    assert not slow.done()
    again = lane.submit("again")
    await settle()
    assert line.sent() == [["slow", "quick"], ["slow"], ["again"]]
    assert line.waits == [FRESH_WAIT, REPEATED_WAIT, FRESH_WAIT]
    await line.answer(2, 2)
    assert again.result() == 2
    await line.answer(1, None)
    assert line.sent()[3:] == [["slow"]]
    await line.answer(3, 3)
    assert slow.result() == 3


async def test_a_request_is_bounded_in_items_and_more_go_at_once_only_when_full():
    line = Line()
    lane = coalescer(line, max_items=2)
    for item in "abcdefghijk":
        lane.submit(item)
    await settle()
    assert line.sent() == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    assert len(line.requests) == MAX_FRESH
    await line.answer(0, 1, 2)
    assert line.sent()[4:] == [["i", "j"]]
    await line.answer(1, 3, 4)
    assert len(line.requests) == 5
    for number in (2, 3, 4):
        await line.answer(number, 5, 6)
    assert line.sent()[5:] == [["k"]]
    await line.answer(5, 11)


async def test_many_are_two_requests_side_by_side():
    line = Line()
    lane = coalescer(line)
    results = [lane.submit(str(number)) for number in range(2 * SIDE_BY_SIDE + 1)]
    await settle()
    assert [len(items) for items in line.sent()] == [SIDE_BY_SIDE + 1, SIDE_BY_SIDE]
    assert line.sent()[0] + line.sent()[1] == [str(number) for number in range(2 * SIDE_BY_SIDE + 1)]
    # What the first brings back leaves beside the second, but only if it is enough.
    results += [lane.submit("late") for _ in range(SIDE_BY_SIDE - 1)]
    await line.answer(0, *range(SIDE_BY_SIDE + 1))
    assert len(line.requests) == 2
    results.append(lane.submit("last"))
    await settle()
    assert [len(items) for items in line.sent()[2:]] == [SIDE_BY_SIDE]
    # A third leaves only when full.
    results += [lane.submit("later") for _ in range(SIDE_BY_SIDE)]
    await settle()
    assert len(line.requests) == 3
    for number in (1, 2, 3):
        await line.answer(number, *range(SIDE_BY_SIDE))
    assert all(result.done() for result in results)


async def test_a_request_is_bounded_in_size_and_a_larger_item_travels_alone():
    line = Line()
    lane = coalescer(line, max_size=10)
    results = [lane.submit(item) for item in ("a" * 6, "b" * 4, "c" * 30, "d")]
    await settle()
    await line.answer(0, 1, 2)
    await line.answer(1, 3)
    await line.answer(2, 4)
    assert [[len(item) for item in items] for items in line.sent()] == [[6, 4], [30], [1]]
    assert [result.result() for result in results] == [1, 2, 3, 4]


async def test_a_failure_is_every_items_and_the_lane_goes_on():
    line = Line()
    lane = coalescer(line)
    results = [lane.submit("a"), lane.submit("b")]
    await settle()
    line.requests[0][1].set_exception(ConnectionError("gone"))
    for result in results:
        with pytest.raises(ConnectionError, match="gone"):
            await result
    after = lane.submit("c")
    await settle()
    await line.answer(1, 3)
    assert after.result() == 3


async def test_an_item_given_up_is_not_sent():
    line = Line()
    lane = coalescer(line)
    first = lane.submit("a")
    await settle()
    lane.submit("b").cancel()
    kept = lane.submit("c")
    first.cancel()
    await settle()
    await line.answer(0, None)
    assert line.sent() == [["a"], ["c"]]
    await line.answer(1, 3)
    assert kept.result() == 3


async def test_closing_ends_every_wait():
    line = Line()
    lane = coalescer(line)
    results = [lane.submit("a")]
    await settle()
    results.append(lane.submit("b"))
    await lane.close(ConnectionError("closed"))
    for result in results:
        with pytest.raises(ConnectionError, match="closed"):
            await result
