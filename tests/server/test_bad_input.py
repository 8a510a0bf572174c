"""What a server answers to what it should never be sent."""

import asyncio
import difflib
import json
import re
from dataclasses import replace
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from sample_environments import DICE, FAULTY, GATE, LEVELS, PLAYED, THREADED_FAULTY, UNSURE_DICE
from serving import Clock, call_status, details, reason, request_id, reset_error, reset_item, serving, start, step

from turngym.v1 import environment_pb2 as pb
from turngym_client import EpisodeLost, aconnect
from turngym_client import Split as ClientSplit
from turngym_server.access.admission import Visit
from turngym_server.discovery import find_specs
from turngym_server.environment import Isolation, Limits
from turngym_server.errors import ItemError, Reason
from turngym_server.host import EnvironmentHost, distinct
from turngym_server.rpc import wire
from turngym_server.rpc.call import Call
from turngym_server.splits import Split

MEBIBYTE = 1024 * 1024
MANY = json.dumps(dict.fromkeys(map(str, range(7_000)), 0), separators=(",", ":"))


def nested(depth: int) -> str:
    """Options one of which is an array in arrays, so many in all."""
    return f'{{"faces": {"[" * depth}{"]" * depth}}}'


MANY_TWICE = MANY.removesuffix("}") + ',"6999":0}'


@pytest.mark.parametrize(
    ("fields", "expected", "words"),
    [
        ({"environment_id": "dise"}, "UNKNOWN_ENVIRONMENT", "here; did you mean 'dice'? Served: dice, levels."),
        ({"environment_id": ""}, "UNKNOWN_ENVIRONMENT", "here. Served: dice, levels."),
        ({"request_id": b"short"}, "INVALID_ITEM", "16 random"),
        ({"request_id": b""}, "INVALID_ITEM", "16 random"),
        ({"options_json": '{"face": 6}'}, "INVALID_OPTIONS", "did you mean 'faces'?"),
        ({"options_json": '{"faces": 1}'}, "INVALID_OPTIONS", "'faces'"),
        ({"options_json": '{"faces": "many"}'}, "INVALID_OPTIONS", "'many'"),
        ({"options_json": '{"faces": "6"}'}, "INVALID_OPTIONS", "valid integer; got '6'"),
        ({"options_json": '{"faces": true}'}, "INVALID_OPTIONS", "valid integer; got 'True'"),
        ({"options_json": '{"faces": 6.0}'}, "INVALID_OPTIONS", "valid integer; got '6.0'"),
        ({"options_json": '{"faces": 1e1}'}, "INVALID_OPTIONS", "valid integer; got '10.0'"),
        ({"options_json": '{"faces": 1e999}'}, "INVALID_OPTIONS", "JSON"),
        ({"options_json": '{"faces": 6, "worlds": 9, "faces": 6}'}, "INVALID_OPTIONS", "'faces' is set twice"),
        ({"options_json": '{"faces": {"a": 1, "a": 1}}'}, "INVALID_OPTIONS", "'a' is set twice"),
        ({"options_json": '{"zzz": 6}'}, "INVALID_OPTIONS", "unknown option 'zzz'. Known: faces, worlds."),
        ({"options_json": '{"\\ud800": 6}'}, "INVALID_OPTIONS", "JSON"),
        ({"options_json": MANY_TWICE}, "INVALID_OPTIONS", "'6999' is set twice"),
        ({"options_json": MANY}, "INVALID_OPTIONS", "7000 options of dice; expected at most 256"),
        ({"options_json": "[6]"}, "INVALID_OPTIONS", "JSON object"),
        ({"options_json": "{"}, "INVALID_OPTIONS", "no JSON"),
        ({"options_json": '{"faces": NaN}'}, "INVALID_OPTIONS", "NaN"),
        ({"options_json": "[" * 60_000}, "INVALID_OPTIONS", "nested more than 32 deep"),
        ({"options_json": nested(31)}, "INVALID_OPTIONS", "valid integer"),
        ({"options_json": nested(32)}, "INVALID_OPTIONS", "nested more than 32 deep; expected at most 32"),
        ({"options_json": nested(900)}, "INVALID_OPTIONS", "nested more than 32 deep"),
        ({"options_json": nested(30_000)}, "INVALID_OPTIONS", "nested more than 32 deep"),
        ({"options_json": json.dumps({"[" * 99 + '"': 6})}, "INVALID_OPTIONS", "unknown option"),
        ({"options_json": '{"faces": "[[' + '\\"' * 30_000}, "INVALID_OPTIONS", "no JSON"),
        ({"options_json": " " * 70_000}, "INVALID_OPTIONS", "70000"),
        ({"options_json": json.dumps({"faces": "é" * 40_000}, ensure_ascii=False)}, "INVALID_OPTIONS", "80013 bytes"),
        ({"environment_id": "levels", "options_json": '{"levels": "/etc/passwd"}'}, "INVALID_OPTIONS", "operator"),
        ({"limits": pb.Limits(max_turns=1_001)}, "INVALID_ITEM", "max_turns 1001"),
        ({"limits": pb.Limits(max_actions=10_001)}, "INVALID_ITEM", "max_actions 10001"),
        ({"limits": pb.Limits(max_actions_per_turn=1_001)}, "INVALID_ITEM", "max_actions_per_turn"),
        ({"limits": pb.Limits(wall_seconds=90_000)}, "INVALID_ITEM", "wall_seconds"),
        ({"limits": pb.Limits(wall_seconds=-1)}, "INVALID_ITEM", "wall_seconds"),
        ({"limits": pb.Limits(wall_seconds=float("nan"))}, "INVALID_ITEM", "wall_seconds"),
        ({"split": 9}, "INVALID_ITEM", "split 9"),
        ({"expected_version": "0.9"}, "VERSION_MISMATCH", "1.0"),
        ({"sealed_seed": b"secret", "level_seed": None}, "SEALED", "opens no sealed seeds"),
        ({"options_json": '{"worlds": 1}', "split": pb.SPLIT_HELD_OUT}, "NO_SUCH_INSTANCE", "held_out"),
    ],
)
async def test_reset(fields, expected, words):
    """Each refused by itself; its neighbour starts."""
    async with serving(DICE, LEVELS) as (stub, _):
        item = reset_item(**{key: value for key, value in fields.items() if value is not None})
        if "sealed_seed" in fields:
            item.ClearField("level_seed")
            item.sealed_seed = fields["sealed_seed"]
        bad, good = (await stub.Reset(pb.ResetRequest(items=[item, reset_item()]))).outcomes
        assert bad.request_id == item.request_id
        assert reason(bad) == expected
        assert words in bad.error.message
        assert good.HasField("started")


