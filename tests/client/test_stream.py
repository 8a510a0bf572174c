"""Steps over a stream: one for each server, mended when it breaks, forgone where there is none."""

import asyncio
import contextlib

import pytest
from google.rpc import code_pb2

from turngym_client import EpisodeRequest, InvalidRequest, aconnect


class Proxy:
    """Hands bytes through to a port until told to cut every connection."""

    def __init__(self, port):
        self._target = port
        self._writers = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self):
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, there_writer}
        await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))
        self._writers -= {writer, there_writer}

    async def _pass(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


async def until(reached):
    """Waits for a condition that the event loop brings about."""
    while not reached():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.fixture
async def client(toy):
    async with aconnect(toy.address, patience=10.0) as client:
        yield client


async def test_one_stream_carries_every_step_of_a_server(toy, client):
    """Of several environments and kinds of step. A server without streams is not asked for one again."""
    first = await client.reset("toy", level_seed=9)
    for _ in range(3):
        await first.step("a")
    asked = toy.service.streams
    episodes = [await client.reset(f"toy{n % 2}", level_seed=n) for n in range(4)]
    for _ in range(3):
        await asyncio.gather(*(each.step("a", want_legal_actions=each is episodes[0]) for each in episodes))
    assert [each.state.observation for each in episodes] == [f"({n}, [('a',), ('a',), ('a',)])" for n in range(4)]
    assert (toy.service.played, toy.service.streams) == (15, asked)
    assert asked == 1 or not toy.service.offers_stream
    assert ("Step" in toy.service.deadlines) == (not toy.service.offers_stream)


@pytest.mark.parametrize("toys", ["stream"], indirect=True)
class TestStream:
    async def test_a_refused_request_does_not_end_it(self, toy, client):
        episode = await client.reset("toy", level_seed=1)
        toy.fail_before("Step", {"code": code_pb2.INVALID_ARGUMENT, "reason": "INVALID_ITEM"})
        with pytest.raises(InvalidRequest, match="told to: INVALID_ITEM"):
            await episode.step("a")
        await episode.step("a")
        assert (toy.service.played, toy.service.streams) == (1, 1)

    async def test_a_request_without_an_answer_is_sent_again_beside_others(self, toy):
        async with aconnect(toy.address, deadline=0.2, patience=10.0) as client:
            stuck, other = [await client.reset(f"toy{n}", level_seed=n) for n in range(2)]
            await other.step("a")
            gate = toy.service.step_gate = asyncio.Event()
            step = asyncio.ensure_future(stuck.step("a"))
            await asyncio.sleep(0.05)
            toy.service.step_gate = None
            # Another lane's requests are answered meanwhile, on the same stream.
            await other.step("b")
            assert not step.done()
            assert (await step).observation == "(0, [('a',)])"
            gate.set()  # The answer that nobody waits for any more comes now.
            await stuck.step("b")
            assert (toy.service.played, toy.service.streams) == (4, 1)

    async def test_a_connection_cut_in_mid_step(self, toy):
        async with Proxy(toy.port) as proxy, aconnect(proxy.address, patience=20.0) as client:
            episodes = await client.reset_many([EpisodeRequest(environment_id="toy", level_seed=n) for n in range(3)])
            toy.service.step_gate = asyncio.Event()
            steps = [asyncio.ensure_future(episode.step("a")) for episode in episodes]
            await until(lambda: toy.service.played == len(episodes))
            proxy.cut()
            toy.service.step_gate.set()
            for n, step in enumerate(steps):
                assert (await step).observation == f"({n}, [('a',)])"
            assert (toy.service.played, toy.service.streams, toy.service.count("Reset")) == (3, 2, 1)

    async def test_a_server_killed_in_mid_step(self, toy, client):
        episode = await client.reset("toy", level_seed=1)
        await episode.step("a")
        toy.service.step_gate = asyncio.Event()
        step = asyncio.ensure_future(episode.step("b"))
        await until(lambda: toy.service.played == 2)
        await toy.stop()
        toy.service.step_gate = None
        await toy.start(remember=False)
        assert (await step).observation == "(1, [('a',), ('b',)])"
        assert toy.service.streams == 2

    async def test_a_server_that_comes_back_without_streams(self, toy, client):
        episode = await client.reset("toy", level_seed=1)
        await episode.step("a")
        await toy.stop()
        toy.service.offers_stream = False
        await toy.start()
        await episode.step("b")
        await episode.step("c")
        assert episode.state.observation == "(1, [('a',), ('b',), ('c',)])"
        assert toy.service.played == 3
        # A write to a stream that the server has ended may hide why it did: then another is tried once more.
        assert toy.service.streams in (2, 3)
