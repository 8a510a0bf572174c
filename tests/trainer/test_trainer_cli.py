"""The command line: what it says, and how it refuses."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from server_process import ServerProcess
from typer.testing import CliRunner

from turngym_client import ServerUnavailable
from turngym_trainer import cli
from turngym_trainer.cli import app
from turngym_trainer.metrics import read_metrics
from turngym_trainer.settings import settings_table

TINY_RUN = [
    "run.iterations=1",
    "rollout.groups=2",
    "rollout.group_size=2",
    "rollout.context_turns=1",
    "rollout.instructions=none",
    "rollout.max_response_tokens=8",
    "rollout.stop_unreadable=false",
    "update.minibatch_episodes=4",
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
    assert "1 of 1 iterations" in (folder / "report.html").read_text(encoding="utf-8")
    resumed = invoke("train", "--resume", str(folder), "--set", "run.iterations=2")
    assert resumed.exit_code == 0, resumed.output
    assert [line["iteration"] for line in read_metrics(folder)] == [1, 2]
    assert "2 of 2 iterations" in (folder / "report.html").read_text(encoding="utf-8")

    checkpoint = folder / "checkpoints" / "iteration-000002"
    evaluated = invoke("eval", str(checkpoint), "--episodes", "6", "--set", f"run.server={server}")
    assert evaluated.exit_code == 0, evaluated.output
    assert "0.0%" in evaluated.output


def test_a_warm_start_that_breaks_off_is_gone_on_with(server, tmp_path, monkeypatch):
    folder = tmp_path / "warm"
    steps = [
        "rollout.context_turns=1",
        "rollout.instructions=none",
        "warm_start.episodes=6",
        "warm_start.max_steps=4",
        "warm_start.check_every=2",
        "warm_start.check_episodes=4",
    ]
    settings = assignments([*steps, f"run.server={server}", f"run.folder={folder}"])
    with monkeypatch.context() as broken:
        broken.setattr(cli.console, "print", lambda *told, **how: 1 // 0)
        assert isinstance(CliRunner().invoke(app, ["warm-start", *settings]).exception, ZeroDivisionError)
    assert "not empty; go on with the warm start in it" in invoke("warm-start", *settings).output.replace("\n", " ")
    assert "only --set may go with it" in invoke("warm-start", "--resume", str(folder), "--preset", "grpo").output
    resumed = invoke("warm-start", "--resume", str(folder), "--set", f"run.server={server}")
    assert resumed.exit_code == 0, resumed.output
    assert (folder / "model.safetensors").exists()


def test_a_run_that_breaks_off_has_its_report(server, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr(cli, "_now", lambda metrics: 1 // (metrics["iteration"] < 2))
    settings = assignments([*TINY_RUN, "run.iterations=3", f"run.server={server}", f"run.folder={folder}"])
    assert isinstance(CliRunner().invoke(app, ["train", *settings]).exception, ZeroDivisionError)
    assert "2 of 3 iterations" in (folder / "report.html").read_text(encoding="utf-8")


def test_a_run_whose_report_cannot_be_written_is_a_run_still(server, tmp_path):
    folder = tmp_path / "run"
    (folder / "report.html").mkdir(parents=True)
    result = invoke("train", *assignments([*TINY_RUN, f"run.server={server}", f"run.folder={folder}"]))
    assert result.exit_code == 0, result.output
    assert "the report of this run could not be written" in result.stderr


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


@pytest.mark.parametrize("command", ["train", "warm-start"])
@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (["policy.model=."], ["no config.json", "a folder with config.json and *.safetensors"]),
        (["policy.model=org/model"], ["no policy at org/model", "a folder with config.json and *.safetensors"]),
        (["environment.id=sokobann"], ["sokoban"]),
        (["environment.options={nope = 1}"], ["nope"]),
        (["environment.max_turns=5000"], ["max_turns 5000 of sokoban", "at most 1000"]),
        (["run.server=localhost"], ["expected host:port, got 'localhost'"]),
        (["run.folder=/proc/x"], ["/proc/x cannot be written: "]),
        (["environment.id=bandit"], ["bandit: split train", "environment.split=all and validation.split=all"]),
    ],
    ids=lambda value: " ".join(value) if "=" in value[0] else None,
)
def test_a_start_that_fails_says_why_in_a_line_and_leaves_nothing(
    server, command, settings, messages, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = invoke(command, *assignments([*TINY_RUN, f"run.server={server}", "run.folder=run", *settings]))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    for message in messages:
        assert message in line
    assert not list(tmp_path.iterdir())


def test_validation_must_be_served_where_it_is_asked_for(server, tmp_path):
    settings = [*TINY_RUN, f"run.server={server}", f"run.folder={tmp_path / 'run'}", "environment.id=bandit"]
    result = invoke("eval", "tiny", *assignments(settings))
    assert result.exit_code == 2
    assert "split validation is not served" in result.stderr
    assert "set environment.split=all and validation.split=all" in result.stderr


def test_a_server_that_does_not_answer_is_named_while_it_is_waited_for(tmp_path):
    settings = assignments(["run.server=localhost:1", f"run.folder={tmp_path / 'run'}"])
    command = [sys.executable, "-m", "turngym_trainer.cli", "train", *settings]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        process.kill()
    assert line == "waiting for localhost:1 …\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("train", ["run.iterations=3", "checkpoint.every=1"]),
        ("warm-start", ["warm_start.episodes=2", "warm_start.max_steps=3", "warm_start.check_every=1"]),
    ],
)
def test_one_whose_server_stays_away_says_how_to_go_on(server, tmp_path, monkeypatch, command, settings):
    folder = tmp_path / "run"

    def ended(*told, **how):
        if "".join(map(str, told)).startswith(("iteration", "step")):  # What came of the first iteration or check.
            raise ServerUnavailable("gave up after 300 s")

    monkeypatch.setattr(cli.console, "print", ended)
    limits = ["environment.max_turns=3", "validation.every=1", "validation.episodes=2", "warm_start.check_episodes=2"]
    told = invoke(
        command, *assignments([*TINY_RUN, *limits, *settings, f"run.server={server}", f"run.folder={folder}"])
    )
    assert told.exit_code == 2
    assert f"trainer: gave up after 300 s\ngo on with: trainer {command} --resume {folder}\n" in told.output


def test_settings_are_listed():
    result = invoke("settings")
    assert result.exit_code == 0
    # Not on a terminal: a line each, whatever its width would be.
    assert [line.split()[0] for line in result.output.splitlines()] == [key for key, _, _ in settings_table()]


def test_settings_are_whole_on_a_terminal(monkeypatch):
    monkeypatch.setattr(cli, "console", Console(width=80, force_terminal=True, color_system=None, file=io.StringIO()))
    cli.settings_command()
    shown = cli.console.file.getvalue()
    assert "…" not in shown
    assert all(key in shown for key, _, _ in settings_table())


def test_an_evaluation_of_which_every_episode_is_lost_is_refused_in_a_line():
    with ServerProcess("--env", "failing_sokoban:FailingSokoban", path=Path(__file__).parent) as server:
        settings = assignments([*TINY_RUN, f"run.server={server.address}", "environment.id=failing_sokoban"])
        evaluated = invoke("eval", "tiny", "--episodes", "3", *settings)
    assert evaluated.exit_code == 2
    assert "all 3 evaluation episodes were lost, the first to: " in " ".join(evaluated.output.split())
    assert "out of order" in evaluated.output
