"""Rollouts against a real server."""

import contextlib
import gc
from dataclasses import replace

import numpy as np
import pytest
from transformers import Cache

from turngym_client import EpisodeRequest, Limits, Split, connect, parse_answer
from turngym_trainer import seeds
from turngym_trainer.batch import lay_out
from turngym_trainer.cache import Memory
from turngym_trainer.context import Context
from turngym_trainer.evaluate import evaluate
from turngym_trainer.logprobs import Scorer
from turngym_trainer.policy import load_policy
from turngym_trainer.rollout import Planned, Sampling, collect
from turngym_trainer.settings import load_config

CONTEXT = Context(turns=1, instructions="none", prefill="<think>")
HISTORY = replace(CONTEXT, turns=0)
SAMPLING = Sampling(8)


def plan_of(groups, members, environment="sokoban", **request):
    return [
        Planned(
            EpisodeRequest(
                environment_id=environment, level_seed=100 + group, noise_seed=10 * group + member, **request
            ),
            group,
            member,
        )
        for group in range(groups)
        for member in range(members)
    ]


def uniforms(group, member, turn, count):
    return seeds.token_uniforms(1, 1, 0, group, member, turn, count)


@pytest.fixture(scope="module")
def policy(novice):
    return load_policy(str(novice))


def play(server, policy, plan, *, context=CONTEXT, sampling=SAMPLING, parts=1, keep_cache=True):
    with connect(server) as client:
        return collect(
            policy,
            client,
            plan,
            context=context,
            sampling=sampling,
            uniforms=uniforms,
            parts=parts,
            keep_cache=keep_cache,
        )


@pytest.fixture(scope="module")
def rollout(server, policy):
    return play(server, policy, plan_of(3, 4))


def test_every_planned_episode_is_played_to_its_end_in_the_plans_order(rollout):
    assert [(t.group, t.member) for t in rollout.trajectories] == [(g, m) for g in range(3) for m in range(4)]
    assert rollout.lost == ()
    for trajectory in rollout.trajectories:
        assert trajectory.terminated or trajectory.truncated
        assert trajectory.level_seed == 100 + trajectory.group
        assert trajectory.noise_seed == 10 * trajectory.group + trajectory.member
    assert len({t.world_id for t in rollout.trajectories if t.group == 0}) == 1


def test_no_session_is_left_at_the_server(server, policy):
    with connect(server) as client:
        before = client.server().sessions
        collect(policy, client, plan_of(2, 3), context=CONTEXT, sampling=SAMPLING, uniforms=uniforms, parts=2)
        assert client.server().sessions == before


def test_the_record_is_what_the_server_would_play_again(server, rollout):
    with connect(server) as client:
        for trajectory in rollout.trajectories[:4]:
            episode = client.reset("sokoban", level_seed=trajectory.level_seed, noise_seed=trajectory.noise_seed)
            for turn in trajectory.turns:
                assert turn.prompt == episode.state.observation
                transition = episode.step(turn.actions)
                assert (transition.reward, transition.actions_executed) == (turn.reward, turn.actions_executed)
                assert transition.action_valid == turn.valid_action
            assert episode.state.digest.hex() == trajectory.digest
            assert episode.done
            assert episode.state.success == trajectory.success


def test_what_would_have_been_read_next_is_kept_where_a_limit_ended_the_episode(server, policy, rollout):
    assert any(t.truncated for t in rollout.trajectories)
    with connect(server) as client:
        for trajectory in rollout.trajectories:
            if not trajectory.truncated:
                assert trajectory.last_prompt is None
                continue
            episode = client.reset("sokoban", level_seed=trajectory.level_seed, noise_seed=trajectory.noise_seed)
            for turn in trajectory.turns:
                episode.step(turn.actions)
            assert policy.decode(trajectory.last_prompt) == f"<|user|>{episode.state.observation}<|assistant|><think>"


