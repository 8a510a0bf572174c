"""The operator's file of tokens, and the command that makes one."""

import errno
import logging
import os
import subprocess
import sys

import pytest
from sample_environments import DICE
from serving import Clock, serving
from token_files import write_tokens

from turngym import private_file
from turngym.v1 import environment_pb2 as pb
from turngym_server.access import new_token
from turngym_server.access.quotas import Quotas
from turngym_server.access.roles import Role
from turngym_server.access.tokens import TELL_SECONDS, TokenFile, digest_of, read_tokens

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no token"),
        ("[alice", "at end of document"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\n[alice]\n', "line 4"),
        (f'[bob]\nrole = "train"\nsha256 = "{DIGEST}"\n\n[alice]\nrole = "train"\n', "line 5, [alice]: sha256"),
        (f'[alice]\nsha256 = "{DIGEST}"\n', "line 1, [alice]: role: missing; expected train, evaluate or admin"),
        (
            f'\n[alice]\nrole = "trian"\nsha256 = "{DIGEST}"\n',
            "line 2, [alice]: role: got 'trian'; expected train, ",
        ),
        (f'[alice]\nrole = "alice.{"s" * 43}"\nsha256 = "{DIGEST}"\n', "role: got … (49 characters); expected train"),
        (f'[alice]\nrole = train\nsha256 = "{DIGEST}"\n', "no TOML at line 2, column 8; expected [name]"),
        (
            f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\n{DIGEST} = 1\n',
            "unknown key … (64 characters); expected role, sha256",
        ),
        (f'[alice]\nrole = "train"\n[{DIGEST}]\n[{DIGEST}]\n', "no TOML at line 4"),
        (f'["alice.{"s" * 43}"]\nrole = "train"\nsha256 = "{DIGEST}"\n', "token name … (49 characters)"),
        (f"{DIGEST} = 1\n", "… (64 characters) stands outside"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nexpire = 2030-01-01\n', "did you mean 'expires'?"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nexpires = 2030-01-01T00:00:00\n', "[alice]: expires"),
        (
            f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nmax_sessions = 0\n',
            "[alice]: max_sessions: got '0'; expected",
        ),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nmax_sessions = 1{"0" * 400}\n', "[alice]: max_sessions"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nmax_sessions = 1{"0" * 6_000}\n', "no TOML"),
        ("a=" + "[" * 20_000, "no TOML: nested too deeply"),
        ("a=" + "{a=" * 20_000, "no TOML: nested too deeply"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nrequests_per_second = inf\n', "requests_per_second"),
        ('[alice]\nrole = "train"\nsha256 = "alice.secret"\n', "line 1, [alice]: sha256: expected the 64"),
        (f'role = "train"\nsha256 = "{DIGEST}"\n', "line 1: 'role' stands outside"),
        (f'["a b"]\nrole = "train"\nsha256 = "{DIGEST}"\n', "line 1: token name 'a b'"),
    ],
)
def test_a_malformed_file(text, said, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError) as refused:
        TokenFile(path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert all(secret not in str(refused.value) for secret in ("alice.secret", DIGEST, "s" * 43))


@pytest.mark.parametrize(
    ("mode", "fine"), [(0o600, True), (0o400, True), (0o640, True), (0o644, False), (0o660, False)]
)
def test_who_may_read_it(mode, fine, tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\n')
    path.chmod(mode)
    if fine:
        assert set(TokenFile(path).tokens) == {"alice"}
    else:
        with pytest.raises(ValueError, match="chmod 600"):
            TokenFile(path)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOENT, errno.EACCES, errno.ENOMEM])
def test_a_withdrawn_token_ends_with_the_first_read_that_succeeds(error, tmp_path, monkeypatch, caplog):
    path, clock = tmp_path / "tokens.toml", Clock()
    old = presented(write_tokens(path, alice="train")["alice"])
    tokens = TokenFile(path, clock)
    new = presented(write_tokens(path, bob="train")["bob"])

    def fail(*_, **__):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(private_file.os, "open", fail)
        assert all(tokens.find(old) for _ in range(5))
        assert len(caplog.records) == 1
        assert os.strerror(error) in caplog.text
        clock.now += TELL_SECONDS
        assert tokens.find(old)
        assert len(caplog.records) == 2
    assert tokens.find(old) is None
    assert tokens.find(new)
    assert [record.levelno for record in caplog.records[2:]] == [logging.WARNING]


def test_a_file_that_was_gone_for_a_moment_is_read_when_it_is_back(tmp_path):
    path, aside = tmp_path / "tokens.toml", tmp_path / "aside"
    old = presented(write_tokens(path, alice="train")["alice"])
    tokens = TokenFile(path)
    path.rename(aside)
    assert tokens.find(old)
    write_tokens(aside, bob="train")
    aside.rename(path)
    assert tokens.find(old) is None


