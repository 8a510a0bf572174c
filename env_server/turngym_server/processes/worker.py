"""A worker process of `env_server --workers`; `turngym_server.processes.workers` starts it and says what it gets and
answers.
"""

import asyncio
import os
import sys
from typing import TextIO

from turngym.command import USAGE_ERROR
from turngym.lifeline import die_with_parent
from turngym_server import lifecycle
from turngym_server.discovery import find_specs
from turngym_server.host import EnvironmentHost
from turngym_server.processes.workers import Order, Report
from turngym_server.server import Server
from turngym_server.watching import logs


def main() -> None:
    """Serves until it is told to end, or its parent ends."""
    stdout = _take_stdout()
    order = Order.read(sys.stdin.buffer)
    die_with_parent(sys.stdin.fileno())
    logs.configure(order.log_level, order.log_format, order.number)
    try:
        specs = find_specs(order.environments, order.isolated)
        hosts = [EnvironmentHost(spec, order.options[spec.id]) for spec in specs]
        server = Server(hosts, order.config)
        asyncio.run(lifecycle.run(server, lambda: _say(stdout, _report(server))))
    except (OSError, ValueError) as error:
        _say(stdout, Report(error=str(error)))
        raise SystemExit(USAGE_ERROR) from None


def _take_stdout() -> TextIO:
    """The pipe to the front; what environments print goes to stderr from now on."""
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stdout


def _report(server: Server) -> Report:
    return Report(address=server.address, port=server.port)


def _say(stdout: TextIO, report: Report) -> None:
    stdout.write(report.write())
    stdout.flush()


if __name__ == "__main__":
    main()
