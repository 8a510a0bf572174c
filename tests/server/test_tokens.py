"""The operator's file of tokens, and the command that makes one."""

import subprocess
import sys

import pytest

from turngym_server import new_token
from turngym_server.quotas import Quotas
from turngym_server.roles import Role
from turngym_server.tokens import TokenFile, digest_of, read_tokens

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no token"),
        ("[alice", "at end of document"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\n[alice]\n', "line 4"),
        (f'[bob]\nrole = "train"\nsha256 = "{DIGEST}"\n\n[alice]\nrole = "train"\n', "line 5, [alice]: sha256"),
        (f'[alice]\nsha256 = "{DIGEST}"\n', "line 1, [alice]: role"),
        (f'\n[alice]\nrole = "trian"\nsha256 = "{DIGEST}"\n', "line 2, [alice]: role: Input should be 'train'"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nexpire = 2030-01-01\n', "did you mean 'expires'?"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nexpires = 2030-01-01T00:00:00\n', "[alice]: expires"),
        (f'[alice]\nrole = "train"\nsha256 = "{DIGEST}"\nmax_sessions = 0\n', "[alice]: max_sessions"),
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
    assert "alice.secret" not in str(refused.value)


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


@pytest.mark.parametrize(("text", "said"), [(None, "none.toml"), ("[alice]\n", "line 1, [alice]: role")])
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
