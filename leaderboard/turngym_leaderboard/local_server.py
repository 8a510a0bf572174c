"""`env_server` and other servers of ours as processes of this machine, for programs that need one while they run.

Knows nothing of what is served.
"""

import re
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

_STARTS_WITHIN: Final = 60.0
_STOPS_WITHIN: Final = 20.0


class ServerFailed(Exception):
    """The server did not come up. The message says where to look."""


def local_server(arguments: Sequence[str], log: Path) -> AbstractContextManager[str]:
    """An `env_server` on a free port of the loopback interface; see `local_process`.

    Args:
        arguments: of `env_server`, but the port.
        log: where it writes what it says.
    """
    return local_process([sys.executable, "-m", "turngym_server.cli", *arguments, "--port", "0"], log)


@contextmanager
def local_process(command: Sequence[str], log: Path) -> Generator[str]:
    """A server that says where it listens; gives its address, and stops it by SIGTERM, then SIGKILL.

    Raises:
        ServerFailed: it ended, or did not listen within a minute.
    """
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)  # noqa: S603 — our own command
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(_STOPS_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Waits for the line in which the server says where it listens."""
    ends = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < ends:
        if found := re.search(r"listening on (\S+)", log.read_text(encoding="utf-8")):
            return found[1]
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with exit code {process.returncode} before it listened; see {log}")
        time.sleep(0.1)
    raise ServerFailed(f"the server did not listen within {_STARTS_WITHIN:g} s; see {log}")
