"""Steps a second through turngym, beside OpenEnv, a bare gRPC echo, and no service at all.

The same Sokoban in plain Python (`board.py`: 200-byte observations) is served by each, at 64, 16 and 1 concurrent
episodes, each of which steps as fast as its own steps come back; first steps alone, then whole episodes of ten steps
with what it takes to begin the next. Server and load are processes of their own, of each stack by its own client:

    turngym   the server with tokens, leases, digests and exactly-once steps; the client that gathers what is pending
    echo      turngym's client and messages, answered by a server that does nothing
    openenv   OpenEnv's release from PyPI, in a virtual environment of its own, over WebSockets; a plain environment
    openenv_async   the same with `step_async`, which spares it a thread for each step
    in_process   no service: a loop over the boards

All are measured in turns, A B C A B C, and ratios are taken within a turn.

    python benchmarks/throughput.py

Goals, steps alone: 8 times OpenEnv at 64 episodes, 5 times at 16, not slower at 1; half of the echo. Prints the
results; writes them beside this file as .txt, and as .json with what made them. Exit status 1 if a goal is missed.
The first run installs OpenEnv, which takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grpc
import measure
from board import Board
from load import Measured, Order, action

from turngym.v1 import environment_pb2 as pb
from turngym.v1 import environment_pb2_grpc as pb_grpc

PEER: Final = "openenv==0.10.0"
"""PyPI's current release when this was last run."""
CONCURRENT: Final = (64, 16, 1)
WARM_UP: Final = 0.5
"""Seconds of each stack before anything counts."""


@dataclass(frozen=True)
class Goal:
    """The least that turngym's steps a second, divided by another stack's, shall be at so many episodes."""

    episodes: int
    stack: str
    ratio: float


GOALS: Final = (
    Goal(64, "openenv", 8.0),
    Goal(16, "openenv", 5.0),
    Goal(1, "openenv", 1.0),
    *(Goal(episodes, "echo", 0.5) for episodes in CONCURRENT),
)


