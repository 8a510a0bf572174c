"""Rules about transitions, each checked over whole episodes: digest, rewards, ends, success, sizes."""

import math
from collections.abc import Iterator

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import chain, expect
from turngym_server.conformance.probe import Episode, Probe, Turn
from turngym_server.conformance.rule import rule

TRUNCATIONS = (pb.END_REASON_MAX_TURNS, pb.END_REASON_MAX_ACTIONS, pb.END_REASON_WALL_CLOCK)


def _turns(probe: Probe) -> Iterator[tuple[Episode, int, Turn]]:
    """Every turn of the recorded episodes: the episode, the step index, the turn."""
    for episode in probe.recorded:
        for step_index, turn in enumerate(episode.turns, start=1):
            yield episode, step_index, turn


@rule
def digests(probe: Probe) -> None:
    """Step: each digest must be d_t as environment.proto defines it."""
    for episode in probe.recorded:
        digest = episode.started.state.digest
        for step_index, turn in enumerate(episode.turns, start=1):
            digest = chain.after_turn(digest, step_index, turn.actions, turn.transition)
            expect.same(turn.transition.digest, digest, f"the digest of turn {step_index}")


@rule
def finite_numbers(probe: Probe) -> None:
    """Step: rewards, reward components and metrics must never be NaN or infinite."""
    for _, step_index, turn in _turns(probe):
        transition = turn.transition
        numbers = {
            "reward": transition.reward,
            **{f"action_rewards[{place}]": value for place, value in enumerate(transition.action_rewards)},
            **{f"reward_components[{name!r}]": value for name, value in transition.reward_components.items()},
            **{f"metrics[{name!r}]": value for name, value in transition.metrics.items()},
        }
        for name, value in numbers.items():
            expect.true(math.isfinite(value), f"{name} of turn {step_index} is {value}")


@rule
def rewards_add_up(probe: Probe) -> None:
    """Step: the reward must be the sum of action_rewards, of which there is one for each action that was run."""
    for _, step_index, turn in _turns(probe):
        transition = turn.transition
        expect.same(
            len(transition.action_rewards), transition.actions_executed, f"rewards of turn {step_index}: number"
        )
        total = sum(transition.action_rewards)
        close = math.isclose(transition.reward, total, rel_tol=1e-9, abs_tol=1e-9)
        expect.true(close, f"the reward of turn {step_index} is {transition.reward}, the sum {total}")


@rule
def ends_exclude_each_other(probe: Probe) -> None:
    """Step: terminated and truncated must exclude each other."""
    for _, step_index, turn in _turns(probe):
        both = turn.transition.terminated and turn.transition.truncated
        expect.true(not both, f"turn {step_index} is both")


@rule
def end_reasons(probe: Probe) -> None:
    """Step: the end reason must be ENVIRONMENT where terminated, a limit where truncated, and unset before the end."""
    for _, step_index, turn in _turns(probe):
        transition = turn.transition
        due = (
            (pb.END_REASON_ENVIRONMENT,)
            if transition.terminated
            else TRUNCATIONS
            if transition.truncated
            else (pb.END_REASON_UNSPECIFIED,)
        )
        expect.true(transition.end_reason in due, f"that of turn {step_index} is {transition.end_reason}")


@rule
def success_at_the_end(probe: Probe) -> None:
    """Step: success must be set only at the end."""
    for _, step_index, turn in _turns(probe):
        transition = turn.transition
        early = transition.HasField("success") and not (transition.terminated or transition.truncated)
        expect.true(not early, f"it is set after turn {step_index}, where the episode goes on")


@rule
def actions_are_run(probe: Probe) -> None:
    """Step: actions must be run up to the end, the first invalid one, or a limit, and one at least."""
    for episode, step_index, turn in _turns(probe):
        transition = turn.transition
        limits = episode.started.limits
        run_before = sum(each.transition.actions_executed for each in episode.turns[: step_index - 1])
        most = min(len(turn.actions), limits.max_actions_per_turn, limits.max_actions - run_before)
        run = transition.actions_executed
        cut = transition.terminated or not transition.action_valid
        fits = 1 <= run <= most if cut else run == most
        expect.true(fits, f"of {len(turn.actions)} actions of turn {step_index} {run} were run, where {most} were due")


@rule
def limits_hold(probe: Probe) -> None:
    """Step: an episode must end at the limits of its start, and not before them unless the environment ends it."""
    for episode in probe.recorded:
        limits = episode.started.limits
        state = episode.state
        run = sum(turn.transition.actions_executed for turn in episode.turns)
        if state.end_reason == pb.END_REASON_MAX_TURNS:
            expect.same(len(episode.turns), limits.max_turns, "the turns of an episode that ended as MAX_TURNS")
        if state.end_reason == pb.END_REASON_MAX_ACTIONS:
            expect.same(run, limits.max_actions, "the actions of an episode that ended as MAX_ACTIONS")
        expect.true(run <= limits.max_actions, f"{run} actions were run, of at most {limits.max_actions}")


@rule
def observations_fit(probe: Probe) -> None:
    """Reset, Step: an observation must be at most max_observation_bytes of UTF-8."""
    most = probe.server.max_observation_bytes
    for episode in probe.recorded:
        for state in (episode.started.state, *(turn.transition for turn in episode.turns)):
            size = len(state.observation.encode())
            expect.true(size <= most, f"there is one of {size} bytes, where GetServer says {most}")


@rule
def few_legal_actions(probe: Probe) -> None:
    """Step: legal actions, where they are asked for, must be there and at most 1,000."""
    for _, step_index, turn in _turns(probe):
        expect.true(turn.transition.HasField("legal_actions"), f"turn {step_index} has none")
        expect.true(len(turn.transition.legal_actions.actions) <= 1_000, f"turn {step_index} has more")
