"""Who may do what: tokens, roles and splits, and whose a session is."""

import itertools
import logging

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from sample_environments import COUNTED_DICE, DICE, FEW_DICE, LEVELS, LevelOptions
from serving import Clock, call_status, details, reason, request_id, reset_item, serving
from token_files import bearer, write_tokens

from turngym.v1 import environment_pb2 as pb
from turngym_server.access.roles import ROLES_OF_RPC
from turngym_server.access.tokens import new_token
from turngym_server.discovery import load_own
from turngym_server.environment import REGISTRY
from turngym_server.host import EnvironmentHost
from turngym_server.listening import SERVICE
from turngym_server.splits import Split, split_of

load_own()

RPCS = tuple(method.name for method in pb.DESCRIPTOR.services_by_name["EnvironmentService"].methods)
NOWHERE = "00000000.AAAAAAAAAAAAAAAAAAAAAA"


def requests(session_id: str) -> dict[str, object]:
    """A request of each RPC that is right but for who sends it."""
    return {
        "GetServer": pb.GetServerRequest(),
        "ListEnvironments": pb.ListEnvironmentsRequest(),
        "GetEnvironment": pb.GetEnvironmentRequest(environment_id="dice"),
        "Reset": pb.ResetRequest(items=[reset_item(split=pb.SPLIT_TRAIN)]),
        "Step": pb.StepRequest(items=[pb.StepItem(session_id=session_id, step_index=1, actions=["roll"])]),
        "Fork": pb.ForkRequest(
            items=[pb.ForkItem(request_id=request_id(), session_id=session_id, step_index=1, same_noise=True)]
        ),
        "Advise": pb.AdviseRequest(items=[pb.AdviseItem(session_id=session_id)]),
        "KeepAlive": pb.KeepAliveRequest(session_ids=[session_id]),
        "Close": pb.CloseRequest(session_ids=[session_id]),
    }


async def stream_once(stub, metadata, session_id: str) -> pb.StepStreamResponse:
    """The answer to one request in a stream of its own."""
    request = pb.StepStreamRequest(id=7, step=requests(session_id)["Step"])
    (answer,) = [each async for each in stub.StepStream(iter([request]), metadata=metadata)]
    assert answer.id == 7
    return answer


UNARY = tuple(requests(""))


