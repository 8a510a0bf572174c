"""Rules about every error that the other rules met. Checked last."""

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import expect
from turngym_server.conformance.connection import code_name, describe_status, error_info, retry_seconds
from turngym_server.conformance.probe import UNKNOWN_SESSION, Probe
from turngym_server.conformance.rule import Violation, server_rule

DOMAIN = "turngym"


@server_rule
def error_details(probe: Probe) -> None:
    """Errors: each must carry google.rpc.ErrorInfo of domain "turngym", with a reason that goes with its code."""
    probe.reset([probe.item(environment_id=f"{probe.spec.id}_not_there"), probe.item(request_id=b"short")])
    probe.step([pb.StepItem(session_id=UNKNOWN_SESSION, step_index=1, actions=["a"])])
    expect.true(bool(probe.connection.errors), "there is none, though wrong requests were sent")
    for rpc, status in probe.connection.errors:
        info = error_info(status)
        if info is None or info.domain != DOMAIN:
            raise Violation(f"{rpc} gave {describe_status(status)}, domain {info.domain if info else None!r}")
        if expect.CODES.get(info.reason) != code_name(status.code):
            raise Violation(f"{rpc} gave {describe_status(status)}")


@server_rule
def error_messages(probe: Probe) -> None:
    """Errors: each must have a message."""
    for rpc, status in probe.connection.errors:
        expect.true(bool(status.message.strip()), f"{rpc} gave {describe_status(status)}")


@server_rule
def retry_delays(probe: Probe) -> None:
    """Errors: RetryInfo, with a delay that is not negative, must come with RESOURCE_EXHAUSTED and with little else."""
    for rpc, status in probe.connection.errors:
        delay = retry_seconds(status)
        if code_name(status.code) == "RESOURCE_EXHAUSTED":
            expect.true(delay is not None and delay >= 0, f"{rpc} gave {describe_status(status)}, delay {delay}")
        elif code_name(status.code) != "UNAVAILABLE":
            expect.true(delay is None, f"{rpc} gave {describe_status(status)}, delay {delay}")


@server_rule
def environments_that_fail(probe: Probe) -> None:
    """Errors: nothing that the rules sent may make an environment fail, or a call fail with INTERNAL or UNKNOWN."""
    for rpc, status in probe.connection.errors:
        expect.true(code_name(status.code) not in ("INTERNAL", "UNKNOWN"), f"{rpc} gave {describe_status(status)}")
