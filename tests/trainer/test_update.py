"""Optimiser steps on a real model: what they are invariant to, and what they refuse."""

import copy

import numpy as np
import pytest
import torch
from drawn_lessons import TURN, V, everyone, lesson_of, random_batch

from turngym_trainer.batch import lay_out
from turngym_trainer.logprobs import Scorer, micro_batches
from turngym_trainer.policy import load_policy
from turngym_trainer.seeds import Place
from turngym_trainer.settings import load_config
from turngym_trainer.trajectory import Row, Trajectory
from turngym_trainer.update import Learner


def make(settings=(), *, with_critic=True, reference=None):
    config = load_config(settings=["rollout.temperature=0.7", "environment.reward_range=10.0", *settings])
    return Learner(load_policy("tiny"), config, length_limit=60, with_critic=with_critic, reference=reference)


def nobody():
    return np.arange(0)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_scores_are_the_models_own_at_every_action_token():
    batch = random_batch(np.random.default_rng(0))
    policy = load_policy("tiny")
    scorer = Scorer(policy.model, temperature=0.7)
    scored = scorer.logprobs(batch, token_budget=40)
    expected, entropies = [], []
    with torch.no_grad():
        for row in batch.rows:
            logits = policy.model(input_ids=torch.from_numpy(row.ids)[None]).logits[0].double() / 0.7
            distribution = torch.distributions.Categorical(logits=logits)
            for t in np.flatnonzero(row.is_action):
                expected.append(distribution.logits[t - 1, row.ids[t]].item())
                entropies.append(distribution.entropy()[t - 1].item())
    np.testing.assert_allclose(scored, expected, atol=1e-5)
    found = np.zeros(len(scored))
    with torch.no_grad():
        for part in micro_batches(batch, np.arange(len(batch.rows)), 40, torch.device("cpu")):
            found[part.tokens] = scorer.score(part)[1].numpy()
    np.testing.assert_allclose(found, entropies, atol=1e-5)


def test_models_that_scale_their_logits_are_read_as_they_are():
    policy = load_policy("tiny")
    plain = Scorer(policy.model, 1.0)
    forward = policy.model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    policy.model.forward = scaled
    batch = random_batch(np.random.default_rng(1))
    scorer = Scorer(policy.model, 3.0)
    np.testing.assert_allclose(scorer.logprobs(batch, 10_000), plain.logprobs(batch, 10_000), atol=1e-5)