class Counted(str):
    """A text that counts how often it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_names_set_twice_are_found_in_one_pass():
    Counted.compared = 0
    with pytest.raises(ValueError, match="'999' is set twice"):
        distinct([(Counted(number), 0) for number in [*range(1_000), 999]])
    assert Counted.compared < 1_000


async def test_long_names_are_like_no_other_and_compared_with_none(monkeypatch):
    compared = []
    close_matches = difflib.get_close_matches

    def noted(name, known, **settings):
        compared.append(name)
        return close_matches(name, known, **settings)

    monkeypatch.setattr(difflib, "get_close_matches", noted)
    async with serving(DICE) as (stub, _):
        error = await reset_error(stub, reset_item("dice" * MEBIBYTE))
        assert reason(error) == "UNKNOWN_ENVIRONMENT"
        assert error.message.endswith("here. Served: dice.")
        error = await reset_error(stub, reset_item(options_json=json.dumps({"faces" * 12_000: 1})))
        assert reason(error) == "INVALID_OPTIONS"
        unknown = {f"faces{number}": 1 for number in range(200)}
        error = await reset_error(stub, reset_item(options_json=json.dumps(unknown)))
        assert "unknown option 'faces0'; did you mean 'faces'?" in error.message
        error = (await step(stub, "x" * MEBIBYTE, 1, "roll")).error
        assert reason(error) == "SESSION_UNKNOWN"
    assert compared == ["faces0"]


async def test_others_get_the_event_loop_between_the_items_of_a_batch():
    async with serving(DICE) as (_, server):
        items = [reset_item(options_json='{"faces": 0}') for _ in range(100)]
        data = pb.ResetRequest(items=items).SerializeToString()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        # Nothing in it is waited for: every item is refused.
        await server.service.reset(data, Call(Visit("Reset", ())))
        ticking.cancel()
        assert ticks >= len(items) - 2


async def test_calls_that_are_read_at_the_same_time_start_each_session_once():
    async with serving(DICE, max_sessions=60) as (_, server):
        data = pb.ResetRequest(items=[reset_item() for _ in range(50)]).SerializeToString()
        answers = await asyncio.gather(*(server.service.reset(data, Call(Visit("Reset", ()))) for _ in range(3)))
        assert answers[0] == answers[1] == answers[2]
        assert all(outcome.HasField("started") for outcome in pb.ResetResponse.FromString(answers[0]).outcomes)
        assert server.service.table.held == 50


async def test_calls_that_are_read_at_the_same_time_start_all_or_none():
    async with serving(DICE, max_sessions=60) as (_, server):
        batches = [pb.ResetRequest(items=[reset_item() for _ in range(50)]).SerializeToString() for _ in range(2)]
        calls = (server.service.reset(data, Call(Visit("Reset", ()))) for data in batches)
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, bytes)
        assert isinstance(second, ItemError)
        assert second.reason is Reason.SESSION_LIMIT
        assert server.service.table.held == 50


async def test_options_that_leave_no_instance_are_no_fault_of_the_environment():
    async with serving(*find_specs(["sokoban"])) as (stub, _):
        item = reset_item("sokoban", options_json='{"width": 5, "height": 3, "min_pushes": 9}')
        error = await reset_error(stub, item)
        assert details(error)[0].reason == "NO_SUCH_INSTANCE"
        assert "ask for fewer boxes or pushes" in error.message


async def test_nearest_name_is_in_the_metadata():
    async with serving(DICE, FAULTY) as (stub, _):
        info, _ = details(await reset_error(stub, reset_item("falty")))
        assert dict(info.metadata) == {"nearest": "faulty"}


async def test_version_mismatch_names_both():
    async with serving(DICE) as (stub, _):
        info, _ = details(await reset_error(stub, reset_item(expected_version="2")))
        assert dict(info.metadata) == {"served": "1.0", "expected": "2"}


def resume(**changes) -> pb.Resume:
    fields = {
        "turns": [pb.Actions(actions=["roll"])],
        "noise": [pb.NoiseSegment(from_step=1, noise_seed=3)],
        "digest": b"d" * 32,
    }
    return pb.Resume(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        ({}, "DIGEST_MISMATCH", "seeds, options"),
        ({"digest": b"d" * 31}, "INVALID_ITEM", "31 bytes"),
        ({"noise": []}, "INVALID_ITEM", "the first from step 1"),
        ({"noise": [pb.NoiseSegment(from_step=2, noise_seed=3)]}, "INVALID_ITEM", "the first from step 1"),
        ({"noise": [pb.NoiseSegment(from_step=each) for each in (1, 2, 1)]}, "INVALID_ITEM", "ascending"),
        ({"noise": [pb.NoiseSegment(from_step=each) for each in (1, 3)]}, "INVALID_ITEM", "none after 2"),
        ({"turns": [pb.Actions()]}, "INVALID_ITEM", "no actions in turn 1"),
        ({"turns": [pb.Actions(actions=["roll"])] * 1_001}, "INVALID_ITEM", "1001 turns"),
        ({"turns": [pb.Actions(actions=["stop"])] * 2}, "DIGEST_MISMATCH", "ended after turn 1"),
        ({"turns": [pb.Actions(actions=["roll"] * 500)] * 100}, "DIGEST_MISMATCH", "ended after turn"),
        (
            {"turns": [pb.Actions(actions=["roll"] * 500)] * 161},
            "INVALID_ITEM",
            "80500 actions; an episode of more than",
        ),
        ({"turns": [pb.Actions(actions=["x" * 65_000])] * 260}, "INVALID_ITEM", "cannot be resumed"),
        ({"noise": [pb.NoiseSegment(from_step=1)] * 4_096}, "DIGEST_MISMATCH", "seeds, options"),
        ({"noise": [pb.NoiseSegment(from_step=1)] * 4_097}, "INVALID_ITEM", "4097 noise segments"),
    ],
)
async def test_resume(changes, expected, words):
    async with serving(DICE) as (stub, _):
        error = await reset_error(stub, reset_item(resume=resume(**changes)))
        assert reason(error) == expected
        assert words in error.message


async def test_an_episode_that_has_outgrown_a_resume_is_lost_with_its_session():
    clock = Clock()
    async with serving(DICE, clock=clock) as (_, server), aconnect(server.address) as client:
        episode = await client.reset("dice", split=ClientSplit.ALL)
        await episode.step(["roll"] * 80_001)
        await episode.step("roll")  # As long as the session is there it goes on.
        clock.now += server.config.lease_seconds + 1
        with pytest.raises(EpisodeLost, match="80002 actions; an episode of more than 80000 cannot be resumed"):
            await episode.step("roll")


async def test_metadata_has_bounds():
    """A name that was cut could be another client's; what is more than gRPC takes is always refused, not at times."""
    async with serving(DICE) as (stub, _):

        async def named(name: str) -> pb.ResetOutcome:
            item = reset_item()
            item.request_id = b"the same of both"
            reply = await stub.Reset(pb.ResetRequest(items=[item]), metadata=(("turngym-client", name),))
            return reply.outcomes[0]

        one, other = await named("c" * 127 + "1"), await named("c" * 127 + "2")
        assert one.started.session_id != other.started.session_id
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await named("c" * 129)
        assert reason(call_status(refused.value)) == "INVALID_ITEM"
        assert "longer than 128 characters" in call_status(refused.value).message
        for _ in range(20):
            await stub.GetServer(pb.GetServerRequest(), metadata=(("x-anything", "v" * 7_000),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetServer(pb.GetServerRequest(), metadata=(("x-anything", "v" * 8_192),))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_resume_with_what_it_must_not_have():
    async with serving(DICE, UNSURE_DICE) as (stub, _):
        with_noise = reset_item(resume=resume())
        with_noise.noise_seed = 0
        assert reason(await reset_error(stub, with_noise)) == "INVALID_ITEM"
        without_level = reset_item(resume=resume())
        without_level.ClearField("level_seed")
        assert reason(await reset_error(stub, without_level)) == "INVALID_ITEM"
        assert reason(await reset_error(stub, reset_item("unsure_dice", resume=resume()))) == "NOT_REPLAYABLE"


async def test_split_that_is_not_served():
    async with serving(DICE, splits={Split.TRAIN, Split.VALIDATION}) as (stub, _):
        error = await reset_error(stub, reset_item(split=pb.SPLIT_HELD_OUT))
        assert reason(error) == "SPLIT_NOT_SERVED"
        assert details(error)[0].metadata["served"] == "train, validation"


async def test_request_ids():
    async with serving(DICE) as (stub, _):
        item = reset_item()
        started = await start(stub, item)
        assert await start(stub, item) == started
        other = pb.ResetItem()
        other.CopyFrom(item)
        other.level_seed = 8
        assert reason(await reset_error(stub, other)) == "REQUEST_ID_REUSED"
        fresh = reset_item()
        first, second = (await stub.Reset(pb.ResetRequest(items=[fresh, fresh]))).outcomes
        assert first.HasField("started")
        assert reason(second) == "INVALID_ITEM"


async def test_another_callers_request_id_is_another():
    async with serving(DICE) as (stub, _):
        request = pb.ResetRequest(items=[reset_item()])
        mine, yours = [
            (await stub.Reset(request, metadata=(("turngym-client", name),))).outcomes[0].started.session_id
            for name in ("me", "you")
        ]
        assert mine != yours


@pytest.mark.parametrize(
    ("action", "seen"),
    [
        ("x" * MEBIBYTE, ""),
        ("é" * (32 * 1024 + 1), ""),
        ("roll" + " " * (64 * 1024 - 4), "roll" + " " * (64 * 1024 - 4)),
        ("", ""),
        ("roll\0", ""),
        ("ｒoll", "ｒoll"),
    ],
)
async def test_bad_actions_are_play(action, seen):
    """No error: an invalid action that costs what one costs, with an observation that says what is legal."""
    async with serving(DICE) as (stub, _):
        session = (await start(stub)).session_id
        PLAYED.clear()
        transition = (await step(stub, session, 1, "roll", action, "roll")).transition
        assert ["roll", seen] == PLAYED
        assert transition.observation == "Say roll, slow or stop."
        assert (transition.action_valid, transition.actions_executed) == (False, 2)
        assert list(transition.action_rewards)[1:] == [-0.1]
        assert (await step(stub, session, 1, "roll", action, "roll")).transition == transition
        assert (await step(stub, session, 2, "roll")).transition.action_valid


async def test_what_was_sent_is_hashed_not_what_was_played():
    async with serving(DICE) as (stub, _):
        digests = set()
        for action in ("", "\0", "x" * 70_000, "y" * 70_000):
            session = (await start(stub)).session_id
            digests.add((await step(stub, session, 1, action)).transition.digest)
        assert len(digests) == 4


async def test_actions_over_the_turns_limit_are_left_out():
    async with serving(DICE) as (stub, _):
        session = (await start(stub)).session_id
        transition = (await step(stub, session, 1, *["roll"] * 5)).transition
        assert (transition.actions_executed, len(transition.action_rewards), transition.action_valid) == (3, 3, True)


async def test_steps():
    async with serving(DICE) as (stub, _):
        session = (await start(stub)).session_id
        assert reason(await step(stub, session, 1)) == "INVALID_ITEM"
        assert reason(await step(stub, session, 0, "roll")) == "WRONG_STEP_INDEX"
        assert reason(await step(stub, session, 2, "roll")) == "WRONG_STEP_INDEX"
        last = await step(stub, session, 1, "stop")
        assert last.transition.terminated
        assert reason(await step(stub, session, 2, "roll")) == "EPISODE_ENDED"
        assert await step(stub, session, 1, "stop") == last
        assert reason(await step(stub, session, 1, "roll")) == "WRONG_STEP_INDEX"
        assert reason(await step(stub, "nobody", 1, "roll")) == "SESSION_UNKNOWN"
        assert reason(await step(stub, "", 1, "roll")) == "SESSION_UNKNOWN"


async def test_the_same_session_twice_in_a_call():
    async with serving(DICE) as (stub, _):
        one, two = [(await start(stub)).session_id for _ in range(2)]
        items = [pb.StepItem(session_id=each, step_index=1, actions=["roll"]) for each in (one, two, one)]
        first, second, third = (await stub.Step(pb.StepRequest(items=items))).outcomes
        assert first.HasField("transition")
        assert second.HasField("transition")
        assert reason(third) == "INVALID_ITEM"
        assert (await step(stub, one, 2, "roll")).HasField("transition")


async def raw(server, method: str, data: bytes) -> bytes:
    async with grpc.aio.insecure_channel(server.address) as channel:
        return await channel.unary_unary(f"/turngym.v1.EnvironmentService/{method}")(data)


async def test_undecodable_bytes_in_one_item_of_64():
    async with serving(DICE) as (stub, server):
        sessions = [(await start(stub)).session_id for _ in range(64)]
        data = b""
        for position, session in enumerate(sessions):
            item = pb.StepItem(session_id=session, step_index=1).SerializeToString()
            item += wire.bytes_field(3, b"\xff\xfe" if position == 17 else b"roll")
            data += wire.bytes_field(1, item)
        data += pb.StepRequest(want_legal_actions=True).SerializeToString()
        with pytest.raises(DecodeError):
            pb.StepRequest.FromString(data)
        outcomes = pb.StepResponse.FromString(await raw(server, "Step", data)).outcomes
        assert [outcome.session_id for outcome in outcomes] == sessions
        assert [position for position in range(64) if not outcomes[position].HasField("transition")] == [17]
        assert all(outcome.transition.legal_actions.actions for outcome in outcomes if outcome.HasField("transition"))
        assert reason(outcomes[17]) == "INVALID_ITEM"
        assert "UTF-8" in outcomes[17].error.message
        assert (await step(stub, sessions[17], 1, "roll")).HasField("transition")


async def test_undecodable_bytes_elsewhere():
    async with serving(DICE) as (_, server):
        good = reset_item()
        surrogate = b"\xed\xa0\x80"
        bad_id = request_id()
        bad = wire.bytes_field(1, bad_id) + wire.bytes_field(2, surrogate)
        data = wire.bytes_field(1, bad) + wire.bytes_field(1, good.SerializeToString())
        first, second = pb.ResetResponse.FromString(await raw(server, "Reset", data)).outcomes
        assert (first.request_id, reason(first)) == (bad_id, "INVALID_ITEM")
        session = second.started.session_id

        data = wire.bytes_field(1, wire.bytes_field(1, surrogate))
        data += wire.bytes_field(1, pb.AdviseItem(session_id=session).SerializeToString())
        first, second = pb.AdviseResponse.FromString(await raw(server, "Advise", data)).outcomes
        assert reason(first) == "INVALID_ITEM"
        assert second.HasField("advice")

        ids = wire.bytes_field(1, surrogate) + wire.bytes_field(1, session.encode())
        first, second = pb.KeepAliveResponse.FromString(await raw(server, "KeepAlive", ids)).outcomes
        assert reason(first) == "SESSION_UNKNOWN"
        assert second.lease_seconds == 600
        closed = pb.CloseResponse.FromString(await raw(server, "Close", ids)).outcomes
        assert [outcome.closed for outcome in closed] == [False, True]

        for method in ("Reset", "Step", "Fork", "Advise", "KeepAlive", "Close", "GetServer", "GetEnvironment"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await raw(server, method, b"\x0a\xff")
            assert reason(call_status(refused.value)) == "INVALID_ITEM"


@pytest.mark.parametrize("character", ["a", "é", "\U0001f600"])
async def test_a_refusal_fits_into_the_metadata_that_any_client_takes(character):
    async with serving(DICE) as (stub, _):
        options = json.dumps({character * 10_000: 1}, ensure_ascii=False)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="dice", options_json=options))
        status = call_status(refused.value)
        assert reason(status) == "INVALID_OPTIONS"
        assert character * 200 in status.message
        assert len(quote(status.message)) + 4 / 3 * status.ByteSize() < 8 * 1024


async def test_batches_of_the_wrong_size():
    async with serving(DICE) as (stub, _):
        many = [pb.StepItem(session_id="x", step_index=1, actions=["roll"])] * 1_025
        for call in (
            stub.Reset(pb.ResetRequest()),
            stub.Step(pb.StepRequest()),
            stub.Fork(pb.ForkRequest()),
            stub.Advise(pb.AdviseRequest()),
            stub.KeepAlive(pb.KeepAliveRequest()),
            stub.Close(pb.CloseRequest()),
            stub.Step(pb.StepRequest(items=many)),
            stub.Step(pb.StepRequest(items=many[:1], max_wait_seconds=-1)),
            stub.Reset(pb.ResetRequest(items=[reset_item()], max_wait_seconds=float("nan"))),
            stub.ListEnvironments(pb.ListEnvironmentsRequest(page_size=1_001)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert reason(call_status(refused.value)) == "INVALID_ITEM"


@pytest.mark.parametrize("rpc", ["Reset", "Step", "Fork", "Advise", "KeepAlive", "Close"])
async def test_a_request_of_very_many_fields(rpc):
    """A megabyte of empty items would take a quarter of a gigabyte and seconds of the event loop."""
    async with serving(DICE) as (stub, server):
        for data in (b"\x0a\x00" * 500_000, b"\x0a\x00" * 500_000 + b"\x0a\x01\xff"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await raw(server, rpc, data)
            assert reason(call_status(refused.value)) == "INVALID_ITEM"
            assert "more than 100000 fields" in str(refused.value.details())
        assert (await step(stub, (await start(stub)).session_id, 1, "roll")).HasField("transition")


async def test_level_file(tmp_path):
    """Seed i is the i-th level of the split, in file order; one past the end is told how many there are."""
    path = tmp_path / "levels"
    path.write_text("5 3 9")
    host = EnvironmentHost(LEVELS, {"levels": str(path)})
    async with serving(host) as (stub, _):
        for seed, target in enumerate([5, 3, 9]):
            started = await start(stub, environment_id="levels", level_seed=seed)
            assert started.state.observation == f"Target {target}."
            assert started.limits == pb.Limits(max_turns=target + 1, max_actions=50, max_actions_per_turn=2)
        asked = await start(stub, environment_id="levels", level_seed=0, limits=pb.Limits(max_turns=2))
        assert asked.limits == pb.Limits(max_turns=2, max_actions=50, max_actions_per_turn=2)
        error = await reset_error(stub, reset_item("levels", level_seed=3))
        assert reason(error) == "NO_SUCH_INSTANCE"
        assert details(error)[0].metadata["count"] == "3"
        drawn = [await start(stub, environment_id="levels", level_seed=None) for _ in range(20)]
        assert {each.level_seed for each in drawn} <= {0, 1, 2}
        # Three worlds are too few to divide.
        assert reason(await reset_error(stub, reset_item("levels", split=pb.SPLIT_TRAIN))) == "SPLIT_NOT_SERVED"
        spec = (await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="levels"))).environment
        (every,) = [each for each in spec.splits if each.split == pb.SPLIT_ALL]
        assert (every.served, every.worlds.worlds, every.worlds.exact) == (True, 3, True)
        assert [each.split for each in spec.splits if each.served] == [pb.SPLIT_ALL]


async def test_level_files_are_told_apart_and_only_their_own_options_taken(tmp_path):
    """Resolved options name the file, so that digests and records do; what only a generator needs is refused."""
    hosts = []
    for name, text in (("one", "5 3"), ("two", "5 9"), ("copy", "5\n3\n")):
        (tmp_path / name).write_text(text)
        hosts.append(EnvironmentHost(LEVELS, {"levels": tmp_path / name}))
    states = []
    for host in hosts:
        async with serving(host) as (stub, _):
            states.append(await start(stub, environment_id="levels", level_seed=0, options_json='{"faces": 4}'))
            again = await start(stub, environment_id="levels", level_seed=0, options_json=states[-1].options_json)
            assert again.options_json == states[-1].options_json
            assert again.state.digest == states[-1].state.digest
    one, two, copy = states
    named = json.loads(one.options_json)
    assert named == {"faces": 4, "levels": named["levels"]}
    assert re.fullmatch("[0-9a-f]{16}", named["levels"])
    assert one.state.observation == two.state.observation
    assert one.options_json == copy.options_json != two.options_json
    assert one.state.digest == copy.state.digest != two.state.digest
    async with serving(hosts[0]) as (stub, _):
        for options, words in (
            ('{"worlds": 5}', "option 'worlds' of levels has no effect"),
            (two.options_json, f"this server serves levels {named['levels']!r}"),
            ('{"levels": 3}', f"this server serves levels {named['levels']!r}"),
            ('{"facse": 3}', "did you mean 'faces'? Known: faces."),
        ):
            error = await reset_error(stub, reset_item("levels", options_json=options))
            assert reason(error) == "INVALID_OPTIONS"
            assert words in error.message
        spec = (await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="levels"))).environment
        schema = json.loads(spec.options_schema_json)
        assert set(schema["properties"]) == {"faces", "levels"}
        assert schema["properties"]["levels"]["const"] == named["levels"]
        assert json.loads(spec.options_json) == {"faces": 6, "levels": named["levels"]}


