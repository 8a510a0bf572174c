"""TLS and mutual TLS, which addresses may be bound, and a client's credentials, between real servers and clients."""

import socket
import subprocess
import sys

import pytest
from sample_environments import DICE
from server_process import ServerProcess
from serving import serving
from token_files import write_tokens

from turngym_client import EpisodeRequest, ServerUnavailable, Split, TlsConfig, Unauthenticated, aconnect, connect
from turngym_client.credentials import find_credentials, is_local
from turngym_server.access.tokens import new_token


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """An authority, and certificates that it has signed for a server and a client; another authority's client."""
    folder = tmp_path_factory.mktemp("pem")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for authority in ("ca", "other"):
        files = ["-keyout", f"{authority}.key", "-out", f"{authority}.pem"]
        openssl(*new, "-x509", "-days", "2", "-subj", f"/CN={authority}", *files)
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signer = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-days", "2", "-extfile", "names", "-out", f"{name}.pem")
    return folder


async def plays(address: str, **credentials) -> bool:
    async with aconnect(address, patience=2.0, **credentials) as client:
        episode = await client.reset("dice", split=Split.TRAIN, level_seed=1)
        return "Rolled" in (await episode.step("roll")).observation


async def test_tls_with_a_token(pem, tmp_path):
    path = tmp_path / "tokens.toml"
    ((_, bearer),) = write_tokens(path, alice="train")["alice"]
    token = bearer.removeprefix("Bearer ")
    tls = TlsConfig(root_certificates=pem / "ca.pem")
    async with serving(DICE, tokens=path, tls_cert=pem / "server.pem", tls_key=pem / "server.key") as (_, server):
        assert await plays(server.address, token=token, tls=tls)
        for wrong in ("", new_token("alice")):
            with pytest.raises(Unauthenticated) as refused:
                await plays(server.address, token=wrong, tls=tls)
            assert not wrong or wrong not in str(refused.value)
        with pytest.raises(ServerUnavailable, match="the server may speak TLS"):
            await plays(server.address, token=token)
        with pytest.raises(ServerUnavailable, match="not signed by an authority"):
            await plays(server.address, token=token, tls=TlsConfig(root_certificates=pem / "other.pem"))
    async with serving(DICE, tokens=path) as (_, server):
        with pytest.raises(ServerUnavailable, match="the server may speak no TLS"):
            await plays(server.address, token=token, tls=tls)


def test_workers_speak_tls_too(pem):
    arguments = ("--tls-cert", f"{pem}/server.pem", "--tls-key", f"{pem}/server.key", "--client-ca", f"{pem}/ca.pem")
    tls = TlsConfig(root_certificates=pem / "ca.pem", certificate=pem / "client.pem", key=pem / "client.key")
    with (
        ServerProcess("--env", "bandit", "--workers", "2", *arguments) as server,
        connect(server.address, patience=2.0, tls=tls) as client,
    ):
        episodes = client.reset_many([EpisodeRequest(environment_id="bandit", split=Split.ALL)] * 4)
        assert all(
            not transition.action_valid for transition in client.step_many([(each, "nothing") for each in episodes])
        )
        for address in client.server().addresses:
            with connect(address, patience=2.0, tls=tls) as worker:
                assert worker.server().sessions == 2
            with pytest.raises(ServerUnavailable), connect(address, patience=0.5) as worker:
                worker.server()


