"""Runs what is left of a sweep, each run as a process of `trainer train`, and keeps no state of its own.

What is left is read from the runs' folders, so a sweep that was killed goes on where it stood. Each run's process holds
a lock on its run: one that outlived its sweep is waited for, and no run is ever trained twice at a time.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turngym_client import Split
from turngym_trainer.checkpoint import CHECKPOINTS, checkpoint_iteration, checkpoints
from turngym_trainer.mixture import environments
from turngym_trainer.process import load_judge
from turngym_trainer.recorded import read_run
from turngym_trainer.settings import CONFIG, MAY_CHANGE_ON_RESUME, ConfigError, changed_keys, kept_config
from turngym_trainer.start import connected, served_environment
from turngym_trainer.sweep import Planned, Sweep, SweepError, as_toml

_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Failure:
    """A run whose process ended before the run did."""

    run: Planned
    status: int
    log: Path

    def __str__(self) -> str:
        written = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(written) if line.strip()), "it wrote nothing")
        return f"{self.run.name}: ended with exit code {self.status}: {last} ({self.log})"


def ended(run: Planned) -> bool:
    """It reached its last iteration, or its guard stopped it, and would again."""
    kept = checkpoints(run.folder / CHECKPOINTS)
    if kept and checkpoint_iteration(kept[-1]) >= run.config.run.iterations:
        return True
    if run.config.guard.on_alarm != "stop" or not (run.folder / CONFIG).exists():
        return False
    written = read_run(run.folder)
    return any(alarm.iteration == written.iteration for alarm in written.alarms)


def check(sweep: Sweep) -> None:
    """Refuses a sweep that could not be run to its end.

    Raises:
        SweepError: a folder holds a run of other settings.
        ConfigError: a split is not served, an address is none, or a process reward cannot be imported.
        TurngymError: a server cannot be used, or refuses the environment.
    """
    if faults := list(_foreign(sweep.runs)):
        raise SweepError("\n".join(faults))
    asked: set[str] = set()
    for run in sweep.runs:
        config = run.config
        if not ended(run):
            load_judge(config.reward.process)
        played = f"{config.environment.model_dump_json()}{config.mixture.model_dump_json()}"
        content = f"{config.run.server}{played}{config.validation.split}"
        if content not in asked and not ended(run):
            asked.add(content)
            with connected(config) as client:
                for alone in environments(config).values():
                    served_environment(client, alone, {Split(alone.environment.split), Split(config.validation.split)})


def _foreign(runs: Sequence[Planned]) -> Iterator[str]:
    for run in runs:
        if not (run.folder / CONFIG).exists():
            continue
        try:
            changed = set(changed_keys(kept_config(run.folder / CONFIG), run.config)) - MAY_CHANGE_ON_RESUME
        except ConfigError as error:
            yield f"{run.folder}: its settings cannot be read: {error}; move it away, or name another folder"
            continue
        if changed:
            yield (
                f"{run.folder} holds a run of other settings: {', '.join(sorted(changed))}; name another folder for "
                "this sweep, or move that run away"
            )


def run_sweep(sweep: Sweep, jobs: int, tell: Callable[[str], None]) -> list[Failure]:
    """Runs what has not ended, at most `jobs` at a time, and goes on where one fails. Returns those that did.

    Processes that are left when this is interrupted are told to end, and waited for.
    """
    waiting = deque(run for run in sweep.runs if not ended(run))
    tell(f"{len(sweep.runs)} runs, {len(waiting)} of them to do")
    going: list[_Going] = []
    failures: list[Failure] = []
    held: set[str] = set()
    try:
        while waiting or going:
            # One round at most: what another process holds is asked for again later.
            for _ in range(len(waiting)):
                if len(going) == jobs:
                    break
                run = waiting.popleft()
                if (started := _start(run)) is None:
                    waiting.append(run)
                    if run.name not in held:
                        held.add(run.name)
                        tell(f"{run.name}: waiting for another process that trains it")
                elif isinstance(started, _Going):
                    going.append(started)
                    tell(f"{run.name}: started")
            time.sleep(_POLL_SECONDS)
            for each in [each for each in going if each.process.poll() is not None]:
                going.remove(each)
                os.close(each.lock)
                if ended(each.run):
                    tell(f"{each.run.name}: done, {len(waiting) + len(going)} to go")
                else:
                    failures.append(Failure(each.run, each.process.returncode, each.log))
                    tell(str(failures[-1]))
    finally:
        _end(going)
    return failures


@dataclass(frozen=True, slots=True)
class _Going:
    """A run's process. `lock`: a descriptor that the process has too."""

    run: Planned
    process: subprocess.Popen[bytes]
    lock: int
    log: Path


def _start(run: Planned) -> "_Going | bool | None":
    """Starts or resumes a run. None: another process has it; True: it has ended meanwhile."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(run.folder.with_name(f"{run.folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    if ended(run):
        os.close(lock)
        return True
    log = run.folder.with_name(f"{run.folder.name}.log")
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 — our own command
            [sys.executable, "-m", "turngym_trainer.cli", "train", *_arguments(run)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
        )
    return _Going(run, process, lock, log)


def _arguments(run: Planned) -> tuple[str, ...]:
    """Of `trainer train`: as the sweep has them, or where the run has begun, to go on with it."""
    if not (run.folder / CONFIG).exists():
        return run.arguments
    servers, iterations = as_toml(list(run.config.run.server)), run.config.run.iterations
    return ("--resume", str(run.folder), "--set", f"run.server={servers}", "--set", f"run.iterations={iterations}")


def _end(going: Collection[_Going]) -> None:
    for each in going:
        each.process.terminate()
    for each in going:
        each.process.wait()
        os.close(each.lock)
