"""A slice of the fuzz cases, against a real server process: nothing crashes, hangs, or fails as it should not."""

import asyncio
import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import grpc
import pytest
from google.rpc import status_pb2

from turngym.v1 import environment_pb2 as pb
from turngym_server.errors import ItemError, Reason
from turngym_server.rng import Rng

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fuzz")


@pytest.mark.parametrize(("kind", "cases"), [("requests", 800), ("front", 300)])
async def test_requests(fuzz, kind, cases):
    tally, result = await fuzz.fuzz(kind, 2, range(cases), lease_seconds=4.0)
    assert result["failures"] == {}
    assert tally.cases == cases
    assert all(tally.outcomes[f"{rpc} OK"] > 2 for rpc in fuzz.KINDS[kind].rpcs), tally.outcomes
    refused = Counter(name.split()[-1] for name in tally.outcomes)
    assert {"INVALID_ITEM", "INVALID_OPTIONS", "SESSION_UNKNOWN", "DIGEST_MISMATCH"} <= refused.keys()


async def test_access(fuzz):
    tally, result = await fuzz.fuzz("access", 2, range(600), lease_seconds=4.0)
    assert result["failures"] == {}
    assert tally.cases == 600
    for rpc in dict.fromkeys(fuzz.RPCS):
        assert tally.outcomes[f"{rpc} UNAUTHENTICATED"] > 0
        assert tally.outcomes[f"{rpc} OK"] > 0
    refused = Counter(name.split()[-1] for name in tally.outcomes)
    assert {"SESSION_UNKNOWN", "SPLIT_NOT_SERVED"} <= refused.keys()


@pytest.mark.parametrize("kind", ["bytes", "tls"])
async def test_bytes(fuzz, kind):
    tally, result = await fuzz.fuzz(kind, 2, range(300), lease_seconds=4.0)
    assert result["failures"] == {}
    assert tally.cases == tally.outcomes.total() == 300
    assert any("in TLS" in name for name in tally.outcomes) == (kind == "tls")


async def test_actions(fuzz):
    tally, result = await fuzz.fuzz("actions", 2, range(1_000))
    assert result["failures"] == {}
    assert tally.cases == 1_000
    for environment in result["environments"]:
        for kind in ("valid", "invalid"):
            assert tally.outcomes[f"{environment['id']} {kind}"] > 0


def test_a_case_is_known_by_its_number(fuzz):
    def cases() -> list[bytes]:
        started = pb.Started(session_id="tag.session", environment_id="bandit")
        served = [fuzz.Served("bandit", ("",))]
        return [fuzz.draw_request(Rng(1, case), "Reset", started, served) for case in range(200)]

    def attacks() -> list[object]:
        drawn = [fuzz.draw_attack(Rng(1, case)) for case in range(200)]
        return [each for each in drawn if each.kind != "a TLS hello"]  # Which has a part of its own choice.

    first = cases()
    assert first == cases()
    assert len(set(first)) == len(first)
    assert attacks() == attacks()


FINE = ItemError(Reason.INVALID_ITEM, "three apples; expected two").status()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"code": grpc.StatusCode.INTERNAL.value[0]}, "without a reason that goes with it"),
        ({"details": []}, "without a reason that goes with it"),
        ({"message": ""}, "INVALID_ITEM with an error of"),
        ({"message": "x" * 9_000}, "INVALID_ITEM with an error of"),
    ],
)
def test_what_is_wrong_with_a_status(fuzz, change, fault):
    status = type(FINE)()
    status.CopyFrom(FINE)
    for name, value in change.items():
        if name == "details":
            del status.details[:]
        else:
            setattr(status, name, value)
    found = fuzz.fault_of_status(status)
    assert fault in found if fault else not found


def test_an_environments_failure_is_one(fuzz):
    assert "ENVIRONMENT_FAILED" in fuzz.fault_of_status(ItemError(Reason.ENVIRONMENT_FAILED, "boom").status())


@pytest.mark.parametrize(
    ("transition", "fault"),
    [
        (pb.Transition(observation="Fine.", digest=bytes(32)), ""),
        (pb.Transition(reward=float("nan"), digest=bytes(32)), "reward nan"),
        (pb.Transition(digest=b"short"), "digest of 5 bytes"),
        (pb.Transition(observation="x" * 300_000, digest=bytes(32)), "300000 characters"),
    ],
)
def test_what_is_wrong_with_a_transition(fuzz, transition, fault):
    found = fuzz.fault_of_transition(transition)
    assert fault in found if fault else not found


STARTED = pb.Started(session_id="a", split=pb.SPLIT_HELD_OUT)