def test_text_and_tokens_tell_the_same(policy, rollout):
    for trajectory in rollout.trajectories:
        assert len(trajectory.rows) == len(trajectory.turns)
        for number, (row, turn) in enumerate(zip(trajectory.rows, trajectory.turns, strict=True)):
            assert policy.decode(row.ids) == f"<|user|>{turn.prompt}<|assistant|>{turn.response}"
            assert "<think>" + policy.decode(row.ids[row.is_action]) == turn.response
            assert set(row.turn[row.is_action].tolist()) == {number}
            parsed = parse_answer(turn.response, max_actions=5)
            if turn.valid_format:
                assert (turn.actions, turn.reasoning) == (parsed.actions, parsed.reasoning)
            else:
                assert turn.actions == ("",)
                assert not turn.valid_action


def test_parts_change_how_it_is_played_and_not_what(server, policy, rollout):
    again = play(server, policy, plan_of(3, 4), parts=3)
    assert [t.digest for t in again.trajectories] == [t.digest for t in rollout.trajectories]


def test_the_same_plan_gives_the_same_bits(server, policy, rollout):
    again = play(server, policy, plan_of(3, 4))
    for one, other in zip(rollout.trajectories, again.trajectories, strict=True):
        assert [row.logprobs.tobytes() for row in one.rows] == [row.logprobs.tobytes() for row in other.rows]


def test_full_history_is_one_row_an_episode(server, policy):
    rollout = play(server, policy, plan_of(1, 2), context=HISTORY)
    for trajectory in rollout.trajectories:
        (row,) = trajectory.rows
        assert sorted(set(row.turn[row.is_action].tolist())) == list(range(len(trajectory.turns)))


def ragged():
    """Episodes of 2 to 5 turns in each group."""
    return [
        replace(planned, request=replace(planned.request, limits=Limits(max_turns=2 + planned.member)))
        for planned in plan_of(3, 4)
    ]


@contextlib.contextmanager
def tokens_read(policy):
    """Tokens of each forward pass, padding included."""
    read = []
    hook = policy.model.get_input_embeddings().register_forward_pre_hook(
        lambda module, arguments: read.append(arguments[0].numel())
    )
    try:
        yield read
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def kept(server, policy):
    """Full history, with the cache kept, and the tokens that were run."""
    with tokens_read(policy) as read:
        return play(server, policy, ragged(), context=HISTORY), sum(read)


def test_a_kept_cache_changes_what_is_run_and_not_what_is_said(server, policy, kept):
    rollout, read = kept
    with tokens_read(policy) as whole:
        expected = play(server, policy, ragged(), context=HISTORY, keep_cache=False)
    assert read < sum(whole) / 2
    assert {len(trajectory.turns) for trajectory in rollout.trajectories} == {2, 3, 4, 5}
    assert [t.digest for t in rollout.trajectories] == [t.digest for t in expected.trajectories]
    for one, other in zip(rollout.trajectories, expected.trajectories, strict=True):
        assert one.rows[0].ids.tolist() == other.rows[0].ids.tolist()
        assert np.abs(one.rows[0].logprobs - other.rows[0].logprobs).max() < 1e-5


def test_log_probabilities_of_a_kept_cache_are_the_trainers(policy, kept):
    rollout, _ = kept
    batch = lay_out(rollout.trajectories)
    assert np.abs(Scorer(policy.model, 1.0).logprobs(batch, 10_000) - batch.logprobs).max() < 1e-5


def test_the_same_plan_gives_the_same_bits_with_a_kept_cache(server, policy, kept):
    """Other parts are other batches, so they say the same, but round otherwise."""
    rollout, _ = kept
    again = play(server, policy, ragged(), context=HISTORY)
    in_parts = play(server, policy, ragged(), context=HISTORY, parts=3)
    for one, other, third in zip(rollout.trajectories, again.trajectories, in_parts.trajectories, strict=True):
        assert one.rows[0].logprobs.tobytes() == other.rows[0].logprobs.tobytes()
        assert one.rows[0].ids.tolist() == third.rows[0].ids.tolist()


@pytest.mark.parametrize("turns", [1, 2])
def test_with_fewer_turns_of_context_every_prompt_is_run_whole(server, policy, turns):
    context = replace(CONTEXT, turns=turns)
    counts, bits = [], []
    for keep_cache in (True, False):
        with tokens_read(policy) as read:
            rollout = play(server, policy, plan_of(1, 3), context=context, keep_cache=keep_cache)
        counts.append(read)
        bits.append([row.logprobs.tobytes() for t in rollout.trajectories for row in t.rows])
    assert counts[0] == counts[1]
    assert bits[0] == bits[1]


