"""Several environments in one run: their shares of the groups, and that nothing of one gets into another."""

import json
import shutil

import numpy as np
import pytest
from small_runs import Interruption, assert_same_run, small, stop_at
from typer.testing import CliRunner

from turngym_client import connect
from turngym_trainer.checkpoint import CheckpointError, checkpoints
from turngym_trainer.cli import app
from turngym_trainer.compare import difference
from turngym_trainer.config import WarmStartConfig
from turngym_trainer.evaluate import Evaluation, pooled
from turngym_trainer.facts import read_facts
from turngym_trainer.metrics import read_metrics
from turngym_trainer.mixture import allotted, demonstrated, environments, weights_at
from turngym_trainer.policy import load_policy
from turngym_trainer.recorded import read_run
from turngym_trainer.report import report
from turngym_trainer.settings import ConfigError, config_from_tree, config_tree, load_config, to_toml
from turngym_trainer.train import resumable, train
from turngym_trainer.warm_start import demonstrate, warm_start

TWO = (
    '[{id="sokoban", max_turns=3, weight=[3, 1]}, {id="sokoban", name="short", max_turns=2, weight=[1.0, 3.0], '
    "reward_scale=0.25}]"
)


def mixed(*entries, settings=()):
    return load_config(settings=[f"mixture.environments=[{', '.join(entries)}]", *settings])


def test_weights_go_from_one_to_the_other():
    config = load_config(settings=[f"mixture.environments={TWO}", "mixture.iterations=5"]).mixture
    assert weights_at(config, 1).tolist() == [0.75, 0.25]
    assert weights_at(config, 3).tolist() == [0.5, 0.5]
    assert weights_at(config, 5).tolist() == weights_at(config, 50).tolist() == [0.25, 0.75]
    constant = mixed('{id="a"}', '{id="b", weight=3}', settings=["mixture.iterations=1"]).mixture
    assert weights_at(constant, 1).tolist() == weights_at(constant, 9).tolist() == [0.25, 0.75]


def test_shares_are_rounded_up_or_down_and_exact_in_the_mean():
    config = mixed('{id="a", weight=[5]}', '{id="b", weight=[0]}', '{id="c", weight=[2]}', '{id="d", weight=[0]}')
    counts = np.array([np.bincount(allotted(config, iteration, 8), minlength=4) for iteration in range(1, 2001)])
    assert set(counts[:, 0]) == {5, 6}  # 5/7 of 8 is 5.71.
    assert set(counts[:, 2]) == {2, 3}
    assert (counts[:, [1, 3]] == 0).all()
    assert counts.mean(axis=0) == pytest.approx([40 / 7, 0, 16 / 7, 0], abs=0.05)
    assert np.array_equal(allotted(config, 7, 8), np.sort(allotted(config, 7, 8)))
    assert np.array_equal(allotted(config, 7, 8), allotted(config, 7, 8))
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
    assert any(not np.array_equal(allotted(config, i, 8), allotted(other, i, 8)) for i in range(1, 20))
    assert allotted(load_config(), 7, 8).tolist() == [0] * 8


def test_each_environment_alone_has_the_settings_of_the_run():
    config = mixed('{id="sokoban", options={boxes=2}, max_turns=4}', '{id="sokoban", name="s"}')
    alone = environments(config)
    assert list(alone) == ["sokoban", "s"]
    assert alone["sokoban"].environment.options == {"boxes": 2}
    assert alone["s"].environment.id == "sokoban"
    assert alone["s"].rollout == config.rollout
    assert environments(alone["s"]) == {"sokoban": alone["s"]}
    assert environments(load_config()) == {"sokoban": load_config()}


def test_a_mixture_reads_back_the_same(tmp_path):
    config = load_config(settings=[f"mixture.environments={TWO}"])
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(file=tmp_path / "config.toml") == config
    assert config_from_tree(config_tree(config)) == config


