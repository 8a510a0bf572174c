"""Whole runs against a real server: what they write, and that they can be killed at any moment."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from small_runs import Interruption, assert_same_run, breaking, small, stop_at, timeless
from transformers import AutoModelForCausalLM, AutoTokenizer

from turngym_client import Split, connect
from turngym_leaderboard.pages.trajectory_file import TrajectoryFile
from turngym_trainer.checkpoint import CheckpointError, checkpoints, read_state
from turngym_trainer.evaluate import choose_levels, wilson
from turngym_trainer.metrics import read_metrics
from turngym_trainer.settings import PRESETS, ConfigError, load_config, to_toml
from turngym_trainer.train import RunError, resumable, train


@pytest.fixture(scope="module")
def undisturbed(server, novice, tmp_path_factory):
    """A StarPO-S run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    train(small(server, novice, folder))
    return folder


def test_a_run_writes_what_it_promises(undisturbed, novice):
    metrics = read_metrics(undisturbed)
    assert [line["iteration"] for line in metrics] == [1, 2, 3, 4]
    first, last = metrics[0], metrics[-1]
    assert first["update/actor_steps"] == 0  # The first iteration trains the critic only.
    assert first["update/critic_steps"] > 0
    assert "average/update/entropy" not in first
    assert metrics[1]["average/update/entropy"] == metrics[1]["update/entropy"]
    assert last["update/actor_steps"] >= 1
    assert last["update/kept_episodes"] == 4  # One group of three: ⌈0.25 · 3⌉.
    assert last["train/episodes"] == 12
    assert last["update"] == 4
    assert last["optimiser_step"] == sum(line["update/optimiser_steps"] for line in metrics)
    assert 0.9 < last["update/ratio_max"] < 1.2
    for name in ("entropy", "gradient_norm", "clip_high", "clip_low", "explained_variance", "old_kl", "kept_tokens"):
        assert last[f"update/{name}"] is not None
    for name in ("group_std", "constant_groups", "valid_format", "valid_action", "reasoning_words", "lost"):
        assert last[f"train/{name}"] is not None
    assert 0 < last["train/distinct_3_within"] <= 1
    assert last["average/train/reward"] == pytest.approx(
        0.9 * metrics[2]["average/train/reward"] + 0.1 * last["train/reward"]
    )
    assert last["clock"]["waiting_seconds"] > 0
    assert [("validation/success" in line) for line in metrics] == [False, True, False, True]
    assert last["validation/episodes"] == 4

    episodes = [json.loads(line) for line in (undisturbed / "trajectories.jsonl").read_text().splitlines()]
    assert len(episodes) == 4 * 12
    assert {(e["iteration"], e["group"], e["member"]) for e in episodes} == {
        (i, g, m) for i in range(1, 5) for g in range(3) for m in range(4)
    }
    assert len({e["level_seed"] for e in episodes}) == 12
    assert len({e["noise_seed"] for e in episodes}) == 48
    for episode in episodes:
        charged = sum(not (turn["valid_format"] and turn["valid_action"]) for turn in episode["turns"])
        assert episode["reward"] == pytest.approx(episode["environment_return"] - 0.1 * charged)
        assert len(episode["digest"]) == 64
        assert "\n" in episode["last_observation"]
    viewed = TrajectoryFile(undisturbed)
    viewed.refresh()
    assert not viewed.notices
    assert [(row.turns, row.verdict == "solved") for row in viewed.rows] == [
        (len(episode["turns"]), episode["success"]) for episode in episodes
    ]
    assert viewed.episode(48).last == episodes[47]["last_observation"]
    assert sum(e["kept"] for e in episodes if e["iteration"] == 4) == 4
    played = [json.loads(line) for line in (undisturbed / "validations.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in played] == [2, 4]
    for line, summary in zip(played, (metrics[1], metrics[3]), strict=True):
        assert sum(level["success"] for level in line["levels"]) == summary["validation/successes"]
        assert len({level["world_id"] for level in line["levels"]}) == 4
        assert [level["level_seed"] for level in line["levels"]] == [
            level["level_seed"] for level in played[0]["levels"]
        ]
    assert list((undisturbed / "tensorboard").glob("events.*"))
    assert [path.name for path in checkpoints(undisturbed / "checkpoints")] == ["iteration-000002", "iteration-000004"]
    assert not list((undisturbed / "checkpoints").glob(".*"))


def test_transformers_loads_a_checkpoint_without_us(undisturbed, novice):
    last = checkpoints(undisturbed / "checkpoints")[-1]
    model = AutoModelForCausalLM.from_pretrained(last)
    tokenizer = AutoTokenizer.from_pretrained(last)
    ids = tokenizer("<think>", return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
    before = AutoModelForCausalLM.from_pretrained(novice)
    assert not torch.equal(model.get_input_embeddings().weight, before.get_input_embeddings().weight)
    assert not [path for path in last.rglob("*") if path.suffix in {".bin", ".pt", ".pkl", ".pth"}]


def test_a_run_is_a_function_of_its_settings(undisturbed, server, novice, tmp_path):
    train(small(server, novice, tmp_path / "again", "run.trajectories_every=1"))
    assert_same_run(undisturbed, tmp_path / "again")
    train(small(server, novice, tmp_path / "other", "run.seed=1"))
    assert timeless(undisturbed) != timeless(tmp_path / "other")


@pytest.mark.parametrize("iteration", [1, 3], ids=["before the first checkpoint", "between two"])
def test_a_resumed_run_equals_an_undisturbed_one(undisturbed, server, novice, tmp_path, iteration):
    config = small(server, novice, tmp_path / "run")
    with pytest.raises(Interruption):
        train(config, observe=stop_at(iteration))
    assert len(read_metrics(tmp_path / "run")) == iteration
    train(config, resume=True)
    assert_same_run(undisturbed, tmp_path / "run")


@pytest.mark.parametrize("preset", ["starpo", "grpo"])
def test_the_other_presets_resume_as_exactly(server, novice, tmp_path, preset):
    configs = [
        small(
            server,
            novice,
            tmp_path / name,
            "run.iterations=3",
            "validation.every=0",
            "critic.trunk=shared",
            "update.old_logprobs=recomputed",
            preset=preset,
        )
        for name in ("undisturbed", "resumed")
    ]
    train(configs[0])
    with pytest.raises(Interruption):
        train(configs[1], observe=stop_at(3))
    train(configs[1], resume=True)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "resumed")
    last = read_metrics(tmp_path / "resumed")[-1]
    assert last["update/actor_steps"] > 0
    assert last["update/reference_gap"] != 0
    assert 0 < last["update/sampler_gap"] < 1e-5


def test_a_bfloat16_run_keeps_its_weights_in_float32_and_resumes_as_exactly(server, novice, tmp_path):
    settings = ["policy.dtype=bfloat16", "update.old_logprobs=recomputed", "run.iterations=3", "validation.every=0"]
    configs = [small(server, novice, tmp_path / name, *settings, preset="starpo") for name in ("whole", "cut")]
    train(configs[0])
    with pytest.raises(Interruption):
        train(configs[1], observe=stop_at(3))
    train(configs[1], resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    last = checkpoints(tmp_path / "cut" / "checkpoints")[-1]
    for file in (last / "model.safetensors", last / "training" / "critic.safetensors"):
        tensors = load_file(file)
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors.values())
    assert json.loads((last / "config.json").read_text())["dtype"] == "float32"


def test_a_run_with_a_kept_cache_resumes_as_exactly(server, novice, tmp_path):
    configs = [
        small(server, novice, tmp_path / name, "run.iterations=3", "rollout.context_turns=0")
        for name in ("undisturbed", "resumed")
    ]
    train(configs[0])
    with pytest.raises(Interruption):
        train(configs[1], observe=stop_at(3))
    train(configs[1], resume=True)
    assert_same_run(tmp_path / "undisturbed", tmp_path / "resumed")
    assert read_metrics(tmp_path / "resumed")[-1]["update/ratio_max"] == pytest.approx(1, abs=1e-4)


def test_kill_9_at_any_moment_loses_nothing(undisturbed, server, novice, tmp_path):
    """The process is killed three times, at random moments, in rollouts, updates and checkpoints."""
    folder = tmp_path / "killed"
    file = tmp_path / "run.toml"
    file.write_text(to_toml(small(server, novice, folder)), encoding="utf-8")
    command = [sys.executable, "-m", "turngym_trainer.cli", "train"]
    moments = random.Random(3)
    kills = 0
    resume: list[str] = ["--config", str(file)]
    while True:
        process = subprocess.Popen(
            [*command, *resume],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if kills < len(KILLED_AFTER):
            while process.poll() is None and _lines(folder) < KILLED_AFTER[kills]:
                time.sleep(0.005)
            time.sleep(moments.uniform(0.0, 0.3))
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        kills += 1
        if (folder / "config.toml").exists():
            resume = ["--resume", str(folder)]
    assert kills >= 2
    assert_same_run(undisturbed, folder)


KILLED_AFTER = (0, 2, 3)
"""Lines of metrics.jsonl that are awaited before each kill; checkpoints follow the second and the fourth."""


def _lines(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else -1


def test_a_run_does_not_write_over_another(undisturbed, server, novice):
    with pytest.raises(RunError, match="holds a run already; resume it"):
        train(small(server, novice, undisturbed))


def test_resume_wants_a_run_and_its_settings(undisturbed, server, novice, tmp_path):
    with pytest.raises(RunError, match="holds no run to resume"):
        train(small(server, novice, tmp_path / "nothing"), resume=True)
    with pytest.raises(RunError, match="holds no run to resume"):
        resumable(tmp_path / "nothing", [])
    with pytest.raises(RunError, match=r"update\.epochs: cannot be changed on resume"):
        train(resumable(undisturbed, ["update.epochs=2"]), resume=True)


def test_a_run_may_be_made_longer(undisturbed, tmp_path):
    folder = tmp_path / "longer"
    shutil.copytree(undisturbed, folder)
    train(resumable(folder, ["run.iterations=5"]), resume=True)
    assert [line["iteration"] for line in read_metrics(folder)] == [1, 2, 3, 4, 5]


def test_another_environment_is_refused(undisturbed, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(undisturbed, folder)
    state = checkpoints(folder / "checkpoints")[-1] / "training" / "state.json"
    content = json.loads(state.read_text())
    content["environment"]["version"] = "0.0"
    state.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"version was 0\.0, is"):
        train(resumable(folder, ["run.iterations=5"]), resume=True)


def test_other_packages_are_told(undisturbed, tmp_path, caplog):
    folder = tmp_path / "updated"
    shutil.copytree(undisturbed, folder)
    state = checkpoints(folder / "checkpoints")[-1] / "training" / "state.json"
    content = json.loads(state.read_text())
    content["versions"]["torch"] = "1.0"
    state.write_text(json.dumps(content))
    train(resumable(folder, []), resume=True)
    assert "torch was 1.0, is" in caplog.text


def test_a_wanted_version_is_checked(server, novice, tmp_path):
    with pytest.raises(RunError, match=r"environment\.version asks for 99"):
        train(small(server, novice, tmp_path / "run", "environment.version='99'"))


def test_files_that_were_cut_are_noticed(undisturbed, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(undisturbed, folder)
    with (folder / "metrics.jsonl").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(ValueError, match="has 10 bytes"):
        train(resumable(folder, ["run.iterations=5"]), resume=True)


def test_a_folder_that_is_no_checkpoint_says_so(novice):
    with pytest.raises(CheckpointError, match="is no checkpoint of a training run"):
        read_state(novice)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_updates(server, novice, tmp_path, preset):
    settings = ["run.iterations=2", "validation.every=0", "checkpoint.every=2"]
    train(small(server, novice, tmp_path / "run", *settings, preset=preset))
    last = read_metrics(tmp_path / "run")[-1]
    assert last["update/actor_steps"] > 0
    assert last["update/gradient_norm"] > 0
    assert last["update/refused"] == 0
    newest = tmp_path / "run" / "checkpoints" / "iteration-000002"
    model, before = (load_file(folder / "model.safetensors") for folder in (newest, novice))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.items())


def test_a_policy_that_cannot_be_read_is_told_before_the_first_update(server, tmp_path):
    with pytest.raises(RunError) as error:
        train(small(server, "tiny", tmp_path / "run"))
    assert "none of 36 answers could be parsed" in str(error.value)
    assert re.search(r"Read were for example ['\"]<think>", str(error.value))
    assert "Warm start first (`trainer warm-start`" in str(error.value)
    assert read_metrics(tmp_path / "run") == []


def test_a_context_that_holds_no_turn_is_refused_before_anything_is_written(server, novice, tmp_path):
    with pytest.raises(ConfigError, match=r"reads at most 2048 tokens, but the first turn of sokoban takes 2[0-9] for"):
        train(small(server, novice, tmp_path / "run", "rollout.max_response_tokens=2030"))
    assert not (tmp_path / "run").exists()


def test_groups_that_fare_alike_teach_grpo_nothing(server, tmp_path):
    """An untrained policy fails everywhere alike: no step is taken, and the counters say so."""
    folder = tmp_path / "run"
    settings = ["run.iterations=1", "validation.every=0", "kl.coefficient=0", "rollout.stop_unreadable=false"]
    train(small(server, "tiny", folder, *settings, preset="grpo"))
    (line,) = read_metrics(folder)
    assert (line["iteration"], line["update"], line["optimiser_step"]) == (1, 0, 0)
    assert line["train/constant_groups"] == 1
    assert line["train/valid_format"] == 0
    assert line["train/reward"] == pytest.approx(line["train/environment_return"] - 0.3)


def test_the_filter_still_lets_the_critic_learn(server, tmp_path):
    folder = tmp_path / "run"
    settings = ["run.iterations=2", "validation.every=0", "critic.warmup_iterations=0", "rollout.stop_unreadable=false"]
    train(small(server, "tiny", folder, *settings))
    for line in read_metrics(folder):
        assert line["update/kept_episodes"] == 0
        assert line["update/actor_steps"] == 0
        assert line["update/critic_steps"] == 3  # 12 episodes in mini-batches of at most 5.


def test_bandit_runs_on_split_all(server, tmp_path):
    folder = tmp_path / "run"
    settings = ["environment.id=bandit", "environment.split=all", "validation.split=all", "run.iterations=1"]
    train(small(server, "tiny", folder, *settings, "validation.every=1", "rollout.stop_unreadable=false"))
    (line,) = read_metrics(folder)
    assert line["validation/episodes"] == 4
    assert line["train/turns"] == 1


def test_validation_levels_are_distinct_worlds_of_their_split(server):
    config = load_config(settings=["environment.id=sokoban"])
    with connect(server) as client:
        levels = choose_levels(client, config.environment, Split.VALIDATION, run_seed=0, count=24)
        again = choose_levels(client, config.environment, Split.VALIDATION, run_seed=0, count=12)
        worlds = {
            client.reset("sokoban", split=Split.VALIDATION, level_seed=level, noise_seed=0).world_id for level in levels
        }
    assert len(levels) == len(worlds) == 24
    assert again == levels[:12]


def test_wilson_by_hand():
    # p = 1/2 of 4: centre stays 1/2; half-width z·√(1/16 + z²/64)/(1 + z²/4) with z = 2: 2·√(1/8)/2 = 0.35355.
    low, high = wilson(2, 4, z=2.0)
    assert (low, high) == (pytest.approx(0.5 - 0.125**0.5), pytest.approx(0.5 + 0.125**0.5))
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)


def alarms(folder):
    return [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def warned(server, novice, tmp_path_factory):
    """A run that collapsed, whose guard only warned."""
    folder = tmp_path_factory.mktemp("runs") / "warned"
    train(breaking(server, novice, folder))
    return folder


def test_a_collapse_is_told_with_its_signals_and_three_episodes(warned):
    [alarm] = [each for each in alarms(warned) if each["kind"] == "format"]
    assert 1 <= alarm["since"] < alarm["iteration"] <= 8
    assert alarm["attempt"] == 0
    report = (warned / f"collapse-{alarm['iteration']:06d}.md").read_text()
    assert f"- format, since iteration {alarm['since']}: " in report
    assert f"\n| {alarm['iteration']} | " in report
    for name in ("lowest", "middle", "highest"):
        assert f"## The episode of {name} return: " in report
    assert read_metrics(warned)[-1]["iteration"] == 8  # It went on.


def test_the_guard_is_resumed_as_exactly(warned, server, novice, tmp_path):
    at = alarms(warned)[0]["iteration"]
    with pytest.raises(Interruption):
        train(breaking(server, novice, tmp_path / "run"), observe=stop_at(at - 1))
    with pytest.raises(Interruption):
        train(resumable(tmp_path / "run", []), resume=True, observe=stop_at(at + 1))
    train(resumable(tmp_path / "run", []), resume=True)
    assert_same_run(tmp_path / "run", warned)
    assert alarms(tmp_path / "run") == alarms(warned)


def test_a_guard_that_stops(warned, server, novice, tmp_path):
    first = alarms(warned)[0]["iteration"]
    config = breaking(server, novice, tmp_path / "run", "guard.on_alarm=stop")
    with pytest.raises(RunError, match=f"stopped by the guard at iteration {first}: .*guard.on_alarm=warn"):
        train(config)
    assert [line["iteration"] for line in read_metrics(tmp_path / "run")] == list(range(1, first + 1))
    # As the message says: with another setting it goes on, as if nothing had been.
    train(resumable(tmp_path / "run", ["guard.on_alarm=warn"]), resume=True)
    assert timeless(tmp_path / "run") == timeless(warned)


def test_a_rollback_goes_back_before_the_cause_with_other_seeds_and_a_lower_rate(
    warned, server, novice, tmp_path, caplog
):
    first = min(alarms(warned), key=lambda alarm: alarm["iteration"])
    config = breaking(server, novice, tmp_path / "run", "guard.on_alarm=rollback", "guard.rate_factor=0.001")
    last = train(config)
    assert read_state(last).progress.attempt == 1
    told = alarms(tmp_path / "run")
    assert told[0]["iteration"] == first["iteration"]
    before = told[0]["since"] - 1
    assert f"back to iteration-{before:06d}, rollback 1 of 3" in caplog.text
    rolled, disturbed = timeless(tmp_path / "run"), timeless(warned)
    assert [line["iteration"] for line in rolled] == list(range(1, 9))
    assert rolled[:before] == disturbed[:before]
    assert (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()[0] not in (
        warned / "trajectories.jsonl"
    ).read_text()
    # At a thousandth of the rate what it knew is not forgotten.
    assert rolled[-1]["train/valid_format"] > disturbed[-1]["train/valid_format"] + 0.3


def test_a_rolled_back_run_resumes_as_exactly(server, novice, tmp_path):
    settings = ["guard.on_alarm=rollback", "guard.rate_factor=0.001"]
    train(breaking(server, novice, tmp_path / "whole", *settings))
    at = alarms(tmp_path / "whole")[0]["iteration"]
    config = breaking(server, novice, tmp_path / "cut", *settings)
    interruption = stop_at(at + 1)  # Beyond the alarm it comes here in its second attempt only.
    with pytest.raises(Interruption):
        train(config, observe=interruption)
    train(resumable(tmp_path / "cut", []), resume=True)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_rollbacks_end(server, novice, tmp_path):
    config = breaking(
        server, novice, tmp_path / "run", "guard.on_alarm=rollback", "guard.rollbacks=1", "guard.rate_factor=1.0"
    )
    with pytest.raises(RunError, match="stopped by the guard"):
        train(config)
    assert [alarm["attempt"] for alarm in alarms(tmp_path / "run")] == [0, 1]


PHASES = [
    "run.iterations=5",
    "checkpoint.every=1",
    "validation.every=1",
    "diagnostics.every=2",
    "update.schedule=cosine",
]
PHASED = {
    "by iterations": ["horizon.turns=[1, 2, 3]", "horizon.iterations=2"],
    # At this rate validations come out alike, so each second one ends a phase.
    "by validation": [
        "horizon.turns=[1, 2, 3]",
        "horizon.until=validation",
        "horizon.patience=1",
        "update.learning_rate=1e-6",
    ],
    "from a checkpoint of the phase before": ["horizon.turns=[1, 2, 3]", "horizon.iterations=2", "checkpoint.every=3"],
}


@pytest.mark.parametrize("until", PHASED)
def test_a_run_of_phases_resumes_as_exactly_in_each_and_between_them(server, novice, tmp_path, until):
    settings = [*PHASES, *PHASED[until]]
    train(small(server, novice, tmp_path / "whole", *settings, preset="grpo"))
    lines = read_metrics(tmp_path / "whole")
    turns = [line["train/max_turns"] for line in lines]
    assert turns == [1, 1, 2, 2, 3]
    assert all(line["train/turns"] <= line["train/max_turns"] for line in lines)
    assert [line["iteration"] for line in lines if "template/retrieval" in line] == [2, 4, 5]
    folder = tmp_path / "cut"
    config = small(server, novice, folder, *settings, preset="grpo")
    # At the end of each iteration, so also between two phases.
    for iteration in range(1, 5):
        with pytest.raises(Interruption):
            train(config, resume=iteration > 1, observe=stop_at(iteration))
    train(resumable(folder, []), resume=True)
    assert_same_run(folder, tmp_path / "whole")


def test_phases_of_more_turns_than_validations_play_are_refused(server, novice, tmp_path):
    config = small(server, novice, tmp_path / "run", "horizon.turns=[2, 4]", "horizon.iterations=2")
    with pytest.raises(ConfigError, match="the last phase has 4 turns, validations and the environment 3"):
        train(config)
    assert not (tmp_path / "run").exists()
