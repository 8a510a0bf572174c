"""Sokoban levels a CPU second, beside gym-sokoban's generator and the figures that were measured of RAGEN's.

A level is what the environment gives for one level seed of split `all`, so without redraws: an environment with its
options, and its reset with the text that the agent reads. gym-sokoban (PyPI) runs in a process and virtual environment
of its own, and makes rooms without rendering them. Both are timed by their own CPU time, in turns, A B A B, and ratios
to it are taken within a turn.

RAGEN's generator is no package. Its figures here were measured on two cores, once, and gym-sokoban's beside them. As
another machine, or another load, changes both alike, RAGEN's are also scaled by what gym-sokoban reaches now at 6×6,
where it makes enough levels to tell. A goal is reached if it is by both.

Levels are solved with the fewest pushes, which shows that they can be, and how hard they are. The easiest levels are
the fastest to make, so another row asks for levels of at least as many pushes as gym-sokoban's median ones had.

    python benchmarks/level_generation.py

Goals: 10 times RAGEN at 6×6 and 8×8, 100 times at 10×10; every level solved; under 1 % of 1,000 levels the same as
another but for turning and mirroring, from 8×8 on. Prints the results; writes them beside this file as .txt, and as
.json with what made them. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import measure

from turngym_server.envs.sokoban import Sokoban, SokobanLargeOptions, SokobanOptions
from turngym_server.rng import LEVEL_STREAM, Rng
from turngym_server.sokoban.level_file import parse_level
from turngym_server.sokoban.search import fewest_pushes
from turngym_server.symmetry import least_symmetry

PEER: Final = "gym-sokoban==0.0.6"
PEER_FOLDER: Final = measure.HERE.parent / ".venv-gym-sokoban"
HARDER_SOLUTION: Final = 100
"""Moves that a harder level may take."""
HARDER_LEVELS: Final = 50


@dataclass(frozen=True)
class Size:
    """A kind of level, and what is known of it.

    Attributes:
        ragen: levels a CPU second of RAGEN's generator, measured on two cores; the most of several runs.
        gym_sokoban: of gym-sokoban's, in the same runs.
        goal: how many times RAGEN's figure is to be reached.
        most_duplicates: share of 1,000 levels; None: no goal.
        peer_pushes: the median of the least pushes of gym-sokoban's levels.
        peer_seconds: CPU seconds for which gym-sokoban makes levels in one turn.
    """

    name: str
    options: SokobanOptions
    ragen: float
    gym_sokoban: float
    goal: int
    most_duplicates: float | None
    peer_pushes: int
    peer_seconds: float


SIZES: Final = (
    Size("6×6, 1 box", SokobanOptions(symbols="xsb"), 751, 473, 10, None, 2, 1.0),
    Size("8×8, 2 boxes", SokobanLargeOptions(symbols="xsb"), 295, 21.6, 10, 0.01, 5, 4.0),
    Size(
        "10×10, 4 boxes",
        SokobanOptions(width=10, height=10, boxes=4, max_solution=60, symbols="xsb"),
        4.4,
        0.10,
        100,
        0.01,
        10,
        20.0,
    ),
)


@dataclass(frozen=True)
class Made:
    """Levels in XSB symbols, and the CPU seconds that they took."""

    cpu_seconds: float
    levels: Sequence[str]

    @property
    def rate(self) -> float:
        return len(self.levels) / self.cpu_seconds


@dataclass(frozen=True)
class Quality:
    """What a set of levels is like.

    Attributes:
        unsolved: levels for which the solver found no solution.
        median_pushes: of the least pushes of each level.
        one_push: share of the levels that one push solves.
        duplicates: share of the levels that are another one of the set, turned or mirrored.
    """

    levels: int
    unsolved: int
    median_pushes: int
    most_pushes: int
    one_push: float
    duplicates: float


@dataclass(frozen=True)
class Row:
    """Results at one size. Rates are levels a CPU second.

    Attributes:
        times_ragen: our median rate over RAGEN's figure: as measured, and scaled to the machine as it is now.
        harder: options of the harder levels.
    """

    size: str
    rate: dict[str, float]
    peer_rate: dict[str, float]
    times_peer: dict[str, float]
    times_ragen: tuple[float, float]
    quality: Quality
    peer_quality: Quality
    harder: SokobanOptions
    harder_rate: dict[str, float]
    harder_quality: Quality


class Peer:
    """gym-sokoban's generator in a process of its own."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self._running = running

    def make(self, size: Size, seconds: float) -> Made:
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        asked = {"side": size.options.width, "boxes": size.options.boxes, "seconds": seconds}
        self._running.stdin.write(json.dumps(asked) + "\n")
        self._running.stdin.flush()
        answer = json.loads(self._running.stdout.readline())
        return Made(answer["cpu_seconds"], answer["levels"])


