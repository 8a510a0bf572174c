"""Environments whose instances have processes of their own."""

import asyncio
import json
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from proc import parent, runs
from sample_environments import DICE, FAULTY, LEVELS, UNSURE_DICE, make_spec
from server_process import ServerProcess
from serving import reason, request_id, reset_error, reset_item, serving, start, step
from unruly import Unruly, UnrulyOptions

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc
from turngym_client import Split, connect
from turngym_client.errors import EnvironmentFailed, EpisodeLost
from turngym_server.discovery import find_specs
from turngym_server.environment import EnvironmentSpec, Isolation
from turngym_server.host import EnvironmentHost
from turngym_server.processes.isolation import PLACES, Killings

HERE = Path(__file__).parent
UNRULY = make_spec("unruly", Unruly, UnrulyOptions, inline=True, step_deadline=1.0, isolation=Isolation())
PATIENCE = 20.0


def isolated(spec: EnvironmentSpec) -> EnvironmentSpec:
    return replace(spec, isolation=Isolation())


def eventually_gone(*pids: int) -> None:
    ends = time.monotonic() + PATIENCE
    while any(map(runs, pids)):
        assert time.monotonic() < ends, f"of processes {pids} one is still there"
        time.sleep(0.02)


@pytest.fixture
async def unruly() -> AsyncIterator[environment_pb2_grpc.EnvironmentServiceStub]:
    async with serving(UNRULY) as (stub, _):
        yield stub


async def begin(stub, **fields) -> str:
    return (await start(stub, reset_item("unruly", **fields))).session_id


async def ask(stub, session: str, step_index: int, action: str) -> int:
    """The process id that the environment answers with."""
    return int((await step(stub, session, step_index, action)).transition.observation)


async def finished(stub, session: str, step_index: int, *actions: str) -> pb.StepOutcome:
    while (outcome := await step(stub, session, step_index, *actions)).HasField("pending"):
        pass
    return outcome


# The same as without


async def everything(spec: EnvironmentSpec) -> list[object]:
    """What can be seen of an episode, its forks and its resumption."""
    seen: list[object] = []
    async with serving(spec) as (stub, _):
        started = await start(stub, reset_item(spec.id))
        request = pb.ResetRequest(items=[reset_item(spec.id)], want_legal_actions=True)
        seen += [started.state, started.instance_id, started.world_id, started.limits, started.instructions]
        seen.append((await stub.Reset(request)).outcomes[0].started.state)
        session = started.session_id
        turns = [["roll"], ["roll", "roll", "roll"], ["nonsense", "roll"], ["roll"]]
        for step_index, actions in enumerate(turns, start=1):
            seen.append((await finished(stub, session, step_index, *actions)).transition)
        seen.append((await stub.Advise(pb.AdviseRequest(items=[pb.AdviseItem(session_id=session)]))).outcomes[0].advice)
        for noise in ({"same_noise": True}, {"noise_seed": 5}):
            item = pb.ForkItem(request_id=request_id(), session_id=session, step_index=4, **noise)
            (outcome,) = (await stub.Fork(pb.ForkRequest(items=[item]))).outcomes
            seen.append(outcome.started.state)
            seen.append((await finished(stub, outcome.started.session_id, 5, "roll")).transition)
        resume = pb.Resume(
            turns=[pb.Actions(actions=actions) for actions in turns],
            noise=started.noise,
            digest=seen[9].digest,
        )
        resumed = await start(stub, reset_item(spec.id, level_seed=started.level_seed, resume=resume))
        seen.append(resumed.state)
        seen.append((await finished(stub, resumed.session_id, 5, "stop")).transition)
    return seen


async def test_an_isolated_episode_is_the_same():
    plain = await everything(DICE)
    assert len(plain) == 17
    assert plain[5].legal_actions.actions == ["roll", "slow", "stop"]
    assert await everything(isolated(DICE)) == plain


async def test_a_catalogue_is_played_in_processes(tmp_path):
    levels = tmp_path / "levels"
    levels.write_text("4 5 60")
    states = []
    for spec in (LEVELS, isolated(LEVELS)):
        async with serving(EnvironmentHost(spec, {"levels": str(levels)})) as (stub, _):
            started = await start(stub, reset_item("levels", level_seed=1))
            states.append((started.state, started.limits, (await finished(stub, started.session_id, 1, "roll"))))
            states[-1][2].session_id = ""
    assert states[0] == states[1]


