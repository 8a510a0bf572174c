"""LoRA (arXiv 2106.09685): the model's weights stay as they are, and beside its linear layers small ones are trained.

The `peft` library, an optional extra that is imported when it is asked for, puts them in place. Knows nothing of
optimisers or checkpoints.
"""

import contextlib
import importlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turngym_trainer.config import LoraConfig
from turngym_trainer.policy import Policy, PolicyError

_NAME: Final = "default"
_OURS: Final = ".lora_"
_BASE: Final = ".base_layer."


def import_peft() -> Any:
    """The peft library.

    Raises:
        PolicyError: it is not installed.
    """
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise PolicyError(
            f"lora.rank: peft cannot be imported ({error}); pip install 'turngym[lora]', or set lora.rank=0"
        ) from error


def check_lora(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuses layers that cannot be had, or that are larger than what they stand beside.

    Raises:
        PolicyError: peft is not installed, no weight of the model has as many rows and columns as the rank, or no layer
            goes by one of the names in `lora.targets`.
    """
    import_peft()
    weights = {
        name.removesuffix(".weight"): weight
        for name, weight in cast(nn.Module, model).named_parameters()
        if weight.dim() == 2
    }
    if missing := [
        target for target in config.targets if not any(f".{layer}".endswith(f".{target}") for layer in weights)
    ]:
        raise PolicyError(
            f"lora.targets {missing}: no layer of {type(model).__name__} goes by that; there are "
            f"{', '.join(sorted({layer.rpartition('.')[2] for layer in weights}))}"
        )
    most = max(min(weight.shape) for weight in weights.values())
    if config.rank > most:
        raise PolicyError(
            f"lora.rank: {config.rank} is more than any weight of {type(model).__name__} has rows or columns here "
            f"({most}), so more would be trained than without; set it to a fraction of {most}, as 16, or to 0"
        )


class Adapters:
    """Trained layers beside a policy's linear ones. At first they add nothing.

    Args:
        policy: its weights, in float32, are frozen.
        config: rank above 0.
        dtype: that the frozen weights take.
        seed: what the adapters are drawn from.

    Raises:
        PolicyError: see `check_lora`; or peft cannot put one beside a layer in `lora.targets`.
    """

    def __init__(self, policy: Policy, config: LoraConfig, *, dtype: torch.dtype, seed: int) -> None:
        check_lora(policy.model, config)
        peft = import_peft()
        self._policy = policy
        model = cast(nn.Module, policy.model)
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            # Dropout would train other probabilities than those that were sampled from.
            lora_dropout=0.0,
            target_modules=list(config.targets) or "all-linear",
        )
        try:
            # peft draws from torch's global generator; adapters are drawn again below, from ours.
            with torch.random.fork_rng(devices=[]):
                peft.inject_adapter_in_model(settings, model, adapter_name=_NAME)
        except ValueError as error:
            raise PolicyError(f"lora.targets {list(config.targets)}: {error}") from error
        self._layers: list[Any] = [each for each in model.modules() if hasattr(each, "lora_A")]
        generator = torch.Generator().manual_seed(seed)
        for layer in self._layers:
            weight = cast(Tensor, layer.lora_A[_NAME].weight)
            bound = weight.shape[1] ** -0.5
            drawn = torch.empty(weight.shape).uniform_(-bound, bound, generator=generator)
            weight.data.copy_(drawn)
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The adapters' weights by name."""
        named = cast(nn.Module, self._policy.model).named_parameters()
        return {name: weight.detach() for name, weight in named if _OURS in name}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over weights that `tensors` returned."""
        for name, weight in self.tensors().items():
            weight.copy_(tensors[name])

    def save_merged(self, folder: Path) -> None:
        """Writes the policy in float32 with its adapters added to its weights, as if it had none."""
        deltas = {id(layer.base_layer): layer.get_delta_weight(_NAME).detach() for layer in self._layers}
        model = cast(nn.Module, self._policy.model)
        merged = {name: weight.float() for name, weight in model.state_dict().items() if _OURS not in name}
        for name, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
            if id(module) in deltas:
                merged[f"{name}.weight"] = merged[f"{name}.weight"] + deltas[id(module)].float()
        self._policy.save(folder, {name.replace(_BASE, "."): weight for name, weight in merged.items()})

    @contextlib.contextmanager
    def off(self) -> Generator[None]:
        """Within, the policy is as it was before it had adapters."""
        for layer in self._layers:
            layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(enabled=True)
