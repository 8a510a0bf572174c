"""What the log says of an event, and that a log which cannot be written harms nobody."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import grpc.aio
import pytest
from logged import logged
from sample_environments import FAULTY, GATE, THREADED_FAULTY
from serving import reset_item, serving, start, step

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc
from turngym_server.watching.logs import BackgroundHandler, JsonFormatter, TextFormatter, without_text

SECRET_ACTION = "an action nobody may read"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_failed_step_is_told_with_all_that_plays_it_again(tmp_path):
    large = 2**64 - 1
    async with serving(FAULTY) as (stub, _):
        with logged(tmp_path / "log", JsonFormatter(), logging.INFO):
            options = '{"reset":"","told":""}'
            session = (await start(stub, environment_id="faulty", level_seed=large, noise_seed=large - 1)).session_id
            await step(stub, session, 1, "go", SECRET_ACTION)
            await step(stub, session, 2, "raise")
    (line,) = lines(tmp_path / "log")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert "Traceback" in line["exception"]
    assert "a missing wall" in line.pop("exception")
    assert line.pop("message").startswith(f"step 2 failed: session {session} of faulty 1.0")
    assert line == {
        "level": "error",
        "logger": "turngym_server.sessions.session",
        "caller": "",
        "reason": "ENVIRONMENT_FAILED",
        "session": session,
        "environment": "faulty",
        "version": "1.0",
        "options": options,
        "split": "all",
        "level_seed": str(large),
        "noise": [{"from_step": 1, "noise_seed": str(large - 1)}],
        "step": 2,
    }


async def test_resets_that_fail_and_turns_past_their_deadline(tmp_path):
    async with serving(FAULTY, THREADED_FAULTY) as (stub, _):
        with logged(tmp_path / "log", JsonFormatter(), logging.WARNING):
            await stub.Reset(pb.ResetRequest(items=[reset_item("faulty", options_json='{"reset":"raise"}')]))
            session = (await start(stub, environment_id="threaded_faulty")).session_id
            GATE.clear()
            try:
                await step(stub, session, 1, "hang")
            finally:
                GATE.set()
    failed, late = lines(tmp_path / "log")
    assert (failed["rpc"], failed["reason"], failed["replayed"]) == ("Reset", "ENVIRONMENT_FAILED", 0)
    assert (failed["environment"], failed["level_seed"]) == ("faulty", "7")
    assert (late["session"], late["reason"], late["step"]) == (session, "STEP_DEADLINE", 1)


async def test_refusals_and_failed_items_are_one_line_a_call(tmp_path):
    async with serving(FAULTY) as (stub, _):
        with logged(tmp_path / "log", JsonFormatter(), logging.INFO):
            session = (await start(stub, environment_id="faulty")).session_id
            wrong = [
                pb.StepItem(session_id="nobody's", step_index=1, actions=[SECRET_ACTION]),
                pb.StepItem(session_id=session, step_index=9, actions=[SECRET_ACTION]),
                pb.StepItem(session_id="nor his", step_index=1, actions=[SECRET_ACTION]),
            ]
            await stub.Step(pb.StepRequest(items=wrong), metadata=[("turngym-client", "alice")])
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Step(pb.StepRequest(), metadata=[("turngym-client", "bob")])
            await stub.Close(pb.CloseRequest(session_ids=[session], reason=pb.CLOSE_REASON_ERROR))
    failed, refused, closed = lines(tmp_path / "log")
    assert (failed["rpc"], failed["caller"], failed["items"]) == ("Step", "alice", 3)
    assert failed["failed"] == {"SESSION_UNKNOWN": 2, "WRONG_STEP_INDEX": 1}
    assert (failed["reason"], failed["session"]) == ("SESSION_UNKNOWN", "nobody's")
    assert (refused["rpc"], refused["caller"], refused["reason"]) == ("Step", "bob", "INVALID_ITEM")
    assert (closed["rpc"], closed["departure"], closed["items"]) == ("Close", "error", 1)
    assert SECRET_ACTION not in (tmp_path / "log").read_text()


async def test_debug_tells_of_each_session(tmp_path):
    async with serving(FAULTY) as (stub, _):
        with logged(tmp_path / "log", JsonFormatter()):
            session = (await start(stub, environment_id="faulty")).session_id
            await step(stub, session, 1, SECRET_ACTION)
            await stub.Close(pb.CloseRequest(session_ids=[session]))
    began, ended = lines(tmp_path / "log")
    assert (began["session"], began["origin"], began["step"]) == (session, "reset", 0)
    assert (ended["session"], ended["departure"], ended["step"]) == (session, "closed", 1)
    assert SECRET_ACTION not in (tmp_path / "log").read_text()


async def test_no_client_begins_a_line_of_text(tmp_path):
    async with serving(FAULTY) as (stub, _):
        with logged(tmp_path / "log", TextFormatter(), logging.INFO):
            await stub.Reset(pb.ResetRequest(items=[reset_item("x\n2030-01-01 ERROR all is lost\x1b[2J")]))
    text = (tmp_path / "log").read_text()
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "all is lost" in text
    assert TextFormatter().format(record("one\n2030\r\x1b[2J\x85two")).endswith(": one\\x0a2030\\x0d\\x1b[2J\\x85two")


def record(message: str = "told") -> logging.LogRecord:
    return logging.LogRecord("turngym_server", logging.INFO, __file__, 1, message, (), None)


def raised() -> BaseException:
    """An error with a cause, a context of that, a note, and a group that holds more. All quote SECRET_ACTION."""
    error, group = KeyError(SECRET_ACTION), ExceptionGroup(SECRET_ACTION, [ValueError(SECRET_ACTION)])
    group.__context__ = LookupError(SECRET_ACTION)
    error.add_note(SECRET_ACTION)
    try:
        raise error from group
    except KeyError as caught:
        return caught


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_an_exception_without_its_text(formatter):
    error = raised()
    error.__cause__.__context__.__context__ = error  # A circle.
    for told, secret in ((error, True), (without_text(error), False)):
        line = record()
        line.exc_info = (type(told), told, told.__traceback__)
        text = formatter.format(line)
        assert (SECRET_ACTION in text) == secret
        for name in ("LookupError", "ExceptionGroup", "KeyError", "in raised"):
            assert name in text
    assert "direct cause" in text
    assert "During handling" in text


def test_a_reader_that_sleeps_holds_up_nobody():
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb", buffering=0) as stream, os.fdopen(reading, "rb") as reader:
        handler = BackgroundHandler(stream, capacity=4)
        handler.setFormatter(TextFormatter())
        text = "x" * 4_096
        for _ in range(100):  # A pipe takes 64 KiB.
            handler.handle(record(text))
        assert handler.dropped >= 100 - 17 - 4 - 1
        assert reader.read(1_000)
        before = handler.dropped
        os.set_blocking(reading, False)
        while reader.read(65_536):
            pass
        handler.close()
        assert handler.dropped == before


def test_a_record_that_cannot_be_formatted_is_dropped():
    handler = BackgroundHandler(None)
    bad = record("%d turns")
    bad.args = ("no number",)
    handler.handle(bad)
    assert handler.dropped == 1
    handler.close()


def play(address: str) -> None:
    """Does what is told at level info."""
    with grpc.insecure_channel(address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        for _ in range(20):
            item = pb.StepItem(session_id="nobody's", step_index=1, actions=["go"])
            assert stub.Step(pb.StepRequest(items=[item]), timeout=20).outcomes[0].error.code


def scrape_dropped(url: str) -> float:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return float(re.findall(rb"\nturngym_log_records_dropped_total (\S+)", reply.read())[0])


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-", "2>{path}"])
def test_a_log_that_cannot_be_written_harms_nobody(redirect, tmp_path):
    path = tmp_path / "log"
    arguments = "--env bandit --port 0 --metrics-port 0 --log-level info --log-format json"
    command = f"exec {sys.executable} -m turngym_server.cli {arguments} {redirect.format(path=path)}"
    with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"listening on (\S+)", process.stdout.readline())[1]
            metrics = re.search(r"metrics at (\S+)", process.stdout.readline())[1]
            play(address)
            expected = 0 if "{path}" in redirect else 20
            for _ in range(100):
                if (dropped := scrape_dropped(metrics)) == expected:
                    break
                time.sleep(0.05)
            assert dropped == expected
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
    if path.exists():
        assert [line["reason"] for line in lines(path)] == ["SESSION_UNKNOWN"] * 20


# As gRPC logs it, whose exceptions differ in their texts alone.
GRPC_LOGS = r"""
import logging, sys
from grpc._cython.cygrpc import ExecuteBatchError
from turngym_server.watching import logs

