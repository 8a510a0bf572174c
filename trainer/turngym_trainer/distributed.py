"""The processes of one run, as `torchrun` starts them, and what they tell each other.

Every process runs the same iteration on the same episodes. What is worth sharing out is shared: episodes to play, rows
to score, micro-batches to learn from; results come together in the order of processes, so that all go on with the same
numbers. The first process alone writes and prints. Knows nothing of models; see `sharded`.
"""

import contextlib
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")
Values = TypeVar("Values", NDArray[np.float32], NDArray[np.float64])

_PATIENCE: Final = timedelta(hours=6)
"""How long processes wait for each other. One that has ended is noticed at once; this is for one that is slow."""


class PeerError(RuntimeError):
    """Another process of this run has failed, and has said why itself."""


class LostPeerError(RuntimeError):
    """Another process of this run is gone without a word."""


@dataclass(frozen=True, slots=True)
class _Failed:
    why: str


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of a run, as one of them sees it.

    All of them call the methods below together and in the same order. Of a single process all but `share` and `total`
    return what they were given.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def exchange(self, value: T) -> list[T]:
        """What each process gave, in their order.

        Raises:
            PeerError: one of them has failed in the meantime.
        """
        if self.size == 1:
            return [value]
        everyone = self._gather(value)
        for rank, theirs in enumerate(everyone):
            if isinstance(theirs, _Failed):
                raise PeerError(f"process {rank} failed: {theirs.why}")
        return cast(list[T], everyone)

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes."""
        if self.size == 1:
            return make()
        return cast(T, self.exchange(make() if self.first else None)[0])

    def most(self, number: int) -> int:
        """The greatest of the processes' numbers."""
        return max(self.exchange(number))

    def sum(self, values: Values) -> Values:
        """The sum of the processes' arrays, which have one shape."""
        first, *others = self.exchange(values)
        return sum(others, first)

    def total(self, value: Tensor) -> Tensor:
        """The sum of the processes' tensors, which have one shape."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def share(self, costs: NDArray[np.int64]) -> slice:
        """Of a sequence whose items cost so much, this process's part, so that all parts cost about the same.

        Parts follow each other and make up the whole; one may be empty.
        """
        middles = np.cumsum(costs) - costs / 2
        each = float(costs.sum()) / self.size
        begin, end = (int((middles < each * rank).sum()) for rank in (self.rank, self.rank + 1))
        return slice(begin, end)

    def tell(self, error: Exception) -> bool:
        """Tells the others that this process has failed, once they ask. Returns whether it is the first that has."""
        if self.size == 1:
            return True
        everyone = self._gather(_Failed(str(error)))
        return not any(isinstance(theirs, _Failed) for theirs in everyone[: self.rank])

    def _gather(self, value: object) -> list[object]:
        everyone: list[object] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return everyone


ALONE: Final = Group()


def is_first_process() -> bool:
    """Whether this process is the only one of its run, or the first."""
    return int(os.environ.get("RANK", "0")) == 0


def processes_here() -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def joined(device: str, told: tuple[type[Exception], ...]) -> Generator[Group]:
    """Within, this process and the others that `torchrun` started work together.

    Args:
        device: cpu or cuda, each process then taking a GPU of its own.
        told: errors that the others are told of. They must be raised where the others go on to an `exchange`.

    Raises:
        PeerError: in place of such an error, where another process raises it already.
        LostPeerError: a process is gone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", timeout=_PATIENCE)
    group = Group(dist.get_rank(), dist.get_world_size())
    try:
        yield group
    except PeerError:
        _leave(ours)
        raise
    except told as error:
        first = _tell(group, error)
        _leave(ours)
        if not first:
            raise PeerError(str(error)) from error
        raise
    except RuntimeError as error:
        if not _is_of_connection(error):
            raise
        raise LostPeerError(
            f"another of this run's {size} processes has ended, so this one ends too: {str(error).splitlines()[0]}. "
            "The run's last checkpoint stands; see what the other one said, and resume"
        ) from error
    _leave(ours)


def _leave(ours: bool) -> None:
    """Ends what `joined` began. Left to the interpreter's end, threads of gloo's may meet what is gone, and abort."""
    if ours:
        dist.destroy_process_group()


def _tell(group: Group, error: Exception) -> bool:
    try:
        return group.tell(error)
    except RuntimeError:  # They are gone already.
        return True


def _is_of_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
