"""Every draw is a function of its name, and no two names share one."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from turngym_trainer import seeds

GOLDEN_LEVEL = 4073217429826833252
GOLDEN_NOISE = 6800626453199187409
GOLDEN_UNIFORMS = [0.6352928152324316, 0.3461932125008409]


def test_golden_values_hold_across_processes_and_releases():
    assert seeds.level_seed(7, 3, 0, 2) == GOLDEN_LEVEL
    assert seeds.noise_seed(7, 3, 0, 2, 5) == GOLDEN_NOISE
    np.testing.assert_array_equal(seeds.token_uniforms(7, 3, 0, 2, 5, 1, 2), GOLDEN_UNIFORMS)
    code = "from turngym_trainer import seeds; print(seeds.level_seed(7, 3, 0, 2))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "17"}
    )
    assert int(other.stdout) == GOLDEN_LEVEL


def test_names_never_share_a_draw():
    names = list(itertools.product([0, 1, 11], [0, 1, 11], [0, 1], [0, 1, 11], ["train", "validation"]))
    assert len({seeds.level_seed(*name[:4], purpose=name[4]) for name in names}) == len(names)
    members = {seeds.noise_seed(0, 0, 0, group, member) for group in range(8) for member in range(16)}
    assert len(members) == 128
    turns = {float(seeds.token_uniforms(0, 0, 0, 0, 0, turn, 1)[0]) for turn in range(50)}
    assert len(turns) == 50


def test_fewer_uniforms_are_a_prefix_and_all_are_uniform():
    many = seeds.token_uniforms(1, 2, 3, 4, 5, 6, 20_000)
    np.testing.assert_array_equal(seeds.token_uniforms(1, 2, 3, 4, 5, 6, 7), many[:7])
    assert many.min() >= 0.0
    assert many.max() < 1.0
    assert abs(many.mean() - 0.5) < 4 * (1 / 12 / len(many)) ** 0.5
    assert abs((many < 0.1).mean() - 0.1) < 4 * (0.09 / len(many)) ** 0.5


def test_a_groups_uniform_depends_on_its_index_alone():
    many = seeds.group_uniforms(1, 2, 0, np.arange(500), purpose="filter")
    np.testing.assert_array_equal(seeds.group_uniforms(1, 2, 0, np.array([7, 3]), purpose="filter"), many[[7, 3]])
    assert len(set(many.tolist())) == 500
    assert abs(many.mean() - 0.5) < 4 * (1 / 12 / len(many)) ** 0.5
    assert seeds.group_uniforms(1, 3, 0, np.arange(1), purpose="filter") != many[0]


def test_permutation_is_one_and_depends_on_the_epoch():
    first, second = (seeds.permutation(0, 0, 0, epoch, 9, purpose="update") for epoch in (0, 1))
    assert sorted(first) == list(range(9))
    assert list(first) != list(second)


def test_purpose_cannot_forge_another_name():
    with pytest.raises(ValueError, match="slash"):
        seeds.level_seed(0, 0, 0, 0, purpose="train/0")