async def test_what_it_raises_is_told_as_ever():
    async with serving(isolated(FAULTY)) as (stub, _):
        for action, words in {
            "raise": "KeyError: 'a missing wall'",
            "exit": "SystemExit: 3",
            "interrupt": "KeyboardInterrupt",
            "timeout": "TimeoutError: a connection of its own",
            "nan": "reward nan",
            "long": "observation of",
            "surrogate": "ENVIRONMENT_FAILED",
        }.items():
            session = (await start(stub, reset_item("faulty"))).session_id
            outcome = await finished(stub, session, 1, action)
            assert reason(outcome) == "ENVIRONMENT_FAILED"
            assert words in outcome.error.message or words == "ENVIRONMENT_FAILED", outcome.error.message
        error = await reset_error(stub, reset_item("faulty", options_json='{"reset": "raise"}'))
        assert "RuntimeError: no level today" in error.message


# Misbehaviour


@pytest.mark.parametrize("hang", ["sleep 600", "spin"])
async def test_a_hang_costs_one_episode(unruly, hang: str):
    hung, *others = [await begin(unruly) for _ in range(4)]
    pid = await ask(unruly, hung, 1, "pid")
    assert pid != os.getpid()
    under_way = asyncio.ensure_future(finished(unruly, hung, 2, hang))
    for step_index in range(1, 4):
        for each in others:
            assert (await finished(unruly, each, step_index, "go")).transition.observation.startswith(f"{step_index}, ")
    assert reason(await under_way) == "STEP_DEADLINE"
    eventually_gone(pid)
    assert reason(await step(unruly, hung, 2, hang)) == "STEP_DEADLINE"
    assert reason(await step(unruly, hung, 3, "go")) == "EPISODE_ENDED"
    assert (await unruly.Close(pb.CloseRequest(session_ids=[hung]))).outcomes[0].closed
    assert (await finished(unruly, await begin(unruly), 1, "go")).HasField("transition")


@pytest.mark.parametrize("hang", ["sleep 600", "spin"])
async def test_a_reset_that_hangs(unruly, hang: str):
    error = await reset_error(unruly, reset_item("unruly", options_json=json.dumps({"reset": hang})))
    assert reason(error) == "STEP_DEADLINE"
    assert (await finished(unruly, await begin(unruly), 1, "go")).HasField("transition")


@pytest.mark.parametrize(
    ("action", "words"), [("exit 3", "ended with status 3"), ("abort", "ended with signal SIGABRT")]
)
async def test_a_crash_costs_one_episode(unruly, action: str, words: str):
    crashed, other = await begin(unruly), await begin(unruly)
    outcome = await finished(unruly, crashed, 1, action)
    assert reason(outcome) == "ENVIRONMENT_FAILED"
    assert words in outcome.error.message
    assert (await finished(unruly, other, 1, "go")).HasField("transition")
    error = await reset_error(unruly, reset_item("unruly", options_json=json.dumps({"reset": action})))
    assert reason(error) == "ENVIRONMENT_FAILED"
    assert words in error.message


async def test_limits():
    bounds = Isolation(memory_mebibytes=4_000, cpu_seconds=1)
    async with serving(replace(UNRULY, step_deadline=30.0, isolation=bounds)) as (stub, _):
        session = await begin(stub)
        assert (await finished(stub, session, 1, "allocate 10")).HasField("transition")
        outcome = await finished(stub, session, 2, "allocate 8000")
        assert "MemoryError" in outcome.error.message
        outcome = await finished(stub, await begin(stub), 1, "spin")
        assert "ended with signal SIGXCPU" in outcome.error.message


