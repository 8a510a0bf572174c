"""Whether the leaderboard's intervals cover what they promise: `python experiments/interval_coverage.py`.

Agents whose true score is known are played many times over, and the shipped functions asked each time:

- success with one attempt an instance: exactly, by the binomial distribution, over a fine grid of true rates;
- success with several attempts, whose instances differ in difficulty by a beta distribution: simulated;
- the normalised score ν, floors and ceilings exact or the floors played: simulated;
- the overall score, the mean of ν over several environments: simulated.

Writes interval_coverage.json and .txt beside this script. It takes a few minutes of one core. False differences between
agents are counted by board_of_equals.py.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import scipy
from scipy import stats

import turngym
from turngym_leaderboard import binomial
from turngym_leaderboard import statistics as st

HERE: Final = Path(__file__).parent
INSIDE: Final = binomial.EXACT_OUTSIDE
SEED: Final = 20

Generator = np.random.Generator


def generator(*place: int) -> Generator:
    """Draws of one cell of a table, the same whichever others are run."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([SEED, *place])))


def exactly(instances: int) -> dict[str, object]:
    """Coverage of the success interval with one attempt on each instance, over true rates up to 1/2."""
    intervals = [st.success([[i < k] for i in range(instances)]).interval for k in range(instances + 1)]
    low, high = (np.array([getattr(interval, end) for interval in intervals]) for end in ("low", "high"))
    rates = np.concatenate([np.arange(0.0005, INSIDE[0], 0.00005), np.arange(INSIDE[0], 0.5, 0.0002)])
    chances = stats.binom.pmf(np.arange(instances + 1)[None], instances, rates[:, None])
    coverage = (chances * ((low[None] <= rates[:, None]) & (rates[:, None] <= high[None]))).sum(1)
    inside = rates >= INSIDE[0]
    least, most = (int(np.argmin(coverage[inside])), int(np.argmax(coverage[inside])))
    outside = int(np.argmin(coverage[~inside]))
    over = rates[inside][coverage[inside] > 0.97]
    return {
        "instances": instances,
        "inside_least": float(coverage[inside][least]),
        "inside_least_at": float(rates[inside][least]),
        "inside_most": float(coverage[inside][most]),
        "inside_most_at": float(rates[inside][most]),
        "over_97_up_to": float(over.max()) if len(over) else None,
        "outside_least": float(coverage[~inside][outside]),
        "outside_least_at": float(rates[~inside][outside]),
    }


def difficulty(draws: Generator, instances: int, rate: float, likeness: float) -> binomial.Floats:
    """An agent's success probability on each instance: beta with this mean; `likeness` → 0: always or never."""
    return draws.beta(rate * likeness, (1 - rate) * likeness, instances)


def clustered(instances: int, attempts: int, rate: float, likeness: float, times: int) -> dict[str, object]:
    draws = generator(1, instances, attempts, round(rate * 1e6), round(likeness * 1e6))
    covered = 0
    for _ in range(times):
        chances = difficulty(draws, instances, rate, likeness)
        interval = st.success((draws.random((instances, attempts)) < chances[:, None]).tolist()).interval
        covered += interval.low <= rate <= interval.high
    return {
        "instances": instances,
        "attempts": attempts,
        "rate": rate,
        "likeness": likeness,
        "coverage": covered / times,
        "times": times,
    }


def normalised(instances: int, attempts: int, value: float, floors: str, times: int) -> dict[str, object]:
    """ν of an agent that is everywhere the same way from floor to ceiling."""
    draws = generator(2, instances, attempts, round(value * 1e6), len(floors))
    covered = 0
    for n in range(times):
        floor = draws.beta(1.0, 4.0, instances)
        ceiling = 1 - (1 - floor) * draws.beta(0.3, 3.0, instances)
        outcomes = (draws.random((instances, attempts)) < (floor + value * (ceiling - floor))[:, None]).tolist()
        if floors == "exact":
            interval = st.normalised(outcomes, floor.tolist(), ceiling.tolist()).interval
        else:
            played = (draws.random((instances, attempts)) < floor[:, None]).mean(1)
            told = (played.tolist(), ceiling.tolist())
            interval = st.normalised_by_bootstrap(outcomes, *told, seed=n, resamples=1000).interval
        covered += interval.low <= value <= interval.high
    return {
        "instances": instances,
        "attempts": attempts,
        "value": value,
        "floors": floors,
        "coverage": covered / times,
        "times": times,
    }


@dataclasses.dataclass(frozen=True)
class Part:
    """One environment of an overall score, on 256 instances: how much is there above the floor, and who plays."""

    value: float
    attempts: int
    floors: str = "exact"
    perfect: bool = False
    """The ceiling is 1 everywhere, so that ν near 1 comes with an extreme success rate."""

    def play(self, draws: Generator, seed: int) -> st.Normalised:
        floor = draws.beta(1.0, 4.0, 256)
        ceiling = np.ones(256) if self.perfect else 1 - (1 - floor) * draws.beta(0.3, 3.0, 256)
        chances = floor + self.value * (ceiling - floor)
        outcomes = (draws.random((256, self.attempts)) < chances[:, None]).tolist()
        if self.floors == "exact":
            return st.normalised(outcomes, floor.tolist(), ceiling.tolist())
        played = (draws.random((256, self.attempts)) < floor[:, None]).mean(1)
        return st.normalised_by_bootstrap(outcomes, played.tolist(), ceiling.tolist(), seed=seed, resamples=1000)