logs.configure(sys.argv[1], logs.LogFormat.JSON)
logging.getLogger("grpc._cython.cygrpc").debug("Loaded running loop")
for error in (
    ExecuteBatchError('Failed "execute_batch": (<SendMessageOperation>,)'),
    ExecuteBatchError("Failed grpc_call_start_batch: 8 with value: 'GRPC_CALL_ERROR_TOO_MANY_OPERATIONS'"),
    ExecuteBatchError("Failed grpc_call_start_batch: 10"),
    ValueError('Failed "execute_batch"'),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text"),
):
    try:
        raise error
    except Exception:
        logging.getLogger("grpc._cython.cygrpc").exception("%s in [%s]", "raised", "/Step")
try:
    (b"\xff" * 1000).decode()
except UnicodeDecodeError:
    logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"\xff" * 1000)
logging.shutdown()
"""


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_what_any_caller_can_provoke_is_no_error(level):
    command = [sys.executable, "-c", GRPC_LOGS, level]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stderr
    told = [json.loads(line) for line in text.splitlines()]
    calm = [line for line in told if line["level"] == "debug"]
    others = [line for line in told if line["level"] != "debug"]
    assert len(calm) == (0 if level == "WARNING" else 3)
    assert all("exception" not in line and len(line["message"]) < 300 for line in calm)
    if calm:
        assert calm[0]["message"] == "a caller hung up before its reply: raised in [/Step]"
        assert calm[1]["message"] == calm[0]["message"]
        assert calm[2]["message"].startswith("a caller's metadata is no text: Invalid encoding on b'")
    assert [line["level"] for line in others] == ["error"] * 3
    assert "Failed grpc_call_start_batch: 10" in others[0]["exception"]
    assert "ValueError" in others[1]["exception"]


FULL_DISK = """
mount -t tmpfs -o size={size} none {folder} || exit 9
head -c {filler} /dev/zero > {folder}/filler || exit 9
"""


def await_dropped(url: str, more_than: float) -> float:
    """The records dropped, once they are more and no longer grow."""
    before = -1.0
    for _ in range(200):
        if (dropped := scrape_dropped(url)) == before and dropped > more_than:
            return dropped
        before = dropped
        time.sleep(0.1)
    raise AssertionError(f"{before} records were dropped; expected more than {more_than}")


@pytest.fixture
def logging_server(tmp_path):
    """Starts a server whose log goes to a file, by a shell that first does what it is told."""
    processes: list[subprocess.Popen[str]] = []

    def begin(prelude: str, log: Path, *shell: str) -> tuple[subprocess.Popen[str], str, str]:
        arguments = "--env bandit --port 0 --metrics-port 0 --log-level info --log-format json"
        script = f"{prelude}\nexec {sys.executable} -B -m turngym_server.cli {arguments} 2>{log}"
        process = subprocess.Popen([*shell, "/bin/sh", "-c", script], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        first = process.stdout.readline()
        if not first and process.wait(timeout=20) == 9:
            pytest.skip("this user can mount no file system")
        metrics = re.search(r"metrics at (\S+)", process.stdout.readline())[1]
        return process, re.search(r"listening on (\S+)", first)[1], metrics

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def ends_well(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


def test_a_log_file_that_may_not_grow_harms_nobody(logging_server, tmp_path):
    log = tmp_path / "log"
    process, address, metrics = logging_server("ulimit -f 4", log)
    play(address)
    dropped = await_dropped(metrics, 0)
    whole, cut = log.read_text().rsplit("\n", 1)
    assert len(whole.splitlines()) == 20 - dropped
    assert {json.loads(line)["reason"] for line in whole.splitlines()} == {"SESSION_UNKNOWN"}
    assert cut.startswith('{"time":')
    play(address)
    assert await_dropped(metrics, dropped) == dropped + 20
    ends_well(process)


def test_a_log_goes_on_once_its_disk_has_room_again(logging_server, tmp_path):
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this user can make no mount namespace")
    folder = tmp_path / "disk"
    folder.mkdir()
    page = os.sysconf("SC_PAGESIZE")
    full = FULL_DISK.format(folder=folder, size=4 * page, filler=3 * page)
    process, address, metrics = logging_server(full, folder / "log", "unshare", "-rm")
    inside = Path(f"/proc/{process.pid}/root{folder}")
    for _ in range(page // 4_096):
        play(address)
    dropped = await_dropped(metrics, 0)
    (inside / "filler").unlink()
    before = (inside / "log").read_text()
    assert len(before) == page
    play(address)
    for _ in range(200):
        after = (inside / "log").read_text()
        if after.count("\n") == before.count("\n") + 21:
            break
        time.sleep(0.05)
    assert after.startswith(before + "\n")  # The line that was cut stays so; none is joined to it.
    assert [json.loads(line)["reason"] for line in after[len(before) + 1 :].splitlines()] == ["SESSION_UNKNOWN"] * 20
    assert scrape_dropped(metrics) == dropped
    ends_well(process)


def test_workers_serve_without_stderr():
    command = f"exec {sys.executable} -m turngym_server.cli --env bandit --port 0 --workers 2 --log-level info 2>&-"
    with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        try:
            play(re.search(r"listening on (\S+)", process.stdout.readline())[1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
