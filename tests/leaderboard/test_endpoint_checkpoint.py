"""Endpoints that serve a real checkpoint, over HTTP, from processes of their own: one of ours, with keys and seeds that
it honours, and transformers' own server."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from postgres_cluster import free_port

from turngym_client import Limits, answer_form, connect
from turngym_leaderboard import record as records
from turngym_leaderboard.agents import AgentUnavailable
from turngym_leaderboard.agents.chat_completions import EndpointSettings
from turngym_leaderboard.agents.endpoint import EndpointAgent
from turngym_leaderboard.evaluation import evaluate
from turngym_leaderboard.protocol import REFERENCE, Decoding, select_instances
from turngym_leaderboard.runner import play
from turngym_leaderboard.verify import verify, verify_trajectories
from turngym_trainer.batch import lay_out
from turngym_trainer.context import Context, Conversation, demonstration
from turngym_trainer.logprobs import Scorer, micro_batches
from turngym_trainer.policy import load_policy
from turngym_trainer.trajectory import Trajectory, TurnRecord

KEY = "sk-ThisIsTheKey0123"
SMALL = dataclasses.replace(
    REFERENCE,
    instances=4,
    limits=Limits(max_turns=2, max_actions=10, max_actions_per_turn=5),
    decoding=Decoding(temperature=0.5),
)
ACTIONS = ("Up", "Down", "Left", "Right")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


@pytest.fixture(scope="module")
def folder(client, tmp_path_factory):
    """A tiny policy that has learnt to read Sokoban's instructions and to answer in the form, and nothing else."""
    generator = np.random.default_rng(0)
    context = Context(turns=0, instructions="environment", prefill="")
    policy = load_policy("tiny")
    details = client.environment("sokoban", limits=SMALL.limits)
    chat = policy.chat_format(f"{details.instructions}\n\n{answer_form('||', 5)}.")
    episodes = []
    for index in range(16):
        conversation = Conversation(policy, chat, context)
        conversation.show("\n".join("".join(generator.choice(list("#_OXP"), 6)) for _ in range(6)))
        conversation.answer(demonstration(policy, context, "go", [str(generator.choice(ACTIONS))], "||"))
        turn = TurnRecord("", "", "", ("",), 0.0, True, True, 1)
        episodes.append(Trajectory("sokoban", index, 0, 0, 0, "", None, True, False, "", conversation.rows(), (turn,)))
    batch, scorer = lay_out(episodes), Scorer(policy.model, 1.0)
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=5e-3)
    for _ in range(8):
        for rows in np.split(generator.permutation(16), 4):
            for part in micro_batches(batch, np.sort(rows), 100_000, policy.device):
                optimiser.zero_grad()
                (-scorer.score(part)[0].mean()).backward()
                optimiser.step()
    saved = tmp_path_factory.mktemp("policy") / "reader"
    policy.save(saved)
    return saved