async def test_long_waits_are_cut_and_unknown_page_tokens_taken():
    async with serving(DICE, FAULTY) as (stub, _):
        started = await stub.Reset(pb.ResetRequest(items=[reset_item()], max_wait_seconds=1e300))
        played = await step(stub, started.outcomes[0].started.session_id, 1, "roll", max_wait_seconds=1e300)
        assert played.HasField("transition")
        for token, ids in (("e", ["faulty"]), ("dice", ["faulty"]), ("no such page", []), ("\U0010ffff", [])):
            page = await stub.ListEnvironments(pb.ListEnvironmentsRequest(page_token=token))
            assert [each.id for each in page.environments] == ids


async def test_exceptions_are_told_bounded_and_on_one_line():
    async with serving(FAULTY) as (stub, _):
        session_id = (await start(stub, environment_id="faulty")).session_id
        error = (await step(stub, session_id, 1, "ramble")).error
        assert reason(error) == "ENVIRONMENT_FAILED"
        assert error.message == f"faulty failed in step 1: RuntimeError: first  [31msecond {'é' * 282}"
        session_id = (await start(stub, environment_id="faulty")).session_id
        assert (await step(stub, session_id, 1, "mute")).error.message == "faulty failed in step 1: MuteError"


@pytest.mark.parametrize("isolation", [None, Isolation()])
async def test_what_is_no_result_is_told_with_what_was_expected(isolation):
    fault = "EnvironmentFault: Faulty.step returned None; expected "
    async with serving(replace(FAULTY, isolation=isolation)) as (stub, _):
        for actions, told in (
            (["nothing"], f"{fault}turngym_server.environment.ActionResult"),
            (["go", "nothing"], fault),
            (["go", "stray"], "AttributeError: 'Faulty' object has no attribute 'nowhere'"),
            (["stray"], "AttributeError: 'Faulty' object has no attribute 'nowhere'"),
        ):
            session_id = (await start(stub, environment_id="faulty")).session_id
            error = (await step(stub, session_id, 1, *actions, max_wait_seconds=20)).error
            assert reason(error) == "ENVIRONMENT_FAILED"
            assert error.message.startswith(f"faulty failed in step 1: {told}")
        error = await reset_error(stub, reset_item("faulty", options_json='{"reset": "nothing"}'))
        assert error.message == (
            "faulty failed in a reset: EnvironmentFault: Faulty.reset returned None; "
            "expected turngym_server.environment.Start"
        )


