"""How often a board tells equal agents apart, and finds others: `python experiments/board_of_equals.py`.

Boards of ten agents are simulated whose true chances on each instance are known, and the shipped ranking is asked:

- equals: on how many boards any pair is told to differ (at most 5 % is promised), and on how many without Holm's
  adjustment;
- one better than nine by what the board says is detectable: how often a pair that differs is told to (80 % or more is
  promised);
- ten that differ step by step: on how many boards every agent's true rank lies in its rank range (95 % is promised).

Writes board_of_equals.json and .txt beside this script; with --board, only that board is played anew, and the others
are kept as they were. Each row names the commit that it was made by. All take about ten minutes of one core.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import scipy

import turngym
from turngym_leaderboard.ranking import Environment, Ranking, overall_weights, rank

HERE: Final = Path(__file__).parent
SEED: Final = 21
AGENTS: Final = 10

Generator = np.random.Generator
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Shape:
    """One environment of a board.

    Attributes:
        rate: mean chance of success. likeness: a + b of the beta distribution of the instances' chances; near 0 every
            instance is solved always or never.
        span: mean ceiling less floor, by which its score is normalised where there are several environments.
    """

    instances: int
    attempts: int
    rate: float
    likeness: float
    span: float = 1.0

    def chances(self, draws: Generator) -> Floats:
        return draws.beta(self.rate * self.likeness, (1 - self.rate) * self.likeness, self.instances)


BOARDS: Final[dict[str, tuple[Shape, ...]]] = {
    "256 instances, 1 attempt": (Shape(256, 1, 0.5, 2.0),),
    "512 instances, 1 attempt": (Shape(512, 1, 0.5, 2.0),),
    "512 instances, 1 attempt, alike": (Shape(512, 1, 0.5, 50.0),),
    "512 instances, 1 attempt, hard": (Shape(512, 1, 0.03, 2.0),),
    "40 instances, 4 attempts": (Shape(40, 4, 0.5, 2.0),),
    "256 instances, 4 attempts": (Shape(256, 4, 0.5, 2.0),),
    "256 instances, 4 attempts, clustered": (Shape(256, 4, 0.5, 0.2),),
    "256 instances, 4 attempts, easy": (Shape(256, 4, 0.97, 2.0),),
    "two environments": (Shape(256, 1, 0.5, 2.0, 0.83), Shape(256, 2, 0.3, 2.0, 0.24)),
}


def played(draws: Generator, shapes: Sequence[Shape], better: Floats) -> Ranking:
    """A board of which each agent is better than the instances' own chances by so much, wherever there is room."""
    weights = overall_weights([shape.span for shape in shapes]) if len(shapes) > 1 else [1.0]
    environments: list[Environment] = []
    for shape, weight in zip(shapes, weights, strict=True):
        chances = np.minimum(shape.chances(draws) * (1 - better.max()) + better[:, None], 1.0)
        environments.append(Environment(draws.binomial(shape.attempts, chances), shape.attempts, weight))
    return rank(environments)


TABLES: Final = ("equals", "one_better", "step_by_step")


def equals(name: str, number: int, boards: int) -> dict[str, object]:
    draws = np.random.Generator(np.random.Philox(np.random.SeedSequence([SEED, 0, number])))
    adjusted = unadjusted = 0
    detectable = 0.0
    for _ in range(boards):
        told = played(draws, BOARDS[name], np.zeros(AGENTS))
        adjusted += min(pair.adjusted for pair in told.pairs) <= told.level
        unadjusted += min(pair.p_value for pair in told.pairs) <= told.level
        assert told.detectable is not None
        detectable += told.detectable / boards
    return {
        "board": name,
        "boards": boards,
        "any_false_difference": adjusted / boards,
        "unadjusted": unadjusted / boards,
        "detectable": detectable,
    }


