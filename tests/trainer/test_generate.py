"""Sampling: hand-worked inverse CDF, agreement with a plain forward pass, and what an answer is a function of."""

import numpy as np
import pytest
import torch

from turngym_trainer.generate import generate, inverse_cdf
from turngym_trainer.policy import load_policy


@pytest.fixture(scope="module")
def policy():
    """Random weights, with stop tokens made likely enough that answers end early and late."""
    policy = load_policy("tiny", seed=3)
    with torch.no_grad():
        weight = policy.model.get_input_embeddings().weight
        weight.mul_(8.0)
        weight[list(policy.stop_ids)] *= 4.0
    return policy


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(300, 900, length) for length in lengths]


def plain_logprobs(policy, prompt, response, temperature=1.0):
    ids = torch.from_numpy(np.concatenate([prompt, response.ids]))[None]
    with torch.inference_mode():
        distribution = torch.log_softmax(policy.logits(ids) / temperature, -1)[0, len(prompt) - 1 : -1]
    return distribution.gather(-1, torch.from_numpy(response.ids)[:, None]).squeeze(-1).numpy()


def test_inverse_cdf_by_hand():
    logprobs = torch.tensor([[0.2, 0.0, 0.5, 0.3]]).log()
    drawn = [int(inverse_cdf(logprobs, torch.tensor([u], dtype=torch.float64))) for u in (0.0, 0.19, 0.21, 0.69, 0.71)]
    assert drawn == [0, 0, 2, 2, 3]


def test_inverse_cdf_never_draws_the_impossible_at_either_end():
    logprobs = torch.tensor([[0.0, 1.0, 0.0]]).log()
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(logprobs.expand(2, 3), ends).tolist() == [1, 1]


def test_sampled_shares_are_the_models():
    logprobs = torch.log_softmax(torch.tensor([[1.0, -0.5, 0.3]]), -1)
    uniforms = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    shares = torch.bincount(inverse_cdf(logprobs.expand(100_000, 3), uniforms), minlength=3) / 100_000
    assert torch.allclose(shares, logprobs[0].exp(), atol=2e-5)


@pytest.mark.parametrize("lengths", [(9, 9, 9, 9, 9), (4, 11, 7, 1, 23)], ids=["even", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(policy, lengths, temperature):
    prompts = prompts_of(lengths)
    prompts[2] = prompts[0]
    uniforms = np.random.default_rng(1).random((5, 12))
    responses = generate(policy, prompts, uniforms, max_new_tokens=12, temperature=temperature)
    for prompt, response in zip(prompts, responses, strict=True):
        expected = plain_logprobs(policy, prompt, response, temperature)
        assert np.abs(expected - response.logprobs).max() < 1e-5


def test_every_token_is_drawn_by_its_own_uniform(policy):
    (prompt,) = prompts_of([6])
    uniforms = np.random.default_rng(2).random((1, 5))
    (response,) = generate(policy, [prompt], uniforms, max_new_tokens=5)
    seen = prompt
    for token, u in zip(response.ids, uniforms[0], strict=False):
        with torch.inference_mode():
            distribution = torch.log_softmax(policy.logits(torch.from_numpy(seen)[None])[:, -1], -1)
        assert int(inverse_cdf(distribution, torch.tensor([u]))) == token
        seen = np.append(seen, token)


def test_an_answer_does_not_depend_on_its_neighbours(policy):
    """Up to rounding, which no uniform of this batch falls on."""
    prompts = prompts_of((5, 17, 8, 2, 30, 12))
    uniforms = np.random.default_rng(4).random((6, 10))
    together = generate(policy, prompts, uniforms, max_new_tokens=10)
    order = [4, 1, 5, 0, 3, 2]
    shuffled = generate(policy, [prompts[i] for i in order], uniforms[order], max_new_tokens=10)
    for index, response in zip(order, shuffled, strict=True):
        (alone,) = generate(policy, [prompts[index]], uniforms[[index]], max_new_tokens=10)
        assert alone.ids.tolist() == response.ids.tolist() == together[index].ids.tolist()


def test_the_same_call_gives_the_same_bits(policy):
    prompts = prompts_of((5, 17, 8, 2))
    uniforms = np.random.default_rng(5).random((4, 8))
    first, second = (generate(policy, prompts, uniforms, max_new_tokens=8) for _ in range(2))
    assert [r.logprobs.tobytes() for r in first] == [r.logprobs.tobytes() for r in second]


def test_answers_end_at_their_first_stop_token_or_are_cut_off(policy):
    uniforms = np.random.default_rng(6).random((64, 20))
    responses = generate(policy, prompts_of([7] * 64), uniforms, max_new_tokens=20)
    assert {response.complete for response in responses} == {True, False}
    for response in responses:
        stops = np.isin(response.ids, list(policy.stop_ids))
        assert response.complete == bool(stops[-1])
        assert not stops[:-1].any()
        assert response.complete or len(response.ids) == 20
        assert len(response.ids) == len(response.logprobs)


def test_a_closing_tag_of_several_tokens_ends_an_answer():
    """As with tokenizers that do not know the tag: here it may be spelt `<`, `/`, `a` … `>`."""
    policy = load_policy("tiny")
    spelt = np.array([int(policy.encode(character)[0]) for character in "</answer>"])
    policy.stop_ids -= {int(policy.encode("</answer>")[0])}
    policy.closing[policy.encode(">")] = True
    prompt = policy.encode("Up")
    script = [*policy.encode("Up > "), *spelt, *policy.encode("Up")]
    responses = generate(policy, [prompt], forced(policy, prompt, script), max_new_tokens=len(script))
    assert responses[0].ids.tolist() == script[:-1]
    assert responses[0].complete


def forced(policy, prompt, script):
    """Uniforms in the middle of each scripted token's probability."""
    uniforms = []
    seen = prompt
    for token in script:
        with torch.inference_mode():
            probabilities = torch.softmax(policy.logits(torch.from_numpy(seen)[None])[0, -1], -1).double()
        uniforms.append(float(probabilities[:token].sum() + probabilities[token] / 2))
        seen = np.append(seen, token)
    return np.array([uniforms])


def test_greedy_takes_the_most_likely_token(policy):
    prompts = prompts_of((5, 9))
    for prompt, response in zip(prompts, generate(policy, prompts, None, max_new_tokens=6), strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response.ids]))[None]
        with torch.inference_mode():
            best = policy.logits(ids)[0, len(prompt) - 1 : -1].argmax(-1)
        assert response.ids.tolist() == best.tolist()


def test_bad_arguments_are_refused(policy):
    with pytest.raises(ValueError, match="temperature 0"):
        generate(policy, prompts_of([3]), np.zeros((1, 2)), max_new_tokens=2, temperature=0.0)
    with pytest.raises(ValueError, match="expected \\(1, 3\\)"):
        generate(policy, prompts_of([3]), np.zeros((1, 2)), max_new_tokens=3)
    assert generate(policy, [], None, max_new_tokens=3) == []
