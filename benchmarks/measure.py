"""What the benchmarks share: a server process, a peer's Python, concurrent episodes, medians, and provenance."""

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
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from turngym_client import AsyncEpisode

HERE = Path(__file__).parent
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turngym"


@dataclass(frozen=True)
class Running:
    """A server process, and where it listens."""

    address: str
    pid: int

    def cpu_seconds(self) -> float | None:
        """CPU time of all its threads so far; None where there is no /proc to read it from."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def environment(python: str) -> dict[str, str]:
    """Environment variables under which a Python finds these files; another than ours finds nothing else of ours."""
    ours = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), ours]))}


def peer_python(peer: str, *steps: Sequence[str]) -> str:
    """The Python of a peer's virtual environment, which is made where there is none.

    Args:
        peer: name==version, which the environment is called by.
        steps: what pip installs, one call after another.
    """
    folder = CACHE / peer.replace("==", "-")
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        print(f"installing {peer} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        for step in steps:
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step], check=True
            )
        done.touch()
    return str(python)


@contextlib.contextmanager
def process(*command: str, python: str = sys.executable) -> Iterator[Running]:
    """Runs a Python command that says where it listens in its first line, and ends it."""
    with subprocess.Popen(
        [python, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(python)
    ) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            if (found := re.search(r"listening on (\S+:\d+)", line)) is None:
                raise RuntimeError(f"{' '.join(command)} did not start; its first line was {line!r}")
            yield Running(found[1], running.pid)
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


def made_by(command: str) -> dict[str, object]:
    """What makes results now: command, commit, versions, machine."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=HERE)
    return {
        "command": command,
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("grpcio", "protobuf", "turngym")},
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def write(name: str, results: dict[str, object], text: str = "", *, command: str = "") -> None:
    """Writes `results` with what made them beside this file, as JSON, and `text` as it is."""
    path = HERE / f"{name}.json"
    made = made_by(command or f"python benchmarks/{name}.py")
    path.write_text(json.dumps({"made_by": made, **results}, indent=2) + "\n")
    if text:
        path.with_suffix(".txt").write_text(text + "\n")
    print(f"written to {path}")
