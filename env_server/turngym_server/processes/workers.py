"""The worker processes behind a front: started, watched, replaced, and ended with it.

A worker reads its order from stdin, where no other user of the machine can see it, and writes one line of JSON to
stdout: where it listens, or why it cannot. It ends when its stdin does. The front's calls reach it through a unix
socket in a folder of its own, which only this user may enter and which is removed as soon as the front is connected:
whatever ends the front, no socket and no process is left.

Knows nothing of what is called.
"""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import BinaryIO, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from turngym.lifeline import describe_exit, python_path
from turngym_server.access import ledger
from turngym_server.access.tokens import Token
from turngym_server.config import ServerConfig
from turngym_server.listening import MAX_MESSAGE_BYTES, SERVICE
from turngym_server.watching.logs import LogFormat
from turngym_server.watching.metrics import METRICS_METHOD

log: Final = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]

STARTED_AT_ONCE: Final = max(2, os.cpu_count() or 1)
"""Workers that come to serve at the same time; the others wait, so that the machine is not flooded."""
START_SECONDS: Final = 120.0
"""How long a worker may take until it serves."""
BACKOFF_FIRST: Final = 0.1
BACKOFF_MOST: Final = 30.0
SETTLED_SECONDS: Final = 10.0
"""A worker that served for so long is replaced without a pause."""
START_TRIES: Final = 4
"""After so many failures to start a worker, with no other one serving, the front gives up."""
PROBE_PAUSE: Final = 1.0
"""Seconds between asking a worker whether it is there."""
PROBE_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 1.0
"""A worker that takes longer for what any does at once counts as silent, and is asked last until it answers."""
METRICS_SECONDS: Final = 2.0
"""How long a worker may take to tell what it has counted; Prometheus waits 10 s for all of them."""
UNRESPONSIVE_SECONDS: Final = 60.0
"""A worker that does not answer for so long is killed and replaced."""
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Once connected there is no socket to connect to again.
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker serves, and how.

    Attributes:
        number: of the worker, from 1; for logs.
        environments, isolated: as `find_specs` takes them.
        options: the operator's, by environment id.
        config: the whole server's in the front's hands; a worker gets its share.
        log_level: of `logging`. log_format: of its lines.
    """

    number: int = 0
    environments: Sequence[str]
    isolated: Sequence[str]
    options: Mapping[str, Mapping[str, object]]
    config: ServerConfig
    log_level: str
    log_format: LogFormat

    def write(self) -> bytes:
        """What `read` reads."""
        return pickle.dumps(self)

    @staticmethod
    def read(stdin: BinaryIO) -> "Order":
        """The order that this process was given; from its parent, never from anybody else."""
        order: Order = pickle.load(stdin)  # noqa: S301
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker says on stdout: where it listens, or why it cannot."""

    address: str = ""
    port: int = 0
    error: str = ""

    def write(self) -> str:
        """What `read` reads: one line."""
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def read(line: bytes) -> "Report":
        return Report(**json.loads(line))


def command() -> Sequence[str]:
    """What starts a worker as a child of this process; `-P`: no current folder on its path but where it is on ours."""
    modules = "turngym.lifeline", str(os.getpid()), "turngym_server.processes.worker"
    return sys.executable, "-P", "-m", *modules


def most_workers() -> int:
    """How many workers make sense on this machine: several a core, as some wait while others run."""
    return max(64, 4 * (os.cpu_count() or 1))


def check_count(workers: int) -> None:
    """Raises ValueError where that is more than make sense."""
    if workers > (most := most_workers()):
        raise ValueError(
            f"--workers {workers}: expected at most {most} here, with {os.cpu_count() or 1} cores; about one a core is "
            "enough, so give fewer, or serve on several machines"
        )


def share(config: ServerConfig, number: int) -> ServerConfig:
    """The part of worker `number` (from 1) in what the operator allows for all of them.

    Raises:
        ValueError: there is not enough to give each worker a part.
    """
    per_caller = config.max_sessions_per_caller
    return replace(
        config,
        number=number,
        port=_worker_port(config, number),
        metrics_port=None,
        max_sessions=_part("max-sessions", config.max_sessions, number, config.workers),
        max_sessions_per_caller=None
        if per_caller is None
        else _part("max-sessions-per-caller", per_caller, number, config.workers),
    )


def _part(name: str, whole: int, number: int, workers: int) -> int:
    if whole < workers:
        raise ValueError(f"--{name} {whole} with --workers {workers}: expected at least one for each worker")
    return whole // workers + (number <= whole % workers)


def _worker_port(config: ServerConfig, number: int) -> int:
    """The port that the operator gives a worker; 0: any free one."""
    first = config.worker_port if config.worker_port is not None else config.port and config.port + 1
    return first and _existing(first + number - 1, number, "--worker-port")


