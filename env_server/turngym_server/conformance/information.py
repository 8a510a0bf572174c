"""Rules about GetServer, ListEnvironments, GetEnvironment and the health service."""

import json
import re
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import chain, expect
from turngym_server.conformance.connection import SERVICE
from turngym_server.conformance.probe import Probe
from turngym_server.conformance.rule import NotApplicable, Violation, rule, server_rule

PEP_440 = re.compile(r"(\d+!)?\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9]+([._-][a-z0-9]+)*)?", re.I)
UNKNOWN_OPTION = "no_environment_has_this_option"


@server_rule
def health(probe: Probe) -> None:
    """Health: grpc.health.v1.Health must say SERVING for "" and for the service."""
    stub: Any = health_pb2_grpc.HealthStub(probe.connection.channel)
    for service in ("", SERVICE):
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        except grpc.RpcError as error:
            code = cast("grpc.Call", error).code()
            raise Violation(f"asked for {service!r} it fails with {code.name}") from error
        expect.same(reply.status, health_pb2.HealthCheckResponse.SERVING, f"the status for {service!r}")


@server_rule
def server_facts(probe: Probe) -> None:
    """GetServer: the version must be of PEP 440, the limits and the lease more than 0, each split named once."""
    server = probe.connection.get_server()
    expect.true(bool(PEP_440.fullmatch(server.version)), f"version {server.version!r}")
    for name in ("max_sessions", "max_batch_items", "max_action_bytes", "max_observation_bytes", "max_message_bytes"):
        expect.true(getattr(server, name) > 0, f"{name} is 0")
    expect.true(server.lease_seconds > 0, f"lease_seconds is {server.lease_seconds}")
    splits = list(server.splits)
    expect.true(pb.SPLIT_UNSPECIFIED not in splits and len(set(splits)) == len(splits), f"splits are {splits}")


@server_rule
def sessions_are_counted(probe: Probe) -> None:
    """GetServer: `sessions` must count those that are held, at most max_sessions."""
    probe.start_items([probe.item() for _ in range(3)])
    server = probe.connection.get_server()
    expect.true(3 <= server.sessions <= server.max_sessions, f"3 were started; it says {server.sessions}")


@server_rule
def list_is_ordered(probe: Probe) -> None:
    """ListEnvironments: environments must be ordered by id, each of them once."""
    ids = [each.id for each in probe.connection.list_environments(page_size=1_000).environments]
    expect.same(ids, sorted(set(ids)), "the order")


@server_rule
def list_in_pages(probe: Probe) -> None:
    """ListEnvironments: pages of one must give the same list, the last of them with an empty next_page_token."""
    whole = probe.connection.list_environments(page_size=1_000).environments
    found: list[pb.EnvironmentSummary] = []
    token = ""
    for _ in whole:
        page = probe.connection.list_environments(page_size=1, page_token=token)
        expect.true(len(page.environments) <= 1, f"a page of 1 holds {len(page.environments)}")
        found += page.environments
        token = page.next_page_token
        if not token:
            break
    expect.true(not token, f"after {len(found)} pages of one there is still a next_page_token")
    expect.same([each.id for each in found], [each.id for each in whole], "the list in pages")


@server_rule
def page_tokens_of_no_page(probe: Probe) -> None:
    """ListEnvironments: a page_token that no page gave must be no error; its page begins behind it, in order of ids."""
    whole = [each.id for each in probe.connection.list_environments(page_size=1_000).environments]
    for token in ("!", f"{whole[0]}!", "~~~"):
        page = probe.connection.list_environments(page_size=1_000, page_token=token).environments
        with expect.case(repr(token)):
            expect.same([each.id for each in page], [each for each in whole if each > token], "the page")


@server_rule
def page_size_has_a_cap(probe: Probe) -> None:
    """ListEnvironments: a page_size over 1,000 must be refused with INVALID_ARGUMENT."""
    expect.call_refused(lambda: probe.connection.list_environments(page_size=1_001), "INVALID_ITEM")


@server_rule
def unknown_environment(probe: Probe) -> None:
    """GetEnvironment: an unknown id must be NOT_FOUND, with `nearest` (a served id or nothing) in the metadata."""
    ids = {each.id for each in probe.connection.list_environments(page_size=1_000).environments}
    before = len(probe.connection.errors)
    expect.call_refused(lambda: probe.connection.get_environment(f"{probe.spec.id}_not_there"), "UNKNOWN_ENVIRONMENT")
    _nearest(probe, before, ids)


def _nearest(probe: Probe, before: int, ids: set[str]) -> None:
    for _, status in probe.connection.errors[before:]:
        metadata = expect.metadata(status)
        expect.true("nearest" in metadata, "there is no `nearest` in the metadata")
        expect.true(metadata["nearest"] in {"", *ids}, f"nearest is {metadata['nearest']!r}, which is not served")


@rule
def summary_and_spec_agree(probe: Probe) -> None:
    """GetEnvironment: id, version, family and summary must be those of ListEnvironments."""
    listed = probe.connection.list_environments(page_size=1_000).environments
    spec = probe.spec
    same = pb.EnvironmentSummary(id=spec.id, version=spec.version, family=spec.family, summary=spec.summary)
    expect.true(same in listed, f"the list does not hold {same.id} {same.version}, family {same.family!r}")


