"""A run's report: one page that says how a training goes, for whoever was not there.

Reads a run's folder only, so it can be made while the run goes on, or after it was killed. Knows nothing of drawing
and of HTML beyond what to put where.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, cast

from turngym_client import Reference
from turngym_trainer.chart import Chart, Point, Series, figure, short
from turngym_trainer.page import Html, page, table, tag, write_page
from turngym_trainer.recorded import AlarmRecord, Json, RecordedRun, read_run
from turngym_trainer.settings import settings_that_differ

PAGE: Final = "report.html"
MOST_TURNS: Final = 40
MOST_CHARACTERS: Final = 6_000
"""Of one text of an episode; what is longer is cut, and says so."""

CURVES: Final[tuple[tuple[str, Mapping[str, str], bool], ...]] = (
    ("Reward", {"with shaping": "train/reward", "environment's": "train/environment_return"}, False),
    ("Spread within groups", {"mean std": "train/group_std", "average": "average/train/group_std"}, False),
    ("Groups without spread", {"share": "train/constant_groups"}, False),
    ("Entropy", {"entropy": "update/entropy", "average": "average/update/entropy"}, False),
    ("Gradient norm", {"mean": "update/gradient_norm", "greatest": "update/gradient_norm_max"}, True),
    (
        "Clipped tokens",
        {"above": "update/clip_high", "below": "update/clip_low", "dual": "update/clip_dual"},
        False,
    ),
    ("Valid turns", {"format": "train/valid_format", "action": "train/valid_action"}, False),
    (
        "KL divergence",
        {
            "old policy": "update/old_kl",
            "reference, in the loss": "update/reference_kl",
            "reference, of samples": "update/reference_gap",
        },
        False,
    ),
    ("Critic's explained variance", {"share": "update/explained_variance"}, False),
    ("Length of an answer", {"tokens": "train/response_tokens", "words of reasoning": "train/reasoning_words"}, False),
    ("Episodes", {"used": "train/episodes", "kept": "update/kept_episodes", "lost": "train/lost"}, False),
    ("Tokens", {"used": "train/tokens", "kept": "update/kept_tokens"}, False),
    (
        "Seconds",
        {
            "rollout": "clock/rollout_seconds",
            "of it waiting": "clock/waiting_seconds",
            "update": "clock/update_seconds",
            "validation": "clock/validation_seconds",
        },
        False,
    ),
)
"""Title, metrics by what they are called, and whether y is logarithmic. What a run does not log is left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An episode to look at, and why."""

    why: str
    episode: Json


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes the report of the run in a folder, by default as `report.html` in it. Returns the file.

    Raises:
        RecordError: the folder holds no run that can be read.
        OSError: the file cannot be written.
    """
    run = read_run(folder)
    return write_page(out or folder / PAGE, report(run, samples(run.episodes)))


def report(run: RecordedRun, shown: Iterable[Sample]) -> str:
    """The page of a run, with these episodes."""
    return page(
        run.name,
        *_summary(run),
        *_alarms(run),
        tag("h2", "Curves, by iteration"),
        tag("div", *(figure(chart) for chart in charts(run)), class_="charts"),
        tag("h2", "Episodes"),
        *([_episode(sample) for sample in shown] or [tag("p", "No episode was logged.", class_="faint")]),
        *_settings(run),
        *_versions(run),
    )


def charts(run: RecordedRun) -> list[Chart]:
    """Success, then every curve of which the run logs anything."""
    marks = tuple((_alarm_mark(alarm), float(alarm.iteration)) for alarm in run.alarms)
    drawn = [success_chart(run, marks)]
    for title, names, log in CURVES:
        found = tuple(Series(label, _points(run, name)) for label, name in names.items() if run.series(name))
        if any(point.y is not None for series in found for point in series.points):
            drawn.append(Chart(title, found, marks=marks, log=log))
    return drawn


def success_chart(run: RecordedRun, marks: tuple[tuple[str, float], ...]) -> Chart:
    """Success in training and at validations, between floor and ceiling where these are known."""
    found = [Series("training", _points(run, "train/success")), Series("validation, 95 %", validations(run))]
    return Chart(
        "Success",
        tuple(series for series in found if series.points),
        rules=references(run),
        marks=marks,
        bounds=(0.0, 1.0),
    )