def kill(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    eventually_gone(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_killed_from_outside_costs_no_episode(unruly, number, caplog):
    started, neighbour = await start(unruly, reset_item("unruly")), await begin(unruly)
    session = started.session_id
    first = (await finished(unruly, session, 1, "go")).transition
    pid = await ask(unruly, session, 2, "pid")
    await asyncio.to_thread(kill, pid, number)
    lost = await finished(unruly, session, 3, "go")
    assert reason(lost) == "SESSION_EXPIRED"
    assert f"its process ended with signal {number.name}" in lost.error.message
    # As with an expired lease it has no place any more, and is resumed by replay.
    assert reason(await step(unruly, session, 3, "go")) == "SESSION_EXPIRED"
    assert (await unruly.GetServer(pb.GetServerRequest())).sessions == 1
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
    resume = pb.Resume(turns=[pb.Actions(actions=["go"])], noise=started.noise, digest=first.digest)
    resumed = await begin(unruly, level_seed=started.level_seed, resume=resume)
    assert (await finished(unruly, resumed, 2, "go")).transition.observation.startswith("2, ")
    assert (await finished(unruly, neighbour, 1, "go")).HasField("transition")


async def test_a_turn_during_which_the_process_is_killed_is_no_result(unruly):
    session = await begin(unruly)
    pid = await ask(unruly, session, 1, "pid")
    under_way = asyncio.ensure_future(finished(unruly, session, 2, "sleep 0.9"))
    await asyncio.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    assert reason(await under_way) == "SESSION_EXPIRED"


async def test_who_is_killed_at_the_same_place_again_and_again_has_failed(unruly):
    """As where a turn takes all memory there is."""

    async def suicide() -> str:
        return reason(await finished(unruly, await begin(unruly), 1, "kill"))

    assert [await suicide() for _ in range(4)] == ["SESSION_EXPIRED"] * 2 + ["ENVIRONMENT_FAILED"] * 2
    # Elsewhere it has not.
    assert reason(await finished(unruly, await begin(unruly, noise_seed=12), 1, "kill")) == "SESSION_EXPIRED"
    error = await reset_error(unruly, reset_item("unruly", options_json='{"reset": "kill"}'))
    assert reason(error) == "ENVIRONMENT_FAILED"
    assert "ProcessKilled: its process ended with signal SIGKILL" in error.message


async def test_a_reset_whose_process_is_killed_is_made_in_another(unruly, tmp_path):
    reset = {"reset": f"kill {tmp_path / 'once'}"}
    session = (await start(unruly, reset_item("unruly", options_json=json.dumps(reset)))).session_id
    assert (tmp_path / "once").exists()
    assert (await finished(unruly, session, 1, "go")).HasField("transition")


async def test_places_of_killings_are_forgotten_in_turn():
    killings = Killings()
    assert [killings.excuses("here") for _ in range(3)] == [True, True, False]
    for other in range(PLACES):
        assert killings.excuses(other)
    assert killings.excuses("here")


async def test_a_fork_needs_no_process_of_the_original(unruly):
    session = await begin(unruly)
    pid = await ask(unruly, session, 1, "pid")
    await asyncio.to_thread(kill, pid, signal.SIGKILL)
    item = pb.ForkItem(request_id=request_id(), session_id=session, step_index=1, same_noise=True)
    (outcome,) = (await unruly.Fork(pb.ForkRequest(items=[item]))).outcomes
    # Its observation was the process's id: it does not play the same.
    assert "another observation" in outcome.error.message


def test_a_client_plays_on_after_its_process_was_killed():
    arguments = ("--env", "unruly_environment:Unruly", "--env", "unruly_environment:Unsure", "--isolate", "all")
    with ServerProcess(*arguments, "--splits", "all", path=HERE) as server, connect(server.address) as client:
        for name in ("unruly", "unsure"):
            episode = client.reset(name, split=Split.ALL)
            assert episode.step("go").observation.startswith("1, ")
            for pid in processes_of(server.process.pid):
                kill(pid, signal.SIGKILL)
            if name == "unruly":
                assert episode.step("go").observation.startswith("2, ")
                with pytest.raises(EnvironmentFailed, match="ProcessKilled"):  # It does not ask for ever.
                    episode.step("kill")
            else:
                with pytest.raises(EpisodeLost) as lost:
                    episode.step("go")
                assert lost.value.reason == "NOT_REPLAYABLE"


def processes_of(server: int) -> list[int]:
    """The processes that the templates of a server have made."""
    parents = {int(path.name): parent(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    return [pid for pid, made_by in parents.items() if parents.get(made_by) == server]


async def test_no_copy_without_determinism():
    async with serving(isolated(UNSURE_DICE)) as (stub, _):
        session = (await start(stub, reset_item("unsure_dice"))).session_id
        item = pb.ForkItem(request_id=request_id(), session_id=session, same_noise=True)
        (outcome,) = (await stub.Fork(pb.ForkRequest(items=[item]))).outcomes
        assert reason(outcome) == "ENVIRONMENT_FAILED"
        assert "determinism" in outcome.error.message


async def test_a_closed_session_leaves_no_process(unruly):
    session = await begin(unruly)
    pid, child = await ask(unruly, session, 1, "pid"), await ask(unruly, session, 2, "child")
    assert runs(child)
    await unruly.Close(pb.CloseRequest(session_ids=[session]))
    await asyncio.to_thread(eventually_gone, pid, child)


async def test_a_template_that_dies_is_replaced():
    async with serving(replace(UNRULY, step_deadline=PATIENCE)) as (stub, _):
        session = await begin(stub)
        pid = await ask(stub, session, 1, "pid")
        os.kill(parent(pid), signal.SIGKILL)
        await asyncio.to_thread(eventually_gone, pid)
        lost = await finished(stub, session, 2, "go")
        assert reason(lost) == "SESSION_EXPIRED"
        assert re.search("its process ended (along with the one that made it|with signal SIGKILL)", lost.error.message)
        assert (await finished(stub, await begin(stub), 1, "go")).HasField("transition")


# As an operator has it


def test_nothing_is_left_when_the_server_is_killed():
    arguments = ("--env", "unruly_environment:Unruly", "--isolate", "unruly", "--splits", "all")
    with ServerProcess(*arguments, path=HERE) as server, connect(server.address, patience=1.0) as client:
        episodes = [client.reset("unruly", split=Split.ALL) for _ in range(2)]
        pids = [int(episode.step("pid").observation) for episode in episodes]
        pids += [int(episode.step("child").observation) for episode in episodes]
        with grpc.insecure_channel(server.address) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            session = stub.Reset(pb.ResetRequest(items=[reset_item("unruly")])).outcomes[0].started.session_id
            item = pb.StepItem(session_id=session, step_index=1, actions=["pid"])
            pids.append(int(stub.Step(pb.StepRequest(items=[item])).outcomes[0].transition.observation))
            stub.Step.future(pb.StepRequest(items=[pb.StepItem(session_id=session, step_index=2, actions=["spin"])]))
            time.sleep(0.2)
            server.kill()
        eventually_gone(*pids)


def test_isolation_in_workers():
    arguments = ("--env", "unruly_environment:Unruly", "--isolate", "all", "--workers", "2", "--splits", "all")
    with ServerProcess(*arguments, path=HERE) as server, connect(server.address) as client:
        episodes = [client.reset("unruly", split=Split.ALL) for _ in range(2)]
        with pytest.raises(EnvironmentFailed, match="deadline"):
            episodes[0].step("spin")
        assert episodes[1].step("go").observation.startswith("1, ")


@pytest.mark.parametrize("hang", ["sleep 600", "spin"])
def test_sigterm_during_a_hung_turn(capfd, hang: str):
    arguments = ("--env", "unruly_environment:Unruly", "--isolate", "all", "--splits", "all", "--grace-seconds", "0")
    with ServerProcess(*arguments, path=HERE) as server, grpc.insecure_channel(server.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        session = stub.Reset(pb.ResetRequest(items=[reset_item("unruly")])).outcomes[0].started.session_id
        item = pb.StepItem(session_id=session, step_index=1, actions=[hang])
        outcomes = stub.Step(pb.StepRequest(items=[item], max_wait_seconds=0.1)).outcomes
        assert outcomes[0].HasField("pending")
        server.stop()
        assert server.process.returncode == 0
    assert capfd.readouterr().err == ""


def test_who_can_be_isolated():
    (spec,) = find_specs(["bandit"], ["all"])
    assert spec.isolation == Isolation()
    with pytest.raises(ValueError, match="--isolate 'sokoban' is not among the environments served: bandit"):
        find_specs(["bandit"], ["sokoban"])


async def test_a_class_that_its_process_cannot_find():
    class Local(Unruly):
        pass

    named = r"class \S*test_isolated\.test_a_class_that_its_process_cannot_find\.<locals>\.Local"
    with pytest.raises(OSError, match=f"^unruly cannot be isolated: {named} is made inside a function, .* move it"):
        async with serving(replace(UNRULY, environment=Local)):
            pass
    # As a class of the program that was started is.
    started = type("Started", (Unruly,), {"__module__": "__main__", "__qualname__": "Started"})
    with pytest.raises(OSError, match=r"class Started is part of the program that was started, .* to a module"):
        async with serving(replace(UNRULY, environment=started)):
            pass
    absent = type("Absent", (Unruly,), {"__module__": "no_such_module", "__qualname__": "Absent"})
    with pytest.raises(OSError, match=r"^unruly cannot be isolated: ModuleNotFoundError: .*no_such_module"):
        async with serving(replace(UNRULY, environment=absent)):
            pass
