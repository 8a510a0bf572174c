"""Rules about Reset: retries, seeds, what a start must hold, what must be refused, admission as a whole."""

import re

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import chain, expect
from turngym_server.conformance.connection import CallFailed, describe_status, retry_seconds
from turngym_server.conformance.probe import NOISE_SEED, Probe
from turngym_server.conformance.rule import NotApplicable, rule, server_rule

LARGEST_SEED = 2**64 - 1
MOST_TO_FILL = 1_024
"""Sessions that the rule about admission is willing to ask for."""


@rule
def reset_retried(probe: Probe) -> None:
    """Reset: the same request id and item again must return the same session and start."""
    item = probe.item(level_seed=None, noise_seed=None)
    first, again = (expect.started(probe.reset([item])[0]) for _ in range(2))
    expect.same(again.session_id, first.session_id, "the session")
    expect.same(again.state, first.state, "the state")
    expect.same((again.level_seed, again.noise), (first.level_seed, first.noise), "the seeds")


@rule
def reset_retried_after_a_turn(probe: Probe) -> None:
    """Reset: the same request id and item again, after turns were played, must return how the session began."""
    item = probe.item(limits=probe.roomy_limits())
    (episode,) = probe.start_items([item])
    episode.play(episode.an_action())
    again = expect.started(probe.reset([item])[0])
    expect.same(again.session_id, episode.session_id, "the session")
    expect.same((again.step_index, again.state.digest), (0, episode.started.state.digest), "where it began")


@rule
def reset_retried_after_close(probe: Probe) -> None:
    """Reset: the same request id and item again, soon after the session was closed, must not start another."""
    item = probe.item()
    (episode,) = probe.start_items([item])
    probe.connection.close([episode.session_id])
    again = expect.started(probe.reset([item])[0])
    expect.same(again.session_id, episode.session_id, "the session")


@rule
def request_id_of_another_item(probe: Probe) -> None:
    """Reset: a request id that was used for another item must be INVALID_ARGUMENT REQUEST_ID_REUSED."""
    item = probe.item()
    probe.start_items([item])
    other = probe.item(request_id=item.request_id, noise_seed=NOISE_SEED + 1)
    expect.refused(probe.reset([other])[0], "REQUEST_ID_REUSED")


@rule
def request_ids_of_two_clients(probe: Probe) -> None:
    """Reset: another client's request id must not lead to this client's session."""
    item = probe.item()
    (episode,) = probe.start_items([item])
    reply = probe.connection.another_client().reset(pb.ResetRequest(items=[item], max_wait_seconds=10))
    other = expect.started(probe.keep(expect.one_each(reply.outcomes, [item]))[0])
    expect.true(other.session_id != episode.session_id, "two clients were given the same session")


@server_rule
def request_id_of_another_length(probe: Probe) -> None:
    """Reset: a request id that is not of 16 bytes must be INVALID_ARGUMENT."""
    for wrong in (b"", b"x" * 15, b"x" * 17):
        expect.refused(probe.reset([probe.item(request_id=wrong)])[0], "INVALID_ITEM")


@server_rule
def request_id_twice(probe: Probe) -> None:
    """Reset: a request id that comes twice in a call must be INVALID_ARGUMENT the second time."""
    item = probe.item()
    outcomes = probe.reset([item, item])
    expect.started(outcomes[0])
    expect.refused(outcomes[1], "INVALID_ITEM")


@rule
def reset_pending(probe: Probe) -> None:
    """Reset: an outcome that is pending is collected by sending the same item, and it is the same session each time."""
    item = probe.item()
    request = pb.ResetRequest(items=[item], max_wait_seconds=1e-6)
    first = probe.keep(expect.one_each(probe.connection.reset(request).outcomes, [item]))[0]
    expect.same(first.request_id, item.request_id, "the request id")
    collected = expect.started(probe.reset([item])[0])
    if first.HasField("started"):
        expect.same(collected.session_id, first.started.session_id, "the session")
    else:
        expect.true(first.HasField("pending"), f"a session or pending was due; got {expect.describe(first)}")


