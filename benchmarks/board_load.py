"""A board's service under load: 1,000 readers and 20 uploads at once, and lists of 10,000 episodes.

The service is a process of its own; readers and senders share another with this script, on the same cores. First a
board gets a public submission with 10,000 episodes, then 20 more are uploaded while 1,000 connections read the board's
page, its rows and episodes over and over, each as soon as it was answered. Afterwards every file must lie there as it
was sent, and every submission in the database with all its bytes. Then the service is idle but for one caller, who asks
for lists of the 10,000 episodes, filtered and not; what is told is from the question's first byte to the answer's last.

    python benchmarks/board_load.py
    python benchmarks/board_load.py --database postgresql://user@host/empty_database

Goals: no error, no lost write, every list under 200 ms (median). Prints the results; writes them beside this file, per
kind of database, as .txt, and as .json with what made them. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Final

import httpx
import measure
import numpy as np

from turngym_client import Limits
from turngym_leaderboard.boards import BoardDefinition
from turngym_leaderboard.client import BoardClient
from turngym_leaderboard.lifecycle import Kind, Role, State, Visibility
from turngym_leaderboard.protocol import Instance, Selection
from turngym_leaderboard.record import EpisodeRecord, Trajectory, TurnRecord
from turngym_leaderboard.service.app import create_app
from turngym_leaderboard.service.serving import ServiceConfig, run
from turngym_leaderboard.service.state import RateLimits
from turngym_leaderboard.store import Store, boards, open_store, owners, submissions, work
from turngym_leaderboard.store.values import Deal

READERS: Final = 1_000
UPLOADS: Final = 20
UPLOAD_BYTES: Final = 8 << 20
INSTANCES: Final = 2_500
ATTEMPTS: Final = 4
LISTS: Final = 20
"""Times that each list is asked for."""
GOAL_SECONDS: Final = 0.2
NO_LIMITS: Final = RateLimits(
    address_rate=1e9, address_burst=10**9, owner_rate=1e9, owner_burst=10**9, submissions_per_hour=10**6
)
"""All callers of a benchmark have one address."""


@dataclass(frozen=True)
class Load:
    """What came of readers and uploads.

    Attributes:
        answers: by status. failures: by the name of the exception.
        median, slowest: seconds of a reader's request.
        lost: files that did not lie there as they were sent.
    """

    seconds: float
    answers: dict[str, int]
    failures: dict[str, int]
    median: float
    slowest: float
    uploaded: int
    lost: int

    @property
    def good(self) -> bool:
        return not self.failures and self.answers.keys() == {"200"} and self.uploaded == UPLOADS and not self.lost


@dataclass(frozen=True)
class Listing:
    """A list of episodes that was asked for several times. Seconds."""

    query: str
    total: int
    median: float
    slowest: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--database", default="", help="URL of an empty PostgreSQL database; default: SQLite")
    database = parser.parse_args(arguments).database
    kind = "postgresql" if database else "sqlite"
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder), database) as store:
        print("filling the database", flush=True)
        board, public_id = fill(store)
        tokens = [owners.add_token(store, owners.create(store, f"owner {k}"), Role.SUBMIT) for k in range(UPLOADS)]
        with service(Path(folder), database) as address:
            print("readers and uploads", flush=True)
            load = asyncio.run(load_service(address, board, public_id, tokens, store))
            print("lists", flush=True)
            listings = list(time_lists(address, public_id, board))
    good = load.good and all(each.median < GOAL_SECONDS for each in listings)
    text = report(kind, load, listings)
    print(text)
    results: dict[str, object] = {"load": asdict(load), "lists": [asdict(each) for each in listings]}
    command = "python benchmarks/board_load.py" + (" --database postgresql://…" if database else "")
    measure.write(f"board_load_{kind}", results, text, command=command)
    sys.exit(0 if good else 1)


def fill(store: Store) -> tuple[str, str]:
    """A board with a public submission of 10,000 episodes; gives the names of both."""
    definition = BoardDefinition.model_validate(
        {
            "name": "load",
            "title": "Load",
            "season": "one",
            "sealed": False,
            "environments": [{"id": "frozen_lake", "instances": INSTANCES, "attempts": ATTEMPTS, "showcase": 0}],
        }
    )
    instances = tuple(Instance(k, k, f"instance {k}", f"world {k}", 0.1, 0.5) for k in range(INSTANCES))
    deal = Deal(Selection(instances, INSTANCES, "1.0", 1, "{}", Limits()), ())
    board = boards.create(store, definition, 1, [deal])
    owner = owners.create(store, "filler")
    made = submissions.create(store, board, owner, name="filled", kind=Kind.CHECKPOINT, visibility=Visibility.PUBLIC)
    for state in (State.VALIDATED, State.QUEUED):
        submissions.set_state(store, made.public_id, state)
    now = datetime.now(UTC)
    lease = work.claim(store, "here", [Kind.CHECKPOINT], now=now, until=now + timedelta(hours=1))
    assert lease is not None
    for part in np.array_split(np.arange(INSTANCES), 25):
        played = [episode(instances[k], attempt) for k in part.tolist() for attempt in range(ATTEMPTS)]
        work.commit(store, lease, board.environments[0], played, showcase=False, sealed=False, now=now)
    work.finish(store, lease, State.SCORED, results=[], now=now)
    return board.slug, made.public_id


def episode(instance: Instance, attempt: int) -> tuple[EpisodeRecord, Trajectory]:
    """An episode of five turns, as long as a small board's are."""
    success = (instance.draw + attempt) % 3 == 0
    turn = TurnRecord(
        observation="\n".join(["#" * 6] * 6),
        text="<think>" + "why " * 20 + "</think><answer>Up || Left</answer>",
        reasoning="why " * 20,
        actions=("Up", "Left"),
        actions_executed=2,
        reward=0.0,
        action_valid=True,
        valid_format=True,
        cut_off=False,
        tokens=30,
    )
    record = EpisodeRecord(
        draw=instance.draw,
        attempt=attempt,
        level_seed=instance.level_seed,
        noise_seed=1,
        agent_seed=2,
        instance_id=instance.instance_id,
        world_id=instance.world_id,
        outcome="played",
        success=success,
        truncated=not success,
        end_reason="environment",
        actions=(turn.actions,) * 5,
        rewards=(0.0,) * 5,
        invalid_turns=0,
        unparsed_turns=0,
        cut_off_turns=0,
        tokens=150,
        digest="0" * 64,
    )
    return record, Trajectory(
        agent="filled", draw=instance.draw, attempt=attempt, turns=(turn,) * 5, last_observation=turn.observation
    )


