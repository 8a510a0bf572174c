"""A fifth of the tiny policy, for experiments of many trainings: two layers of width 64, 0.16 million parameters."""

from pathlib import Path
from typing import Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turngym_trainer import tiny_tokenizer
from turngym_trainer.policy import TINY_INIT_STD, Policy

HIDDEN: Final = 64
LAYERS: Final = 2
HEADS: Final = 2
FEED_FORWARD: Final = 128
POSITIONS: Final = 512
SEED: Final = 0
"""What its weights are drawn from."""


def write_small_policy(folder: Path) -> None:
    """Writes the policy to a folder that `policy.model` can name."""
    tokenizer = tiny_tokenizer.load()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.get_vocab()[tiny_tokenizer.PAD],
        eos_token_id=tokenizer.get_vocab()[tiny_tokenizer.END],
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, TINY_INIT_STD, generator=generator)
    Policy(model, tokenizer).save(folder)
