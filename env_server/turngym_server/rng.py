"""Random numbers whose stream is part of the contract.

A counter-based generator, Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
keyed by (seed, stream). The words are those of `numpy.random.Philox(key=[seed, stream])`, and everything drawn from
them is defined here: library distributions change between releases, these never do. Knows nothing of environments.
"""

from collections.abc import MutableSequence, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

_MASK: Final = (1 << 64) - 1
_MULTIPLIER_0: Final = 0xD2E7470EE14C6C93
_MULTIPLIER_1: Final = 0xCA5A826395121157
_WEYL_0: Final = 0x9E3779B97F4A7C15
_WEYL_1: Final = 0xBB67AE8584CAA73B

LEVEL_STREAM: Final = 0
"""Streams of a level seed: LEVEL_STREAM + attempt, where attempt counts redraws."""
NOISE_STREAM: Final = 1 << 32
"""Streams of a noise seed: NOISE_STREAM + number of actions run before in the episode."""


def philox_block(counter: int, key_0: int, key_1: int) -> tuple[int, int, int, int]:
    """Four 64-bit words of Philox4x64-10 at `counter` (0 to 2^256 − 1) under a key of two 64-bit words."""
    c0, c1 = counter & _MASK, (counter >> 64) & _MASK
    c2, c3 = (counter >> 128) & _MASK, (counter >> 192) & _MASK
    for _ in range(10):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 64) ^ c1 ^ key_0,
            product_1 & _MASK,
            (product_0 >> 64) ^ c3 ^ key_1,
            product_0 & _MASK,
        )
        key_0 = (key_0 + _WEYL_0) & _MASK
        key_1 = (key_1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


class Rng:
    """A stream of random words. Making one costs nothing until the first draw.

    Args:
        seed: 0 to 2^64 − 1.
        stream: 0 to 2^64 − 1; streams of one seed are independent.
    """

    __slots__ = ("_buffer", "_counter", "_seed", "_stream")

    def __init__(self, seed: int, stream: int) -> None:
        if not 0 <= seed <= _MASK or not 0 <= stream <= _MASK:
            raise ValueError(f"seed {seed} and stream {stream} must lie in 0 … 2^64 − 1")
        self._seed = seed
        self._stream = stream
        self._counter = 0
        self._buffer: list[int] = []

    def word(self) -> int:
        """A uniform 64-bit word."""
        if not self._buffer:
            self._counter += 1
            self._buffer = list(philox_block(self._counter, self._seed, self._stream))
            self._buffer.reverse()
        return self._buffer.pop()

    def below(self, n: int) -> int:
        """A uniform integer in 0 … n − 1, exactly (Lemire's multiply and reject). `n` is 1 to 2^64."""
        if not 1 <= n <= _MASK + 1:
            raise ValueError(f"below({n}): expected 1 … 2^64")
        threshold = (_MASK + 1) % n
        while True:
            product = self.word() * n
            if product & _MASK >= threshold:
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
