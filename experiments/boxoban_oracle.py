"""How many levels of a Boxoban file the Sokoban oracle solves within its default limits, and which it does not.

    python experiments/boxoban_oracle.py FILE

plays the oracle's moves on every level by the environment's own rules, and writes boxoban_oracle.json and .txt beside
this script. Exits with 1 if fewer than 95 % are solved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import turngym
from turngym_server.environment import Left
from turngym_server.envs.sokoban import Sokoban, SokobanOptions
from turngym_server.rng import Rng
from turngym_server.sokoban.level_file import parse_level, read_levels
from turngym_server.sokoban.search import NODE_LIMIT, fewest_pushes

ENOUGH = 0.95


@dataclass(frozen=True)
class Outcome:
    """One level: whether playing the oracle solved it, its moves and pushes, and what the search cost."""

    level: int
    solved: bool
    moves: int
    pushes: int
    nodes: int
    exhausted: bool


def play(number: int, text: str) -> Outcome:
    level = parse_level(text)
    search = fewest_pushes(level.board, level.player, level.boxes)
    environment = Sokoban(SokobanOptions())
    limits = environment.load(text).limits
    assert limits is not None
    left = Left(limits.max_turns, limits.max_actions, limits.max_actions_per_turn)
    solved, moves = False, 0
    while left.reachable_actions and (turn := environment.oracle(left)):
        for action in turn:
            solved = environment.step(action, Rng(0, 0)).terminated
            moves += 1
        left = Left(left.turns - 1, left.actions - len(turn), left.actions_per_turn)
    return Outcome(number, solved, moves, search.pushes, search.nodes, search.exhausted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    outcomes = [play(number, text) for number, text in enumerate(read_levels(file))]
    solved = [outcome for outcome in outcomes if outcome.solved]
    unsolved = [outcome for outcome in outcomes if not outcome.solved]
    nodes = sorted(outcome.nodes for outcome in outcomes)
    moves, pushes = [outcome.moves for outcome in solved], [outcome.pushes for outcome in solved]
    share = f"{len(solved)} of {len(outcomes)} levels solved ({len(solved) / len(outcomes):.1%})"
    report = f"""{file.name}: {share} within {NODE_LIMIT} nodes a level
moves: median {statistics.median(moves):g}, most {max(moves)}
pushes: median {statistics.median(pushes):g}, most {max(pushes)}
nodes: median {statistics.median(nodes):g}, 95th percentile {nodes[len(nodes) * 95 // 100]}, most {nodes[-1]}
not solved: {", ".join(str(outcome.level) for outcome in unsolved) or "none"}
"""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "file": file.name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "levels": len(outcomes),
        "solved": len(solved),
        "node_limit": NODE_LIMIT,
        "unsolved": [asdict(outcome) for outcome in unsolved],
        "hardest": [asdict(outcome) for outcome in sorted(outcomes, key=lambda o: -o.nodes)[:10]],
        "made_by": {
            "command": f"python experiments/boxoban_oracle.py {file.name}",
            "commit": commit,
            "turngym": turngym.__version__,
            "python": platform.python_version(),
        },
    }
    written = Path(__file__).with_suffix(".json")
    written.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    written.with_suffix(".txt").write_text(report, encoding="utf-8")
    print(report, end="")
    return 0 if len(solved) >= ENOUGH * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