@pytest.fixture(scope="module")
def endpoint(folder):
    command = [sys.executable, str(Path(__file__).with_name("checkpoint_endpoint.py")), str(folder), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def transformers_server(folder, tmp_path_factory):
    pytest.importorskip("openai", reason="transformers serve needs the package openai")
    port = free_port()
    command = [Path(sys.executable).with_name("transformers"), "serve", folder, "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    own = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    said = tmp_path_factory.mktemp("server") / "log"
    with said.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, env=own) as process:
        try:
            until = time.monotonic() + 120
            while "Application startup complete" not in said.read_text():
                assert process.poll() is None and time.monotonic() < until, said.read_text()  # noqa: PT018
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


@pytest.fixture
def settings(monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)
    return EndpointSettings(
        model="tiny", key_env="A_KEY", max_tokens=24, stop_at_answer=True, price_in=1.0, price_out=2.0
    )


def test_a_real_model_is_evaluated_with_its_costs_and_its_record_stands(client, endpoint, settings, tmp_path):
    evaluation = evaluate(client, SMALL, [EndpointAgent(endpoint, settings, name="tiny")], also_greedy=True)
    sampled, greedy = evaluation.record.row("tiny"), evaluation.record.row("tiny (greedy)")
    assert (sampled.decoding, greedy.decoding) == ("T = 0.5", "greedy")
    turns = [turn for t in evaluation.trajectories if t.agent == "tiny" for turn in t.turns]
    valid = [turn for turn in turns if turn.valid_format]
    # It answers in the form, most of the time; what it does else counts as an invalid action.
    assert len(valid) >= len(turns) / 2
    assert {turn.reasoning for turn in valid} == {"go"}
    assert {action for turn in valid for action in turn.actions} & set(ACTIONS)
    for turn in turns:
        assert 0 < turn.tokens <= 24
        assert turn.tokens_in > 100
        assert turn.cost == pytest.approx((turn.tokens_in + 2 * turn.tokens) / 1e6)
    # What was read grows with the conversation.
    for trajectory in evaluation.trajectories:
        if trajectory.agent == "tiny":
            read = [turn.tokens_in for turn in trajectory.turns]
            assert read == sorted(set(read))
    assert sampled.statistics.agent_faults == 0
    kept = records.save(evaluation.record, evaluation.trajectories, tmp_path)
    assert KEY not in "".join(file.read_text() for file in kept.iterdir())
    record = records.load(kept)
    assert verify(client, record, trajectories=records.load_trajectories(kept)) == []
    assert verify_trajectories(kept, record) == []


def test_a_model_of_transformers_own_server_is_evaluated(client, transformers_server, folder, tmp_path):
    settings = EndpointSettings(model=str(folder), max_tokens=24, stop_at_answer=True)
    evaluation = evaluate(client, SMALL, [EndpointAgent(transformers_server, settings, name="tiny")])
    row = evaluation.record.row("tiny")
    turns = [turn for t in evaluation.trajectories if t.agent == "tiny" for turn in t.turns]
    assert row.statistics.agent_faults == 0
    assert sum(turn.valid_format for turn in turns) >= len(turns) / 2
    assert all(0 < turn.tokens <= 24 and turn.tokens_in > 100 for turn in turns)
    kept = records.save(evaluation.record, evaluation.trajectories, tmp_path)
    assert verify(client, evaluation.record, trajectories=records.load_trajectories(kept)) == []


def test_the_same_seeds_give_the_same_episodes(client, endpoint, settings):
    """Whatever is asked at once: each request brings its own seed."""

    def episodes(concurrency: int, name: str):
        player = EndpointAgent(endpoint, settings.model_copy(update={"concurrency": concurrency}), name=name)
        return [each.record.actions for each in play(client, SMALL, select_instances(client, SMALL), player)]

    assert episodes(1, "tiny") == episodes(4, "tiny") != episodes(4, "another")


def test_a_conversation_that_outgrows_the_model_ends_truncated(client, endpoint, settings):
    # The model has 2,048 tokens, so that nothing can be read where so many are kept for the answer.
    player = EndpointAgent(endpoint, settings.model_copy(update={"max_tokens": 2048}), name="tiny")
    protocol = dataclasses.replace(SMALL, instances=2)
    for each in play(client, protocol, select_instances(client, protocol), player):
        assert (each.record.outcome, each.record.success, each.record.truncated) == ("agent_fault", False, True)
        assert each.record.fault.startswith("context: status 400: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"model": "huge"}, "The model `huge` does not exist"), ({"key_env": "OTHER_KEY"}, r"key: status 401: .*\[key\]")],
)
def test_a_wrong_model_or_key_is_told(client, endpoint, settings, monkeypatch, change, message):
    monkeypatch.setenv("OTHER_KEY", "sk-wrong")
    player = EndpointAgent(endpoint, settings.model_copy(update=change), name="tiny")
    with pytest.raises(AgentUnavailable, match=message) as caught:
        play(client, SMALL, select_instances(client, SMALL), player)
    assert "sk-wrong" not in str(caught.value)
