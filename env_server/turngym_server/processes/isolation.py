"""Environments whose instances live in processes of their own, one each.

What hangs is killed at the step deadline, be it in a loop in C that keeps the interpreter's lock, and what crashes
takes nothing with it: the episode fails, and its neighbours notice nothing.

A process that somebody else killed, or that went with its template, is no failure of the environment's: see
`ProcessKilled`. What it was doing is done again in another one, or its session is gone and is resumed by replay.

Processes are made by a template, one for each environment, which imports it once and forks for every instance, so that
one costs milliseconds and shares its memory; see `turngym_server.processes.isolated_process`. They end with their
server.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from turngym.lifeline import describe_exit, python_path
from turngym_server.environment import (
    ActionResult,
    Determinism,
    Environment,
    EnvironmentSpec,
    Left,
    Limits,
    NoInstance,
    Options,
    Start,
)
from turngym_server.processes import frames
from turngym_server.rng import Rng
from turngym_server.sessions.threads import Overrun
from turngym_server.watching.logs import RaisedElsewhere

T = TypeVar("T")

COMMAND: Final = (sys.executable, "-P", "-m", "turngym_server.processes.isolated_process")
START_SECONDS: Final = 60.0
"""How long a template may take to import its environment."""
STATUS_SECONDS: Final = 5.0
"""How long a process that has closed its connection may take to end."""
NEW: Final = b"N"
KILL: Final = b"K"
FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
MOST_KILLED: Final = 3
"""So often in one place, being killed is what the environment does."""
PLACES: Final = 1_024
"""Of which is remembered how often processes were killed there."""
REQUEST_BYTES: Final = 9
"""A request to the template: NEW or KILL, and the instance's number in 8 bytes."""


class ProcessEnded(Exception):
    """The process of an isolated environment is gone. Says how it ended."""


class ProcessKilled(ProcessEnded):
    """The process was killed from outside: by an operator, by a kernel short of memory, or along with its template.

    An environment that crashes does so by other signals, or ends with a status. One that has itself killed, as by
    taking all memory there is, looks the same the first time; it is told by that it does so again and again at the
    same place (`Killings`, `retried`), and has failed then.
    """


class CannotIsolate(OSError):
    """The processes of an environment cannot be made. Says why."""


class Killings:
    """How often processes were killed from outside at one place of an episode, of the last places where any was.

    Belongs to one thread.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[Hashable, int] = OrderedDict()

    def excuses(self, place: Hashable) -> bool:
        """Notes that one was killed there. False: that has been so too often to be somebody else's doing."""
        count = self._counts.pop(place, 0) + 1
        self._counts[place] = count
        if len(self._counts) > PLACES:
            self._counts.popitem(last=False)
        return count < MOST_KILLED


def retried(work: Callable[[], T]) -> T:
    """What `work` returns, which makes processes of its own and is done again where one of them is killed.

    Raises:
        ProcessKilled: MOST_KILLED times one was.
        Exception: what `work` raises.
    """
    for _ in range(MOST_KILLED - 1):
        with contextlib.suppress(ProcessKilled):
            return work()
    return work()


