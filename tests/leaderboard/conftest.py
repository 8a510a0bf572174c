"""Real servers in processes of their own, shared by all tests."""

from collections.abc import Iterator

import postgres_cluster
import pytest
from server_process import ServerProcess

from turngym_leaderboard.store import Store, open_store


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    environments = ("--env", "sokoban", "--env", "frozen_lake", "--env", "bandit")
    with ServerProcess(*environments, "--splits", "train,validation,held_out,all") as running:
        yield running.address


@pytest.fixture(scope="session")
def server_without_held_out() -> Iterator[str]:
    with ServerProcess("--env", "sokoban") as running:
        yield running.address


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    if reason := postgres_cluster.missing():
        pytest.skip(reason)
    with postgres_cluster.cluster() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request) -> str:
    """Of an empty database: "" for SQLite in the board's folder."""
    if request.param == "sqlite":
        return ""
    url = request.getfixturevalue("postgres")
    postgres_cluster.empty(url)
    return url


@pytest.fixture
def store(database_url, tmp_path) -> Iterator[Store]:
    with open_store(tmp_path / "data", database_url) as opened:
        yield opened
