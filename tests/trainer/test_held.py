"""Reuse: one policy version plays the groups of several iterations, and what is left survives checkpoints exactly."""

import dataclasses

import numpy as np
import pytest
from small_runs import Interruption, assert_same_run, small, stop_at

from turngym_trainer import seeds
from turngym_trainer.checkpoint import checkpoints, roll_back
from turngym_trainer.held import Held, left_of_block, load_held, save_held
from turngym_trainer.metrics import read_metrics
from turngym_trainer.recorded import read_run
from turngym_trainer.settings import ConfigError, load_config
from turngym_trainer.train import resumable, train
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord


def row(length, seed):
    rng = np.random.default_rng(seed)
    is_action = np.arange(length) >= length // 2
    return Row(
        ids=rng.integers(0, 99, length),
        is_action=is_action,
        turn=np.where(is_action, 0, -1),
        logprobs=rng.normal(size=length).astype(np.float32),
    )


def trajectory(group, **changed):
    turn = TurnRecord("a√", "<think>", "t", ("Up", "Down"), 0.1, True, False, 2)
    return Trajectory(
        "e", group, 1, 2**64 - 1, 3, "w", None, True, False, "ff", (row(4, group), row(7, 1)), (turn,), **changed
    )


def assert_equal(one, other):
    for field in dataclasses.fields(Trajectory):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if field.name == "rows":
            for left, right in zip(mine, its, strict=True):
                for array in dataclasses.fields(Row):
                    got, want = getattr(left, array.name), getattr(right, array.name)
                    assert got.dtype == want.dtype
                    assert np.array_equal(got, want)
        elif isinstance(its, np.ndarray):
            assert mine.dtype == its.dtype
            assert np.array_equal(mine, its)
        else:
            assert mine == its, field.name


def test_what_is_held_reads_back_as_it_was(tmp_path):
    assert load_held(tmp_path) is None
    held = Held(
        5,
        2,
        7,
        (
            trajectory(3),
            trajectory(4, last_prompt=np.arange(3), old_logprobs=np.float32([0.1, -2, 3, 4, 5, 6])),
            trajectory(5, last_prompt=np.arange(2), outgrown=True),
        ),
    )
    save_held(tmp_path, held)
    read = load_held(tmp_path)
    assert (read.iteration, read.attempt, read.max_turns) == (5, 2, 7)
    for one, other in zip(read.trajectories, held.trajectories, strict=True):
        assert_equal(one, other)


def test_each_iteration_has_groups_of_its_own():
    held = Held(4, 0, 0, tuple(trajectory(group) for group in (0, 1, 2, 5)))
    assert [each.group for each in held.due(4, 2)] == [0, 1]
    assert [each.group for each in held.due(5, 2)] == [2]
    assert [each.group for each in held.after(4, 2).trajectories] == [2, 5]
    assert held.after(6, 2) is None
    assert [left_of_block(iteration, 3) for iteration in range(1, 7)] == [3, 2, 1, 3, 2, 1]
    assert left_of_block(4, 1) == 1


REUSE = ["rollout.reuse=2", "checkpoint.every=1"]


@pytest.fixture(scope="module")
def whole(server, novice, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(small(server, novice, folder, *REUSE, "rollout.refills=1"))
    return folder


def test_two_iterations_learn_from_what_one_policy_version_played(whole):
    lines = read_metrics(whole)
    assert [line["train/age"] for line in lines] == [0, 1, 0, 1]
    assert [line["train/rounds"] > 0 for line in lines] == [True, False, True, False]
    assert [line["train/episodes"] for line in lines] == [12] * 4
    # The actor first learns in iteration 2, so in iteration 4 the policy is no more the one that played.
    assert lines[2]["update/ratio_max"] == pytest.approx(1, abs=1e-2)
    assert lines[3]["update/old_kl"] > 0
    assert lines[3]["update/ratio_max"] > lines[2]["update/ratio_max"]
    episodes = list(read_run(whole).episodes())
    assert [sorted({e["group"] for e in episodes if e["iteration"] == i}) for i in (1, 2, 3, 4)] == [
        [0, 1, 2],
        [3, 4, 5],
    ] * 2
    for episode in episodes:
        collected = episode["iteration"] - (episode["iteration"] - 1) % 2
        assert episode["level_seed"] in [
            seeds.level_seed(0, collected, attempt, episode["group"]) for attempt in (0, 1)
        ]
    held = [load_held(checkpoint / "training") for checkpoint in checkpoints(whole / "checkpoints")]
    assert [each is None for each in held] == [True, False, True]  # After iterations 2, 3 and 4.


def test_a_run_that_reuses_resumes_as_exactly_wherever_it_is_cut(whole, server, novice, tmp_path):
    folder = tmp_path / "cut"
    config = small(server, novice, folder, *REUSE, "rollout.refills=1")
    for iteration in range(1, 5):
        with pytest.raises(Interruption):
            train(config, resume=iteration > 1, observe=stop_at(iteration))
    train(resumable(folder, []), resume=True)
    assert_same_run(whole, folder)


def test_recomputed_log_probabilities_are_those_of_the_policy_that_played(server, novice, tmp_path):
    settings = [*REUSE, "update.old_logprobs=recomputed", "critic.warmup_iterations=0", "validation.every=0"]
    for name in ("whole", "cut"):
        config = small(server, novice, tmp_path / name, *settings)
        if name == "cut":
            with pytest.raises(Interruption):
                train(config, observe=stop_at(2))
        train(config, resume=name == "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    for line in read_metrics(tmp_path / "cut"):
        # In float32 the trainer's and the sampler's agree, also where the policy has moved since.
        assert 0 < line["update/sampler_gap"] < 1e-5
        assert (line["update/old_kl"] > 1e-6) == (line["train/age"] == 1)


def test_a_rollback_does_not_learn_from_what_was_held(server, novice, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Interruption):
        train(small(server, novice, folder, *REUSE), observe=stop_at(4))
    sound = roll_back(folder / "checkpoints", before=4, attempt=1)
    assert load_held(sound / "training") is not None  # It is one between the two iterations.
    train(resumable(folder, []), resume=True)
    assert [line["train/age"] for line in read_metrics(folder)] == [0, 1, 0, 0]
    played = {(e["group"], e["level_seed"]) for e in read_run(folder).episodes() if e["iteration"] == 4}
    assert played == {(group, seeds.level_seed(0, 4, 1, group)) for group in range(3)}


def test_what_makes_no_sense_is_refused():
    with pytest.raises(
        ConfigError, match=r"rollout\.reuse: 100 iterations are no multiple of 3.*set run\.iterations=102"
    ):
        load_config(settings=["rollout.reuse=3"])
    with pytest.raises(ConfigError, match=r"horizon\.iterations: a phase of 5 ends while .*a multiple of 2"):
        load_config(settings=["rollout.reuse=2", "horizon.turns=[1, 2]", "horizon.iterations=5"])
    load_config(settings=["rollout.reuse=2", "horizon.turns=[1, 2]", "horizon.until=validation"])
