"""`env_server` as a process of its own, as an operator starts it."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Self


class ServerProcess:
    """A server that can be stopped, killed, and started again on its port. As `with`, it runs within.

    Args:
        arguments: of `env_server`.
        port: 0: a free one, which the server then keeps through its lives.
        path: a folder whose modules the server can import.
        environment: variables of its own.
    """

    def __init__(
        self, *arguments: str, port: int = 0, path: object = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = port
        self.process: subprocess.Popen[str]
        self._arguments = arguments
        searched = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": searched, **(environment or {})}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        command = [sys.executable, "-m", "turngym_server.cli", *self._arguments, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"listening on 127\.0\.0\.1:(\d+)", line)
        assert found, f"the server did not start; its first line was {line!r}"
        self.port = int(found[1])
        return self

    def stop(self) -> None:
        """Ends it by SIGTERM, if it runs."""
        with self.process:
            self.process.terminate()

    def kill(self) -> None:
        """Ends it by SIGKILL, if it runs."""
        with self.process:
            self.process.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
