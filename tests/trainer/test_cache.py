"""The kept cache: what is not read again changes nothing but rounding."""

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from turngym_trainer.cache import Memory, RoomyCache, is_plain, new_cache
from turngym_trainer.generate import generate
from turngym_trainer.policy import Policy, load_policy

TOLERANCE = 5e-5
"""Of log-probabilities in float32, logits up to 100: between a prompt run in pieces and the same one run whole."""


@pytest.fixture(scope="module")
def policy():
    """Random weights far enough from 0 that positions matter, and stop tokens likely enough that answers end early."""
    policy = load_policy("tiny", seed=3)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(6.0)
        weight = policy.model.get_input_embeddings().weight
        weight.mul_(8.0)
        weight[list(policy.stop_ids)] *= 4.0
    return policy


class Counted:
    """Counts the tokens, padding included, that a model reads in prompts and answers."""

    def __init__(self, policy):
        self.prompts = self.answers = 0
        self._hook = policy.model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, module, arguments):
        if arguments[0].shape[1] > 1:
            self.prompts += arguments[0].numel()
        else:
            self.answers += arguments[0].numel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._hook.remove()


def tokens(rng, length):
    return rng.integers(300, 900, length)


def turns_of(seed, sizes):
    """What is shown in each turn to each row, as tokens; a row's size None: its episode is over."""
    rng = np.random.default_rng(seed)
    return [[None if size is None else tokens(rng, size) for size in of_turn] for of_turn in sizes]


RAGGED = turns_of(
    0,
    [
        [9, 4, 30, 17, 2, 12, 21],
        [5, 60, 3, 8, 1, 33, 7],
        [40, 2, None, 2, 16, None, 3],
        [3, None, None, 50, 11, None, 1],
        [8, None, None, None, 9, None, None],
    ],
)


def play(policy, shown, memory, *, max_new_tokens=10, greedy=False):
    """Every turn's prompts and answers, by row."""
    histories = [np.empty(0, np.int64) for _ in shown[0]]
    played = []
    for turn, observations in enumerate(shown):
        rows = [row for row, observation in enumerate(observations) if observation is not None]
        prompts = [np.concatenate([histories[row], observations[row]]) for row in rows]
        uniforms = np.stack([np.random.default_rng([turn, row]).random(max_new_tokens) for row in rows])
        responses = generate(
            policy,
            prompts,
            None if greedy else uniforms,
            max_new_tokens=max_new_tokens,
            memory=memory,
            names=rows,
        )
        for row, prompt, response in zip(rows, prompts, responses, strict=True):
            histories[row] = np.concatenate([prompt, response.ids])
        played.append((prompts, responses))
    return played


def plain_logprobs(policy, prompt, response):
    ids = torch.from_numpy(np.concatenate([prompt, response.ids]))[None]
    with torch.inference_mode():
        distribution = torch.log_softmax(policy.logits(ids), -1)[0, len(prompt) - 1 : -1]
    return distribution.gather(-1, torch.from_numpy(response.ids)[:, None]).squeeze(-1).numpy()


def test_answers_are_those_of_prompts_that_are_run_whole(policy):
    """Ragged rows, some of which leave in the middle of an answer and some between turns."""
    kept, whole = play(policy, RAGGED, Memory()), play(policy, RAGGED, None)
    answers = [response for _, responses in kept for response in responses]
    assert {len(response.ids) for response in answers} >= {1, 2, 10}
    for (prompts, responses), (_, expected) in zip(kept, whole, strict=True):
        for prompt, response, other in zip(prompts, responses, expected, strict=True):
            assert response.ids.tolist() == other.ids.tolist()
            assert response.complete == other.complete
            assert np.abs(response.logprobs - other.logprobs).max() < TOLERANCE
            assert np.abs(response.logprobs - plain_logprobs(policy, prompt, response)).max() < TOLERANCE


def test_only_what_is_new_is_run(policy):
    shown = turns_of(1, [[20] * 4, [10] * 4, [10] * 4])
    with Counted(policy) as counted:
        play(policy, shown, Memory(), max_new_tokens=1)
    # In each later turn: the token that was sampled last, and the ten that were shown.
    assert counted.prompts == 4 * (20 + 11 + 11)
    with Counted(policy) as counted:
        play(policy, shown, None, max_new_tokens=1)
    assert counted.prompts == 4 * (20 + 31 + 42)


