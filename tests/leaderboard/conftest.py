"""Real servers in processes of their own, shared by all tests."""

from collections.abc import Iterator
from pathlib import Path

import postgres_cluster
import pytest
from playing import Ground, playing
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
def played_server() -> Iterator[str]:
    """One that the playground stands before; it holds nothing out for this caller."""
    environments = ("--env", "sokoban", "--env", "hostile_environment:Hostile")
    with ServerProcess(*environments, "--splits", "train,validation", path=Path(__file__).parent.parent) as running:
        yield running.address


@pytest.fixture(scope="session")
def ground(played_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with playing(played_server, tmp_path_factory.mktemp("ground") / "kept.jsonl") as running:
        yield running


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
