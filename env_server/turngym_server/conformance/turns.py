"""Rules about Step: exactly once, in order, and what counts as play."""

from __future__ import annotations

import time

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import chain, expect
from turngym_server.conformance.probe import NO_ACTION, UNKNOWN_SESSION, Probe, Turn
from turngym_server.conformance.rule import NotApplicable, rule

AT_ONCE = 8
"""Calls under way at the same time where rules are about races."""
HANG_UP_AFTER = (0.0, 0.0005, 0.002, 0.01)
WALL_SECONDS = 0.05


@rule
def step_retried(probe: Probe) -> None:
    """Step: sending the last index again with the same actions must return the stored outcome."""
    episode = probe.live()
    action = episode.an_action()
    item = episode.item(action)
    first = probe.step([item])[0]
    stored = expect.transition(first)
    for _ in range(2):
        expect.same(expect.transition(probe.step([item])[0]), stored, "the outcome")


@rule
def step_retried_is_not_played(probe: Probe) -> None:
    """Step: a step that was sent twice must have been played once, so that the next index goes on from it."""
    episode = probe.live(1)
    digest = episode.state.digest
    action = episode.an_action()
    item = episode.item(action)
    transitions = [expect.transition(probe.step([item])[0]) for _ in range(3)]
    expected = chain.after_turn(digest, item.step_index, [action], transitions[0])
    expect.same([each.digest for each in transitions], [expected] * 3, "the digests")
    if transitions[0].terminated or transitions[0].truncated:
        return
    then = expect.transition(episode.step("", step_index=item.step_index + 1))
    expect.same(then.digest, chain.after_turn(expected, item.step_index + 1, [""], then), "the next digest")


@rule
def step_of_other_actions(probe: Probe) -> None:
    """Step: sending the last index again with other actions must be FAILED_PRECONDITION, with the index `expected`."""
    episode = probe.live(1)
    last = episode.turns[-1]
    other = [*last.actions, NO_ACTION]
    index = episode.step_index
    expect.refused(episode.step(*other, step_index=index), "WRONG_STEP_INDEX", expected=str(index + 1))
    expect.same(expect.transition(episode.step(*last.actions, step_index=index)), last.transition, "the stored outcome")


@rule
def step_of_another_index(probe: Probe) -> None:
    """Step: an index that is neither the last nor the next must be FAILED_PRECONDITION, with the index `expected`."""
    episode = probe.live(2)
    next_index = episode.step_index + 1
    for index in (0, next_index - 2, next_index + 1, 2**32 - 1):
        with expect.case(f"index {index} where {next_index} is the next"):
            outcome = episode.step(episode.an_action(), step_index=index)
            expect.refused(outcome, "WRONG_STEP_INDEX", expected=str(next_index))
    episode.play(episode.an_action())


@rule
def step_after_the_end(probe: Probe) -> None:
    """Step: after the end the last step must return the stored outcome, and a new one must be EPISODE_ENDED."""
    episode = probe.ended()
    last = episode.turns[-1]
    expect.refused(episode.step(NO_ACTION), "EPISODE_ENDED")
    again = expect.transition(episode.step(*last.actions, step_index=episode.step_index))
    expect.same(again, last.transition, "the stored outcome")
    other = episode.step(*last.actions, NO_ACTION, step_index=episode.step_index)
    expect.refused(other, "WRONG_STEP_INDEX", "EPISODE_ENDED")


@rule
def same_step_at_once(probe: Probe) -> None:
    """Step: the same step in several calls at once must be played once, each call given its outcome or pending."""
    episode = probe.live()
    digest, item = episode.state.digest, episode.item(episode.an_action())
    requests = [pb.StepRequest(items=[item], want_legal_actions=True)] * AT_ONCE
    for reply in probe.connection.steps_at_once(requests):
        outcome = expect.one_each(reply.outcomes, [item])[0]
        if outcome.HasField("pending"):
            outcome = probe.step([item])[0]
        transition = expect.transition(outcome)
        expected = chain.after_turn(digest, item.step_index, list(item.actions), transition)
        expect.same(transition.digest, expected, "the digest")