class Isolator:
    """Makes isolated instances of one environment. May be used from any thread.

    Args:
        spec: with `isolation`.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        assert spec.isolation is not None
        self._spec = spec
        self._lock = threading.Lock()
        self._template: _Template | None = None

    def open(self) -> None:
        """Starts the template, so that it is there for the first instance.

        Raises:
            CannotIsolate: why it is not.
        """
        with self._lock:
            if self._template is not None and not self._template.runs:
                self._template.close()
                self._template = None
            if self._template is None:
                self._template = _Template(self._spec)

    def close(self) -> None:
        """Ends the template, and with it all instances."""
        with self._lock:
            if self._template is not None:
                self._template.close()
                self._template = None

    def make(self, options: Options) -> "IsolatedEnvironment":
        """An instance in a process of its own.

        Raises:
            CannotIsolate: there is no process for it.
            Exception: what the environment raises.
        """
        self.open()
        with self._lock:
            if self._template is None:
                raise CannotIsolate(f"{self._spec.id} is no longer served")
            process = self._template.fork()
        return IsolatedEnvironment(options, self, self._spec, process)


class IsolatedEnvironment(Environment[Options]):
    """Stands for an instance in another process. What that one raises is raised here, under the same name."""

    def __init__(self, options: Options, isolator: Isolator, spec: EnvironmentSpec, process: "_Process") -> None:
        super().__init__(options)
        self._isolator = isolator
        self._spec = spec
        self._process = process
        self._origin: tuple[str, object] | None = None
        self._played: list[tuple[str, Rng]] = []
        self._observation = ""
        self._call("make", options.model_dump_json())

    @classmethod
    def instructions(cls, options: Options, limits: Limits) -> str:
        """Never asked for: an environment's class knows its instructions without an instance."""
        raise NotImplementedError

    def reset(self, level: Rng) -> Start:
        return self._begin("reset", level.key)

    def load(self, level: str) -> Start:
        return self._begin("load", level)

    def _begin(self, name: str, level: object) -> Start:
        start = _start(self._call(name, level))
        self._origin = name, level
        self._played = []
        self._observation = start.observation
        return start

    def step(self, action: str, noise: Rng) -> ActionResult:
        result = ActionResult(**self._call("step", action, noise.key))
        self._played.append((action, noise))
        self._observation = result.observation
        return result

    def world(self) -> bytes:
        return bytes.fromhex(self._call("world"))

    def legal_actions(self) -> Sequence[str] | None:
        return self._call("legal_actions")

    def oracle(self, left: Left) -> Sequence[str] | None:
        return self._call("oracle", _left(left))

    def explain(self, left: Left) -> str:
        return self._call("explain", _left(left))

    def ceiling(self, left: Left) -> float | None:
        return self._call("ceiling", _left(left))

    def floor(self, left: Left) -> float | None:
        return self._call("floor", _left(left))

    def fork(self) -> Self:
        """A copy in a process of its own, which plays the same actions again: a process cannot be copied as it stands.

        Raises:
            RuntimeError: the environment does not promise the same bytes again, or breaks its promise.
        """
        if self._spec.determinism is not Determinism.BYTES:
            raise RuntimeError("an isolated episode is copied by playing it again, which needs determinism BYTES")
        try:
            return retried(self._copied)
        except ProcessKilled as error:
            raise RuntimeError("the copy's process was killed, again and again") from error

    def _copied(self) -> Self:
        assert self._origin is not None
        copy = self._isolator.make(self.options)
        try:
            copy._begin(*self._origin)
            for action, noise in self._played:
                copy.step(action, Rng(*noise.key))
            copy._check_same(self)
        except BaseException:
            copy.close()
            raise
        return copy  # pyright: ignore[reportReturnType]  # There are no subclasses.

    def _check_same(self, original: "IsolatedEnvironment") -> None:
        if self._observation != original._observation:
            raise RuntimeError("playing the same actions again led to another observation")

    def close(self) -> None:
        """Lets the instance free what it holds, and ends its process."""
        try:
            with contextlib.suppress(ProcessEnded):
                self._call("close")
        finally:
            self._process.kill()

    def _call(self, name: str, *arguments: object) -> Any:
        """What the instance's method returns.

        Raises:
            Overrun: it did not return by the step deadline; its process was killed.
            ProcessEnded: how; ProcessKilled: not by itself.
            Exception: what the method raised, or NoInstance.
        """
        answer = self._process.ask({"call": name, "arguments": arguments}, self._spec.step_deadline)
        if "value" in answer:
            return answer["value"]
        raise _raised(answer)