async def test_a_reset_that_fails_is_remembered():
    async with serving(FAULTY) as (stub, _):
        item = reset_item("faulty", options_json='{"reset": "raise"}')
        error = await reset_error(stub, item)
        assert reason(error) == "ENVIRONMENT_FAILED"
        assert "no level today" in error.message
        assert await reset_error(stub, item) == error
        assert reason(await reset_error(stub, reset_item("faulty", options_json='{"reset": "long"}'))) == (
            "ENVIRONMENT_FAILED"
        )


async def test_unknown_environment_has_no_spec():
    async with serving(DICE) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="dic"))
        status = call_status(refused.value)
        assert reason(status) == "UNKNOWN_ENVIRONMENT"
        assert details(status)[0].metadata["nearest"] == "dice"


def test_default_limits_are_those_of_the_samples():
    """The tests' numbers rest on it."""
    assert DICE.limits == Limits(max_turns=20, max_actions=30, max_actions_per_turn=3)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("type", "TypeError: a validator's own"),
        ("exit", "SystemExit: 3"),
        ("cancel", "the work raised CancelledError"),
        ("raise", "RuntimeError: nothing to say"),
        ("nothing", "instructions returned NoneType; expected str"),
        ("surrogate", "lone surrogate at 1"),
        ("long", "instructions of 262146 bytes; at most 262144"),
    ],
)
async def test_options_and_instructions_that_fail_take_no_other_item_down(told, words):
    async with serving(FAULTY) as (stub, server):
        options = json.dumps({"told": told})
        items = [reset_item("faulty"), reset_item("faulty", options_json=options), reset_item("faulty")]
        before, failed, after = (await stub.Reset(pb.ResetRequest(items=items))).outcomes
        assert before.started.instructions == after.started.instructions == "Break something."
        assert reason(failed) == "ENVIRONMENT_FAILED"
        assert words in failed.error.message
        assert server.service.table.held == 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="faulty", options_json=options))
        assert reason(call_status(refused.value)) == "ENVIRONMENT_FAILED"
        assert words in str(refused.value.details())


