"""Warm start against a real server: whose play is learnt, from which states, and when it stops."""

import json
from dataclasses import astuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from turngym_client import connect, parse_answer
from turngym_trainer import seeds
from turngym_trainer.checkpoint import CheckpointError
from turngym_trainer.policy import PolicyError, load_policy
from turngym_trainer.settings import load_config
from turngym_trainer.warm_start import WarmStartError, demonstrate, resumable_warm_start, warm_start

SETTINGS = [
    "run.seed=7",
    "rollout.instructions=none",
    "rollout.max_response_tokens=24",
    "warm_start.episodes=6",
    "warm_start.batch_rows=8",
    "warm_start.check_episodes=4",
    "validation.episodes=4",
]


def config_of(server, folder, *settings):
    return load_config(settings=[*SETTINGS, f"run.server={server}", f"run.folder={folder}", *settings])


def shown_and_learnt(policy, rows):
    """(prompt, learnt text) of single-turn rows."""
    return [(policy.decode(row.ids[~row.is_action]), policy.decode(row.ids[row.is_action])) for row in rows]


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny")


def test_without_detours_the_oracles_solution_is_shown_and_learnt(server, policy, tmp_path):
    config = config_of(server, tmp_path, "rollout.context_turns=1", "warm_start.detours=0.0")
    with connect(server) as client:
        learnt = shown_and_learnt(policy, demonstrate(policy, client, config))
        expected = []
        for number in range(6):
            episode = client.reset("sokoban", level_seed=seeds.level_seed(7, 0, 0, number, purpose="warm-start"))
            while not episode.done:
                advice = episode.advise()
                prompt = f"<|user|>{episode.state.observation}<|assistant|><think>"
                answer = f"{advice.explanation}</think><answer>{' || '.join(advice.actions)}</answer>"
                expected.append((prompt, answer))
                episode.step(advice.actions)
            assert episode.state.success
    assert learnt == expected


def test_detours_are_played_but_not_learnt(server, policy, tmp_path):
    """Every learnt answer is the oracle's for the board shown, though many boards are ones that it would not reach."""
    config = config_of(server, tmp_path, "rollout.context_turns=1", "warm_start.episodes=24")
    with connect(server) as client:
        detoured = shown_and_learnt(policy, demonstrate(policy, client, config))
        without = config.model_copy(update={"warm_start": config.warm_start.model_copy(update={"detours": 0.0})})
        straight = shown_and_learnt(policy, demonstrate(policy, client, without))
        advised = 0
        for number in range(24):
            episode = client.reset("sokoban", level_seed=seeds.level_seed(7, 0, 0, number, purpose="warm-start"))
            prompt = f"<|user|>{episode.state.observation}<|assistant|><think>"
            answers = [answer for shown, answer in detoured if shown == prompt]
            for answer in answers:
                assert parse_answer("<think>" + answer).actions == episode.advise().actions
            advised += len(answers)
    assert 0 < advised < 24
    assert {shown for shown, _ in detoured} - {shown for shown, _ in straight}


def test_slips_are_learnt(server, policy, tmp_path):
    config = config_of(server, tmp_path, "rollout.context_turns=1", "warm_start.slips=1.0", "warm_start.detours=0.0")
    with connect(server) as client:
        learnt = shown_and_learnt(policy, demonstrate(policy, client, config))
        wrong = 0
        for number in range(6):
            episode = client.reset("sokoban", level_seed=seeds.level_seed(7, 0, 0, number, purpose="warm-start"))
            prompt = f"<|user|>{episode.state.observation}<|assistant|><think>"
            advice = episode.advise()
            answer = next(answer for shown, answer in learnt if shown == prompt)
            assert answer.startswith(f"{advice.explanation}</think>")
            assert 1 <= len(parse_answer("<think>" + answer).actions) <= 3
            wrong += parse_answer("<think>" + answer).actions != advice.actions
    assert wrong >= 3


def test_in_full_history_a_detour_is_context(server, policy, tmp_path):
    config = config_of(server, tmp_path, "warm_start.episodes=24", "warm_start.explain=false")
    with connect(server) as client:
        rows = demonstrate(policy, client, config)
    written = [policy.decode(row.ids).count("<answer>") for row in rows]
    learnt = [policy.decode(row.ids[row.is_action]).count("<answer>") for row in rows]
    assert all(1 <= few <= many for few, many in zip(learnt, written, strict=True))
    assert sum(learnt) < sum(written)
    for row in rows:
        assert np.array_equal(row.turn >= 0, row.is_action)


def test_steps_teach_the_demonstrated_answers(server, tmp_path):
    config = config_of(
        server,
        tmp_path / "warm",
        "rollout.context_turns=1",
        "warm_start.detours=0.0",
        "warm_start.max_steps=40",
        "warm_start.check_every=20",
        "warm_start.target_success=1.0",
    )
    seen = []
    result = warm_start(config, observe=seen.append)
    assert [check.step for check in result.checks] == [20, 40]
    assert list(result.checks) == seen
    assert result.checks[1].loss < 0.7 * result.checks[0].loss
    assert result.rows == 8, "six episodes, two of which take a second turn"
    report = json.loads((result.folder / "warm_start.json").read_text())
    assert report["reached"] is result.reached
    assert report["config"]["warm_start"]["max_steps"] == 40

    load_policy(str(result.folder))
    again = warm_start(config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path / "b")})}))
    weights, repeated = (load_file(folder / "model.safetensors") for folder in (result.folder, again.folder))
    assert all(torch.equal(weights[name], repeated[name]) for name in weights)


