"""Checkpoints as agents: those of the trainer, models from elsewhere, and folders that are neither."""

import dataclasses
import json
import re
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from turngym_client import connect
from turngym_leaderboard import record as records
from turngym_leaderboard import tables
from turngym_leaderboard.agents import AgentUnavailable
from turngym_leaderboard.agents.checkpoint import CheckpointAgent
from turngym_leaderboard.cli import app
from turngym_leaderboard.evaluation import evaluate
from turngym_leaderboard.protocol import REFERENCE, Decoding, select_instances
from turngym_leaderboard.runner import play
from turngym_leaderboard.verify import verify
from turngym_trainer.policy import load_policy

SMALL = dataclasses.replace(REFERENCE, instances=6)
TOKENS = 12


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


@pytest.fixture(scope="module")
def checkpoint(server, tmp_path_factory):
    """What the trainer's command writes after one small iteration."""
    folder = tmp_path_factory.mktemp("run")
    settings = {
        "run.folder": f'"{folder}/run"',
        "run.server": f'["{server}"]',
        "run.iterations": 1,
        "run.threads": 1,
        "rollout.groups": 2,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": TOKENS,
        "rollout.stop_unreadable": "false",
        "update.minibatch_episodes": 4,
        "rollout.context_turns": 1,
        "rollout.instructions": '"short"',
        "validation.every": 0,
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [Path(sysconfig.get_path("scripts")) / "trainer", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [state] = folder.rglob("training/state.json")
    return state.parent.parent


def test_a_checkpoint_reads_and_writes_as_its_run_did(client, checkpoint):
    agent = CheckpointAgent(checkpoint, name="tiny")
    told = agent.description
    assert (told["context"], told["instructions"], told["max_response_tokens"]) == (
        "the last turn",
        "short",
        str(TOKENS),
    )
    assert (told["iteration"], told["trained_split_epoch"]) == ("1", "1")
    assert (told["made_by"], told["trained_in"], told["trained_split"]) == ("training", "sokoban", "train")
    evaluation = evaluate(client, SMALL, [agent], also_greedy=True)
    record = evaluation.record
    assert [row.agent for row in record.rows] == ["random", "tiny", "tiny (greedy)", "oracle"]
    assert [row.decoding for row in record.rows] == ["", "T = 1", "greedy", ""]
    for row in record.rows[1:3]:
        assert all(0 < episode.tokens <= TOKENS * len(episode.actions) for episode in row.episodes)
    sampled, greedy = (
        {turn.text for t in evaluation.trajectories if t.agent == row.agent for turn in t.turns}
        for row in record.rows[1:3]
    )
    assert sampled.isdisjoint(greedy)
    assert record.comparisons == ()
    [line] = tables.agent_lines(record)
    assert line.startswith(f"tiny: reads the last turn, instructions short, writes at most {TOKENS} tokens a turn; ")
    assert verify(client, record) == []


def test_a_checkpoint_at_hand_chooses_again(client, server, checkpoint, tmp_path):
    evaluation = evaluate(client, SMALL, [CheckpointAgent(checkpoint, name="tiny")], also_greedy=True)
    folder = records.save(evaluation.record, evaluation.trajectories, tmp_path)
    asked = ("verify", str(folder), "--server", server)
    without = CliRunner().invoke(app, asked)
    assert without.exit_code == 0, without.output
    folder_told = f"(it was {checkpoint.resolve()})"
    assert "not checked: tiny: who chose its actions, and its texts and tokens; give the policy" in without.stdout
    assert folder_told in without.stdout
    chosen = CliRunner().invoke(app, (*asked, "--policy", str(checkpoint), "--sample", "3"))
    assert chosen.exit_code == 0, chosen.output
    for name in ("tiny", "tiny (greedy)"):
        assert re.search(
            rf"^{re.escape(name)}: its policy chose again in 3 of 6 episodes, drawn with seed \d+$", chosen.stdout, re.M
        )
    assert "who chose" not in chosen.stdout
    stranger = load_policy("tiny")
    with torch.no_grad():
        next(stranger.model.parameters()).add_(0.5)
    stranger.save(tmp_path / "other")
    other = CliRunner().invoke(app, (*asked, "--policy", str(tmp_path / "other")))
    assert other.exit_code == 2
    assert "no row was played with the weights in" in other.stderr

    [first, *others] = [t for t in evaluation.trajectories if t.agent == "tiny"]
    written = first.turns[0].model_copy(update={"text": "<think>I was never here</think>"})
    forged = first.model_copy(update={"turns": (written, *first.turns[1:])})
    rest = [t for t in evaluation.trajectories if t.agent != "tiny"]
    folder = records.save(evaluation.record, [forged, *others, *rest], tmp_path / "forged")
    refused = CliRunner().invoke(
        app, ("verify", str(folder), "--server", server, "--policy", str(checkpoint), "--sample-seed", "5")
    )
    assert refused.exit_code == 1
    assert "tiny, draw 0, attempt 0, turn 0: text: trajectories.jsonl says '<think>I was never" in refused.stdout
    assert "tiny: its policy chose again in 6 of 6 episodes, drawn with seed 5" in refused.stdout


def test_sampling_is_a_function_of_the_seats_seed(client, checkpoint):
    agent = CheckpointAgent(checkpoint, name="tiny")
    selection = select_instances(client, SMALL)
    first, second = (play(client, SMALL, selection, agent) for _ in range(2))
    assert first == second
    texts = {turn.text for played in first for turn in played.turns}
    assert len(texts) > 6
    other = play(client, dataclasses.replace(SMALL, seed=1), selection, agent)
    assert texts.isdisjoint(turn.text for played in other for turn in played.turns)


def test_a_model_from_elsewhere_reads_everything(tmp_path):
    load_policy("tiny").save(tmp_path)
    told = CheckpointAgent(tmp_path, name="elsewhere").description
    assert (told["context"], told["instructions"], told["max_response_tokens"]) == ("all turns", "environment", "256")
    assert "iteration" not in told
    assert len(told["sha256"]) == 64


class Forgetful(CheckpointAgent):
    """Reads every prompt whole."""

    def start(self, seats, decoding):
        super().start(seats, decoding)
        self._memory = None


@pytest.mark.parametrize("greedy", [False, True])
def test_what_was_read_in_earlier_turns_is_not_read_again_and_changes_nothing_but_rounding(
    client, tmp_path, monkeypatch, greedy
):
    monkeypatch.setattr("turngym_leaderboard.agents.checkpoint.FOREIGN_TOKENS", TOKENS)
    load_policy("tiny").save(tmp_path)
    protocol = dataclasses.replace(SMALL, decoding=Decoding(greedy=greedy))
    selection = select_instances(client, protocol)
    played, logprobs, read = [], [], []
    for kind in (CheckpointAgent, Forgetful):
        agent = kind(tmp_path, name="elsewhere")
        widths: list[int] = []
        agent._policy.model.get_input_embeddings().register_forward_pre_hook(
            lambda module, arguments, widths=widths: widths.append(arguments[0].numel())
        )
        played.append(play(client, protocol, selection, agent))
        logprobs.append([row.logprobs for c in agent._conversations for row in c.rows()])
        read.append(sum(widths))
    kept, whole = played
    assert kept == whole
    assert max(len(each.turns) for each in kept) > 1
    for one, other in zip(*logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)
    assert read[0] < 0.7 * read[1]


def test_a_policy_that_is_not_finite_fails_by_its_own_fault(client, tmp_path):
    policy = load_policy("tiny")
    with torch.no_grad():
        next(policy.model.parameters()).fill_(torch.nan)
    policy.save(tmp_path)
    selection = select_instances(client, dataclasses.replace(SMALL, instances=2))
    agent = CheckpointAgent(tmp_path, name="broken")
    for decoding, fault in ((Decoding(), "failed on 2 conversations"), (Decoding(greedy=True), "not finite")):
        played = play(client, dataclasses.replace(SMALL, decoding=decoding), selection, agent)
        assert [(p.record.outcome, p.record.success) for p in played] == [("agent_fault", False)] * 2
        assert all(fault in p.record.fault for p in played)


@pytest.mark.parametrize("content", ["nothing", "no folder", "no weights", "damaged state"])
def test_a_folder_that_is_no_checkpoint_says_so(tmp_path, checkpoint, content):
    folder = tmp_path / "folder"
    if content != "no folder":
        folder.mkdir()
    if content == "no weights":
        (folder / "config.json").write_text("{}")
    if content == "damaged state":
        (folder / "config.json").write_text((checkpoint / "config.json").read_text())
        (folder / "training").mkdir()
        (folder / "training" / "state.json").write_text(json.dumps({"config": {}}))
    with pytest.raises(AgentUnavailable, match=str(folder)):
        CheckpointAgent(folder, name="none")