@pytest.mark.parametrize(
    ("entries", "settings", "message"),
    [
        (['{id="a"}', '{id="a"}'], [], 'a is there more than once; give each a name of its own, for example {id = "a"'),
        (['{id="a", name="b"}', '{id="b"}'], [], "b is there more than once"),
        (['{id="a", name="b/c"}'], [], "mixture.environments.0.name"),
        (['{id="a", weight=[0, 1]}'], [], "the weights sum to 0"),
        (['{id="a", weight=0}', '{id="b", weight=0}'], [], "the weights sum to 0"),
        (['{id="a", weight=[]}'], [], "mixture.environments.0.weight"),
        (['{id="a", weight=[1, 2, 3]}'], [], "mixture.environments.0.weight"),
        (['{id="a", weight=[-1]}'], [], "mixture.environments.0.weight"),
        (['{id="a", reward_scale=0}'], [], "mixture.environments.0.reward_scale"),
        (['{id="a", turns=3}'], [], "unknown setting 'mixture.environments.0.turns'"),
        (['{id="a"}'], ["environment.max_turns=3"], "environment.max_turns: a mixture names its environments itself"),
        (['{id="a"}', '{id="b", split="all"}'], [], "has met the worlds of validation"),
    ],
)
def test_what_makes_no_sense_is_refused(entries, settings, message):
    with pytest.raises(ConfigError) as error:
        mixed(*entries, settings=settings)
    assert message in str(error.value)


def test_evaluations_are_pooled():
    one = Evaluation(3, 1, 3, 1.0, 0.4, 1.0, 2.0, 1.0, 0.5, ())
    other = Evaluation(1, 0, 0, 0.0, 0.0, 0.8, -2.0, 0.0, 0.5, ())
    both = pooled([one, other])
    assert (both.episodes, both.lost, both.successes, both.success) == (4, 1, 3, 0.75)
    assert (both.environment_return, both.valid_format, both.valid_action) == (1.0, 0.75, 0.5)
    assert both.low < 0.75 < both.high


MIXED = [f"mixture.environments={TWO}", "mixture.iterations=3", "rollout.groups=4", "rollout.refills=1"]


def in_mixture(server, novice, folder, *settings):
    config = small(server, novice, folder, "checkpoint.every=1", *settings)
    tree = {key: value for key, value in config_tree(config).items() if key != "environment"}
    return load_config(base=tree, settings=MIXED)