def test_a_malformed_file_is_read_once_for_each_change(tmp_path, caplog):
    path = tmp_path / "tokens.toml"
    old = presented(write_tokens(path, alice="train")["alice"])
    tokens = TokenFile(path)
    for number, text in enumerate(("[alice", "a=" + "[" * 20_000, ""), start=1):
        path.write_text(text)
        assert all(tokens.find(old) for _ in range(3))
        assert len(caplog.records) == number
    new = presented(write_tokens(path, bob="train")["bob"])
    assert tokens.find(old) is None
    assert tokens.find(new)


def make_fifo(path):
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    "put", [make_fifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir(mode=0o700)]
)
async def test_what_is_no_file_holds_up_nobody_and_changes_nothing(put, tmp_path, caplog):
    path = tmp_path / "tokens.toml"
    bearer = write_tokens(path, alice="train")["alice"]
    async with serving(DICE, tokens=path) as (stub, _):
        path.unlink()
        put(path)
        for _ in range(2):
            await stub.GetServer(pb.GetServerRequest(), metadata=bearer, timeout=20)
    assert [record.getMessage() for record in caplog.records if "stay as they were" in record.getMessage()] == [
        f"tokens stay as they were: {path} is no regular file; expected one, not a FIFO, a device or a folder"
    ]
    with pytest.raises(ValueError, match="is no regular file"):
        TokenFile(path)


def test_a_file_without_end_is_refused(tmp_path):
    path = tmp_path / "tokens.toml"
    with path.open("wb") as file:
        file.truncate(private_file.MAX_BYTES + 1)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is longer than"):
        TokenFile(path)


def presented(metadata) -> str:
    ((_, bearer),) = metadata
    return bearer.removeprefix("Bearer ")


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "none.toml"), ("[alice]\n", "line 1, [alice]: role"), ("a=" + "[" * 20_000, "nested too deeply")],
)
def test_a_server_does_not_start_without_its_tokens(text, said, tmp_path):
    path = tmp_path / "none.toml"
    if text:
        path.write_text(text)
        path.chmod(0o600)
    command = [sys.executable, "-m", "turngym_server.cli", "--env", "bandit", "--port", "0", "--tokens", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert said in result.stderr


def test_a_new_token(tmp_path, capsys):
    path = tmp_path / "tokens.toml"
    new_token.main(["alice", "--role", "train", "--file", str(path)])
    alice = capsys.readouterr().out.strip()
    # Others may have added a line without its end.
    path.write_text(path.read_text() + "# ours")
    new_token.main(
        f"bob --role evaluate --file {path} --expires 2030-01-02 --max-sessions 8 --requests-per-second 2.5"
        " --bytes-per-second 1e6".split()
    )
    printed = capsys.readouterr()
    bob = printed.out.strip()
    assert bob not in printed.err
    assert len(bob.partition(".")[2]) == 43  # 256 bits in base64.
    assert path.stat().st_mode & 0o777 == 0o600
    assert alice not in path.read_text()
    tokens = TokenFile(path)
    assert tokens.find(alice).role is Role.TRAIN
    assert tokens.find(alice).quotas == Quotas()
    found = tokens.find(bob)
    assert (found.name, found.role, found.digest) == ("bob", Role.EVALUATE, digest_of(bob))
    assert found.expires.isoformat() == "2030-01-02T00:00:00+00:00"
    assert found.quotas == Quotas(max_sessions=8, requests_per_second=2.5, bytes_per_second=1e6)
    assert tokens.find(bob + "x") is None
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a b", "--role", "train"], "token name 'a b'"),
        (["alice", "--role", "train"], "has a token 'alice' already"),
        (["bob", "--role", "trainer"], "trainer"),
        (["bob", "--role", "train", "--expires", "tomorrow"], "expected an ISO date"),
        (["bob", "--role", "train", "--max-sessions", "0"], "max-sessions"),
        (["bob", "--role", "train", "--requests-per-second", "1e-300"], "requests-per-second"),
        (["bob", "--role", "train", "--bytes-per-second", "inf"], "bytes-per-second"),
    ],
)
def test_what_cannot_be_made(arguments, said, tmp_path, capsys):
    path = tmp_path / "tokens.toml"
    new_token.main(["alice", "--role", "train", "--file", str(path)])
    before = path.read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        new_token.main([*arguments, "--file", str(path)])
    printed = capsys.readouterr()
    assert left.value.code == 2
    assert not printed.out
    assert printed.err.startswith("env_server_token: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert path.read_text() == before
    assert set(read_tokens(path)) == {"alice"}
