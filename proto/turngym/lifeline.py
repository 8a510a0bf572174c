"""Child processes that do not outlive their parent, whatever it dies of.

The parent keeps one end of a pipe. Run as a module, with the parent's process id, a module's name and that module's
arguments, it runs the module so that it ends with its parent from the first moment, long before all is imported. Knows
nothing of what the processes do.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
LAST_BREATH: Final = 1
"""Exit status of a process that ended because its parent had."""


def die_with_parent(pipe: int) -> None:
    """Ends this process when the parent, which holds the other end of `pipe`, is gone. Nobody else may read the pipe.

    A thread waits for the end of the pipe. Where something keeps the interpreter's lock it cannot run, so the kernel is
    asked too.
    """
    kill_with_parent()
    threading.Thread(target=_wait_for_the_end, args=(pipe,), name="turngym-lifeline", daemon=True).start()


def kill_with_parent() -> None:
    """On Linux, has this process killed when the thread of the parent that started it ends; elsewhere, does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_the_end(pipe: int) -> None:
    while os.read(pipe, 4096):
        pass
    os._exit(LAST_BREATH)


def run_with_parent(parent: int, module: str) -> None:
    """Runs a module as this process, which ends when the process `parent` does, or has."""
    kill_with_parent()
    if os.getppid() != parent:  # It had ended before the kernel was asked.
        os._exit(LAST_BREATH)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def python_path() -> str:
    """PYTHONPATH with which a child imports what this process imports."""
    return os.pathsep.join(sys.path)


def describe_exit(status: int) -> str:
    """How a process ended, in words: `signal SIGKILL`, `status 3`."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


if __name__ == "__main__":
    _, started_by, run, *arguments = sys.argv
    sys.argv[1:] = arguments
    run_with_parent(int(started_by), run)
