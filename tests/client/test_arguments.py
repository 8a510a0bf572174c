"""What callers get wrong is refused by name, before anything is sent."""

import asyncio

import numpy as np
import pytest
from google.rpc import code_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_client import CloseReason, EpisodeRequest, Limits, ProtocolError, Split, TurngymError, aconnect, connect
from turngym_client.messages import limits_from_pb


@pytest.fixture
async def client(toy):
    async with aconnect(toy.address, patience=5.0) as client:
        yield client


BAD_TURNS = [
    ([1], r"actions\[0\] is 1 \(int\), but must be a str"),
    (["a", b"x"], r"actions\[1\] is b'x' \(bytes\), but must be a str"),
    (b"x", r"actions is b'x' \(bytes\), but must be a str or a sequence of str"),
    (None, r"actions is None \(NoneType\), but must be a str or a sequence of str"),
    (3, r"actions is 3 \(int\)"),
]


@pytest.mark.parametrize(("actions", "told"), BAD_TURNS)
async def test_actions_that_are_no_text(toy, client, actions, told):
    episode, other = await client.reset("toy", level_seed=1), await client.reset("toy", level_seed=2)
    with pytest.raises(TypeError, match=told):
        await episode.step(actions)
    with pytest.raises(TypeError, match=told):
        await client.step_many([(other, "a"), (episode, actions)])
    assert toy.service.count("Step") == 0
    assert (await episode.step(np.array(["a"]))).observation == "(1, [('a',)])"


BAD_REQUESTS = [
    ({"split": "train"}, TypeError, r"split is 'train' \(str\), but must be a Split \(Split\.TRAIN, "),
    ({"split": []}, TypeError, r"split is \[\] \(list\)"),
    ({"level_seed": 1.5}, TypeError, r"level_seed is 1\.5 \(float\), but must be an integer in 0 …"),
    ({"level_seed": True}, TypeError, r"level_seed is True \(bool\)"),
    ({"level_seed": "7"}, TypeError, r"level_seed is '7' \(str\)"),
    ({"level_seed": -1}, ValueError, r"level_seed is -1, but must lie in 0 … 2\^64 − 1"),
    ({"noise_seed": 2.0}, TypeError, r"noise_seed is 2\.0 \(float\)"),
    ({"noise_seed": 1 << 64}, ValueError, r"noise_seed is 18446744073709551616"),
    ({"limits": {"max_turns": 3}}, TypeError, r"limits is \{'max_turns': 3\} \(dict\), but must be a Limits"),
    ({"environment_id": 7}, TypeError, r"environment_id is 7 \(int\), but must be a str"),
    ({"expected_version": 1}, TypeError, r"expected_version is 1 \(int\), but must be a str"),
]


@pytest.mark.parametrize(("wrong", "kind", "told"), BAD_REQUESTS)
async def test_a_reset_names_what_is_wrong(toy, client, wrong, kind, told):
    asked = {"environment_id": "toy"} | wrong
    with pytest.raises(kind, match=told):
        await client.reset(**asked)
    with pytest.raises(kind, match=told):
        EpisodeRequest(**asked)
    assert toy.service.count("Reset") == 0


async def test_ordinary_code_is_told_the_same(toy):
    def ordinary():
        with connect(toy.address) as client:
            for wrong, kind, told in BAD_REQUESTS:
                with pytest.raises(kind, match=told):
                    client.reset(**{"environment_id": "toy"} | wrong)
            assert toy.service.count("Reset") == 0
            episode = client.reset("toy", level_seed=np.uint64(1), noise_seed=np.int64(2))
            for actions, told in BAD_TURNS:
                with pytest.raises(TypeError, match=told):
                    episode.step(actions)
            assert toy.service.count("Step") == 0
            assert episode.level_seed == 1

    await asyncio.to_thread(ordinary)


async def test_other_calls_name_what_is_wrong(toy, client):
    with pytest.raises(TypeError, match=r"id is 7 \(int\), but must be a str"):
        await client.environment(7)
    with pytest.raises(TypeError, match=r"limits is None \(NoneType\), but must be a Limits"):
        await client.environment("toy", None, None)
    episode = await client.reset("toy", level_seed=1)
    with pytest.raises(TypeError, match=r"noise_seed is False \(bool\)"):
        await episode.fork(False)
    with pytest.raises(TypeError, match=r"reason is 'finished' \(str\), but must be a CloseReason"):
        await episode.close("finished")
    assert not episode.closed
    await episode.close(CloseReason.ABANDONED)
    assert toy.service.count("Close") == 1
    assert toy.service.count("GetEnvironment") == toy.service.count("Fork") == 0


