"""A checkpoint in a process of its own: it plays as here, what it takes is bounded, and who ended it is told apart."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample_states import shown

from turngym_leaderboard.agents import (
    AgentFault,
    AgentLost,
    AgentOverran,
    AgentUnavailable,
    Seat,
    View,
    confined_checkpoint,
)
from turngym_leaderboard.agents.checkpoint import CheckpointAgent
from turngym_leaderboard.agents.confined_checkpoint import Bounds, ConfinedCheckpoint
from turngym_leaderboard.agents.guarded import Guarded
from turngym_leaderboard.protocol import Decoding
from turngym_leaderboard.worker import WorkerConfig
from turngym_trainer.policy import load_policy

BOUNDS = Bounds(memory=1 << 30, seconds_per_token=5.0)
HOSTILE = """
{%- if 'Loop' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}
{%- endfor %}{% endfor %}{% endfor %}{% endif %}
{%- if 'Eat' in messages[0].content %}{% set eaten = namespace(it='x' * 1000000) %}
{%- for a in range(40) %}{% set eaten.it = eaten.it ~ eaten.it %}{% endfor %}{% endif %}
"""
STATE = shown("a lake")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("policy") / "hostile"
    load_policy("tiny").save(made)
    template = made / "chat_template.jinja"
    template.write_text(HOSTILE + template.read_text())
    return made


def seats(instructions):
    return [Seat("lake", instructions, "||", 5, seed=2**63 + k) for k in range(3)]


def views(turn=0):
    return [View(seat=k, turn=turn, transition=STATE) for k in range(3)]


def play(agent, instructions):
    agent.start(seats(instructions), Decoding())
    return [agent.act(views(turn)) for turn in range(2)]


def test_it_plays_as_here_within_its_bounds(folder, monkeypatch):
    here = CheckpointAgent(folder, name="here", threads=1, most_tokens=8)
    with ConfinedCheckpoint(folder, name="there", bounds=BOUNDS, threads=1, most_tokens=8) as agent:
        assert agent.description == {key: told for key, told in here.description.items() if key != "folder"}
        played = play(Guarded(here), "Walk.")
        assert [list(replies) for replies in play(agent, "Walk.")] == played
        # Memory that it cannot have is refused to it, which is no end of its process.
        with pytest.raises(AgentFault, match="MemoryError") as eaten:
            play(agent, "Eat.")
        assert not isinstance(eaten.value, AgentOverran)
        with monkeypatch.context() as patch:
            patch.setattr(confined_checkpoint, "START_SECONDS", 1.0)
            with pytest.raises(AgentOverran, match="overran: it did not answer within 1 s"):
                play(agent, "Loop.")
        assert [list(replies) for replies in play(agent, "Walk.")] == played


def test_what_somebody_else_killed_is_played_again_but_not_for_ever(folder, monkeypatch):
    monkeypatch.setattr(confined_checkpoint, "MOST_KILLED", 2)

    def killed_in_mid_play():
        agent.start(seats("Walk."), Decoding())
        agent._process._process.kill()
        return agent.act(views())

    with ConfinedCheckpoint(folder, name="there", bounds=BOUNDS, threads=1, most_tokens=8) as agent:
        with pytest.raises(AgentLost, match="signal SIGKILL"):
            killed_in_mid_play()
        with pytest.raises(AgentOverran, match="2 times it was killed at this place"):
            killed_in_mid_play()
        agent.start(seats("Walk."), Decoding())
        os.kill(agent._process._process.pid, signal.SIGSEGV)
        with pytest.raises(AgentOverran, match="signal SIGSEGV"):
            agent.act(views())


def test_memory_follows_the_size_of_the_weights_up_to_what_there_is(tmp_path):
    mebibyte, gibibyte = 1 << 20, 1 << 30
    for name in ("model-1.safetensors", "model-2.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2 * mebibyte)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * mebibyte)
    bounds = Bounds(memory=8 * gibibyte, seconds_per_token=5.0, by_size=True)
    assert bounds.memory_of(tmp_path, 128) == 2 * gibibyte + (16 + 128 * 17) * mebibyte
    assert Bounds(memory=8 * gibibyte, seconds_per_token=5.0).memory_of(tmp_path, 128) == 8 * gibibyte
    with (tmp_path / "model-3.safetensors").open("wb") as file:
        file.truncate(gibibyte)
    assert bounds.memory_of(tmp_path, 128) == 8 * gibibyte
    assert WorkerConfig(data=tmp_path, servers=()).slot("cpu").bounds.by_size
    assert not WorkerConfig(data=tmp_path, servers=(), memory=gibibyte).slot("cpu").bounds.by_size


def test_where_it_lies_is_not_told(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(AgentUnavailable, match="the checkpoint cannot be loaded") as refused:
        ConfinedCheckpoint(tmp_path, name="broken", bounds=BOUNDS)
    assert str(tmp_path) not in str(refused.value)


SLEEPER = """
import sys, time
from turngym_leaderboard import confined
process = confined.start("timeit", ["-n", "1", "-r", "1", "import time; time.sleep(60)"], sys.argv[1])
print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_confined_process_ends_with_whoever_started_it_and_sees_none_of_its_secrets(tmp_path):
    command = [sys.executable, "-c", SLEEPER, tmp_path]
    environment = {**os.environ, "TURNGYM_BOARD_DATABASE": "postgresql://user:secret@host/name"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        child = int(parent.stdout.readline())
        place = Path(f"/proc/{child}")
        assert b"secret" not in (place / "environ").read_bytes()
        parent.kill()
    for _ in range(200):
        if not place.exists():
            break
        time.sleep(0.05)
    else:
        pytest.fail("it outlived who started it")
