"""Rules about determinism, and episodes that are taken up again by replay."""

from typing import Any

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import expect
from turngym_server.conformance.probe import NO_ACTION, Episode, Probe
from turngym_server.conformance.rule import NotApplicable, rule


def _resumed(episode: Episode, **fields: Any) -> pb.ResetOutcome:
    """What comes of taking the episode up again in a new session."""
    probe = episode.probe
    return probe.reset([_item(episode, resume=episode.resume(**fields))])[0]


def _item(episode: Episode, **fields: Any) -> pb.ResetItem:
    started = episode.started
    return episode.probe.item(limits=started.limits, level_seed=started.level_seed, **fields)


@rule
def same_seeds(probe: Probe) -> None:
    """Determinism: the same seeds and actions must give the same start and the same transitions, byte for byte."""
    probe.needs_bytes()
    for recorded in probe.recorded:
        (again,) = probe.start_items([_item(recorded)])
        expect.same(again.state, recorded.started.state, "the start")
        for step_index, turn in enumerate(recorded.turns, start=1):
            expect.same(again.play(*turn.actions), turn.transition, f"turn {step_index}")


@rule
def resumed(probe: Probe) -> None:
    """Resume: replayed turns must lead to the same state, digest and step index."""
    probe.needs_bytes()
    for recorded in probe.recorded:
        again = expect.started(_resumed(recorded))
        expect.same(again.step_index, recorded.step_index, "the step index")
        expect.same(again.state, recorded.state, "the state")


@rule
def resumed_and_played(probe: Probe) -> None:
    """Resume: the episode must go on as the one that it was taken from, and know its last step."""
    probe.needs_bytes()
    episode = probe.live(2)
    again = Episode(probe, expect.started(_resumed(episode)))
    last = episode.turns[-1]
    retried = expect.transition(again.step(*last.actions, step_index=again.step_index))
    expect.same(retried, last.transition, "the last step, sent again,")
    action = episode.an_action()
    expect.same(again.play(action), episode.play(action), "the next turn")


@rule
def resumed_at_the_start(probe: Probe) -> None:
    """Resume: no turns must lead to the reset's own digest."""
    probe.needs_bytes()
    episode = probe.live()
    again = expect.started(_resumed(episode))
    expect.same((again.step_index, again.state), (0, episode.state), "(step index, state)")


@rule
def resumed_with_other_noise(probe: Probe) -> None:
    """Resume: a fork's noise segments must lead to the fork's digest."""
    probe.needs_bytes()
    episode = probe.live(1)
    fork = episode.fork(noise_seed=23)
    fork.play(fork.an_action())
    turns = [pb.Actions(actions=turn.actions) for turn in (*episode.turns, *fork.turns)]
    again = expect.started(_resumed(fork, turns=turns))
    expect.same(again.state.digest, fork.state.digest, "the digest")
    expect.same(list(again.noise), list(fork.started.noise), "the noise segments")


@rule
def resumed_to_another_digest(probe: Probe) -> None:
    """Resume: a replay that does not reach its digest must be FAILED_PRECONDITION DIGEST_MISMATCH."""
    probe.needs_bytes()
    episode = probe.live(1)
    expect.refused(_resumed(episode, digest=bytes(32)), "DIGEST_MISMATCH")
    expect.refused(_resumed(episode, turns=[pb.Actions(actions=[NO_ACTION])]), "DIGEST_MISMATCH")
    other_noise = [pb.NoiseSegment(from_step=1, noise_seed=29)]
    expect.refused(_resumed(episode, noise=other_noise), "DIGEST_MISMATCH")


@rule
def resumed_past_the_end(probe: Probe) -> None:
    """Resume: turns behind the end must be FAILED_PRECONDITION DIGEST_MISMATCH."""
    probe.needs_bytes()
    episode = probe.ended()
    turns = [pb.Actions(actions=turn.actions) for turn in episode.turns]
    expect.refused(_resumed(episode, turns=[*turns, *turns]), "DIGEST_MISMATCH", "INVALID_ITEM")


@rule
def malformed_resumes(probe: Probe) -> None:
    """Resume: noise not ascending from step 1, turns without actions and digests not of 32 bytes: INVALID_ARGUMENT."""
    probe.needs_bytes()
    episode = probe.live()

    def segments(*steps: int) -> list[pb.NoiseSegment]:
        return [pb.NoiseSegment(from_step=step, noise_seed=step) for step in steps]

    wrong: dict[str, dict[str, object]] = {
        "no noise": {"noise": []},
        "noise from step 2": {"noise": segments(2)},
        "noise that descends": {"noise": segments(1, 3, 2)},
        "noise beyond the next step": {"noise": segments(1, 9)},
        "a turn of no actions": {"turns": [pb.Actions()]},
        "a digest of 31 bytes": {"digest": bytes(31)},
        "no digest": {"digest": b""},
    }
    for name, fields in wrong.items():
        with expect.case(name):
            expect.refused(_resumed(episode, **fields), "INVALID_ITEM")
    resume = episode.resume()
    for name, item in (
        ("no level seed", probe.item(level_seed=None, resume=resume)),
        ("a noise seed of its own", probe.item(noise_seed=1, resume=resume)),
    ):
        with expect.case(name):
            expect.refused(probe.reset([item])[0], "INVALID_ITEM")


@rule
def resumes_have_bounds(probe: Probe) -> None:
    """Resume: more than 80,000 actions, 4,096 noise segments or 16 MiB must be INVALID_ARGUMENT."""
    probe.needs_bytes()
    episode = probe.live()
    wrong: dict[str, dict[str, object]] = {
        "80,001 actions": {"turns": [pb.Actions(actions=["a"] * 80_001)]},
        "4,097 noise segments": {"noise": [pb.NoiseSegment(from_step=1)] * 4_097},
        "17 MiB": {"turns": [pb.Actions(actions=["a" * (17 << 20)])]},
    }
    for name, fields in wrong.items():
        with expect.case(name):
            expect.refused(_resumed(episode, **fields), "INVALID_ITEM")


@rule
def not_replayable(probe: Probe) -> None:
    """Resume: where determinism is NONE it must be FAILED_PRECONDITION NOT_REPLAYABLE."""
    if probe.spec.determinism == pb.DETERMINISM_BYTES:
        raise NotApplicable("the environment's determinism is BYTES")
    expect.refused(_resumed(probe.live()), "NOT_REPLAYABLE")
