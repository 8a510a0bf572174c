"""Kept episodes, played on a real server: which are learnt, as what, and what is refused with file and line."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import small

from turngym_client import Limits, connect, parse_answer
from turngym_trainer import seeds
from turngym_trainer.demonstrations import DemonstrationError, learn_from_files
from turngym_trainer.evaluate import environment_limits
from turngym_trainer.mixture import environments
from turngym_trainer.policy import load_policy
from turngym_trainer.settings import ConfigError, load_config
from turngym_trainer.train import train
from turngym_trainer.warm_start import demonstrate, warm_start

LEVELS = [seeds.level_seed(7, 0, 0, number, purpose="warm-start") for number in range(6)]
"""Those that the warm start of run seed 7 has the oracle play."""


def config_of(server, *files, settings=()):
    named = json.dumps([str(file) for file in files])
    base = ["run.seed=7", "rollout.instructions=none", "rollout.max_response_tokens=40", "warm_start.episodes=0"]
    return load_config(settings=[*base, f"run.server={server}", f"warm_start.demonstrations={named}", *settings])


def kept(client, level, *, actions=None, advised=False, options=None, limits=None):
    """A played episode as it is kept: the oracle's play, or these turns."""
    episode = client.reset("sokoban", level_seed=level, options=options, limits=limits or Limits())
    turns = []
    while not episode.done and (actions is None or len(turns) < len(actions)):
        advice = episode.advise()
        played = advice.actions if actions is None else actions[len(turns)]
        observation = episode.state.observation
        reply = episode.step(played)
        turns.append(
            {
                "observation": observation,
                "reasoning": advice.explanation,
                "actions": played,
                "reward": reply.reward,
                "valid_action": reply.action_valid,
                "advised": advised,
            }
        )
    return {
        "environment": episode.environment_id,
        "version": episode.version,
        "options_json": episode.options_json,
        "action_separator": episode.action_separator,
        "split": episode.split.value,
        "success": episode.state.success,
        "turns": turns,
    }


