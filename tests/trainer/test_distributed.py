"""Several processes train what one trains: the same updates, runs that go on with another number, and their ends."""

import signal
import time

import numpy as np
import pytest
import torch
from drawn_lessons import updates
from one_of_several import call, start, wait
from safetensors.torch import load_file
from small_runs import small, timeless

from turngym_trainer.checkpoint import checkpoints
from turngym_trainer.distributed import Group
from turngym_trainer.memory import Episode, Shape, estimate
from turngym_trainer.policy import load_policy
from turngym_trainer.settings import ConfigError, check_processes, load_config, to_toml
from turngym_trainer.train import resumable, train

KINDS = {
    "as it is": [],
    "of whole episodes, with a KL divergence": ["update.ratio=sequence", "kl.coefficient=0.1", "kl.place=loss"],
    "recomputed layers": ["policy.gradient_checkpointing=true"],
    "bfloat16": ["policy.dtype=bfloat16", "update.old_logprobs=recomputed"],
    "LoRA, with a critic on its trunk": [
        "lora.rank=4",
        "critic.trunk=shared",
        "kl.coefficient=0.1",
        "update.learning_rate=1e-3",
    ],
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each of two processes comes to: by kind, and where one fails."""
    return call(2, tmp_path_factory.mktemp("processes") / "two", "drawn_lessons:together", KINDS)


def flat(arrays):
    return np.concatenate([np.ravel(array) for array in arrays])


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_learn_what_one_learns(both, kind):
    alone = updates(KINDS[kind])
    tolerance = 2e-2 if kind == "bfloat16" else 1e-5
    for two in (kinds[kind] for kinds, _ in both):
        assert two.keys() == alone.keys()
        for name in alone.keys() - {"reports"}:
            one, other = flat(alone[name]), flat(two[name])
            assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(one), name
        np.testing.assert_allclose(two["reports"], alone["reports"], rtol=10 * tolerance, atol=tolerance)
    assert np.array_equal(flat(both[0][0][kind]["actor"]), flat(both[1][0][kind]["actor"]))


@pytest.fixture(scope="module")
def in_one(server, novice, tmp_path_factory):
    """A StarPO-S run of four iterations in one process."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    train(small(server, novice, folder))
    return folder


def in_several(config, folder, size=2):
    """Runs the command with some settings in several processes. Standard output and errors of each."""
    file = folder.with_suffix(".toml")
    file.write_text(to_toml(config))
    ended = wait(start(size, folder.with_suffix(".met"), "train", "--config", file))
    assert [status for status, _, _ in ended] == [0] * size, ended
    return [(out, err) for _, out, err in ended]


def assert_like(folder, other):
    """The same episodes were played, and metrics and weights are equal but for rounding."""
    for name in ("trajectories.jsonl", "validations.jsonl"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()
    for one, two in zip(timeless(folder), timeless(other), strict=True):
        assert one.keys() == two.keys()
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
    last, last_other = (checkpoints(each / "checkpoints")[-1] for each in (folder, other))
    assert last.name == last_other.name
    for file in ("model.safetensors", "training/critic.safetensors", "training/actor_optimiser.safetensors"):
        tensors, others = load_file(last / file), load_file(last_other / file)
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert others[name].shape == tensor.shape
        one, two = (torch.cat([each[name].flatten() for name in tensors]) for each in (tensors, others))
        assert torch.linalg.norm(two - one) <= 1e-4 * torch.linalg.norm(one), file


def test_a_run_of_two_processes_goes_on_in_one(in_one, server, novice, tmp_path):
    first, second = in_several(small(server, novice, tmp_path / "run", "run.iterations=2"), tmp_path / "run")
    assert "for each of 2 processes" in first[0]
    assert second[0] == ""
    assert [line["iteration"] for line in timeless(tmp_path / "run")] == [1, 2]
    train(small(server, novice, tmp_path / "run"), resume=True)
    assert_like(in_one, tmp_path / "run")


def test_a_run_of_one_process_goes_on_in_two(in_one, server, novice, tmp_path):
    train(small(server, novice, tmp_path / "run", "run.iterations=2"))
    arguments = ("train", "--resume", tmp_path / "run", "--set", "run.iterations=4")
    for status, _, err in wait(start(2, tmp_path / "met", *arguments)):
        assert status == 0, err
    assert_like(in_one, tmp_path / "run")


def test_a_killed_process_ends_the_run_and_nothing_is_lost(server, novice, tmp_path):
    config = small(server, novice, tmp_path / "run", "run.iterations=1000", "validation.every=0")
    (tmp_path / "run.toml").write_text(to_toml(config))
    processes = start(2, tmp_path / "met", "train", "--config", tmp_path / "run.toml")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 4):
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    (status, _, err), _ = wait(processes)
    assert status == 2
    assert "another of this run's 2 processes has ended" in err
    assert "Traceback" not in err
    before = timeless(tmp_path / "run")
    last = len(before) + 1
    train(resumable(tmp_path / "run", [f"run.iterations={last}"]), resume=True)
    after = timeless(tmp_path / "run")
    assert [line["iteration"] for line in after] == list(range(1, last + 1))
    kept = 2 * (len(before) // 2)
    assert after[:kept] == before[:kept]


def test_what_several_processes_cannot_do_is_refused_once(server, novice, tmp_path):
    config = small(server, novice, tmp_path / "run", "critic.trunk=shared")
    (tmp_path / "run.toml").write_text(to_toml(config))
    first, second = wait(start(2, tmp_path / "met", "train", "--config", tmp_path / "run.toml"))
    assert (first[0], second[0]) == (2, 2), (first, second)
    assert "critic.trunk=own" in first[2]
    assert (second[1], second[2]) == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("critic.trunk=shared", "critic.trunk=own"),
        ("run.device=cuda:1", "run.device=cuda"),
    ],
)
def test_refusals_say_what_to_set(setting, remedy):
    config = load_config(settings=[setting])
    check_processes(config, 1)
    with pytest.raises(ConfigError, match=remedy):
        check_processes(config, 2)


def test_processes_hear_of_each_others_failures(both):
    assert [told for _, told in both] == ["PeerError: process 1 failed: no such luck", "AssertionError: no such luck"]


def test_shares_follow_each_other_and_cost_about_the_same():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7):
        for count in (0, 1, 2, 5, 40):
            costs = rng.integers(1, 50, count)
            shares = [Group(rank, size).share(costs) for rank in range(size)]
            assert [index for share in shares for index in range(count)[share]] == list(range(count))
            if count:
                most = max(costs[share].sum() for share in shares)
                assert most <= costs.sum() / size + costs.max()


def test_an_estimate_for_several_processes_divides_what_they_share():
    config = load_config(preset="starpo_s", settings=["rollout.groups=8", "kl.coefficient=0.1"])
    shape, episode = Shape.of(load_policy("tiny").model), Episode(100, 50, 5, 2048)
    one, four = (estimate(shape, config, episode, processes) for processes in (1, 4))
    assert four.weights == 4 * shape.parameters + shape.parameters
    assert (four.optimiser, four.gradients) == (one.optimiser // 4, one.gradients // 4)
    assert four.critic == 3 * shape.trunk
    assert (four.reference, four.activations) == (one.reference, one.activations)
    assert four.cache <= one.cache
    adapted = load_config(preset="grpo", settings=["rollout.groups=8", "lora.rank=4"])
    one, four = (estimate(shape, adapted, episode, processes) for processes in (1, 4))
    assert (four.weights, four.optimiser, four.gradients) == (one.weights, one.optimiser, one.gradients)
    assert four.cache < one.cache