@rule
def other_steps_at_once(probe: Probe) -> None:
    """Step: steps of one index with different actions in several calls at once: one of them must be played."""
    episode = probe.live()
    digest = episode.state.digest
    items = [episode.item(f"{NO_ACTION} {number}") for number in range(AT_ONCE)]
    replies = probe.connection.steps_at_once([pb.StepRequest(items=[item]) for item in items])
    outcomes = [expect.one_each(reply.outcomes, [0])[0] for reply in replies]
    played = [place for place, outcome in enumerate(outcomes) if not outcome.HasField("error")]
    expect.same(len(played), 1, "the number of those that were played")
    for place, outcome in enumerate(outcomes):
        if place != played[0]:
            expect.refused(outcome, "WRONG_STEP_INDEX", "STEP_RUNNING", "EPISODE_ENDED")
    item = items[played[0]]
    transition = expect.transition(probe.step([item])[0])
    expected = chain.after_turn(digest, item.step_index, list(item.actions), transition)
    expect.same(transition.digest, expected, "the digest")


@rule
def abandoned_step(probe: Probe) -> None:
    """Step: a step whose caller hung up must be played once or not at all, and can be collected by sending it again."""
    for seconds in HANG_UP_AFTER:
        episode = probe.live()
        digest, item = episode.state.digest, episode.item(episode.an_action())
        probe.connection.abandon_step(pb.StepRequest(items=[item]), seconds)
        transition = expect.transition(probe.step([item])[0])
        expected = chain.after_turn(digest, item.step_index, list(item.actions), transition)
        expect.same(transition.digest, expected, f"the digest, hung up after {seconds:g} s,")


@rule
def session_twice_in_a_call(probe: Probe) -> None:
    """Step: the same session twice in a call must be INVALID_ARGUMENT the second time, and played once."""
    episode = probe.live()
    item = episode.item(episode.an_action())
    outcomes = probe.step_together([item, episode.item(NO_ACTION, step_index=item.step_index + 1)])
    expect.refused(outcomes[1], "INVALID_ITEM")
    transition = expect.transition(probe.step([item])[0])
    expected = chain.after_turn(episode.state.digest, item.step_index, list(item.actions), transition)
    expect.same(transition.digest, expected, "the digest of the first")


@rule
def step_without_actions(probe: Probe) -> None:
    """Step: an item without actions must be INVALID_ARGUMENT, and nothing is played."""
    episode = probe.live()
    expect.refused(episode.step(), "INVALID_ITEM")
    digest = episode.state.digest
    transition = episode.play("")
    expect.same(transition.digest, chain.after_turn(digest, 1, [""], transition), "the digest of the next turn")


@rule
def pending_is_collected(probe: Probe) -> None:
    """Step: an outcome that is pending is collected by sending the same item, and the turn is played once."""
    episode = probe.live()
    item = episode.item(episode.an_action())
    first = probe.step_once([item], max_wait_seconds=1e-6)[0]
    expect.true(not first.HasField("error"), f"a transition or pending was due; got {expect.describe(first)}")
    transition = expect.transition(probe.step([item])[0])
    expected = chain.after_turn(episode.state.digest, item.step_index, list(item.actions), transition)
    expect.same(transition.digest, expected, "the digest")
    if first.HasField("transition"):
        expect.same(first.transition, transition, "the outcome")


@rule
def step_of_an_unknown_session(probe: Probe) -> None:
    """Step: a session that is not known must be NOT_FOUND SESSION_UNKNOWN."""
    item = pb.StepItem(session_id=UNKNOWN_SESSION, step_index=1, actions=["a"])
    expect.refused(probe.step([item])[0], "SESSION_UNKNOWN")


