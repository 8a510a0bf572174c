"""The memory that a run takes: by hand, as measured, and what is refused."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from small_runs import small

from turngym_trainer.config import Config
from turngym_trainer.memory import Episode, Shape, estimate, refuse_what_does_not_fit, savings
from turngym_trainer.policy import load_policy
from turngym_trainer.room import available, available_to_process
from turngym_trainer.settings import ConfigError, load_config
from turngym_trainer.train import train

SHAPE = Shape(
    parameters=1000, trunk=900, layers=2, hidden=8, feed_forward=16, queries=8, keys=4, vocabulary=50
)  # fmt: skip
EPISODE = Episode(prompt=30, turn=10, turns=3, positions=1000)
SETTINGS = (
    "rollout.groups=2",
    "rollout.group_size=4",
    "rollout.max_response_tokens=5",
    "update.minibatch_episodes=8",
    "update.microbatch_tokens=200",
    "validation.every=0",
)


def config_of(*settings):
    return load_config(settings=[*SETTINGS, *settings])


def test_a_run_by_hand():
    found = estimate(SHAPE, config_of("kl.coefficient=0.1"), EPISODE)
    assert found.weights == 4 * 1000
    assert found.optimiser == 8 * 1000
    assert found.reference == 4 * 1000
    assert found.critic == (4 + 8) * 900
    assert found.gradients == 4 * 1000
    # The longest context is 30 + 5 and two turns more of 10 + 5: 65. Of 8 rows, keys and values of 2 layers and one.
    assert found.cache == 2 * 4 * 3 * 4 * 65 * 8
    # Eight rows read 10 tokens each, or sample: 36 · 50 · 8.
    assert found.sampling == max(80 * (4 * (4 * 8 + 3 * 16) + 5 * 65), 36 * 50 * 8)
    # Two episodes behind one prompt: 30 + 2·35 = 100 wide, and two such sequences. 15 of each 35 are answers.
    layer = 2 * 12 * 8 + 16 * (8 + 16) + 4 * 100
    assert found.activations == 200 * (2 * layer + 100 + 8 * 8)
    assert found.logits == 20 * 50 * (200 * 30 // 100)
    update = found.gradients + found.activations + found.logits
    assert found.peak == 4000 + 8000 + 4000 + 10800 + max(update, found.cache + found.sampling)


def test_the_last_turn_as_context():
    found = estimate(SHAPE, config_of("rollout.context_turns=1", "update.microbatch_tokens=10_000"), EPISODE)
    # Four answers of 5 behind a prompt of 30; 8 episodes with three rows of 35 have 840 tokens, 120 of them taught.
    layer = 2 * 12 * 8 + 16 * (8 + 16) + 4 * 50
    assert found.activations == 840 * (2 * layer + 50 + 8 * 8)
    assert found.logits == 20 * 50 * 120
    assert found.cache == 2 * 4 * 3 * 4 * 35 * 8


@pytest.mark.parametrize(
    ("settings", "part", "expected"),
    [
        (["policy.dtype=bfloat16", "update.old_logprobs=recomputed"], "weights", 6 * 1000),
        (["policy.dtype=bfloat16", "update.old_logprobs=recomputed"], "gradients", 6 * 1000),
        (["policy.dtype=bfloat16", "update.old_logprobs=recomputed"], "critic", (6 + 8) * 900),
        (["critic.trunk=shared"], "critic", 0),
        (["advantage.kind=grpo"], "critic", 0),
        ([], "reference", 0),
        (["rollout.parts=2"], "cache", 2 * 4 * 3 * 4 * 65 * 8),
        (["rollout.parts=2", "rollout.keep_cache=false"], "cache", 2 * 4 * 3 * 4 * 65 * 4),
        (["rollout.reuse=2"], "cache", 2 * 4 * 3 * 4 * 65 * 16),
        (["validation.every=1", "validation.episodes=20"], "cache", 2 * 4 * 3 * 4 * 65 * 20),
        (
            ["policy.gradient_checkpointing=true"],
            "activations",
            200 * (2 * 4 * 8 + 2 * 12 * 8 + 16 * (8 + 16) + 400 + 100 + 64),
        ),
    ],
)
def test_parts_by_settings(settings, part, expected):
    assert getattr(estimate(SHAPE, config_of(*settings), EPISODE), part) == expected


def test_the_models_limit_bounds_its_context():
    short = Episode(prompt=30, turn=10, turns=3, positions=40)
    assert estimate(SHAPE, config_of(), short).cache == 2 * 4 * 3 * 4 * 40 * 8


def test_the_shape_of_tiny():
    policy = load_policy("tiny")
    shape = Shape.of(policy.model)
    count = sum(parameter.numel() for parameter in policy.model.parameters())
    assert shape == Shape(count, count, 4, 128, 256, 128, 128, policy.model.config.vocab_size)


def test_what_does_not_fit_is_refused_with_settings_that_do():
    config = config_of("update.microbatch_tokens=4096", "update.minibatch_episodes=8", "kl.coefficient=0.1")
    wide = Shape(parameters=1000, trunk=900, layers=2, hidden=800, feed_forward=1600, queries=8, keys=4, vocabulary=50)
    peak = estimate(wide, config, EPISODE).peak
    refuse_what_does_not_fit(wide, config, EPISODE, peak)
    with pytest.raises(ConfigError) as refused:
        refuse_what_does_not_fit(wide, config, EPISODE, int(peak * 0.7))
    message = str(refused.value)
    assert "it would fit with update.microbatch_tokens=256, or with policy.gradient_checkpointing=true" in message
    assert "run.check_memory=false" in message
    alternatives = savings(wide, config, EPISODE, int(peak * 0.7))
    for settings in alternatives:
        changed = config_of("update.microbatch_tokens=4096", "kl.coefficient=0.1", *settings)
        assert estimate(wide, changed, EPISODE).peak <= int(peak * 0.7)


def test_settings_that_fit_only_together_are_named_together():
    wide = Shape(parameters=1000, trunk=900, layers=2, hidden=800, feed_forward=1600, queries=8, keys=4, vocabulary=50)
    config = config_of("update.microbatch_tokens=4096")
    both = ("update.microbatch_tokens=256", "policy.gradient_checkpointing=true")
    available = estimate(wide, config_of(*both), EPISODE).peak
    assert savings(wide, config, EPISODE, available) == [both]
    with pytest.raises(ConfigError, match=r"no settings of this policy would fit; take a smaller policy\.model"):
        refuse_what_does_not_fit(wide, config, EPISODE, available // 100)


def test_a_model_of_many_weights_fits_with_lora():
    large = Shape(parameters=10**6, trunk=10**6, layers=2, hidden=8, feed_forward=16, queries=8, keys=4, vocabulary=50)
    config = config_of("kl.coefficient=0.1")
    assert savings(large, config, EPISODE, 5 * 10**6) == [("lora.rank=16", "critic.trunk=shared")]


MEASURE = """
import json, sys
import numpy as np, torch
from turngym_trainer.batch import lay_out
from turngym_trainer.memory import Episode, Shape, estimate
from turngym_trainer.policy import load_policy
from turngym_trainer.seeds import Place
from turngym_trainer.settings import load_config
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord
from turngym_trainer.update import Learner, Lesson