@pytest.mark.parametrize(
    ("rpc", "reply", "fault"),
    [
        ("Step", pb.StepResponse(outcomes=[pb.StepOutcome(session_id="a", error=FINE)]), ""),
        ("Step", pb.StepResponse(outcomes=[pb.StepOutcome(session_id="b", transition=pb.Transition())]), ""),
        ("Step", pb.StepResponse(outcomes=[pb.StepOutcome(session_id="a", transition=pb.Transition())]), "another's"),
        ("StepStream", pb.StepResponse(outcomes=[pb.StepOutcome(session_id="a", pending=pb.Pending())]), "another's"),
        ("Advise", pb.AdviseResponse(outcomes=[pb.AdviseOutcome(session_id="a", advice=pb.Advice())]), "another's"),
        ("KeepAlive", pb.KeepAliveResponse(outcomes=[pb.KeepAliveOutcome(session_id="a", lease_seconds=1)]), "another"),
        ("Fork", pb.ForkResponse(outcomes=[pb.ResetOutcome(started=STARTED)]), "a copy of another's"),
        ("Close", pb.CloseResponse(outcomes=[pb.CloseOutcome(session_id="a", closed=True)]), "was closed"),
        ("Close", pb.CloseResponse(outcomes=[pb.CloseOutcome(session_id="a")]), ""),
        ("GetServer", pb.GetServerResponse(), ""),
    ],
)
def test_what_trespasses(fuzz, rpc, reply, fault):
    found = fuzz.trespass(rpc, "a", reply)
    assert fault in found if fault else not found


def test_what_a_token_for_training_may_not_have(fuzz):
    assert fuzz.withheld("Reset", pb.ResetResponse(outcomes=[pb.ResetOutcome(started=STARTED)]))
    assert not fuzz.withheld("Reset", pb.ResetResponse(outcomes=[pb.ResetOutcome(error=FINE)]))
    assert not fuzz.withheld("Close", pb.CloseResponse())


def test_what_is_left_open(fuzz, monkeypatch):
    monkeypatch.setattr(fuzz, "CLOSING_SECONDS", 0.0)
    before = [fuzz.Resources(10, 5), fuzz.Resources(400, 20), fuzz.Resources(10, 90)]
    for now, fault in ((fuzz.Resources(18, 28), ""), (fuzz.Resources(19, 5), "=19"), (fuzz.Resources(9, 29), "=29")):
        monkeypatch.setattr(fuzz, "resources_of", lambda _, now=now: now)
        assert fault in (found := asyncio.run(fuzz.fault_of_resources(None, before)))
        assert bool(found) == bool(fault)


def test_a_reply_has_an_outcome_for_every_item(fuzz):
    tally = fuzz.Tally()
    data = pb.CloseRequest(session_ids=["a", "b"]).SerializeToString()
    fuzz.check_reply(tally, 7, "Close", data, pb.CloseResponse(outcomes=[pb.CloseOutcome(session_id="a")]))
    assert tally.failures == {7: "Close: 2 items, 1 outcomes"}


@pytest.mark.parametrize(
    ("rpc", "error", "expected"),
    [
        ("Advise", status_pb2.Status(code=14, message="try again"), True),
        ("Advise", FINE, False),
        ("Reset", status_pb2.Status(code=14, message="try again"), False),
    ],
)
def test_what_a_silent_workers_item_looks_like(fuzz, rpc, error, expected):
    reply = pb.AdviseResponse(outcomes=[pb.AdviseOutcome(advice=pb.Advice()), pb.AdviseOutcome(error=error)])
    assert fuzz.is_of_a_silent_worker(rpc, reply.SerializeToString()) == expected
    assert not fuzz.is_of_a_silent_worker(rpc, error)


def test_what_is_written_of_a_kind_leaves_the_others(fuzz, tmp_path):
    def result(cases: int, commit: str) -> dict[str, object]:
        memory = {"warm": 1024, "end": 2048, "peak": 4096}
        facts = {"seed": 1, "slowest_seconds": 0.5, "slowest_case": 3, "outcomes": {"Step OK": cases}, "failures": {}}
        return {"made_by": {"commit": commit}, "cases": cases, "memory_kib": memory, **facts}

    fuzz.write("front", result(7, "a" * 40), tmp_path)
    fuzz.write("requests", result(8, "b" * 40), tmp_path)
    fuzz.write("front", result(9, "c" * 40), tmp_path)
    written = json.loads((tmp_path / "fuzz.json").read_text())
    assert {kind: (part["cases"], part["made_by"]["commit"][0]) for kind, part in written.items()} == {
        "requests": (8, "b"),
        "front": (9, "c"),
    }
    heads = [line for line in (tmp_path / "fuzz.txt").read_text().splitlines() if "failures" in line]
    assert heads == [
        "8 requests, seed 1, commit bbbbbbb: 0 failures",
        "9 front, seed 1, commit ccccccc: 0 failures",
    ]