async def refusal(call) -> tuple[str, str]:
    """The reason for which a whole call is refused, and what is said."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    status = call_status(refused.value)
    return reason(status), status.message


async def reset(stub, metadata, **fields) -> pb.ResetOutcome:
    item = reset_item(**{"split": pb.SPLIT_TRAIN, **fields})
    (outcome,) = (await stub.Reset(pb.ResetRequest(items=[item]), metadata=metadata)).outcomes
    return outcome


@pytest.mark.parametrize("rpc", UNARY)
async def test_nothing_without_a_token(rpc, tmp_path):
    """No token, wrong ones, an expired one: every RPC refuses the whole call, with words that tell nothing apart."""
    now = Clock()
    expires = "role = 'admin'\nexpires = 1970-01-01T00:16:40Z"  # Clock's now.
    tokens = write_tokens(tmp_path / "tokens.toml", alice="admin", late=expires)
    ((_, alice),) = tokens["alice"]
    wrong = {
        "another's": bearer(new_token("alice")),
        "nobody's": bearer(new_token("nobody")),
        "short": bearer("alice"),
        "empty": bearer(""),
        "long": bearer("alice." + "x" * 4_000),
        "no scheme": (("authorization", alice.removeprefix("Bearer ")),),
        "basic": (("authorization", alice.replace("Bearer", "Basic")),),
        "twice": (*tokens["alice"], *tokens["alice"]),
        "more": bearer(alice.removeprefix("Bearer ") + "x"),
        "binary": (("authorization-bin", alice.encode()),),
    }
    async with serving(DICE, now=now, tokens=tmp_path / "tokens.toml") as (stub, server):
        session = (await reset(stub, tokens["alice"])).started.session_id
        request = requests(session)[rpc]
        held = server.service.table.held
        method = getattr(stub, rpc)
        assert (await refusal(method(request)))[0] == "UNAUTHENTICATED"
        said = {name: await refusal(method(request, metadata=metadata)) for name, metadata in wrong.items()}
        assert said.pop("binary") == await refusal(method(request))
        assert len(set(said.values())) == 1
        assert next(iter(said.values()))[0] == "UNAUTHENTICATED"
        name, message = await refusal(method(request, metadata=tokens["late"]))
        assert name == "UNAUTHENTICATED"
        assert "'late' expired at 1970-01-01T00:16:40" in message
        now.now -= 1
        if rpc in ("GetServer", "ListEnvironments", "GetEnvironment", "Reset"):
            assert await method(request, metadata=tokens["late"])
            held += rpc == "Reset"
        assert server.service.table.held == held
        turn = pb.StepRequest(items=[pb.StepItem(session_id=session, step_index=1, actions=["roll"])])
        (outcome,) = (await stub.Step(turn, metadata=tokens["alice"])).outcomes
        assert outcome.HasField("transition")


MATRIX = {
    # role: splits of an environment that divides, and of one that does not.
    "train": ({Split.TRAIN, Split.VALIDATION}, {Split.ALL}),
    "evaluate": (set(Split), {Split.ALL}),
    "admin": (set(Split), {Split.ALL}),
}


@pytest.mark.parametrize("role", MATRIX)
async def test_every_role_rpc_and_split(role, tmp_path):
    levels = tmp_path / "levels.txt"
    levels.write_text("3\n5\n9\n")
    undivided = EnvironmentHost(LEVELS, LevelOptions(levels=levels).model_dump())
    tokens = write_tokens(tmp_path / "tokens.toml", someone=role)
    metadata = tokens["someone"]
    async with serving(DICE, undivided, tokens=tmp_path / "tokens.toml") as (stub, _):
        for number, split in enumerate(Split, start=1):
            for environment_id, allowed in zip(("dice", "levels"), MATRIX[role], strict=True):
                outcome = await reset(stub, metadata, environment_id=environment_id, level_seed=2, split=number)
                if split in allowed:
                    assert outcome.started.split == number
                    assert await every_rpc(stub, metadata, outcome.started.session_id) == set(UNARY)
                else:
                    assert reason(outcome) == "SPLIT_NOT_SERVED"
                    served = details(outcome.error)[0].metadata["served"]
                    assert set(served.split(", ")) == {each.value for each in allowed}
        offered = (await stub.GetServer(pb.GetServerRequest(), metadata=metadata)).splits
        assert set(offered) == {number for number, split in enumerate(Split, start=1) if split in MATRIX[role][0]} | {4}
        request = pb.GetEnvironmentRequest(environment_id="dice")
        infos = (await stub.GetEnvironment(request, metadata=metadata)).environment.splits
        assert {Split(pb.Split.Name(info.split)[6:].lower()) for info in infos if info.served} == MATRIX[role][0]


async def every_rpc(stub, metadata, session_id: str) -> set[str]:
    """The RPCs that do what they are for."""
    done = set()
    for rpc, request in requests(session_id).items():
        answer = await getattr(stub, rpc)(request, metadata=metadata)
        outcomes = getattr(answer, "outcomes", [])
        if not any(hasattr(outcome, "error") and outcome.HasField("error") for outcome in outcomes):
            done.add(rpc)
    return done


async def test_a_server_serves_no_role_what_it_does_not_serve(tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", trainer="train", board="evaluate", root="admin")
    async with serving(DICE, splits={Split.TRAIN, Split.HELD_OUT}, tokens=tmp_path / "tokens.toml") as (stub, _):
        served = {
            name: {split for split in (1, 2, 3, 4) if (await reset(stub, metadata, split=split)).HasField("started")}
            for name, metadata in tokens.items()
        }
    assert served == {"trainer": {1}, "board": {1, 3}, "root": {1, 3}}


def test_every_rpc_has_a_row():
    assert set(ROLES_OF_RPC) - {"ServerReflectionInfo"} == set(RPCS)


@pytest.mark.parametrize(("owner", "other"), list(itertools.permutations(["train", "train2", "evaluate", "admin"], 2)))
async def test_anothers_session_looks_like_none(owner, other, tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", train="train", train2="train", evaluate="evaluate", admin="admin")
    clock = Clock()
    async with serving(DICE, clock=clock, lease_seconds=10, tokens=tmp_path / "tokens.toml") as (stub, server):
        session = (await reset(stub, tokens[owner])).started.session_id

        async def answers(session_id: str) -> dict[str, str]:
            """What `other` is told, the id itself left out."""
            touching = {name: request for name, request in requests(session_id).items() if session_id in str(request)}
            assert set(touching) == {"Step", "Fork", "Advise", "KeepAlive", "Close"}
            for request in touching.values():
                if isinstance(request, pb.ForkRequest):
                    request.items[0].request_id = b"f" * 16
            return {
                rpc: str(await getattr(stub, rpc)(request, metadata=tokens[other])).replace(session_id, "ID")
                for rpc, request in touching.items()
            }

        none = await answers(NOWHERE)
        assert "SESSION_UNKNOWN" in none["Step"]
        clock.now += 6
        assert await answers(session) == none
        # Neither was the lease renewed nor anything played or closed.
        clock.now += 3
        turn = pb.StepRequest(items=[pb.StepItem(session_id=session, step_index=1, actions=["roll"])])
        (outcome,) = (await stub.Step(turn, metadata=tokens[owner])).outcomes
        assert outcome.HasField("transition")
        clock.now += 10
        server.service.table.sweep()
        assert await answers(session) == none
        (outcome,) = (await stub.Step(turn, metadata=tokens[owner])).outcomes
        assert reason(outcome) == "SESSION_EXPIRED"


async def test_a_stream_is_checked_request_by_request(tmp_path):
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(path, alice="train", bob="train")
    async with serving(DICE, tokens=path) as (stub, _):
        session = (await reset(stub, tokens["alice"])).started.session_id
        for metadata in (None, bearer(new_token("alice"))):
            assert (await refusal(stub.StepStream(metadata=metadata).read()))[0] == "UNAUTHENTICATED"
        (outcome,) = (await stream_once(stub, tokens["bob"], session)).step.outcomes
        assert reason(outcome) == "SESSION_UNKNOWN"
        (outcome,) = (await stream_once(stub, tokens["alice"], session)).step.outcomes
        assert outcome.HasField("transition")
        stream = stub.StepStream(metadata=tokens["alice"])
        request = pb.StepStreamRequest(id=1, step=requests(session)["Step"])
        await stream.write(request)
        assert (await stream.read()).HasField("step")
        path.write_text(path.read_text().replace("alice", "eve"))
        await stream.write(request)
        assert reason((await stream.read()).error) == "UNAUTHENTICATED"
        await stream.done_writing()


async def test_what_an_open_stream_may_do_follows_the_file_and_the_clock(tmp_path):
    """What was found out about a stream's caller holds for its later requests only as long as the tokens do."""
    path, clock, now = tmp_path / "tokens.toml", Clock(), Clock()
    tokens = write_tokens(path, alice="role = 'train'\nexpires = 1970-01-01T01:00:00Z")
    async with serving(DICE, tokens=path, clock=clock, now=now) as (stub, _):
        session = (await reset(stub, tokens["alice"])).started.session_id
        stream = stub.StepStream(metadata=tokens["alice"])

        async def answered() -> str:
            """Why a request is refused; "": it is not."""
            await stream.write(pb.StepStreamRequest(id=1, step=requests(session)["Step"]))
            response = await stream.read()
            return reason(response.error) if response.HasField("error") else ""

        assert [await answered() for _ in range(3)] == ["", "", ""]
        lines = path.read_text()
        path.write_text(lines + "requests_per_second = 1\n")
        assert [await answered() for _ in range(3)] == ["", "QUOTA_EXCEEDED", "QUOTA_EXCEEDED"]
        path.write_text(lines)
        assert [await answered() for _ in range(3)] == ["", "", ""]
        path.write_text(lines.replace("train", "evaluate"))
        assert await answered() == ""
        now.now = 3_599.0
        assert await answered() == ""
        now.now = 3_600.0
        assert await answered() == "UNAUTHENTICATED"
        await stream.done_writing()