def memory(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

torch.set_num_threads(1)
config = load_config(settings=["rollout.context_turns=1", "rollout.max_response_tokens=40", *sys.argv[1:]])
policy = load_policy("tiny")
rng = np.random.default_rng(0)
turn = TurnRecord("", "", "", ("a",), 0.0, True, True, 1)
episodes = []
for index in range(48):
    ids, turns = rng.integers(0, 100, 140), np.repeat([-1, 0], [100, 40])
    rows = (Row(ids, turns >= 0, turns, np.where(turns >= 0, -4.6, 0).astype(np.float32)),)
    episodes.append(Trajectory("e", 0, index, 0, 0, "", None, True, False, "", rows, (turn,)))
batch = lay_out(episodes)
N, everyone = len(batch.logprobs), np.arange(48)
lesson = Lesson(batch, batch.logprobs, np.ones(N), values=np.zeros(N), targets=np.ones(N))
learner = Learner(policy, config, length_limit=40, with_critic=True, reference=None)
small = np.arange(1)
learner.update(lesson, actor_episodes=small, critic_episodes=small, place=Place(1))
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
learner.update(lesson, actor_episodes=everyone, critic_episodes=everyone, place=Place(2))
taken = memory("VmHWM") - before
found = estimate(Shape.of(policy.model), config, Episode(100, 100, 1, 2048))
print(json.dumps([taken, found.activations + found.logits]))
"""


def measured(*settings):
    script = [sys.executable, "-c", MEASURE, "update.minibatch_episodes=48", *settings]
    # Freed tensors go back to the system at once: what is measured is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=300, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("settings", [(), ("policy.gradient_checkpointing=true",)])
def test_an_update_takes_about_what_is_estimated(settings):
    taken, expected = measured("rollout.group_size=48", "rollout.groups=1", *settings)
    assert 0.6 * expected < taken < 1.1 * expected


def test_a_run_tells_its_memory_and_what_cannot_fit_is_refused(server, novice, tmp_path):
    lines = []
    train(small(server, novice, tmp_path / "fits", "run.iterations=1"), tell=lines.append)
    [line] = lines
    assert re.match(r"memory: \d+ MiB at most: weights 3 MiB, optimiser 6 MiB, reference 0 MiB, critic 9 MiB; ", line)
    # A group takes a little over a MiB, so this is about four times what there is.
    huge = (f"rollout.groups={4 * available(torch.device('cpu')) // 2**20}", "rollout.parts=1")
    with pytest.raises(ConfigError, match=r"memory: this run takes .* GiB at most: .*; there are .*rollout\.parts="):
        train(small(server, novice, tmp_path / "refused", *huge))
    assert not (tmp_path / "refused").exists()


def test_room_of_this_machine():
    if sys.platform.startswith("linux"):
        room = available(torch.device("cpu"))
        assert room is not None
        assert room > 2**20


def machine(tmp_path, group, files, available_kb=1000):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9999 kB\nMemAvailable: {available_kb} kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(group)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return available_to_process(tmp_path / "proc", tmp_path / "cgroup")


BOUND_2 = {"memory.max": "500000\n", "memory.current": "300000\n", "memory.stat": "anon 1\ninactive_file 100000\n"}
BOUND_1 = {
    "memory.limit_in_bytes": "500000\n",
    "memory.usage_in_bytes": "300000\n",
    "memory.stat": "cache 1\ntotal_inactive_file 100000\n",
}


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/\n", {}, 1_024_000),
        ("0::/a/b\n", {f"a/{name}": text for name, text in BOUND_2.items()}, 300_000),
        ("0::/a\n", {"a/memory.max": "max\n"}, 1_024_000),
        ("4:memory:/a\n1:cpu:/\n", {f"memory/a/{name}": text for name, text in BOUND_1.items()}, 300_000),
        ("0::/\n", {**BOUND_2, "memory.current": "900000\n"}, 0),
    ],
)
def test_a_control_group_bounds_the_room(group, files, expected, tmp_path):
    assert machine(tmp_path, group, files) == expected


def test_a_system_that_does_not_say_bounds_nothing(tmp_path):
    assert available_to_process(tmp_path, tmp_path) is None


def test_the_check_is_on_by_default():
    assert Config().run.check_memory
