"""Gradient checkpointing: the same gradients from less memory, and models that cannot do it."""

import numpy as np
import pytest
import torch
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from turngym_trainer.batch import lay_out
from turngym_trainer.policy import Policy, PolicyError, load_policy
from turngym_trainer.recompute import layers_to_recompute
from turngym_trainer.seeds import Place
from turngym_trainer.settings import load_config
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord
from turngym_trainer.update import Learner, Lesson

TURN = TurnRecord("", "", "", ("a",), 0.0, True, True, 1)


def lesson(rng, B=6, prompt=12, answer=8):
    """Episodes of one row; half of them begin alike, so that answers share a prompt."""
    shared = rng.integers(0, 100, prompt)
    episodes = []
    for index in range(B):
        ids = np.concatenate([shared if index % 2 else rng.integers(0, 100, prompt), rng.integers(0, 100, answer)])
        turn = np.repeat([-1, 0], [prompt, answer])
        rows = (Row(ids, turn >= 0, turn, np.where(turn >= 0, -4.6, 0).astype(np.float32)),)
        episodes.append(Trajectory("e", 0, index, 0, 0, "", None, True, False, "", rows, (TURN,)))
    batch = lay_out(episodes)
    N = len(batch.logprobs)
    return Lesson(batch, batch.logprobs, rng.normal(size=N), values=rng.normal(size=N), targets=rng.normal(size=N))


def gradients(settings, monkeypatch):
    """Gradients of one step by parameter, actor's and critic's, and bytes that were kept for the backward pass."""
    config = load_config(settings=["update.gradient_clip=1e9", "critic.learning_rate=1e-4", *settings])
    learner = Learner(load_policy("tiny"), config, length_limit=60, with_critic=True, reference=None)
    torch.nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(1))
    found, kept = [], 0
    for optimiser in learner.optimisers.values():
        monkeypatch.setattr(
            optimiser,
            "step",
            lambda groups=optimiser.param_groups: found.extend(
                p.grad.clone() for group in groups for p in group["params"]
            ),
        )

    def keep(tensor):
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    taught = lesson(np.random.default_rng(0))
    everyone = np.arange(len(taught.batch.lengths))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.update(taught, actor_episodes=everyone, critic_episodes=everyone, place=Place(9))
    return found, kept


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_gradients_are_the_same_and_less_is_kept(trunk, monkeypatch):
    settings = [f"critic.trunk={trunk}"]
    plain, kept_plain = gradients(settings, monkeypatch)
    checkpointed, kept = gradients([*settings, "policy.gradient_checkpointing=true"], monkeypatch)
    assert len(plain) == len(checkpointed) > 0
    for expected, found in zip(plain, checkpointed, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert kept < kept_plain / 2


def test_what_is_sampled_and_scored_does_not_change():
    taught = lesson(np.random.default_rng(1))
    scored = []
    for value in ("false", "true"):
        config = load_config(settings=[f"policy.gradient_checkpointing={value}"])
        learner = Learner(load_policy("tiny"), config, length_limit=60, with_critic=False, reference=None)
        scored.append(learner.logprobs(taught.batch))
    np.testing.assert_array_equal(*scored)


def test_models_whose_layers_cannot_run_again_are_refused():
    tokenizer = load_policy("tiny").tokenizer
    sizes = {"vocab_size": len(tokenizer), "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes))
    with pytest.raises(PolicyError, match=r"policy.gradient_checkpointing: OpenAIGPTLMHeadModel .* set it to false"):
        layers_to_recompute(model)
    assert len(layers_to_recompute(load_policy("tiny").model)) == 4
    assert Policy(model, tokenizer).model is model
