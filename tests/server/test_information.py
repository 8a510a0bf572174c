"""What a server says of itself and of its environments."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import Field
from sample_environments import DICE, FAULTY, LEVELS, UNSURE_DICE
from serving import EVERY_SPLIT, call_status, reason, reset_item, serving, start

import turngym
from turngym.v1 import environment_pb2 as pb
from turngym_server.config import DEFAULT_SPLITS
from turngym_server.discovery import find_specs
from turngym_server.environment import Limits, Options
from turngym_server.host import EnvironmentHost
from turngym_server.reference import read_reference
from turngym_server.splits import Split


async def test_get_server():
    async with serving(DICE, splits=DEFAULT_SPLITS, max_sessions=5, lease_seconds=7) as (stub, _):
        assert await stub.GetServer(pb.GetServerRequest()) == pb.GetServerResponse(
            version=turngym.__version__,
            splits=[pb.SPLIT_TRAIN, pb.SPLIT_VALIDATION],
            max_sessions=5,
            lease_seconds=7,
            max_batch_items=1_024,
            max_action_bytes=65_536,
            max_observation_bytes=262_144,
            max_message_bytes=67_108_864,
            max_request_bytes=20_971_520,
        )


async def test_pages():
    specs = [replace(DICE, id=f"dice_{number}") for number in (3, 1, 2)]
    async with serving(*specs) as (stub, _):
        everything = (await stub.ListEnvironments(pb.ListEnvironmentsRequest())).environments
        assert [each.id for each in everything] == ["dice_1", "dice_2", "dice_3"]
        assert everything[0] == pb.EnvironmentSummary(
            id="dice_1", version="1.0", family="dice", summary="Dice for tests."
        )
        first = await stub.ListEnvironments(pb.ListEnvironmentsRequest(page_size=2))
        assert [each.id for each in first.environments] == ["dice_1", "dice_2"]
        second = await stub.ListEnvironments(pb.ListEnvironmentsRequest(page_size=2, page_token=first.next_page_token))
        assert [each.id for each in second.environments] == ["dice_3"]
        assert not second.next_page_token


async def test_get_environment():
    async with serving(DICE, UNSURE_DICE, splits={Split.VALIDATION}) as (stub, _):
        request = pb.GetEnvironmentRequest(
            environment_id="dice", options_json='{"faces": 8}', limits=pb.Limits(max_turns=4)
        )
        spec = (await stub.GetEnvironment(request)).environment
        assert (spec.id, spec.version, spec.family, spec.action_separator) == ("dice", "1.0", "dice", "||")
        assert spec.options_json == '{"faces":8,"worlds":1000000}'
        assert spec.instructions == "Roll a die of 8 in at most 4 turns."
        assert spec.limits == pb.Limits(max_turns=4, max_actions=30, max_actions_per_turn=3)
        assert spec.caps == pb.Limits(
            max_turns=1_000, max_actions=10_000, max_actions_per_turn=1_000, wall_seconds=86_400
        )
        assert (spec.determinism, spec.action_kind) == (pb.DETERMINISM_BYTES, pb.ACTION_KIND_TEXT)
        assert (spec.split_epoch, spec.step_deadline_seconds) == (1, 30)
        schema = json.loads(spec.options_schema_json)
        assert (schema["properties"]["faces"]["default"], schema["additionalProperties"]) == (6, False)
        assert [each.split for each in spec.splits] == [1, 2, 3, 4]
        assert [each.split for each in spec.splits if each.served] == [pb.SPLIT_VALIDATION]
        unsure = await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="unsure_dice"))
        assert unsure.environment.determinism == pb.DETERMINISM_NONE
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="dice", options_json='{"face": 8}'))
        assert reason(call_status(refused.value)) == "INVALID_OPTIONS"


def entry(split: str, worlds: float, **scores) -> dict:
    return {
        "options": {"worlds": 1_000_000, "faces": 6},
        "limits": {"max_turns": 20, "max_actions": 30, "max_actions_per_turn": 3, "wall_seconds": None},
        "split": split,
        "worlds": {"worlds": worlds, "exact": False, "sample": 5_000, "distinct": 900},
        **scores,
    }


SCORES = {
    "floor": {"value": 0.25, "half_width": 0.01, "instances": 512, "exact": False},
    "ceiling": {"value": 1.0, "half_width": 0.0, "instances": 512, "exact": True},
}


def write_reference(folder, entries, **fields):
    content = {"environment": "dice", "version": "1.0", "split_epoch": 1, "entries": entries, "made_by": {}, **fields}
    (folder / "dice.json").write_text(json.dumps(content))


async def test_reference_figures(tmp_path, monkeypatch):
    write_reference(tmp_path, [entry("held_out", 200, **SCORES), entry("train", 1_600.5)])
    monkeypatch.setattr("turngym_server.reference.FOLDER", tmp_path)
    monkeypatch.setattr("turngym_server.host.read_reference", lambda spec: read_reference(spec, tmp_path))
    async with serving(DICE) as (stub, _):

        async def splits(**fields):
            spec = await stub.GetEnvironment(pb.GetEnvironmentRequest(environment_id="dice", **fields))
            return {each.split: each for each in spec.environment.splits}

        exact = await splits()
        held_out = exact[pb.SPLIT_HELD_OUT]
        assert held_out.worlds == pb.WorldCount(worlds=200, exact=False, sample=5_000, distinct=900)
        assert held_out.floor == pb.Reference(value=0.25, half_width=0.01, instances=512, exact=False)
        assert held_out.ceiling == pb.Reference(value=1, half_width=0, instances=512, exact=True)
        assert exact[pb.SPLIT_TRAIN].worlds.worlds == 1_600.5
        assert not exact[pb.SPLIT_TRAIN].HasField("floor")
        assert not exact[pb.SPLIT_VALIDATION].HasField("worlds")
        # Other limits: the same worlds, no score. Other options: nothing.
        limited = (await splits(limits=pb.Limits(max_turns=3)))[pb.SPLIT_HELD_OUT]
        assert (limited.HasField("worlds"), limited.HasField("floor")) == (True, False)
        other = (await splits(options_json='{"faces": 7}'))[pb.SPLIT_HELD_OUT]
        assert not other.HasField("worlds")


def test_too_few_worlds_are_not_divided(tmp_path, monkeypatch):
    monkeypatch.setattr("turngym_server.host.read_reference", lambda spec: read_reference(spec, tmp_path))
    options = '{"faces":6,"worlds":1000000}'
    for worlds, served in ((199.9, (Split.ALL,)), (200, (Split.TRAIN,))):
        write_reference(tmp_path, [entry("held_out", worlds)])
        host = EnvironmentHost(DICE)
        assert host.splits(host.resolve_options(options), {Split.TRAIN}) == served
    host = EnvironmentHost(FAULTY)
    assert host.splits(host.defaults, EVERY_SPLIT) == tuple(Split)


@pytest.mark.parametrize(
    ("options", "served"),
    [({"high_pays": 0.5}, (Split.ALL,)), ({"names": "pairs", "high_pays": 0.5}, (Split.TRAIN,))],
)
def test_worlds_known_by_construction_need_no_counting(options, served):
    (bandit,) = find_specs(["bandit"])
    host = EnvironmentHost(bandit)
    assert host.splits(host.resolve_options(json.dumps(options)), {Split.TRAIN}) == served


def test_figures_of_another_version_are_not_this_ones(tmp_path):
    for fields in ({"version": "0.9"}, {"split_epoch": 2}):
        write_reference(tmp_path, [entry("held_out", 10, **SCORES)], **fields)
        assert not read_reference(DICE, tmp_path).worlds
    write_reference(tmp_path, [entry("held_out", 10, **SCORES)])
    reference = read_reference(DICE, tmp_path)
    assert list(reference.scores) == [('{"faces":6,"worlds":1000000}', Limits(20, 30, 3), Split.HELD_OUT)]


def test_a_malformed_reference_file_is_named(tmp_path):
    write_reference(tmp_path, [entry("held_out", 10, floors={})])
    with pytest.raises(ValueError, match=r"dice\.json: malformed"):
        read_reference(DICE, tmp_path)


def test_a_catalogue_divides_once_it_has_200_held_out_worlds(tmp_path):
    path = tmp_path / "levels"
    path.write_text("\n".join(str(number) for number in range(1_000)))
    few = EnvironmentHost(LEVELS, {"levels": path})
    assert few.splits(few.defaults, EVERY_SPLIT) == (Split.ALL,)
    path.write_text("\n".join(str(number) for number in [*range(3_000), *range(3_000)]))
    many = EnvironmentHost(LEVELS, {"levels": path})
    assert many.splits(many.defaults, {Split.TRAIN}) == (Split.TRAIN,)
    assert many.world_count("", Split.ALL).worlds == 3_000


async def test_seeds_left_open_are_drawn():
    async with serving(DICE) as (stub, _):
        drawn = [await start(stub, level_seed=None, noise_seed=None) for _ in range(3)]
        assert len({each.level_seed for each in drawn}) == 3
        assert len({each.noise[0].noise_seed for each in drawn}) == 3
        first = await start(stub, level_seed=drawn[0].level_seed, noise_seed=drawn[0].noise[0].noise_seed)
        assert first.state.digest == drawn[0].state.digest
        zero = await start(stub, level_seed=0, noise_seed=0)
        assert (zero.level_seed, zero.noise[0].noise_seed) == (0, 0)


async def test_a_split_is_kept_to():
    """Instances of each split are of it, and the unset split is train."""
    from turngym_server.splits import split_of, world_id

    async with serving(DICE) as (stub, _):
        for number, split in ((0, Split.TRAIN), (1, Split.TRAIN), (2, Split.VALIDATION), (3, Split.HELD_OUT)):
            items = [reset_item(split=number, level_seed=seed) for seed in range(20)]
            for outcome in (await stub.Reset(pb.ResetRequest(items=items))).outcomes:
                started = outcome.started
                world = started.state.observation.split()[1][:-1].encode()
                assert split_of("dice", 1, world) is split
                assert started.world_id == world_id("dice", 1, world)
                assert started.split == (number or 1)


async def test_instance_ids_name_instances():
    async with serving(DICE) as (stub, _):
        base, same, other, faces = [
            (await start(stub, **fields)).instance_id
            for fields in ({}, {"noise_seed": 5}, {"level_seed": 8}, {"options_json": '{"faces": 5}'})
        ]
        assert base == same
        assert len({base, other, faces}) == 3
        assert len(bytes.fromhex(base)) == 16


async def test_health_and_reflection():
    async with serving(DICE) as (_, server), grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "turngym.v1.EnvironmentService"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        async for reply in call:
            names = {each.name for each in reply.list_services_response.service}
            assert "turngym.v1.EnvironmentService" in names


class NoDefault(Options):
    faces: int


class NoSchema(Options):
    faces: Callable[[], int] = int


class RefusedDefault(Options):
    faces: int = Field(default=1, ge=2)


class UnwrittenDefault(Options):
    share: float = math.inf


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (NoDefault, "dice: its options need defaults that can be had: dice: option 'faces': Field required"),
        (NoSchema, "dice: its options have no JSON Schema: "),
        (
            RefusedDefault,
            "dice: its options need defaults that can be had: dice: option 'faces': Input should be",
        ),
        (UnwrittenDefault, "dice: its options need defaults that can be had: options of dice cannot be written"),
    ],
)
def test_an_environment_that_nobody_could_ask_for_is_not_served(options: type[Options], said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        EnvironmentHost(replace(DICE, options=options))