def _existing(port: int, number: int, option: str) -> int:
    if port > 65_535:
        raise ValueError(f"worker {number} would listen on port {port}, which does not exist; give a lower {option}")
    return port


class WorkerLost(Exception):
    """A worker went away with what it was asked."""


class CannotStart(OSError):
    """A worker did not come to serve. Says why."""


class Worker:
    """One worker process, as the front sees it.

    Attributes:
        tag: begins the ids of its sessions.
        serving: False once it is gone, or about to be.
        silent: it has not answered in time, and not since.
    """

    def __init__(
        self, order: Order, process: asyncio.subprocess.Process, channel: grpc.aio.Channel, report: Report
    ) -> None:
        self.number = order.number
        self.tag = order.config.tag.encode()
        self.address = report.address
        self.port = report.port
        self.process = process
        self.serving = True
        self.silent = False
        self.began = time.monotonic()
        self._channel = channel
        self._check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest.SerializeToString
        )
        self._get_metrics: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METRICS_METHOD)
        self._methods: dict[tuple[str, str], grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}

    async def call(
        self, rpc: str, request: bytes, metadata: Metadata, deadline: float | None, service: str = SERVICE
    ) -> bytes:
        """The worker's reply.

        Args:
            rpc: of the service.
            metadata: the caller's own.
            deadline: seconds; None: no limit.

        Raises:
            WorkerLost: the connection broke, and with it went every session of the worker.
            grpc.aio.AioRpcError: the worker refused.
        """
        if (method := self._methods.get((service, rpc))) is None:
            method = self._methods[service, rpc] = self._channel.unary_unary(f"/{service}/{rpc}")
        try:
            reply = await method(request, metadata=metadata, timeout=deadline)
        except grpc.aio.AioRpcError as error:
            if _has_details(error):
                self.silent = False
                raise
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            self.serving = False
            raise WorkerLost(f"worker {self.number}: {error.details()}") from error
        except asyncio.CancelledError:
            # A closed channel cancels its calls too; that is no cancellation of the waiting task.
            if self.serving or ((task := asyncio.current_task()) is not None and task.cancelling()):
                raise
            raise WorkerLost(f"worker {self.number} has ended") from None
        self.silent = False
        return reply

    async def metrics(self) -> str:
        """What the worker has counted, in Prometheus' format.

        Raises:
            grpc.aio.AioRpcError: it does not answer.
            asyncio.CancelledError: it has ended.
        """
        return (await self._get_metrics(b"", timeout=METRICS_SECONDS)).decode()

    async def until_gone(self) -> str:
        """Waits until the worker has ended or must be, and says how."""
        ended = asyncio.ensure_future(self.process.wait())
        silent_since: float | None = None
        while not ended.done():
            await asyncio.wait({ended}, timeout=PROBE_PAUSE)
            if ended.done() or not self.serving:
                break
            if await self._answers():
                silent_since = None
            else:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > UNRESPONSIVE_SECONDS:
                    ended.cancel()
                    return f"no answer for {UNRESPONSIVE_SECONDS:g} s"
        if not ended.done():
            ended.cancel()
            return "a broken connection"
        return describe_exit(ended.result())

    async def _answers(self) -> bool:
        notice = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._fell_silent)
        try:
            await self._check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self.serving = False
            # Any other refusal is an answer.
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return False
        finally:
            notice.cancel()
        self.silent = False
        return True

    def _fell_silent(self) -> None:
        self.silent = True

    def tell(self, number: signal.Signals) -> None:
        """Sends a signal, where there is still a process to send it to."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def end(self, grace_seconds: float) -> None:
        """Waits so long for the process to end, then kills it."""
        self.serving = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self.process.wait()
        if self.process.returncode is None:
            self.tell(signal.SIGKILL)
            await self.process.wait()
        await self._channel.close()


class Workers:
    """All workers of a front.

    Args:
        order: for the whole server.
        changed: called when a worker has come or gone.

    Attributes:
        known_tokens: asked for what is known of tokens, when a worker is replaced.
    """

    def __init__(self, order: Order, changed: Callable[[], None]) -> None:
        self._order = order
        self._changed = changed
        self.known_tokens: Callable[[], Mapping[str, Token] | None] = lambda: None
        self._stopping = False
        self._slots: dict[int, Worker] = {}
        self._ledger = ledger.make_memory(order.config.workers + 1)
        self._keepers: list[asyncio.Task[None]] = []
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def serving(self) -> Sequence[Worker]:
        return [worker for worker in self._slots.values() if worker.serving]

    @property
    def addresses(self) -> Sequence[str]:
        """Where each worker listens, or did and is likely to again."""
        return [worker.address for worker in self._slots.values()]

    def ledger_of_front(self) -> ledger.Ledger:
        """What the front counts of each token's quotas, where the workers see it."""
        processes = self._order.config.workers + 1
        return ledger.Ledger(os.dup(self._ledger), processes, processes)

    def by_tag(self) -> Mapping[bytes, Worker]:
        return {worker.tag: worker for worker in self.serving}

    async def start(self) -> None:
        """Starts all of them.

        Raises:
            CannotStart: one cannot serve; none is left.
        """
        numbers = range(1, self._order.config.workers + 1)
        config = replace(self._order.config, ledger=self._ledger)
        orders = [replace(self._order, number=number, config=share(config, number)) for number in numbers]
        places = asyncio.Semaphore(STARTED_AT_ONCE)

        async def start_in_turn(order: Order) -> Worker:
            async with places:
                return await start_worker(order)

        starting = [asyncio.ensure_future(start_in_turn(order)) for order in orders]
        try:
            workers = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            for result in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(result, Worker):
                    await result.end(0)
            raise
        self._slots = {worker.number: worker for worker in workers}
        self._keepers = [
            asyncio.ensure_future(self._keep(order, worker)) for order, worker in zip(orders, workers, strict=True)
        ]
        self._changed()

    async def broken(self) -> None:
        """Raises CannotStart, should it come to that no worker serves and none can be started."""
        await self._broken

    async def drain(self) -> None:
        """Has all workers drain, and waits for their end."""
        self._stopping = True
        grace = self._order.config.grace_seconds
        for worker in self._slots.values():
            worker.tell(signal.SIGTERM)
        await self._end(grace + 1.0)

    async def stop(self) -> None:
        """Ends all workers at once."""
        self._stopping = True
        await self._end(0.0)

    async def _end(self, grace_seconds: float) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.end(grace_seconds) for worker in self._slots.values()))
        self._broken.cancel()
        os.close(self._ledger)

    async def _keep(self, order: Order, worker: Worker) -> None:
        """Replaces the worker of one slot whenever it is gone."""
        failures = 0
        while True:
            how = await worker.until_gone()
            worker.serving = False
            self._changed()
            log.error(
                "worker %d ended with %s: its sessions are resumed by replay; starting another", order.number, how
            )
            await worker.end(self._order.config.grace_seconds if how == "a broken connection" else 0.0)
            ledger.forget(self._ledger, order.number)
            settled = time.monotonic() - worker.began > SETTLED_SECONDS
            failures = 0 if settled else failures + 1
            worker = await self._replace(order, worker, failures)
            self._slots[order.number] = worker
            log.warning("worker %d serves again on %s", order.number, worker.address)
            self._changed()

    async def _replace(self, order: Order, gone: Worker, failures: int) -> Worker:
        """Another worker, on the same port if possible, so that clients find it again."""
        port = gone.port
        while True:
            if failures:
                await asyncio.sleep(min(BACKOFF_MOST, BACKOFF_FIRST * 2**failures))
            try:
                known = self.known_tokens()
                return await start_worker(replace(order, config=replace(order.config, port=port, known_tokens=known)))
            except CannotStart as error:
                failures += 1
                port = order.config.port  # Any free one, where the operator gave none.
                log.error("worker %d cannot start (%d times in a row): %s", order.number, failures, error)  # noqa: TRY400
                if failures >= START_TRIES and not self.serving and not self._broken.done():
                    self._broken.set_exception(error)


