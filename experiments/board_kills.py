"""A board's worker killed (SIGKILL) at random moments of its play: `python experiments/board_kills.py`.

Two policies without any training, which sample, and the scripted rows are played on FrozenLake by a worker of two
slots. All processes of the worker are killed again and again: most often a random while after it has committed
something, sometimes while it still starts. In the end another worker plays what is left. The same is played undisturbed
in another database, and both must hold the same episodes, word for word, and the same statistics. Writes
board_kills.json and .txt beside this script.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from turngym_client import connect
from turngym_leaderboard.boards import BoardDefinition
from turngym_leaderboard.dealing import deal_board
from turngym_leaderboard.local_server import local_server
from turngym_leaderboard.record import code_record
from turngym_leaderboard.slot import PLAYED
from turngym_leaderboard.store import Store, boards, episodes, open_store, owners, submissions, work
from turngym_leaderboard.store.values import Board, Kind, State
from turngym_trainer.policy import load_policy

SECRET = 2**255 + 20_261_201
LEASE_SECONDS = 2.0
STARTS_KILLED = 0.25
"""Share of kills that meet the worker while it starts."""
STARTING_SECONDS = 6.0
PLAYING_SECONDS = 1.5
"""Longest whiles before a kill."""


@dataclass(frozen=True)
class Kill:
    """One kill. Episodes are those committed in all when the worker was started and when it was dead."""

    while_starting: bool
    seconds_after_start: float
    episodes_before: int
    episodes_after: int


def definition(instances: int) -> BoardDefinition:
    lake = {"id": "frozen_lake", "instances": instances, "attempts": 2, "showcase": 4}
    told = {"name": "kills", "title": "Kills", "season": "one", "sealed": False, "batch": 8, "environments": [lake]}
    return BoardDefinition.model_validate(told | {"max_response_tokens": 16})


def new_board(store: Store, address: str, instances: int) -> Board:
    """The board with two submissions that wait; the same wherever it is made."""
    made = definition(instances)
    with connect(address) as client:
        board = boards.create(store, made, SECRET, deal_board(client, made, SECRET))
    owner = owners.create(store, "owner")
    for seed in range(2):
        submission = submissions.create(store, board, owner, name=f"untrained {seed}", kind=Kind.CHECKPOINT)
        load_policy("tiny", seed=seed).save(store.folder(submission.public_id))
        submissions.set_state(store, submission.public_id, State.VALIDATED)
        submissions.set_state(store, submission.public_id, State.QUEUED)
    return board


def worker(data: Path, address: str, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "turngym_leaderboard.cli", "worker", str(data), "--server", address]
    command += ["--slots", "2", "--lease", str(LEASE_SECONDS), *arguments]
    with (data / "worker.log").open("ab") as log:
        return subprocess.Popen(command, start_new_session=True, stderr=log)


def committed(store: Store, board: Board) -> int:
    return sum(row.episodes for row in submissions.of_board(store, board))


def kill_once(store: Store, board: Board, address: str, chance: np.random.Generator) -> Kill:
    """Starts a worker and kills all its processes."""
    while_starting = bool(chance.random() < STARTS_KILLED)
    pause = float(chance.random()) * (STARTING_SECONDS if while_starting else PLAYING_SECONDS)
    before = committed(store, board)
    running, began = worker(store.data, address), time.monotonic()
    while not while_starting and committed(store, board) == before:
        if not work.unfinished(store, PLAYED):
            os.killpg(running.pid, signal.SIGKILL)
            raise RuntimeError("everything was played before the last kill; give more --instances")
        if running.poll() is not None:
            raise RuntimeError(f"the worker ended with exit code {running.returncode}; see {store.data}/worker.log")
        time.sleep(0.05)
    time.sleep(pause)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    return Kill(while_starting, round(time.monotonic() - began, 2), before, committed(store, board))


def finish(store: Store, address: str) -> None:
    """Plays what is left, undisturbed."""
    if code := worker(store.data, address, "--until-idle").wait():
        raise RuntimeError(f"the worker ended with exit code {code}; see {store.data}/worker.log")


def everything(store: Store, board: Board) -> dict[str, list[object]]:
    """Each submission's state, numbers and episodes by its name."""
    numbers = episodes.results(store, board)
    told: dict[str, list[object]] = {}
    for row in submissions.of_board(store, board):
        lines, _ = episodes.listing(store, row, limit=1_000_000)
        results = [(result.environment, result.statistics) for result in numbers[row.id]]
        played = [episodes.read(store, row, line.id) for line in lines]
        told[row.name] = [row.state.value, results, [(each.record, each.trajectory) for each in played]]
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--instances", type=int, default=120, help="enough to outlast the kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    chance = np.random.Generator(np.random.Philox(key=arguments.seed))
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        served = ("--env", "frozen_lake", "--splits", "held_out")
        with (
            local_server(served, folder / "server.log") as address,
            open_store(folder / "killed") as store,
            open_store(folder / "undisturbed") as calm,
        ):
            board = new_board(store, address, arguments.instances)
            kills = [kill_once(store, board, address, chance) for _ in range(arguments.kills)]
            if not work.unfinished(store, PLAYED):
                raise RuntimeError("everything was played before the last kill; give more --instances")
            finish(store, address)
            same = new_board(calm, address, arguments.instances)
            finish(calm, address)
            disturbed, undisturbed = everything(store, board), everything(calm, same)
            otherwise = (store.data / "worker.log").read_text().count("came out otherwise")
    total = definition(arguments.instances).episodes
    content = {
        "command": " ".join(["python", "experiments/board_kills.py", *sys.argv[1:]]),
        "code": code_record().model_dump(mode="json"),
        "environment": {"id": "frozen_lake", "version": board.environments[0].version},
        "submissions": len(disturbed),
        "episodes_each": total,
        "kills": [asdict(kill) for kill in kills],
        "lost": sum(total - len(rows[2]) for rows in disturbed.values()),  # pyright: ignore[reportArgumentType]
        "played_again_otherwise": otherwise,
        "same_as_undisturbed": disturbed == undisturbed,
    }
    target = Path(__file__).with_suffix("")
    target.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    lines = ["kill  while starting  after s  episodes before  committed"]
    lines += [
        f"{k:>4}  {'yes' if kill.while_starting else 'no':>14}  {kill.seconds_after_start:>7.2f}  "
        f"{kill.episodes_before:>15}  {kill.episodes_after - kill.episodes_before:>9}"
        for k, kill in enumerate(kills, 1)
    ]
    lines.append(
        f"{len(disturbed)} submissions of {total} episodes, {len(kills)} kills: {content['lost']} episodes lost, "
        f"{otherwise} came out otherwise when their part was played again; episodes and statistics "
        + ("equal" if content["same_as_undisturbed"] else "DIFFER FROM")
        + " those of an undisturbed evaluation"
    )
    target.with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    if not content["same_as_undisturbed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
