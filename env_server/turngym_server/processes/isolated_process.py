"""The processes of isolated environments: a template, and a fork of it for each instance.

The template imports the environment, then forks on request, tells how each fork ended, and kills those it is told to.
It runs nothing of the environment but its module, so it never hangs; it ends with its connection to the server, and its
forks with it. A fork leads a process group of its own, so that what the environment has started, such as a Java virtual
machine, is killed along with it.

Knows nothing of sessions. `turngym_server.processes.isolation` is the server's side.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from turngym.lifeline import die_with_parent
from turngym_server.environment import ActionResult, Environment, Left, NoInstance, Options, Start
from turngym_server.processes import frames
from turngym_server.processes.isolation import KILL, NEW, REQUEST_BYTES
from turngym_server.rng import Rng
from turngym_server.sessions.episode import MAX_LEGAL_ACTIONS, check_returned
from turngym_server.watching.logs import without_text

MEBIBYTE: Final = 1 << 20
DESCRIPTORS: Final = 2
"""That come with a request for a new instance: its connection, and the pipe that is told how it ended."""
MAX_TRACEBACK_CHARACTERS: Final = 20_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the template forks.

    Attributes:
        memory_mebibytes, cpu_seconds: bounds of each process; None: none.
    """

    environment: type[Environment[Any]]
    options: type[Options]
    memory_mebibytes: int | None
    cpu_seconds: int | None


def main() -> None:
    """Serves the connection that is this process's stdin, until it ends."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    wanted = frames.read(control)
    try:
        order = Order(**{**wanted, "environment": _find(wanted["environment"]), "options": _find(wanted["options"])})
    except Exception as error:
        frames.write(control, {"error": f"{type(error).__name__}: {error}"})
        return
    frames.write(control, {"error": ""})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # One descriptor is kept for each instance.
    gc.freeze()  # Forks share what is never collected.
    Template(control, order).run()


def _find(place: tuple[str, str]) -> Any:
    """The class of a module and qualified name."""
    module, name = place
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


class Template:
    """Forks, reaps and kills. Has one thread, and never waits for a fork."""

    def __init__(self, control: socket.socket, order: Order) -> None:
        self._control = control
        self._order = order
        self._numbers: dict[int, int] = {}
        self._status: dict[int, int] = {}
        self._lifeline, self._life = os.pipe()
        self._woken, self._wake = os.pipe()

    def run(self) -> None:
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if self._control.fileno() in ready and not self._obey():
                    break
        for pid in self._status:
            _kill_group(pid)

    def _obey(self) -> bool:
        """Does what the server wants; False: the server is gone."""
        try:
            request, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, DESCRIPTORS)
        except ConnectionError:
            return False
        if not request:
            return False
        number = int.from_bytes(request[1:], "big")
        if request[:1] == NEW and len(descriptors) == DESCRIPTORS:
            self._fork(number, *descriptors)
        elif request[:1] == NEW:  # This process may open no more; the server finds the connection closed.
            for descriptor in descriptors:
                os.close(descriptor)
        elif request[:1] == KILL and number in self._numbers:
            _kill_group(self._numbers[number])
        return True

    def _fork(self, number: int, connection: int, status: int) -> None:
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            print(f"no process for an isolated environment: {error}", file=sys.stderr, flush=True)
            os.close(connection)
            os.close(status)
            return
        if pid == 0:
            self._be_an_instance(template, connection, status)
        with contextlib.suppress(OSError):  # It has done so itself, or is gone already.
            os.setpgid(pid, pid)
        os.close(connection)
        self._numbers[number] = pid
        self._status[pid] = status

    def _reap(self) -> None:
        """Tells how forks ended."""
        while self._status:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            pid = ended.si_pid
            _kill_group(pid)  # What it has left behind; its id is nobody else's before it is waited for.
            _, status = os.waitpid(pid, 0)
            pipe = self._status.pop(pid)
            self._numbers = {number: other for number, other in self._numbers.items() if other != pid}
            with contextlib.suppress(OSError):  # Nobody asks any more.
                os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(pipe)

    def _be_an_instance(self, template: int, connection: int, status: int) -> NoReturn:
        """The fork's own life."""
        exit_status = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            for descriptor in (self._life, self._wake, self._woken, status, *self._status.values()):
                os.close(descriptor)
            die_with_parent(self._lifeline)
            if os.getppid() == template:
                _limit(self._order)
                serve(socket.socket(fileno=connection), self._order)
                exit_status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(exit_status)