def test_padding_in_the_middle_is_seen_by_nobody(policy):
    """Logits of every new token, behind contexts of several lengths and as many new tokens as there are."""
    rng = np.random.default_rng(5)
    known, new = [7, 0, 19, 12], [3, 8, 1, 5]
    begin, width = max(known), max(known) + max(new)
    rows = [tokens(rng, old + fresh) for old, fresh in zip(known, new, strict=True)]
    ids, mask = np.zeros((4, width), np.int64), np.zeros((4, width), np.int64)
    for index, (row, old, fresh) in enumerate(zip(rows, known, new, strict=True)):
        for columns, part in (
            (slice(begin - old, begin), row[:old]),
            (slice(width - fresh, width), row[old:]),
        ):
            ids[index, columns], mask[index, columns] = part, 1
    ids, mask = torch.from_numpy(ids), torch.from_numpy(mask)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = new_cache(policy.model, width)
    with torch.inference_mode():
        policy.logits(ids[:, :begin], mask[:, :begin], positions[:, :begin], cache=cache)
        logits = policy.logits(ids[:, begin:], mask, positions[:, begin:], cache=cache)
        for row, of_row, fresh in zip(rows, logits, new, strict=True):
            expected = policy.logits(torch.from_numpy(row)[None])[0, -fresh:]
            assert torch.allclose(of_row[-fresh:], expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def test_the_same_turns_give_the_same_bits(policy):
    first, second = (play(policy, RAGGED, Memory()) for _ in range(2))
    for (_, responses), (_, again) in zip(first, second, strict=True):
        assert [r.logprobs.tobytes() for r in responses] == [r.logprobs.tobytes() for r in again]


def test_a_context_that_was_cut_is_read_anew(policy):
    rng = np.random.default_rng(6)
    memory = Memory()
    long, other = tokens(rng, 30), tokens(rng, 12)
    uniforms = rng.random((2, 6))
    responses = generate(policy, [long, other], uniforms, max_new_tokens=6, memory=memory, names=["cut", "whole"])
    continued = [np.concatenate([p, r.ids, tokens(rng, 4)]) for p, r in zip([long, other], responses, strict=True)]
    continued[0] = continued[0][5:]
    assert memory.known("cut", continued[0]) == 0
    assert memory.known("whole", continued[1]) == 12 + len(responses[1].ids) - 1
    after = generate(policy, continued, uniforms, max_new_tokens=6, memory=memory, names=["cut", "whole"])
    for response, expected in zip(after, generate(policy, continued, uniforms, max_new_tokens=6), strict=True):
        assert response.ids.tolist() == expected.ids.tolist()
        assert np.abs(response.logprobs - expected.logprobs).max() < TOLERANCE


def test_a_prompt_that_says_no_more_than_what_is_known_is_read_anew(policy):
    (prompt,) = turns_of(7, [[15]])[0]
    memory = Memory()
    first = generate(policy, [prompt], None, max_new_tokens=1, memory=memory)
    assert memory.tokens == 15
    assert memory.known(0, prompt) == 0
    again = generate(policy, [prompt], None, max_new_tokens=1, memory=memory)
    assert first[0].logprobs.tobytes() == again[0].logprobs.tobytes()


def test_rows_that_have_said_the_same_are_read_once(policy):
    """Members of a group that answer greedily: the second turn's prompts are alike too."""
    shown = turns_of(8, [[14], [6]])
    shown = [[observation] * 3 for (observation,) in shown]
    with Counted(policy) as counted:
        ((_, first), (prompts, second)) = play(policy, shown, Memory(), max_new_tokens=4, greedy=True)
    assert counted.prompts == 14 + 6 + 1
    assert len({tuple(response.ids) for response in first}) == 1
    for prompt, response in zip(prompts, second, strict=True):
        assert np.abs(response.logprobs - plain_logprobs(policy, prompt, response)).max() < TOLERANCE


def test_only_conversations_of_the_last_turn_are_held(policy):
    memory = Memory()
    played = play(policy, RAGGED[:3], memory)
    prompts, responses = played[-1]
    assert memory.tokens == sum(len(p) + len(r.ids) - 1 for p, r in zip(prompts, responses, strict=True))
    assert memory.known(2, np.concatenate([played[1][0][2], played[1][1][2].ids, [300]])) == 0


@pytest.fixture(scope="module")
def sliding(policy):
    """A model whose layers see four columns back."""
    tokenizer = policy.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        sliding_window=4,
        pad_token_id=policy.pad_id,
        eos_token_id=int(tokenizer.eos_token_id),
        bos_token_id=None,
    )
    model = MistralForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.5, generator=generator)
    return Policy(model, tokenizer)


def test_a_model_that_counts_columns_reads_every_prompt_whole(policy, sliding):
    assert is_plain(policy.model)
    assert isinstance(new_cache(policy.model, 8), RoomyCache)
    assert not is_plain(sliding.model)
    shown = turns_of(10, [[9, 4], [5, 12]])
    memory = Memory()
    with Counted(sliding) as counted:
        kept = play(sliding, shown, memory, max_new_tokens=3)
    assert memory.tokens == 0
    with Counted(sliding) as whole:
        expected = play(sliding, shown, None, max_new_tokens=3)
    assert counted.prompts == whole.prompts
    for (_, responses), (_, others) in zip(kept, expected, strict=True):
        assert [r.logprobs.tobytes() for r in responses] == [r.logprobs.tobytes() for r in others]


def test_names_are_one_for_each_prompt(policy):
    prompts = turns_of(11, [[3, 4]])[0]
    with pytest.raises(ValueError, match="1 different names: expected one for each of 2 prompts"):
        generate(policy, prompts, None, max_new_tokens=2, memory=Memory(), names=["a", "a"])
