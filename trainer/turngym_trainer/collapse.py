"""What is written down of a collapse: which alarms, the signals that led to them, and three episodes that show it.

For people, as Markdown, one file for each iteration that gave an alarm; and every alarm as a line of alarms.jsonl,
which a rollback leaves as it is. Decides nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from turngym_trainer.guard import Alarm
from turngym_trainer.trajectory import Trajectory

ALARMS: Final = "alarms.jsonl"
SIGNALS: Final = (
    "train/reward",
    "average/train/reward",
    "train/success",
    "average/train/group_std",
    "average/update/entropy",
    "update/gradient_norm",
    "average/train/valid_format",
    "train/distinct_3_within",
    "train/response_tokens",
    "update/clip_high",
    "update/ratio_max",
    "update/refused",
)
"""Columns of the report."""
LAST: Final = 20
"""Iterations that it shows, beside the one before the first breach."""


def write_report(
    folder: Path,
    alarms: Sequence[Alarm],
    attempt: int,
    metrics: Sequence[Mapping[str, object]],
    trajectories: Sequence[Trajectory],
    rewards: NDArray[np.float64],
) -> Path:
    """Writes the report of an iteration's alarms, at least one, and adds them to alarms.jsonl.

    Args:
        folder: the run's.
        attempt: rollbacks before.
        metrics: all lines of metrics.jsonl, the alarms' iteration the last.
        trajectories, rewards: the iteration's episodes and their returns with shaping, [B].

    Returns:
        The report's file.
    """
    iteration = alarms[0].iteration
    _note(folder / ALARMS, [{**asdict(alarm), "kind": alarm.kind.value, "attempt": attempt} for alarm in alarms])
    report = folder / f"collapse-{iteration:06d}{f'-attempt-{attempt}' if attempt else ''}.md"
    lines = [f"# Alarm at iteration {iteration}, optimiser step {alarms[0].optimiser_step}", ""]
    lines += [f"- {alarm.kind.value}, since iteration {alarm.since}: {alarm.told}" for alarm in alarms]
    lines += ["", "## Signals", "", *_signals(metrics, min(alarm.since for alarm in alarms))]
    order = np.argsort(rewards, kind="stable")
    for name, place in (("lowest", 0), ("middle", len(order) // 2), ("highest", len(order) - 1)):
        episode = int(order[place])
        lines += ["", *_episode(f"The episode of {name} return", trajectories[episode], float(rewards[episode]))]
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return report


def _note(file: Path, alarms: Sequence[Mapping[str, object]]) -> None:
    """Adds lines that are not there: a resumed run comes to the same alarms again."""
    noted = set(file.read_text(encoding="utf-8").splitlines()) if file.exists() else set[str]()
    lines = [json.dumps(alarm, ensure_ascii=False) for alarm in alarms]
    with file.open("a", encoding="utf-8") as added:
        added.writelines(f"{line}\n" for line in lines if line not in noted)


def _signals(metrics: Sequence[Mapping[str, object]], since: int) -> list[str]:
    shown = [line for line in metrics[:-LAST] if line["iteration"] == since - 1] + list(metrics[-LAST:])
    columns = [name for name in SIGNALS if any(line.get(name) is not None for line in shown)]
    return [
        f"| iteration | {' | '.join(columns)} |",
        f"|{'---:|' * (len(columns) + 1)}",
        *(f"| {line['iteration']} | {' | '.join(_number(line.get(name)) for name in columns)} |" for line in shown),
    ]


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _episode(title: str, trajectory: Trajectory, reward: float) -> list[str]:
    seeds = f"level seed {trajectory.level_seed}, noise seed {trajectory.noise_seed}"
    lines = [f"## {title}: {reward:.4g}", "", f"{trajectory.environment}, {seeds}, success {trajectory.success}"]
    for number, turn in enumerate(trajectory.turns, start=1):
        lines += ["", f"Turn {number}, reward {turn.reward:.4g}:", "", *_quoted(turn.prompt), "", "wrote", ""]
        lines += _quoted(turn.response)
    return lines


def _quoted(text: str) -> list[str]:
    """As a block of code, whatever it holds."""
    return [f"    {line}" for line in text.split("\n")]
