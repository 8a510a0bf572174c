"""Runs beside each other: paired where they can be, and saying why where they cannot."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from turngym_trainer.cli import app
from turngym_trainer.compare import compare, difference
from turngym_trainer.intervals import paired_difference
from turngym_trainer.recorded import read_run
from turngym_trainer.settings import load_config
from turngym_trainer.train import train

SETTINGS = [
    "environment.max_turns=1",
    "run.iterations=1",
    "rollout.groups=2",
    "rollout.group_size=2",
    "update.minibatch_episodes=4",
    "rollout.context_turns=1",
    "rollout.instructions=none",
    "rollout.max_response_tokens=12",
    "validation.episodes=4",
]


@pytest.fixture(scope="module")
def played(server, novice, tmp_path_factory):
    """Two runs of one iteration that differ in N. Not to be changed."""
    home = tmp_path_factory.mktemp("runs")
    common = [*SETTINGS, f"run.server={server}", f"policy.model={novice}"]
    train(load_config(preset="starpo_s", settings=[*common, f"run.folder={home / 'narrow'}"]))
    train(load_config(preset="starpo_s", settings=[*common, f"run.folder={home / 'wide'}", "rollout.group_size=3"]))
    return home / "narrow", home / "wide"


@pytest.fixture
def runs(played, tmp_path):
    """The same runs, to be changed."""
    return [shutil.copytree(folder, tmp_path / folder.name) for folder in played]


def set_outcomes(folder, *outcomes):
    """Gives a run's validation these outcomes."""
    (line,) = (folder / "validations.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert len(record["levels"]) == len(outcomes)
    for level, success in zip(record["levels"], outcomes, strict=True):
        level["success"] = success
    (folder / "validations.jsonl").write_text(json.dumps(record) + "\n")


def set_config(folder, old, new):
    text = (folder / "config.toml").read_text()
    assert old in text
    (folder / "config.toml").write_text(text.replace(old, new))


def test_runs_on_the_same_worlds_are_paired(runs):
    set_outcomes(runs[0], False, False, True, True)
    set_outcomes(runs[1], True, True, True, False)
    expected = paired_difference([False, False, True, True], [True, True, True, False])
    assert difference(*map(read_run, runs)) == expected
    compared = compare([read_run(folder) for folder in runs])
    assert compared.rows[0][:3:2] == ("narrow", "–")
    assert compared.rows[1][2].startswith("+25.0 points (")
    assert "4 worlds, McNemar p = 1" in compared.rows[1][2]
    assert compared.settings == (("rollout.group_size", "2", "3"),)
    assert [row[3:5] for row in compared.rows] == [("1", "4"), ("1", "6")]
    assert compared.notes == ()


def test_a_lost_level_is_left_out_of_the_pairing(runs):
    set_outcomes(runs[0], False, False, True, True)
    record = json.loads((runs[1] / "validations.jsonl").read_text())
    del record["levels"][0]
    (runs[1] / "validations.jsonl").write_text(json.dumps(record) + "\n")
    assert difference(*map(read_run, runs)).worlds == 3


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('id = "sokoban"', 'id = "sokoban_large"', "on other worlds: environment.id differ"),
        ('split = "validation"', 'split = "all"', "on other worlds: validation.split differ"),
    ],
)
def test_runs_on_other_worlds_say_so(runs, old, new, why):
    set_config(runs[1], old, new)
    if "all" in new:
        set_config(runs[1], 'split = "train"', 'split = "all"')
    assert why in difference(*map(read_run, runs))


def test_other_seeds_are_other_worlds(runs):
    record = json.loads((runs[1] / "validations.jsonl").read_text())
    for level in record["levels"]:
        level["level_seed"] += 1
    (runs[1] / "validations.jsonl").write_text(json.dumps(record) + "\n")
    (note,) = compare([read_run(folder) for folder in runs]).notes
    assert note.startswith("wide: no paired difference to narrow")
    assert "give both the same run.seed" in note


def test_a_run_that_was_not_validated_or_not_finished_is_compared_still(runs):
    for name in ("metrics.jsonl", "validations.jsonl"):
        (runs[1] / name).write_bytes(b"")
    shutil.rmtree(runs[1] / "checkpoints")
    compared = compare([read_run(folder) for folder in runs])
    assert compared.rows[1] == ("wide", "–", "–", "0", "0", "0", "0 s")
    assert any("no validation whose levels were kept" in note for note in compared.notes)
    assert any("0 of 1 iterations" in note for note in compared.notes)


def test_the_command_prints_a_table_and_writes_a_page(runs, tmp_path):
    result = CliRunner().invoke(app, ["compare", *map(str, runs), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "+0.0 points" in result.output  # In a terminal of any width.
    assert "rollout.group_size" in result.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for word in ("narrow", "wide", "Success at validations, 95 %", "rollout.group_size", "McNemar"):
        assert word in page


def test_runs_of_one_name_are_called_by_their_path(runs):
    twin = shutil.copytree(runs[0], runs[0].parent / "other" / "narrow")
    assert compare([read_run(runs[0]), read_run(twin)]).names == (str(runs[0]), str(twin))


def test_names_are_no_markup(runs, tmp_path):
    strange = runs[0].rename(runs[0].with_name("<script>[red]"))
    result = CliRunner().invoke(app, ["compare", str(strange), str(runs[1]), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert "<script" not in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["one"], "compare needs two runs or more, got only one"), (["one", "two"], "one holds no run")],
)
def test_what_cannot_be_compared_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
