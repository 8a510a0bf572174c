"""What a token may use: sessions, requests a second, bytes a second."""

import grpc.aio
import pytest
from sample_environments import DICE
from serving import Clock, call_status, details, reason, reset_item, serving
from token_files import write_tokens

from turngym.v1 import environment_pb2 as pb
from turngym_client import Split, aconnect
from turngym_server.access.quotas import Meter, Quotas
from turngym_server.access.tokens import TokenFile
from turngym_server.errors import MAX_RETRY_SECONDS, ItemError, Reason

HELLO = pb.GetServerRequest()


async def refused(call) -> tuple[str, str, float | None]:
    """Reason, quota and delay of a call that is refused as a whole."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    status = call_status(error.value)
    info, delay = details(status)
    return reason(status), info.metadata["quota"], delay


def test_requests():
    clock = Clock()
    meter = Meter(Quotas(requests_per_second=2), clock)
    assert [meter.admit(10_000)[0] for _ in range(3)] == ["", "", "requests_per_second"]
    name, wait = meter.admit(0)
    clock.now += wait
    assert meter.admit(0) == ("", 0.0)
    assert meter.admit(0)[0] == name
    # Unused quota is kept for a second, no longer.
    clock.now += 100
    assert [meter.admit(0)[0] for _ in range(3)] == ["", "", "requests_per_second"]


def test_bytes_of_requests_and_replies():
    clock = Clock()
    meter = Meter(Quotas(bytes_per_second=100), clock)
    # However large a message is, it gets through once, and is paid for by waiting.
    assert meter.admit(250) == ("", 0.0)
    assert meter.admit(1) == ("bytes_per_second", pytest.approx(1.5, abs=0.01))
    clock.now += 1.6
    assert meter.admit(0) == ("", 0.0)
    meter.charge(1_000)
    assert meter.admit(1) == ("bytes_per_second", pytest.approx(9.9, abs=0.01))


def test_no_quotas():
    meter = Meter(Quotas(), Clock())
    assert {meter.admit(1 << 30) for _ in range(100)} == {("", 0.0)}


@pytest.mark.parametrize(
    ("quota", "said"),
    [
        ("requests_per_second = 1e-300", "a number from 0.001 to 1e+09"),
        ("requests_per_second = 0", "a number from 0.001 to 1e+09"),
        ("requests_per_second = -1", "a number from 0.001 to 1e+09"),
        ("requests_per_second = 1e300", "a number from 0.001 to 1e+09"),
        ("requests_per_second = nan", "requests_per_second"),
        (f"requests_per_second = 1{'0' * 400}", "requests_per_second"),
        ("bytes_per_second = 5e-324", "a number from 1 to 1e+15"),
        ("bytes_per_second = 1e300", "a number from 1 to 1e+15"),
        ("max_sessions = 1_000_000_001", "a whole number from 1 to 1000000000"),
    ],
)
def test_quotas_of_no_sense_are_refused(quota, said, tmp_path):
    path = tmp_path / "tokens.toml"
    write_tokens(path, alice=f"role = 'train'\n{quota}")
    with pytest.raises(ValueError, match=r"line 1, \[alice\]: ") as refused:
        TokenFile(path)
    assert quota.split()[0] in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("delay", [1e10, 1e300, float("inf")])
def test_no_delay_is_longer_than_a_message_holds(delay):
    error = ItemError(Reason.QUOTA_EXCEEDED, "later", retry_after=delay)
    assert details(error.status())[1] == MAX_RETRY_SECONDS


async def test_a_quota_that_is_used_up_for_hours_is_asked_for_in_between(tmp_path):
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(path, small="role = 'train'\nbytes_per_second = 1")
    request = pb.GetEnvironmentRequest(environment_id="dice", options_json=" " * 20_000)
    async with serving(DICE, tokens=path, clock=Clock()) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.GetEnvironment(request, metadata=tokens["small"])
        assert await refused(stub.GetServer(HELLO, metadata=tokens["small"])) == (
            "QUOTA_EXCEEDED",
            "bytes_per_second",
            MAX_RETRY_SECONDS,
        )


async def test_a_server_refuses_and_says_when_to_come_again(tmp_path):
    path, clock = tmp_path / "tokens.toml", Clock()
    tokens = write_tokens(
        path,
        slow="role = 'train'\nrequests_per_second = 2",
        small="role = 'train'\nbytes_per_second = 40",
        free="train",
    )
    async with serving(DICE, clock=clock, tokens=path) as (stub, _):
        for name, quota in (("slow", "requests_per_second"), ("small", "bytes_per_second")):
            while True:
                try:
                    await stub.GetServer(HELLO, metadata=tokens[name])
                except grpc.aio.AioRpcError:
                    break
            found = await refused(stub.GetServer(HELLO, metadata=tokens[name]))
            assert found[:2] == ("QUOTA_EXCEEDED", quota)
            assert found[2] > 0
            clock.now += found[2]
            await stub.GetServer(HELLO, metadata=tokens[name])
            await stub.GetServer(HELLO, metadata=tokens["free"])


async def test_a_tokens_sessions_are_bounded_over_all_its_clients(tmp_path):
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(path, few="role = 'train'\nmax_sessions = 2", many="train")

    def reset(name: str, client: str):
        request = pb.ResetRequest(items=[reset_item(split=pb.SPLIT_TRAIN)])
        return stub.Reset(request, metadata=(*tokens[name], ("turngym-client", client)))

    async with serving(DICE, tokens=path) as (stub, _):
        await reset("few", "one")
        await reset("few", "two")
        assert (await refused(reset("few", "three")))[0] == "SESSION_LIMIT"
        await reset("many", "one")


async def test_the_client_waits_for_its_quota(tmp_path):
    """Every RPC, Close included, comes through although the quota is used up again and again."""
    path = tmp_path / "tokens.toml"
    ((_, bearer),) = write_tokens(path, slow="role = 'train'\nrequests_per_second = 20")["slow"]
    async with serving(DICE, tokens=path) as (_, server):
        async with aconnect(server.address, token=bearer.removeprefix("Bearer ")) as client:
            for seed in range(6):
                episode = await client.reset("dice", split=Split.TRAIN, level_seed=seed)
                for _ in range(3):
                    await episode.step("roll")
                await episode.close()
        assert server.service.table.held == 0
        assert (
            server.service.runtime.counts.rpc("Close").refusals
            or server.service.runtime.counts.rpc("StepStream").refusals
        )
