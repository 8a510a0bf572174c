"""A server's counts in Prometheus' format, over HTTP at /metrics.

Every name begins with `turngym_`; counters end in `_total`, durations are seconds.

| metric | labels | what it is |
|---|---|---|
| `sessions` | environment, state | held now: `running` a turn, `idle`, or `ended` and not closed yet |
| `sessions_admitted` | | places taken, those of sessions that are being made included |
| `sessions_limit` | | places there are |
| `sessions_started_total` | environment, split, origin | by `reset`, `resume` (a replay) or `fork` |
| `sessions_departed_total` | environment, how | see `Departure`: closed by the caller, expired, or shutdown |
| `episodes_ended_total` | environment, reason | by the environment, a limit, or an error |
| `turns_total` | environment | steps played, each once however often it was sent |
| `actions_total` | environment | actions run in those steps |
| `turn_seconds` | environment | turns played off the event loop, their wait for a thread included |
| `reset_seconds` | environment, origin | the same of resets and resumptions, failed ones too |
| `call_seconds` | rpc | calls, refused ones included |
| `call_items` | rpc | items in a call: what clients coalesce |
| `item_errors_total` | rpc, code, reason | items that failed; a failed turn counts once, however often it is sent |
| `calls_refused_total` | rpc, code, reason | calls that failed as a whole |
| `log_records_dropped_total` | | log records of the process that could not be written |
| `threads` | | of the process |
| `worker_up` | worker | with several workers: 1 where it tells of itself, else 0 |
| `build_info` | version, python, grpc | 1 |
| `environment_info` | environment, version | 1 |

Beside them are `process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds` and their like. No
label holds what a client wrote. The numbers are read on the event loop, so that they belong together.

A front of several workers tells what all of them tell, each sample with the label `worker`: the worker's number, from
1, or `front` for the front's own process. It asks them through their unix sockets.
"""

import asyncio
import itertools
import platform
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import grpc
from google.rpc import code_pb2
from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
    make_wsgi_app,  # pyright: ignore[reportUnknownVariableType]
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

import turngym
from turngym_server.errors import CODES, Reason
from turngym_server.rpc.call import Context
from turngym_server.sessions.session import Session
from turngym_server.sessions.table import SessionTable
from turngym_server.watching import logs
from turngym_server.watching.bounded_http import BoundedServer
from turngym_server.watching.counts import Counts, EnvironmentCounts, Histogram, RpcCounts

SCRAPE_SECONDS: Final = 10.0
"""How long a scrape waits for the event loop. A loop that is busy for longer is what the failed scrape reports."""
METRICS_METHOD: Final = "/turngym.internal.Worker/GetMetrics"
"""By which a front asks a worker. Request: empty. Reply: Prometheus' text format."""
WORKER_LABEL: Final = "worker"
Collect = Callable[[], Awaitable[Iterable[Metric]]]
_PROCESS: Final = ProcessCollector(registry=None)
STATES: Final = ("running", "idle", "ended")


def families(counts: Counts, table: SessionTable, versions: Mapping[str, str]) -> Iterator[Metric]:
    """All metrics of a server, as they stand.

    Args:
        versions: of the environments served, by id.
    """
    yield from _session_families(counts, table)
    yield from _environment_families(counts.environments)
    yield from _rpc_families(counts.rpcs)
    yield _gauge(
        "build_info",
        "What is running.",
        [((turngym.__version__, platform.python_version(), grpc.__version__), 1.0)],
        ("version", "python", "grpc"),
    )
    yield _gauge(
        "environment_info",
        "Environments served.",
        [((name, version), 1.0) for name, version in versions.items()],
        ("environment", "version"),
    )
    yield from process_families()


def process_families() -> Iterator[Metric]:
    """What can be told of any process."""
    yield _counter("log_records_dropped", "Log records that could not be written.", [((), logs.dropped())])
    yield _gauge("threads", "Threads of the process.", [((), float(threading.active_count()))])
    yield from _PROCESS.collect()


def union(texts: Mapping[str, str], workers: Collection[str]) -> Iterator[Metric]:
    """What several processes tell, told apart by the label `worker`.

    Args:
        texts: in Prometheus' format, by the label's value.
        workers: the values that should be there.
    """
    merged: dict[str, Metric] = {}
    for worker, text in texts.items():
        for family in text_string_to_metric_families(text):
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [
                sample._replace(labels={**sample.labels, WORKER_LABEL: worker}) for sample in family.samples
            ]
    yield from merged.values()
    up = [((worker,), float(worker in texts)) for worker in workers]
    yield _gauge("worker_up", "Whether a worker tells of itself.", up, (WORKER_LABEL,))


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' format, UTF-8."""
    return generate_latest(_Collected(metrics))


def worker_handlers(collect: Collect) -> grpc.GenericRpcHandler:
    """What a worker's server for its front needs so that it can be asked for its metrics."""

    async def answer(_request: bytes, _context: Context) -> bytes:
        return exposition(await collect())

    service, name = METRICS_METHOD.strip("/").split("/")
    return grpc.method_handlers_generic_handler(service, {name: grpc.unary_unary_rpc_method_handler(answer)})


