"""Rules about StepStream: what holds for Step holds for each request of a stream."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import chain, expect
from turngym_server.conformance.connection import CallFailed, Stream, code_name
from turngym_server.conformance.probe import NO_ACTION, UNKNOWN_SESSION, Episode, Probe
from turngym_server.conformance.raw import bad_text
from turngym_server.conformance.rule import NotApplicable, Violation, rule, server_rule

REQUESTS = 16
"""Under way at once where rules are about order."""


@contextlib.contextmanager
def _stream(probe: Probe) -> Generator[Stream]:
    """A stream that is cancelled after the rule. Raises NotApplicable where the server offers none."""
    stream = probe.connection.step_stream()
    try:
        yield stream
    except CallFailed as failure:
        if code_name(failure.status.code) == "UNIMPLEMENTED":
            raise NotApplicable("the server does not offer it") from failure
        raise
    finally:
        stream.cancel()


def _ask(stream: Stream, number: int, *items: pb.StepItem) -> Sequence[pb.StepOutcome]:
    """The outcomes of one request, when nothing else is under way. It is repeated while any of them is pending."""
    while True:
        stream.send(number, pb.StepRequest(items=items, want_legal_actions=True))
        answer = stream.receive()
        expect.same(answer.id, number, "the id")
        outcomes = _outcomes(answer, items)
        if not any(outcome.HasField("pending") for outcome in outcomes):
            return outcomes


def _outcomes(answer: pb.StepStreamResponse, items: Sequence[pb.StepItem]) -> Sequence[pb.StepOutcome]:
    if not answer.HasField("step"):
        raise Violation(f"outcomes were due; got {expect.describe_answer(answer)}")
    return expect.one_each(answer.step.outcomes, items)


def _follows(episode: Episode, transition: pb.Transition, *actions: str) -> None:
    """Checks that the transition is the turn behind where the episode stands, played once."""
    expected = chain.after_turn(episode.state.digest, episode.step_index + 1, actions, transition)
    expect.same(transition.digest, expected, "the digest")


@rule
def streamed_steps(probe: Probe) -> None:
    """StepStream: a step must lead where Step leads, and be known to Step as the last one."""
    probe.needs_bytes()
    alone, streamed = probe.live(), probe.live()
    with _stream(probe) as stream:
        while not alone.ended and alone.step_index < 3:
            action = alone.an_action()
            item = streamed.item(action, step_index=alone.step_index + 1)
            transition = expect.transition(_ask(stream, item.step_index, item)[0])
            expect.same(transition, alone.play(action), f"turn {item.step_index}")
            expect.same(expect.transition(probe.step([item])[0]), transition, "the stored outcome, asked of Step,")


@rule
def streamed_retries(probe: Probe) -> None:
    """StepStream: a step that Step has played must be answered with the stored outcome, and not played again."""
    episode = probe.live()
    with _stream(probe) as stream:
        item = episode.item(episode.an_action())
        played = expect.transition(probe.step([item])[0])
        for _ in range(2):
            expect.same(expect.transition(_ask(stream, 1, item)[0]), played, "the outcome")
        refused = _ask(stream, 2, episode.item(NO_ACTION, step_index=item.step_index))[0]
        expect.refused(refused, "WRONG_STEP_INDEX", "EPISODE_ENDED")


@rule
def streamed_at_once(probe: Probe) -> None:
    """StepStream: the same step in many requests at once must be played once, each request answered under its id."""
    episode = probe.live()
    item = episode.item(episode.an_action())
    with _stream(probe) as stream:
        for number in range(1, REQUESTS + 1):
            stream.send(number, pb.StepRequest(items=[item]))
        answers = [stream.receive() for _ in range(REQUESTS)]
    expect.same(sorted(answer.id for answer in answers), list(range(1, REQUESTS + 1)), "the ids that were answered")
    for answer in answers:
        outcome = _outcomes(answer, [item])[0]
        if not outcome.HasField("pending"):
            _follows(episode, expect.transition(outcome), *item.actions)
    _follows(episode, expect.transition(probe.step([item])[0]), *item.actions)


@rule
def streamed_batches(probe: Probe) -> None:
    """StepStream: outcomes of a request must come in the order of its items, ids echoed, each failing alone."""
    episode = probe.live()
    items = [
        pb.StepItem(session_id=UNKNOWN_SESSION, step_index=5, actions=["a"]),
        episode.item(episode.an_action()),
        episode.item(NO_ACTION, step_index=2),
    ]
    with _stream(probe) as stream:
        outcomes = _ask(stream, 7, *items)
    expect.same(
        [(outcome.session_id, outcome.step_index) for outcome in outcomes],
        [(item.session_id, item.step_index) for item in items],
        "their order",
    )
    expect.refused(outcomes[0], "SESSION_UNKNOWN")
    expect.true(not outcomes[1].HasField("error"), f"a transition was due; got {expect.describe(outcomes[1])}")
    expect.refused(outcomes[2], "INVALID_ITEM")


@server_rule
def streamed_refusals(probe: Probe) -> None:
    """StepStream: a request that is refused as a whole must be answered under its id, and the stream goes on."""
    episode = probe.live()
    with _stream(probe) as stream:
        for number, request in enumerate((pb.StepRequest(), pb.StepRequest(max_wait_seconds=-1.0)), start=1):
            stream.send(number, request)
            answer = stream.receive()
            expect.same(answer.id, number, "the id")
            if not answer.HasField("error"):
                raise Violation(f"an error was due; got {expect.describe_answer(answer)}")
            expect.failed(answer.error, ["INVALID_ITEM"])
        item = episode.item(episode.an_action())
        expect.transition(_ask(stream, 9, item)[0])


@server_rule
def streamed_bytes(probe: Probe) -> None:
    """StepStream: an item whose text is no UTF-8 must be INVALID_ARGUMENT, and the others must be played."""
    episode = probe.live()
    good = episode.item(episode.an_action())
    bad = pb.StepItem(session_id=UNKNOWN_SESSION, step_index=1).SerializeToString() + bad_text(3)
    with _stream(probe) as stream:
        stream.send_items(3, good.SerializeToString(), bad)
        outcomes = _outcomes(stream.receive(), [good, good])
    expect.true(not outcomes[0].HasField("error"), f"a transition was due; got {expect.describe(outcomes[0])}")
    expect.refused(outcomes[1], "INVALID_ITEM")


@rule
def broken_streams(probe: Probe) -> None:
    """StepStream: a stream that breaks must lose nothing: its steps were played once or not at all."""
    episodes = [probe.live() for _ in range(4)]
    items = [episode.item(episode.an_action()) for episode in episodes]
    with _stream(probe) as stream:
        _ask(stream, 1, items[0])
        for item in items:
            stream.send(2, pb.StepRequest(items=[item]))
        stream.cancel()
    for episode, item in zip(episodes, items, strict=True):
        _follows(episode, expect.transition(probe.step([item])[0]), *item.actions)


@rule
def half_closed_streams(probe: Probe) -> None:
    """StepStream: where the caller half-closes, what is under way must still be answered, and then the stream ends."""
    episode = probe.live()
    item = episode.item(episode.an_action())
    with _stream(probe) as stream:
        stream.send(5, pb.StepRequest(items=[item]))
        stream.half_close()
        outcome = _outcomes(stream.receive(), [item])[0]
        expect.true(not outcome.HasField("error"), f"a transition was due; got {expect.describe(outcome)}")
        expect.true(stream.ended(), "it did not end")