async def start_worker(order: Order) -> Worker:
    """A worker that serves what the order says, under a tag of its own.

    Raises:
        CannotStart: why it does not.
    """
    with tempfile.TemporaryDirectory(prefix="turngym-", ignore_cleanup_errors=True) as folder:
        socket = f"{folder}/front"
        order = replace(order, config=replace(order.config, tag=secrets.token_hex(4), front_socket=socket))
        process = await asyncio.create_subprocess_exec(
            *command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL if sys.stderr is None else None,  # A worker needs one.
            env={**os.environ, "PYTHONPATH": python_path()},
            pass_fds=() if order.config.ledger is None else (order.config.ledger,),
            process_group=0,  # A terminal's Ctrl-C reaches the front, which tells its workers.
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                report = await _first_report(order, process)
                channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
                await channel.channel_ready()
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise CannotStart(f"worker {order.number} does not serve after {START_SECONDS:g} s") from error
            raise
    return Worker(order, process, channel, report)


async def _first_report(order: Order, process: asyncio.subprocess.Process) -> Report:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(order.write())
        await process.stdin.drain()
    line = await process.stdout.readline()
    if not line:
        status = describe_exit(await process.wait())
        raise CannotStart(f"worker {order.number} ended with {status} before it served")
    report = Report.read(line)
    if report.error:
        raise CannotStart(report.error)
    return report


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    """Whether the worker's service itself gave this answer."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