class Load:
    """A process that puts one stack's server under load when told to."""

    def __init__(self, command: Sequence[str], server: measure.Running, token: str = "") -> None:
        self._server = server
        self._process = subprocess.Popen(
            [*command, server.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=measure.environment(command[0]) | {"TURNGYM_TOKEN": token},
        )

    def measure(self, order: Order) -> tuple[Measured, float | None]:
        """What the load measured, and the server's CPU time for each step in µs, where the machine tells it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        before = self._server.cpu_seconds()
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        after = self._server.cpu_seconds()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}")
        measured = Measured(**json.loads(line))
        if before is None or after is None:
            return measured, None
        return measured, (after - before) / measured.steps * 1e6

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="turns at each number of episodes")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each stack in each turn")
    parser.add_argument("--name", default="throughput", help="of the files that are written")
    arguments = parser.parse_args()
    began = time.monotonic()
    with stacks() as (loads, peer_versions):
        for load in loads.values():
            load.measure(Order(CONCURRENT[0], WARM_UP, whole=True))
        results = {
            f"{'episodes' if whole else 'steps'}_at_{count}": compare(
                loads, Order(count, arguments.seconds, whole), arguments.repeats
            )
            for whole in (False, True)
            for count in CONCURRENT
        }
    in_process = measure.summary([board_steps_per_second(arguments.seconds) for _ in range(arguments.repeats)])
    missed = [goal for goal in GOALS if ratio_to(results, goal) < goal.ratio]
    text = table(results, in_process, missed)
    print(text)
    measure.write(
        arguments.name,
        {
            "openenv": peer_versions,
            "repeats": arguments.repeats,
            "seconds": arguments.seconds,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "in_process_steps_per_second": in_process,
            **results,
            "goals": [{**asdict(goal), "reached": ratio_to(results, goal)} for goal in GOALS],
        },
        text,
        command=f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
    )
    if missed:
        raise SystemExit(1)


@contextlib.contextmanager
def stacks() -> Generator[tuple[Mapping[str, Load], Mapping[str, str]]]:
    """Every stack's server and load, running, and the versions of what OpenEnv brings."""
    peer = measure.peer_python(PEER, [PEER])
    listing = subprocess.run([peer, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    versions = {each["name"]: each["version"] for each in json.loads(listing.stdout)}
    with contextlib.ExitStack() as stack:
        loads: dict[str, Load] = {}

        def add(name: str, python: str, server: Sequence[str], load: str, token: str = "") -> measure.Running:
            running = stack.enter_context(measure.process(*server, python=python))
            loads[name] = Load([python, str(measure.HERE / load)], running, token)
            stack.callback(loads[name].end)
            return running

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokens = folder / "tokens.toml"
        token = new_token(tokens)
        command = ("-m", "turngym_server.cli", "--env", "board_environment:BoardEnvironment", "--port", "0")
        real = add("turngym", sys.executable, (*command, "--tokens", str(tokens)), "turngym_load.py", token)
        messages = folder / "started.bin"
        messages.write_bytes(started(real.address, token))
        add("echo", sys.executable, (str(measure.HERE / "echo_server.py"), str(messages)), "turngym_load.py")
        for name, kind in (("openenv", "sync"), ("openenv_async", "async")):
            add(name, peer, (str(measure.HERE / "openenv_server.py"), kind), "openenv_client.py")
        yield loads, {name: versions[name] for name in ("openenv", "fastapi", "uvicorn", "websockets", "pydantic")}


def new_token(file: Path) -> str:
    """A token of role `train`, whose entry goes to `file`."""
    command = [
        sys.executable,
        "-m",
        "turngym_server.access.new_token",
        "benchmark",
        "--role",
        "train",
        "--file",
        str(file),
    ]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    return made.stdout.strip()


def started(address: str, token: str) -> bytes:
    """The bytes of a started episode, for the echo to repeat."""
    with grpc.insecure_channel(address) as channel:
        item = pb.ResetItem(request_id=secrets.token_bytes(16), environment_id="board", level_seed=1)
        response = pb_grpc.EnvironmentServiceStub(channel).Reset(
            pb.ResetRequest(items=[item]), timeout=30, metadata=(("authorization", f"Bearer {token}"),)
        )
        return response.outcomes[0].started.SerializeToString()


def compare(loads: Mapping[str, Load], order: Order, repeats: int) -> dict[str, object]:
    """Each stack's figures over all turns, and turngym's speed divided by each other's."""
    figures: dict[str, dict[str, list[float]]] = {
        name: {"steps_per_second": [], "median_ms": [], "client_cpu_us": [], "server_cpu_us": []} for name in loads
    }
    for _ in range(repeats):
        for name, load in loads.items():
            measured, server_cpu = load.measure(order)
            figures[name]["steps_per_second"].append(measured.steps_per_second)
            figures[name]["median_ms"].append(measured.median_ms)
            figures[name]["client_cpu_us"].append(measured.cpu_us)
            if server_cpu is not None:
                figures[name]["server_cpu_us"].append(server_cpu)
    ours = figures["turngym"]["steps_per_second"]
    return {
        name: {
            **{figure: measure.summary(values) for figure, values in stack.items() if values},
            "ratio": measure.summary([mine / its for mine, its in zip(ours, stack["steps_per_second"], strict=True)]),
        }
        for name, stack in figures.items()
    }


def board_steps_per_second(seconds: float) -> float:
    """Steps a second of the board itself."""
    board = Board()
    steps = 0
    began = time.perf_counter()
    while (taken := time.perf_counter() - began) < seconds:
        for _ in range(1_000):
            board.step(action(steps))
            steps += 1
    return steps / taken


def ratio_to(results: Mapping[str, Mapping[str, object]], goal: Goal) -> float:
    """What was reached of a goal: the median ratio."""
    stack = results[f"steps_at_{goal.episodes}"][goal.stack]
    assert isinstance(stack, dict)
    return stack["ratio"]["median"]


def table(results: Mapping[str, Mapping[str, object]], in_process: Mapping[str, float], missed: Sequence[Goal]) -> str:
    """The results in words."""
    lines = [f"the board itself, no service: {in_process['median']:,.0f} steps/s", ""]
    for title, stacks in results.items():
        lines.append(f"{title.replace('_', ' ')}  (medians; ratio: turngym's steps/s by this stack's, least and most)")
        lines.append(f"  {'':14}{'steps/s':>9}{'step ms':>9}{'CPU µs/step: client':>22}{'server':>8}   ratio")
        for name, stack in stacks.items():
            assert isinstance(stack, dict)
            ratio, server = stack["ratio"], stack.get("server_cpu_us", {"median": float("nan")})
            lines.append(
                f"  {name:14}{stack['steps_per_second']['median']:9,.0f}{stack['median_ms']['median']:9.2f}"
                f"{stack['client_cpu_us']['median']:22.1f}{server['median']:8.1f}"
                f"   {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"
            )
        lines.append("")
    for goal in GOALS:
        said = "missed" if goal in missed else "reached"
        lines.append(
            f"{said}: {goal.ratio:g} times {goal.stack} at {goal.episodes} episodes: {ratio_to(results, goal):.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