def one_better(name: str, number: int, detectable: float, boards: int) -> dict[str, object]:
    """`detectable` is of the score, of which a success rate is as much as the environments' weights say."""
    draws = np.random.Generator(np.random.Philox(np.random.SeedSequence([SEED, 1, number])))
    shapes = BOARDS[name]
    weight = sum(overall_weights([shape.span for shape in shapes])) if len(shapes) > 1 else 1.0
    better = np.zeros(AGENTS)
    better[-1] = detectable / weight
    found = 0
    for _ in range(boards):
        told = played(draws, shapes, better)
        found += sum(pair.adjusted <= told.level for pair in told.pairs if pair.second == AGENTS - 1)
    return {"board": name, "boards": boards, "better_by": detectable, "found": found / boards / (AGENTS - 1)}


def step_by_step(name: str, number: int, boards: int) -> dict[str, object]:
    """Each agent better than the one before by 3 points, in every environment."""
    draws = np.random.Generator(np.random.Philox(np.random.SeedSequence([SEED, 2, number])))
    covered, widths = 0, 0.0
    for _ in range(boards):
        told = played(draws, BOARDS[name], 0.03 * np.arange(AGENTS))
        covered += all(best <= AGENTS - agent <= worst for agent, (best, worst) in enumerate(told.ranks))
        widths += sum(worst - best + 1 for best, worst in told.ranks) / AGENTS / boards
    return {"board": name, "boards": boards, "true_ranks_in_ranges": covered / boards, "mean_width": widths}


def measure(
    names: Sequence[str], boards: int, commit: str, progress: Callable[[object], None]
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}

    def keep(table: str, row: dict[str, Any]) -> dict[str, Any]:
        found[table].append({**row, "commit": commit})
        progress(row)
        return row

    for name in names:
        number = list(BOARDS).index(name)
        row = keep("equals", equals(name, number, boards))
        if "hard" not in name and "easy" not in name:
            # Elsewhere a chance has no room to be so much better on every instance.
            keep("one_better", one_better(name, number, row["detectable"], boards // 10))
            keep("step_by_step", step_by_step(name, number, boards // 10))
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    boards = found["equals"][0]["boards"]
    error = math.sqrt(0.05 * 0.95 / boards)
    lines = [f"ten equal agents, {boards:,} boards each: any pair told to differ at 5 %"]
    lines.append("board                                   by Holm   unadjusted   detectable difference")
    lines += [
        f"{row['board']:38}  {row['any_false_difference']:7.1%}   {row['unadjusted']:10.1%}   {row['detectable']:21.3f}"
        for row in found["equals"]
    ]
    lines += ["", f"standard error of 5 %: {error:.1%}", ""]
    lines.append(f"one of ten better by the detectable difference, {boards // 10:,} boards each")
    lines.append("board                                   better by   found")
    lines += [f"{row['board']:38}  {row['better_by']:9.3f}   {row['found']:5.1%}" for row in found["one_better"]]
    lines += ["", f"ten agents, each 3 points better than the one before, {boards // 10:,} boards each"]
    lines.append("board                                   all true ranks in the ranges   mean width of a range")
    lines += [
        f"{row['board']:38}  {row['true_ranks_in_ranges']:28.1%}   {row['mean_width']:21.1f}"
        for row in found["step_by_step"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--boards", type=int, default=2000, help="of equals, of each kind (default 2000); others a tenth"
    )
    parser.add_argument("--board", action="append", choices=list(BOARDS), help="this one only; may be repeated")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    names = arguments.board or list(BOARDS)
    found = measure(names, arguments.boards, commit, lambda row: print(json.dumps(row), flush=True))
    file = HERE / "board_of_equals.json"
    kept = json.loads(file.read_text()) if arguments.board and file.exists() else dict.fromkeys(TABLES, ())
    for name in TABLES:
        found[name] += [row for row in kept[name] if row["board"] not in names]
        found[name].sort(key=lambda row: list(BOARDS).index(row["board"]))
    text = table(found)
    print(text)
    made_by = {
        "command": " ".join(["python", os.path.relpath(__file__), *sys.argv[1:]]),
        "seed": SEED,
        "turngym": turngym.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
    file.write_text(json.dumps({"made_by": made_by, **found}, indent=1) + "\n")
    (HERE / "board_of_equals.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
