"""Does anything grow? Abandoned sessions, three times over; then a long full load.

1. 10,000 sessions are started through the real client, played for a turn and abandoned, three times over. After the
   lease none may live, and the server's memory must be, after the third such cycle, within 5 % of what it was after
   the first. A minute later, when request ids are forgotten too, memory is printed but not judged: CPython gives an
   arena back only when nothing is left in it, so by how much the resident set then falls is a matter of luck.
2. 64 players or more play for half an hour, at least 10 million steps, through one client: episodes that are closed,
   abandoned, forked, advised and kept alive. Memory, threads and descriptors of server and client are read from /proc
   every ten seconds. What grows is judged by the second half: the median of its last quarter against its first. A
   server remembers what has ended for a minute, so the faster it is asked the more it holds: where the steps a minute
   went on rising into the second half, as on a machine that had other work before, it is judged from there on.

Exit status 1 where a goal is missed. The servers are processes of their own. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import measure

from turngym_client import AsyncClient, AsyncEpisode, EpisodeRequest, Limits, aconnect

CYCLES = 3
ABANDONED_LEASE = 60.0
"""Seconds; longer than it takes to start 10,000 sessions."""
PATIENCE = 600.0
"""Seconds in which a busy machine starts them; more than a lease shows as sessions that are missing."""
MEMORY_SECONDS = 60.0
"""How long a server remembers request ids of sessions that ended: see ResetItem.request_id."""
SWEEP_SECONDS = 10.0
"""By when a server has noticed that a lease is over, or that its memory is."""
MOST_GROWTH_OF_CYCLES = 0.05

ENVIRONMENTS = ("sokoban", "frozen_lake")
PLAYED = (*("sokoban",) * 7, "frozen_lake")
"""Of eight players: walks on ice are short, so that they reset often."""
WALK = ("Up", "Down", "Left", "Right")
LIMITS = Limits(max_turns=200, max_actions=200, max_actions_per_turn=1)
LOAD_LEASE = 20.0
ABANDONED_ONE_IN = 10
LOOKED_AT_ONE_IN = 20
SAMPLE_SECONDS = 10.0
LEAST_STEPS = 10_000_000
LEAST_MINUTES = 10.0
"""A shorter load is not judged: the server remembers what ended for a minute, and allocators take their time."""
MOST_GROWTH = 0.01
MOST_RISE = 0.05
LEAST_JUDGED_MINUTES = 5.0
"""What is left to judge where the load went on rising; less is no verdict, and a failure."""
GROWTH_NOISE_MIB = 2.0
GROWTH_NOISE_COUNT = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """Processes at one time. `memory` is resident, in MiB; `seconds` and `steps` since the load began."""

    seconds: float
    steps: int
    memory: float
    threads: int
    descriptors: int


def sample(pids: Sequence[int], seconds: float = 0.0, steps: int = 0) -> Sample:
    """Raises ProcessLookupError where one of the processes is gone."""
    memory, threads, descriptors = 0, 0, 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            facts = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
            memory += int(facts["VmRSS"])
        except (FileNotFoundError, KeyError) as error:  # A zombie has no memory.
            raise ProcessLookupError(f"process {pid} is gone") from error
        threads += int(facts["Threads"])
    return Sample(round(seconds, 1), steps, memory / 1024, threads, descriptors)


def family(pid: int) -> list[int]:
    """A process and those that it started, and so on."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    pid: int
    log: Path

    def memory(self) -> float:
        """MiB that it holds."""
        return sample(family(self.pid)).memory


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """A server process of the load's environments; its warnings go to `log`."""
    envs = [word for environment in ENVIRONMENTS for word in ("--env", environment)]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        command = [sys.executable, "-m", "turngym_server.cli", *envs, "--port", "0", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                if (found := re.search(r"listening on (\S+:\d+)", line)) is None:
                    raise RuntimeError(f"the server did not start: {line!r} {Path(log.name).read_text()}")
                yield Server(found[1], process.pid, Path(log.name))
            finally:
                process.kill()


# Abandoned sessions


async def abandon(server: Server, count: int, first_seed: int) -> int:
    """Starts sessions, plays a turn in each, and forgets them. Returns how many lived at once."""
    async with aconnect(server.address, patience=PATIENCE) as client:
        requests = [EpisodeRequest(environment_id="sokoban", level_seed=first_seed + n) for n in range(count)]
        episodes = await client.reset_many(requests)
        await client.step_many((episode, WALK[n % len(WALK)]) for n, episode in enumerate(episodes))
        return (await client.server()).sessions


async def live_sessions(server: Server) -> int:
    async with aconnect(server.address) as client:
        return (await client.server()).sessions


async def abandoned(count: int) -> dict[str, object]:
    cycles: list[dict[str, float]] = []
    with serving("--max-sessions", str(count), "--lease-seconds", str(ABANDONED_LEASE)) as server:
        before = server.memory()
        for cycle in range(CYCLES):
            lived = await abandon(server, count, cycle * count)
            held = server.memory()
            await asyncio.sleep(ABANDONED_LEASE + SWEEP_SECONDS)
            left, after = await live_sessions(server), server.memory()
            await asyncio.sleep(MEMORY_SECONDS + SWEEP_SECONDS)
            cycles.append(
                {
                    "lived": lived,
                    "left": left,
                    "memory_held_mib": held,
                    "memory_after_lease_mib": after,
                    "memory_forgotten_mib": server.memory(),
                }
            )
            print(
                f"cycle {cycle + 1}: {lived} sessions lived, {left} after the lease; {held:.1f} MiB with them, "
                f"{after:.1f} MiB after the lease, {server.memory():.1f} MiB when forgotten (at first {before:.1f})",
                flush=True,
            )
    growth = cycles[-1]["memory_after_lease_mib"] / cycles[0]["memory_after_lease_mib"] - 1
    reached = all(cycle["lived"] == count and not cycle["left"] for cycle in cycles)
    passed = reached and growth <= MOST_GROWTH_OF_CYCLES
    return {
        "sessions": count,
        "lease_seconds": ABANDONED_LEASE,
        "memory_before_mib": before,
        "cycles": cycles,
        "growth_from_first_to_last": growth,
        "passed": passed,
        "verdict": f"memory after cycle {CYCLES} is {growth:+.1%} of that after the first (goal: at most 5 %), "
        f"sessions left after the lease: {[int(cycle['left']) for cycle in cycles]}; when forgotten it is "
        f"{[round(cycle['memory_forgotten_mib']) for cycle in cycles]} MiB: {_word(passed)}",
    }


# Full load


class Load:
    """Players that each play one episode after another until told to stop.

    Attributes:
        steps: played so far. events: what else was done, by name.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.steps = 0
        self.events: Counter[str] = Counter()
        self._stop = False
        self._seeds = itertools.count()

    async def run(self, players: int, until: asyncio.Event) -> None:
        """Raises an ExceptionGroup of what players meet."""
        async with asyncio.TaskGroup() as group:
            for player in range(players):
                group.create_task(self._play(PLAYED[player % len(PLAYED)]))
            await until.wait()
            self._stop = True

    async def _play(self, environment: str) -> None:
        while not self._stop:
            seed = next(self._seeds)
            episode = await self.client.reset(environment, level_seed=seed, limits=LIMITS)
            self.events["episodes"] += 1
            await self._walk(episode, seed)
            if seed % ABANDONED_ONE_IN:
                await episode.close()
            else:
                self.events["abandoned"] += 1

    async def _walk(self, episode: AsyncEpisode, seed: int) -> None:
        """Plays to the end; now and then looks at what else there is."""
        while not (episode.done or self._stop):
            await episode.step(WALK[(seed + self.steps) % len(WALK)])
            self.steps += 1
            if self.steps % (LOOKED_AT_ONE_IN * LIMITS.max_turns) == 0 and not episode.done:
                await episode.advise()
                await episode.keep_alive()
                copy = await episode.fork()
                await copy.step(WALK[0])
                await copy.close()
                self.steps += 1
                self.events["advised, kept alive and forked"] += 1


async def load(minutes: float, players: int, workers: int) -> dict[str, object]:
    samples: dict[str, list[Sample]] = {"server": [], "client": []}
    with serving("--lease-seconds", str(LOAD_LEASE), "--workers", str(workers)) as server:
        pids = {"server": family(server.pid), "client": [os.getpid()]}
        async with aconnect(server.address) as client:
            work, over = Load(client), asyncio.Event()
            playing = asyncio.create_task(work.run(players, over))
            began = time.monotonic()
            try:
                while (seconds := time.monotonic() - began) < minutes * 60 and not playing.done():
                    await asyncio.wait({playing}, timeout=min(SAMPLE_SECONDS, minutes * 60 - seconds))
                    for name, each in pids.items():
                        samples[name].append(sample(each, time.monotonic() - began, work.steps))
                    if len(samples["server"]) % 6 == 0:
                        _tell(work.steps, samples)
            except ProcessLookupError as error:
                playing.cancel()
                errors = [str(error)]
            else:
                over.set()
                errors = [repr(error) for error in await errors_of(playing)]
            seconds = time.monotonic() - began
        warnings = server.log.read_text().splitlines()
        left = None
        if not errors:
            await asyncio.sleep(LOAD_LEASE + SWEEP_SECONDS)
            left = await live_sessions(server)
    judged = minutes >= LEAST_MINUTES
    growth = {name: grown(each) for name, each in samples.items()}
    grows = sorted(
        f"{name}'s {what}" for name, facts in growth.items() for what, fact in facts.items() if fact["grows"]
    )
    steady_minutes = (seconds - samples["client"][settled(samples["client"])].seconds) / 60
    if judged and steady_minutes < LEAST_JUDGED_MINUTES:
        grows.append(f"the load itself, until {steady_minutes:.1f} min before the end")
    passed = not judged or (not grows and work.steps >= LEAST_STEPS)
    passed = passed and not errors and not warnings and left == 0
    return {
        "minutes": minutes,
        "players": players,
        "workers": workers,
        "steps": work.steps,
        "steps_per_second": work.steps / seconds,
        "events": dict(work.events),
        "errors": errors,
        "server_warnings": warnings[:20],
        "sessions_left_after_the_lease": left,
        "steady_minutes": steady_minutes,
        "growth_in_the_second_half": growth,
        "samples": {name: [asdict(each) for each in kept] for name, kept in samples.items()},
        "passed": passed,
        "verdict": f"{work.steps:,} steps by {players} players in {seconds / 60:.1f} min, "
        f"{len(errors)} errors, {len(warnings)} warnings, {_left(left)} sessions left after the lease; "
        + (f"grows: {', '.join(grows) or 'nothing'}" if judged else f"growth under {LEAST_MINUTES:g} min is not judged")
        + f": {_word(passed)}",
    }


async def errors_of(playing: asyncio.Task[None]) -> Sequence[Exception]:
    """What players met: the first error, which ends the load, and any others that came with it."""
    try:
        await playing
    except ExceptionGroup as group:
        return group.exceptions
    return ()


def settled(samples: Sequence[Sample]) -> int:
    """From where on the steps of a minute were no more than `MOST_RISE` above those of any minute before."""
    minute = round(60 / SAMPLE_SECONDS)
    steps = [later.steps - earlier.steps for earlier, later in zip(samples, samples[minute:], strict=False)]
    place = most = 0
    for number, each in enumerate(steps, start=minute):
        if each > most * (1 + MOST_RISE):
            place = number
        most = max(most, each)
    return min(place, len(samples) - 1)


def grown(samples: Sequence[Sample]) -> dict[str, dict[str, float | bool]]:
    """For memory, threads and descriptors: medians of the first and last quarter of the second half, and a verdict."""
    half = samples[max(len(samples) // 2, settled(samples)) :]
    quarter = max(1, len(half) // 4)
    facts: dict[str, dict[str, float | bool]] = {}
    for what, noise in (
        ("memory", GROWTH_NOISE_MIB),
        ("threads", GROWTH_NOISE_COUNT),
        ("descriptors", GROWTH_NOISE_COUNT),
    ):
        first = statistics.median(getattr(each, what) for each in half[:quarter])
        last = statistics.median(getattr(each, what) for each in half[-quarter:])
        grows = last - first > max(noise, MOST_GROWTH * first)
        facts[what] = {"first_quarter": first, "last_quarter": last, "grows": grows}
    return facts


def _tell(steps: int, samples: dict[str, list[Sample]]) -> None:
    line = f"{samples['server'][-1].seconds / 60:5.1f} min  {steps:>12,} steps"
    for name, kept in samples.items():
        now = kept[-1]
        line += f"  {name} {now.memory:6.1f} MiB {now.threads:3} threads {now.descriptors:3} descriptors"
    print(line, flush=True)


def _left(sessions: int | None) -> str:
    return "an unknown number of" if sessions is None else str(sessions)


def _word(passed: bool) -> str:
    return "passed" if passed else "FAILED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--abandoned", type=int, default=10_000, help="sessions of a cycle; 0 leaves that part out")
    parser.add_argument("--minutes", type=float, default=30.0, help="of full load; 0 leaves that part out")
    parser.add_argument("--players", type=int, default=96, help="episodes played at once")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of the server under full load")
    parser.add_argument("--name", default="soak", help="the results go to NAME.json and NAME.txt beside this file")
    arguments = parser.parse_args()
    results: dict[str, object] = {"arguments": vars(arguments)}
    parts: list[dict[str, object]] = []
    if arguments.abandoned:
        parts.append(asyncio.run(abandoned(arguments.abandoned)))
        results["abandoned_sessions"] = parts[-1]
    if arguments.minutes:
        parts.append(asyncio.run(load(arguments.minutes, arguments.players, arguments.workers)))
        results["full_load"] = parts[-1]
    verdicts = "".join(f"{part['verdict']}\n" for part in parts)
    print(verdicts, end="")
    measure.write(arguments.name, results)
    (measure.HERE / f"{arguments.name}.txt").write_text(verdicts)
    if not all(part["passed"] for part in parts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