def _session_families(counts: Counts, table: SessionTable) -> Iterator[Metric]:
    held = Counter((session.identity.host.spec.id, _state(session)) for session in table.living)
    yield _gauge(
        "sessions",
        "Sessions held, by what they are doing.",
        [((name, state), float(held[name, state])) for name in counts.environments for state in STATES],
        ("environment", "state"),
    )
    yield _gauge("sessions_admitted", "Sessions held or being made.", [((), float(table.held))])
    yield _gauge("sessions_limit", "Sessions there may be.", [((), float(table.max_sessions))])


def _state(session: Session) -> str:
    if session.running:
        return "running"
    return "ended" if session.failed or session.episode.ended else "idle"


def _environment_families(environments: Mapping[str, EnvironmentCounts]) -> Iterator[Metric]:
    yield _counter(
        "sessions_started",
        "Sessions that began.",
        [
            ((name, split.value, origin.value), number)
            for name, counts in environments.items()
            for (split, origin), number in counts.started.items()
        ],
        ("environment", "split", "origin"),
    )
    yield _counter(
        "sessions_departed",
        "Sessions that are gone.",
        [
            ((name, departure.value), number)
            for name, counts in environments.items()
            for departure, number in counts.departed.items()
        ],
        ("environment", "how"),
    )
    yield _counter(
        "episodes_ended",
        "Episodes that came to their end while played here.",
        [
            ((name, reason.name.lower()), number)
            for name, counts in environments.items()
            for reason, number in itertools.chain(counts.ended.items(), counts.failed.items())
        ],
        ("environment", "reason"),
    )
    yield _counter(
        "turns", "Steps played.", [((name,), each.turns) for name, each in environments.items()], ["environment"]
    )
    yield _counter(
        "actions", "Actions run.", [((name,), each.actions) for name, each in environments.items()], ["environment"]
    )
    yield _histogram(
        "turn_seconds",
        "Turns played off the event loop.",
        [((name,), counts.turn_seconds) for name, counts in environments.items()],
        ("environment",),
    )
    yield _histogram(
        "reset_seconds",
        "Resets and resumptions.",
        [
            ((name, origin.value), histogram)
            for name, counts in environments.items()
            for origin, histogram in counts.reset_seconds.items()
        ],
        ("environment", "origin"),
    )


def _rpc_families(rpcs: Mapping[str, RpcCounts]) -> Iterator[Metric]:
    yield _histogram(
        "call_seconds", "Calls, answered or refused.", [((rpc,), each.seconds) for rpc, each in rpcs.items()], ["rpc"]
    )
    yield _histogram(
        "call_items",
        "Items in a call.",
        [((rpc,), counts.items) for rpc, counts in rpcs.items() if any(counts.items.counts)],
        ("rpc",),
    )
    yield _errors("item_errors", "Items that failed.", {rpc: each.item_errors for rpc, each in rpcs.items()})
    yield refusals(rpcs)


def refusals(rpcs: Mapping[str, RpcCounts]) -> Metric:
    """Calls that were refused, by RPC and reason."""
    return _errors("calls_refused", "Calls that failed as a whole.", {rpc: each.refusals for rpc, each in rpcs.items()})


def _errors(name: str, text: str, errors: Mapping[str, Counter[Reason]]) -> Metric:
    return _counter(
        name,
        text,
        [
            ((rpc, code_pb2.Code.Name(CODES[reason]), reason.value), number)
            for rpc, reasons in errors.items()
            for reason, number in reasons.items()
        ],
        ("rpc", "code", "reason"),
    )


def _counter(
    name: str, text: str, values: Iterable[tuple[Sequence[str], int]], labels: Sequence[str] = ()
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"turngym_{name}", text, labels=labels)
    for label, value in values:
        family.add_metric(label, value)
    return family


def _gauge(
    name: str, text: str, values: Iterable[tuple[Sequence[str], float]], labels: Sequence[str] = ()
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"turngym_{name}", text, labels=labels)
    for label, value in values:
        family.add_metric(label, value)
    return family


def _histogram(
    name: str, text: str, values: Iterable[tuple[Sequence[str], Histogram]], labels: Sequence[str]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"turngym_{name}", text, labels=labels)
    for label, histogram in values:
        bounds = [*(str(bound) for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
        family.add_metric(label, buckets, sum_value=histogram.sum)
    return family


class _Collected(Collector):
    """Has been collected already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class _OnLoop(Collector):
    """Collects on the event loop what a scrape asks for in its own thread."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(self._work(), self._loop).result(SCRAPE_SECONDS)

    async def _work(self) -> list[Metric]:
        return list(await self._collect())


class MetricsEndpoint:
    """Serves /metrics over plain HTTP, in threads of its own, to whoever can reach the address.

    Args:
        host: address to listen on. port: 0 takes a free one.
        collect: what there is to tell; called on the running event loop.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, collect: Collect) -> None:
        registry = CollectorRegistry()
        registry.register(_OnLoop(collect))
        try:
            self._server = BoundedServer(host, port, cast("Callable[..., Any]", make_wsgi_app(registry)))
        except OSError as error:
            raise OSError(f"cannot serve metrics on {host}:{port}: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    async def close(self) -> None:
        """Stops serving."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._thread.join()
