"""The server's log on stderr: one line an event, as text or as JSON, which nobody waits for.

What is known of an event is handed to the logger as `extra=Event(…)`. As JSON each line holds time, level, logger and
message, an exception's traceback where there is one, those fields, and where calls are traced the `trace_id` and
`span_id` of the one it is about, as OpenTelemetry names them; as text it holds the message, which says the same in
words. No field holds an action, an observation or a credential, though an environment's own exception may quote
what it was playing. Of a sealed session's exceptions only types and frames are logged: see `without_text`.

A full disk, a closed stderr or a reader that sleeps must not hold up a turn: lines are written by a thread, and what
cannot be written is dropped and counted.
"""

import contextlib
import datetime
import enum
import io
import json
import logging
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from queue import Full, Queue
from typing import Final, TypedDict

MAX_WAITING_LINES: Final = 10_000
"""Lines that wait to be written; further ones are dropped."""
CLOSING_SECONDS: Final = 1.0
"""How long waiting lines have at the end."""
GRPC_LOGGER: Final = "grpc._cython.cygrpc"
_HUNG_UP: Final = re.compile(r'Failed "execute_batch"|Failed grpc_call_start_batch: .*TOO_MANY_OPERATIONS')
"""What gRPC says of operations that failed because their call was over, the latter of a stream's end whose caller had
not taken all answers by its deadline; its other failures begin otherwise."""
_NO_TEXT: Final = "Invalid encoding on"
MAX_TOLD: Final = 200
"""Characters of what gRPC quotes."""
_CONTROL_CHARACTERS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


class LogFormat(enum.Enum):
    TEXT = "text"
    JSON = "json"


class Noise(TypedDict):
    """One noise segment; the seed in decimal digits."""

    from_step: int
    noise_seed: str


class Event(TypedDict, total=False):
    """What may be known of an event. Seeds are decimal digits: JSON's readers round 64-bit numbers.

    Attributes:
        sealed: names the sealed seed, in the place of both seeds.
        step: index of the turn, or of the last one played.
        replayed: turns that a resumption plays again.
        origin: how a session began. departure: how it ended.
        items: of the call. failed: how many of them failed, by reason. reason: of the first failure.
        session: where items failed, the one that the first of them named, which need not exist.
    """

    rpc: str
    caller: str
    reason: str
    items: int
    failed: Mapping[str, int]
    session: str
    environment: str
    version: str
    options: str
    split: str
    level_seed: str
    noise: Sequence[Noise]
    sealed: str
    step: int
    replayed: int
    origin: str
    departure: str


class SpanIds(TypedDict):
    """A call's span; lower-case hexadecimal digits, 32 and 16."""

    trace_id: str
    span_id: str


CALL_SPAN: Final[ContextVar[SpanIds | None]] = ContextVar("turngym-call-span", default=None)
"""The span of the call that is being answered, or that began what is going on; None: it is not traced."""


class TextFormatter(logging.Formatter):
    """Lines for people. What a client wrote cannot begin a line of its own."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {f'worker {worker} ' if worker else ''}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROL_CHARACTERS)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._worker:
            line["worker"] = self._worker
        line.update((name, getattr(record, name)) for name in Event.__annotations__ if hasattr(record, name))
        if (span := CALL_SPAN.get()) is not None:  # Of whoever logs: handlers format where they are called.
            line.update(span)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str)


class BackgroundHandler(logging.Handler):
    """Writes lines in a thread of its own.

    Args:
        stream: unbuffered, so that a line that could not be written is not tried again at exit; None: nowhere.
        capacity: lines that may wait.
    """

    def __init__(self, stream: io.RawIOBase | None, capacity: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines: Queue[bytes | None] = Queue(capacity)
        self._refused = 0
        self._lost = 0
        self._cut = False
        self._thread = threading.Thread(target=self._work, name="turngym-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that were not written."""
        return self._refused + self._lost

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self._refused += 1

    def close(self) -> None:
        """Writes what waits, if that does not take long."""
        with contextlib.suppress(Full):
            self._lines.put_nowait(None)
            self._thread.join(CLOSING_SECONDS)
        super().close()

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except (OSError, ValueError):  # ValueError: the stream has been closed.
                self._lost += 1

    def _write(self, line: bytes) -> None:
        if self._stream is None:
            raise OSError("there is no stderr")
        # A full disk takes the beginning of a line; what follows once there is room begins one of its own.
        left = memoryview(b"\n" + line if self._cut else line)
        while left:
            written = self._stream.write(left)
            if not written:
                raise BlockingIOError("stderr takes nothing now")
            left = left[written:]
            self._cut = bool(left)