async def test_an_error_is_short_whatever_came(toy, client):
    huge = "x" * 1_000_000
    toy.fail_items("Reset", {"code": code_pb2.NOT_FOUND, "reason": "UNKNOWN_ENVIRONMENT"})
    toy.fail_before("GetEnvironment", {"code": code_pb2.NOT_FOUND, "reason": "UNKNOWN_ENVIRONMENT"})
    for call in (
        lambda: client.reset(huge),
        lambda: client.environment(huge),
        lambda: client.reset("toy", options={"boxes": {huge}}),
        lambda: client.reset("toy", split=huge),
    ):
        with pytest.raises((TurngymError, TypeError)) as refused:
            await call()
        assert len(str(refused.value)) < 500
    with pytest.raises(ValueError, match="expected host:port") as refused:
        aconnect(huge)
    assert len(str(refused.value)) < 500
    episode = await client.reset("toy", level_seed=1)
    with pytest.raises(TypeError, match=r"^actions is b'xxx") as refused:
        await episode.step(huge.encode())
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("name", ["max_turns", "max_actions", "max_actions_per_turn"])
def test_limits_of_turns_and_actions(name):
    for value in (-1, 1 << 32):
        with pytest.raises(ValueError, match=rf"^{name} is {value}, but must lie in 0 … 2\^32 − 1"):
            Limits(**{name: value})
    for value in (1.0, True, "3", None):
        with pytest.raises(TypeError, match=rf"^{name} is .* but must be an integer in 0 … 4294967295"):
            Limits(**{name: value})
    assert getattr(Limits(**{name: np.int32(3)}), name) == 3


def test_limits_of_time():
    for value in (-0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^wall_seconds is .* finite number of seconds"):
            Limits(wall_seconds=value)
    for value in (True, "3", None):
        with pytest.raises(TypeError, match=r"^wall_seconds is .* number of seconds"):
            Limits(wall_seconds=value)
    assert Limits(wall_seconds=3).wall_seconds == 3
    assert EpisodeRequest(environment_id="toy", split=Split.ALL).limits == Limits()


def test_limits_of_a_server_that_cannot_be():
    with pytest.raises(ProtocolError, match=r"the server sent .*wall_seconds is -1"):
        limits_from_pb(pb.Limits(wall_seconds=-1))


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "localhost",
            "not an address",
            "localhost:",
            ":50051",
            "localhost:http",
            "localhost:0",
            "localhost:65536",
        ),
        *("::1:50051", "[::1]", "::1", "http://localhost:50051", "dns:///localhost", "dns:50051", "unix:"),
        *("localhost:50051 ", "localhost:50051\n", "a:1,b:2", "ipv4:127.0.0.1:1,127.0.0.2"),
    ],
)
async def test_what_is_no_address(address):
    for given in (address, ["localhost:50051", address]):
        for call in (connect, aconnect):
            with pytest.raises(ValueError, match="expected host:port, got ") as refused:
                call(given)
            assert repr(address) in str(refused.value)


async def test_an_address_that_is_no_text():
    for call in (connect, aconnect):
        with pytest.raises(TypeError, match=r"expected host:port, got 50051 \(int\)"):
            call([50051])


@pytest.mark.parametrize(
    "address",
    [
        *("localhost:50051", "127.0.0.1:1", "[::1]:50051", "[fe80::1%eth0]:1", "a-b.example_c.org:65535"),
        *("dns:///localhost:50051", "dns:localhost:50051", "dns://8.8.8.8/host:1", "ipv4:127.0.0.1:1,127.0.0.2:1"),
        *("ipv6:[::1]:50051", "unix:/run/turngym.sock", "unix:///run/turngym.sock", "unix-abstract:turngym"),
    ],
)
async def test_addresses(address):
    await aconnect(address).close()


@pytest.mark.parametrize("target", ["dns:///localhost:{}", "ipv4:127.0.0.1:{}"])
async def test_a_target_is_called(toy, target):
    async with aconnect(target.format(toy.port), patience=5.0) as client:
        assert (await client.reset("toy", level_seed=1)).level_seed == 1
