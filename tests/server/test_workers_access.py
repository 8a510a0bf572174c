"""Tokens, TLS and mutual TLS of a server of two workers: the same at its front and at each worker."""

import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from proc import children
from server_process import ServerProcess
from serving import CHANNEL_OPTIONS, call_status, reason, request_id, reset_item
from token_files import bearer, write_tokens

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc
from turngym_client import (
    EpisodeRequest,
    NotServed,
    ServerUnavailable,
    Split,
    TlsConfig,
    Unauthenticated,
    connect,
)
from turngym_server.access.tokens import digest_of, new_token

HELLO = pb.GetServerRequest()
Metadata = tuple[tuple[str, str], ...]


def token_of(metadata: Metadata) -> str:
    return metadata[0][1].removeprefix("Bearer ")


class Site:
    """A server of two workers that wants a token and a certificate of every caller."""

    def __init__(self, folder: Path) -> None:
        self.tokens_file = folder / "tokens.toml"
        self.tokens: dict[str, Metadata] = write_tokens(
            self.tokens_file,
            ann="train",
            bob="train",
            eve="evaluate",
            past="role = 'train'\nexpires = 1999-01-01T00:00:00Z",
        )
        authority, other = Authority(), Authority()
        (folder / "ca.pem").write_bytes(authority.pem)
        for name, signer in (("server", authority), ("client", authority), ("stranger", other)):
            key, certificate = signer.issue(name)
            (folder / f"{name}.key").write_bytes(key)
            (folder / f"{name}.pem").write_bytes(certificate)
        self._folder = folder
        self.process = ServerProcess(
            *("--env", "frozen_lake", "--workers", "2", "--splits", "train,held_out"),
            *("--tokens", str(self.tokens_file), "--client-ca", str(folder / "ca.pem")),
            *("--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")),
        )
        self.addresses: list[str] = []
        """The front's, then the workers'."""

    def tls(self, name: str = "client") -> TlsConfig:
        pem = self._folder
        return TlsConfig(root_certificates=pem / "ca.pem", certificate=pem / f"{name}.pem", key=pem / f"{name}.key")

    def channel(self, address: str) -> grpc.Channel:
        files = [(self._folder / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options=CHANNEL_OPTIONS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    with site.process:
        with connect(site.process.address, token=token_of(site.tokens["ann"]), tls=site.tls()) as client:
            site.addresses = [site.process.address, *client.server().addresses]
        assert len(site.addresses) == 3
        yield site


@pytest.fixture
def stubs(site: Site) -> Iterator[list[pb_grpc.EnvironmentServiceStub]]:
    """Of the front, then of the workers."""
    channels = [site.channel(address) for address in site.addresses]
    yield [pb_grpc.EnvironmentServiceStub(channel) for channel in channels]
    for channel in channels:
        channel.close()


def refusal(call: Callable[..., object], request: object, metadata: Metadata) -> str:
    """The reason for which a whole call is refused; "" where it is answered."""
    try:
        call(request, metadata=metadata)
    except grpc.RpcError as error:
        return reason(call_status(error))
    return ""


def begin(stub, metadata: Metadata, split: pb.Split.ValueType = pb.SPLIT_TRAIN) -> pb.ResetOutcome:
    items = [reset_item("frozen_lake", split=split)]
    (outcome,) = stub.Reset(pb.ResetRequest(items=items), metadata=metadata).outcomes
    return outcome


def test_a_client_follows_the_workers_addresses(site: Site):
    """Each worker is called by itself, over TLS, with the client's own certificate and its token."""
    with connect(site.process.address, token=token_of(site.tokens["bob"]), tls=site.tls(), patience=5.0) as client:
        episodes = client.reset_many([EpisodeRequest(environment_id="frozen_lake")] * 6)
        client.step_many([(episode, "nothing") for episode in episodes])
        held = []
        for address in site.addresses[1:]:
            with connect(address, token=token_of(site.tokens["bob"]), tls=site.tls()) as worker:
                held.append(worker.server().sessions)
        assert held == [3, 3]
        copies = [episode.fork() for episode in episodes]
        client.close_many([*episodes, *copies])
        assert client.server().sessions == 0


def test_no_address_takes_whom_another_would_not(site: Site):
    ann, tls = token_of(site.tokens["ann"]), site.tls()
    wrong: Mapping[str, tuple[str, TlsConfig | None, type[Exception]]] = {
        "no TLS": (ann, None, ServerUnavailable),
        "no certificate": (ann, TlsConfig(root_certificates=tls.root_certificates), ServerUnavailable),
        "another authority's": (ann, site.tls("stranger"), ServerUnavailable),
        "no token": ("", tls, Unauthenticated),
        "a wrong token": (new_token("ann"), tls, Unauthenticated),
        "an expired token": (token_of(site.tokens["past"]), tls, Unauthenticated),
    }
    for address in site.addresses:
        for name, (token, shown, error) in wrong.items():
            with connect(address, token=token, tls=shown, patience=0.5) as client, pytest.raises(error):
                print(name, address, client.server())


def test_roles_at_every_address(site: Site, stubs):
    for stub in stubs:
        assert reason(begin(stub, site.tokens["ann"], pb.SPLIT_HELD_OUT)) == "SPLIT_NOT_SERVED"
        begun = begin(stub, site.tokens["eve"], pb.SPLIT_HELD_OUT).started
        assert begun.split == pb.SPLIT_HELD_OUT
        stub.Close(pb.CloseRequest(session_ids=[begun.session_id]), metadata=site.tokens["eve"])
        splits = list(stub.GetServer(HELLO, metadata=site.tokens["ann"]).splits)
        assert splits == [pb.SPLIT_TRAIN]
    with (
        connect(site.process.address, token=token_of(site.tokens["ann"]), tls=site.tls()) as client,
        pytest.raises(NotServed),
    ):
        client.reset("frozen_lake", split=Split.HELD_OUT)


def test_whose_a_session_is_at_every_address(site: Site, stubs):
    ann = site.tokens["ann"]
    ids = [begin(stub, ann).started.session_id for stub in stubs[1:]]
    assert len({each.partition(".")[0] for each in ids}) == 2
    for other in (site.tokens["bob"], site.tokens["eve"]):
        for stub in stubs:
            turns = [pb.StepItem(session_id=each, step_index=1, actions=["Right"]) for each in ids]
            forks = [pb.ForkItem(request_id=request_id(), session_id=each, same_noise=True) for each in ids]
            advice = [pb.AdviseItem(session_id=each) for each in ids]
            outcomes = [
                *(stub.Step(pb.StepRequest(items=[turn]), metadata=other).outcomes[0] for turn in turns),
                *next(iter(stub.StepStream(iter([streamed(turns[0])]), metadata=other))).step.outcomes,
                *stub.Fork(pb.ForkRequest(items=forks), metadata=other).outcomes,
                *stub.Advise(pb.AdviseRequest(items=advice), metadata=other).outcomes,
                *stub.KeepAlive(pb.KeepAliveRequest(session_ids=ids), metadata=other).outcomes,
            ]
            assert {reason(outcome) for outcome in outcomes} == {"SESSION_UNKNOWN"}
            closed = stub.Close(pb.CloseRequest(session_ids=ids), metadata=other).outcomes
            assert not any(outcome.closed for outcome in closed)
    kept = stubs[0].KeepAlive(pb.KeepAliveRequest(session_ids=ids), metadata=ann).outcomes
    assert all(outcome.HasField("lease_seconds") for outcome in kept)
    assert all(each.closed for each in stubs[0].Close(pb.CloseRequest(session_ids=ids), metadata=ann).outcomes)


def streamed(item: pb.StepItem) -> pb.StepStreamRequest:
    return pb.StepStreamRequest(id=1, step=pb.StepRequest(items=[item]))


def test_a_changed_token_file_reaches_every_worker(site: Site, stubs):
    """What is withdrawn is refused at once, and what is new is known, whichever worker is asked first."""
    kept = site.tokens_file.read_text()
    stream = iter(stubs[1].StepStream(_until_closed(), metadata=site.tokens["bob"]))
    first = next(stream)
    assert reason(first.step.outcomes[0]) == "SESSION_UNKNOWN"
    carl, soon = new_token("carl"), new_token("soon")
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    sections = [each for each in kept.split("\n\n") if not each.startswith("[bob]")]
    sections.append(f'[carl]\nsha256 = "{digest_of(carl).hex()}"\nrole = "train"')
    sections.append(f'[soon]\nsha256 = "{digest_of(soon).hex()}"\nrole = "train"\nexpires = {expires.isoformat()}')
    new = site.tokens_file.with_suffix(".new")
    new.touch(0o600)
    new.write_text("\n\n".join(sections))
    new.replace(site.tokens_file)
    try:
        # A stream that was let in before is told so too.
        assert reason(next(answer.error for answer in stream if answer.HasField("error"))) == "UNAUTHENTICATED"
        for stub in stubs:
            assert refusal(stub.GetServer, HELLO, site.tokens["bob"]) == "UNAUTHENTICATED"
            assert refusal(stub.GetServer, HELLO, bearer(carl)) == ""
        begun = [begin(stub, bearer(soon)).started.session_id for stub in stubs[1:]]
        time.sleep(max(0.0, expires.timestamp() - time.time()) + 0.1)
        for stub in stubs:
            alive = pb.KeepAliveRequest(session_ids=begun)
            assert refusal(stub.KeepAlive, alive, bearer(soon)) == "UNAUTHENTICATED"
    finally:
        new.touch(0o600)
        new.write_text(kept)
        new.replace(site.tokens_file)
    for stub in stubs:
        assert refusal(stub.GetServer, HELLO, site.tokens["bob"]) == ""
        assert refusal(stub.GetServer, HELLO, bearer(carl)) == "UNAUTHENTICATED"


def _until_closed() -> Iterator[pb.StepStreamRequest]:
    """Requests of a stream, for half a minute at most."""
    item = pb.StepItem(session_id="nobody.at-all", step_index=1, actions=["Right"])
    for _ in range(3_000):
        time.sleep(0.01)
        yield streamed(item)


def test_workers_are_replaced_while_the_file_of_tokens_cannot_be_read(tmp_path):
    """Each knows what its front knows, and reads the file once it is there again."""
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(path, ann="train", bob="train")
    with ServerProcess("--env", "frozen_lake", "--workers", "2", "--tokens", str(path)) as server:
        with connect(server.address, token=token_of(tokens["ann"])) as client:
            kept = path.read_text()
            path.unlink()
            for worker in children(server.process.pid):
                episode = client.reset("frozen_lake", level_seed=1)
                os.kill(worker, signal.SIGKILL)
                episode.step("Right")
            ends = time.monotonic() + 20
            while len(client.server().addresses) < 2 or len(children(server.process.pid)) < 2:
                assert time.monotonic() < ends
                time.sleep(0.1)
            path.write_text(kept.replace("[bob]", "[eve]"))
            path.chmod(0o600)
            client.reset("frozen_lake", level_seed=2).step("Right")
        for address in (server.address, *client_addresses(server.address, token_of(tokens["ann"]))):
            with connect(address, token=token_of(tokens["bob"])) as client, pytest.raises(Unauthenticated):
                client.reset("frozen_lake", level_seed=3)


def client_addresses(address: str, token: str) -> tuple[str, ...]:
    with connect(address, token=token) as client:
        return client.server().addresses
