"""gRPC is told how to wait before it is imported, and nobody else is."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from turngym.polling import FORK_SUPPORT, KNOWN_MINORS, SWITCHES, WITHOUT_EVENT_ENGINE

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only told on Linux")

WATCH = f"""
import os, sys

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print("at import:", os.environ.get({SWITCHES!r}))

sys.meta_path.insert(0, Watch())
"""


def told(code: str, **variables: str) -> list[str]:
    """What a process that runs `code` says, on stderr too."""
    environment = {
        name: value for name, value in os.environ.items() if name not in (SWITCHES, FORK_SUPPORT, "GRPC_VERBOSITY")
    }
    done = subprocess.run(
        [sys.executable, "-c", WATCH + code],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("module", ["turngym_client", "turngym_server.cli", "turngym_server.processes.worker"])
def test_grpc_is_told_before_it_is_imported(module: str):
    said = told(f"import {module}; print('afterwards:', os.environ.get({SWITCHES!r}))")
    assert said == [f"at import: {WITHOUT_EVENT_ENGINE}", "afterwards: None"]


def test_the_installed_grpc_knows_the_switches():
    """It would say so on stderr. A release that is not known here is to be tried, and KNOWN_MINORS to be extended."""
    major, minor, *_ = importlib.metadata.version("grpcio").split(".")
    assert major == "1"
    assert int(minor) in KNOWN_MINORS
    channel = "import turngym, grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    assert told(channel) == [f"at import: {WITHOUT_EVENT_ENGINE}"]
    complaints = told(channel, **{SWITCHES: "-no_such_switch"})
    assert any("no_such_switch" in line for line in complaints)


@pytest.mark.parametrize("own", ["", "-event_engine_dns_non_client_channel"])
def test_whoever_sets_switches_has_them_as_they_are(own: str):
    said = told("import turngym_client", **{SWITCHES: own})
    assert said[0] == f"at import: {own}"


def test_a_grpc_that_was_imported_before_is_left_alone():
    assert told("import grpc, turngym_client") == ["at import: None"]


def test_an_unknown_release_is_left_alone():
    code = "import importlib.metadata; importlib.metadata.version = lambda name: '2.0.0'; import turngym_client"
    assert told(code) == ["at import: None"]


def test_whoever_wants_grpc_to_support_forks_has_its_event_engine():
    assert told("import turngym_client", **{FORK_SUPPORT: "1"}) == ["at import: None"]
