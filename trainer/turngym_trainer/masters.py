"""Float32 weights behind a model whose forward passes run in another type."""

import contextlib
from collections.abc import Generator, Iterable

import torch
from torch import Tensor, nn


class MasterWeights:
    """The weights that an optimiser steps on, and their copies that a model reads.

    A weight in bfloat16 has 8 significant bits, so a step of less than about a 500th of it is rounded away: at the
    usual rates nearly every step. Steps are taken in float32, and gradients of micro-batches added up in it.

    The model's own weights become copies, in place of autocast: most of an iteration is decoding token by token, which
    takes as long as reading the weights takes, and autocast would read all of them in float32 and cast them anew for
    each token. The price is two bytes a weight. The copy is rounded in the same way wherever the policy is loaded.

    Args:
        parameters: a model's, in float32. Its buffers stay as they are.
        dtype: of the copies; with float32 a weight is its own master, and nothing is copied.

    Attributes:
        masters: the weights in float32, in the order of `parameters`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        self._copies = list(parameters)
        self.masters = self._copies
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._rounded: list[Tensor] = []
        if dtype != torch.float32:
            assert all(copy.dtype == torch.float32 for copy in self._copies), "rounded before it came here"
            self.masters = [nn.Parameter(copy.detach().clone()) for copy in self._copies]
            self._pairs = list(zip(self._copies, self.masters, strict=True))
            self._rounded = [master.detach().to(dtype) for master in self.masters]
            self.write_through()

    def take_gradients(self) -> None:
        """Adds the copies' gradients to the masters' and clears them."""
        for copy, master in self._pairs:
            if copy.grad is not None:
                gradient = copy.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                copy.grad = None

    def write_through(self) -> None:
        """Rounds the masters to the copies."""
        for (copy, master), rounded in zip(self._pairs, self._rounded, strict=True):
            copy.data = rounded.copy_(master.detach())

    def publish(self) -> None:
        """The copies have been kept up to date; see `sharded` for weights that are not."""

    @contextlib.contextmanager
    def exposed(self) -> Generator[None]:
        """Within, the model holds the masters themselves, to be written or read; afterwards their copies again."""
        for copy, master in self._pairs:
            copy.data = master.data
        try:
            yield
        finally:
            self.write_through()
