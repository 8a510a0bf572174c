"""Rules about batches: order, echoed ids, items that fail alone, and calls that are refused as a whole."""

from collections.abc import Callable

from google.protobuf.message import Message

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import expect
from turngym_server.conformance.probe import UNKNOWN_SESSION, Probe, new_request_id
from turngym_server.conformance.raw import BAD_UTF8, bad_text, items_field
from turngym_server.conformance.rule import Violation, rule, server_rule

MOST_ITEMS = 64
MOST_FIELDS = 100_000


def _batch_size(probe: Probe) -> int:
    """Items of a large batch: 64, or what the server takes and has room for."""
    server = probe.connection.get_server()
    return max(2, min(MOST_ITEMS, server.max_batch_items, server.max_sessions - server.sessions))


@rule
def resets_in_order(probe: Probe) -> None:
    """Reset: outcomes must come in the order of the items, request ids echoed, each item failing alone."""
    items = [
        probe.item(),
        probe.item(environment_id=f"{probe.spec.id}_not_there"),
        probe.item(),
        probe.item(options_json="["),
        probe.item(request_id=b"short"),
        probe.item(expected_version="no version"),
        probe.item(),
    ]
    outcomes = probe.reset(items)
    expect.same(
        [outcome.request_id.hex() for outcome in outcomes], [item.request_id.hex() for item in items], "their order"
    )
    reasons = (None, "UNKNOWN_ENVIRONMENT", None, "INVALID_OPTIONS", "INVALID_ITEM", "VERSION_MISMATCH", None)
    for outcome, reason in zip(outcomes, reasons, strict=True):
        if reason is None:
            expect.started(outcome)
        else:
            expect.refused(outcome, reason)


@rule
def steps_in_order(probe: Probe) -> None:
    """Step: outcomes must come in the order of the items, session ids and step indices echoed, each failing alone."""
    first, second, third = probe.start_items([probe.item(limits=probe.roomy_limits()) for _ in range(3)])
    items = [
        third.item(third.an_action()),
        pb.StepItem(session_id=UNKNOWN_SESSION, step_index=5, actions=["a"]),
        first.item(first.an_action()),
        second.item("a", step_index=7),
        pb.StepItem(step_index=1, actions=["a"]),
    ]
    outcomes = probe.step(items)
    expect.same(
        [(outcome.session_id, outcome.step_index) for outcome in outcomes],
        [(item.session_id, item.step_index) for item in items],
        "their order",
    )
    expect.transition(outcomes[0])
    expect.refused(outcomes[1], "SESSION_UNKNOWN")
    expect.transition(outcomes[2])
    expect.refused(outcomes[3], "WRONG_STEP_INDEX", expected="1")
    expect.refused(outcomes[4], "SESSION_UNKNOWN", "INVALID_ITEM")
    for episode, outcome in ((third, outcomes[0]), (first, outcomes[2])):
        again = episode.step(*items[0 if episode is third else 2].actions)
        if again != outcome:
            raise Violation("a session's outcome is another session's")


@rule
def forks_in_order(probe: Probe) -> None:
    """Fork: outcomes must come in the order of the items, request ids echoed, each item failing alone."""
    episode = probe.live()
    items = [
        episode.fork_item(),
        pb.ForkItem(request_id=new_request_id(), session_id=UNKNOWN_SESSION, same_noise=True),
        episode.fork_item(step_index=9),
        episode.fork_item(),
    ]
    outcomes = probe.fork(items)
    expect.same([outcome.request_id for outcome in outcomes], [item.request_id for item in items], "their order")
    expect.started(outcomes[0])
    expect.refused(outcomes[1], "SESSION_UNKNOWN")
    expect.refused(outcomes[2], "WRONG_STEP_INDEX")
    expect.started(outcomes[3])


@rule
def others_in_order(probe: Probe) -> None:
    """Advise, KeepAlive, Close: outcomes must come in the order of the items, ids echoed, each failing alone."""
    first, second = probe.start_items([probe.item(), probe.item()])
    ids = [second.session_id, UNKNOWN_SESSION, first.session_id]
    request = pb.AdviseRequest(items=[pb.AdviseItem(session_id=each) for each in ids])
    advised = expect.one_each(probe.connection.advise(request).outcomes, ids)
    kept = expect.one_each(probe.connection.keep_alive(ids).outcomes, ids)
    closed = expect.one_each(probe.connection.close(ids).outcomes, ids)
    for outcomes in (advised, kept, closed):
        expect.same([outcome.session_id for outcome in outcomes], ids, "their order")
    expect.refused(advised[1], "SESSION_UNKNOWN")
    expect.refused(kept[1], "SESSION_UNKNOWN")
    expect.same(
        [outcome.WhichOneof("outcome") for outcome in kept], ["lease_seconds", "error", "lease_seconds"], "kept"
    )
    expect.same([outcome.closed for outcome in closed], [True, False, True], "closed")


@rule
def undecodable_step(probe: Probe) -> None:
    """Step: one item of 64 whose text is no UTF-8 must be INVALID_ARGUMENT, and the others must be played."""
    size = _batch_size(probe)
    episodes = probe.start_items([probe.item() for _ in range(size - 1)])
    items = [episode.item(episode.an_action()).SerializeToString() for episode in episodes]
    bad = pb.StepItem(session_id=UNKNOWN_SESSION, step_index=1).SerializeToString() + bad_text(3)
    place = size // 2
    items.insert(place, bad)
    outcomes = expect.one_each(probe.connection.raw("Step", items_field(*items), pb.StepResponse).outcomes, items)
    expect.refused(outcomes[place], "INVALID_ITEM")
    ids = (outcomes[place].session_id, outcomes[place].step_index)
    expect.same(ids, (UNKNOWN_SESSION, 1), "the ids of the bad item")
    for outcome in (*outcomes[:place], *outcomes[place + 1 :]):
        if not outcome.HasField("pending"):
            expect.transition(outcome)


