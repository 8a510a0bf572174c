"""A span for every call, sent to an OpenTelemetry collector. Needs the extra `otel`.

A caller's `traceparent` (W3C Trace Context, in the call's metadata) becomes the span's parent; the requests of a stream
all have the stream's. Sampling and resource attributes come from OpenTelemetry's own variables (OTEL_TRACES_SAMPLER,
OTEL_SERVICE_NAME …). Lines of a JSON log name the span that they are about: `trace_id`, `span_id`.

| attribute | what it is |
|---|---|
| `rpc.system`, `rpc.service`, `rpc.method` | as OpenTelemetry names them |
| `rpc.grpc.status_code` | of the whole call |
| `turngym.caller` | who calls |
| `turngym.items` | items in the call |
| `turngym.items.<environment>` | how many of them were about sessions of that environment |
| `turngym.errors.<REASON>` | items that failed so |
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Generator
from typing import Final
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from google.rpc import code_pb2
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import turngym
from turngym_server.errors import ItemError, Reason
from turngym_server.rpc.call import Call
from turngym_server.watching.logs import CALL_SPAN, SpanIds

TRACES_PATH: Final = "/v1/traces"
EXPORT_SECONDS: Final = 5.0
"""How long one export may take, so also about how long the end of a server waits for a collector that is away."""


class Tracing:
    """Makes spans, and sends them in the background.

    Args:
        endpoint: OTLP over HTTP: http://host:4318, or a whole URL.
        service: full name of the gRPC service.

    Raises:
        ValueError: the endpoint is no URL.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        self._service = service
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "turngym", "service.version": turngym.__version__})
        )
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("turngym_server", turngym.__version__)

    @contextlib.contextmanager
    def span(self, call: Call) -> Generator[None]:
        """The span of a call, current while it is answered."""
        call.environments = Counter()
        with self._tracer.start_as_current_span(
            f"{self._service}/{call.rpc}",
            context=self._propagator.extract(_text_metadata(call)),
            kind=SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": self._service, "rpc.method": call.rpc},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            own = span.get_span_context()
            # Stays set: what is logged once the span has ended is about the call too, and each has its own context.
            CALL_SPAN.set(SpanIds(trace_id=format_trace_id(own.trace_id), span_id=format_span_id(own.span_id)))
            try:
                yield
            except ItemError as error:
                span.set_attribute("rpc.grpc.status_code", error.code)
                span.set_status(Status(StatusCode.ERROR, error.reason.value))
                raise
            except DecodeError:
                span.set_attribute("rpc.grpc.status_code", code_pb2.INVALID_ARGUMENT)
                span.set_status(Status(StatusCode.ERROR, Reason.INVALID_ITEM.value))
                raise
            except BaseException as error:
                span.record_exception(error)
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise
            else:
                span.set_attribute("rpc.grpc.status_code", 0)
            finally:
                _describe(span, call)

    async def close(self) -> None:
        """Sends what waits, if the collector takes it soon."""
        await asyncio.to_thread(self._provider.shutdown)


def traces_url(endpoint: str) -> str:
    """Where spans go; the usual path, where none is given.

    Raises:
        ValueError: it is no URL of HTTP.
    """
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ValueError(f"OTLP endpoint {endpoint!r}: expected http://HOST:PORT, as in http://localhost:4318")
    return url._replace(path=TRACES_PATH).geturl() if url.path in ("", "/") else endpoint


def _text_metadata(call: Call) -> dict[str, str]:
    return {key: value for key, value in call.metadata if isinstance(value, str)}


def _describe(span: Span, call: Call) -> None:
    if not span.is_recording():
        return
    span.set_attribute("turngym.caller", str(call.caller))
    span.set_attribute("turngym.items", call.items)
    for environment, items in (call.environments or {}).items():
        span.set_attribute(f"turngym.items.{environment}", items)
    for reason, items in (call.failures or {}).items():
        span.set_attribute(f"turngym.errors.{reason.value}", items)