def references(run: RecordedRun) -> tuple[tuple[str, float], ...]:
    """Floor and ceiling of the validation split, where the server named them."""
    known = (("floor", run.facts.floor), ("ceiling", run.facts.ceiling)) if run.facts else ()
    return tuple((name, reference.value) for name, reference in known if reference)


def validations(run: RecordedRun) -> tuple[Point, ...]:
    """Success at each validation with Wilson's interval."""
    return tuple(
        Point(line["iteration"] or 0, line["validation/success"], line["validation/low"], line["validation/high"])
        for line in run.metrics
        if line.get("validation/success") is not None
    )


def samples(episodes: Callable[[], Iterable[Json]]) -> list[Sample]:
    """The best, the worst, the median and the newest episode; of equal ones the newest. None is shown twice.

    Args:
        episodes: gives them in the order of play. Called twice, and read one at a time: they may not fit into memory.
    """
    rewards = [cast(float, episode["reward"]) for episode in episodes()]
    if not rewards:
        return []
    order = sorted(range(len(rewards)), key=lambda at: (rewards[at], at))
    median = rewards[order[(len(order) - 1) // 2]]
    wanted = {
        "best": order[-1],
        "worst": max(at for at in order if rewards[at] == rewards[order[0]]),
        "median": max(at for at in order if rewards[at] == median),
        "newest": len(rewards) - 1,
    }
    why: dict[int, list[str]] = {}
    for name, at in wanted.items():
        why.setdefault(at, []).append(name)
    found = {at: episode for at, episode in enumerate(islice(episodes(), max(why) + 1)) if at in why}
    return [Sample(" and ".join(names).capitalize(), found[at]) for at, names in why.items() if at in found]


def progress_line(run: RecordedRun) -> str:
    """How far a run is, in words."""
    told = f"{run.iteration} of {run.config.run.iterations} iterations"
    if run.finished or not run.metrics:
        return told
    written = run.metrics[-1].get("clock/time")
    when = f", the last one at {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(written))}" if written else ""
    return f"{told}{when}; not finished: still going, or stopped"


def percent(share: float | None) -> str:
    """A share for people; – where there is none."""
    return "–" if share is None else f"{share * 100:.1f} %"


def success_words(line: Mapping[str, float | None] | None, environment: str = "") -> str:
    """Success of a validation with its interval; in one environment of a mixture where its `NAME/` is given."""
    if line is None:
        return "–"
    low, high = line.get(f"validation/{environment}low"), line.get(f"validation/{environment}high")
    interval = f" ({low * 100:.1f} to {high * 100:.1f})" if low is not None and high is not None else ""
    return f"{percent(line.get(f'validation/{environment}success'))}{interval}"


def duration(seconds: float) -> str:
    """Seconds, or minutes and hours where there are many."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _summary(run: RecordedRun) -> list[Html]:
    environment = run.config.environment
    version = f" {run.facts.environment.version}" if run.facts else ""
    trained = f"{environment.id}{version}, trained on split {environment.split}"
    if mixed := run.config.mixture.environments:
        trained = f"trained in {', '.join(f'{each.name or each.id} (split {each.split})' for each in mixed)}"
    last = run.validation()
    rows = [
        ("iterations", progress_line(run)),
        ("success at the last validation, 95 %", success_words(last)),
        *((f"{name} of the validation split", _reference(value)) for name, value in _references(run) if value),
        *(
            (f"of it {name}", success_words(last, f"{name}/"))
            for name in (each.name or each.id for each in run.config.mixture.environments)
            if last is not None
        ),
        ("episodes used", f"{run.total('train/episodes'):,.0f}"),
        ("episodes lost to infrastructure", f"{run.total('train/lost'):,.0f}"),
        ("tokens written by the policy", f"{run.total('train/tokens'):,.0f}"),
        ("time in iterations", duration(run.total("clock/iteration_seconds"))),
    ]
    if last is not None:
        played = f"iteration {short(last['iteration'] or 0)}, {short(last['validation/episodes'] or 0)} worlds"
        rows[1] = (rows[1][0], f"{rows[1][1]}, {played}")
    return [
        tag("p", f"{trained}, policy {run.config.policy.model}"),
        table(("", ""), rows, words=2),
    ]


def _references(run: RecordedRun) -> tuple[tuple[str, Reference | None], ...]:
    return (("floor", run.facts.floor), ("ceiling", run.facts.ceiling)) if run.facts else ()


def _reference(reference: Reference) -> str:
    half = f" ± {reference.half_width * 100:.1f}" if reference.half_width else ""
    return f"{reference.value * 100:.1f} %{half}"


def _alarms(run: RecordedRun) -> list[Html]:
    if not run.alarms:
        return []
    said = [
        (
            str(alarm.iteration),
            str(alarm.attempt),
            alarm.kind,
            "–" if alarm.since is None else str(alarm.since),
            alarm.told,
        )
        for alarm in run.alarms
    ]
    headings = ("iteration", "attempt", "kind", "since", "what was seen")
    return [tag("h2", "Alarms", class_="alarm"), table(headings, said, words=5)]


def _alarm_mark(alarm: AlarmRecord) -> str:
    return f"alarm: {alarm.kind}" + (f", attempt {alarm.attempt}" if alarm.attempt else "")


def _points(run: RecordedRun, name: str) -> tuple[Point, ...]:
    return tuple(Point(x, y) for x, y in run.series(name))


def _episode(sample: Sample) -> Html:
    """One episode, folded, turn by turn."""
    episode = sample.episode
    turns = cast(list[Json], episode["turns"])
    success = {True: "solved", False: "not solved", None: "verdict unknown"}[cast("bool | None", episode["success"])]
    ended = "ended" if episode["terminated"] else "cut off by a limit" if episode["truncated"] else "not ended"
    head = (
        f"{sample.why}: reward {short(cast(float, episode['reward']))}, {success}, {len(turns)} turns, "
        f"iteration {episode['iteration']}"
    )
    where = (
        f"{episode['environment']}, level seed {episode['level_seed']}, noise seed {episode['noise_seed']}, group "
        f"{episode['group']}, member {episode['member']}, {ended}, {'kept' if episode['kept'] else 'not kept'} by the "
        f"filter, {short(cast(float, episode['environment_return']))} from the environment"
    )
    left = len(turns) - MOST_TURNS
    rest = [tag("p", f"{left} more turns are in the run's trajectories.jsonl.", class_="faint")] if left > 0 else []
    return tag(
        "details",
        tag("summary", head),
        tag("p", where, class_="faint"),
        *(_turn(number, turn) for number, turn in enumerate(islice(turns, MOST_TURNS), 1)),
        *rest,
    )


def _turn(number: int, turn: Json) -> Html:
    """What the policy saw, thought, wrote and did in one turn, and what it got for it."""
    actions = " || ".join(str(action) for action in cast(list[object], turn["actions"]))
    faults = [
        said
        for name, said in (("valid_format", "could not be parsed"), ("valid_action", "held an invalid action"))
        if not turn[name]
    ]
    process = f" (process {short(cast(float, turn['process']))})" if "process" in turn else ""
    reward = f"reward {short(cast(float, turn['reward']))}{process}, {turn['actions_executed']} actions run"
    reasoning = str(turn["reasoning"])
    return tag(
        "div",
        tag("h3", f"Turn {number}: {reward}{''.join(f', {fault}' for fault in faults)}"),
        *_text("observation", str(turn["observation"])),
        *(_text("reasoning", reasoning) if reasoning.strip() else ()),
        *(_text("action", actions) if actions.strip() else ()),
        # What was written is told by reasoning and action, unless it could not be taken apart.
        *(() if turn["valid_format"] else _text("as it was written", str(turn["response"]))),
        class_="turn",
    )


def _text(what: str, text: str) -> list[Html]:
    more = len(text) - MOST_CHARACTERS
    cut = f"{text[:MOST_CHARACTERS]}… ({more:,} more characters)" if more > 0 else text
    return [tag("div", what, class_="faint"), tag("pre", cut)]


def _settings(run: RecordedRun) -> list[Html]:
    rows = [(key, value, default, meaning) for key, value, default, meaning in settings_that_differ(run.config)]
    return [tag("h2", "Settings that are not the defaults"), table(("setting", "value", "default", ""), rows, words=4)]


def _versions(run: RecordedRun) -> list[Html]:
    if run.facts is None:
        return [tag("h2", "Versions"), tag("p", "This run did not write them down.", class_="faint")]
    rows = list(run.facts.versions.items())
    for environment in (run.facts.environment, *run.facts.others):
        rows += [
            (f"environment {environment.id}", environment.version),
            ("its options", environment.options_json),
            ("its limits", ", ".join(f"{name} {short(value)}" for name, value in environment.limits.items())),
            ("its split epoch", str(environment.split_epoch)),
        ]
    return [tag("h2", "Versions"), table(("", ""), rows, words=2)]
