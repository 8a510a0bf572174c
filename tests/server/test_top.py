"""`turngym top`: its arithmetic worked by hand, and the command beside a real server."""

import asyncio
import contextlib
import io
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from sample_environments import DICE, FAULTY
from server_process import ServerProcess
from serving import serving, start, step

from turngym.v1 import environment_pb2 as pb
from turngym_server.watching.snapshot import Window, quantile, read
from turngym_server.watching.top import metrics_url, render

BEFORE = """
turngym_build_info{version="9.9",worker="0"} 1.0
turngym_build_info{version="9.9",worker="1"} 1.0
# TYPE turngym_turns counter
turngym_turns_total{environment="dice",worker="0"} 100
turngym_turns_total{environment="dice",worker="1"} 10
turngym_turns_total{environment="lake",worker="1"} 7
# TYPE turngym_sessions gauge
turngym_sessions{environment="dice",state="idle",worker="0"} 3
turngym_sessions{environment="dice",state="idle",worker="1"} 4
# TYPE turngym_call_seconds histogram
turngym_call_seconds_bucket{rpc="Step",le="0.1",worker="0"} 50
turngym_call_seconds_bucket{rpc="Step",le="0.2",worker="0"} 50
turngym_call_seconds_bucket{rpc="Step",le="+Inf",worker="0"} 50
turngym_call_seconds_bucket{rpc="Close",le="0.1",worker="0"} 5
turngym_call_seconds_bucket{rpc="Close",le="0.2",worker="0"} 5
turngym_call_seconds_bucket{rpc="Close",le="+Inf",worker="0"} 5
"""
AFTER = """
turngym_build_info{version="9.9",worker="0"} 1.0
turngym_build_info{version="9.9",worker="1"} 1.0
# TYPE turngym_turns counter
turngym_turns_total{environment="dice",worker="0"} 140
turngym_turns_total{environment="dice",worker="1"} 4
turngym_turns_total{environment="lake",worker="1"} 7
# TYPE turngym_call_seconds histogram
turngym_call_seconds_bucket{rpc="Step",le="0.1",worker="0"} 56
turngym_call_seconds_bucket{rpc="Step",le="0.2",worker="0"} 60
turngym_call_seconds_bucket{rpc="Step",le="+Inf",worker="0"} 60
turngym_call_seconds_bucket{rpc="Close",le="0.1",worker="0"} 5
turngym_call_seconds_bucket{rpc="Close",le="0.2",worker="0"} 5
turngym_call_seconds_bucket{rpc="Close",le="+Inf",worker="0"} 5
"""


def test_rates_and_quantiles_between_two_scrapes():
    window = Window(read(BEFORE, 50.0), read(AFTER, 52.0))
    # Worker 1 began again: its 4 turns are new. (40 + 4) / 2 s.
    assert window.rate("turns_total", "environment") == {("dice",): 22.0, ("lake",): 0.0}
    assert window.rate("turns_total", "worker") == {("0",): 20.0, ("1",): 2.0}
    assert window.before.by("sessions", "environment", "state") == {("dice", "idle"): 7.0}
    # Ten calls came, six up to 0.1 s and four up to 0.2 s: the fifth lies at 5/6 of the first bucket, the ninth at 3/4
    # of the second. No Close came.
    quantiles = window.quantiles("call_seconds", (0.5, 0.9), "rpc")
    assert quantiles == {("Step",): pytest.approx([0.1 * 5 / 6, 0.1 + 0.1 * 3 / 4])}


def test_quantiles_at_the_edges():
    buckets = [(1.0, 0.0), (2.0, 4.0), (math.inf, 5.0)]
    assert quantile(buckets, 0.0) == 1.0
    assert quantile(buckets, 0.8) == 2.0
    assert quantile(buckets, 1.0) == 2.0  # Above every finite bound: the largest of them.
    assert math.isnan(quantile([(1.0, 0.0), (math.inf, 0.0)], 0.5))


@pytest.mark.parametrize("text", ["", "<html>no metrics</html>", "other_total 3\n"])
def test_what_is_no_server_of_turngym(text):
    with pytest.raises(ValueError):
        read(text, 0.0)


def test_a_narrow_terminal_folds():
    console = Console(width=80, file=io.StringIO())
    console.print(render("http://host:1/metrics", Window(read(BEFORE, 50.0), read(AFTER, 52.0))))
    shown = console.file.getvalue()
    assert "…" not in shown
    assert all(word in shown for word in ("dice", "lake", "RPC", "p50", "p99"))


def test_addresses():
    assert metrics_url("host:9100") == "http://host:9100/metrics"
    assert metrics_url("[::1]:9100") == "http://[::1]:9100/metrics"
    assert metrics_url("https://host:9100/own/") == "https://host:9100/own"
    for wrong in ("host", "host:port", "host:70000", "ftp://host:1", ":9100", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="expected HOST:PORT"):
            metrics_url(wrong)


