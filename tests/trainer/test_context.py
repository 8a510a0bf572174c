"""Conversations as tokens: what is read, what is labelled an action, and that nothing is encoded twice."""

from itertools import pairwise

import numpy as np
import pytest

from turngym_trainer.context import Context, Conversation, demonstration, system_message
from turngym_trainer.generate import Response
from turngym_trainer.policy import load_policy


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny")


def response(policy, text, start=0.0):
    ids = policy.encode(text)
    return Response(ids, np.arange(len(ids), dtype=np.float32) + np.float32(start), complete=True)


def played(policy, context, turns):
    """A conversation of (observation, answer) pairs and the prompt of each turn, as text."""
    conversation = Conversation(policy, policy.chat_format(""), context)
    prompts = []
    for number, (observation, answer) in enumerate(turns):
        conversation.show(observation)
        prompts.append(policy.decode(conversation.prompt()))
        conversation.answer(response(policy, answer, 100.0 * number))
    return conversation, prompts


def labelled(policy, row):
    """(text, turn) of each maximal run of tokens of one turn."""
    bounds = [0, *(np.flatnonzero(np.diff(row.turn)) + 1).tolist(), len(row.ids)]
    return [(policy.decode(row.ids[a:b]), int(row.turn[a])) for a, b in pairwise(bounds)]


TURNS = [("P_", "go</think><answer>Up</answer>"), ("_P", "</think><answer>Left</answer>"), ("PX", "x</answer>")]


def test_full_history_is_one_row_that_only_grows(policy):
    conversation, prompts = played(policy, Context(turns=0, instructions="none"), TURNS)
    assert prompts == [
        "<|user|>P_<|assistant|><think>",
        "<|user|>P_<|assistant|><think>go</think><answer>Up</answer><|user|>_P<|assistant|><think>",
        (
            "<|user|>P_<|assistant|><think>go</think><answer>Up</answer>"
            "<|user|>_P<|assistant|><think></think><answer>Left</answer>"
            "<|user|>PX<|assistant|><think>"
        ),
    ]
    (row,) = conversation.rows()
    assert labelled(policy, row) == [
        ("<|user|>P_<|assistant|><think>", -1),
        ("go</think><answer>Up</answer>", 0),
        ("<|user|>_P<|assistant|><think>", -1),
        ("</think><answer>Left</answer>", 1),
        ("<|user|>PX<|assistant|><think>", -1),
        ("x</answer>", 2),
    ]
    assert row.logprobs[row.is_action].tolist() == [*range(5), *range(100, 104), *range(200, 202)]
    assert not row.logprobs[~row.is_action].any()


def test_the_end_of_an_assistants_message_is_the_templates_and_comes_once(policy):
    """The template closes a message with an end token: shown to the policy where it did not write it itself."""
    ends = {}
    for answer in ("Up</answer>", "Up<|end|>"):
        conversation, _ = played(policy, Context(turns=0, instructions="none"), [("P", answer), ("P", "x")])
        (row,) = conversation.rows()
        end = int(policy.encode("<|end|>")[0])
        ends[answer] = (int((row.ids == end).sum()), int((row.is_action & (row.ids == end)).sum()))
    assert ends == {"Up</answer>": (1, 0), "Up<|end|>": (1, 1)}


def test_last_turn_context_is_a_row_a_turn(policy):
    conversation, prompts = played(policy, Context(turns=1, instructions="none"), TURNS)
    assert prompts == [f"<|user|>{shown}<|assistant|><think>" for shown, _ in TURNS]
    assert [labelled(policy, row) for row in conversation.rows()] == [
        [(f"<|user|>{shown}<|assistant|><think>", -1), (answer, turn)] for turn, (shown, answer) in enumerate(TURNS)
    ]


def test_a_window_of_two_turns_learns_each_answer_once(policy):
    conversation, _ = played(policy, Context(turns=2, instructions="none"), TURNS)
    rows = [labelled(policy, row) for row in conversation.rows()]
    assert rows[2] == [
        ("<|user|>_P<|assistant|><think></think><answer>Left</answer><|user|>PX<|assistant|><think>", -1),
        ("x</answer>", 2),
    ]
    turns = np.concatenate([row.turn[row.is_action] for row in conversation.rows()])
    assert np.bincount(turns).tolist() == [5, 4, 2]
    assert conversation.rows()[2].logprobs.tolist()[-2:] == [200.0, 201.0]
    assert not conversation.rows()[2].logprobs[:-2].any()


def test_sampled_tokens_are_kept_as_they_were_sampled(policy):
    """ "Up" spelt as two characters would be encoded as one token: the row holds the two."""
    spelt = np.concatenate([policy.encode("U"), policy.encode("p")])
    for turns in (0, 1, 2):
        conversation = Conversation(policy, policy.chat_format(""), Context(turns=turns, instructions="none"))
        conversation.show("P")
        conversation.answer(Response(spelt, np.zeros(2, np.float32), complete=True))
        conversation.show("P")
        if turns != 1:
            assert spelt.tolist() in [
                window.tolist() for window in np.lib.stride_tricks.sliding_window_view(conversation.prompt(), 2)
            ]
        assert conversation.rows()[0].ids[-2:].tolist() == spelt.tolist()


def test_no_answer_no_row(policy):
    conversation = Conversation(policy, policy.chat_format(""), Context(turns=1))
    conversation.show("P")
    assert conversation.rows() == ()


def test_system_messages():
    assert system_message("none", "Play.", "||", 5) == ""
    assert system_message("short", "Play.", "||", 5) == (
        "Think first, then answer, in this form: <think>your reasoning</think><answer>action || action</answer> "
        "with at most 5 actions, separated by ||."
    )
    assert system_message("environment", "Play.", "", 1) == (
        "Play.\n\nThink first, then answer, in this form: <think>your reasoning</think><answer>action</answer>."
    )


def test_a_demonstration_is_the_answer_less_its_prefill(policy):
    whole = "<think>because</think><answer>Up || Left</answer>"
    for prefill in ("", "<think>", "<think>because</think><answer>"):
        shown = demonstration(policy, Context(prefill=prefill), "because", ("Up", "Left"), "||")
        assert prefill + policy.decode(shown.ids) == whole
        assert shown.complete
    with pytest.raises(ValueError, match="does not begin a demonstration"):
        demonstration(policy, Context(prefill="<think></think>"), "because", ("Up",), "||")