def test_it_stops_at_the_first_check_that_meets_the_target(server, tmp_path):
    config = config_of(
        server,
        tmp_path / "warm",
        "environment.id=bandit",
        "environment.split=all",
        "validation.split=all",
        "rollout.context_turns=1",
        "warm_start.episodes=16",
        "warm_start.detours=0.0",
        "warm_start.learning_rate=5e-3",
        "warm_start.max_steps=200",
        "warm_start.check_every=20",
        "warm_start.check_episodes=16",
        "warm_start.target_success=0.9",
    )
    result = warm_start(config)
    assert result.reached
    assert result.checks[-1].success >= 0.9 > max([check.success for check in result.checks[:-1]], default=0.0)
    assert result.checks[-1].step < 200


def test_a_folder_that_is_taken_is_left_alone(server, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(WarmStartError, match="not empty"):
        warm_start(config_of(server, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_in_bfloat16_weights_are_learnt_and_kept_in_float32(server, tmp_path):
    settings = ["policy.dtype=bfloat16", "update.old_logprobs=recomputed", "rollout.context_turns=1"]
    folder = tmp_path / "warm"
    warm_start(config_of(server, folder, *settings, "warm_start.max_steps=2", "warm_start.learning_rate=1e-6"))
    tensors = load_file(folder / "model.safetensors")
    before = dict(load_policy("tiny", seed=7).model.named_parameters())
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        # Two steps of less than 1e-6, which a weight in bfloat16 would not have noticed.
        assert 0 < (tensor - before[name]).abs().max() < 2e-6


def test_with_lora_small_layers_learn_and_a_plain_policy_is_written(server, tmp_path):
    settings = ["lora.rank=4", "lora.targets=q_proj", "critic.trunk=shared", "rollout.context_turns=1"]
    folder = tmp_path / "warm"
    result = warm_start(config_of(server, folder, *settings, "warm_start.max_steps=30", "warm_start.check_every=15"))
    assert result.checks[1].loss < result.checks[0].loss
    load_policy("tiny", seed=7).save(tmp_path / "plain")
    written, before = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "plain"))
    assert written.keys() == before.keys()
    moved = {name for name in written if not torch.equal(written[name], before[name])}
    assert moved == {name for name in written if "q_proj" in name}


def test_lora_layers_that_are_not_there_are_told_before_anything_is_played(tmp_path):
    settings = ["lora.rank=4", "lora.targets=nope", "critic.trunk=shared"]
    with pytest.raises(PolicyError, match=r"lora\.targets \['nope'\]"):
        warm_start(config_of("nowhere:1", tmp_path / "warm", *settings))
    assert not (tmp_path / "warm").exists()


STEPS = ("rollout.context_turns=1", "warm_start.max_steps=12", "warm_start.check_every=4", "warm_start.schedule=cosine")

LORA = ("lora.rank=4", "critic.trunk=shared", "policy.dtype=bfloat16", "update.old_logprobs=recomputed")


class Stop(Exception):
    pass


def stopped_after(server, folder, step, *settings):
    """A warm start that was cut off right after the check at a step."""

    def observe(check):
        if check.step == step:
            raise Stop

    with pytest.raises(Stop):
        warm_start(config_of(server, folder, *STEPS, *settings), observe=observe)
    return folder


@pytest.mark.parametrize("settings", [(), LORA])
def test_one_that_was_cut_off_goes_on_to_the_same_bytes(server, tmp_path, settings):
    whole = warm_start(config_of(server, tmp_path / "whole", *STEPS, *settings))
    for step in (4, 8, 12):
        folder = stopped_after(server, tmp_path / f"cut-{step}", step, *settings)
        seen = []
        result = warm_start(resumable_warm_start(folder, []), resume=True, observe=seen.append)
        assert [check.step for check in seen] == [at for at in (4, 8, 12) if at > step]
        assert [each[:3] for each in map(astuple, result.checks)] == [each[:3] for each in map(astuple, whole.checks)]
        assert (folder / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.folder.iterdir())


def test_what_cannot_be_resumed_is_told_and_left_as_it_was(server, tmp_path):
    folder = stopped_after(server, tmp_path / "warm", 4)
    with pytest.raises(WarmStartError, match=r"go on with the warm start in it \(--resume"):
        warm_start(config_of(server, folder, *STEPS))
    with pytest.raises(WarmStartError, match=r"warm_start\.episodes: cannot be changed on resume"):
        resumable_warm_start(folder, ["warm_start.episodes=7"])
    config = resumable_warm_start(folder, [])
    others = config.model_copy(update={"run": config.run.model_copy(update={"seed": 8})})
    with pytest.raises(WarmStartError, match="what is shown is not what it was"):
        warm_start(others, resume=True)
    limited = config.model_copy(update={"environment": config.environment.model_copy(update={"max_turns": 3})})
    with pytest.raises(CheckpointError, match="not what this run was trained on"):
        warm_start(limited, resume=True)
    assert warm_start(config, resume=True).checks[-1].step == 12
    with pytest.raises(CheckpointError, match="holds no unfinished warm start"):
        resumable_warm_start(folder, [])
    (state,) = (stopped_after(server, tmp_path / "other", 4) / "unfinished").iterdir()
    (state / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="that can be read"):
        resumable_warm_start(tmp_path / "other", [])