@pytest.mark.parametrize(
    "address",
    [
        "http://user:s3cret@host/",
        "http://user:s3cret@host:9100",
        "https://s3cret@host:9100/metrics",
        "user:s3cret@host:9100",
        "http:/user:s3cret@host",
        "ftp://user:s3cret@host:1",
        "http://user:s3cret@[::1",
        "http://user:s3cret\uff20host:9100",
        "http://host/?key=s3cret",
    ],
)
def test_credentials_in_an_address_are_not_shown(address):
    with pytest.raises(ValueError, match="expected HOST:PORT") as refused:
        metrics_url(address)
    assert "s3cret" not in str(refused.value)


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turngym_server.watching.top", "top", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )
    out, error = await process.communicate()
    return process.returncode, re.sub(r" +\n", "\n", out.decode()), error.decode()


async def test_one_table_of_a_server_at_play():
    async with serving(DICE, FAULTY, metrics_port=0, max_sessions=77) as (stub, server):
        for _ in range(3):
            await start(stub)
        failed = (await start(stub, environment_id="faulty")).session_id
        await step(stub, failed, 1, "raise")
        address = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
        looking = asyncio.create_task(run(address, "--once", "--interval", "2"))
        while not looking.done():  # Plays through the whole interval, wherever it lies.
            session = (await start(stub)).session_id
            items = [pb.StepItem(session_id=each, step_index=1, actions=["roll"]) for each in (session, "nobody's")]
            await stub.Step(pb.StepRequest(items=items))
            await stub.Close(pb.CloseRequest(session_ids=[session]))
            await asyncio.sleep(0.02)
        code, out, error = await looking
    assert (code, error) == (0, "")
    assert re.search(
        rf"^turngym \S+ at http://{address}/metrics · [45] of 77 sessions · CPU \d+ % · memory [\d,]+ MiB", out
    )
    dice = re.search(r"^dice +(\S+) +(\S+) +(\S+) +0 +([34]) +0 +– +– +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    assert dice, out
    assert all(float(dice[rate]) > 0 for rate in (1, 2, 3, 5, 6))
    assert re.search(r"^faulty +0 +0 +0 +0 +0 +1 ", out, re.MULTILINE)
    assert re.search(r"^Step +\S+ +2\.0 +[\d.]+ +[\d.]+$", out, re.MULTILINE)
    assert re.search(r"^SESSION_UNKNOWN +Step +items +[1-9]\S* +\d+$", out, re.MULTILINE)
    assert re.search(r"^ENVIRONMENT_FAILED +Step +items +0 +1$", out, re.MULTILINE)
    assert not re.search(r"^Fork", out, re.MULTILINE)


@pytest.mark.parametrize("address", ["http://user:s3cret@127.0.0.1:9/", "http://127.0.0.1:9/metrics?key=s3cret"])
async def test_the_command_shows_no_credentials(address):
    code, out, error = await run(address, "--once")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"turngym: .*\n", error)
    assert "s3cret" not in error


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no-such-host.invalid:9100", "nonsense"])
async def test_nobody_there_is_one_line(address):
    code, out, error = await run(address, "--once")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"turngym: .*\n", error)
    assert address in error


def test_the_live_view_outlives_its_server():
    with ServerProcess("--env", "bandit", "--metrics-port", "0") as server:
        url = server.process.stdout.readline().split()[-1]
        terminal, slave = pty.openpty()
        command = [sys.executable, "-m", "turngym_server.watching.top", "top", url, "--interval", "0.1"]
        environment = {**os.environ, "COLUMNS": "160", "LINES": "30", "TERM": "xterm"}
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        try:
            until(terminal, "0 of 4,096 sessions")
            server.stop()
            until(terminal, "is env_server running")
            process.send_signal(signal.SIGINT)
            until(terminal, "")  # What is not read would keep it from ending.
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)


def until(terminal: int, words: str) -> None:
    """Reads what a terminal shows until some words are there; none: until its program has ended."""
    shown, ends = "", time.monotonic() + 60
    with contextlib.suppress(OSError):  # Linux's end of file.
        while (not words or words not in shown) and time.monotonic() < ends:
            if select.select([terminal], [], [], 1.0)[0]:
                shown = shown[-10_000:] + os.read(terminal, 65_536).decode(errors="replace")
    assert words in shown


async def test_somebody_else_there_is_one_line():
    async with serving(DICE) as (_, server):  # Its gRPC port speaks HTTP/2.
        code, out, error = await run(server.address, "--once")
    assert (code, out) == (1, "")
    assert re.fullmatch(r"turngym: no metrics at .*--metrics-port\?\n", error)
