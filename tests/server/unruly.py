"""An environment that sleeps, hangs, and takes its process down when told to. `unruly_environment` registers it."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from turngym_server.environment import ActionResult, Environment, Limits, Options, Start
from turngym_server.rng import Rng


class UnrulyOptions(Options):
    reset: str = ""


class Unruly(Environment[UnrulyOptions]):
    """Counts actions; some of them misbehave."""

    @classmethod
    def instructions(cls, options: UnrulyOptions, limits: Limits) -> str:
        return "Say go."

    def reset(self, level: Rng) -> Start:
        if self.options.reset:
            self.misbehave(self.options.reset)
        self.count = 0
        self.level = level.below(1_000)
        return Start(f"Level {self.level}.")

    def step(self, action: str, noise: Rng) -> ActionResult:
        if action == "pid":
            return ActionResult(str(os.getpid()), 0.0)
        if action == "child":
            return ActionResult(str(subprocess.Popen(["sleep", "600"]).pid), 0.0)
        self.misbehave(action)
        self.count += 1
        return ActionResult(f"{self.count}, noise {noise.below(1_000)}.", 1.0)

    def misbehave(self, how: str) -> None:
        match how.split():
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["spin"]:
                sum(range(10**15))  # One call in C that keeps the interpreter's lock.
            case ["exit", status]:
                os._exit(int(status))
            case ["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["kill", once] if not Path(once).exists():
                Path(once).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case ["abort"]:
                os.abort()
            case ["raise"]:
                raise RuntimeError("out of order")
            case ["print"]:
                print("hello from the environment", flush=True)
            case ["allocate", mebibytes]:
                bytearray(int(mebibytes) << 20)
            case _:
                pass

    def world(self) -> bytes:
        return str(self.level).encode()

    def legal_actions(self) -> Sequence[str] | None:
        return ("go", "wait")