class RaisedElsewhere(Exception):
    """Base of what stands for an exception of another process.

    Attributes:
        frames: its traceback there without anybody's text, as `without_text` leaves it.
    """

    frames = ""


class _Unsaid(Exception):
    """Base of what stands in the log for an exception whose text is not shown."""


def without_text(error: BaseException) -> BaseException:
    """Stands for an exception in the log: of its type's name, with its frames, and without its text and notes.

    One raised in another process has its frames there too. So do those that it came of, as causes and contexts.
    """
    stands: dict[int, BaseException] = {id(error): _unsaid(error)}
    waiting = [error]
    while waiting:
        told = waiting.pop()
        stand = stands[id(told)]
        for came_of in (told.__cause__, told.__context__):
            if came_of is not None and id(came_of) not in stands:
                stands[id(came_of)] = _unsaid(came_of)
                waiting.append(came_of)
        stand.__cause__ = None if told.__cause__ is None else stands[id(told.__cause__)]
        stand.__context__ = None if told.__context__ is None else stands[id(told.__context__)]
        stand.__suppress_context__ = told.__suppress_context__  # Last: setting a cause sets it too.
    return stands[id(error)]


def _unsaid(error: BaseException) -> BaseException:
    kind = type(error)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand = type(kind.__name__, (_Unsaid,), named)().with_traceback(error.__traceback__)
    if isinstance(error, RaisedElsewhere) and error.frames:
        stand.add_note(error.frames)
    return stand


def calm(record: logging.LogRecord) -> bool:
    """Makes a line at debug of each of gRPC's tracebacks that any caller can provoke; leaves all else alone.

    These are about callers that hung up before their reply, as who is cut off or runs out of time does, and about
    metadata that is no text.

    Returns:
        Whether the record is still logged.
    """
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ == "ExecuteBatchError" and _HUNG_UP.match(str(error)):
        record.msg, record.args = f"a caller hung up before its reply: {record.getMessage()}", None
    elif isinstance(error, UnicodeDecodeError) and str(record.msg).startswith(_NO_TEXT):
        record.msg, record.args = f"a caller's metadata is no text: {record.getMessage()[:MAX_TOLD]}", None
    else:
        return True
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def configure(level: str, format: LogFormat, worker: int = 0) -> None:
    """Sends the process's log to stderr.

    Args:
        worker: number of this process among several workers; 0: it is no worker.
    """
    stream = None
    if sys.stderr is not None:  # Else the number of the stderr that is not there may be a socket's.
        stream = io.FileIO(sys.stderr.fileno(), "wb", closefd=False)
    handler = BackgroundHandler(stream)
    handler.setFormatter(JsonFormatter(worker) if format is LogFormat.JSON else TextFormatter(worker))
    logging.raiseExceptions = False
    logging.basicConfig(handlers=[handler], level=level)
    logging.getLogger(GRPC_LOGGER).addFilter(calm)
    # At debug gRPC tells of every event loop that it finds.
    logging.getLogger("grpc").setLevel(max(logging.WARNING, logging.getLogger().level))


def dropped() -> int:
    """Records of this process that were not written."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, BackgroundHandler))
