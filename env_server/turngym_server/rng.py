"""Random numbers whose stream is part of the contract.

A counter-based generator, Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
keyed by (seed, stream). The words are those of `numpy.random.Philox(key=[seed, stream])`, which numpy keeps the same
for ever (NEP 19); everything drawn from them is defined here: library distributions change between releases, these
never do. Knows nothing of environments.
"""

import threading
from collections.abc import MutableSequence, Sequence
from typing import Final, TypeVar

import numpy as np

T = TypeVar("T")

_MASK: Final = (1 << 64) - 1

LEVEL_STREAM: Final = 0
"""Streams of a level seed: LEVEL_STREAM + attempt, where attempt counts redraws."""
NOISE_STREAM: Final = 1 << 32
"""Streams of a noise seed: NOISE_STREAM + number of actions run before in the episode."""

_WORDS: Final = 16
"""Words made at a time. Setting a generator up costs as much as making twenty."""
_BLOCK: Final = 4
"""Words for each value of the counter."""


class _Philox(threading.local):
    """One numpy generator a thread, set to the wanted key and counter before each use: making one costs more."""

    def __init__(self) -> None:
        self._generator = np.random.Philox(key=0)
        self._state = self._generator.state
        self._key = self._state["state"]["key"]
        self._counter = self._state["state"]["counter"]

    def words(self, seed: int, stream: int, block: int) -> list[int]:
        """`_WORDS` words of the stream, from the given block of four on."""
        self._key[0] = seed
        self._key[1] = stream
        self._counter[0] = block
        self._generator.state = self._state
        return self._generator.random_raw(_WORDS).tolist()


_philox: Final = _Philox()


class Rng:
    """A stream of random words. Making one costs nothing until the first draw.

    Args:
        seed: 0 to 2^64 − 1.
        stream: 0 to 2^64 − 1; streams of one seed are independent.
    """

    __slots__ = ("_block", "_buffer", "_seed", "_stream")

    def __init__(self, seed: int, stream: int) -> None:
        if not 0 <= seed <= _MASK or not 0 <= stream <= _MASK:
            raise ValueError(f"seed {seed} and stream {stream} must lie in 0 … 2^64 − 1")
        self._seed = seed
        self._stream = stream
        self._block = 0
        self._buffer: list[int] = []

    @property
    def key(self) -> tuple[int, int]:
        """(seed, stream), of which another Rng draws the same words from the first on."""
        return self._seed, self._stream

    def _fill(self) -> list[int]:
        """Makes the next words, the first of them last."""
        self._buffer = _philox.words(self._seed, self._stream, self._block)
        self._buffer.reverse()
        self._block += _WORDS // _BLOCK
        return self._buffer

    def word(self) -> int:
        """A uniform 64-bit word."""
        return (self._buffer or self._fill()).pop()

    def below(self, n: int) -> int:
        """A uniform integer in 0 … n − 1, exactly (Lemire's multiply and reject). `n` is 1 to 2^64."""
        if not 1 <= n <= _MASK + 1:
            raise ValueError(f"below({n}): expected 1 … 2^64")
        while True:
            product = (self._buffer or self._fill()).pop() * n
            rest = product & _MASK
            # What is rejected lies under 2^64 mod n, which is less than n and costs a division.
            if rest >= n or rest >= (_MASK + 1) % n:
                return product >> 64

    def random(self) -> float:
        """A uniform float in [0, 1) with 53 bits."""
        return (self.word() >> 11) * 2.0**-53

    def choice(self, items: Sequence[T]) -> T:
        """A uniform element of a non-empty sequence."""
        return items[self.below(len(items))]

    def weighted(self, weights: Sequence[int]) -> int:
        """An index with probability proportional to its weight. Weights are integers, so that no rounding enters."""
        left = self.below(sum(weights))
        for index, weight in enumerate(weights):
            if left < weight:
                return index
            left -= weight
        raise AssertionError("unreachable: below(sum) is less than the sum")

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Shuffles in place (Fisher-Yates, from the end)."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
