"""What the benchmark beside TRL tells TRL, without TRL: it reads what the trainer reads, and every answer is a turn."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from turngym_client import connect
from turngym_trainer.context import Conversation
from turngym_trainer.generate import Response
from turngym_trainer.policy import load_policy

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALL = {"type": "function", "function": {"name": "play", "arguments": {}}}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("rollout_trl")


@pytest.fixture
def policy():
    return load_policy("tiny")


def test_both_sides_read_the_same(benchmark, policy):
    observations = ("#####\n#_OX#\n#####", "#####\n#_OX#\n#####\nNot understood.")
    noise = policy.encode("Up box 3,5 Up")
    conversation = Conversation(policy, policy.chat_format(""), benchmark.CONTEXT)
    for observation in observations:
        conversation.show(observation)
        conversation.answer(Response(noise, np.zeros(len(noise), np.float32), complete=False))

    def rendered(messages, *, reply):
        return policy.tokenizer.apply_chat_template(
            messages,
            chat_template=benchmark.CHAT_TEMPLATE,
            add_generation_prompt=reply,
            tokenize=True,
            return_dict=False,
        )

    # As TRL does: the first prompt whole; of a tool's result, what it adds to a conversation that has called the tool.
    called = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    prefix = rendered(called, reply=False)
    full = rendered([*called, {"role": "tool", "name": "play", "content": observations[1]}], reply=True)
    assert full[: len(prefix)] == prefix
    first = rendered([{"role": "user", "content": observations[0]}], reply=True)
    assert [*first, *noise, *full[len(prefix) :], *noise] == conversation.rows()[0].ids.tolist()


@pytest.mark.parametrize("answer", ["Up box 3,5 Up", "</think><answer>Up</answer>", " "])
def test_every_answer_calls_the_tool(benchmark, policy, answer):
    policy.tokenizer.response_template = benchmark.RESPONSE_TEMPLATE
    prompt = policy.encode("<|user|>#####<|assistant|><think>").tolist()
    parsed = policy.tokenizer.parse_response(policy.encode(answer).tolist(), prefix=prompt)
    assert parsed["role"] == "assistant"
    assert parsed["tool_calls"] == [CALL]


def test_a_rollout_here_and_what_is_refused(benchmark, policy, server, monkeypatch):
    monkeypatch.setattr(benchmark, "GROUPS", 2)
    monkeypatch.setattr(benchmark, "GROUP_SIZE", 2)
    policy.stop_ids.clear()
    policy.closing[:] = False
    with connect(server) as client:
        shown = benchmark.observation_tokens(policy, client)
        played = benchmark.played_here(policy, client, 3)
    assert played.turns == [5] * 4
    assert played.sampled == [15] * 4
    room = benchmark.settings_of(Path("policy"), server, shown, 3, 1)["completion_tokens"]
    prompts = first_prompts(benchmark, policy, server)
    completions = [context - prompt for context, prompt in zip(played.context, prompts, strict=True)]
    # Room for what was played, and none for one more observation.
    assert all(tokens <= room < tokens + shown - 3 for tokens in completions)
    benchmark.check_same(played, played)
    for what in ("turns", "sampled", "context"):
        first_value, *others = getattr(played, what)
        other = replace(played, **{what: [first_value + 1, *others]})
        with pytest.raises(RuntimeError, match=f"{what} of the episodes differ"):
            benchmark.check_same(played, other)


def first_prompts(benchmark, policy, server):
    """Tokens of each episode's first prompt."""
    chat = policy.chat_format("")
    with connect(server) as client:
        episodes = client.reset_many([planned.request for planned in benchmark.plan()])
        shown = [chat.opening + each.state.observation + chat.reply + benchmark.CONTEXT.prefill for each in episodes]
        client.close_many(episodes)
    return [len(policy.encode(text)) for text in shown]


def test_ratios_are_taken_within_a_pair(benchmark):
    def played(seconds):
        return benchmark.Played(seconds, seconds / 2, turns=[5], sampled=[40], context=[200])

    pairs = [(played(1.0), played(4.0)), (played(2.0), played(4.0)), (played(4.0), played(12.0))]
    results = benchmark.results_of(pairs)
    assert results["tokens_per_second"] == {"median": 20.0, "least": 10.0, "most": 40.0}
    assert results["ratio"] == {"median": 3.0, "least": 2.0, "most": 4.0}
    assert results["cpu_ratio"]["median"] == 3.0
