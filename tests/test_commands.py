"""What every command does with wrong arguments: one line, which names the help, and exit status 2."""

import subprocess
import sys

import pytest

MODULES = {
    "env_server": "turngym_server.cli",
    "env_server_token": "turngym_server.access.new_token",
    "env_server_seal_key": "turngym_server.access.new_seal_key",
    "turngym": "turngym_server.watching.top",
    "trainer": "turngym_trainer.cli",
    "leaderboard": "turngym_leaderboard.cli",
}


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", MODULES[name], *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", MODULES)
def test_an_unknown_option(name: str) -> None:
    done = run(name, "--xyzzy")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{name}: No such option: --xyzzy (see {name} --help)\n"


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("turngym", ["top"], "turngym: Missing argument 'address' (see turngym top --help)\n"),
        ("trainer", ["eval"], "trainer: Missing argument 'checkpoint' (see trainer eval --help)\n"),
        ("leaderboard", ["verify"], "leaderboard: Missing argument 'record' (see leaderboard verify --help)\n"),
        (
            "leaderboard",
            ["shwo"],
            "leaderboard: No such command 'shwo'. Did you mean 'show'? (see leaderboard",
        ),
        ("turngym", ["top", "127.0.0.1:9", "--interval", "soon"], "turngym: Invalid value for '--interval': "),
    ],
)
def test_what_is_missing_or_wrong(name: str, arguments: list[str], told: str) -> None:
    done = run(name, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(told)
    assert done.stderr.endswith(" --help)\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["turngym", "trainer", "leaderboard"])
def test_no_arguments_are_answered_by_the_help(name: str) -> None:
    done = run(name)
    assert done.returncode == 2
    assert f"Usage: {name} [OPTIONS] COMMAND" in done.stdout + done.stderr
    assert "--help" in done.stdout + done.stderr


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["top", "127.0.0.1:9", "--once"], 1)])
def test_a_commands_own_status_is_the_process_s(arguments: list[str], status: int) -> None:
    assert run("turngym", *arguments).returncode == status