@rule
def start(probe: Probe) -> None:
    """Reset: a start must have no turn, reward, success or end, a valid action and a digest of 32 bytes."""
    started = probe.start().started
    state = started.state
    facts = (started.step_index, state.reward, len(state.action_rewards), state.actions_executed, state.action_valid)
    expect.same(facts, (0, 0.0, 0, 0, True), "(turns, reward, number of rewards, actions executed, action_valid)")
    expect.same((state.terminated, state.truncated, state.end_reason), (False, False, 0), "the end")
    expect.true(not state.HasField("success"), "success is set")
    expect.same(len(state.digest), 32, "the digest's length")


@rule
def start_and_spec_agree(probe: Probe) -> None:
    """Reset: environment, version, options, split, split epoch and separator must be those asked for and served."""
    spec = probe.spec
    started = probe.start().started
    for name in ("version", "options_json", "split_epoch", "action_separator"):
        expect.same(getattr(started, name), getattr(spec, name), name)
    expect.same(started.environment_id, spec.id, "environment_id")
    expect.same(started.split, probe.split, "the split")
    expect.true(bool(started.instructions), "there are no instructions")
    expect.true(0 < started.lease_seconds <= probe.server.lease_seconds, f"lease_seconds is {started.lease_seconds}")


@rule
def limits_of_a_start(probe: Probe) -> None:
    """Reset: limits must be resolved in the reply, those that were asked for as they were asked for."""
    limits = probe.start().started.limits
    least = min(limits.max_turns, limits.max_actions, limits.max_actions_per_turn)
    expect.true(least > 0, f"by default they are {expect.one_line(limits)}")
    asked = probe.roomy_limits(max_turns=2)
    limits = probe.start(limits=asked).started.limits
    for name in ("max_turns", "max_actions", "max_actions_per_turn"):
        expect.same(getattr(limits, name), getattr(asked, name), name)


@rule
def limits_of_a_start_over_the_caps(probe: Probe) -> None:
    """Reset: limits over the caps, and wall_seconds below 0 or no number, must be INVALID_ARGUMENT."""
    wrong = probe.wrong_limits()
    for limits, outcome in zip(wrong, probe.reset([probe.item(limits=each) for each in wrong]), strict=True):
        with expect.case(expect.one_line(limits)):
            expect.refused(outcome, "INVALID_ITEM")


@rule
def options_of_a_start(probe: Probe) -> None:
    """Reset: options must be canonical JSON in the reply, those of GetEnvironment where none were asked for."""
    (default, asked) = probe.start_items([probe.item(), probe.item(options_json=f" {probe.spec.options_json} ")])
    expect.same(default.started.options_json, probe.spec.options_json, "options_json")
    expect.same(asked.started.options_json, probe.spec.options_json, "options_json, when sent back with spaces,")


@server_rule
def options_have_bounds(probe: Probe) -> None:
    """Reset: options nested more than 32 deep, or of more than 64 KiB of UTF-8, must be INVALID_ARGUMENT."""
    deep = '{"no_such_option": ' + "[" * 5_000 + "]" * 5_000 + "}"
    long = '{"no_such_option": "' + "é" * 33_000 + '"}'
    for name, options in (("10,000 brackets", deep), ("66,000 bytes", long)):
        with expect.case(name):
            expect.refused(probe.reset([probe.item(options_json=options)])[0], "INVALID_OPTIONS")


@server_rule
def client_names_have_a_bound(probe: Probe) -> None:
    """Reset: two clients whose long names begin alike must be two, or refused with INVALID_ARGUMENT."""
    item = probe.item()
    clients = [probe.connection.another_client("c" * 200 + each) for each in "12"]
    sessions: set[str] = set()
    for client in clients:
        try:
            outcomes = client.reset(pb.ResetRequest(items=[item])).outcomes
        except CallFailed as failure:
            expect.failed(failure.status, ["INVALID_ITEM"])
        else:
            started = probe.keep(expect.one_each(outcomes, [item]))[0].started
            expect.true(started.session_id not in sessions, "they were given the same session")
            sessions.add(started.session_id)


@rule
def session_ids(probe: Probe) -> None:
    """Reset: session ids must begin with a tag and a dot, be long enough to be unguessable, and all differ."""
    ids = [episode.session_id for episode in probe.start_items([probe.item() for _ in range(8)])]
    expect.same(len(set(ids)), len(ids), "the number of different ones")
    for session_id in ids:
        expect.true(bool(re.fullmatch(r"[^.]+\.\S{16,}", session_id)), f"{session_id!r} is none")


