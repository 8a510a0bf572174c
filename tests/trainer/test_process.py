"""What is added for reasoning that is too short, and by a function of the user's."""

import json
import sys
from pathlib import Path

import pytest
from small_runs import Interruption, assert_same_run, small, stop_at

from turngym_trainer.config import RewardConfig
from turngym_trainer.metrics import read_metrics
from turngym_trainer.process import load_judge
from turngym_trainer.reward import shaping
from turngym_trainer.settings import ConfigError, load_config
from turngym_trainer.train import RunError, resumable, train
from turngym_trainer.trajectory import TurnRecord


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("hint_rewards", None)


def turn(tokens, *, valid_format=True, process=None):
    return TurnRecord("", "", "", ("a",), 1.0, valid_format, True, 1, reasoning_tokens=tokens, process=process)


def test_reasoning_under_the_floor_is_charged_once():
    config = RewardConfig(length_floor=3, below_floor=-0.05)
    assert shaping(turn(2), config) == -0.05
    assert shaping(turn(3), config) == 0.0
    assert shaping(turn(0, valid_format=False), config) == -0.1  # It may have been cut off while it reasoned.
    assert shaping(turn(0), RewardConfig()) == 0.0


def test_a_process_reward_is_added_with_its_weight():
    assert shaping(turn(0, process=2.0), RewardConfig(process_weight=-0.25)) == -0.5
    assert shaping(turn(0, valid_format=False, process=0.0), RewardConfig()) == -0.1


def test_a_floor_that_would_teach_answers_that_cannot_be_parsed_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.below_floor: -0\.2 .* worse than .* -0\.1, and would teach those"):
        load_config(settings=["reward.length_floor=3", "reward.below_floor=-0.2"])
    load_config(settings=["reward.below_floor=-0.2"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hint_rewards", "expected package.module:function, got 'hint_rewards'"),
        (":raising", "expected package.module:function"),
        ("hint_rewards:", "expected package.module:function"),
        ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError.*set PYTHONPATH"),
        ("hint_rewards:nothing", "has no attribute 'nothing'; name a function of hint_rewards"),
        ("hint_rewards:RATE", "expected a function, got 0.5"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_anything_is_written(server, novice, tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        train(small(server, novice, tmp_path / "run", f"reward.process='{name}'"))
    assert not (tmp_path / "run").exists()


def test_a_module_that_raises_as_it_is_imported_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"broken_rewards cannot be imported: ZeroDivisionError"):
        load_judge("broken_rewards:f")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raising", r"hint_rewards:raising raised KeyError\('sokoban'\) on turn 1 of an episode of sokoban \(level"),
        ("not_finite", "hint_rewards:not_finite returned nan for turn 1 of .*expected a finite number"),
        ("no_number", "hint_rewards:no_number returned 'good' for turn 1 of .*expected a finite number"),
    ],
)
def test_a_function_that_fails_stops_the_run(server, novice, tmp_path, function, message):
    with pytest.raises(RunError, match=message):
        train(small(server, novice, tmp_path / "run", f"reward.process='hint_rewards:{function}'"))
    assert read_metrics(tmp_path / "run") == []


SHAPED = [
    "reward.process='hint_rewards:of_the_turn'",
    "reward.process_weight=0.5",
    "reward.length_floor=11",
    "reward.below_floor=-0.03",
    "checkpoint.every=1",
    "rollout.refills=1",
    "rollout.reuse=2",
    "validation.every=4",
]


def test_what_is_added_is_kept_apart_and_resumes_as_exactly(server, novice, tmp_path):
    whole = tmp_path / "whole"
    train(small(server, novice, whole, *SHAPED))
    lines = read_metrics(whole)
    episodes = [json.loads(line) for line in (whole / "trajectories.jsonl").read_text().splitlines()]
    for episode in episodes:
        added = 0.0
        for each in episode["turns"]:
            told = 0.5 * len(each["actions"]) + 0.01 * len(each["reasoning"])
            assert each["process"] == pytest.approx(told + 0.001 * each["observation"].count("#") + each["reward"])
            added += 0.5 * each["process"] - 0.1 * (not (each["valid_format"] and each["valid_action"]))
            added -= 0.03 * each["valid_format"]
        assert episode["environment_return"] == pytest.approx(sum(each["reward"] for each in episode["turns"]))
        assert episode["reward"] == pytest.approx(episode["environment_return"] + added)
    for line in lines:
        own = [episode for episode in episodes if episode["iteration"] == line["iteration"]]
        sums = [sum(each["process"] for each in episode["turns"]) for episode in own]
        assert line["train/process_reward"] == pytest.approx(sum(sums) / len(own))
        assert line["train/below_floor"] == pytest.approx(line["train/valid_format"])
    folder = tmp_path / "cut"
    with pytest.raises(Interruption):
        train(small(server, novice, folder, *SHAPED), observe=stop_at(4))
    train(resumable(folder, []), resume=True)
    assert_same_run(whole, folder)


def test_the_floor_counts_tokens_of_the_policy(server, novice, tmp_path):
    for floor, share in ((1, 0.0), (11, 1.0)):
        folder = tmp_path / str(floor)
        settings = [f"reward.length_floor={floor}", "run.iterations=1", "validation.every=0"]
        train(small(server, novice, folder, *settings))
        [line] = read_metrics(folder)
        if share:
            assert line["train/below_floor"] == line["train/valid_format"] > 0
        else:
            assert line["train/below_floor"] < line["train/valid_format"]