class _Template:
    """The process that an environment's processes are forked from."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        for kind in (spec.environment, spec.options):
            if reason := _reason_not_to_find(kind):
                raise CannotIsolate(f"{spec.id} cannot be isolated: {reason}")
        self._numbers = 0
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603
                COMMAND,
                stdin=theirs.fileno(),
                # A library's own threads would not survive the fork, and one processor is an instance's share.
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": python_path()},
                process_group=0,  # A terminal's Ctrl-C is for the server, which lets running turns finish.
            )
        if reason := self._reason_not_to_start(spec):
            self.close()
            raise CannotIsolate(f"{spec.id} cannot be isolated: {reason}")
        self._control.settimeout(START_SECONDS)

    def _reason_not_to_start(self, spec: EnvironmentSpec) -> str:
        """Why the template cannot serve; "": it can."""
        try:
            frames.write(self._control, _order(spec))
            answer = frames.read(self._control, START_SECONDS)
        except (OSError, ValueError) as error:
            return str(error)
        return "its process ended" if answer is None else answer["error"]

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> "_Process":
        """A new process. Raises CannotIsolate."""
        self._numbers += 1
        ours, theirs = socket.socketpair()
        status, status_out = os.pipe()
        process = _Process(self, self._numbers, ours, status)
        try:
            request = NEW + self._numbers.to_bytes(REQUEST_BYTES - 1, "big")
            socket.send_fds(self._control, [request], [theirs.fileno(), status_out])
        except OSError as error:
            raise CannotIsolate(f"the template is gone: {error}") from error
        finally:
            theirs.close()
            os.close(status_out)
        return process

    def kill(self, number: int) -> None:
        """Ends a process, if it is still there."""
        with contextlib.suppress(OSError):
            self._control.sendall(KILL + number.to_bytes(REQUEST_BYTES - 1, "big"))

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Process:
    """One instance's process, and the connection to it.

    Args:
        status: descriptor of a pipe that tells how the process ended.
    """

    def __init__(self, template: _Template, number: int, connection: socket.socket, status: int) -> None:
        self._template = template
        self._number = number
        self._connection = connection
        self._status = status
        self._ended: ProcessEnded | None = None
        self._free = weakref.finalize(self, _free, connection, status)

    def ask(self, request: object, seconds: float) -> Mapping[str, Any]:
        """The answer to a request.

        Raises:
            Overrun: it did not come in time; the process was killed.
            ProcessEnded: how; ProcessKilled: not by itself.
        """
        answer: Mapping[str, Any] | None = None
        try:
            self._connection.settimeout(seconds)
            frames.write(self._connection, request)
            answer = frames.read(self._connection, seconds)
        except TimeoutError as error:
            self.kill()
            raise Overrun(f"no answer after {seconds:g} s; the process was killed", goes_on=False) from error
        except ConnectionError:  # It was gone before it could be asked.
            pass
        except (OSError, ValueError) as error:
            self.kill()
            raise ProcessEnded(f"the connection to its process broke: {error}") from error
        if answer is None:
            self._ended = self._ended or self._how_it_ended()
            raise type(self._ended)(*self._ended.args)
        return answer

    def kill(self) -> None:
        """Ends the process. Idempotent."""
        if self._free.alive:
            self._template.kill(self._number)
            self._free()

    def _how_it_ended(self) -> ProcessEnded:
        readable, _, _ = select.select([self._status], [], [], STATUS_SECONDS)
        if not readable:
            return ProcessEnded("its process ended, or no longer speaks")
        text = os.read(self._status, 16)
        if not text:
            return ProcessKilled("its process ended along with the one that made it")
        kind = ProcessKilled if -int(text) in FROM_OUTSIDE else ProcessEnded
        return kind(f"its process ended with {describe_exit(int(text))}")


def _free(connection: socket.socket, status: int) -> None:
    connection.close()
    os.close(status)


def _order(spec: EnvironmentSpec) -> dict[str, object]:
    """What a template has to know; `isolated_process` reads it."""
    assert spec.isolation is not None
    return {
        "environment": [spec.environment.__module__, spec.environment.__qualname__],
        "options": [spec.options.__module__, spec.options.__qualname__],
        "memory_mebibytes": spec.isolation.memory_mebibytes,
        "cpu_seconds": spec.isolation.cpu_seconds,
    }


def _reason_not_to_find(kind: type) -> str:
    """Why another process cannot import a class; "": it may."""
    if "<locals>" in kind.__qualname__:
        return (
            f"class {kind.__module__}.{kind.__qualname__} is made inside a function, and a process of its own can only "
            "import what stands at the top of a module; move it there"
        )
    if kind.__module__ == "__main__":
        return (
            f"class {kind.__qualname__} is part of the program that was started, which a process of its own cannot "
            "import; move it to a module"
        )
    return ""


def _left(left: Left) -> Sequence[int]:
    return left.turns, left.actions, left.actions_per_turn


def _start(value: Mapping[str, Any]) -> Start:
    limits = value["limits"]
    return Start(value["observation"], value["metrics"], None if limits is None else Limits(**limits))


def _raised(answer: Mapping[str, Any]) -> Exception:
    """The exception that an answer tells of: of the same name, its traceback in a note."""
    if answer["no_instance"]:
        return NoInstance(answer["text"])
    error = type(answer["raised"], (RaisedElsewhere,), {"frames": answer["frames"]})(answer["text"])
    error.add_note(answer["traceback"])
    return error
