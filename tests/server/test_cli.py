"""The command env_server, as a process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from serving import request_id

import turngym
from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc
from turngym_server.cli import parse_splits, route_options
from turngym_server.discovery import load_own
from turngym_server.environment import REGISTRY

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "turngym_server.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))}
THIRD_PARTY = "third_party_environment:ThirdParty"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def serve():
    processes: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> tuple[subprocess.Popen[str], re.Match[str]]:
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--port", "0"],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        processes.append(process)
        line = process.stdout.readline()
        match = re.fullmatch(r"env_server (\S+) listening on (\S+:\d+) serving (.+)\n", line)
        assert match, line
        assert match[1] == turngym.__version__
        return process, match

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_serves_and_stops(serve, tmp_path):
    levels = tmp_path / "levels"
    levels.write_text("4 5")
    process, line = serve(
        "--env",
        "bandit",
        "--env",
        THIRD_PARTY,
        "--option",
        f"levels={levels}",
        "--splits",
        "train",
        "--max-sessions",
        "3",
        "--lease-seconds",
        "9",
    )
    assert line[2].startswith("127.0.0.1:")
    assert line[3] == "bandit, third_party"
    with grpc.insecure_channel(line[2]) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        info = stub.GetServer(pb.GetServerRequest(), timeout=10)
        assert (info.max_sessions, info.lease_seconds) == (3, 9)
        item = pb.ResetItem(request_id=request_id(), environment_id="third_party", level_seed=1, split=pb.SPLIT_ALL)
        (outcome,) = stub.Reset(pb.ResetRequest(items=[item]), timeout=10).outcomes
        assert outcome.started.state.observation == "Target 5."
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1 +", r"SyntaxError: invalid syntax \(mine\.py, line 1\)"),
        ("\nraise RuntimeError('no licence')", r"RuntimeError: no licence \(\S+mine\.py, line 2\)"),
        ("raise SystemExit(0)", r"SystemExit: 0 \(\S+mine\.py, line 1\)"),
        ("class Odd(BaseException): ...\nraise Odd", r"Odd \(\S+mine\.py, line 2\)"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("", "module 'mine' has no attribute 'Class'"),
    ],
)
def test_a_module_of_the_working_directory_that_cannot_be_imported(tmp_path, text, told):
    (tmp_path / "mine.py").write_text(text)
    # As the installed command does, -P leaves the working directory out.
    command = [sys.executable, "-P", "-m", "turngym_server.cli", "--env", "mine:Class", "--port", "0"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.fullmatch(f"env_server: environment 'mine:Class' cannot be imported: {told}\n", result.stderr)


def test_a_port_that_is_taken(serve):
    _, line = serve("--env", "bandit")
    port = line[2].rsplit(":", 1)[1]
    result = run("--env", "bandit", "--port", port)
    assert (result.returncode, result.stdout) == (2, "")
    told = f"env_server: port {port} of 127.0.0.1 is in use; choose another --port, or 0 for a free one\n"
    assert result.stderr == told


@pytest.mark.parametrize(
    "arguments", [("--env", "bandit"), ("--env", "bandit", "--workers", "2"), ("--version",), ("--list",)]
)
def test_an_output_that_takes_nothing(arguments):
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [*COMMAND, *arguments, "--port", "0"],
            env=ENVIRONMENT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.stderr == "env_server: cannot write to stdout: No space left on device\n"
    assert result.returncode == 2


def test_an_output_that_nobody_reads():
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [*COMMAND, "--env", "bandit", "--port", "0"],
        env=ENVIRONMENT,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert result.stderr == "env_server: cannot write to stdout: Broken pipe\n"
    assert result.returncode == 2


def test_version_and_list():
    assert run("--version").stdout == f"{turngym.__version__}\n"
    listed = run("--list").stdout
    assert re.search(r"^bandit +1\.0 +One pull", listed, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--env"),
        (["--env", "bandit", "--workers", "3000"], "--workers 3000: expected at most"),
        (["--env", "bandt"], "did you mean 'bandit'?"),
        (["--env", "no_such_package.module:Class"], "no_such_package"),
        (["--env", "third_party_environment:Nothing"], "Nothing"),
        (["--env", "sample_environments:Dice"], "@register"),
        (["--env", "../etc:passwd"], "no environment"),
        (["--env", "bandit", "--splits", "trian"], "did you mean 'train'? Known: train, validation, held_out, all"),
        (["--env", "bandit", "--splits", "x"], "unknown split 'x'. Known: train, validation, held_out, all"),
        (["--env", "bandit", "--splits", ""], "no split to serve; expected some of train, validation, held_out, all"),
        (["--env", THIRD_PARTY, "--option", "level=x"], "did you mean 'levels'?"),
        (["--env", THIRD_PARTY, "--option", "levels"], "key=value"),
        (["--env", THIRD_PARTY, "--option", "faces=3"], "clients set it"),
        (["--env", THIRD_PARTY, "--option", "levels=/no/such/file"], "/no/such/file"),
        (["--env", "sokoban", "--tokens", "/no/file"], "/no/file: No such file or directory"),
        (["--env", "sokoban", "--seal-key", "/no/file"], "/no/file: No such file or directory"),
        (["--env", "sokoban", "--lease-seconds", "inf"], "'--lease-seconds'"),
        (["--env", "sokoban", "--option", "levels=/no/file"], "/no/file: cannot be read: No such file or directory"),
        (["--env", "bandit", "--port", "70000"], "--port"),
        (
            ["--env", "bandit", "--insecure", "--host", "192.0.2.1"],
            "192.0.2.1 is no address of this machine; give another --host",
        ),
        (
            ["--env", "bandit", "--insecure", "--host", "nowhere.invalid"],
            "'nowhere.invalid' names no address of this machine",
        ),
        (["--env", "bandit", "--prot", "1"], "--prot"),
    ],
)
def test_wrong_arguments(arguments, words):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(r"env_server: .*\n", result.stderr), result.stderr
    assert words in result.stderr


def test_a_malformed_level_file_is_named_with_its_line(tmp_path):
    levels = tmp_path / "levels"
    levels.write_text("4\nfive\n")
    result = run("--env", THIRD_PARTY, "--option", f"levels={levels}")
    assert result.returncode == 2
    assert f"{levels}:2: expected a whole number, got 'five'" in result.stderr


def test_options_are_routed():
    load_own()
    specs = [REGISTRY["sokoban"], REGISTRY["bandit"]]
    assert route_options(["levels=a=b"], specs) == {"sokoban": {"levels": "a=b"}, "bandit": {}}
    assert route_options(["sokoban.levels=3"], specs) == {"sokoban": {"levels": 3}, "bandit": {}}
    both = [REGISTRY["sokoban"], REGISTRY["sokoban_large"]]
    with pytest.raises(ValueError, match=r"sokoban\.levels or sokoban_large\.levels"):
        route_options(["levels=x"], both)
    assert route_options(["sokoban_large.levels=x"], both)["sokoban_large"] == {"levels": "x"}


def test_splits():
    assert {split.value for split in parse_splits("train, held_out")} == {"train", "held_out"}
