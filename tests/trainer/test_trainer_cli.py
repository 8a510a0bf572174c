"""The command line: what it says, and how it refuses."""

import pytest
from typer.testing import CliRunner

from turngym_trainer.cli import app
from turngym_trainer.metrics import read_metrics

TINY_RUN = [
    "run.iterations=1",
    "rollout.groups=2",
    "rollout.group_size=2",
    "rollout.context_turns=1",
    "rollout.instructions=none",
    "rollout.max_response_tokens=8",
    "environment.max_turns=1",
    "validation.every=0",
]


def invoke(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def assignments(settings):
    return [part for setting in settings for part in ("--set", setting)]


def test_a_run_is_trained_resumed_and_evaluated(server, tmp_path):
    folder = tmp_path / "run"
    settings = assignments([*TINY_RUN, f"run.server={server}", f"run.folder={folder}"])
    trained = invoke("train", "--preset", "starpo_s", *settings)
    assert trained.exit_code == 0, trained.output
    assert "iteration-000001" in trained.output.replace("\n", "")
    resumed = invoke("train", "--resume", str(folder), "--set", "run.iterations=2")
    assert resumed.exit_code == 0, resumed.output
    assert [line["iteration"] for line in read_metrics(folder)] == [1, 2]

    checkpoint = folder / "checkpoints" / "iteration-000002"
    evaluated = invoke("eval", str(checkpoint), "--episodes", "6", "--set", f"run.server={server}")
    assert evaluated.exit_code == 0, evaluated.output
    assert "0.0%" in evaluated.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--set", "rollout.group=3"], "did you mean 'rollout.groups'?"),
        (["train", "--preset", "ppo"], "unknown preset 'ppo'"),
        (["train", "--resume", "nowhere"], "nowhere holds no run to resume"),
        (["train", "--resume", "nowhere", "--preset", "grpo"], "--resume takes its settings from the run's folder"),
        (["eval", "nowhere"], "nowhere"),
    ],
    ids=" ".join,
)
def test_refusals_say_what_is_wrong(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_an_unknown_environment_is_refused_with_the_nearest(server, tmp_path):
    settings = [*TINY_RUN, f"run.server={server}", f"run.folder={tmp_path / 'run'}", "environment.id=sokobann"]
    result = invoke("train", *assignments(settings))
    assert result.exit_code == 2
    assert "sokoban" in result.output


def test_settings_are_listed():
    result = invoke("settings")
    assert result.exit_code == 0
    assert "rollout.groups" in result.output