async def test_mutual_tls(pem):
    files = {"tls_cert": pem / "server.pem", "tls_key": pem / "server.key", "client_ca": pem / "ca.pem"}
    async with serving(DICE, **files) as (_, server):

        def tls(name: str) -> TlsConfig:
            return TlsConfig(root_certificates=pem / "ca.pem", certificate=pem / f"{name}.pem", key=pem / f"{name}.key")

        assert await plays(server.address, tls=tls("client"))
        for refused in (tls("stranger"), TlsConfig(root_certificates=pem / "ca.pem")):
            with pytest.raises(ServerUnavailable):
                await plays(server.address, tls=refused)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "give --tokens and --tls-cert and --tls-key, or --insecure"),
        (["--host", "::"], "give --tokens and --tls-cert"),
        (["--host", "0.0.0.0", "--tokens", "tokens.toml"], "give --tls-cert and --tls-key, or --insecure"),
        (["--tls-cert", "server.pem"], "go together"),
        (
            ["--tls-cert", "server.pem", "--tls-key", "client.key"],
            "client.key: not the key of the first certificate in",
        ),
        (["--tls-cert", "server.csr", "--tls-key", "server.key"], "server.csr: no certificates that can be read"),
        (["--tls-cert", "server.key", "--tls-key", "server.key"], "server.key: no certificates that can be read"),
        (["--tls-cert", "server.pem", "--tls-key", "server.pem"], "server.pem: no key that can be read"),
        (
            ["--tls-cert", "server.pem", "--tls-key", "server.key", "--client-ca", "server.csr"],
            "server.csr: no certificates that can be read; expected for --client-ca",
        ),
        (["--tls-cert", "none.pem", "--tls-key", "server.key"], "none.pem"),
    ],
)
def test_what_does_not_start(arguments, said, pem):
    write_tokens(pem / "tokens.toml", alice="train")
    command = [sys.executable, "-m", "turngym_server.cli", "--env", "bandit", "--port", "0", *arguments]
    result = subprocess.run(command, cwd=pem, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert said in result.stderr


async def test_other_machines_are_served_where_the_operator_says_so():
    async with serving(DICE, host="0.0.0.0", insecure=True) as (_, server):
        assert await plays(f"127.0.0.1:{server.port}")


def test_a_token_does_not_travel_in_the_clear(pem):
    with pytest.raises(ValueError, match=r"example\.org:1 in the clear") as refused:
        aconnect("example.org:1", token="alice.secret")
    assert "secret" not in str(refused.value)
    aconnect("example.org:1", token="alice.secret", insecure=True)
    aconnect("example.org:1", token="alice.secret", tls=TlsConfig(root_certificates=pem / "ca.pem"))


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.8.0.1:1", True),
        ("[::1]:1", True),
        ("unix:/tmp/socket", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:2", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False),
        ("10.0.0.1:1", False),
        ("[fe80::1%eth0]:1", False),
        ("localhost.example.org:1", False),
        ("dns:///example.org:1", False),
    ],
)
def test_which_addresses_are_local(address, local):
    assert is_local(address) == local


def test_the_environment_tells_what_is_not_given(tmp_path):
    file = tmp_path / "token"
    file.write_text("alice.secret\n")
    given = {"TURNGYM_TOKEN_FILE": str(file), "TURNGYM_TLS_ROOTS": "ca.pem", "TURNGYM_INSECURE": "1"}
    found = find_credentials(None, None, None, given)
    assert found.metadata == (("authorization", "Bearer alice.secret"),)
    assert (found.tls, found.insecure) == (TlsConfig(root_certificates="ca.pem"), True)
    assert "secret" not in repr(found)
    found = find_credentials("", TlsConfig(), False, given)
    assert (found.metadata, found.tls, found.insecure) == ((), TlsConfig(), False)
    assert find_credentials(None, None, None, {}).tls is None
    with pytest.raises(ValueError, match="set one"):
        find_credentials(None, None, None, {"TURNGYM_TOKEN": "a", **given})
    with pytest.raises(ValueError, match=r"expected NAME\.SECRET") as refused:
        find_credentials("two words", None, None, {})
    assert "two words" not in str(refused.value)
    with pytest.raises(ValueError, match="go together"):
        TlsConfig(certificate="client.pem")


def test_what_is_no_tls_leaves_nothing_on_stderr(pem):
    """gRPC's core would write about it past the log, and wait until somebody reads that."""
    files = ["--tls-cert", pem / "server.pem", "--tls-key", pem / "server.key"]
    command = [sys.executable, "-m", "turngym_server.cli", "--env", "bandit", "--port", "0", *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().split()[4].rpartition(":")[2])
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert connection.recv(1_000) is not None
        server.terminate()
        _, told = server.communicate(timeout=30)
    assert told == ""