@rule
def undecodable_reset(probe: Probe) -> None:
    """Reset: one item whose text is no UTF-8 must be INVALID_ARGUMENT, and the others must start."""
    good, bad_id = probe.item(), new_request_id()
    bad = pb.ResetItem(request_id=bad_id).SerializeToString() + bad_text(2)
    data = items_field(good.SerializeToString(), bad)
    outcomes = probe.keep(expect.one_each(probe.connection.raw("Reset", data, pb.ResetResponse).outcomes, "ab"))
    expect.refused(outcomes[1], "INVALID_ITEM")
    expect.same(outcomes[1].request_id, bad_id, "the request id of the bad item")
    if not outcomes[0].HasField("pending"):
        expect.started(outcomes[0])


@server_rule
def undecodable_ids(probe: Probe) -> None:
    """KeepAlive, Close: an id that is no UTF-8 is no session's, and the others must be answered as usual."""
    episode = probe.start()
    data = items_field(BAD_UTF8, episode.session_id.encode())
    kept = expect.one_each(probe.connection.raw("KeepAlive", data, pb.KeepAliveResponse).outcomes, "ab")
    expect.refused(kept[0], "SESSION_UNKNOWN", "INVALID_ITEM")
    expect.true(kept[1].HasField("lease_seconds"), f"KeepAlive of a session gave {expect.describe(kept[1])}")
    closed = expect.one_each(probe.connection.raw("Close", data, pb.CloseResponse).outcomes, "ab")
    expect.same([outcome.closed for outcome in closed], [False, True], "closed")


@server_rule
def empty_batches(probe: Probe) -> None:
    """Batches: a call without items must be refused with INVALID_ARGUMENT."""
    connection = probe.connection
    calls: tuple[tuple[str, Callable[[], Message]], ...] = (
        ("Reset", lambda: connection.reset(pb.ResetRequest())),
        ("Step", lambda: connection.step(pb.StepRequest())),
        ("Fork", lambda: connection.fork(pb.ForkRequest())),
        ("Advise", lambda: connection.advise(pb.AdviseRequest())),
        ("KeepAlive", lambda: connection.keep_alive([])),
        ("Close", lambda: connection.close([])),
    )
    for rpc, call in calls:
        with expect.case(rpc):
            expect.call_refused(call, "INVALID_ITEM")


@server_rule
def batches_that_are_too_large(probe: Probe) -> None:
    """Batches: a call of more than max_batch_items items must be refused with INVALID_ARGUMENT."""
    size = probe.server.max_batch_items + 1
    steps = [pb.StepItem(session_id=UNKNOWN_SESSION, step_index=1, actions=["a"])] * size
    expect.call_refused(lambda: probe.connection.step(pb.StepRequest(items=steps)), "INVALID_ITEM")
    expect.call_refused(lambda: probe.connection.close([UNKNOWN_SESSION] * size), "INVALID_ITEM")


@server_rule
def requests_of_too_many_fields(probe: Probe) -> None:
    """Batches: a request of over 100,000 fields must be refused with INVALID_ARGUMENT, and one of half as many not."""
    full = pb.StepItem(session_id=UNKNOWN_SESSION, step_index=1, actions=[""] * MOST_FIELDS)
    half = pb.StepItem(session_id=UNKNOWN_SESSION, step_index=1, actions=[""] * (MOST_FIELDS // 2))
    expect.call_refused(lambda: probe.connection.step(pb.StepRequest(items=[full])), "INVALID_ITEM")
    expect.refused(probe.step([half])[0], "SESSION_UNKNOWN")


@server_rule
def largest_batch(probe: Probe) -> None:
    """Batches: a call of max_batch_items items must be answered item by item."""
    ids = [f"{UNKNOWN_SESSION}-{number}" for number in range(probe.server.max_batch_items)]
    outcomes = expect.one_each(probe.connection.close(ids).outcomes, ids)
    expect.same([outcome.session_id for outcome in outcomes], ids, "their order")


@server_rule
def bytes_that_are_no_message(probe: Probe) -> None:
    """Batches: bytes that are no protobuf message must be refused with INVALID_ARGUMENT."""
    expect.call_refused(lambda: probe.connection.raw("Step", b"\x0a\xff", pb.StepResponse), "INVALID_ITEM")


@server_rule
def waits_that_are_no_time(probe: Probe) -> None:
    """Reset, Step: max_wait_seconds below 0, infinite or no number must be refused with INVALID_ARGUMENT."""
    item = pb.StepItem(session_id=UNKNOWN_SESSION, step_index=1, actions=["a"])
    for wait in (-1.0, float("nan"), float("inf")):
        expect.call_refused(
            lambda seconds=wait: probe.connection.step(pb.StepRequest(items=[item], max_wait_seconds=seconds)),
            "INVALID_ITEM",
        )
        expect.call_refused(
            lambda seconds=wait: probe.connection.reset(
                pb.ResetRequest(items=[probe.item()], max_wait_seconds=seconds)
            ),
            "INVALID_ITEM",
        )