async def test_without_tokens_a_session_is_whoevers_has_its_id():
    async with serving(DICE) as (stub, _):
        session = (await reset(stub, (("turngym-client", "one"),))).started.session_id
        assert await every_rpc(stub, (("turngym-client", "two"),), session) == set(UNARY)


async def test_a_request_id_is_remembered_for_its_caller(tmp_path):
    """The same request id and item from another token, or another client of the same, starts another session."""
    tokens = write_tokens(tmp_path / "tokens.toml", alice="train", bob="train")
    callers = [
        tokens["alice"],
        (*tokens["alice"], ("turngym-client", "one")),
        (*tokens["alice"], ("turngym-client", "two")),
        tokens["bob"],
        (*tokens["bob"], ("turngym-client", "one")),
    ]
    async with serving(DICE, tokens=tmp_path / "tokens.toml") as (stub, _):
        request = pb.ResetRequest(items=[reset_item(split=pb.SPLIT_TRAIN)])

        async def started() -> list[str]:
            answers = [await stub.Reset(request, metadata=metadata) for metadata in callers]
            return [answer.outcomes[0].started.session_id for answer in answers]

        first = await started()
        assert len(set(first)) == len(callers)
        assert await started() == first


async def reflect(address: str, metadata) -> set[str]:
    """Services that reflection names."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = [each async for each in stub.ServerReflectionInfo(iter([request]), metadata=metadata)]
        return {service.name for service in answer.list_services_response.service}


async def test_health_is_open_and_reflection_is_not(tmp_path):
    tokens = write_tokens(tmp_path / "tokens.toml", trainer="train", board="evaluate", root="admin")
    async with serving(DICE, tokens=tmp_path / "tokens.toml") as (_, server):
        async with grpc.aio.insecure_channel(server.address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert SERVICE in await reflect(server.address, tokens["root"])
        assert (await refusal(reflect(server.address, None)))[0] == "UNAUTHENTICATED"
        assert (await refusal(reflect(server.address, bearer(new_token("root")))))[0] == "UNAUTHENTICATED"
        for name in ("trainer", "board"):
            assert (await refusal(reflect(server.address, tokens[name])))[0] == "NOT_PERMITTED"
    async with serving(DICE) as (_, server):
        assert SERVICE in await reflect(server.address, None)


async def test_the_file_is_read_again_when_it_changes(tmp_path, caplog):
    path = tmp_path / "tokens.toml"
    first = write_tokens(path, alice="evaluate", bob="train")
    hello = pb.GetServerRequest()
    async with serving(DICE, tokens=path) as (stub, _):
        keep = pb.KeepAliveRequest(session_ids=[(await reset(stub, first["alice"])).started.session_id])
        # Half a file, one without tokens, one that others may read, and none at all change nothing.
        good = path.read_text()
        path.write_text(good[: len(good) // 3])
        await stub.GetServer(hello, metadata=first["alice"])
        path.write_text("")
        await stub.GetServer(hello, metadata=first["bob"])
        path.write_text(good)
        path.chmod(0o644)
        await stub.GetServer(hello, metadata=first["bob"])
        path.unlink()
        await stub.GetServer(hello, metadata=first["bob"])
        assert [record.levelname for record in caplog.records] == ["ERROR"] * 4
        # Bob is removed, and alice has another role: her sessions were made under the old one.
        path.write_text(good[: good.index("[bob]")].replace("evaluate", "train"))
        path.chmod(0o600)
        assert (await refusal(stub.GetServer(hello, metadata=first["bob"])))[0] == "UNAUTHENTICATED"
        (outcome,) = (await stub.KeepAlive(keep, metadata=first["alice"])).outcomes
        assert reason(outcome) == "SESSION_UNKNOWN"
        path.write_text(good)
        (outcome,) = (await stub.KeepAlive(keep, metadata=first["alice"])).outcomes
        assert outcome.lease_seconds
        await stub.GetServer(hello, metadata=first["bob"])


async def test_no_secret_is_logged_or_told(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "tokens.toml"
    tokens = write_tokens(path, alice="train", late="role = 'train'\nexpires = 1999-01-01T00:00:00Z")
    secret = new_token("alice")
    told = []
    async with serving(DICE, tokens=path) as (stub, _):
        for metadata in (tokens["alice"], tokens["late"], bearer(secret)):
            outcome = await asyncio_result(stub.Step(requests(NOWHERE)["Step"], metadata=metadata))
            told.append(str(outcome))
        # An operator puts the token itself where its hash belongs.
        path.write_text(f'[alice]\nrole = "train"\nsha256 = "{secret}"\n')
        await stub.GetServer(pb.GetServerRequest(), metadata=tokens["alice"])
    assert "alice" in caplog.text
    assert "never the token itself" in caplog.text
    for text in (caplog.text, *told):
        for _, value in (*tokens["alice"], *tokens["late"], *bearer(secret)):
            assert value.partition(".")[2] not in text


async def asyncio_result(call) -> object:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error


@pytest.mark.parametrize("id", sorted(REGISTRY))
async def test_a_train_token_meets_no_held_out_world(id, tmp_path):
    """Of every environment here, whatever split it asks for; experiments/access_matrix.py does it 100,000 times."""
    tokens = write_tokens(tmp_path / "tokens.toml", trainer="train", board="evaluate")
    async with serving(REGISTRY[id], tokens=tmp_path / "tokens.toml") as (stub, _):

        async def worlds(name: str, splits) -> set[str]:
            items = [reset_item(id, level_seed=seed, split=split) for seed in range(40) for split in splits]
            outcomes = (await stub.Reset(pb.ResetRequest(items=items), metadata=tokens[name])).outcomes
            return {outcome.started.world_id for outcome in outcomes if outcome.HasField("started")}

        held_out = await worlds("board", [pb.SPLIT_HELD_OUT])
        met = await worlds("trainer", pb.Split.values())
        assert len(met) > 20 or id.startswith("bandit")
        assert len(held_out) > 20 or id.startswith("bandit")
        assert not met & held_out


def held_out(family: str, worlds: int) -> set[int]:
    """Of the worlds 0 to `worlds` - 1 of a sample environment, those that are held out where it divides."""
    return {world for world in range(worlds) if split_of(family, 1, str(world).encode()) is Split.HELD_OUT}


async def test_a_train_token_meets_no_held_out_world_of_a_short_level_file(tmp_path):
    """All of its levels are of split `all`, yet they may be worlds that are held out where the family divides."""
    levels = tmp_path / "levels.txt"
    levels.write_text("\n".join(map(str, range(30))))
    host = EnvironmentHost(LEVELS, LevelOptions(levels=levels).model_dump())
    withheld = held_out("levels", 30)
    assert withheld
    tokens = write_tokens(tmp_path / "tokens.toml", trainer="train", board="evaluate", root="admin")
    async with serving(host, tokens=tmp_path / "tokens.toml") as (stub, _):
        for name, metadata in tokens.items():
            for seed in range(30):
                outcome = await reset(stub, metadata, environment_id="levels", level_seed=seed, split=pb.SPLIT_ALL)
                if name == "trainer" and seed in withheld:
                    assert reason(outcome) == "NOT_PERMITTED"
                    assert details(outcome.error)[0].metadata == {"role": "train"}
                    assert "Target" not in str(outcome)
                else:
                    assert outcome.started.state.observation == f"Target {seed}."
        # Neither by replay nor by a seed that the server draws.
        outcome = await reset(
            stub, tokens["board"], environment_id="levels", level_seed=min(withheld), split=pb.SPLIT_ALL
        )
        resume = pb.Resume(noise=[pb.NoiseSegment(from_step=1, noise_seed=11)], digest=outcome.started.state.digest)
        for name, refused in (("board", False), ("trainer", True)):
            outcome = await reset(
                stub,
                tokens[name],
                environment_id="levels",
                level_seed=min(withheld),
                split=pb.SPLIT_ALL,
                resume=resume,
            )
            assert outcome.HasField("error") == refused
        items = [reset_item("levels", level_seed=None, split=pb.SPLIT_ALL) for _ in range(100)]
        drawn = (await stub.Reset(pb.ResetRequest(items=items), metadata=tokens["trainer"])).outcomes
        assert not {outcome.started.level_seed for outcome in drawn if outcome.HasField("started")} & withheld
        assert all(outcome.HasField("started") for outcome in drawn)


@pytest.mark.parametrize(("spec", "withheld"), [(COUNTED_DICE, held_out("counted_dice", 30)), (FEW_DICE, set())])
async def test_options_that_leave_few_worlds_give_a_train_token_no_held_out_one(spec, withheld, tmp_path):
    """Of a family that does not divide by default, nothing is held out."""
    assert held_out(spec.family, 30)
    tokens = write_tokens(tmp_path / "tokens.toml", trainer="train")
    async with serving(spec, tokens=tmp_path / "tokens.toml") as (stub, _):
        items = [
            reset_item(spec.id, options_json='{"worlds": 30}', split=pb.SPLIT_ALL, level_seed=seed)
            for seed in range(300)
        ]
        outcomes = (await stub.Reset(pb.ResetRequest(items=items), metadata=tokens["trainer"])).outcomes
    met = {outcome.started.state.observation for outcome in outcomes if outcome.HasField("started")}
    assert met == {f"Target {world}." for world in range(30) if world not in withheld}
    assert {reason(outcome) for outcome in outcomes if outcome.HasField("error")} == (
        {"NOT_PERMITTED"} if withheld else set()
    )


async def test_a_seed_that_the_server_draws_is_drawn_again_until_it_may_be_met(tmp_path):
    withheld = held_out("counted_dice", 30)
    assert withheld
    tokens = write_tokens(tmp_path / "tokens.toml", trainer="train", board="evaluate")
    async with serving(COUNTED_DICE, tokens=tmp_path / "tokens.toml") as (stub, _):
        few = {"options_json": '{"worlds": 30}', "split": pb.SPLIT_ALL}
        items = [reset_item("counted_dice", level_seed=None, **few) for _ in range(300)]
        drawn = [
            each.started
            for each in (await stub.Reset(pb.ResetRequest(items=items), metadata=tokens["trainer"])).outcomes
        ]
        assert {each.state.observation for each in drawn} == {
            f"Target {world}." for world in range(30) if world not in withheld
        }
        # What is said of the seed is true of the episode that was started.
        for started in drawn[:20]:
            again = await reset(
                stub, tokens["board"], environment_id="counted_dice", level_seed=started.level_seed, **few
            )
            assert again.started.state == started.state
            assert again.started.instance_id == started.instance_id


async def test_where_every_level_is_held_out_a_drawn_one_is_refused_too(tmp_path):
    (tmp_path / "levels").write_text(str(min(held_out("levels", 30))))
    host = EnvironmentHost(LEVELS, LevelOptions(levels=tmp_path / "levels").model_dump())
    tokens = write_tokens(tmp_path / "tokens.toml", trainer="train")
    async with serving(host, tokens=tmp_path / "tokens.toml") as (stub, _):
        outcome = await reset(stub, tokens["trainer"], environment_id="levels", level_seed=None, split=pb.SPLIT_ALL)
    assert reason(outcome) == "NOT_PERMITTED"
    assert "1000 levels drawn" in outcome.error.message