@contextlib.contextmanager
def service(data: Path, database: str) -> Iterator[str]:
    """The service in a process of its own; gives its address."""
    context = multiprocessing.get_context("spawn")
    told: Queue[str] = context.Queue()
    process = context.Process(target=serve, args=(data, database, told))
    process.start()
    try:
        yield told.get(timeout=120)
    finally:
        process.terminate()
        process.join()


def serve(data: Path, database: str, told: Queue[str]) -> None:
    with open_store(data, database) as store:
        run(create_app(store, rates=NO_LIMITS), ServiceConfig(port=0), told.put)


async def load_service(address: str, board: str, public_id: str, tokens: Sequence[str], store: Store) -> Load:
    """Readers for as long as uploads last."""
    began = time.perf_counter()
    over = asyncio.Event()
    answers, failures, times = Counter[str](), Counter[str](), list[float]()
    paths = (
        "/api/v1/boards",
        f"/api/v1/boards/{board}/submissions",
        f"/api/v1/submissions/{public_id}/episodes?limit=20&success=true",
        f"/boards/{board}",
    )

    async def read(client: httpx.AsyncClient, k: int) -> None:
        turn = k
        while turn == k or not over.is_set():
            asked = time.perf_counter()
            try:
                answer = await client.get(paths[turn % len(paths)])
                answers[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                failures[type(error).__name__] += 1
            times.append(time.perf_counter() - asked)
            turn += 1

    limits = httpx.Limits(max_connections=READERS, max_keepalive_connections=READERS)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=httpx.Timeout(300)) as client:
        readers = [asyncio.create_task(read(client, k)) for k in range(READERS)]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(UPLOADS) as pool:
            loop = asyncio.get_running_loop()
            sent = [
                loop.run_in_executor(pool, upload, address, board, token, Path(folder) / str(k), k)
                for k, token in enumerate(tokens)
            ]
            done = await asyncio.gather(*sent, return_exceptions=True)
            over.set()
            await asyncio.gather(*readers)
    failures.update(type(each).__name__ for each in done if isinstance(each, BaseException))
    uploaded = [each for each in done if isinstance(each, str)]
    return Load(
        seconds=time.perf_counter() - began,
        answers=dict(answers),
        failures=dict(failures),
        median=statistics.median(times),
        slowest=max(times),
        uploaded=len(uploaded),
        lost=sum(lost_files(store, each) for each in uploaded),
    )


