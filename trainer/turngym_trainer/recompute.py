"""Gradient checkpointing: of each layer only its input is kept for the backward pass, which runs the layer again.

Knows nothing of losses or optimisers. Where no gradients are taken (sampling, scoring), a layer runs as it always does.
"""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from transformers.modeling_layers import GradientCheckpointingLayer

from turngym_trainer.policy import PolicyError


def layers_to_recompute(model: nn.Module) -> Sequence[nn.Module]:
    """A model's layers that may run twice.

    Raises:
        PolicyError: transformers says of none that it may.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise PolicyError(
            f"policy.gradient_checkpointing: {type(model).__name__} has no layers that transformers can run again; "
            "set it to false, and lower update.microbatch_tokens where memory is short"
        )
    return layers


def recompute_layers(model: nn.Module) -> None:
    """Has a model's layers run again in the backward pass, from now on and in copies made of it.

    In place of what transformers offers, which asks for training mode, and with it dropout: the probabilities that are
    trained would not be those that were sampled from.

    Raises:
        PolicyError: see `layers_to_recompute`.
    """
    for layer in layers_to_recompute(model):
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return cast(object, checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False))
