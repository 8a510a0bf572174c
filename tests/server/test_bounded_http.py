"""Whoever connects to /metrics and stands still, or comes in crowds, neither exhausts it nor keeps others out."""

import asyncio
import contextlib
import http.client
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from sample_environments import DICE
from serving import serving

from turngym_server.watching import bounded_http
from turngym_server.watching.bounded_http import MAX_CONNECTIONS, BoundedServer

PATIENCE = 30.0


class Gated:
    """A WSGI application that answers when it may."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.asked = threading.Semaphore(0)

    def __call__(self, environ, start_response) -> list[bytes]:
        self.asked.release()
        assert self.open.wait(PATIENCE)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"fine"]


@pytest.fixture
def gated() -> Iterator[tuple[Gated, int]]:
    application = Gated()
    server = BoundedServer("127.0.0.1", 0, application)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield application, server.server_port
    application.open.set()
    server.shutdown()
    server.server_close()
    thread.join()


def request(port: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/metrics")
    return connection


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as reply:
        return reply.read().decode()


def silent(stack: contextlib.ExitStack, port: int, sent: bytes) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
    connection.sendall(sent)
    return connection


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
async def test_connections_that_send_no_request_keep_nobody_out(sent, capfd):
    async with serving(DICE, metrics_port=0) as (_, server):
        port = int(server.metrics_url.split(":")[2].split("/")[0])
        with contextlib.ExitStack() as stack:
            before = threading.active_count()
            held = [silent(stack, port, sent) for _ in range(10 * MAX_CONNECTIONS)]
            assert held[0].recv(1) == b"", "the oldest gives way"
            text = await asyncio.to_thread(get, server.metrics_url)
            assert "turngym_sessions" in text
            assert threading.active_count() - before <= 2 * MAX_CONNECTIONS
    assert capfd.readouterr().err == ""


def test_more_than_can_be_answered_are_told_to_come_again(gated):
    application, port = gated
    asked = [request(port) for _ in range(MAX_CONNECTIONS)]
    for _ in asked:
        assert application.asked.acquire(timeout=PATIENCE)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as late, late.makefile("rb") as reply:
        assert reply.readline().split()[1] == b"503"
        assert b"Retry-After: 1\r\n" in reply.read()
    application.open.set()
    assert [each.getresponse().status for each in asked] == [200] * MAX_CONNECTIONS
    assert request(port).getresponse().read() == b"fine"


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_a_connection_that_stands_still_is_dropped(sent, gated, monkeypatch, capfd):
    monkeypatch.setattr(bounded_http._Handler, "timeout", 0.1)
    with contextlib.ExitStack() as stack:
        assert silent(stack, gated[1], sent).recv(1) == b""
    assert capfd.readouterr().err == ""
