"""Signs of template collapse: by hand, and on policies that do and do not look at what they are shown."""

import math

import numpy as np
import pytest
import torch

from turngym_trainer.batch import lay_out
from turngym_trainer.context import Context, Conversation, demonstration
from turngym_trainer.logprobs import Scorer, micro_batches
from turngym_trainer.policy import load_policy
from turngym_trainer.template import signs_of, template_signs, thought_tokens
from turngym_trainer.trajectory import Trajectory, TurnRecord

CONTEXT = Context(turns=1, instructions="none", prefill="<think>")
BOARDS = ("######\n#P_XO#", "######\n#OX_P#", "######\n#_PXO#", "######\n#XO_P#")
WORDS = ("up", "down", "left", "right")


def test_by_hand():
    # Sample 0 is prompt 1's own: ℓ = log(0.1), log(0.6): log(0.6/0.35), std log(6)/2. Sample 1 tells nothing.
    likelihoods = np.log(np.array([[0.1, 0.6], [0.2, 0.2]]))
    signs = signs_of(likelihoods, np.array([1, 0]), whole_turns=False)
    assert signs.information == pytest.approx(math.log(0.6 / 0.35) / 2)
    assert signs.retrieval == 1.0  # Of equals the first counts.
    assert signs.standing == pytest.approx(math.log(0.6 / 0.35) / (math.log(6) / 2 + 1e-3) / 2)
    assert (signs.prompts, signs.samples, signs.whole_turns) == (2, 2, 0)


def test_very_unlikely_samples_do_not_underflow():
    signs = signs_of(np.array([[-9_000.0, -9_001.0]]), np.array([0]), whole_turns=False)
    assert signs.information == pytest.approx(-math.log((1 + math.exp(-1)) / 2))


def episodes(policy, thoughts):
    """First turns, one for each board, whose reasoning is the thought of its place."""
    chat = policy.chat_format("")
    turn = TurnRecord("", "", "", ("Up",), 0.0, True, True, 1)
    made = []
    for group, (board, thought) in enumerate(zip(BOARDS, thoughts, strict=True)):
        conversation = Conversation(policy, chat, CONTEXT)
        conversation.show(board)
        conversation.answer(demonstration(policy, CONTEXT, thought, ["Up"], "||"))
        rows = conversation.rows()
        made += [
            Trajectory("sokoban", group, member, 0, 0, "", None, True, False, "", rows, (turn,)) for member in range(3)
        ]
    return made


def taught(thoughts):
    """A policy that has learnt to think these of the boards."""
    policy = load_policy("tiny")
    batch = lay_out(episodes(policy, thoughts))
    scorer = Scorer(policy.model, 1.0)
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=3e-3)
    for _ in range(60):
        for part in micro_batches(batch, np.arange(len(batch.rows)), 100_000, policy.device):
            optimiser.zero_grad()
            (-scorer.score(part)[0].mean()).backward()
            optimiser.step()
    return policy, scorer


def signs(policy, scorer, thoughts, **bounds):
    settings = {"prompts": 4, "samples": 8, "token_budget": 300} | bounds
    return template_signs(policy, scorer, episodes(policy, thoughts), **settings)


def test_a_policy_that_looks_and_one_that_recites():
    own = [f"go {word} go {word}" for word in WORDS]
    policy, scorer = taught(own)
    seen = signs(policy, scorer, own)
    assert seen.information > 0.5 * math.log(4)
    assert seen.retrieval == 1.0
    assert (seen.prompts, seen.samples, seen.whole_turns) == (4, 12, 0)
    few = signs(policy, scorer, own, prompts=3, samples=2)
    assert (few.prompts, few.samples) == (3, 6)

    same = ["go up go up"] * 4
    policy, scorer = taught(same)
    recited = signs(policy, scorer, same)
    assert abs(recited.information) < 0.1
    assert recited.retrieval <= 0.5


def test_reasoning_that_is_too_short_is_told():
    policy = load_policy("tiny")
    assert signs(policy, Scorer(policy.model, 1.0), [""] * 4).whole_turns == 1


def test_one_prompt_tells_nothing():
    policy = load_policy("tiny")
    assert signs(policy, Scorer(policy.model, 1.0), WORDS, prompts=1) is None


def test_where_a_thought_ends():
    policy = load_policy("tiny")
    thought = policy.encode("go up")
    assert thought_tokens(policy, policy.encode("go up</think><answer>Up</answer>")) == len(thought)
    assert thought_tokens(policy, policy.encode("</think><answer>Up</answer>")) == 0
    assert thought_tokens(policy, thought) == 0