@contextlib.contextmanager
def peer() -> Generator[Peer]:
    """Runs gym-sokoban, which is installed first where it is not.

    Raises:
        subprocess.CalledProcessError: it cannot be installed.
    """
    python = PEER_FOLDER / "bin" / "python"
    if not python.exists():
        venv.create(PEER_FOLDER, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
    # Our own packages are of no use to it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [python, measure.HERE / "peer_gym_sokoban.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as running:
        try:
            yield Peer(running)
        finally:
            running.kill()


def make(options: SokobanOptions, seeds: range) -> Made:
    """The environment's levels of these seeds."""
    began = time.process_time()
    levels = [Sokoban(options).reset(Rng(seed, LEVEL_STREAM)).observation for seed in seeds]
    return Made(time.process_time() - began, levels)


def quality(levels: Sequence[str]) -> Quality:
    starts = [parse_level(level) for level in levels]
    solutions = [fewest_pushes(start.board, start.player, start.boxes) for start in starts]
    pushes = [solution.pushes for solution in solutions if solution.moves is not None]
    distinct = {least_symmetry(level.split("\n")) for level in levels}
    return Quality(
        levels=len(levels),
        unsolved=len(levels) - len(pushes),
        median_pushes=statistics.median_low(pushes),
        most_pushes=max(pushes),
        one_push=pushes.count(1) / len(levels),
        duplicates=1 - len(distinct) / len(levels),
    )


def measured(size: Size, other: Peer, machine: float, repeats: int, levels: int) -> Row:
    make(size.options, range(20))  # Fills the tables that a first level needs.
    ours: list[Made] = []
    theirs: list[Made] = []
    for turn in range(repeats):
        ours.append(make(size.options, range(turn * levels, (turn + 1) * levels)))
        theirs.append(other.make(size, size.peer_seconds))
    rate = measure.summary([made.rate for made in ours])
    harder = size.options.model_copy(update={"min_pushes": size.peer_pushes, "max_solution": HARDER_SOLUTION})
    hard = [make(harder, range(turn * HARDER_LEVELS, (turn + 1) * HARDER_LEVELS)) for turn in range(repeats)]
    return Row(
        size=size.name,
        rate=rate,
        peer_rate=measure.summary([made.rate for made in theirs]),
        times_peer=measure.summary([own.rate / their.rate for own, their in zip(ours, theirs, strict=True)]),
        times_ragen=(rate["median"] / size.ragen, rate["median"] / size.ragen / machine),
        quality=quality(ours[0].levels),
        peer_quality=quality([level for made in theirs for level in made.levels]),
        harder=harder,
        harder_rate=measure.summary([made.rate for made in hard]),
        harder_quality=quality([level for made in hard for level in made.levels]),
    )


def machine_speed(other: Peer, repeats: int) -> float:
    """What gym-sokoban reaches now at 6×6, of what it reached when RAGEN's figures were taken."""
    size = SIZES[0]
    return statistics.median(other.make(size, size.peer_seconds).rate for _ in range(repeats)) / size.gym_sokoban


def missed(size: Size, row: Row) -> list[str]:
    """The goals that a size misses, in words."""
    faults: list[str] = []
    if min(row.times_ragen) < size.goal:
        faults.append(f"{row.size}: {min(row.times_ragen):.1f} times RAGEN, not {size.goal}")
    if row.quality.unsolved or row.harder_quality.unsolved:
        faults.append(f"{row.size}: levels that the solver does not solve")
    if size.most_duplicates is not None and row.quality.duplicates >= size.most_duplicates:
        faults.append(f"{row.size}: {row.quality.duplicates:.1%} duplicates")
    return faults


def spread(values: dict[str, float]) -> str:
    median, least, most = (
        f"{values[key]:,.0f}" if values[key] >= 100 else f"{values[key]:.3g}" for key in ("median", "least", "most")
    )
    return f"{median} ({least} … {most})"


def described(own: Quality) -> str:
    return (
        f"{own.levels} levels, {own.unsolved} unsolved, least pushes {own.median_pushes} (median) to "
        f"{own.most_pushes}, with one push {own.one_push:.1%}, duplicates {own.duplicates:.1%}"
    )


def report(rows: Sequence[Row], machine: float, faults: Sequence[str]) -> str:
    lines = [
        "Levels a CPU second: median (least … most).",
        f"gym-sokoban at 6×6 reaches {machine:.2f} of what it reached when RAGEN's figures were taken.",
        "",
    ]
    for size, row in zip(SIZES, rows, strict=True):
        as_measured, scaled = row.times_ragen
        lines += [
            f"{row.size}, at most {size.options.max_solution} moves: {spread(row.rate)}",
            f"    {as_measured:.0f} times RAGEN's {size.ragen:g}, {scaled:.0f} times as scaled; goal {size.goal}",
            f"    {spread(row.times_peer)} times gym-sokoban's {spread(row.peer_rate)}",
            f"    {described(row.quality)}",
            f"    gym-sokoban's: {described(row.peer_quality)}",
            f"    at least {row.harder.min_pushes} pushes, at most {HARDER_SOLUTION} moves: {spread(row.harder_rate)}",
            f"        {described(row.harder_quality)}",
            "",
        ]
    lines += [f"MISSED {fault}" for fault in faults] or ["Every goal is reached."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns at each size")
    parser.add_argument("--levels", type=int, default=1_000, help="of ours in each turn")
    arguments = parser.parse_args()
    with peer() as other:
        machine = machine_speed(other, arguments.repeats)
        rows = [measured(size, other, machine, arguments.repeats, arguments.levels) for size in SIZES]
    faults = [fault for size, row in zip(SIZES, rows, strict=True) for fault in missed(size, row)]
    printed = report(rows, machine, faults)
    print(printed)
    (measure.HERE / "level_generation.txt").write_text(printed + "\n")
    measure.write(
        "level_generation",
        {
            "peer": PEER,
            "machine": machine,
            "repeats": arguments.repeats,
            "levels_a_turn": arguments.levels,
            "sizes": [
                {
                    "options": size.options.model_dump(),
                    "ragen": size.ragen,
                    "goal": size.goal,
                    **(asdict(row) | {"harder": row.harder.model_dump()}),
                }
                for size, row in zip(SIZES, rows, strict=True)
            ],
            "missed": faults,
        },
    )
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