@rule
def spec_is_complete(probe: Probe) -> None:
    """GetEnvironment: version, family, instructions, action kind, determinism and step deadline must be given."""
    spec = probe.spec
    for name in ("version", "family", "instructions", "action_kind", "determinism", "step_deadline_seconds"):
        expect.true(bool(getattr(spec, name)), f"{name} is missing")


@rule
def tools_are_described(probe: Probe) -> None:
    """GetEnvironment: an environment of TOOL_CALL must give each tool's schema as a JSON object."""
    if probe.spec.action_kind != pb.ACTION_KIND_TOOL_CALL:
        raise NotApplicable("its actions are no tool calls")
    expect.true(bool(probe.spec.tools_json), "there are none")
    for tool in probe.spec.tools_json:
        _json_object(tool, "a tool's schema")


@rule
def options_are_canonical(probe: Probe) -> None:
    """GetEnvironment: options_json must be canonical JSON, and asking for exactly these options changes nothing."""
    spec = probe.spec
    options = _json_object(spec.options_json, "options_json")
    expect.same(spec.options_json, chain.canonical(options), "options_json")
    _json_object(spec.options_schema_json, "options_schema_json")
    expect.same(probe.connection.get_environment(spec.id, spec.options_json), spec, "the reply")


@rule
def bad_options(probe: Probe) -> None:
    """GetEnvironment: options that are unknown, no JSON, no object or hold NaN must be INVALID_OPTIONS."""
    for options in (json.dumps({UNKNOWN_OPTION: 1}), "{", "[]", "7", '{"a": NaN}'):
        with expect.case(repr(options)):
            expect.call_refused(
                lambda text=options: probe.connection.get_environment(probe.spec.id, text), "INVALID_OPTIONS"
            )


@rule
def limits_are_resolved(probe: Probe) -> None:
    """GetEnvironment: limits must be resolved (0 only for wall_seconds), within the caps, and as asked for."""
    spec = probe.spec
    for limits in (spec.limits, probe.connection.get_environment(spec.id, "", pb.Limits(max_turns=1)).limits):
        least = min(limits.max_turns, limits.max_actions, limits.max_actions_per_turn)
        expect.true(least > 0, f"limits are {expect.one_line(limits)}")
        for name in ("max_turns", "max_actions", "max_actions_per_turn", "wall_seconds"):
            value, cap = getattr(limits, name), getattr(spec.caps, name)
            expect.true(not cap or value <= cap, f"{name} {value} is over its cap {cap}")
    expect.same(limits.max_turns, 1, "max_turns, asked to be 1,")


@rule
def limits_over_the_caps(probe: Probe) -> None:
    """GetEnvironment: limits over the caps, and wall_seconds below 0 or no number, must be INVALID_ARGUMENT."""
    for limits in probe.wrong_limits():
        with expect.case(expect.one_line(limits)):
            expect.call_refused(
                lambda asked=limits: probe.connection.get_environment(probe.spec.id, "", asked), "INVALID_ITEM"
            )


@rule
def splits_are_listed(probe: Probe) -> None:
    """GetEnvironment: each split comes at most once, one at least is served, and GetServer names those that are."""
    infos = probe.spec.splits
    splits = [info.split for info in infos]
    expect.true(len(set(splits)) == len(splits) and pb.SPLIT_UNSPECIFIED not in splits, f"splits are {splits}")
    served = {info.split for info in infos if info.served}
    expect.true(bool(served), "none is served")
    expect.true(
        served <= set(probe.server.splits), f"GetServer names {list(probe.server.splits)}, this {sorted(served)}"
    )


@rule
def references_are_rates(probe: Probe) -> None:
    """GetEnvironment: floors and ceilings must be rates from 0 to 1 over some instances, world counts not negative."""
    for info in probe.spec.splits:
        for name in ("floor", "ceiling"):
            if info.HasField(name):
                score: pb.Reference = getattr(info, name)
                fits = 0 <= score.value <= 1 and 0 <= score.half_width <= 1 and score.instances > 0
                expect.true(fits, f"{name} of split {info.split} is {expect.one_line(score)}")
        if info.HasField("worlds"):
            worlds = info.worlds
            sampled = worlds.sample >= worlds.distinct > 0
            fits = worlds.worlds >= 0 and (not (worlds.sample or worlds.distinct) if worlds.exact else sampled)
            expect.true(fits, f"worlds of split {info.split} are {expect.one_line(worlds)}")


@server_rule
def listed_addresses_answer(probe: Probe) -> None:
    """GetServer: each address that it lists must answer, and be a server of the same version and splits."""
    addresses = list(probe.server.addresses)
    if not addresses:
        raise NotApplicable("it lists none: there is only the address that was called")
    expect.true(len(set(addresses)) == len(addresses), f"they are {addresses}")
    for address in addresses:
        with expect.case(address), probe.connection.at(address) as worker:
            server = worker.get_server()
            expect.same(
                (server.version, server.splits), (probe.server.version, probe.server.splits), "(version, splits)"
            )


def _json_object(text: str, what: str) -> dict[str, object]:
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise Violation(f"{what} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise Violation(f"{what} is no JSON object: {text[:100]}")
    return cast("dict[str, object]", value)