@rule
def invalid_actions_are_play(probe: Probe) -> None:
    """Step: an action that is empty, holds NUL or is over max_action_bytes is invalid, and it is play, not an error."""
    too_long = "é" * (probe.server.max_action_bytes // 2 + 1)
    for name, action in (("an empty action", ""), ("NUL", "\0"), ("a NUL within", "a\0b"), ("a long action", too_long)):
        episode = probe.live()
        with expect.case(name):
            transition = expect.transition(episode.step(action))
            expect.true(not transition.action_valid, "it counts as valid")
            expect.same(transition.actions_executed, 1, "actions_executed")
            expect.true(bool(transition.observation), "the observation is empty and does not say what was wrong")
            expected = chain.after_turn(episode.state.digest, 1, [action], transition)
            expect.same(transition.digest, expected, "the digest")


@rule
def longest_action(probe: Probe) -> None:
    """Step: an action of max_action_bytes must be played, whatever the environment makes of it."""
    episode = probe.live()
    expect.transition(episode.step("x" * probe.server.max_action_bytes))


@rule
def legal_actions_are_valid(probe: Probe) -> None:
    """Step: an action that is listed as legal must be valid when it is played."""
    episode = probe.start()
    legal = list(episode.state.legal_actions.actions)
    if not legal:
        raise NotApplicable("it lists no legal actions")
    for action in legal[:8]:
        expect.true(probe.start().play(action).action_valid, f"{action!r} is listed, and invalid when played")


@rule
def invalid_action_ends_a_turn(probe: Probe) -> None:
    """Step: the actions behind an invalid one must not be run, and the invalid one counts as executed."""
    episode = probe.live(limits=_turns_of_three(probe))
    first = episode.an_action()
    transition = episode.play(first, "", first)
    if transition.terminated or transition.actions_executed == 1:
        raise NotApplicable(f"{first!r} ended the turn already")
    expect.same((transition.actions_executed, transition.action_valid), (2, False), "(actions executed, action_valid)")


@rule
def actions_over_the_limit(probe: Probe) -> None:
    """Step: actions over max_actions_per_turn must be left out, which is no error."""
    episode = probe.live(limits=probe.roomy_limits(max_actions_per_turn=1))
    action = episode.an_action()
    transition = episode.play(action, action, action)
    expect.same(transition.actions_executed, 1, "actions_executed, of three where one is allowed,")


@rule
def actions_of_an_episode(probe: Probe) -> None:
    """Step: max_actions, in which invalid actions count, must be run at most; then MAX_ACTIONS truncates."""
    for action in ("", None):
        episode = probe.live(limits=probe.roomy_limits(max_actions=1))
        transition = episode.play(*([episode.an_action() if action is None else action] * 2))
        expect.same(transition.actions_executed, 1, "actions_executed, with max_actions = 1,")
        if not transition.terminated:
            _truncated(transition, pb.END_REASON_MAX_ACTIONS)


@rule
def turns_of_an_episode(probe: Probe) -> None:
    """Step: the turn that uses up max_turns must end the episode, as MAX_TURNS unless the environment ends it."""
    episode = probe.live(limits=probe.roomy_limits(max_turns=2))
    while not episode.ended:
        expect.true(episode.step_index < 2, f"turn {episode.step_index} of 2 did not end it")
        episode.play("")
    if episode.state.terminated:
        raise NotApplicable("the environment ends its episodes sooner")
    expect.same(episode.step_index, 2, "the number of turns")
    _truncated(episode.state, pb.END_REASON_MAX_TURNS)


@rule
def seconds_of_an_episode(probe: Probe) -> None:
    """Step: the next turn after wall_seconds must end the episode, as WALL_CLOCK unless something else ends it."""
    episode = probe.start(limits=pb.Limits(wall_seconds=WALL_SECONDS, max_turns=probe.roomy_limits().max_turns))
    time.sleep(2 * WALL_SECONDS)
    transition = episode.play("")
    expect.true(episode.ended, "it goes on")
    if transition.end_reason in (pb.END_REASON_ENVIRONMENT, pb.END_REASON_MAX_TURNS, pb.END_REASON_MAX_ACTIONS):
        raise NotApplicable("something else ended the episode")
    _truncated(transition, pb.END_REASON_WALL_CLOCK)


@rule
def legal_actions_after_a_step(probe: Probe) -> None:
    """Step: legal actions must come when they are asked for, also with a stored outcome, and only then."""
    episode = probe.live()
    item = episode.item(episode.an_action())
    for wanted in (False, True, False):
        transition = expect.transition(probe.step([item], want_legal_actions=wanted)[0])
        expect.same(
            transition.HasField("legal_actions"), wanted, f"when want_legal_actions is {wanted}, their presence"
        )


@rule
def sessions_are_apart(probe: Probe) -> None:
    """Step: what is played in one session must not be felt in another, in one call or between calls."""
    probe.needs_bytes()
    alone, crowded, other = probe.start_items([probe.item(limits=probe.roomy_limits()) for _ in range(3)])
    while not alone.ended and alone.step_index < 3:
        alone.play(alone.an_action())
    for turn in alone.turns:
        mine, others = probe.step([crowded.item(*turn.actions), other.item("")])
        crowded.turns.append(Turn(turn.actions, expect.transition(mine)))
        expect.same(crowded.state, turn.transition, f"turn {crowded.step_index} beside another session")
        if not other.ended:
            other.turns.append(Turn(("",), expect.transition(others)))


def _turns_of_three(probe: Probe) -> pb.Limits:
    limits = probe.roomy_limits()
    if limits.max_actions_per_turn < 3 or limits.max_actions < 3:
        raise NotApplicable("its caps leave no turn of three actions")
    return limits


def _truncated(transition: pb.Transition, reason: pb.EndReason.ValueType) -> None:
    expect.same(
        (transition.truncated, pb.EndReason.Name(transition.end_reason)),
        (True, pb.EndReason.Name(reason)),
        "(truncated, end reason)",
    )
