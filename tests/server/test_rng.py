"""The random stream against Philox written out, which its published test vectors hold, and draws worked by hand."""

import threading
from collections import Counter

import pytest

from turngym_server.rng import LEVEL_STREAM, NOISE_STREAM, Rng

MASK = (1 << 64) - 1


def philox_block(counter: int, key_0: int, key_1: int) -> tuple[int, int, int, int]:
    """Four 64-bit words of Philox4x64-10 at `counter` (0 to 2^256 − 1) under a key of two 64-bit words."""
    c0, c1 = counter & MASK, (counter >> 64) & MASK
    c2, c3 = (counter >> 128) & MASK, (counter >> 192) & MASK
    for _ in range(10):
        product_0 = c0 * 0xD2E7470EE14C6C93
        product_1 = c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (
            (product_1 >> 64) ^ c1 ^ key_0,
            product_1 & MASK,
            (product_0 >> 64) ^ c3 ^ key_1,
            product_0 & MASK,
        )
        key_0 = (key_0 + 0x9E3779B97F4A7C15) & MASK
        key_1 = (key_1 + 0xBB67AE8584CAA73B) & MASK
    return c0, c1, c2, c3


def words(seed: int, stream: int, count: int) -> list[int]:
    rng = Rng(seed, stream)
    return [rng.word() for _ in range(count)]


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        # Known-answer vectors of Random123 (kat_vectors, philox4x64 10).
        (0, (0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
        (
            (1 << 256) - 1,
            (MASK, MASK),
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
    ],
)
def test_known_answers(counter: int, key: tuple[int, int], block: tuple[int, ...]) -> None:
    assert philox_block(counter, *key) == block


@pytest.mark.parametrize(
    ("seed", "stream"), [(0, LEVEL_STREAM), (1, NOISE_STREAM), (MASK, MASK), (123, NOISE_STREAM + 7)]
)
def test_words_are_the_blocks_from_the_first_on(seed: int, stream: int) -> None:
    blocks = [philox_block(counter, seed, stream) for counter in range(1, 13)]
    assert words(seed, stream, 47) == [word for block in blocks for word in block][:47]


def test_streams_that_take_turns_do_not_disturb_each_other() -> None:
    alone = [words(seed, 3, 60) for seed in range(4)]
    rngs = [Rng(seed, 3) for seed in range(4)]
    drawn = [[rng.word() for rng in rngs] for _ in range(60)]
    assert [list(column) for column in zip(*drawn, strict=True)] == alone


def test_threads_do_not_disturb_each_other() -> None:
    alone = [words(seed, 1, 4_000) for seed in range(4)]
    together: dict[int, list[int]] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: together.update({seed: words(seed, 1, 4_000)})) for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[seed] for seed in range(4)] == alone


def test_random_is_the_top_53_bits_of_a_word() -> None:
    assert Rng(5, 6).random() == (words(5, 6, 1)[0] >> 11) / 2**53


def test_below_takes_the_high_half_of_the_product() -> None:
    first = words(9, 0, 1)[0]
    assert Rng(9, 0).below(10) == first * 10 // 2**64


def test_below_rejects_the_words_that_would_bias_it() -> None:
    n = (1 << 63) + 1
    # Of a word, word·n mod 2^64 must reach 2^64 mod n = 2^63 − 1: about half of the words are rejected.
    accepted = [word * n >> 64 for word in words(3, 0, 40) if word * n % 2**64 >= 2**63 - 1]
    rng = Rng(3, 0)
    assert 5 < len(accepted) < 35
    assert [rng.below(n) for _ in accepted] == accepted


@pytest.mark.parametrize("n", [0, -1, (1 << 64) + 1])
def test_below_refuses_other_ranges(n: int) -> None:
    with pytest.raises(ValueError, match="expected 1"):
        Rng(0, 0).below(n)


@pytest.mark.parametrize(("seed", "stream"), [(-1, 0), (1 << 64, 0), (0, -1), (0, 1 << 64)])
def test_seeds_outside_64_bits_are_refused(seed: int, stream: int) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        Rng(seed, stream)


def test_weighted_follows_its_weights() -> None:
    rng = Rng(11, 0)
    counts = Counter(rng.weighted([1, 0, 3]) for _ in range(4_000))
    assert counts[1] == 0
    assert abs(counts[0] - 1_000) < 110  # Standard deviation 27.


def test_shuffle_is_uniform_over_orders() -> None:
    rng = Rng(12, 0)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(6_000):
        items = [0, 1, 2]
        rng.shuffle(items)
        counts[tuple(items)] += 1
    assert len(counts) == 6
    assert all(abs(count - 1_000) < 116 for count in counts.values())  # Standard deviation 29.


def test_choice_is_uniform() -> None:
    rng = Rng(13, 0)
    counts = Counter(rng.choice("abcd") for _ in range(4_000))
    assert set(counts) == set("abcd")
    assert all(abs(count - 1_000) < 110 for count in counts.values())
