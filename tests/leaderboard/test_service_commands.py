"""The commands around a board's service: tokens, what is refused in a line, and a submission from file to score."""

import re
import signal
import subprocess
import sys
from datetime import UTC, datetime

import httpx
import pytest
from small_boards import dealt_board
from typer.testing import CliRunner

from turngym_client import connect
from turngym_leaderboard.cli import app
from turngym_leaderboard.lifecycle import Role
from turngym_leaderboard.local_server import local_process
from turngym_leaderboard.store import open_store, owners
from turngym_trainer.policy import load_policy


def leaderboard(*arguments, **variables):
    return CliRunner().invoke(app, [str(each) for each in arguments], env=variables)


def test_a_token_is_printed_once_listed_and_revoked(tmp_path):
    made = leaderboard("token", "new", tmp_path, "ann", "--role", "admin", "--days", "1")
    assert made.exit_code == 0
    text = made.stdout.strip()
    with open_store(tmp_path) as store:
        token = owners.token(store, text, now=datetime.now(UTC))
        assert (token.owner.name, token.role, round((token.expires - token.created).total_seconds() / 3600)) == (
            "ann",
            Role.ADMIN,
            24,
        )
    listed = leaderboard("token", "list", tmp_path)
    assert "ann" in listed.stdout
    assert text not in listed.stdout
    assert leaderboard("token", "revoke", tmp_path, token.id).exit_code == 0
    with open_store(tmp_path) as store:
        assert owners.token(store, text, now=datetime.now(UTC)) is None
    assert leaderboard("token", "revoke", tmp_path, 99).exit_code == 2
    assert leaderboard("token", "new", tmp_path, "a\nb").exit_code == 2
    unseen = leaderboard("token", "new", tmp_path, "ann\u3164")
    assert "cannot name an owner: expected characters that can be seen; U+3164 (HANGUL FILLER) cannot" in unseen.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("serve", "DATA"), "a worker needs --server"),
        (("serve", "DATA", "--no-worker", "--host", "0.0.0.0"), "is reached from other machines"),
        (("submit", "FOLDER", "--board", "board.example"), "is no address of a board"),
        (("submit", "FOLDER", "--board", "http://127.0.0.1:1/boards/x?x=1"), "expected nothing after its name"),
        (("status", "0" * 16, "--board", "http://127.0.0.1:1/?x#y"), "expected nothing after its name"),
        (("submit", "FOLDER", "--board", "http://127.0.0.1:1/boards/x"), "is not a folder"),
        (("status", "0" * 16, "--board", "http://board.example"), "would carry the token"),
        (("status", "nope", "--board", "http://127.0.0.1:1"), "'nope' is no submission; expected the 16 hexadecimal"),
        (("show", "0" * 16, "--board", "http://127.0.0.1:1", "--more"), "No such option"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, arguments, told):
    given = [str(tmp_path / each) if each.isupper() else each for each in arguments]
    command = [sys.executable, "-m", "turngym_leaderboard.cli", *given]
    done = subprocess.run(command, capture_output=True, text=True, env=None if "status" not in given else with_token())
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def with_token():
    import os

    return os.environ | {"TURNGYM_BOARD_TOKEN": "tgb_secret"}


def test_a_checkpoint_is_submitted_played_and_told(server, tmp_path):
    data, folder = tmp_path / "data", tmp_path / "tiny"
    load_policy("tiny").save(folder)
    lake = {"id": "frozen_lake", "instances": 4, "attempts": 1, "showcase": 1}
    with open_store(data) as store, connect(server) as client:
        dealt_board(store, client, environments=[lake], max_response_tokens=8)
    token = tmp_path / "ann.token"
    token.write_text(leaderboard("token", "new", data, "ann").stdout)
    command = [sys.executable, "-m", "turngym_leaderboard.cli", "serve", data, "--server", server, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
        try:
            address = re.search(r"listening on (\S+)", serving.stdout.readline())[1]
            arguments = ["--board", address, "--token-file", token]
            done = leaderboard("submit", folder, *arguments, "--name", "mine", "--watch")
            assert done.exit_code == 0, done.output
            assert re.search(r"mine \([0-9a-f]{16}\) on \S+: scored", done.output)
            assert re.search(r"frozen_lake .*%", done.output)
            [found] = re.findall(r"page: \S+/submissions/([0-9a-f]{16})", done.output)
            assert (
                "scored" in leaderboard("show", found, "--board", address, TURNGYM_BOARD_TOKEN=token.read_text()).output
            )
            assert "there is no submission" in leaderboard("status", found, "--board", address).output
        finally:
            serving.send_signal(signal.SIGTERM)
    assert serving.returncode == 0


def test_an_owners_calls_a_second_are_the_operators_to_set(tmp_path):
    headers = {"Authorization": f"Bearer {leaderboard('token', 'new', tmp_path / 'data', 'ann').stdout.strip()}"}
    command = [sys.executable, "-m", "turngym_leaderboard.cli", "serve", str(tmp_path / "data"), "--no-worker"]
    command += ["--port", "0", "--owner-requests-per-second", "0.1"]
    with local_process(command, tmp_path / "log") as address:
        codes = [httpx.get(f"{address}/api/v1/submissions", headers=headers).status_code for _ in range(2)]
        assert codes == [200, 429]
        assert httpx.get(f"{address}/api/v1/boards").status_code == 200
