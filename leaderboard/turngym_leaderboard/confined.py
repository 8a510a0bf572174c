"""Processes for what a stranger sent: they see no password of the board's, cannot use the network through
transformers, take no more memory than they may, and end with the process that started them, whatever it dies of.

Knows nothing of what they do.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from turngym.lifeline import python_path

_INHERITED: Final = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LANG")
_LARGEST_FILE: Final = 1 << 20
"""Bytes of any file that such a process may write; it has no reason to write one."""
STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""What ends whole groups of processes: a terminal, or whoever runs the service. No process here sends it to itself."""
_KILLED_FIRST: Final = "1000"
"""The kernel's words for: where memory runs out, this process goes before any other."""


def start(
    module: str,
    arguments: Sequence[str],
    home: str,
    *,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Runs one of our modules. It ends with the calling thread.

    Args:
        home: an empty folder.
        pass_fds: what it inherits beside its streams; `stdout`, `stderr`: as `subprocess.Popen` takes them.
    """
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    own = {"HOME": home, "HF_HOME": home, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": python_path()}
    command = [sys.executable, "-P", "-m", "turngym.lifeline", str(os.getpid()), module, *arguments]
    return subprocess.Popen(  # noqa: S603 — our own module
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        env={**kept, **offline, **own},
    )


def bound_this_process(*, memory: int = 0, seconds: int = 0) -> None:
    """Bounds this process. What goes beyond fails with MemoryError, or is ended by SIGXCPU.

    Args:
        memory: bytes that it may take for itself, mapped files excepted; 0: as it is.
        seconds: of processor time; 0: as it is.
    """
    bounds = {resource.RLIMIT_DATA: memory, resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: _LARGEST_FILE}
    for kind, most in bounds.items():
        if most:
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # Only Linux has it.
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST, encoding="ascii")


def without_place(text: str, folder: Path) -> str:
    """A library's words about a folder, without where it lies on this machine, which is nobody's business."""
    for place in (str(folder.resolve()), str(folder)):
        text = text.replace(place, "the checkpoint")
    return text
