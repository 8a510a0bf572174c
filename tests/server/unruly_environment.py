"""An environment that sleeps, hangs, and takes its process down when told to; imported by servers under test only."""

import os
import time
from collections.abc import Sequence

from turngym_server.environment import ActionResult, Environment, Limits, Options, Start, register
from turngym_server.rng import Rng

STEP_DEADLINE = 1.0


class UnrulyOptions(Options):
    pass


@register(
    id="unruly",
    version="1.0",
    family="unruly",
    summary="Does what no environment should.",
    options=UnrulyOptions,
    limits=Limits(max_turns=20, max_actions=20, max_actions_per_turn=1),
    step_deadline=STEP_DEADLINE,
)
class Unruly(Environment[UnrulyOptions]):
    """Counts actions; some of them misbehave."""

    @classmethod
    def instructions(cls, options: UnrulyOptions, limits: Limits) -> str:
        return "Say go."

    def reset(self, level: Rng) -> Start:
        self.count = 0
        self.level = level.below(1_000)
        return Start(f"Level {self.level}.")

    def step(self, action: str, noise: Rng) -> ActionResult:
        match action.split():
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["spin"]:
                sum(range(10**15))  # One call in C that keeps the interpreter's lock.
            case ["exit", status]:
                os._exit(int(status))
            case ["abort"]:
                os.abort()
            case ["raise"]:
                raise RuntimeError("out of order")
            case ["print"]:
                print("hello from the environment", flush=True)
            case ["allocate", mebibytes]:
                bytearray(int(mebibytes) << 20)
            case ["pid"]:
                return ActionResult(str(os.getpid()), 0.0)
            case _:
                pass
        self.count += 1
        return ActionResult(f"{self.count}, noise {noise.below(1_000)}.", 1.0)

    def world(self) -> bytes:
        return str(self.level).encode()

    def legal_actions(self) -> Sequence[str] | None:
        return ("go", "wait")
