"""A board's service and worker killed (SIGKILL) at random moments: `python experiments/board_kills.py`.

Two policies without any training, which sample, are submitted over a slow connection to a board of FrozenLake while its
scripted rows are played by a worker of two slots. Again and again all processes of the service, of the worker, or of
both are killed, most often a random while after something came on (bytes of an upload, a submission's state, an
episode), sometimes while they still start; both are started again at once, and the sender goes on from where it was.
The second half of the kills waits until the policies play. In the end nothing is killed any more until all is scored.
The same is played undisturbed in another database, and both must hold the same episodes, word for word, and the same
statistics.

    python experiments/board_kills.py
    python experiments/board_kills.py --database postgresql://user@host/empty_database

Writes board_kills_sqlite or board_kills_postgresql, .json and .txt, beside this script.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from turngym_client import connect
from turngym_leaderboard.boards import BoardDefinition
from turngym_leaderboard.client import BoardClient
from turngym_leaderboard.dealing import deal_board
from turngym_leaderboard.lifecycle import FINAL, Kind, Role
from turngym_leaderboard.local_server import local_server
from turngym_leaderboard.record import code_record
from turngym_leaderboard.store import Store, boards, episodes, open_store, owners, submissions
from turngym_leaderboard.store.values import Board
from turngym_trainer.policy import load_policy

SECRET = 2**255 + 20_261_201
LEASE_SECONDS = 2.0
TARGETS = {"worker": 0.5, "service": 0.25, "both": 0.25}
"""How likely each is killed."""
STARTS_KILLED = 0.25
"""Share of kills that meet processes while they start."""
STARTING_SECONDS = 6.0
GOING_ON_SECONDS = 1.5
"""Longest whiles before a kill."""
NOTHING_COMES_ON = 20.0
"""Seconds after which a kill waits no longer for something to come on."""
CHUNK_SECONDS = 1.0
"""For each quarter of a mebibyte that is sent."""
UPLOADS = 2


@dataclass(frozen=True)
class Kill:
    """One kill. Episodes (of all, and of the policies) and bytes are those kept when it was over."""

    target: str
    while_starting: bool
    seconds: float
    episodes: int
    of_policies: int
    bytes: int


class Program:
    """A command that is killed and started again."""

    def __init__(self, log: Path, *command: str, database: str) -> None:
        self._command = [sys.executable, "-m", "turngym_leaderboard.cli", *command]
        self._environment = {**os.environ, "TURNGYM_BOARD_DATABASE": database}
        self.log = log
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self._command, start_new_session=True, stdout=log, stderr=log, env=self._environment
            )

    def kill(self) -> None:
        """Raises RuntimeError if it had ended by itself."""
        if self._running.poll() is not None:
            raise RuntimeError(f"it ended by itself with exit code {self._running.returncode}; see {self.log}")
        os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait()

    def stop(self) -> None:
        self._running.terminate()
        self._running.wait()


class Senders:
    """Submits the policies, one after the other, over a slow connection."""

    def __init__(self, address: str, token: str, board: Board, policies: list[Path]) -> None:
        self.sent: list[str] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._send, args=(address, token, board, policies), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the end. Raises what the client did."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _send(self, address: str, token: str, board: Board, policies: list[Path]) -> None:
        try:
            with BoardClient(address, token, patience=600) as client:
                for policy in policies:
                    told = client.submit(policy, board.slug, name=policy.name, progress=_slowly)
                    self.sent.append(told.id)
        except BaseException as failure:
            self._failure = failure


def _slowly(arrived: int, total: int) -> None:
    time.sleep(CHUNK_SECONDS)


def definition(instances: int) -> BoardDefinition:
    lake = {"id": "frozen_lake", "instances": instances, "attempts": 2, "showcase": 4}
    told = {"name": "kills", "title": "Kills", "season": "one", "sealed": False, "batch": 8, "environments": [lake]}
    return BoardDefinition.model_validate(told | {"max_response_tokens": 16})


@contextmanager
def running(
    store: Store, server: str, instances: int, policies: list[Path], database: str
) -> Generator[tuple[Board, Program, Program, Senders]]:
    """A board, the same wherever it is made, with its service, its worker and those who send to it."""
    made = definition(instances)
    with connect(server) as client:
        board = boards.create(store, made, SECRET, deal_board(client, made, SECRET))
    token = owners.add_token(store, owners.create(store, "owner"), Role.SUBMIT)
    port, data = free_port(), str(store.data)
    arguments = ("--server", server, "--slots", "2", "--lease", str(LEASE_SECONDS))
    log = store.data.with_suffix(".log")
    service = Program(log, "serve", data, "--no-worker", "--port", str(port), database=database)
    worker = Program(log, "worker", data, *arguments, database=database)
    try:
        yield board, service, worker, Senders(f"http://127.0.0.1:{port}", token, board, policies)
    finally:
        service.stop()
        worker.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Progress:
    """Episodes (of all, and of the policies) and bytes that are kept, and the states of submissions."""

    episodes: int
    of_policies: int
    bytes: int
    states: tuple[str, ...]


def progress(store: Store, board: Board) -> Progress:
    rows = submissions.of_board(store, board)
    return Progress(
        episodes=sum(row.episodes for row in rows),
        of_policies=sum(row.episodes for row in rows if row.kind is Kind.CHECKPOINT),
        bytes=sum(file.received for row in rows for file in submissions.files(store, row.public_id)),
        states=tuple(row.state.value for row in rows),
    )


def over(store: Store, board: Board) -> bool:
    rows = submissions.of_board(store, board)
    return len(rows) == 2 + UPLOADS and all(row.state in FINAL for row in rows)


def kill_once(store: Store, board: Board, programs: dict[str, Program], chance: np.random.Generator) -> Kill:
    """Kills one of them, or both, and starts what was killed."""
    began, before = time.monotonic(), progress(store, board)
    target = str(chance.choice(list(TARGETS), p=list(TARGETS.values())))
    while_starting = bool(chance.random() < STARTS_KILLED)
    pause = float(chance.random()) * (STARTING_SECONDS if while_starting else GOING_ON_SECONDS)
    while not while_starting and progress(store, board) == before and time.monotonic() < began + NOTHING_COMES_ON:
        time.sleep(0.05)
    time.sleep(pause)
    if over(store, board):
        raise RuntimeError("everything was played before the last kill; give more --instances")
    killed = [program for name, program in programs.items() if target in (name, "both")]
    for program in killed:
        program.kill()
    kept = progress(store, board)
    for program in killed:
        program.start()
    seconds = round(time.monotonic() - began, 2)
    return Kill(target, while_starting, seconds, kept.episodes, kept.of_policies, kept.bytes)


def wait_for(true: Callable[[], bool], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not true():
        if time.monotonic() > ends:
            raise RuntimeError(f"what was waited for has not come within {seconds:g} s; give more --patience")
        time.sleep(0.5)


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


def counted_wrongly(store: Store, board: Board) -> int:
    """Episodes that submissions count, but that are not there or are there twice."""
    wrong = 0
    for row in submissions.of_board(store, board):
        lines, _ = episodes.listing(store, row, limit=1_000_000)
        different = {(line.environment, line.draw, line.attempt) for line in lines}
        wrong += abs(row.episodes - len(different)) + len(lines) - len(different)
    return wrong


def lost_bytes(store: Store, sent: list[str], policies: list[Path]) -> int:
    """Files that do not lie there as they were sent."""
    lost = 0
    for public_id, policy in zip(sent, policies, strict=True):
        for file in submissions.files(store, public_id):
            lost += (store.folder(public_id) / file.name).read_bytes() != (policy / file.name).read_bytes()
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--instances", type=int, default=120, help="enough to outlast the kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--database", default="", help="URL of an empty PostgreSQL database; default: SQLite")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for what is left after the last kill")
    arguments = parser.parse_args()
    chance = np.random.Generator(np.random.Philox(key=arguments.seed))
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        policies = [folder / f"untrained {seed}" for seed in range(UPLOADS)]
        for seed, policy in enumerate(policies):
            load_policy("tiny", seed=seed).save(policy)
        served = ("--env", "frozen_lake", "--splits", "held_out")
        with (
            local_server(served, folder / "server.log") as server,
            open_store(folder / "killed", arguments.database) as store,
            open_store(folder / "undisturbed") as calm,
        ):
            with running(store, server, arguments.instances, policies, arguments.database) as started:
                board, service, worker, senders = started
                programs = {"service": service, "worker": worker}
                at_once = arguments.kills // 2
                kills = [kill_once(store, board, programs, chance) for _ in range(at_once)]
                wait_for(lambda: progress(store, board).of_policies > 0, arguments.patience)
                kills += [kill_once(store, board, programs, chance) for _ in range(arguments.kills - at_once)]
                senders.finish()
                wait_for(lambda: over(store, board), arguments.patience)
            with running(calm, server, arguments.instances, policies, "") as started:
                same, _, _, calm_senders = started
                calm_senders.finish()
                wait_for(lambda: over(calm, same), arguments.patience)
            disturbed, undisturbed = everything(store, board), everything(calm, same)
            said = service.log.read_text()
            wrong, lost = counted_wrongly(store, board), lost_bytes(store, senders.sent, policies)
    total = definition(arguments.instances).episodes
    shown = re.sub(r"postgresql\S+", "postgresql://…", " ".join(sys.argv[1:]))
    content = {
        "command": f"python experiments/board_kills.py {shown}".strip(),
        "code": code_record().model_dump(mode="json"),
        "environment": {"id": "frozen_lake", "version": board.environments[0].version},
        "submissions": len(disturbed),
        "episodes_each": total,
        "kills": [asdict(kill) for kill in kills],
        "episodes_lost": sum(total - len(rows[2]) for rows in disturbed.values()),  # pyright: ignore[reportArgumentType]
        "episodes_counted_wrongly": wrong,
        "files_lost": lost,
        "played_again_otherwise": said.count("came out otherwise"),
        "same_as_undisturbed": disturbed == undisturbed,
    }
    kind = "postgresql" if arguments.database else "sqlite"
    target = Path(__file__).with_name(f"board_kills_{kind}")
    target.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    text = report(kind, kills, content)
    target.with_suffix(".txt").write_text(text, encoding="utf-8")
    print(text, end="")
    if not content["same_as_undisturbed"] or wrong or lost:
        raise SystemExit(1)


def report(kind: str, kills: list[Kill], content: dict[str, object]) -> str:
    lines = ["kill  of       while starting  after s  episodes kept  of policies  bytes of uploads kept"]
    lines += [
        f"{k:>4}  {kill.target:<7}  {'yes' if kill.while_starting else 'no':>14}  {kill.seconds:>7.2f}  "
        f"{kill.episodes:>13}  {kill.of_policies:>11}  {kill.bytes:>21}"
        for k, kill in enumerate(kills, 1)
    ]
    lines += [
        f"{kind}: {content['submissions']} submissions of {content['episodes_each']} episodes, {len(kills)} kills",
        f"{content['episodes_lost']} episodes lost, {content['episodes_counted_wrongly']} counted wrongly",
        f"{content['files_lost']} files of {UPLOADS} uploads lost",
        f"{content['played_again_otherwise']} episodes came out otherwise when their part was played again",
        "episodes and statistics "
        + ("equal" if content["same_as_undisturbed"] else "DIFFER FROM")
        + " those of an undisturbed evaluation",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
