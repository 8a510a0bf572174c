"""What the client takes to import, and what a session takes beside its environment.

Import: a fresh interpreter that imports `turngym_client`, in turns with one that imports nothing; seconds of wall clock
and of CPU, and the most memory that the whole process had resident, by /proc. The first turn, which reads the disk, is
left out.

Session: a server in this process is asked for `SESSIONS` episodes of `board`, in each of which a few turns are played;
then all are closed, which frees their environments and nothing else, since a session's result can still be asked for.
Python's allocations are counted (tracemalloc) before, between and after; protobuf's own are not among them, but a
session keeps serialised bytes and no messages. What is left after closing, less the last result, is what a session
takes: identity, lease, ids, its first state, and the request that made it. History it keeps none.

    python benchmarks/footprint.py

Goals: import under 0.3 s and 45 MB; a session under 2 KiB beside environment, last result and history. Prints the
results; writes them beside this file as .txt, and as .json with what made them. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import secrets
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import board_environment
import grpc.aio
import measure

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc
from turngym_server.config import ServerConfig
from turngym_server.environment import REGISTRY
from turngym_server.host import EnvironmentHost
from turngym_server.server import Server

IMPORTED: Final = "turngym_client"
SESSIONS: Final = 1_000
TURNS: Final = 3
BATCH: Final = 100
PROBE: Final = """
import json, re, sys, time
wall, cpu = time.perf_counter(), time.process_time()
for module in sys.argv[1:]:
    __import__(module)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
[kibibytes] = re.findall(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(json.dumps([wall, cpu, int(kibibytes) * 1024 / 1e6]))
"""
"""getrusage would tell the memory of this process, from which the new one was forked."""


@dataclass(frozen=True)
class Goal:
    """The most that the median of a figure shall be."""

    figure: str
    most: float


GOALS: Final = (
    Goal("import_seconds", 0.3),
    Goal("import_megabytes", 45.0),
    Goal("session_bytes", 2_048.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--repeats", type=int, default=15, help="turns of importing; sessions are made a third as often"
    )
    parser.add_argument("--name", default="footprint", help="of the files that are written")
    arguments = parser.parse_args()
    figures = import_figures(arguments.repeats) | asyncio.run(session_figures(max(arguments.repeats // 3, 1)))
    results = {name: measure.summary(values) for name, values in figures.items()}
    missed = [goal for goal in GOALS if results[goal.figure]["median"] >= goal.most]
    text = table(results, missed)
    print(text)
    measure.write(
        arguments.name,
        {
            "repeats": arguments.repeats,
            "sessions": SESSIONS,
            **results,
            "goals": [{**asdict(goal), "reached": results[goal.figure]["median"]} for goal in GOALS],
        },
        text,
        command=f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
    )
    if missed:
        raise SystemExit(1)


def import_figures(repeats: int) -> dict[str, Sequence[float]]:
    """Of a process that imports the client, and of one that imports nothing."""
    importing = [(probe(IMPORTED), probe()) for _ in range(repeats + 1)][1:]
    return {
        "import_seconds": [client[0] for client, _ in importing],
        "import_cpu_seconds": [client[1] for client, _ in importing],
        "import_megabytes": [client[2] for client, _ in importing],
        "bare_megabytes": [bare[2] for _, bare in importing],
    }


def probe(*modules: str) -> tuple[float, float, float]:
    """Seconds of wall clock and of CPU to import, and megabytes, of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, check=True)
    wall, cpu, megabytes = json.loads(done.stdout)
    return wall, cpu, megabytes


async def session_figures(repeats: int) -> dict[str, Sequence[float]]:
    """Bytes of a session, and of its environment and last result."""
    await sessions()  # What is made once, whoever comes first.
    sizes = [await sessions() for _ in range(repeats)]
    return {name: [each[name] for each in sizes] for name in sizes[0]}


async def sessions() -> dict[str, float]:
    """The same of sessions in a server of their own."""
    host = EnvironmentHost(REGISTRY[board_environment.ID])
    async with Server([host], ServerConfig()) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = pb_grpc.EnvironmentServiceStub(channel)
        await play(stub, BATCH)
        tracemalloc.start()
        try:
            before = allocated()
            ids, result_bytes = await play(stub, SESSIONS)
            open_bytes = allocated() - before
            for batch in (ids[first : first + BATCH] for first in range(0, SESSIONS, BATCH)):
                await stub.Close(pb.CloseRequest(session_ids=batch))
            ours = sum(map(sys.getsizeof, ids)) + sys.getsizeof(ids)
            left = allocated() - before - ours
        finally:
            tracemalloc.stop()
    return {
        "session_bytes": left / SESSIONS - result_bytes,
        "environment_bytes": (open_bytes - ours - left) / SESSIONS,
        "last_result_bytes": result_bytes,
    }


async def play(stub: pb_grpc.EnvironmentServiceStub, count: int) -> tuple[list[str], float]:
    """Starts episodes and plays some turns in each: the sessions, and the mean bytes that keep a last result."""
    ids: list[str] = []
    result_bytes = 0
    for _ in range(count // BATCH):
        items = [
            pb.ResetItem(request_id=secrets.token_bytes(16), environment_id=board_environment.ID) for _ in range(BATCH)
        ]
        batch = [each.started.session_id for each in (await stub.Reset(pb.ResetRequest(items=items))).outcomes]
        for turn in range(1, TURNS + 1):
            steps = [pb.StepItem(session_id=each, step_index=turn, actions=["Down"]) for each in batch]
            outcomes = (await stub.Step(pb.StepRequest(items=steps))).outcomes
        result_bytes += sum(sys.getsizeof(each.transition.SerializeToString()) for each in outcomes)
        ids += batch
    return ids, result_bytes / count


def allocated() -> int:
    """Bytes that Python holds."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def table(results: Mapping[str, Mapping[str, float]], missed: Sequence[Goal]) -> str:
    """The results in words."""
    lines = [
        f"{name.replace('_', ' '):20}{each['median']:10,.3f}   ({each['least']:,.3f} to {each['most']:,.3f})"
        for name, each in results.items()
    ]
    for goal in GOALS:
        said = "missed" if goal in missed else "reached"
        lines.append(f"{said}: {goal.figure.replace('_', ' ')} under {goal.most:g}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
