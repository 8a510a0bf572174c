"""What a sweep came to: success of each point over seeds with its interval, as a table and as a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final
from urllib.parse import quote

from turngym_trainer.chart import Chart, Point, Series, figure, interval_bar
from turngym_trainer.intervals import Estimate, mean_over_seeds
from turngym_trainer.page import page, table, tag, write_page
from turngym_trainer.recorded import RecordedRun, read_run
from turngym_trainer.report import PAGE, duration, percent, references, success_words, validations
from turngym_trainer.sweep import Sweep
from turngym_trainer.sweep_runs import ended

SWEEP_PAGE: Final = "sweep.html"
_SUCCESS: Final = ("success, 95 % over seeds", "difference to the first, same seeds")
_USED: Final = ("episodes", "tokens", "time")
HEADINGS: Final = ("settings", "seeds", *_SUCCESS, *_USED)


@dataclass(frozen=True, slots=True)
class PointResult:
    """What a point came to.

    Attributes:
        runs: those that have ended, by seed.
        success: mean over seeds at the last validation; None: no run has ended.
        difference: mean over the seeds that the first point has too, each on its own seed's worlds; None: none.
    """

    name: str
    runs: dict[int, RecordedRun]
    success: Estimate | None
    difference: Estimate | None


def results(sweep: Sweep) -> list[PointResult]:
    """Every point with the runs that have ended so far."""
    runs: dict[str, dict[int, RecordedRun]] = {name: {} for name in sweep.points}
    for run in sweep.runs:
        if ended(run):
            runs[run.point][run.seed] = read_run(run.folder)
    first = _successes(runs[sweep.points[0]])
    found: list[PointResult] = []
    for name, of in runs.items():
        successes = _successes(of)
        gains = [success - first[seed] for seed, success in successes.items() if seed in first]
        found.append(
            PointResult(
                name,
                of,
                mean_over_seeds(list(successes.values())) if successes else None,
                mean_over_seeds(gains) if gains and name != sweep.points[0] else None,
            )
        )
    return found


def rows(found: Sequence[PointResult]) -> list[tuple[str, ...]]:
    """A row for each point under HEADINGS; what was used is a mean over its runs."""
    return [(point.name, str(len(point.runs)), *_told(point), *_used(point)) for point in found]


def write_sweep_page(sweep: Sweep, found: Sequence[PointResult]) -> Path:
    """Writes sweep.html into the sweep's folder. Returns the file."""
    one = next((run for point in found for run in point.runs.values()), None)
    rules = references(one) if one else ()
    curves = tuple(Series(point.name, _curve(point), "band") for point in found)
    runs = [
        tag("li", tag("a", f"{point.name}, seed {seed}", href=_link(sweep.folder, run)), f": {_last(run)}")
        for point in found
        for seed, run in point.runs.items()
    ]
    left = len(sweep.runs) - len(runs)
    bars = [(point.name, *_bar(point, [value for _, value in rules]), *_told(point), *_used(point)) for point in found]
    return write_page(
        sweep.folder / SWEEP_PAGE,
        page(
            f"Sweep {sweep.folder.resolve().name}",
            *([tag("p", f"{left} of {len(sweep.runs)} runs have not ended.", class_="alarm")] if left else []),
            table(("settings", "success, 0 to 1", *_SUCCESS, *_USED), bars, words=2),
            tag(
                "p",
                "Success on each seed's own validation worlds at the last validation: means over seeds, Student's 95 % "
                "intervals. Dashed: "
                + (", ".join(f"{name} {percent(value)}" for name, value in rules) or "no floor or ceiling is known")
                + ". What was used is a mean over a point's runs.",
                class_="faint",
            ),
            tag("h2", "Curves, by iteration"),
            tag(
                "div",
                figure(Chart("Success at validations, mean over seeds, 95 %", curves, rules=rules, bounds=(0.0, 1.0))),
                class_="charts",
            ),
            tag("h2", "Runs"),
            tag("ul", *runs),
        ),
    )


def _successes(runs: dict[int, RecordedRun]) -> dict[int, float]:
    last = {seed: run.validation() for seed, run in runs.items()}
    return {seed: line["validation/success"] or 0.0 for seed, line in last.items() if line is not None}


def _told(point: PointResult) -> tuple[str, str]:
    return (
        _estimate(point.success, "", " %"),
        _estimate(point.difference, "+", " points"),
    )


def _used(point: PointResult) -> tuple[str, str, str]:
    runs = point.runs.values()
    if not runs:
        return ("–", "–", "–")
    return (
        f"{fmean(run.total('train/episodes') for run in runs):,.0f}",
        f"{fmean(run.total('train/tokens') for run in runs):,.0f}",
        duration(fmean(run.total("clock/iteration_seconds") for run in runs)),
    )


def _estimate(told: Estimate | None, sign: str, unit: str) -> str:
    """A share times 100, with its interval; a single seed has none."""
    if told is None:
        return "–"
    interval = "no interval"
    if told.low is not None and told.high is not None:
        interval = f"{told.low * 100:{sign}.1f} to {told.high * 100:{sign}.1f}"
    return f"{told.value * 100:{sign}.1f}{unit} ({interval})"


def _bar(point: PointResult, rules: Sequence[float]) -> tuple[str]:
    told = point.success
    return ("–",) if told is None else (interval_bar(told.value, told.low, told.high, rules),)


def _curve(point: PointResult) -> tuple[Point, ...]:
    """Mean success at the validations that all runs of a point had."""
    of = [{each.x: each.y for each in validations(run) if each.y is not None} for run in point.runs.values()]
    common = sorted(set[float]().union(*of).intersection(*of)) if of else []
    means = [(at, mean_over_seeds([one[at] for one in of])) for at in common]
    return tuple(Point(at, mean.value, mean.low, mean.high) for at, mean in means)


def _link(folder: Path, run: RecordedRun) -> str:
    """A run's report, as seen from the sweep's page."""
    return quote((run.folder.relative_to(folder) / PAGE).as_posix())


def _last(run: RecordedRun) -> str:
    alarms = f", stopped by its guard in iteration {run.iteration}" if not run.finished and run.alarms else ""
    return f"success {success_words(run.validation())}{alarms}"
