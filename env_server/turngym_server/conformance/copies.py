"""Rules about Fork and Advise: copies that are apart, advice that changes nothing."""

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import chain, expect
from turngym_server.conformance.probe import NO_ACTION, Episode, Probe, new_request_id
from turngym_server.conformance.rule import NotApplicable, rule


@rule
def fork_stands_where_its_original_does(probe: Probe) -> None:
    """Fork: a copy with the same noise must have the original's state, digest, step index and identity."""
    episode = probe.live(1)
    fork = episode.fork()
    started, origin = fork.started, episode.started
    expect.true(started.session_id != origin.session_id, "it is the same session")
    expect.same(started.step_index, episode.step_index, "the step index")
    expect.same(started.state.digest, episode.state.digest, "the digest")
    expect.same(started.state.observation, episode.state.observation, "the observation")
    for name in (
        "environment_id",
        "version",
        "options_json",
        "limits",
        "split",
        "level_seed",
        "instance_id",
        "world_id",
    ):
        expect.same(getattr(started, name), getattr(origin, name), name)
    expect.same(list(started.noise), list(origin.noise), "the noise")


@rule
def fork_goes_on_like_its_original(probe: Probe) -> None:
    """Fork: with the same noise and the same actions, copy and original must meet the same."""
    probe.needs_bytes()
    episode = probe.live(1)
    fork = episode.fork()
    while not episode.ended and episode.step_index < 4:
        action = episode.an_action()
        expect.same(fork.play(action), episode.play(action), f"turn {episode.step_index}")


@rule
def fork_shares_nothing(probe: Probe) -> None:
    """Fork: what is played in the copy must not be felt in the original, nor the other way round."""
    episode = probe.live(1)
    fork = episode.fork()
    _plays_alone(fork, NO_ACTION)
    _plays_alone(episode, "")
    if not fork.ended:
        _plays_alone(fork, "")


def _plays_alone(episode: Episode, action: str) -> None:
    """Plays a turn, whose digest must follow from the episode's own last one."""
    digest, step_index = episode.state.digest, episode.step_index + 1
    transition = episode.play(action)
    expect.same(transition.digest, chain.after_turn(digest, step_index, [action], transition), "the next digest")


@rule
def fork_retried(probe: Probe) -> None:
    """Fork: the same request id and item again must return the same session, also when the original went on."""
    episode = probe.live(1)
    item = pb.ForkItem(request_id=new_request_id(), session_id=episode.session_id, step_index=episode.step_index)
    first = expect.started(probe.fork([item])[0])
    episode.play(episode.an_action())
    again = expect.started(probe.fork([item])[0])
    expect.same(again.session_id, first.session_id, "the session")
    expect.same(again.state, first.state, "the state")
    expect.same(list(again.noise), list(first.noise), "the noise")


@rule
def fork_with_a_used_request_id(probe: Probe) -> None:
    """Fork: a request id that was used for another item must be INVALID_ARGUMENT REQUEST_ID_REUSED."""
    episode = probe.live()
    item = episode.fork_item()
    expect.started(probe.fork([item])[0])
    expect.refused(probe.fork([episode.fork_item(request_id=item.request_id, noise_seed=5)])[0], "REQUEST_ID_REUSED")


@rule
def fork_with_other_noise(probe: Probe) -> None:
    """Fork: new noise must be a segment from the next step on, and enter the digest as environment.proto defines it."""
    episode = probe.live(1)
    for fields in ({"noise_seed": 2**64 - 1}, {"noise_seed": None}):
        fork = episode.fork(**fields)
        origin, segments = list(episode.started.noise), list(fork.started.noise)
        expect.same(segments[:-1], origin, "the noise before")
        expect.same(segments[-1].from_step, episode.step_index + 1, "the step that new noise begins at")
        if fields["noise_seed"] is not None:
            expect.same(segments[-1].noise_seed, fields["noise_seed"], "the noise seed")
        expect.same(fork.state.digest, chain.after_noise(episode.state.digest, segments[-1]), "the digest")
        _plays_alone(fork, "")


@rule
def fork_of_another_step(probe: Probe) -> None:
    """Fork: a step_index that is not the number of turns played must be FAILED_PRECONDITION, with `expected`."""
    episode = probe.live(1)
    for index in (0, 2):
        outcome = probe.fork([episode.fork_item(step_index=index)])[0]
        expect.refused(outcome, "WRONG_STEP_INDEX", expected="1")


@rule
def advice_changes_nothing(probe: Probe) -> None:
    """Advise: an episode that is advised must go on as one that is not."""
    _needs_an_oracle(probe)
    advised = probe.live()
    digest = advised.state.digest
    while not advised.ended and advised.step_index < 3:
        for _ in range(2):
            probe.advise(advised.session_id)
        action = advised.an_action()
        transition = advised.play(action)
        expected = chain.after_turn(digest, advised.step_index, [action], transition)
        expect.same(transition.digest, expected, f"the digest of turn {advised.step_index}")
        digest = transition.digest
    if probe.spec.determinism == pb.DETERMINISM_BYTES:
        alone = probe.start(limits=advised.started.limits)
        for turn in advised.turns:
            expect.same(alone.play(*turn.actions), turn.transition, "a turn without advice")


@rule
def advice_is_the_same_again(probe: Probe) -> None:
    """Advise: asked again at the same state, the oracle must say the same."""
    _needs_an_oracle(probe)
    episode = probe.live()
    first, again = (probe.advise(episode.session_id) for _ in range(2))
    expect.same(again, first, "the second advice")


@rule
def advice_can_be_played(probe: Probe) -> None:
    """Advise: it must name the turns played, give valid actions that fit a turn, and rates from 0 to 1."""
    _needs_an_oracle(probe)
    episode = probe.live()
    outcome = probe.advise(episode.session_id)
    expect.true(outcome.HasField("advice"), f"there was none: {expect.describe(outcome)}")
    advice = outcome.advice
    expect.same(advice.step_index, episode.step_index, "step_index")
    most = episode.started.limits.max_actions_per_turn
    expect.true(len(advice.actions) <= most, f"{len(advice.actions)} actions for turns of at most {most}")
    for name in ("ceiling", "floor"):
        if advice.HasField(name):
            expect.true(0 <= getattr(advice, name) <= 1, f"{name} is {getattr(advice, name)}")
    if advice.HasField("ceiling") and advice.HasField("floor"):
        expect.true(advice.floor <= advice.ceiling + 1e-9, f"floor {advice.floor} is over ceiling {advice.ceiling}")
    if advice.actions:
        expect.true(episode.play(*advice.actions).action_valid, f"{list(advice.actions)} are invalid when played")


@rule
def no_oracle(probe: Probe) -> None:
    """Advise: where there is no oracle it must be FAILED_PRECONDITION NO_ORACLE."""
    outcome = probe.advise(probe.start().session_id)
    if outcome.HasField("advice"):
        raise NotApplicable("there is an oracle")
    expect.refused(outcome, "NO_ORACLE")


def _needs_an_oracle(probe: Probe) -> None:
    outcome = probe.advise(probe.start().session_id)
    if not outcome.HasField("advice"):
        raise NotApplicable(f"no advice is given: {expect.describe(outcome)}")
