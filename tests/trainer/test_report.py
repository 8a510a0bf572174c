"""A run's report: whole at any moment of the run, and safe from what agents and environments write."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from turngym_trainer.cli import app
from turngym_trainer.metrics import read_metrics
from turngym_trainer.page import page, tag
from turngym_trainer.recorded import RecordError, read_run
from turngym_trainer.report import report, samples, write_report
from turngym_trainer.settings import load_config
from turngym_trainer.train import train

SETTINGS = [
    "environment.max_turns=2",
    "run.iterations=2",
    "rollout.groups=2",
    "rollout.group_size=2",
    "update.minibatch_episodes=4",
    "rollout.context_turns=1",
    "rollout.instructions=none",
    "rollout.max_response_tokens=12",
    "validation.every=1",
    "validation.episodes=3",
    "checkpoint.every=1",
]


class Outline(HTMLParser):
    """The elements and the text of a page; fails where it is not well nested."""

    def __init__(self, content):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return "\n".join(self.texts)


@pytest.fixture(scope="module")
def run(server, novice, tmp_path_factory):
    """A finished run of two iterations. Not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    settings = [*SETTINGS, f"run.server={server}", f"policy.model={novice}", f"run.folder={folder}"]
    train(load_config(preset="starpo_s", settings=settings))
    return folder


@pytest.fixture
def copied(run, tmp_path):
    """The same run, to be changed."""
    return shutil.copytree(run, tmp_path / "run")


def append(file, *records):
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


def episodes(folder):
    return [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]


def test_a_report_says_how_a_run_went(run):
    page = Outline(write_report(run).read_text(encoding="utf-8"))
    last = read_metrics(run)[-1]
    assert "2 of 2 iterations" in page.texts
    assert f"{last['validation/success'] * 100:.1f} %" in page.text
    for chart in ("Success", "Reward", "Spread within groups", "Valid turns", "Episodes", "Tokens", "Seconds"):
        assert chart in page.texts
    # Of the validation split, as the server of these settings names them.
    assert {"floor", "ceiling"} <= set(page.texts) or read_run(run).facts.floor is None
    assert {"rollout.groups", "validation.episodes"} <= set(page.texts)
    assert "filter.keep" not in page.texts
    assert {"torch", "turngym", "environment sokoban"} <= set(page.texts)
    assert any(text.startswith("Newest: reward") or "newest: reward" in text for text in page.texts)
    assert {"observation", "reasoning", "action"} & set(page.texts)


def test_a_report_needs_nothing_beside_itself(run):
    content = write_report(run).read_text(encoding="utf-8")
    page = Outline(content)
    assert not {"script", "link", "img", "iframe", "object"} & {element for element, _ in page.elements}
    assert not re.search(r"https?://|url\(|@import|src=|href=", content)
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "prefers-color-scheme:dark" in content
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements


def test_what_an_agent_or_environment_wrote_stays_text(copied):
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;\ud800\x00"
    (episode, *_) = episodes(copied)
    turn = {**episode["turns"][0], "observation": evil, "reasoning": evil, "response": evil, "actions": [evil]}
    append(
        copied / "trajectories.jsonl",
        {**episode, "environment": evil, "reward": 1e6, "turns": [turn, {**turn, "valid_format": False}]},
    )
    append(copied / "alarms.jsonl", {"kind": evil, "iteration": 1, "optimiser_step": 1, "since": 1, "told": evil})
    facts = json.loads((copied / "run.json").read_text())
    facts["environment"]["version"] = facts["versions"]["torch"] = facts["environment"]["options_json"] = evil
    (copied / "run.json").write_text(json.dumps(facts))
    renamed = copied.rename(copied.with_name("<script>alert(3)<"))

    content = write_report(renamed).read_text(encoding="utf-8")
    page = Outline(content)
    assert not {"script", "img"} & {element for element, _ in page.elements}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert sum("<script>alert(1)</script>" in text for text in page.texts) >= 10


