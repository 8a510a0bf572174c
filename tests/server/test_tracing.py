"""Spans as a collector receives them over OTLP."""

import gzip
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import grpc.aio
import pytest
from logged import logged
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from sample_environments import DICE, FAULTY, THREADED_FAULTY
from serving import request_id, reset_item, serving, start
from token_files import write_tokens

from turngym.v1 import environment_pb2 as pb
from turngym_server.watching.logs import JsonFormatter
from turngym_server.watching.tracing import traces_url

TRACE = bytes(range(16))
PARENT = bytes(range(8))
TRACEPARENT = f"00-{TRACE.hex()}-{PARENT.hex()}-01"


class Collector:
    """Takes traces over HTTP, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.services |= {
                        each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
                    }
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


def attributes(span: Span) -> dict[str, str | int]:
    return {
        each.key: each.value.string_value if each.value.HasField("string_value") else each.value.int_value
        for each in span.attributes
    }


def common(rpc: str, code: int = 0, caller: str = "") -> dict[str, str | int]:
    return {
        "rpc.system": "grpc",
        "rpc.service": "turngym.v1.EnvironmentService",
        "rpc.method": rpc,
        "rpc.grpc.status_code": code,
        "turngym.caller": caller,
    }


async def test_a_call_is_a_span(collector):
    async with serving(DICE, FAULTY, otlp_endpoint=collector.endpoint) as (stub, _):
        items = [reset_item(), reset_item(), reset_item("faulty"), reset_item("dise")]
        started = (await stub.Reset(pb.ResetRequest(items=items))).outcomes
        one, two, other = (outcome.started.session_id for outcome in started[:3])
        steps = [
            pb.StepItem(session_id=session, step_index=index, actions=["secret words"])
            for session, index in ((one, 1), (two, 9), (other, 1), ("nobody's", 1))
        ]
        metadata = [("traceparent", TRACEPARENT), ("turngym-client", "alice")]
        await stub.Step(pb.StepRequest(items=steps), metadata=metadata)
        fork = pb.ForkItem(request_id=request_id(), session_id=one, step_index=1)
        await stub.Fork(pb.ForkRequest(items=[fork]))
        await stub.Close(pb.CloseRequest(session_ids=[one, two]))
        assert not collector.spans  # Nothing waits for the collector; the end of the server sends the rest.
    assert collector.services == {"turngym"}
    reset, step, forked, close = collector.spans
    assert [span.name for span in collector.spans] == [
        f"turngym.v1.EnvironmentService/{rpc}" for rpc in ("Reset", "Step", "Fork", "Close")
    ]
    assert {span.kind for span in collector.spans} == {Span.SPAN_KIND_SERVER}
    assert attributes(reset) == common("Reset") | {
        "turngym.items": 4,
        "turngym.items.dice": 2,
        "turngym.items.faulty": 1,
        "turngym.errors.UNKNOWN_ENVIRONMENT": 1,
    }
    assert attributes(step) == common("Step", caller="alice") | {
        "turngym.items": 4,
        "turngym.items.dice": 2,
        "turngym.items.faulty": 1,
        "turngym.errors.WRONG_STEP_INDEX": 1,
        "turngym.errors.SESSION_UNKNOWN": 1,
    }
    assert attributes(forked) == common("Fork") | {"turngym.items": 1, "turngym.items.dice": 1}
    assert attributes(close) == common("Close") | {"turngym.items": 2}
    assert (step.trace_id, step.parent_span_id) == (TRACE, PARENT)
    assert not reset.parent_span_id
    assert reset.trace_id != TRACE
    assert 0 < step.start_time_unix_nano < step.end_time_unix_nano
    assert "secret" not in str(collector.spans)


async def test_each_request_of_a_stream_is_a_span(collector):
    async with serving(DICE, otlp_endpoint=collector.endpoint) as (stub, _):
        session = (await start(stub)).session_id
        stream = stub.StepStream(metadata=[("traceparent", TRACEPARENT)])
        for index in (1, 2):
            item = pb.StepItem(session_id=session, step_index=index, actions=["roll"])
            await stream.write(pb.StepStreamRequest(id=index, step=pb.StepRequest(items=[item])))
            await stream.read()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    _, *steps = collector.spans
    assert len({span.span_id for span in steps}) == 2
    for span in steps:
        assert attributes(span) == common("StepStream") | {"turngym.items": 1, "turngym.items.dice": 1}
        assert (span.trace_id, span.parent_span_id) == (TRACE, PARENT)


async def test_a_refused_call_is_an_error(collector):
    async with serving(DICE, otlp_endpoint=collector.endpoint) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Step(pb.StepRequest())
    (span,) = collector.spans
    assert attributes(span) == common("Step", code=grpc.StatusCode.INVALID_ARGUMENT.value[0]) | {"turngym.items": 0}
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "INVALID_ITEM")
    assert not span.events


async def test_a_span_names_the_token_that_it_never_holds(collector, tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", alice="train")
    async with serving(DICE, otlp_endpoint=collector.endpoint, tokens=tmp_path / "tokens.toml") as (stub, _):
        await stub.KeepAlive(pb.KeepAliveRequest(session_ids=["nobody's"]), metadata=tokens["alice"])
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.KeepAlive(pb.KeepAliveRequest(session_ids=["nobody's"]))
    # Who has no token is turned away before there is a span: a stranger's calls would fill the collector.
    [let_in] = collector.spans
    assert "alice" in str(attributes(let_in)["turngym.caller"])
    secret = tokens["alice"][0][1].removeprefix("Bearer ")
    assert secret not in str(collector.spans)


async def test_lines_of_the_log_name_the_span_that_they_are_about(collector, tmp_path):
    specs = FAULTY, replace(THREADED_FAULTY, step_deadline=20.0)
    async with serving(*specs, otlp_endpoint=collector.endpoint) as (stub, _):
        await start(stub, environment_id="faulty")
        with logged(tmp_path / "log", JsonFormatter(), logging.INFO):
            sessions = [
                (await start(stub, environment_id=each.id, options_json='{"reset":"listless"}')).session_id
                for each in specs
            ]
            for session, traceparent in zip(sessions, (TRACEPARENT, TRACEPARENT.replace("-01", "-00")), strict=True):
                metadata = [("traceparent", traceparent)]
                items = [pb.StepItem(session_id=session, step_index=1, actions=["go"])]
                await stub.Step(pb.StepRequest(items=items, want_legal_actions=True), metadata=metadata)
                items = [
                    pb.StepItem(session_id=each, step_index=2, actions=["raise"]) for each in (session, "nobody's")
                ]
                await stub.Step(pb.StepRequest(items=items, max_wait_seconds=20), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Step(pb.StepRequest(), metadata=[("traceparent", TRACEPARENT)])
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    # Of each session: legal actions that cannot be listed, in a thread or not; a turn that failed; its call's summary.
    assert [line["message"].split(" failed")[0].split(":")[0] for line in told] == [
        *("legal actions", "step 2", "Step by ''"),
        *("legal actions", "step 2", "Step by ''"),
        "Step by '' refused",
    ]
    assert {line["trace_id"] for line in told} == {TRACE.hex()}
    spans = [line["span_id"] for line in told]
    assert spans[1] == spans[2]
    assert spans[4] == spans[5]
    assert len(set(spans)) == 5
    sent = {span.span_id.hex(): span for span in collector.spans}
    # A caller that does not sample has its ids logged, though no span is sent.
    assert [each in sent for each in spans] == [True, True, True, False, False, False, True]
    assert attributes(sent[spans[2]])["turngym.errors.SESSION_UNKNOWN"] == 1


async def test_a_collector_that_is_away_harms_nobody():
    async with serving(DICE, otlp_endpoint="http://127.0.0.1:9") as (stub, _):
        await start(stub)


def test_endpoints():
    assert traces_url("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert traces_url("https://host/") == "https://host/v1/traces"
    assert traces_url("https://host/own/path") == "https://host/own/path"
    for wrong in ("localhost:4318", "ftp://host", "http://"):
        with pytest.raises(ValueError, match="expected http://HOST:PORT"):
            traces_url(wrong)


def serve(*arguments: str, prelude: str = "pass") -> subprocess.CompletedProcess[str]:
    """The command, after some Python."""
    code = f"import sys; {prelude}; from turngym_server.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "--env", "bandit", "--port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_without_the_package_only_the_option_fails():
    absent = "sys.modules['opentelemetry'] = None"
    result = serve("--otlp-endpoint", "http://localhost:4318", prelude=absent)
    assert result.returncode == 2
    assert result.stderr == (
        "env_server: --otlp-endpoint needs OpenTelemetry, which is not installed: pip install 'turngym[otel]'\n"
    )


def test_a_wrong_endpoint_is_one_line():
    result = serve("--otlp-endpoint", "localhost:4318")
    assert result.returncode == 2
    assert result.stderr.startswith("env_server: OTLP endpoint 'localhost:4318': expected http://HOST:PORT")
    assert result.stderr.count("\n") == 1