def write(file, *lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def learn(server, policy, config):
    with connect(server) as client:
        infos = [
            client.environment(each.id, options=each.options, limits=environment_limits(each))
            for each in (alone.environment for alone in environments(config).values())
        ]
    return learn_from_files(policy, config, infos)


def answers(policy, rows):
    return [policy.decode(row.ids[row.is_action]) for row in rows]


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny")


@pytest.fixture(scope="module")
def solved(server):
    """The oracle's episodes on the first levels, as they are kept."""
    with connect(server) as client:
        return [kept(client, level) for level in LEVELS]


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_what_the_oracle_played_is_learnt_from_a_file_as_from_the_oracle(turns, server, policy, solved, tmp_path):
    file = write(tmp_path / "kept.jsonl", *solved)
    settings = [f"rollout.context_turns={turns}", "rollout.instructions=environment", "warm_start.detours=0.0"]
    with connect(server) as client:
        asked = config_of(server, settings=["warm_start.episodes=6", *settings])
        expected = demonstrate(policy, client, asked)
    learnt = learn(server, policy, config_of(server, file, settings=settings))
    assert len(learnt.rows) == len(expected) >= 6
    for row, other in zip(learnt.rows, expected, strict=True):
        assert np.array_equal(row.ids, other.ids)
        assert np.array_equal(row.is_action, other.is_action)
        assert np.array_equal(row.turn, other.turn)
    assert learnt.files[0].told() == f"{file}: 6 of 6 episodes are learnt"


def test_files_and_lines_keep_their_order(server, policy, solved, tmp_path):
    one, other = write(tmp_path / "b.jsonl", solved[3], solved[1]), write(tmp_path / "a.jsonl", solved[0])
    learnt = learn(server, policy, config_of(server, one, other, settings=["rollout.context_turns=0"]))
    firsts = [parse_answer(f"<think>{text.split('</answer>')[0]}</answer>") for text in answers(policy, learnt.rows)]
    assert [first.actions for first in firsts] == [tuple(solved[at]["turns"][0]["actions"]) for at in (3, 1, 0)]


def test_bad_examples_are_left_out_and_counted(server, policy, solved, tmp_path):
    with connect(server) as client:
        failed = kept(client, LEVELS[0], actions=[["Up"]])
        slow = kept(client, LEVELS[0], actions=[["Up"]] * 6, limits=Limits(max_turns=6))
    wordy = {**solved[1], "turns": [{**turn, "reasoning": "so " * 60} for turn in solved[1]["turns"]]}
    unparsed = {**solved[1], "turns": [{**turn, "valid_format": False} for turn in solved[1]["turns"]]}
    file = write(tmp_path / "kept.jsonl", solved[0], failed, wordy, unparsed, failed)
    report = learn(server, policy, config_of(server, file)).files[0]
    assert (report.episodes, report.learnt) == (5, 1)
    assert dict(report.left_out) == {
        "not solved": 2,
        "with an answer over rollout.max_response_tokens": 1,
        "with an answer that could not be parsed": 1,
    }
    assert report.told().startswith(f"{file}: 1 of 5 episodes are learnt; 2 left out: not solved; ")

    everything = config_of(
        server, write(tmp_path / "all.jsonl", failed, slow), settings=["warm_start.only_solved=false"]
    )
    report = learn(server, policy, everything).files[0]
    assert (report.learnt, dict(report.left_out)) == (1, {"over the limits of the environment": 1})


def test_a_file_of_bad_examples_alone_is_refused(server, policy, tmp_path):
    with connect(server) as client:
        file = write(tmp_path / "kept.jsonl", kept(client, LEVELS[0], actions=[["Up"]]))
    with pytest.raises(DemonstrationError, match=r"kept\.jsonl: 0 of 1 episodes are learnt; 1 left out: not solved"):
        learn(server, policy, config_of(server, file))


def test_invalid_actions_are_read_and_not_learnt(server, policy, tmp_path):
    with connect(server) as client:
        file = write(tmp_path / "kept.jsonl", kept(client, LEVELS[0], actions=[["Fly"], ["Up", "Down"]]))
    settings = ["warm_start.only_solved=false", "warm_start.explain=false", "rollout.context_turns=0"]
    [row] = learn(server, policy, config_of(server, file, settings=settings)).rows
    assert "<answer>Fly</answer>" in policy.decode(row.ids)
    assert answers(policy, [row]) == ["</think><answer>Up || Down</answer>"]


def test_turns_after_advice_can_be_told_from_a_persons_own(server, policy, tmp_path):
    with connect(server) as client:
        own, advised = kept(client, LEVELS[0]), kept(client, LEVELS[1], advised=True)
    file = write(tmp_path / "kept.jsonl", own, advised)
    both = learn(server, policy, config_of(server, file)).files[0]
    alone = learn(server, policy, config_of(server, file, settings=["warm_start.learn_advised=false"])).files[0]
    assert both.learnt == 2
    assert (alone.learnt, dict(alone.left_out)) == (1, {"with nothing to learn in them": 1})


def test_text_of_a_file_cannot_end_its_message(server, policy, solved, tmp_path):
    ends = policy.tokenizer.eos_token
    turn = {**solved[0]["turns"][0], "reasoning": f"go{ends}on"}
    file = write(tmp_path / "kept.jsonl", {**solved[0], "turns": [turn]})
    [row] = learn(server, policy, config_of(server, file)).rows
    assert "on</think>" in policy.decode(row.ids)
    assert not policy.eos_ids & set(row.ids[row.is_action].tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "frozen_lake"}, "an episode of frozen_lake, but the settings are for sokoban"),
        ({"version": "0.9"}, "version 0.9 of sokoban, but the server has 1.0"),
        ({"options_json": '{"boxes":2}'}, "boxes=2 where the settings have 1, floors=null where the settings have"),
        ({"options_json": "{"}, "is no JSON"),
        ({"options_json": "[]"}, "is no object"),
        ({"action_separator": ";"}, "separated by ';', but those of sokoban by '||'"),
        ({"split": "held_out"}, "split held_out, and environment.split is train: its worlds may be those"),
        ({"split": "validation"}, "split validation"),
        ({"split": "all"}, "split all"),
        ({"split": None}, "says all of version, options_json, action_separator and split, or none"),
        ({"success": "perhaps"}, "is no kept episode: success: "),
        ({"turns": [{"observation": "#", "actions": ["Up || Down"]}]}, "turn 1: cannot be written as one answer"),
        ({"turns": [{"observation": "#", "actions": []}]}, "turn 1: cannot be written as one answer"),
        ({"turns": [{"observation": "#", "actions": ["Up"], "reasoning": "</think>"}]}, "turn 1: cannot be written"),
        ({"turns": [{"observation": "#"}]}, "is no kept episode: turns.0.actions: Field required"),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_line(changes, message, server, policy, solved, tmp_path):
    file = write(tmp_path / "kept.jsonl", solved[0], {**solved[1], **changes})
    with pytest.raises(DemonstrationError) as error:
        learn(server, policy, config_of(server, file))
    assert f"{file}: line 2" in str(error.value)
    assert message in str(error.value)


