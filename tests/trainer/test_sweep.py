"""Sweeps: what a file asks for, what is refused before anything runs, and that a killed one goes on where it stood."""

import fcntl
import json
import re
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from turngym_trainer.cli import app
from turngym_trainer.metrics import read_metrics
from turngym_trainer.settings import load_config, to_toml
from turngym_trainer.sweep import SweepError, read_sweep
from turngym_trainer.sweep_page import results, rows, write_sweep_page
from turngym_trainer.sweep_runs import check, ended, run_sweep

TINY = """
[settings]
run.iterations = 1
run.threads = 1
rollout = { groups = 2, group_size = 2, context_turns = 1, instructions = "none", max_response_tokens = 8 }
update.minibatch_episodes = 4
environment.max_turns = 1
validation.episodes = 2
"""


def written(tmp_path, text, name="sweep.toml"):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


def head(tmp_path, seeds="[0]"):
    return f"folder = '{tmp_path / 'runs'}'\nseeds = {seeds}\n"


def test_every_variant_meets_the_grid_and_every_seed(tmp_path):
    written(tmp_path, 'preset = "grpo"\n[rollout]\ngroups = 4\n', "base.toml")
    text = (
        head(tmp_path, "[3, 5]")
        + """config = "base.toml"
        [settings]
        run.iterations = 7
        environment.options = { dim = 6 }
        [[variants]]
        name = "wide"
        rollout.group_size = 32
        [[variants]]
        name = "narrow / deep"
        rollout = { groups = 32, group_size = 4 }
        [grid]
        update.epochs = [1, 2]
        "environment.max_turns" = [5]
        """
    )
    sweep = read_sweep(written(tmp_path, text), ["run.server=other:1"])
    assert sweep.points == (
        "wide-epochs=1-max_turns=5",
        "wide-epochs=2-max_turns=5",
        "narrow-deep-epochs=1-max_turns=5",
        "narrow-deep-epochs=2-max_turns=5",
    )
    assert [(run.point, run.seed) for run in sweep.runs] == [(p, seed) for p in sweep.points for seed in (3, 5)]
    config = sweep.runs[-1].config
    assert (config.rollout.groups, config.rollout.group_size, config.update.epochs) == (32, 4, 2)
    assert sweep.runs[0].config.rollout.groups == 4
    assert (config.run.iterations, config.run.seed, config.advantage.kind) == (7, 5, "grpo")
    assert config.environment.options == {"dim": 6}
    assert config.run.server == ("other:1",)
    assert sweep.runs[-1].folder == tmp_path / "runs" / sweep.points[-1] / "seed-5"
    # Each run is what `trainer train` makes of its arguments.
    arguments = sweep.runs[-1].arguments
    assert arguments[:2] == ("--config", str(tmp_path / "base.toml"))
    assert load_config(file=tmp_path / "base.toml", settings=arguments[3::2]) == config


def test_seeds_alone_are_a_sweep(tmp_path):
    assert read_sweep(written(tmp_path, head(tmp_path, "[0, 1]"))).points == ("all",)


