"""What the benchmarks share: a server process, a load of concurrent episodes, medians with spread, and provenance."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from turngym_client import AsyncEpisode

HERE = Path(__file__).parent


@contextlib.contextmanager
def process(*command: str) -> Iterator[str]:
    """Runs a Python command that says where it listens in its first line; gives that address, and ends it."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            if (found := re.search(r"listening on (\S+:\d+)", line)) is None:
                raise RuntimeError(f"{' '.join(command)} did not start; its first line was {line!r}")
            yield found[1]
        finally:
            running.kill()


async def steps_per_second(episodes: Sequence[AsyncEpisode], actions: Sequence[str], seconds: float) -> float:
    """Steps a second of all episodes together, each stepping as fast as its own steps come back."""
    ends = time.perf_counter() + seconds

    async def play(episode: AsyncEpisode, first: int) -> int:
        steps = 0
        while time.perf_counter() < ends and not episode.done:
            await episode.step(actions[(first + steps) % len(actions)])
            steps += 1
        return steps

    began = time.perf_counter()
    steps = sum(await asyncio.gather(*(play(episode, index) for index, episode in enumerate(episodes))))
    return steps / (time.perf_counter() - began)


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def write(name: str, results: dict[str, object]) -> None:
    """Writes `results` with what made them beside this file."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=HERE)
    made = {
        "command": f"python benchmarks/{name}.py",
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("grpcio", "protobuf", "turngym")},
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    path = HERE / f"{name}.json"
    path.write_text(json.dumps({"made_by": made, **results}, indent=2) + "\n")
    print(f"written to {path}")
