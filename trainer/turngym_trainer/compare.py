"""Several runs beside each other: what each came to, what it used, and which settings made the difference.

Where two runs validated on the same worlds, their difference is paired, world by world.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from turngym_trainer.chart import Chart, Point, Series, figure
from turngym_trainer.intervals import Difference, paired_difference
from turngym_trainer.page import page, table, tag, write_page
from turngym_trainer.recorded import RecordedRun, labels
from turngym_trainer.report import duration, progress_line, references, success_words, validations
from turngym_trainer.settings import changed_keys, config_tree

HEADINGS = ("run", "success, 95 %", "difference to the first", "iterations", "episodes", "tokens", "time")


@dataclass(frozen=True, slots=True)
class Compared:
    """Runs beside each other, as text.

    Attributes:
        rows: a run each, under HEADINGS.
        notes: what a reader has to know about the differences.
        settings: a row for each setting that differs: its name and its value in each run.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    settings: tuple[tuple[str, ...], ...]


def compare(runs: Sequence[RecordedRun]) -> Compared:
    """Puts runs beside each other; differences are to the first."""
    names = labels(runs)
    first = runs[0]
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for name, run in zip(names, runs, strict=True):
        told = "–"
        if run is not first:
            paired = difference(first, run)
            told = paired if isinstance(paired, str) else difference_words(paired)
            if isinstance(paired, str):
                told = "–"
                notes.append(f"{name}: no paired difference to {names[0]}: {paired}")
        if not run.finished:
            notes.append(f"{name}: {progress_line(run)}")
        rows.append((name, success_words(run.validation()), told, *used(run)))
    return Compared(tuple(names), tuple(rows), tuple(notes), tuple(settings_that_differ_between(runs)))


def used(run: RecordedRun) -> tuple[str, str, str, str]:
    """Iterations, episodes, tokens and time that a run took."""
    return (
        str(run.iteration),
        f"{run.total('train/episodes'):,.0f}",
        f"{run.total('train/tokens'):,.0f}",
        duration(run.total("clock/iteration_seconds")),
    )


def difference(first: RecordedRun, second: RecordedRun) -> Difference | str:
    """Success of `second` less that of `first` at their last validations, on the worlds that both played; or why none.

    A level seed is the same world in both where environment, version, options and split are the same.
    """
    one, other = first.levels(), second.levels()
    if not one or not other:
        return "a run has no validation whose levels were kept"
    before, after = _world_source(first), _world_source(second)
    if changed := [name for name in before if before[name] != after[name]]:
        return f"they were validated on other worlds: {', '.join(changed)} differ"
    common = [level for level in one if level in other]
    if not common:
        return "they were validated on other worlds: give both the same run.seed"
    return paired_difference([one[level] for level in common], [other[level] for level in common])


def _world_source(run: RecordedRun) -> Mapping[str, object]:
    """What a level seed's world is a function of, beside the seed."""
    about = run.facts.environment if run.facts else None
    if run.config.mixture.environments:
        others = run.facts.others if run.facts else ()
        return {
            "mixture.environments": [(each.name, each.id, each.options) for each in run.config.mixture.environments],
            "environment.version": [each.version for each in (about, *others) if each],
            "environment.options": [each.options_json for each in (about, *others) if each],
            "validation.split": run.config.validation.split,
        }
    return {
        "mixture.environments": [],
        "environment.id": run.config.environment.id,
        "environment.version": about.version if about else run.config.environment.version,
        "environment.options": about.options_json if about else run.config.environment.options,
        "validation.split": run.config.validation.split,
    }


def difference_words(told: Difference) -> str:
    """A paired difference in points."""
    return (
        f"{told.value * 100:+.1f} points ({told.low * 100:+.1f} to {told.high * 100:+.1f}), "
        f"{told.worlds} worlds, McNemar p = {told.p_value:.2g}"
    )


def settings_that_differ_between(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, ...]]:
    """The name of each setting that is not the same in all runs, and its values. Folders differ always."""
    trees = [cast(dict[str, dict[str, object]], config_tree(run.config)) for run in runs]
    changed = {key for run in runs[1:] for key in changed_keys(runs[0].config, run.config)} - {"run.folder"}
    for section, values in trees[0].items():
        for key in values:
            if f"{section}.{key}" in changed:
                yield f"{section}.{key}", *(str(tree[section][key]) for tree in trees)


def write_comparison(runs: Sequence[RecordedRun], compared: Compared, out: Path) -> Path:
    """Writes runs beside each other as a page. Returns the file."""
    curves = tuple(Series(name, validations(run)) for name, run in zip(compared.names, runs, strict=True))
    rewards = tuple(
        Series(name, tuple(Point(x, y) for x, y in run.series("average/train/reward")))
        for name, run in zip(compared.names, runs, strict=True)
    )
    charts = (
        Chart("Success at validations, 95 %", curves, rules=references(runs[0]), bounds=(0.0, 1.0)),
        Chart("Reward, moving average", rewards),
    )
    settings = (
        [table(("setting", *compared.names), compared.settings, words=len(runs) + 1)]
        if compared.settings
        else [tag("p", "No setting differs.")]
    )
    return write_page(
        out,
        page(
            "Runs compared",
            table(HEADINGS, compared.rows, words=3),
            *(tag("p", note, class_="faint") for note in compared.notes),
            tag("h2", "Curves, by iteration"),
            tag("div", *(figure(chart) for chart in charts), class_="charts"),
            tag("h2", "Settings that differ"),
            *settings,
        ),
    )
