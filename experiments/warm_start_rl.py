"""What rewards add to demonstrations: warm start, the same time of more demonstrations, and RL in its place.

    python experiments/warm_start_rl.py sokoban 1 2 3 4 5

Each seed teaches a tiny policy by an oracle that errs in a share of its turns, as people do; `warm_start.slips` says
how often. From that policy two ways go on: RL, and a second warm start on demonstrations of its own, which is given at
least the processor time that RL took. All three, a random player and the oracle then play the same held-out instances,
sampled at T = 1 and greedily. What is learnt from and how is in warm_start_rl_<environment>.toml.

On Sokoban rewards make what is sampled as good as the policy's most likely answers, which more demonstrations with
errors in them do not. Greedily the two end alike: what RL adds is that the policy is sure, and not yet a better plan.
On FrozenLake an episode's return is for the most part luck. There RL with the learning rate of Sokoban, 4e-4, loses 8
points within 40 iterations, and with 1e-4 neither gains nor loses any at T = 1.

Writes warm_start_rl_<environment>.json and .txt beside this script. Called again, also with more seeds, it goes on with
what is left; with the same `--folder`, in the middle of a seed too.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from stages import half_width, processor_seconds, reinforced, taught, told, write
from trainings import server

from turngym_leaderboard.record import Record, load
from turngym_trainer.config import Config
from turngym_trainer.settings import config_tree, load_config

WARM, MORE, RL = "warm start", "more warm start", "RL"


@dataclass(frozen=True, slots=True)
class Measure:
    """How the policies of an environment are measured.

    Attributes:
        turns, actions_per_turn: of an episode, which has 10 actions.
        more_steps: of the second warm start, so many that it takes no less processor time than RL.
    """

    instances: int
    attempts: int
    turns: int
    actions_per_turn: int
    more_steps: int


MEASURES: Final[Mapping[str, Measure]] = {
    "sokoban": Measure(instances=512, attempts=1, turns=5, actions_per_turn=5, more_steps=2_300),
    "frozen_lake": Measure(instances=1_024, attempts=5, turns=10, actions_per_turn=1, more_steps=2_000),
}


def settings(environment: str, seed: int, address: str, folder: Path, *others: str) -> Config:
    file = Path(__file__).with_name(f"{Path(__file__).stem}_{environment}.toml")
    return load_config(
        file=file, settings=[f"run.seed={seed}", f"run.server={address}", f"run.folder='{folder}'", *others]
    )


def play_seed(environment: str, seed: int, address: str, home: Path) -> dict[str, Any]:
    """Trains with a seed, and measures what came of it."""
    measure = MEASURES[environment]
    folders = {name: home / f"{name.replace(' ', '-')}-{seed}" for name in (WARM, MORE, RL)}
    warm = taught(settings(environment, seed, address, folders[WARM]))
    start = f"policy.model='{warm}'"
    checkpoint = reinforced(settings(environment, seed, address, folders[RL], start))
    # Of another seed, so that it learns from other demonstrations and not from the same ones again.
    other = (f"run.seed={1_000 + seed}", f"warm_start.max_steps={measure.more_steps}")
    more = taught(settings(environment, seed, address, folders[MORE], start, *other))
    record = measured(environment, measure, address, home / f"record-{seed}", {WARM: warm, MORE: more, RL: checkpoint})
    told(f"seed {seed}: " + ", ".join(f"{row.agent} {row.statistics.success.rate:.1%}" for row in _scored(record)))
    return {
        "seed": seed,
        "processor_seconds": {name: processor_seconds(folder) for name, folder in folders.items()},
        "protocol": record.protocol.model_dump(mode="json"),
        "rows": {row.agent: row.statistics.model_dump(mode="json") for row in _scored(record)},
        "comparisons": [each.model_dump(mode="json") for each in record.comparisons],
    }


def measured(environment: str, measure: Measure, address: str, out: Path, agents: Mapping[str, Path]) -> Record:
    """The record of an evaluation, which is not played again where it is there."""
    if not (made := sorted(out.glob("*/record.json"))):
        command = [sys.executable, "-m", "turngym_leaderboard.cli", "evaluate", "--env", environment]
        command += [part for name, path in agents.items() for part in ("--agent", f"{name}=checkpoint:{path}")]
        command += ["--server", address, "--instances", str(measure.instances), "--attempts", str(measure.attempts)]
        command += ["--turns", str(measure.turns), "--actions-per-turn", str(measure.actions_per_turn)]
        command += ["--also-greedy", "--threads", "1", "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made = sorted(out.glob("*/record.json"))
    return load(made[-1])


def _scored(record: Record) -> list[Any]:
    return [row for row in record.rows if row.statistics is not None and row.statistics.success is not None]


def over_seeds(values: Sequence[float]) -> str:
    """Mean with a t-interval."""
    if len(values) < 2:
        return f"{fmean(values):7.1%}"
    half = half_width(values)
    return f"{fmean(values):7.1%} ({fmean(values) - half:.1%} to {fmean(values) + half:.1%})"


def table(environment: str, results: Sequence[Mapping[str, Any]]) -> str:
    measure = MEASURES[environment]
    rows = list(results[0]["rows"])
    width = max(map(len, rows)) + 14

    def line(what: str, values: Sequence[float]) -> str:
        return f"{what:{width}}" + "".join(f"{value:8.1%}" for value in values) + f"  {over_seeds(values)}"

    lines = [
        f"{environment}, {measure.turns} turns of at most {measure.actions_per_turn} actions, 10 actions in all",
        f"{measure.instances} held-out instances, {measure.attempts} episodes on each",
        "success by seed, and its mean (95 % over seeds)",
        f"{'':{width}}" + "".join(f"{result['seed']:>8}" for result in results),
        *(line(row, [result["rows"][row]["success"]["rate"] for result in results]) for row in rows),
        *_normalised(rows, results, line),
        "",
        line(f"{RL} − {MORE}", [_gain(result, MORE, RL) for result in results]),
        line(f"{RL} − {WARM}", [_gain(result, WARM, RL) for result in results]),
        "",
        "processor seconds",
        *(
            f"{name:{width}}" + "".join(f"{result['processor_seconds'][name]:8.0f}" for result in results)
            for name in (WARM, MORE, RL)
        ),
    ]
    return "\n".join(lines) + "\n"


def _normalised(rows: Sequence[str], results: Sequence[Mapping[str, Any]], line: Any) -> list[str]:
    """Where in between floor and ceiling each row is, and the half width of the interval."""
    lines: list[str] = []
    for row in rows:
        scores = [result["rows"][row]["score"] for result in results]
        if all(scores):
            lines.append(line(f"{row}: ν", [score["value"] for score in scores]))
            lines.append(line("  half width", [(score["high"] - score["low"]) / 2 for score in scores]))
    return ["", *lines]


def _gain(result: Mapping[str, Any], first: str, second: str) -> float:
    rates = {name: result["rows"][name]["success"]["rate"] for name in (first, second)}
    return rates[second] - rates[first]


def known(target: Path, plain_settings: object) -> list[dict[str, Any]]:
    """Results of an earlier call, where it had the same settings."""
    file = target.with_suffix(".json")
    before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return before["seeds"] if before.get("settings") == plain_settings else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=list(MEASURES))
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time, each on one thread")
    parser.add_argument("--folder", type=Path, help="keeps the runs; default: a temporary folder")
    arguments = parser.parse_args()
    environment: str = arguments.environment
    target = Path(__file__).with_name(f"{Path(__file__).stem}_{environment}")
    config = settings(environment, 0, "HOST:PORT", Path("FOLDER"))
    plain = json.loads(json.dumps({"trainer": config_tree(config), "measure": asdict(MEASURES[environment])}))
    results = known(target, plain)
    left = [seed for seed in arguments.seeds if seed not in {result["seed"] for result in results}]
    more = ("--max-sessions", "50000")
    with (
        server([environment], arguments.folder, splits="train,validation,held_out", more=more) as (address, home),
        get_context("spawn").Pool(arguments.jobs) as pool,
    ):
        play = partial(play_seed, environment, address=address, home=home)
        for result in pool.imap_unordered(play, left):
            results = sorted([*results, result], key=lambda each: each["seed"])
            seeds = " ".join(str(each["seed"]) for each in results)
            command = f"python experiments/warm_start_rl.py {environment} {seeds}"
            write(target, command, table(environment, results), settings=plain, seeds=results)


if __name__ == "__main__":
    main()
