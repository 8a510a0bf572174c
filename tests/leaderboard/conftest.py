"""A real server in a process of its own, as an operator starts it."""

import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def _running_server(*arguments: str) -> Generator[str]:
    """Starts `env_server`, gives its address, and stops it by SIGTERM."""
    command = [sys.executable, "-m", "turngym_server.cli", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            address = re.search(r"listening on (\S+)", first)
            assert address, f"the server did not start: {first!r}"
            yield address[1]
        finally:
            process.terminate()
            process.wait(timeout=20)


@pytest.fixture(scope="session")
def running_server() -> Callable[..., AbstractContextManager[str]]:
    """Starts a server with these arguments: `with running_server("--env", "sokoban") as address`."""
    return _running_server


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    environments = ("--env", "sokoban", "--env", "frozen_lake", "--env", "bandit")
    with _running_server(*environments, "--splits", "train,validation,held_out,all") as address:
        yield address


@pytest.fixture(scope="session")
def server_without_held_out() -> Iterator[str]:
    with _running_server("--env", "sokoban") as address:
        yield address