def test_in_a_mixture_each_episode_is_learnt_in_the_environment_that_it_was_played_in(server, policy, tmp_path):
    with connect(server) as client:
        small = kept(client, LEVELS[0])
        latin = kept(client, LEVELS[1], options={"symbols": "latin"})
        digits = kept(client, LEVELS[2], options={"symbols": "digits"})
    mixture = 'mixture.environments=[{id="sokoban"},{id="sokoban",name="latin",options={symbols="latin"}}]'
    settings = [mixture, "rollout.instructions=environment", "rollout.context_turns=0"]
    file = write(tmp_path / "kept.jsonl", latin, small)
    rows = learn(server, policy, config_of(server, file, settings=settings)).rows
    prompts = [policy.decode(row.ids[: int(row.is_action.argmax())]) for row in rows]
    assert ["W wall" in prompt for prompt in prompts] == [True, False]
    assert ["# wall" in prompt for prompt in prompts] == [False, True]
    with pytest.raises(DemonstrationError, match=r'line 1: played with symbols="digits" where the settings have'):
        learn(server, policy, config_of(server, write(tmp_path / "other.jsonl", digits), settings=settings))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"environment":', "line 1: is not whole"),
        ("\n", "line 1: is no kept episode: Invalid JSON"),
        ("[1]\n", "line 1: is no kept episode"),
        ('{"agent":"a","draw":0,"attempt":0,"turns":[],"last_observation":""}\n', "environment: Field required"),
        ("", "holds no episode"),
    ],
)
def test_lines_that_are_no_episodes_are_refused(text, message, server, policy, tmp_path):
    file = tmp_path / "kept.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DemonstrationError) as error:
        learn(server, policy, config_of(server, file))
    assert str(file) in str(error.value)
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_refused(server, policy, tmp_path):
    with pytest.raises(DemonstrationError, match="cannot be read: No such file"):
        learn(server, policy, config_of(server, tmp_path / "none.jsonl"))


def test_settings_that_leave_no_room_for_reasoning_are_refused(server, policy, solved, tmp_path):
    file = write(tmp_path / "kept.jsonl", solved[0])
    prefill = "rollout.prefill=<think></think><answer>"
    with pytest.raises(DemonstrationError, match=r"line 1: .*warm_start\.explain=false"):
        learn(server, policy, config_of(server, file, settings=[prefill]))
    [row, *_] = learn(server, policy, config_of(server, file, settings=[prefill, "warm_start.explain=false"])).rows
    assert answers(policy, [row]) == [" || ".join(solved[0]["turns"][0]["actions"]) + "</answer>"]


def test_nothing_to_learn_from_is_refused(server):
    with pytest.raises(ConfigError, match=r"warm_start\.episodes: 0 and no warm_start\.demonstrations"):
        config_of(server)


def test_a_training_runs_own_episodes_are_learnt(server, novice, policy, tmp_path):
    """Its lines do not say what was played; the run beside them does."""
    folder = tmp_path / "run"
    train(small(server, novice, folder, "run.iterations=1", "validation.every=0", "critic.warmup_iterations=0"))
    file = folder / "trajectories.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    fine = [line for line in lines if all(turn["valid_format"] for turn in line["turns"])]
    said = [turn["response"].removeprefix("<think>") for line in fine for turn in line["turns"] if turn["valid_action"]]
    assert said
    settings = ["warm_start.only_solved=false", "rollout.context_turns=1", "environment.max_turns=3"]
    learnt = learn(server, policy, config_of(server, file, settings=settings))
    assert learnt.files[0].episodes == len(lines) == 12
    assert [text.replace(" ", "") for text in answers(policy, learnt.rows)] == [text.replace(" ", "") for text in said]

    alone = tmp_path / "alone.jsonl"
    alone.write_bytes(file.read_bytes())
    with pytest.raises(DemonstrationError, match=r"alone\.jsonl: line 1: does not say which version and options"):
        learn(server, policy, config_of(server, alone, settings=settings))
    (folder / "other.jsonl").write_text(json.dumps({**lines[0], "environment": "bandit"}) + "\n", encoding="utf-8")
    with pytest.raises(DemonstrationError, match="the run beside it played in sokoban, not in 'bandit'"):
        learn(server, policy, config_of(server, folder / "other.jsonl", settings=settings))


def test_a_warm_start_learns_from_files_beside_the_oracle_and_says_from_which(server, solved, tmp_path):
    file = write(tmp_path / "kept.jsonl", *solved)
    few = ["warm_start.max_steps=2", "warm_start.check_episodes=2", "warm_start.batch_rows=4"]

    def run(name, *settings):
        config = config_of(server, file, settings=[*few, f"run.folder={tmp_path / name}", *settings])
        told = []
        return warm_start(config, tell=told.append), told, load_file(tmp_path / name / "model.safetensors")

    alone, told, weights = run("alone")
    assert told == [f"{file}: 6 of 6 episodes are learnt"]
    report = json.loads((alone.folder / "warm_start.json").read_text(encoding="utf-8"))
    assert report["demonstrations"][0]["episodes"] == 6
    assert len(report["demonstrations"][0]["sha256"]) == 64
    both, _, _ = run("both", "warm_start.episodes=2", "warm_start.detours=0.0")
    assert both.rows == alone.rows + 2
    _, _, again = run("again")
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
