"""Actor and critic in shards: FSDP2, where each process holds a part of every weight with its gradient and moments.

A layer's weights are gathered while it runs, and its gradients are summed over the processes. For playing, each process
holds the policy whole beside its shards, in the type of the forward passes: processes write answers of unequal lengths,
and a sharded model only runs where all run it. Knows nothing of losses.
"""

import contextlib
import copy
from collections.abc import Generator, Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from turngym_trainer.critic import Critic
from turngym_trainer.logprobs import MicroBatch, Scorer


class ShardedActor(nn.Module):
    """A copy of a policy in shards, behind the same seam as `MasterWeights`; called, it scores a micro-batch.

    Args:
        model: the policy, in float32. It becomes what the shards are copied to, in `dtype`.
        temperature: see `Scorer`.
        dtype: of forward passes. Shards are float32, and so are sums of gradients.

    Attributes:
        masters: the shards of the weights.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._copies = list(cast(nn.Module, model).parameters())
        self._dtype = dtype
        self.model = copy.deepcopy(model)
        self._scorer = Scorer(self.model, temperature)
        mesh = _mesh(model.device)
        _shard_layers(self, mesh, dtype)
        fully_shard(self, mesh=mesh, mp_policy=_precision(dtype))
        self.masters = list(self.parameters())
        self._copy(dtype)

    def forward(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """See `Scorer.score`."""
        logprobs, entropy = self._scorer.score(part)
        return logprobs.clone(), entropy  # FSDP warns of views.

    def take_gradients(self) -> None:
        """Gradients come to the masters of themselves."""

    def write_through(self) -> None:
        """Nothing plays between the steps of an update; see `publish`."""

    def publish(self) -> None:
        """Copies the weights to the policy that plays."""
        self._copy(self._dtype)

    @contextlib.contextmanager
    def exposed(self) -> Generator[None]:
        """Within, the policy that plays holds its weights in float32."""
        if self._dtype == torch.float32:
            yield
            return
        self._copy(torch.float32)
        try:
            yield
        finally:
            self._copy(self._dtype)

    def _copy(self, dtype: torch.dtype) -> None:
        for whole, master in zip(self._copies, self.masters, strict=True):
            weights = cast(DTensor, master).full_tensor().detach().to(dtype)
            if whole.dtype == dtype:
                whole.data.copy_(weights)
            else:
                whole.data = weights


def shard_critic(critic: Critic, dtype: torch.dtype) -> None:
    """Leaves a part of a critic with a trunk of its own in each process. From here on, it is called and not its parts.

    Its head stays in float32.
    """
    mesh = _mesh(critic.head.weight.device)
    _shard_layers(critic.trunk, mesh, dtype)
    fully_shard(critic.head, mesh=mesh)
    fully_shard(critic, mesh=mesh, mp_policy=_precision(dtype))


def whole(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Tensors in one piece, gathered from all processes where they are in shards.

    Args:
        keep: whether this process wants them; else the result is empty.
    """
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        one = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
        if keep:
            gathered[name] = one.contiguous()
    return gathered


def like(tensor: Tensor, model: Tensor) -> Tensor:
    """A tensor that every process has whole, in shards where `model` is, else as it is."""
    if not isinstance(model, DTensor):
        return tensor
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)


def one_number(value: Tensor) -> Tensor:
    """A number that may have been worked out over shards, whole."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _mesh(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    # What comes in is rounded where the model itself rounds it: positions, for one, are to stay as they are.
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _shard_layers(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    for layer in _layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=_precision(dtype))


def _layers(module: nn.Module) -> Iterable[nn.Module]:
    return [each for each in module.modules() if isinstance(each, GradientCheckpointingLayer)]
