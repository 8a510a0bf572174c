"""A process of ours, whose signals, memory and log matter: for scripts that do more to a server than load it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

HERE: Final = Path(__file__).parent


class Child:
    """A process of ours whose stderr goes to a file; `address` where its first line names one."""

    def __init__(self, command: Sequence[str], stderr: IO[bytes], environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def address(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if (found := re.search(r"listening on (\S+:\d+)", line)) is None:
            raise RuntimeError(f"{self.process.args} did not start; its first line was {line!r}")
        return found[1]

    def tell(self, line: str) -> None:
        """Says a line and waits for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer == "ok\n", answer

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals) -> None:
        """Sends a signal that ends it, and waits."""
        self.send(number)
        self.process.communicate()

    def status(self, name: str) -> int:
        """A number of /proc/PID/status, such as VmRSS or VmHWM (KiB), or Threads."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
        assert found, f"no {name} in {text}"
        return int(found[1])