def members_of_a_group(rng):
    """Eight episodes that begin with one of two prompts: last-turn context, full history, and answers of one token."""
    prompts = [rng.integers(0, V, 6), rng.integers(0, V, 6)]

    def row(prompt, answer, turn=0, more=()):
        ids, turns = [prompt, answer], [np.full(6, -1), np.full(len(answer), turn)]
        if len(more):
            ids += [rng.integers(0, V, 3), more]
            turns += [np.full(3, -1), np.full(len(more), turn + 1)]
        turns = np.concatenate(turns)
        return Row(np.concatenate(ids), turns >= 0, turns, np.where(turns >= 0, -4.6, 0).astype(np.float32))

    episodes = []
    for member in range(8):
        answer = rng.integers(0, V, 1 + member % 4)
        rows = (
            [row(prompts[0], answer), row(prompts[1], answer[::-1], turn=1)]
            if member % 2
            else [row(prompts[member // 4], answer, more=rng.integers(0, V, 2))]
        )
        episodes.append(Trajectory("e", 0, member, 0, 0, "", None, True, False, "", tuple(rows), (TURN,) * 2))
    return lay_out(episodes)


def test_answers_that_share_a_prompt_are_scored_as_if_alone():
    batch = members_of_a_group(np.random.default_rng(14))
    rows, device = np.arange(len(batch.rows)), torch.device("cpu")
    scorer = Scorer(load_policy("tiny").model, 0.7)
    assert scorer.shares_prompts
    found = {}
    for share in (True, False):
        scored, read = np.zeros((2, len(batch.logprobs))), 0
        for part in micro_batches(batch, rows, 60, device, share_prompts=share):
            assert (part.mask is None) == (part.places is None)
            assert share or part.mask is None
            logprobs, entropy = scorer.score(part)
            scored[:, part.tokens] += np.stack([logprobs.detach().numpy(), entropy.detach().numpy()])
            read += part.ids.numel()
        found[share] = scored, read
    np.testing.assert_allclose(found[True][0], found[False][0], atol=1e-5)
    assert found[True][1] < 0.7 * found[False][1]


def test_shared_prompts_leave_gradients_as_they_are():
    batch = members_of_a_group(np.random.default_rng(15))
    gradients = []
    for share in (True, False):
        learner = make()
        torch.nn.init.constant_(learner.critic.head.weight, 0.01)
        learner.scorer.shares_prompts = share
        lesson = lesson_of(learner, batch, np.random.default_rng(16), old_logprobs=batch.logprobs)
        for optimiser in learner.optimisers.values():
            optimiser.step = lambda: None
            optimiser.zero_grad = lambda set_to_none: None
        learner.update(lesson, actor_episodes=everyone(batch), critic_episodes=everyone(batch), place=Place(1))
        modules = (learner.policy.model, learner.critic)
        gradients.append(torch.cat([p.grad.flatten() for module in modules for p in module.parameters()]))
    assert gradients[0].abs().max() > 1e-3
    assert (gradients[0] - gradients[1]).abs().max() < 1e-6


def test_models_that_ignore_a_mask_of_ours_get_a_prompt_for_each_answer():
    policy = load_policy("tiny")
    trunk = policy.model.base_model
    forward = trunk.forward
    trunk.forward = lambda attention_mask=None, position_ids=None, **kwargs: forward(**kwargs)
    assert not Scorer(policy.model, 1.0).shares_prompts


@pytest.mark.parametrize("budget", [1, 30, 100])
def test_micro_batches_hold_each_row_once_within_the_budget(budget):
    batch = random_batch(np.random.default_rng(2))
    rows = batch.rows_of(np.array([1, 3, 4]))
    parts = list(micro_batches(batch, rows, budget, torch.device("cpu")))
    assert sorted(np.concatenate([part.tokens for part in parts])) == list(
        np.flatnonzero(batch.tokens_of(np.array([1, 3, 4])))
    )
    assert all(part.ids.numel() <= budget or part.ids.shape[0] == 1 for part in parts)
    assert sum(part.ids.shape[0] for part in parts) == len(rows)


LOSSES = {
    "token-mean": [],
    "seq-mean": ["update.aggregation=seq-mean"],
    "length-limit": ["update.aggregation=length-limit"],
    "shared trunk": ["critic.trunk=shared"],
    "shared trunk, seq-mean": ["critic.trunk=shared", "update.aggregation=seq-mean"],
    "value clip": ["critic.clip=0.2"],
    "sequence ratio": ["update.ratio=sequence", "update.clip_high=0.05", "update.clip_low=0.05"],
    "sequence ratio, seq-mean": ["update.ratio=sequence", "update.aggregation=seq-mean"],
    "k1": ["kl.coefficient=0.5", "kl.place=loss", "kl.estimator=k1", "kl.allow_k1_in_loss=true"],
    "k2": ["kl.coefficient=0.5", "kl.place=loss", "kl.estimator=k2", "update.aggregation=seq-mean"],
    "k3": ["kl.coefficient=0.5", "kl.place=loss", "kl.estimator=k3", "update.aggregation=length-limit"],
    "dual clip": ["update.dual_clip=1.3"],
    "sampler's weights": ["update.old_logprobs=recomputed"],
}


@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES)
def test_gradients_do_not_depend_on_the_micro_batch(settings):
    rng = np.random.default_rng(3)
    batch = random_batch(rng)
    gradients = []
    lesson = None
    for budget in (10_000, 50, 1):
        reference = load_policy("tiny", seed=1) if settings and settings[0].startswith("kl") else None
        learner = make([f"update.microbatch_tokens={budget}", *settings], reference=reference)
        torch.nn.init.constant_(learner.critic.head.weight, 0.01)  # At zero the trunk would get no gradient.
        lesson = lesson or lesson_of(
            learner,
            batch,
            rng,
            reference_logprobs=reference and learner.reference_logprobs(batch),
            sampler_logprobs=batch.logprobs if "update.old_logprobs=recomputed" in settings else None,
        )
        gradients.append(gradient_of(learner, lesson, learner.policy.model, learner.critic))
    assert gradients[0].abs().max() > 1e-4
    for other in gradients[1:]:
        assert (gradients[0] - other).abs().max() < 1e-6


def gradient_of(learner, lesson, *modules, critic=True):
    """What an update of everyone would go by; no step is taken."""
    for optimiser in learner.optimisers.values():
        optimiser.step = lambda: None
        optimiser.zero_grad = lambda set_to_none: None
    everybody = everyone(lesson.batch)
    learner.update(lesson, actor_episodes=everybody, critic_episodes=everybody if critic else nobody(), place=Place(1))
    return torch.cat([p.grad.flatten() for module in modules for p in module.parameters()])


@pytest.mark.parametrize(("seed", "clip", "clipped"), [(22, 0.9, False), (22, 0.02, True)])
def test_gradient_of_a_sequence_ratio_is_that_of_its_formula(seed, clip, clipped):
    """GSPO written out (arXiv 2507.18071, eq. 5 and 7): one ratio an episode, whose rows are cut into micro-batches."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, B=5)
    settings = ["update.ratio=sequence", f"update.clip_low={clip}", f"update.clip_high={clip}", "update.entropy=0.0"]
    settings += ["update.aggregation=seq-mean", "update.gradient_clip=1e9", "update.microbatch_tokens=1"]
    learner = make(settings, with_critic=False)
    per_episode = np.array([1.0, -1.0, 2.0, -0.5, 0.7])
    lesson = lesson_of(learner, batch, rng, advantages=np.repeat(per_episode, batch.lengths))
    model = copy.deepcopy(learner.policy.model)
    loss = 0.0
    for episode, advantage in enumerate(per_episode):
        differences = []
        for index in np.flatnonzero(batch.row_episodes == episode):
            row, flat = batch.rows[index], int(batch.row_offsets[index])
            logits = model(input_ids=torch.from_numpy(row.ids)[None]).logits[0] / 0.7
            for m, t in enumerate(np.flatnonzero(row.is_action)):
                now = torch.log_softmax(logits[t - 1], -1)[row.ids[t]]
                differences.append(now - float(lesson.old_logprobs[flat + m]))
        ratio = torch.stack(differences).mean().exp()
        bounded = ratio.clamp(1 - clip, 1 + clip)
        loss = loss - torch.minimum(ratio * advantage, bounded * advantage) / len(per_episode)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    found = gradient_of(learner, lesson, learner.policy.model, critic=False)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-3)
    free = make([*settings, "update.clip_low=0.9", "update.clip_high=0.9"], with_critic=False)
    assert torch.equal(gradient_of(free, lesson, free.policy.model, critic=False), found) != clipped


def test_gradient_is_that_of_the_loss_written_out():
    """One mini-batch by a formula of its own: sum over the episode's tokens, no flat order, no micro-batches."""
    rng = np.random.default_rng(4)
    batch = random_batch(rng, B=4)
    learner = make(["update.gradient_clip=1e9", "update.entropy=0.01", "update.clip_high=0.1"], with_critic=False)
    lesson = lesson_of(learner, batch, rng)
    model = copy.deepcopy(learner.policy.model)
    loss, flat = 0.0, 0
    total = int(sum(row.is_action.sum() for row in batch.rows))
    for row in batch.rows:
        logits = model(input_ids=torch.from_numpy(row.ids)[None]).logits[0] / 0.7
        for t in np.flatnonzero(row.is_action):
            distribution = torch.softmax(logits[t - 1], -1)
            ratio = distribution[row.ids[t]] / float(np.exp(lesson.old_logprobs[flat]))
            advantage = float(lesson.advantages[flat])
            term = min(ratio * advantage, ratio.clamp(0.8, 1.1) * advantage, key=torch.Tensor.item)
            if advantage < 0:
                term = max(term, torch.tensor(3.0 * advantage), key=torch.Tensor.item)
            entropy = -(distribution * distribution.log()).sum()
            loss = loss - (term + 0.01 * entropy) / total
            flat += 1
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimiser = learner.optimisers["actor"]
    optimiser.step = lambda: None
    optimiser.zero_grad = lambda set_to_none: None
    learner.update(lesson, actor_episodes=everyone(batch), critic_episodes=nobody(), place=Place(1))
    found = torch.cat([p.grad.flatten() for p in learner.policy.model.parameters()])
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-3)


def test_update_raises_what_had_an_advantage():
    rng = np.random.default_rng(5)
    batch = random_batch(rng)
    learner = make(["update.entropy=0.0"], with_critic=False)
    before = learner.logprobs(batch)
    advantages = np.where(rng.random(len(before)) < 0.5, 1.0, -1.0)
    lesson = lesson_of(learner, batch, rng, old_logprobs=before, advantages=advantages)
    report = learner.update(lesson, actor_episodes=everyone(batch), critic_episodes=nobody(), place=Place(1))
    assert (report.actor_steps, report.critic_steps, report.optimiser_steps) == (1, 0, 1)
    assert report.ratio_max == pytest.approx(1.0, abs=1e-5)
    assert report.clip_high == report.clip_low == 0
    assert ((learner.logprobs(batch) - before) * advantages).sum() > 0
    # Nothing is left behind for the next step to add to.
    assert all(parameter.grad is None for parameter in learner.policy.model.parameters())


def test_only_the_chosen_episodes_teach():
    rng = np.random.default_rng(6)
    batch = random_batch(rng)
    chosen = np.array([1, 4])
    results = []
    for poison in (0.0, 1e6):
        learner = make()
        lesson = lesson_of(
            learner,
            batch,
            np.random.default_rng(7),
            advantages=np.where(batch.tokens_of(chosen), 1.0, poison),
            targets=np.where(batch.tokens_of(chosen), 1.0, poison),
        )
        learner.update(lesson, actor_episodes=chosen, critic_episodes=chosen, place=Place(1))
        results.append((weights(learner.policy.model), weights(learner.critic)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


@pytest.mark.parametrize(("size", "steps"), [(7, 1), (6, 2), (3, 3), (2, 4), (1, 7)])
def test_mini_batches_are_near_equal(size, steps):
    rng = np.random.default_rng(8)
    batch = random_batch(rng)
    learner = make([f"update.minibatch_episodes={size}", "update.epochs=2"])
    report = learner.update(
        lesson_of(learner, batch, rng), actor_episodes=everyone(batch), critic_episodes=nobody(), place=Place(1)
    )
    assert report.actor_steps == 2 * steps


def test_critic_learns_alone_without_moving_the_policy():
    rng = np.random.default_rng(9)
    batch = random_batch(rng)
    for trunk in ("own", "shared"):
        learner = make([f"critic.trunk={trunk}", "critic.learning_rate=0.01"])
        assert (learner.values(batch) == 0).all()
        lesson = lesson_of(learner, batch, rng, targets=np.full(len(batch.logprobs), 8.0))
        before = weights(learner.policy.model)
        losses = [
            learner.update(
                lesson, actor_episodes=nobody(), critic_episodes=everyone(batch), place=Place(iteration)
            ).value_loss
            for iteration in range(1, 16)
        ]
        assert losses[0] == pytest.approx(0.8**2 / 2, rel=1e-6)
        assert losses[-1] < 0.5 * losses[0]
        assert 2.0 < learner.values(batch).mean() < 12.0
        assert torch.equal(weights(learner.policy.model), before)


@pytest.mark.parametrize("where", ["advantages", "targets"])
def test_updates_that_are_not_finite_are_refused(where):
    rng = np.random.default_rng(10)
    batch = random_batch(rng)
    learner = make()
    lesson = lesson_of(learner, batch, rng)
    getattr(lesson, where)[3] = np.nan
    before = weights(learner.policy.model), weights(learner.critic)
    report = learner.update(lesson, actor_episodes=everyone(batch), critic_episodes=everyone(batch), place=Place(1))
    assert report.refused == 1
    untouched = (learner.policy.model, before[0]) if where == "advantages" else (learner.critic, before[1])
    assert torch.equal(weights(untouched[0]), untouched[1])
    assert (report.actor_steps, report.critic_steps) == ((0, 1) if where == "advantages" else (1, 0))
    healthy = lesson_of(learner, batch, np.random.default_rng(11))
    learner.update(healthy, actor_episodes=everyone(batch), critic_episodes=everyone(batch), place=Place(2))
    assert torch.isfinite(weights(learner.policy.model)).all()


def test_rates_fall_linearly_where_asked():
    learner = make(
        ["update.schedule=linear", "run.iterations=4", "update.learning_rate=0.4", "critic.learning_rate=0.8"]
    )
    rng = np.random.default_rng(12)
    batch = random_batch(rng, B=2)
    lesson = lesson_of(learner, batch, rng)
    rates = []
    for iteration in (1, 2, 4):
        learner.update(lesson, actor_episodes=nobody(), critic_episodes=nobody(), place=Place(iteration))
        rates.append([learner.optimisers[name].param_groups[0]["lr"] for name in ("actor", "critic")])
    np.testing.assert_allclose(rates, [[0.4, 0.8], [0.3, 0.6], [0.1, 0.2]])


def test_kl_in_the_loss_holds_the_policy_to_the_reference():
    rng = np.random.default_rng(13)
    batch = random_batch(rng)
    settings = ["kl.coefficient=0.5", "kl.place=loss", "kl.estimator=k2", "update.entropy=0.0"]
    reference = load_policy("tiny", seed=1)
    learner = make(settings, with_critic=False, reference=reference)
    lesson = lesson_of(
        learner,
        batch,
        rng,
        advantages=np.zeros(len(batch.logprobs)),
        reference_logprobs=learner.reference_logprobs(batch),
    )
    gaps = []
    for iteration in range(1, 6):
        gaps.append(np.abs(learner.logprobs(batch) - lesson.reference_logprobs).mean())
        report = learner.update(
            lesson, actor_episodes=everyone(batch), critic_episodes=nobody(), place=Place(iteration)
        )
    assert gaps[-1] < gaps[0]
    assert report.reference_kl > 0


BFLOAT16 = ["policy.dtype=bfloat16", "update.old_logprobs=recomputed", "update.learning_rate=1e-5"]


def test_small_steps_are_not_lost_in_bfloat16():
    """A step of 1e-5 is less than half a unit in the last place of nearly every weight, but thirty are not."""
    rng = np.random.default_rng(17)
    batch = random_batch(rng)
    learner = make([*BFLOAT16, "critic.learning_rate=1e-5"])
    models = (learner.policy.model, learner.critic.trunk)
    assert all(p.dtype == torch.bfloat16 for model in models for p in model.parameters())
    assert learner.critic.head.weight.dtype == torch.float32
    torch.nn.init.constant_(learner.critic.head.weight, 0.01)
    # Uniform advantages: the gradient keeps its signs, so steps add up.
    lesson = lesson_of(learner, batch, rng, advantages=np.ones(len(batch.logprobs)))
    with learner.float32_weights():
        kept = [weights(model) for model in models]
    rounded = [weights(model) for model in models]
    moved = []
    for iteration in range(1, 31):
        learner.update(lesson, actor_episodes=everyone(batch), critic_episodes=everyone(batch), place=Place(iteration))
        if iteration in (1, 30):
            with learner.float32_weights():
                now = [weights(model) for model in models]
            for model, of_now in zip(models, now, strict=True):
                assert torch.equal(weights(model), of_now.bfloat16())
            of_kept = [(a != b).float().mean().item() for a, b in zip(now, kept, strict=True)]
            of_rounded = [(weights(m) != b).float().mean().item() for m, b in zip(models, rounded, strict=True)]
            moved.append((of_kept, of_rounded))
    (kept_at_first, rounded_at_first), (kept_at_last, rounded_at_last) = moved
    for first, last in zip(rounded_at_first, rounded_at_last, strict=True):
        assert last > 3 * first
        assert last > 0.2
    for share in (*kept_at_first, *kept_at_last):
        assert share > 0.75  # The rest has no gradient: embeddings of tokens that do not occur.


def test_gradients_of_micro_batches_are_added_in_float32():
    rng = np.random.default_rng(18)
    batch = random_batch(rng)
    gradients, lesson = [], None
    for budget in (10_000, 1):
        learner = make([*BFLOAT16, f"update.microbatch_tokens={budget}"], with_critic=False)
        lesson = lesson or lesson_of(learner, batch, rng)
        optimiser = learner.optimisers["actor"]
        optimiser.step = lambda: None
        optimiser.zero_grad = lambda set_to_none: None
        learner.update(lesson, actor_episodes=everyone(batch), critic_episodes=nobody(), place=Place(1))
        parameters = [p for group in optimiser.param_groups for p in group["params"]]
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in parameters)
        assert all(p.grad is None for p in learner.policy.model.parameters())
        gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert difference < 0.02