def _limit(order: Order) -> None:
    if order.memory_mebibytes is not None:
        most = order.memory_mebibytes * MEBIBYTE
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    if order.cpu_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (order.cpu_seconds, order.cpu_seconds + 1))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def serve(connection: socket.socket, order: Order) -> None:
    """Answers calls to one instance until the connection ends."""
    instance = Instance(order)
    while (request := frames.read(connection)) is not None:
        try:
            answer: dict[str, object] = {"value": instance.answer(request)}
            frames.write(connection, answer)
        except ConnectionError:
            return
        except BaseException as error:  # Whatever it is, it is the environment's.
            frames.write(connection, _told(error))


def _told(error: BaseException) -> dict[str, object]:
    try:
        text = str(error)
    except Exception:  # The environment's too.
        text = ""
    return {
        "raised": type(error).__name__,
        "text": text,
        "traceback": _formatted(error),
        "frames": _formatted(without_text(error)),
        "no_instance": isinstance(error, NoInstance),
    }


def _formatted(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]


class Instance:
    """The environment, once it is made, and what can be asked of it; see `Environment`."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._environment: Environment[Any]
        self._answers: Mapping[str, Callable[..., object]] = {
            "make": self._make,
            "reset": self._reset,
            "load": self._load,
            "step": self._step,
            "world": lambda: self._environment.world().hex(),
            "legal_actions": self._legal_actions,
            "oracle": self._oracle,
            "explain": self._explain,
            "ceiling": self._ceiling,
            "floor": self._floor,
            "close": lambda: self._environment.close(),
        }

    def answer(self, request: Mapping[str, Any]) -> object:
        """What the asked method returns, as JSON can hold it."""
        return self._answers[request["call"]](*request["arguments"])

    def _make(self, options: str) -> None:
        self._environment = self._order.environment(self._order.options.model_validate_json(options))

    def _reset(self, level: tuple[int, int]) -> object:
        start = self._environment.reset(Rng(*level))
        check_returned(self._environment, "reset", start, Start)
        return _plain_start(start)

    def _load(self, level: str) -> object:
        start = self._environment.load(level)
        check_returned(self._environment, "load", start, Start)
        return _plain_start(start)

    def _step(self, action: str, noise: tuple[int, int]) -> object:
        result = self._environment.step(action, Rng(*noise))
        check_returned(self._environment, "step", result, ActionResult)
        return {
            "observation": result.observation,
            "reward": result.reward,
            "terminated": result.terminated,
            "success": result.success,
            "valid": result.valid,
            "reward_components": dict(result.reward_components),
            "metrics": dict(result.metrics),
        }

    def _legal_actions(self) -> Sequence[str] | None:
        actions = self._environment.legal_actions()
        # One more than is told, by which it is known that there are more.
        return None if actions is None else list(actions[: MAX_LEGAL_ACTIONS + 1])

    def _oracle(self, left: tuple[int, int, int]) -> Sequence[str] | None:
        actions = self._environment.oracle(Left(*left))
        return None if actions is None else list(actions)

    def _explain(self, left: tuple[int, int, int]) -> str:
        return self._environment.explain(Left(*left))

    def _ceiling(self, left: tuple[int, int, int]) -> float | None:
        return self._environment.ceiling(Left(*left))

    def _floor(self, left: tuple[int, int, int]) -> float | None:
        return self._environment.floor(Left(*left))


def _plain_start(start: Start) -> object:
    return {
        "observation": start.observation,
        "metrics": dict(start.metrics),
        "limits": None if start.limits is None else dataclasses.asdict(start.limits),
    }


if __name__ == "__main__":
    main()
