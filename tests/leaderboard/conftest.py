"""Real servers in processes of their own, shared by all tests."""

from collections.abc import Iterator

import pytest
from server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    environments = ("--env", "sokoban", "--env", "frozen_lake", "--env", "bandit")
    with ServerProcess(*environments, "--splits", "train,validation,held_out,all") as running:
        yield running.address


@pytest.fixture(scope="session")
def server_without_held_out() -> Iterator[str]:
    with ServerProcess("--env", "sokoban") as running:
        yield running.address
