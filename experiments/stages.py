"""What experiments on trained policies share: a policy is taught by demonstrations, then by rewards, then measured.

A stage leaves a folder. Where that is there and whole, the stage is not run again, and a training that was interrupted
goes on, so a command that is given again after a kill ends with the same policies. What a stage takes is told in
processor seconds of its own process, which other load on the machine changes little; the server's are not in it.
"""

import json
import math
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import stdev

from scipy import stats

from turngym_leaderboard.record import code_record
from turngym_trainer.checkpoint import checkpoint_iteration, checkpoints
from turngym_trainer.config import Config
from turngym_trainer.metrics import Number
from turngym_trainer.train import CHECKPOINTS, CONFIG, train
from turngym_trainer.unfinished import UNFINISHED
from turngym_trainer.warm_start import REPORT, Check, warm_start

SPENT = "processor_seconds"


def taught(config: Config) -> Path:
    """The folder of a warm start's policy."""
    folder = Path(config.run.folder)
    if (folder / REPORT).is_file():
        return folder

    def observe(check: Check) -> None:
        told(f"{folder.name}: step {check.step}, loss {check.loss:.3f}, validation {check.success:.1%}")

    goes_on = (folder / UNFINISHED).is_dir()
    if not goes_on:
        shutil.rmtree(folder, ignore_errors=True)
    with _counted(folder):
        warm_start(config, resume=goes_on, observe=observe)
    return folder


def reinforced(config: Config) -> Path:
    """The folder of a training's last checkpoint."""
    folder = Path(config.run.folder)
    made = checkpoints(folder / CHECKPOINTS)
    if made and checkpoint_iteration(made[-1]) >= config.run.iterations:
        return made[-1]

    def observe(metrics: Mapping[str, Number]) -> None:
        if success := metrics.get("validation/success"):
            told(f"{folder.name}: iteration {metrics['iteration']}, validation {success:.1%}")

    with _counted(folder):
        return train(config, resume=(folder / CONFIG).is_file(), observe=observe)


def processor_seconds(folder: Path) -> float | None:
    """What a stage took, all its attempts together but those that were killed; None: made by another command."""
    spent = _spent(folder)
    return sum(float(line) for line in spent.read_text(encoding="utf-8").split()) if spent.is_file() else None


@contextmanager
def _counted(folder: Path) -> Generator[None]:
    began = time.process_time()
    try:
        yield
    finally:
        with _spent(folder).open("a", encoding="utf-8") as file:
            file.write(f"{time.process_time() - began:.1f}\n")


def _spent(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-{SPENT}.txt")


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % t-interval of a mean over seeds; NaN for a single one."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def told(line: str) -> None:
    """Says how far an experiment is."""
    print(f"{time.strftime('%H:%M:%S', time.gmtime())} {line}", flush=True)


def write(target: Path, command: str, table: str, **result: object) -> None:
    """Writes an experiment's .txt, which is the table, and its .json, which is everything, with what made them."""
    made_by = {"command": command, "code": code_record().model_dump(mode="json")}
    text = json.dumps({"made_by": made_by, **result}, indent=1, ensure_ascii=False)
    target.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    target.with_suffix(".txt").write_text(table, encoding="utf-8")
    print(table, end="")
