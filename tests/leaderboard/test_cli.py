"""The command, as a user runs it."""

import json
import os
import socket
import subprocess
import sys

import pytest
from server_process import ServerProcess
from typer.testing import CliRunner

from turngym_client import Split, connect
from turngym_leaderboard import record as records
from turngym_leaderboard.cli import app
from turngym_leaderboard.evaluation import CannotEvaluate, evaluate
from turngym_leaderboard.protocol import Protocol
from turngym_server.access.tokens import digest_of, new_token


def leaderboard(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "turngym_leaderboard.cli", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "140", "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )


def test_evaluate_show_and_verify(server, tmp_path):
    asked = ("--env", "frozen_lake", "--server", server, "--instances", "12", "--option", "slip=0", "--seed", "5")
    done = leaderboard("evaluate", "--agent", "random", *asked, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [folder] = records.find(tmp_path)
    kept = records.load(folder)
    assert kept.protocol.options == {"slip": 0}
    assert kept.protocol.seed == 5
    assert json.loads((folder / records.RECORD).read_text())["rows"][0]["episodes"][0]["level_seed"].isdecimal()
    for expected in ("12 distinct worlds of split held_out", "random", "oracle", str(folder / records.TRAJECTORIES)):
        assert expected in done.stdout
    shown = leaderboard("show", str(tmp_path))
    assert shown.returncode == 0
    assert "12 distinct worlds of split held_out" in shown.stdout
    verified = leaderboard("verify", str(folder), "--server", server)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "24 episodes were played again" in verified.stdout
    assert "trajectories.jsonl is as it was saved" in verified.stdout

    trajectories = folder / records.TRAJECTORIES
    trajectories.write_bytes(trajectories.read_bytes()[:-1])
    cut = leaderboard("verify", str(folder / records.RECORD), "--server", server)
    assert cut.returncode == 1
    assert f"{trajectories} was truncated" in cut.stdout
    assert "1 difference over 24 episodes" in cut.stdout

    text = (folder / records.RECORD).read_text().replace(kept.rows[1].episodes[0].digest, "00" * 32)
    (folder / records.RECORD).write_text(text)
    refused = leaderboard("verify", str(folder), "--server", server)
    assert refused.returncode == 1
    assert "does not stand" in refused.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent", "random", "--env", "sokobon"], "sokoban"),
        (
            ["--agent", "randm", "--env", "sokoban"],
            "expected [NAME=]checkpoint:PATH, [NAME=]endpoint:URL, random or oracle",
        ),
        (["--agent", "random", "--env", "sokoban", "--option", "size"], "expected key=value"),
        (["--agent", "random", "--env", "sokoban", "--option", "siz=7"], "siz"),
        (["--agent", "random", "--env", "sokoban", "--temperature", "0"], "--greedy"),
        (["--agent", "random", "--env", "bandit"], "too few worlds"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(server, tmp_path, arguments, message):
    done = leaderboard("evaluate", *arguments, "--server", server, "--out", str(tmp_path))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_played(server):
    done = leaderboard("evaluate", "--agent", "random", "--env", "sokoban", "--server", server, "--out", "/proc/x")
    assert done.returncode == 2
    assert done.stderr.startswith("leaderboard: /proc/x cannot be written: ")
    assert "512" not in done.stdout


def test_a_server_without_held_out_levels_is_told_how_to_be_started(server_without_held_out):
    done = leaderboard("evaluate", "--agent", "random", "--env", "sokoban", "--server", server_without_held_out)
    assert done.returncode == 2
    assert "does not serve split held_out of sokoban" in done.stderr
    assert "start it again as it was started, but with --splits train,validation,held_out" in done.stderr


def test_show_without_records(tmp_path):
    done = leaderboard("show", str(tmp_path))
    assert done.returncode == 2
    assert "holds no records" in done.stderr


def invoke(*arguments):
    """The command in this process, where nothing but its words matters."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "nan"], "temperature nan must be over 0 and finite"),
        (["--temperature", "inf"], "temperature inf must be over 0 and finite"),
        (["--temperature", "-1"], "temperature -1 must be over 0 and finite"),
        (["--turns", str(1 << 64)], "max_turns"),
        (["--option", "slip=NaN"], "--option slip: NaN is no number of JSON"),
        (["--option", "slip=[-Infinity]"], "--option slip: -Infinity is no number of JSON"),
        (["--server", "localhost"], "expected host:port, got 'localhost'"),
        (["--server", "localhost:port"], "expected host:port, got 'localhost:port'"),
    ],
)
def test_what_no_server_need_be_asked_for(tmp_path, arguments, message):
    asked = ("evaluate", "--agent", "random", "--env", "sokoban", "--out", str(tmp_path))
    result = invoke(*asked, *(() if "--server" in arguments else ("--server", "localhost:1")), *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def kept(server, tmp_path_factory):
    """The folder of a small record."""
    with connect(server) as client:
        evaluation = evaluate(client, Protocol(environment="frozen_lake", split=Split.HELD_OUT, instances=2), [])
    return records.save(evaluation.record, evaluation.trajectories, tmp_path_factory.mktemp("kept"))


def spoil(tree):
    tree["protocol"]["temperature"] = None


def tell_no_folder(tree):
    tree["rows"][0]["description"] = {"kind": "checkpoint"}


def ask_for_what_is_no_protocol(tree):
    tree["protocol"]["split"] = "secret"


def ask_for_no_temperature(tree):
    tree["protocol"]["temperature"] = -1.0


def hold_no_options(tree):
    tree["environment"]["options_json"] = "{"


def hold_no_rows(tree):
    tree["rows"] = []


@pytest.mark.parametrize(
    "harm",
    [spoil, tell_no_folder, ask_for_what_is_no_protocol, ask_for_no_temperature, hold_no_options, hold_no_rows],
)
def test_a_bad_record_is_named_and_the_others_are_shown(kept, tmp_path, harm):
    tree = json.loads((kept / records.RECORD).read_text())
    for name in ("1", "3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / records.RECORD).write_text(json.dumps(tree))
    harm(tree)
    bad = tmp_path / "2"
    bad.mkdir()
    (bad / records.RECORD).write_text(json.dumps(tree))
    shown = invoke("show", str(tmp_path))
    assert shown.exit_code == 1
    assert shown.stdout.count("2 distinct worlds") == 2
    (line,) = shown.stderr.splitlines()
    assert line.startswith(f"leaderboard: {bad / records.RECORD} is no record of schema 1: ")
    assert invoke("show", str(bad)).exit_code == 2


def test_verify_holds_rows_against_the_trajectories(server, kept, tmp_path):
    tree = json.loads((kept / records.RECORD).read_text())
    tree["rows"][0]["agent"] = "mine"
    (tmp_path / records.RECORD).write_text(json.dumps(tree))
    (tmp_path / records.TRAJECTORIES).write_bytes((kept / records.TRAJECTORIES).read_bytes())
    verified = invoke("verify", str(tmp_path), "--server", server)
    assert verified.exit_code == 1
    assert "trajectories.jsonl holds 2 episodes of 'random', but the record has no row of that name" in verified.stdout


def test_a_split_that_a_tokens_role_may_not_play_is_not_the_servers_splits(tmp_path):
    token = new_token("alice")
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[alice]\nrole = "train"\nsha256 = "{digest_of(token).hex()}"\n')
    tokens.chmod(0o600)
    arguments = ("--env", "sokoban", "--splits", "train,held_out", "--tokens", str(tokens))
    with (
        ServerProcess(*arguments) as running,
        connect(running.address, token=token) as client,
        pytest.raises(CannotEvaluate, match="the token's role does not allow it") as refused,
    ):
        evaluate(client, Protocol(), [])
    assert "--splits" not in str(refused.value)


def test_view_refuses_what_it_cannot_show(tmp_path):
    file = tmp_path / "trajectories.jsonl"
    file.touch()
    for arguments, told in (
        ([str(tmp_path / "none.jsonl")], "is no file; name a trajectories.jsonl"),
        ([str(file)] * 3, "3 files were named; expected one or two"),
    ):
        done = CliRunner().invoke(app, ["view", *arguments, "--no-open"])
        assert done.exit_code == 2
        assert told in " ".join(done.stderr.split())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = CliRunner().invoke(app, ["view", str(file), "--no-open", "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 2
    assert "cannot be listened on" in " ".join(done.stderr.split())
