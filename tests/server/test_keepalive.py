"""Connections that are idle, between real servers and clients; and whether gRPC knows what it is told."""

import asyncio
import re
from pathlib import Path

import grpc
from sample_environments import DICE
from serving import serving
from silent_proxy import SilentProxy

from turngym_client import Split, aconnect, transport
from turngym_server import listening

ROOT = Path(__file__).parents[2]


async def test_an_idle_connection_is_kept(monkeypatch):
    quick = {"grpc.keepalive_time_ms": 1_000, "grpc.http2.min_ping_interval_without_data_ms": 250}
    for module, options in ((transport, "CHANNEL_OPTIONS"), (listening, "SERVER_OPTIONS")):
        shortened = tuple((name, quick.get(name, value)) for name, value in getattr(module, options))
        assert shortened != getattr(module, options)
        monkeypatch.setattr(module, options, shortened)
    async with serving(DICE) as (_, server):
        proxy = SilentProxy(server.address)
        async with aconnect(proxy.address) as client:
            episode = await client.reset("dice", split=Split.TRAIN, level_seed=1)
            await episode.step("roll")  # Opens a stream, which stays open: pings go on.
            connections = proxy.connections
            await asyncio.sleep(6)
            await episode.step("roll")
            assert proxy.connections == connections
        proxy.close()


def test_grpc_knows_every_option_that_it_is_given():
    # What it does not know, it ignores without a word.
    (core,) = Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")
    known = core.read_bytes()
    files = [file for package in ("client", "env_server", "proto") for file in (ROOT / package).rglob("*.py")]
    given = {name for file in files for name in re.findall(r'\("(grpc\.[a-z0-9_.]+)", ', file.read_text())}
    assert len(given) > 10
    assert not {name for name in given if name.encode() + b"\0" not in known}