@pytest.fixture(scope="module")
def whole(server, novice, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(in_mixture(server, novice, folder))
    return folder


def test_groups_are_of_one_environment_and_told_of_each(whole):
    config = read_run(whole).config
    lines, episodes = read_metrics(whole), list(read_run(whole).episodes())
    for line in lines:
        of = allotted(config, line["iteration"], 4)
        played = [e for e in episodes if e["iteration"] == line["iteration"]]
        assert {(e["group"], e["environment"]) for e in played} == {
            (group, ("sokoban", "short")[of[group]]) for group in range(4)
        }
        for number, name in enumerate(("sokoban", "short")):
            own = [e for e in played if e["environment"] == name]
            assert line.get(f"train/{name}/groups", 0) == (of == number).sum()
            if own:
                assert line[f"train/{name}/reward"] == pytest.approx(np.mean([e["reward"] for e in own]))
                assert line[f"train/{name}/turns"] <= (3, 2)[number]
            for e in own:
                charged = sum(not (turn["valid_format"] and turn["valid_action"]) for turn in e["turns"])
                assert e["reward"] == pytest.approx((1.0, 0.25)[number] * e["environment_return"] - 0.1 * charged)
        # A quarter of each environment's groups: one of each.
        kept = {(e["environment"], e["group"]) for e in played if e["kept"]}
        assert len(kept) == len({name for name, _ in kept})
    assert {e["environment"] for e in episodes} == {"sokoban", "short"}
    last = lines[-1]
    assert last["validation/episodes"] == 8
    assert last["validation/sokoban/episodes"] == last["validation/short/episodes"] == 4
    assert last["validation/successes"] == last["validation/sokoban/successes"] + last["validation/short/successes"]
    facts = read_facts(whole)
    assert [each.limits["max_turns"] for each in (facts.environment, *facts.others)] == [3, 2]


def test_a_mixture_resumes_as_exactly(whole, server, novice, tmp_path):
    config = in_mixture(server, novice, tmp_path / "cut")
    for iteration in (1, 3):
        with pytest.raises(Interruption):
            train(config, resume=iteration > 1, observe=stop_at(iteration))
    train(resumable(tmp_path / "cut", []), resume=True)
    assert_same_run(whole, tmp_path / "cut")


def test_every_environment_must_be_as_it_was(whole, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(whole, folder)
    state = checkpoints(folder / "checkpoints")[-1] / "training" / "state.json"
    content = json.loads(state.read_text())
    [other] = content["others"]
    other["version"] = "0.0"
    state.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"version was 0\.0, is"):
        train(resumable(folder, ["run.iterations=5"]), resume=True)


def test_with_reuse_each_iteration_has_its_own_shares(server, novice, tmp_path):
    train(in_mixture(server, novice, tmp_path / "run", "rollout.reuse=2", "validation.every=0"))
    config = read_run(tmp_path / "run").config
    for episode in read_run(tmp_path / "run").episodes():
        number = allotted(config, episode["iteration"], 4)[episode["group"] % 4]
        assert episode["environment"] == ("sokoban", "short")[number]


def test_what_reads_a_mixture_tells_of_each(whole, monkeypatch):
    run = read_run(whole)
    assert {name for name, _, _ in run.levels()} == {"sokoban", "short"}
    assert len(run.levels()) == 8
    assert difference(run, run).worlds == 8
    page = report(run, [])
    assert "trained in sokoban (split train), short (split train)" in page
    assert "of it short" in page
    monkeypatch.setenv("COLUMNS", "200")
    newest = str(checkpoints(whole / "checkpoints")[-1])
    told = CliRunner().invoke(app, ["eval", newest, "--episodes", "2"])
    assert told.exit_code == 0, told.output
    for name in ("sokoban", "short", "all"):
        assert f" {name} " in told.output


def test_each_environment_has_its_share_of_the_demonstrations():
    config = mixed(
        '{id="a", weight=[1, 0]}', '{id="b", weight=[0, 2]}', '{id="c", weight=[1, 2]}', '{id="d", weight=[0]}'
    )
    assert np.bincount(demonstrated(config, 40), minlength=4).tolist() == [10, 10, 20, 0]
    assert np.bincount(demonstrated(config, 6), minlength=4).sum() == 6
    assert demonstrated(load_config(), 3).tolist() == [0, 0, 0]


def test_a_warm_start_demonstrates_all_environments(server, tmp_path):
    """Bandit and Sokoban, whose demonstrations are those of each alone, at their numbers."""
    settings = [
        "run.seed=7",
        f"run.server={server}",
        "validation.split=all",
        "rollout.context_turns=1",
        "rollout.instructions=none",
        "rollout.max_response_tokens=24",
        "warm_start.episodes=8",
        "warm_start.max_steps=4",
        "warm_start.check_every=4",
        "warm_start.check_episodes=3",
    ]
    entries = ['{id="bandit", split="all", weight=[3]}', '{id="sokoban", split="all", name="boxes"}']
    config = mixed(*entries, settings=[*settings, f"run.folder={tmp_path / 'warm'}"])
    policy = load_policy("tiny")
    with connect(server) as client:
        rows = demonstrate(policy, client, config)
        bandit, boxes = environments(config).values()
        first, both = (
            demonstrate(policy, client, alone.model_copy(update={"warm_start": WarmStartConfig(episodes=episodes)}))
            for alone, episodes in ((bandit, 6), (boxes, 8))
        )
    assert [row.ids.tolist() for row in rows[: len(first)]] == [row.ids.tolist() for row in first]
    assert 2 <= len(rows) - len(first) < len(both)
    assert [row.ids.tolist() for row in rows[len(first) :]] == [
        row.ids.tolist() for row in both[len(both) - len(rows) + len(first) :]
    ]
    result = warm_start(config)
    [check] = result.checks
    assert list(check.environments) == ["bandit", "boxes"]
    assert check.success == pytest.approx(sum(check.environments.values()) / 2)
    assert result.rows == len(rows)
    written = json.loads((result.folder / "warm_start.json").read_text())
    assert written["checks"][0]["environments"] == dict(check.environments)
