"""Connections that go wrong without a word, and processes that fork."""

import subprocess
import sys

import pytest
from server_process import ServerProcess
from silent_proxy import SilentProxy

from turngym_client import connect, transport


@pytest.fixture
def server():
    with ServerProcess("--env", "frozen_lake") as server:
        yield server


def test_a_connection_that_passes_nothing_on_is_given_up(server, monkeypatch):
    waits = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    quick = tuple((name, 1_000 if name in waits else value) for name, value in transport.CHANNEL_OPTIONS)
    monkeypatch.setattr(transport, "CHANNEL_OPTIONS", quick)
    proxy = SilentProxy(server.address)
    with connect(proxy.address, deadline=3, patience=60) as client:
        episode = client.reset("frozen_lake", level_seed=3)
        episode.step("Right")
        proxy.hush()
        episode.step("Left")
        assert episode.step_index == 2
        assert proxy.connections > 1
    proxy.close()


PARENT = """
import os, signal, sys
from turngym_client import connect


def play():
    with connect(sys.argv[1], patience=10, deadline=10) as client:
        client.reset("frozen_lake", level_seed=1).step("Right")


def fork(work):
    if not (pid := os.fork()):
        signal.alarm(2)
        work()
        os._exit(0)
    os.waitpid(pid, 0)


play()
with connect(sys.argv[1]) as client:
    for child in (play, int, play):
        fork(child)
        client.reset("frozen_lake", level_seed=2).step("Right")
play()
print("well")
"""


def test_a_process_outlives_the_children_that_it_forks(server):
    """Whatever becomes of a child that goes on to use gRPC, which it should not."""
    command = [sys.executable, "-c", PARENT, server.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("well\n")
