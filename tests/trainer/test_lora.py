"""LoRA: what is trained, what it is compared with, and that runs go on exactly and end in plain models."""

import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import Interruption, assert_same_run, small, stop_at

from turngym_leaderboard.agents.checkpoint import CheckpointAgent
from turngym_trainer.batch import lay_out
from turngym_trainer.checkpoint import CheckpointError, checkpoints
from turngym_trainer.memory import Episode, Shape, adapters, estimate
from turngym_trainer.policy import PolicyError, load_policy
from turngym_trainer.seeds import Place
from turngym_trainer.settings import ConfigError, load_config
from turngym_trainer.train import train
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord
from turngym_trainer.update import Learner, Lesson

TURN = TurnRecord("", "", "", ("a",), 0.0, True, True, 1)
LORA = ("lora.rank=4", "lora.alpha=8.0", "critic.trunk=shared")


def lesson(rng, B=6):
    episodes = []
    for index in range(B):
        ids, turn = rng.integers(0, 100, 20), np.repeat([-1, 0], [12, 8])
        rows = (Row(ids, turn >= 0, turn, np.where(turn >= 0, -4.6, 0).astype(np.float32)),)
        episodes.append(Trajectory("e", 0, index, 0, 0, "", None, True, False, "", rows, (TURN,)))
    batch = lay_out(episodes)
    N = len(batch.logprobs)
    return Lesson(batch, batch.logprobs, rng.normal(size=N), values=rng.normal(size=N), targets=rng.normal(size=N))


def learner_of(*settings):
    config = load_config(settings=[*LORA, "update.learning_rate=0.01", *settings])
    return Learner(load_policy("tiny"), config, length_limit=60, with_critic=True, reference=None)


def taught(learner, steps=3):
    given = lesson(np.random.default_rng(0))
    everyone = np.arange(len(given.batch.lengths))
    for step in range(steps):
        learner.update(given, actor_episodes=everyone, critic_episodes=everyone, place=Place(9 + step))
    return given.batch


@pytest.mark.parametrize("settings", [(), ("policy.gradient_checkpointing=true",)])
def test_only_adapters_and_the_value_head_are_trained(settings):
    learner, plain = learner_of(*settings), load_policy("tiny")
    before = {name: weight.clone() for name, weight in learner.adapters.tensors().items()}
    head = learner.critic.head.weight.clone()
    taught(learner)
    weights = dict(learner.policy.model.named_parameters())
    for name, weight in plain.model.named_parameters():
        frozen = weights.get(name, weights.get(name.replace(".weight", ".base_layer.weight")))
        assert torch.equal(frozen, weight), name
    assert len(before) == 2 * 7 * 4
    assert all(not torch.equal(weight, before[name]) for name, weight in learner.adapters.tensors().items())
    assert not torch.equal(learner.critic.head.weight, head)
    trained = sum(weight.numel() for weight in before.values())
    assert trained == adapters(Shape.of(plain.model), 4)
    [optimiser] = learner.optimisers.values()
    assert sum(p.numel() for group in optimiser.param_groups for p in group["params"]) == trained + head.numel() + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_policy_without_its_adapters(dtype):
    settings = [f"policy.dtype={dtype}", "update.old_logprobs=recomputed", "kl.coefficient=0.1"]
    learner = learner_of(*settings)
    batch = lesson(np.random.default_rng(0)).batch
    at_first = learner.logprobs(batch)
    np.testing.assert_array_equal(learner.reference_logprobs(batch), at_first)
    taught(learner)
    np.testing.assert_array_equal(learner.reference_logprobs(batch), at_first)
    assert np.abs(learner.logprobs(batch) - at_first).max() > 1e-3


def test_what_is_saved_is_a_plain_model_that_answers_alike(tmp_path):
    learner = learner_of()
    batch = taught(learner)
    learner.save_policy(tmp_path / "merged")
    names, plain = load_file(tmp_path / "merged" / "model.safetensors").keys(), load_policy("tiny")
    plain.save(tmp_path / "plain")
    assert names == load_file(tmp_path / "plain" / "model.safetensors").keys()
    config = load_config()
    loaded = Learner(load_policy(str(tmp_path / "merged")), config, length_limit=60, with_critic=False, reference=None)
    np.testing.assert_allclose(loaded.logprobs(batch), learner.logprobs(batch), atol=1e-4)


def test_adapters_are_a_function_of_the_seed():
    same = [learner_of(f"run.seed={seed}").adapters.tensors() for seed in (1, 1, 2)]
    [name, *_] = [name for name in same[0] if "lora_A" in name]
    assert torch.equal(same[0][name], same[1][name])
    assert not torch.equal(same[0][name], same[2][name])


def test_layers_by_name_and_names_of_none():
    assert all("q_proj" in name for name in learner_of("lora.targets=q_proj").adapters.tensors())
    told = r"lora\.targets \['nope'\]: no layer of LlamaForCausalLM goes by that; there are .*k_proj.* q_proj"
    with pytest.raises(PolicyError, match=told):
        learner_of("lora.targets=['q_proj', 'nope']")


def test_a_run_goes_on_exactly_and_its_checkpoints_are_plain_models(server, novice, tmp_path):
    settings = (*LORA, "kl.coefficient=0.01", "advantage.kind=gae", "critic.warmup_iterations=0")
    train(small(server, novice, tmp_path / "whole", *settings))
    config = small(server, novice, tmp_path / "stopped", *settings)
    with pytest.raises(Interruption):
        train(config, observe=stop_at(3))
    last = train(config, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert any((last / "training").glob("adapters.safetensors"))
    CheckpointAgent(last, name="agent")
    merged, base = (load_policy(str(folder)).model for folder in (last, novice))
    moved = [name for name, weight in merged.named_parameters() if not torch.equal(weight, base.get_parameter(name))]
    assert moved
    assert all("_proj" in name for name in moved)


def test_a_run_whose_base_is_gone_is_not_resumed(server, novice, tmp_path):
    config = small(server, novice, tmp_path / "run", *LORA, "run.iterations=2", "checkpoint.every=1")
    train(config)
    (tmp_path / "run" / "reference").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="reference is gone"):
        train(config, resume=True)
    assert checkpoints(tmp_path / "run" / "checkpoints")


def test_more_than_the_model_has_is_refused_before_anything_is_written(server, novice, tmp_path):
    config = small(server, novice, tmp_path / "run", "lora.rank=129", "critic.trunk=shared")
    with pytest.raises(PolicyError, match=r"lora\.rank: 129 is more than .* \(128\).* as 16, or to 0"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PolicyError, match=re.escape("pip install 'turngym[lora]', or set lora.rank=0")):
        learner_of()


def test_a_critic_with_a_trunk_of_its_own_is_refused():
    with pytest.raises(ConfigError, match=r"critic\.trunk: .* set critic\.trunk=shared"):
        load_config(settings=["lora.rank=4"])
    load_config(settings=["lora.rank=4", "advantage.kind=grpo"])


def test_memory_of_adapters():
    shape = Shape(parameters=1000, trunk=900, layers=2, hidden=8, feed_forward=16, queries=8, keys=4, vocabulary=50)
    few = 2 * 4 * (2 * 16 + 2 * 12 + 3 * 24)
    found = estimate(shape, load_config(settings=[*LORA, "kl.coefficient=0.1"]), Episode(30, 10, 3, 1000))
    assert found.weights == 4 * 1000 + 4 * few
    assert found.optimiser == 8 * few
    assert found.gradients == 4 * few
    assert found.reference == found.critic == 0