@rule
def seeds_are_drawn(probe: Probe) -> None:
    """Reset: seeds that are not set must be drawn, returned, and differ between sessions."""
    items = [probe.item(level_seed=None, noise_seed=None) for _ in range(4)]
    episodes = probe.start_items(items)
    noise = [episode.started.noise for episode in episodes]
    for segments in noise:
        expect.same([segment.from_step for segment in segments], [1], "the steps that noise begins at")
    expect.same(len({segments[0].noise_seed for segments in noise}), len(noise), "the number of different noise seeds")


@rule
def seeds_are_kept(probe: Probe) -> None:
    """Reset: seeds that are set, 0 among them, must be those of the reply."""
    for noise_seed in (0, LARGEST_SEED, NOISE_SEED):
        started = probe.start(noise_seed=noise_seed).started
        expect.same([(each.from_step, each.noise_seed) for each in started.noise], [(1, noise_seed)], "noise")
        expect.same(started.level_seed, probe.level_seed, "the level seed")
    outcome = probe.reset([probe.item(level_seed=0)])[0]
    if outcome.HasField("started"):
        expect.same(outcome.started.level_seed, 0, "the level seed")


@rule
def other_versions(probe: Probe) -> None:
    """Reset: another expected_version must be FAILED_PRECONDITION, with `served` and `expected` in the metadata."""
    served = probe.spec.version
    good, bad = (probe.item(expected_version=version) for version in (served, f"{served}.other"))
    outcomes = probe.reset([good, bad])
    expect.started(outcomes[0])
    expect.refused(outcomes[1], "VERSION_MISMATCH", served=served, expected=f"{served}.other")


@rule
def splits_that_there_are_not(probe: Probe) -> None:
    """Reset: a split that is not in the contract must be INVALID_ARGUMENT."""
    expect.refused(probe.reset([probe.item(split=99)])[0], "INVALID_ITEM")


@rule
def sealed_seeds(probe: Probe) -> None:
    """Reset: a sealed seed that the server cannot open must be refused, and one with a noise seed beside it too."""
    outcomes = probe.reset(
        [probe.item(sealed_seed=b"no seed of any board"), probe.item(sealed_seed=b"nor this", noise_seed=NOISE_SEED)]
    )
    for outcome in outcomes:
        expect.refused(outcome, "SEALED", "INVALID_ITEM", "NOT_PERMITTED")


@rule
def legal_actions_when_asked(probe: Probe) -> None:
    """Reset: legal actions must come when they are asked for, at most 1,000, and only then."""
    with_them, without = (
        probe.start_items([probe.item()], want_legal_actions=wanted)[0].started.state for wanted in (True, False)
    )
    expect.true(with_them.HasField("legal_actions"), "asked for, there are none")
    expect.true(not without.HasField("legal_actions"), "not asked for, they are there")
    expect.true(len(with_them.legal_actions.actions) <= 1_000, f"there are {len(with_them.legal_actions.actions)}")


@rule
def first_digest(probe: Probe) -> None:
    """Reset: the digest must be d_0 as environment.proto defines it."""
    for episode in (
        probe.start(),
        probe.start(limits=pb.Limits(max_turns=1, wall_seconds=5.0), noise_seed=LARGEST_SEED),
    ):
        expect.same(episode.state.digest, chain.start(episode.started), "the digest")


@server_rule
def admission(probe: Probe) -> None:
    """Reset: more items than there is room for must be RESOURCE_EXHAUSTED with RetryInfo, and none of them starts."""
    server = probe.connection.get_server()
    wanted = server.max_sessions - server.sessions + 1
    most = min(server.max_batch_items, MOST_TO_FILL)
    if wanted > most:
        raise NotApplicable(
            f"it would take {wanted} sessions to fill the server, and a call of the kit asks for {most}"
        )
    request = pb.ResetRequest(items=[probe.item() for _ in range(wanted)])
    expect.call_refused(lambda: probe.keep(probe.connection.reset(request, patient=False).outcomes), "SESSION_LIMIT")
    _, status = probe.connection.errors[-1]
    expect.true(retry_seconds(status) is not None, f"{describe_status(status)} came without google.rpc.RetryInfo")
    expect.same(probe.connection.get_server().sessions, server.sessions, "the number of sessions held")
