"""Server time of a board's pages with 10,000 episodes on it, and of the viewer with a file of hundreds of megabytes.

The board has five submissions of 2,000 episodes each in one environment, written into SQLite by the store's own
transactions. The file holds episodes of 20 turns as a training run writes them. Each page is asked for in this process
through the whole application, and timed by the process's CPU time, since other work may share the cores, with the time
on the clock beside it. The first call of each is told apart: it computes the ranking, or fills caches.

    python benchmarks/pages.py

Goals: no page takes 200 ms of CPU time (median of the later calls); the viewer keeps less than a tenth of the file in
memory. Prints the results; writes them beside this file as .txt, and as .json with what made them. Exit status 1 if a
goal is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import measure

sys.path.insert(0, str(measure.HERE.parent / "tests"))

import sample_boards
from fastapi import FastAPI
from sample_episodes import BOARD, PUSHED, training_episode, training_turn, write_lines
from starlette.testclient import TestClient

from turngym_leaderboard.pages.from_store import BoardSource
from turngym_leaderboard.pages.routes import pages_router
from turngym_leaderboard.pages.trajectory_file import TrajectoryFile
from turngym_leaderboard.pages.viewer import viewer
from turngym_leaderboard.store import open_store, submissions

GOAL: Final = 0.2
"""Seconds."""
AGENTS: Final = 5
INSTANCES: Final = 500
ATTEMPTS: Final = 4
CALLS: Final = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="of the viewer's file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, object] = {
            "board": board_results(Path(folder)),
            "viewer": viewer_results(Path(folder), asked.megabytes),
        }
    text, reached = told(results)
    print(text)
    measure.write("pages", results, text, command="python benchmarks/pages.py")
    sys.exit(0 if reached else 1)


def board_results(folder: Path) -> dict[str, object]:
    """Times of a board's pages, by what they are."""
    sample_boards.INSTANCES = INSTANCES
    with open_store(folder / "data") as store:
        board = sample_boards.new_board(store, sample_boards.definition(attempts=ATTEMPTS, sealed=False))
        for wins in (100, 450):
            sample_boards.play(store, board, {"sokoban": range(wins)}, until=INSTANCES)
        owner = sample_boards.owner(store, "alice")
        for number in range(AGENTS - 2):
            sample_boards.submit(store, board, owner, f"agent {number}")
            sample_boards.play(store, board, {"sokoban": range(200 + 50 * number)}, until=INSTANCES)
        one, other = [each.public_id for each in submissions.of_board(store, board)][2:4]
        app = FastAPI()
        app.include_router(pages_router(BoardSource(store)))
        client = TestClient(app)
        place = f"/boards/{board.slug}"
        listed = f"{place}/submissions/{one}/episodes"
        pages = {
            "all boards": "/",
            "board": place,
            "submission": f"{place}/submissions/{one}",
            "comparison": f"{place}/compare/{one}/{other}",
            "list of episodes": listed,
            "its last page": f"{listed}?page=21",
            "filtered by success": f"{listed}?verdict=failed",
            "filtered by environment and success": f"{listed}?environment=sokoban&verdict=solved&page=2",
        }
        return {name: timed(client, path) for name, path in pages.items()}


def viewer_results(folder: Path, megabytes: int) -> dict[str, object]:
    """How the viewer takes a large file."""
    path = folder / "trajectories.jsonl"
    path.touch()
    turns = [
        training_turn(BOARD if turn % 2 else PUSHED, reasoning="because the box is left of it " * 10)
        for turn in range(20)
    ]
    piece = folder / "piece.jsonl"
    number = 0
    while path.stat().st_size < megabytes * 1_000_000:
        episodes = [
            training_episode(number + k, success=k % 3 == 0, seed=k % 50) | {"turns": turns} for k in range(200)
        ]
        number += len(episodes)
        with path.open("ab") as file:
            file.write(write_lines(piece, *episodes).read_bytes())
    # A process of its own: this one has had more memory already.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
        read = apart.submit(read_file, path).result()
    file = TrajectoryFile(path)
    file.refresh()
    client = TestClient(viewer([file]), base_url="http://127.0.0.1")
    pages = {
        "list": "/",
        "filtered by success and turns": "/?verdict=solved&least=2",
        "filtered to nothing": "/?verdict=unknown",
        "an episode": f"/episodes/a-{number // 2}",
        "two side by side": f"/episodes/a-{number // 2}/a-{number}",
    }
    return {
        "bytes": path.stat().st_size,
        "episodes": number,
        "read": read,
        "pages": {name: timed(client, path) for name, path in pages.items()},
    }


def read_file(path: Path) -> dict[str, float]:
    """What it takes to open a file in this process: seconds, and bytes of memory at most."""
    before = most_memory()
    started, cpu = time.perf_counter(), time.process_time()
    TrajectoryFile(path).refresh()
    return {
        "clock_seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "bytes": most_memory() - before,
    }


def timed(client: TestClient, path: str) -> dict[str, object]:
    """Seconds of the first call of a page, and of the later ones."""
    calls = list(_calls(client, path))
    first, *later = calls
    return {
        "bytes": len(client.get(path).content),
        "first": {"cpu": first[0], "clock": first[1]},
        "cpu": measure.summary([cpu for cpu, _ in later]),
        "clock": measure.summary([clock for _, clock in later]),
    }


def _calls(client: TestClient, path: str) -> Iterator[tuple[float, float]]:
    for _ in range(CALLS + 1):
        cpu, clock = time.process_time(), time.perf_counter()
        answer = client.get(path)
        yield time.process_time() - cpu, time.perf_counter() - clock
        assert answer.status_code == 200, (path, answer.status_code)


def most_memory() -> int:
    """Bytes of memory that this process has had at most. `getrusage` would count its parent's too."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def told(results: dict) -> tuple[str, bool]:
    """The results for people, and whether every goal is reached."""
    viewed = results["viewer"]
    lines = ["Milliseconds of CPU time a page: median (most) of the later calls; on the clock; first call.", ""]
    slow: list[str] = []
    for title, pages in (
        (f"A board with {AGENTS * INSTANCES * ATTEMPTS:,} episodes", results["board"]),
        (f"The viewer with {viewed['episodes']:,} episodes, {viewed['bytes'] / 1e6:,.0f} MB", viewed["pages"]),
    ):
        lines.append(title)
        for name, page in pages.items():
            cpu, clock = page["cpu"], page["clock"]
            lines.append(
                f"    {name}: {cpu['median'] * 1e3:.0f} ({cpu['most'] * 1e3:.0f}); {clock['median'] * 1e3:.0f}; "
                f"{page['first']['cpu'] * 1e3:.0f}"
            )
            slow += [name] if cpu["median"] > GOAL else []
        lines.append("")
    read, share = viewed["read"], viewed["read"]["bytes"] / viewed["bytes"]
    lines.append(
        f"The file was read in {read['cpu_seconds']:.1f} s of CPU time ({read['clock_seconds']:.1f} on the clock), and "
        f"took {read['bytes'] / 1e6:.0f} MB of memory, {share:.1%} of its size."
    )
    missed = [f"{name} takes more than {GOAL * 1e3:.0f} ms" for name in slow]
    missed += ["the viewer keeps more than a tenth of the file"] if share > 0.1 else []
    lines.append("")
    lines.append("Missed: " + "; ".join(missed) if missed else "Every goal is reached.")
    return "\n".join(lines), not missed


if __name__ == "__main__":
    main()