def test_names_that_are_too_long_or_alike_are_numbered(tmp_path):
    models = [f"runs/{letter * 120}" for letter in "ab"] + ["a/b", "a b"]
    sweep = read_sweep(written(tmp_path, head(tmp_path) + f"[grid]\npolicy.model = {models}"))
    assert [name[:4] for name in sweep.points] == ["001-", "002-", "003-", "004-"]
    assert len(set(sweep.points)) == 4
    assert max(map(len, sweep.points)) <= 104


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = [0]", 'folder: where the runs go, got None; for example folder = "runs/sweep"'),
        ("folder = 'x'", "seeds: expected a list of whole numbers from 0 on, got None"),
        ("folder = 'x'\nseeds = [true]", "seeds: expected a list of whole numbers"),
        ("folder = 'x'\nseeds = [1, 1]", "names a seed twice"),
        ("folder = 'x'\nseeds = [0]\ngird.a.b = [1]", "unknown key 'gird'; did you mean 'grid'?"),
        ("folder = 'x'\nseeds = [0]\n[grid]\nrollout.groups = 8", "grid: rollout.groups: expected a list of values"),
        ("folder = 'x'\nseeds = [0]\n[grid]\nrollout.groups = [8, 8]", "names a value twice"),
        ("folder = 'x'\nseeds = [0]\n[grid]\nrun.seed = [1, 2]", "run.seed: is decided by `seeds` of the sweep"),
        ("folder = 'x'\nseeds = [0]\nsettings.run.folder = 'y'", "run.folder: is decided by `folder`"),
        ("folder = 'x'\nseeds = [0]\n[grid]\nrollout.group = [1]", "did you mean 'rollout.groups'?"),
        ("folder = 'x'\nseeds = [0]\n[grid]\nrollout.top_p = [0.9]", "rollout.top_p and rollout.top_k: "),
        ("folder = 'x'\nseeds = [0]\n[[variants]]\nrollout.groups = 4", "variants: the 1. has no name"),
        ("folder = 'x'\nseeds = [0]\nvariants = 3", "variants: expected tables, each under [[variants]]"),
        ("folder = 'x'\nseeds = [0]\nsettings = 3", "settings: expected a table, got 3"),
        ("folder = 'x'\nseeds = [0]\nsettings.validation.every = 0", "leaves nothing to compare runs by"),
        (
            "folder = 'x'\nseeds = [0]\n[[variants]]\nname = 'a'\n[[variants]]\nname = 'b'",
            "a and b come to the same settings",
        ),
        ("folder = 'x'\nseeds = [0]\nconfig = 'none.toml'", "none.toml: cannot be read"),
        ("folder = 'x'\nseeds = [0]\npreset = 'ppo'", "unknown preset 'ppo'"),
        ("folder =", "is not TOML"),
    ],
)
def test_bad_files_are_refused_before_anything_runs(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, text)
    result = CliRunner().invoke(app, ["sweep", str(file)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_what_the_sweep_varies_cannot_be_set(tmp_path):
    file = written(tmp_path, head(tmp_path) + "[grid]\nrollout.groups = [4, 8]")
    with pytest.raises(SweepError, match=r"--set rollout\.groups: the sweep varies it"):
        read_sweep(file, ["rollout.groups=2"])


def tiny(tmp_path, server, novice, variants):
    named = "".join(f"[[variants]]\nname = '{name}'\n{settings}\n" for name, settings in variants.items())
    common = f"run.server = '{server}'\npolicy.model = '{novice}'\n"
    return written(tmp_path, head(tmp_path) + 'preset = "starpo_s"\n' + TINY + common + named)


def test_a_killed_sweep_goes_on_where_it_stood(tmp_path, server, novice):
    variants = {"first": "rollout.temperature = 1.0", "second": "rollout.temperature = 0.9"}
    file = tiny(tmp_path, server, novice, variants)
    command = [sys.executable, "-m", "turngym_trainer.cli", "sweep", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("second, seed 0: started"):
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    first, second = (tmp_path / "runs" / name / "seed-0" for name in variants)
    before = (first / "metrics.jsonl").stat()
    assert len(read_metrics(first)) == 1

    result = CliRunner().invoke(app, ["sweep", str(file), "--jobs", "2"])
    assert result.exit_code == 0, result.output
    assert "2 runs, 1 of them to do" in result.output
    assert "first, seed 0: started" not in result.output
    assert (first / "metrics.jsonl").stat() == before
    assert len(read_metrics(second)) == 1
    page = (tmp_path / "runs" / "sweep.html").read_text(encoding="utf-8")
    assert 'href="second/seed-0/report.html"' in page
    assert (second / "report.html").exists()
    assert "have not ended" not in page


def test_one_that_fails_is_told_and_the_others_go_on(tmp_path, server, novice):
    file = tiny(tmp_path, server, novice, {"bad": "policy.model = 'nowhere'", "good": "rollout.temperature = 1.0"})
    sweep = read_sweep(file)
    check(sweep)
    told = []
    lock = tmp_path / "runs" / "good" / "seed-0.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def tell(line):
            told.append(line)
            if "waiting for another process" in line:
                fcntl.flock(held, fcntl.LOCK_UN)

        (failure,) = run_sweep(sweep, 1, tell)
    assert failure.run.point == "bad"
    assert "ended with exit code 2: trainer: no policy at nowhere" in str(failure)
    assert "good, seed 0: waiting for another process that trains it" in told
    assert [ended(run) for run in sweep.runs] == [False, True]
    assert "1 of 2 runs have not ended." in write_sweep_page(sweep, results(sweep)).read_text(encoding="utf-8")


def test_folders_of_other_runs_and_servers_without_the_split_are_refused(tmp_path, server):
    file = written(tmp_path, head(tmp_path) + f"settings.run.server = '{server}'\nsettings.rollout.groups = 4\n")
    sweep = read_sweep(file)
    folder = sweep.runs[0].folder
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(load_config(settings=["rollout.groups=8"])))
    result = CliRunner().invoke(app, ["sweep", str(file)])
    assert result.exit_code == 2
    assert "holds a run of other settings: " in result.stderr
    assert "rollout.groups" in result.stderr

    other = head(tmp_path).replace("runs", "others") + "settings.environment.id = 'bandit'\n"
    result = CliRunner().invoke(app, ["sweep", str(written(tmp_path, other)), "--set", f"run.server={server}"])
    assert result.exit_code == 2
    assert "set environment.split=all and validation.split=all" in result.stderr
    assert not (tmp_path / "others").exists()


def finished(run, success):
    """Writes what a finished run leaves of its numbers."""
    (run.folder / "checkpoints" / f"iteration-{run.config.run.iterations:06d}").mkdir(parents=True)
    (run.folder / "config.toml").write_text(to_toml(run.config))
    line = {"iteration": run.config.run.iterations, "train/episodes": 100, "train/tokens": 1000.0}
    line |= {"validation/success": success, "validation/low": 0.0, "validation/high": 1.0, "validation/episodes": 4}
    line["clock"] = {"iteration_seconds": 30.0}
    (run.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_points_are_compared_over_seeds(tmp_path):
    sweep = read_sweep(written(tmp_path, head(tmp_path, "[0, 1]") + "[grid]\nrollout.groups = [4, 8, 16]"))
    for run, success in zip(sweep.runs, (0.2, 0.4, 0.5, 0.9), strict=False):
        finished(run, success)
    one, other, none = results(sweep)
    # Two seeds: mean ± 12.7062 · |a − b|/2.
    assert one.success.value == pytest.approx(0.3)
    assert one.success.high == pytest.approx(0.3 + 12.7062 * 0.1, rel=1e-4)
    assert one.difference is None
    assert other.difference.value == pytest.approx(0.4)
    assert other.difference.low == pytest.approx(0.4 - 12.7062 * 0.1, rel=1e-4)
    assert none.success is none.difference is None
    assert rows([one, none])[1] == ("groups=16", "0", "–", "–", "–", "–", "–")
    assert rows([one])[0][1:3] == ("2", "30.0 % (-97.1 to 157.1)")
    assert rows([other])[0][4:] == ("100", "1,000", "30 s")
    page = write_sweep_page(sweep, results(sweep)).read_text(encoding="utf-8")
    assert "2 of 6 runs have not ended." in page
    assert len(re.findall(r"<circle ", page)) >= 2
    assert not re.search(r"https?://|<script", page)


def test_a_run_that_its_guard_stopped_has_ended(tmp_path):
    sweep = read_sweep(written(tmp_path, head(tmp_path) + "settings.guard.on_alarm = 'stop'"))
    (run,) = sweep.runs
    finished(run, 0.1)
    (run.folder / "checkpoints" / "iteration-000100").rename(run.folder / "checkpoints" / "iteration-000090")
    assert not ended(run)
    alarm = {"kind": "spread", "iteration": 100, "optimiser_step": 9, "since": 95, "told": "fell", "attempt": 0}
    (run.folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    assert ended(run)