def test_keys_and_values_are_freed_with_their_part(server, policy, kept):
    gc.collect()
    assert not [thing for thing in gc.get_objects() if issubclass(type(thing), (Memory, Cache))]


def test_an_answer_that_was_cut_off_is_unparsed(server, policy):
    """Two tokens hold no answer, whatever they are."""
    rollout = play(server, policy, plan_of(1, 3), sampling=Sampling(2))
    turns = [turn for trajectory in rollout.trajectories for turn in trajectory.turns]
    assert len(turns) == 15
    assert not any(turn.valid_format for turn in turns)
    assert {turn.actions for turn in turns} == {("",)}
    assert {turn.reward for turn in turns} == {-0.1}


def test_a_context_that_outgrows_the_model_ends_the_episode_truncated(server, novice):
    policy = load_policy(str(novice))
    # The first prompt is 24 tokens, the second at most 24 + 8 + 25 = 57, the third over 64 − 8.
    policy.model.config.max_position_embeddings = 64
    rollout = play(server, policy, plan_of(2, 2), context=HISTORY, sampling=Sampling(8))
    assert len(rollout.trajectories) == 4
    cut = [t for t in rollout.trajectories if not t.terminated]
    assert cut
    for trajectory in cut:
        assert trajectory.truncated
        assert trajectory.outgrown
        assert 1 <= len(trajectory.turns) < 5
        assert len(trajectory.rows[0].ids) <= 64
        # The next prompt leaves no room for an answer; where the model can read it, it has a value.
        assert trajectory.last_prompt is None or 56 < len(trajectory.last_prompt) <= 64


def test_a_first_prompt_that_outgrows_the_model_ends_the_episode_without_a_turn(server, novice):
    """Every tile of this board is a token, so 6×6 of them leave room for no answer."""
    policy = load_policy(str(novice))
    policy.model.config.max_position_embeddings = 30
    rollout = play(server, policy, plan_of(1, 2), context=HISTORY)
    assert [(t.truncated, t.outgrown, t.turns, t.rows) for t in rollout.trajectories] == [(True, True, (), ())] * 2
    config = load_config(settings=[f"run.server={server}", "rollout.max_response_tokens=8"])
    with connect(server) as client:
        result = evaluate(policy, client, config, [1, 2], split=Split.VALIDATION, greedy=True)
    assert (result.episodes, result.successes, result.valid_format) == (2, 0, 0.0)


def test_episodes_lost_to_infrastructure_are_no_results(server, policy):
    """The server refuses this split to one member; the others are played."""
    plan = plan_of(2, 2)
    plan[1] = replace(plan[1], request=replace(plan[1].request, split=Split.HELD_OUT))
    rollout = play(server, policy, plan)
    assert [(t.group, t.member) for t in rollout.trajectories] == [(0, 0), (1, 0), (1, 1)]
    ((planned, error),) = [(lost.planned, lost.error) for lost in rollout.lost]
    assert planned is plan[1]
    assert "held_out" in str(error)


def test_greedy_members_of_a_group_play_alike(server, policy):
    rollout = play(server, policy, plan_of(1, 3), sampling=Sampling(8, greedy=True))
    assert len({tuple(turn.response for turn in t.turns) for t in rollout.trajectories}) == 1


def test_uniforms_are_asked_for_by_place(server, policy):
    asked = set()

    def note(group, member, turn, count):
        asked.add((group, member, turn, count))
        return np.full(count, 0.5)

    with connect(server) as client:
        rollout = collect(policy, client, plan_of(2, 2), context=CONTEXT, sampling=Sampling(6), uniforms=note, parts=2)
    expected = {(t.group, t.member, turn, 6) for t in rollout.trajectories for turn in range(len(t.turns))}
    assert asked == expected


def test_no_session_is_left_behind(server, policy):
    with connect(server) as client:
        before = client.server().sessions
        collect(policy, client, plan_of(2, 3), context=CONTEXT, sampling=SAMPLING, uniforms=uniforms, parts=2)
        assert client.server().sessions == before