OVERALL: Final = {
    "two alike": (Part(0.5, 1), Part(0.5, 1)),
    "two apart": (Part(0.1, 1), Part(0.9, 4)),
    "three": (Part(0.0, 4), Part(0.5, 1), Part(1.0, 2)),
    "one all but perfect": (Part(0.3, 1), Part(0.995, 1, perfect=True)),
    "both all but perfect": (Part(0.99, 1, perfect=True), Part(0.995, 2, perfect=True)),
    "one of played floors": (Part(0.4, 1, "played"), Part(0.6, 1)),
}


def overall(name: str, number: int, times: int) -> dict[str, object]:
    """The mean of the normalised scores in several environments."""
    draws, parts = generator(4, number), OVERALL[name]
    true, covered = sum(part.value for part in parts) / len(parts), 0
    for n in range(times):
        scores = [part.play(draws, n) for part in parts]
        _, _, interval = st.mean_score(
            [score.value for score in scores],
            [score.standard_error for score in scores],
            [score.interval for score in scores],
        )
        covered += interval.low <= true <= interval.high
    return {"environments": name, "value": true, "coverage": covered / times, "times": times}


def margin(times: int) -> float:
    """Three standard errors of a simulated coverage of 95 %."""
    return 3 * math.sqrt(0.95 * 0.05 / times)


def verdict(row: dict[str, Any], *, inside: bool) -> str:
    """How a simulated coverage stands to what is asked for, its own error allowed for."""
    error, coverage = margin(row["times"]), row["coverage"]
    if coverage < (0.93 if inside else 0.95) - error:
        return "too little"
    return "too much" if inside and coverage > 0.97 + error else ""


def is_inside(rate: float) -> bool:
    return INSIDE[0] <= rate <= INSIDE[1]


def measure(times: int, progress: Callable[[object], None]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"exact": [], "clustered": [], "normalised": [], "overall": []}

    def keep(table: str, row: dict[str, Any]) -> None:
        found[table].append(row)
        progress(row)

    for instances in (256, 272, 300, 340, 512, 1024):
        keep("exact", exactly(instances))
    for instances, attempts, likeness, rate in itertools.product(
        (256, 512), (2, 4, 8), (0.2, 0.67, 2.0, 20.0), (0.004, 0.007, 0.013, 0.02, 0.025, 0.1, 0.95)
    ):
        keep("clustered", clustered(instances, attempts, rate, likeness, times))
    for attempts, value in itertools.product((1, 4), (0.0, 0.3, 0.7, 0.95, 1.0)):
        keep("normalised", normalised(256, attempts, value, "exact", times))
    for value in (0.0, 0.5, 0.9):
        keep("normalised", normalised(256, 1, value, "played", times // 4))
    for number, (name, parts) in enumerate(OVERALL.items()):
        slow = any(part.floors == "played" for part in parts)
        keep("overall", overall(name, number, times // 4 if slow else times))
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["success, one attempt, exact: coverage of the nominal 95 %"]
    lines.append("instances   rate in [0.02, 0.98]: least, most     over 97 % up to rate   outside: least")
    for row in found["exact"]:
        up_to = f"{row['over_97_up_to']:.4f}" if row["over_97_up_to"] is not None else "-"
        lines.append(
            f"{row['instances']:9}   {row['inside_least']:.1%} at {row['inside_least_at']:.4f}, "
            f"{row['inside_most']:.1%} at {row['inside_most_at']:.4f}   {up_to:>20}   "
            f"{row['outside_least']:.1%} at {row['outside_least_at']:.4f}"
        )
    lines += ["", "success, several attempts, simulated; likeness: of a + b of the instances' beta distribution"]
    lines.append("instances  attempts  likeness   rate   coverage")
    lines += [
        f"{row['instances']:9}  {row['attempts']:8}  {row['likeness']:8.2f}  {row['rate']:5.3f}   "
        f"{row['coverage']:7.1%}"
        f"  {verdict(row, inside=is_inside(row['rate']))}".rstrip()
        for row in found["clustered"]
    ]
    lines += ["", "normalised score, simulated", "instances  attempts  floors     ν   coverage"]
    lines += [
        f"{row['instances']:9}  {row['attempts']:8}  {row['floors']:6}  {row['value']:4.2f}   {row['coverage']:7.1%}"
        f"  {verdict(row, inside=True)}".rstrip()
        for row in found["normalised"]
    ]
    lines += ["", "overall score of several environments of 256 instances, simulated"]
    lines.append("environments              mean ν   coverage")
    lines += [
        f"{row['environments']:24}  {row['value']:6.4f}   {row['coverage']:7.1%}  "
        f"{verdict(row, inside=not all(part.perfect for part in OVERALL[row['environments']]))}".rstrip()
        for row in found["overall"]
    ]
    times = found["clustered"][0]["times"]
    lines += [
        "",
        f"three standard errors of a simulated coverage: {margin(times):.1%} ({times:,} times); what lies farther",
    ]
    lines.append("from 93-97 % inside and from at least 95 % outside is marked")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--times",
        type=int,
        default=2000,
        help="simulated scores of each row (default 2000; a quarter where floors are played)",
    )
    arguments = parser.parse_args()
    found = measure(arguments.times, lambda row: print(json.dumps(row), flush=True))
    text = table(found)
    print(text)
    made_by = {
        "command": " ".join(["python", os.path.relpath(__file__), *sys.argv[1:]]),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "seed": SEED,
        "turngym": turngym.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
    (HERE / "interval_coverage.json").write_text(json.dumps({"made_by": made_by, **found}, indent=1) + "\n")
    (HERE / "interval_coverage.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