def upload(address: str, board: str, token: str, folder: Path, k: int) -> str:
    """Submits a folder of random weights; gives the submission's id."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(np.random.default_rng(k).bytes(UPLOAD_BYTES))
    with BoardClient(address, token, patience=300) as client:
        return client.submit(folder, board, name=f"upload {k}").id


def lost_files(store: Store, public_id: str) -> int:
    """Files of a submission that do not lie there as they were announced."""
    lost = 0
    for file in submissions.files(store, public_id):
        there = (store.folder(public_id) / file.name).read_bytes()
        lost += (file.received, hashlib.sha256(there).hexdigest()) != (file.size, file.sha256)
    return lost


def time_lists(address: str, public_id: str, board: str) -> Iterator[Listing]:
    api, page = f"/api/v1/submissions/{public_id}/episodes", f"/boards/{board}/submissions/{public_id}/episodes"
    with httpx.Client(base_url=address, timeout=60) as client:
        for query in ("", "?offset=9900", "?limit=1000", "?success=true", "?draw=1234", "?outcome=unresolved"):
            times: list[float] = []
            for _ in range(LISTS):
                asked = time.perf_counter()
                answer = client.get(api + query)
                times.append(time.perf_counter() - asked)
            yield Listing(f"API {query}", answer.json()["total"], statistics.median(times), max(times))
        times = []
        for _ in range(LISTS):
            asked = time.perf_counter()
            answer = client.get(page)
            times.append(time.perf_counter() - asked)
            assert answer.status_code == 200
        yield Listing("page", INSTANCES * ATTEMPTS, statistics.median(times), max(times))


def report(kind: str, load: Load, listings: Sequence[Listing]) -> str:
    answered = sum(load.answers.values())
    waited = f"a reader waited {load.median:.2f} s (median), {load.slowest:.1f} s at most"
    lines = [
        f"{kind}: {READERS} readers and {UPLOADS} uploads of {UPLOAD_BYTES >> 20} MiB at once, {load.seconds:.0f} s",
        f"    answers by status {load.answers}, failures {load.failures or 'none'}",
        f"    {answered / load.seconds:.0f} answers a second; {waited}",
        f"    {load.uploaded} uploads arrived; {load.lost} files lost or changed",
        f"lists of {INSTANCES * ATTEMPTS} episodes, nothing else going on; goal {GOAL_SECONDS * 1000:.0f} ms",
    ]
    for each in listings:
        took = f"{each.median * 1000:6.1f} ms (median)  {each.slowest * 1000:6.1f} ms (slowest of {LISTS})"
        lines.append(f"    {each.query:24} {each.total:6} found  {took}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
