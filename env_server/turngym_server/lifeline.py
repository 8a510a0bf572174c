"""Child processes that do not outlive their parent, whatever it dies of.

The parent keeps one end of a pipe that is the child's stdin. Knows nothing of what the processes do.
"""

import ctypes
import os
import signal
import sys
import threading
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
LAST_BREATH: Final = 1
"""Exit status of a process that ended because its parent had."""


def die_with_parent(stdin: int) -> None:
    """Ends this process when the parent is gone. Call it early, and after everything has been read from `stdin`.

    A thread waits for the end of the pipe. Where something keeps the interpreter's lock it cannot run, so on Linux the
    kernel is asked for SIGKILL too, which comes when the parent's thread that started this process ends.
    """
    threading.Thread(target=_wait_for_the_end, args=(stdin,), name="turngym-lifeline", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_the_end(stdin: int) -> None:
    while os.read(stdin, 4096):
        pass
    os._exit(LAST_BREATH)


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
