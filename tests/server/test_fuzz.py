"""A slice of the fuzz cases, against a real server process: nothing crashes, hangs, or fails as it should not."""

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import grpc
import pytest

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

    first = cases()
    assert first == cases()
    assert len(set(first)) == len(first)


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


def test_a_reply_has_an_outcome_for_every_item(fuzz):
    tally = fuzz.Tally()
    data = pb.CloseRequest(session_ids=["a", "b"]).SerializeToString()
    fuzz.check_reply(tally, 7, "Close", data, pb.CloseResponse(outcomes=[pb.CloseOutcome(session_id="a")]))
    assert tally.failures == {7: "Close: 2 items, 1 outcomes"}