async def test_the_longest_instructions_are_sent():
    async with serving(FAULTY) as (stub, _):
        begun = await start(stub, environment_id="faulty", options_json='{"told": "longest"}')
        assert begun.instructions == "é" * 131_072


async def test_instructions_that_hang_miss_the_deadline():
    GATE.clear()
    try:
        async with serving(THREADED_FAULTY) as (stub, _):
            options = '{"told": "hang"}'
            error = await reset_error(stub, reset_item("threaded_faulty", options_json=options))
            assert reason(error) == "STEP_DEADLINE"
            request = pb.GetEnvironmentRequest(environment_id="threaded_faulty", options_json=options)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetEnvironment(request, timeout=60)
            assert reason(call_status(refused.value)) == "STEP_DEADLINE"
    finally:
        GATE.set()


async def test_a_check_of_options_that_hangs_holds_up_nothing_else():
    GATE.clear()
    try:
        async with serving(replace(THREADED_FAULTY, step_deadline=1.0), DICE) as (stub, _):

            def hanging(number: int) -> str:
                return json.dumps({"told": f"hanging check {number}"})

            begun = await start(stub)
            others = (("turngym-client", "other"),)
            asked = [
                asyncio.ensure_future(reset_error(stub, reset_item("threaded_faulty", options_json=hanging(0))))
                for _ in range(2)
            ]
            # Who asks for options that are known, or is somebody else, is served meanwhile.
            assert (await step(stub, begun.session_id, 1, "roll")).HasField("transition")
            await start(stub)
            new = pb.ResetRequest(items=[reset_item(options_json='{"faces": 7}')])
            assert (await stub.Reset(new, metadata=others)).outcomes[0].HasField("started")
            for error in await asyncio.gather(*asked):
                assert reason(error) == "STEP_DEADLINE"
                assert "options of threaded_faulty ran past its deadline of 1 s" in error.message
            again = await reset_error(stub, reset_item("threaded_faulty", options_json=hanging(0)))
            assert "the check of these options of threaded_faulty ran past" in again.message
            # Of one call each item fails alone.
            items = [
                reset_item("threaded_faulty", options_json=options)
                for options in ('{"told": "new"}', hanging(1), hanging(2))
            ]
            outcomes = (await stub.Reset(pb.ResetRequest(items=items))).outcomes
            assert [outcome.HasField("started") for outcome in outcomes] == [True, False, False]
            # So many go on, and no more are begun; what is known is served.
            refused = await reset_error(stub, reset_item("threaded_faulty", options_json='{"told": "newer"}'))
            assert "the check of 2 other options of threaded_faulty ran past" in refused.message
            await start(stub, environment_id="threaded_faulty", options_json='{"told": "new"}')
            GATE.set()
            # Their threads end by themselves, in any order.
            async with asyncio.timeout(10):
                for options in (hanging(0), hanging(1), '{"told": "newer"}'):
                    while (await _asked(stub, options)).HasField("error"):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
    finally:
        GATE.set()


async def _asked(stub, options: str) -> pb.ResetOutcome:
    item = reset_item("threaded_faulty", options_json=options)
    return (await stub.Reset(pb.ResetRequest(items=[item]))).outcomes[0]
