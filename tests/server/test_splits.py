"""Splits: golden assignments (a change would move published instances), shares, and what the key depends on."""

from collections import Counter

import pytest

from turngym_server.splits import Split, split_of, world_id

GOLDEN = [
    # printf 'turngym-split/1\0sokoban\0a' | sha256sum, first 32 digits; split by its first 16 digits modulo 10.
    ("sokoban", 1, b"a", "a4f8df0b5af7c5fd9e1df4eb2abde0b3", Split.TRAIN),  # 3
    ("sokoban", 1, b"e", "f6c04e823bc841628627205c9db71018", Split.VALIDATION),  # 8
    ("sokoban", 1, b"n", "f0f7c25d712f8ee174eb33b5ec33b7c5", Split.TRAIN),  # 1
    ("sokoban", 1, b"p", "f8fdf6bd92d1d55554a20064068f87f2", Split.HELD_OUT),  # 9
    ("sokoban", 1, b"E", "c2a4bfc6555a07688e857bcf9673b142", Split.VALIDATION),  # 8
    ("sokoban", 1, b"z", "8bc84ef2057bf4b74b5bbc1e55b055a6", Split.HELD_OUT),  # 9
    ("sokoban", 2, b"a", "a52d453f712e6350416d4e0c16c0e12b", Split.TRAIN),
    ("frozen_lake", 1, b"a", "8a650ff84650d82219ea9d91e82d42a1", Split.TRAIN),
]


@pytest.mark.parametrize(("family", "epoch", "world", "identity", "split"), GOLDEN)
def test_golden_assignments(family: str, epoch: int, world: bytes, identity: str, split: Split) -> None:
    assert world_id(family, epoch, world) == identity
    assert split_of(family, epoch, world) is split


def test_shares_are_eighty_ten_ten() -> None:
    counts = Counter(split_of("sokoban", 1, b"world %d" % i) for i in range(20_000))
    assert set(counts) == {Split.TRAIN, Split.VALIDATION, Split.HELD_OUT}
    # Standard deviations of these counts: 57, 42 and 42; four of them are allowed.
    assert abs(counts[Split.TRAIN] - 16_000) < 228
    assert abs(counts[Split.VALIDATION] - 2_000) < 170
    assert abs(counts[Split.HELD_OUT] - 2_000) < 170


def test_a_new_epoch_deals_anew() -> None:
    worlds = [b"world %d" % i for i in range(2_000)]
    stayed = sum(split_of("sokoban", 1, w) is split_of("sokoban", 2, w) for w in worlds)
    # Independent deals agree with probability 0.8² + 0.1² + 0.1² = 0.66.
    assert abs(stayed - 1_320) < 90


def test_values_are_the_names_used_in_digests() -> None:
    assert [split.value for split in Split] == ["train", "validation", "held_out", "all"]
