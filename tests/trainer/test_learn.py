"""From episodes to what an update is given: grading, filtering, penalties, whitening."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from turngym_trainer.advantage import ADVANTAGES
from turngym_trainer.config import Config
from turngym_trainer.grade import complete_groups, grade
from turngym_trainer.learn import learn
from turngym_trainer.policy import load_policy
from turngym_trainer.seeds import Place
from turngym_trainer.settings import load_config
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord
from turngym_trainer.update import Learner


class WatchedLearner(Learner):
    """A learner that also remembers what it was given to learn from."""

    def update(self, lesson, *, actor_episodes, critic_episodes, place):
        self.given = lesson, actor_episodes.tolist(), critic_episodes.tolist()
        return super().update(lesson, actor_episodes=actor_episodes, critic_episodes=critic_episodes, place=place)


def turn(reward, valid=True):
    return TurnRecord("", "", "", ("a",), reward, valid, valid, 1)


def episode(group, member, *turns, tokens=2, seed=0, environment="sokoban"):
    rng = np.random.default_rng((seed, group, member))
    turn_of = np.concatenate([np.full(3, -1)] + [np.full(tokens, index) for index in range(len(turns))])
    logprobs = np.where(turn_of >= 0, -5.0, 0).astype(np.float32)
    row = Row(rng.integers(0, 100, len(turn_of)), turn_of >= 0, turn_of, logprobs)
    return Trajectory(environment, group, member, 0, 0, "", None, True, False, "", (row,) if turns else (), turns)


def learner(config: Config, *, with_critic=True, reference_seed=None):
    reference = None if reference_seed is None else load_policy("tiny", seed=reference_seed)
    return WatchedLearner(load_policy("tiny"), config, length_limit=60, with_critic=with_critic, reference=reference)


def config_of(*settings, preset="starpo_s"):
    return load_config(
        preset=preset, settings=["rollout.group_size=2", "rollout.groups=16", "critic.warmup_iterations=0", *settings]
    )


def test_groups_that_lost_more_than_half_are_dropped():
    episodes = (episode(0, 0, turn(1)), episode(0, 3, turn(1)), episode(1, 2, turn(1)), episode(2, 0), episode(2, 1))
    kept = complete_groups(episodes, group_size=4)
    assert [(e.group, e.member) for e in kept] == [(0, 0), (0, 3)]
    assert len(complete_groups(episodes, group_size=2)) == 3  # Half is enough; an episode without a turn is none.


def test_grading_shapes_each_turn_and_filters_on_either():
    # Group 0: rewards 1 − 0.1 and 1: spread by shaping alone. Group 1: 0 and 0.04.
    episodes = (
        episode(0, 0, turn(1.0, valid=False)),
        episode(0, 1, turn(0.5), turn(0.5)),
        episode(1, 0, turn(0.0)),
        episode(1, 1, turn(0.04)),
    )
    graded = grade(episodes, config_of("filter.keep=0.5"), Place(1))
    np.testing.assert_allclose(graded.rewards, [0.9, 1.0, 0.0, 0.04])
    assert graded.kept.tolist() == [True, True, False, False]
    on_task = grade(episodes, config_of("filter.keep=0.5", "filter.on=task"), Place(1))
    assert on_task.kept.tolist() == [False, False, True, True]
    np.testing.assert_allclose(on_task.rewards, graded.rewards)


PAID_UNLIKE = [
    'mixture.environments=[{id="rich", reward_range=12.0, reward_scale=0.1}, {id="poor"}]',
    "reward.invalid_turn=-0.5",
    "filter.kind=none",
    "rollout.group_size=2",
    "rollout.groups=16",
    "critic.warmup_iterations=0",
]


def test_rewards_of_a_mixture_are_learnt_at_their_scales():
    """One environment pays 10 and one 1; an invalid turn costs 0.5 in either."""
    episodes = (
        episode(0, 0, turn(10.0), environment="rich"),
        episode(0, 1, turn(0.0), turn(2.0, valid=False), environment="rich"),
        episode(1, 0, turn(1.0), environment="poor"),
        episode(1, 1, turn(0.2, valid=False), environment="poor"),
    )
    config = load_config(settings=PAID_UNLIKE)
    graded = grade(episodes, config, Place(1))
    np.testing.assert_allclose(graded.rewards, [1.0, -0.3, 1.0, -0.3])
    np.testing.assert_allclose(graded.turn_rewards[1], [0.0, -0.3])
    assert [each.environment_return for each in graded.trajectories] == [10.0, 2.0, 1.0, 0.2]
    trained = learner(config)
    assert trained.critic.reward_range == pytest.approx(1.2)
    learn(trained, graded, config, Place(1))
    lesson, _, _ = trained.given
    # Values are 0 at first, so targets are returns to go; a turn has two tokens.
    np.testing.assert_allclose(lesson.targets, [1, 1, -0.3, -0.3, -0.3, -0.3, 1, 1, -0.3, -0.3], atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind, of in ADVANTAGES.items() if of.compares_members])
def test_what_is_divided_by_its_spread_has_no_scale(kind):
    episodes = tuple(episode(0, member, turn(float(member**2))) for member in range(3))
    advantages: list[np.ndarray] = []
    for scale in (1.0, 8.0):
        settings = [f"advantage.kind={kind}", "filter.kind=none", f"environment.reward_scale={scale}"]
        if kind == "dr_grpo":
            settings.append("update.aggregation=length-limit")
        config = config_of("rollout.group_size=3", *settings)
        trained = learner(config, with_critic=False)
        learn(trained, grade(episodes, config, Place(1)), config, Place(1))
        advantages.append(trained.given[0].advantages)
    assert np.abs(advantages[0]).max() > 0.5
    np.testing.assert_allclose(advantages[1], advantages[0] * (1.0 if kind == "grpo" else 8.0), rtol=1e-5)


def read_whole_and_by_turns(group, member, *rewards):
    """One episode as a policy with the full history reads it, and as one that reads the last turn only."""
    rng = np.random.default_rng((group, member))
    turns, pieces = tuple(map(turn, rewards)), []
    for index in range(len(rewards)):
        shown, written = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        of = np.repeat([-1, index], [shown, written])
        pieces.append((rng.integers(0, 100, shown + written), of))

    def row(*parts):
        ids, of = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Row(ids, of >= 0, of, np.where(of >= 0, -5.0, 0).astype(np.float32))

    return tuple(
        Trajectory("sokoban", group, member, 0, 0, "", None, True, False, "", rows, turns)
        for rows in ((row(*pieces),), tuple(row(piece) for piece in pieces))
    )


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_what_a_policy_reads_decides_nothing_about_what_its_tokens_are_worth(kind):
    """Where a critic knows nothing yet, the advantages of both contexts are equal, and both are learnt from."""
    played = [
        read_whole_and_by_turns(*of) for of in ((0, 0, 1.0, 0.5), (0, 1, -1.0), (1, 0, 2.0, 0.0, 3.0), (1, 1, 0.25))
    ]
    settings = [f"advantage.kind={kind}", "filter.kind=none", "advantage.gamma=0.9", "advantage.gamma_turn=0.7"]
    settings += ["advantage.lam=0.8", *(["update.aggregation=length-limit"] if kind == "dr_grpo" else [])]
    config = config_of(*settings)
    given = []
    for episodes in zip(*played, strict=True):
        trained = learner(config, with_critic=ADVANTAGES[kind].needs_critic)
        before = {name: weight.clone() for name, weight in trained.policy.model.named_parameters()}
        metrics = learn(trained, grade(episodes, config, Place(1)), config, Place(1))
        assert metrics["update/actor_steps"] == 1
        assert all((weight != before[name]).any() for name, weight in trained.policy.model.named_parameters())
        given.append(trained.given[0])
    whole, by_turns = given
    assert len(whole.batch.rows) == 4 < len(by_turns.batch.rows)
    assert np.abs(whole.advantages).max() > 0.5
    np.testing.assert_array_equal(whole.advantages, by_turns.advantages)
    if whole.targets is not None:
        np.testing.assert_array_equal(whole.targets, by_turns.targets)


def test_random_groups_are_a_function_of_run_and_iteration():
    episodes = tuple(episode(group, member, turn(group * member)) for group in range(12) for member in range(2))
    config = config_of("filter.kind=random", "filter.keep=0.5")
    kept = [tuple(grade(episodes, config, Place(iteration)).kept.tolist()) for iteration in (1, 1, 2, 3)]
    assert {sum(each) for each in kept} == {12}  # Six groups of two.
    assert kept[0] == kept[1]
    assert len(set(kept)) == 3
    other = config_of("filter.kind=random", "filter.keep=0.5", "run.seed=1")
    assert tuple(grade(episodes, other, Place(1)).kept.tolist()) != kept[0]
    assert tuple(grade(episodes, config, Place(1, attempt=1)).kept.tolist()) != kept[0]


def test_advantages_of_kept_tokens_are_whitened_and_the_critic_may_have_all():
    episodes = (
        episode(0, 0, turn(3.0)),
        episode(0, 1, turn(-1.0)),
        episode(1, 0, turn(50.0)),
        episode(1, 1, turn(50.0)),
    )
    config = config_of("critic.on=all", "update.minibatch_episodes=4")
    trained = learner(config)
    metrics = learn(trained, grade(episodes, config, Place(1)), config, Place(1))
    lesson, actor, critic = trained.given
    assert (actor, critic) == ([0, 1], [0, 1, 2, 3])
    # Values are 0 at first, so advantages are returns: 3, 3, −1, −1, mean 1, std 2.
    np.testing.assert_allclose(lesson.advantages[:4], [1, 1, -1, -1], atol=1e-12)
    np.testing.assert_allclose(lesson.targets, [3, 3, -1, -1, 50, 50, 50, 50])
    assert (metrics["update/kept_episodes"], metrics["update/kept_tokens"]) == (2, 4)
    assert (metrics["update/actor_steps"], metrics["update/critic_steps"]) == (1, 1)


def test_critic_learns_from_kept_episodes_and_alone_at_first():
    episodes = (
        episode(0, 0, turn(3.0)),
        episode(0, 1, turn(-1.0)),
        episode(1, 0, turn(50.0)),
        episode(1, 1, turn(50.0)),
    )
    config = config_of("critic.warmup_iterations=2")
    trained = learner(config)
    for iteration, expected in ((2, []), (3, [0, 1])):
        learn(trained, grade(episodes, config, Place(1)), config, Place(iteration))
        lesson, actor, critic = trained.given
        assert (actor, critic, len(lesson.batch.lengths)) == (expected, [0, 1], 2)


def test_kl_in_the_reward_is_charged_token_by_token():
    episodes = (episode(0, 0, turn(0.0), turn(2.0)), episode(0, 1, turn(0.0), tokens=3))
    config = config_of("kl.coefficient=0.5", preset="starpo")
    trained = learner(config, reference_seed=1)
    learn(trained, grade(episodes, config, Place(1)), config, Place(1))
    lesson, _, _ = trained.given
    gap = -5.0 - trained.reference_logprobs(lesson.batch).astype(np.float64)
    charged = -0.5 * gap
    assert np.abs(charged).min() > 1e-4
    rewards = charged + np.array([0, 0, 0, 2.0, 0, 0, 0])
    expected = [rewards[m : (4 if m < 4 else 7)].sum() for m in range(7)]
    np.testing.assert_allclose(lesson.targets, expected, atol=1e-6)
    assert lesson.reference_logprobs is None


def test_kl_in_the_loss_leaves_rewards_alone():
    episodes = (episode(0, 0, turn(1.0)), episode(0, 1, turn(0.0)))
    config = config_of("kl.coefficient=0.5", preset="grpo")
    trained = learner(config, with_critic=False, reference_seed=1)
    metrics = learn(trained, grade(episodes, config, Place(1)), config, Place(1))
    lesson, _, _ = trained.given
    np.testing.assert_array_equal(lesson.reference_logprobs, trained.reference_logprobs(lesson.batch))
    a = 0.5 / (0.5**0.5 + 1e-6)  # Mean 1/2, std (ddof 1) √(1/2).
    np.testing.assert_allclose(lesson.advantages, [a, a, -a, -a])
    assert metrics["update/reference_kl"] > 0


def test_recomputed_log_probabilities_correct_the_samplers():
    episodes = (episode(0, 0, turn(1.0)), episode(0, 1, turn(0.0)))
    config = config_of("kl.coefficient=0", "update.old_logprobs=recomputed", preset="grpo")
    trained = learner(config, with_critic=False)
    metrics = learn(trained, grade(episodes, config, Place(1)), config, Place(1))
    lesson, _, _ = trained.given
    before = learner(config, with_critic=False).logprobs(lesson.batch)
    np.testing.assert_allclose(lesson.old_logprobs, before, atol=1e-6)
    assert (lesson.sampler_logprobs == -5.0).all()
    assert metrics["update/sampler_gap"] == pytest.approx(np.abs(before + 5.0).mean(), rel=1e-5)
    assert metrics["update/ratio_max"] == pytest.approx(1.0, abs=1e-5)


ALIKE = (episode(0, 0, turn(1.0)), episode(0, 1, turn(1.0)), episode(1, 0, turn(2.0)), episode(1, 1, turn(2.0)))


@pytest.mark.parametrize("filtering", ["none", "std"])
@pytest.mark.parametrize("kind", ADVANTAGES)
def test_groups_that_fare_alike(kind, filtering):
    """Without a filter gae and reinforce_pp learn from them; with one only critics do; comparisons never."""
    needs_critic = ADVANTAGES[kind].needs_critic
    settings = [f"advantage.kind={kind}", f"filter.kind={filtering}"]
    if kind == "dr_grpo":
        settings.append("update.aggregation=length-limit")
    config = config_of(*settings)
    metrics = learn(learner(config, with_critic=needs_critic), grade(ALIKE, config, Place(1)), config, Place(1))
    actor = filtering == "none" and not ADVANTAGES[kind].compares_members
    assert (metrics.get("update/actor_steps", 0) > 0) == actor
    assert (metrics.get("update/critic_steps", 0) > 0) == needs_critic
    # Nothing is told of an actor that was not looked at: a 0 would pass for a lost entropy, and a gradient of nothing.
    assert ("update/entropy" in metrics) == actor
    assert ("update/gradient_norm" in metrics) == actor


def test_reinforce_pp_charges_the_divergence_token_by_token_and_whitens():
    episodes = (episode(0, 0, turn(0.0), turn(2.0)), episode(0, 1, turn(0.0), tokens=3))
    config = config_of("kl.coefficient=0.5", "advantage.kind=reinforce_pp", "filter.kind=none")
    trained = learner(config, with_critic=False, reference_seed=1)
    learn(trained, grade(episodes, config, Place(1)), config, Place(1))
    lesson, _, _ = trained.given
    gap = -5.0 - trained.reference_logprobs(lesson.batch).astype(np.float64)
    rewards = -0.5 * gap + np.array([0, 0, 0, 2.0, 0, 0, 0])
    sums = np.array([rewards[m : (4 if m < 4 else 7)].sum() for m in range(7)])
    np.testing.assert_allclose(lesson.advantages, (sums - sums.mean()) / sums.std(), atol=1e-6)


@pytest.mark.parametrize("kind", ["gae", "bi_level_gae"])
def test_values_go_on_where_a_limit_ended_an_episode(kind):
    """V of what would have been read next; an episode that ended by itself has 0."""
    prompt = np.random.default_rng(1).integers(0, 100, 6)
    cut = replace(episode(0, 0, turn(1.0)), terminated=False, truncated=True, last_prompt=prompt)
    whole = episode(0, 1, turn(0.0))
    for bootstrap in (True, False):
        config = config_of(
            f"advantage.kind={kind}",
            "advantage.gamma_turn=0.5",
            f"advantage.bootstrap_truncated={str(bootstrap).lower()}",
            "filter.kind=none",
            "environment.reward_range=10.0",
        )
        trained = learner(config)
        torch.nn.init.constant_(trained.critic.head.weight, 0.01)
        values = {}
        with torch.no_grad():
            for name, ids in {"cut": cut.rows[0].ids, "whole": whole.rows[0].ids, "prompt": prompt}.items():
                hidden = trained.critic.trunk(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0]
                values[name] = (10.0 * trained.critic.head(hidden).squeeze(-1)).numpy()
        after = 0.5 * values["prompt"][-1] if bootstrap else 0.0
        assert abs(values["prompt"][-1]) > 0.1
        learn(trained, grade((cut, whole), config, Place(1)), config, Place(1))
        lesson, _, _ = trained.given
        np.testing.assert_allclose(lesson.values, [*values["cut"][2:4], *values["whole"][2:4]], atol=1e-4)
        # λ = 1: the target is the discounted return with what comes after; γ inside the turn is 1.
        np.testing.assert_allclose(lesson.targets, [1.0 + after, 1.0 + after, 0.0, 0.0], atol=1e-4)