def test_alarms_are_told_and_marked(copied):
    append(
        copied / "alarms.jsonl",
        {"kind": "spread", "iteration": 9, "optimiser_step": 9, "since": 7, "told": "spread fell", "attempt": 0},
        {"kind": "entropy", "iteration": 2, "optimiser_step": 3, "since": 1, "told": "entropy fell", "attempt": 1},
    )
    page = Outline(write_report(copied).read_text(encoding="utf-8"))
    assert {"spread fell", "entropy fell"} <= set(page.texts)
    charts = sum(element == "svg" for element, _ in page.elements)
    assert page.texts.count("alarm: spread") == page.texts.count("alarm: entropy, attempt 1") == charts > 8


def test_a_killed_run_has_its_report(copied):
    for name in ("metrics.jsonl", "trajectories.jsonl", "validations.jsonl"):
        with (copied / name).open("r+b") as file:
            file.truncate((copied / name).stat().st_size - 5)
    shutil.rmtree(copied / "checkpoints" / "iteration-000002")
    page = Outline(write_report(copied).read_text(encoding="utf-8"))
    assert re.search(r"1 of 2 iterations, the last one at .* UTC; not finished", page.text)


def test_a_run_without_a_single_iteration_has_its_report(copied):
    for name in ("metrics.jsonl", "trajectories.jsonl", "validations.jsonl", "run.json"):
        (copied / name).unlink()
    shutil.rmtree(copied / "checkpoints")
    page = Outline(write_report(copied).read_text(encoding="utf-8"))
    assert {"0 of 2 iterations", "Nothing was measured yet.", "No episode was logged."} <= set(page.texts)


def test_values_that_are_not_finite_are_gaps(copied):
    lines = read_metrics(copied)
    lines[0]["train/reward"] = lines[1]["update/entropy"] = None
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Outline(write_report(copied).read_text(encoding="utf-8"))
    assert read_run(copied).series("train/reward") == ((1, None), (2, lines[1]["train/reward"]))


def test_long_episodes_are_cut_and_say_so(copied):
    (episode, *_) = episodes(copied)
    turn = {**episode["turns"][0], "observation": "x" * 7_000}
    append(copied / "trajectories.jsonl", {**episode, "reward": 1e6, "turns": [turn] * 45})
    text = Outline(write_report(copied).read_text(encoding="utf-8")).text
    assert "… (1,000 more characters)" in text
    assert "5 more turns are in the run's trajectories.jsonl." in text


def chosen(*rewards):
    logged = [{"reward": reward, "at": at} for at, reward in enumerate(rewards)]
    return {sample.why: sample.episode["at"] for sample in samples(lambda: iter(logged))}


def test_best_worst_median_and_newest_are_chosen():
    assert chosen(1.0, 5.0, 3.0, 5.0, 1.0, 4.0, 2.0) == {"Best": 3, "Worst": 4, "Median": 2, "Newest": 6}
    assert chosen(1.0, 2.0) == {"Best and newest": 1, "Worst and median": 0}
    assert chosen(0.0, 0.0) == {"Best and worst and median and newest": 1}
    assert chosen() == {}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"holds no run: there is no config\.toml in it"):
        write_report(tmp_path)


def test_a_run_under_rules_that_are_stricter_since_can_be_read(copied):
    text = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(text.replace("minibatch_episodes = 4", "minibatch_episodes = 5"))
    assert read_run(copied).config.update.minibatch_episodes == 5


def test_files_that_were_changed_are_named(copied):
    (copied / "metrics.jsonl").write_text("{}\nnonsense\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl: line 2 is no JSON"):
        write_report(copied)
    (copied / "run.json").write_text("[]")
    with pytest.raises(RecordError, match=r"run\.json is not what a run writes"):
        write_report(copied)


def test_the_command_writes_it_where_it_is_wanted(run, tmp_path):
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "there" / "page.html")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "there" / "page.html").read_text(encoding="utf-8") == report(
        read_run(run), samples(read_run(run).episodes)
    )
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code == 2
    assert "holds no run" in refused.stderr


def test_only_what_tag_made_is_markup():
    assert '<p>&lt;b&gt;<b class="&quot;x&quot;">&amp;</b></p>' in page(
        "x", tag("p", "<b>", tag("b", "&", class_='"x"'))
    )
