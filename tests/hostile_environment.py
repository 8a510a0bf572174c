"""An environment whose every text tries to be more than text. `env_server --env hostile_environment:Hostile`."""

from hostile_text import HOSTILE
from pydantic import Field

from turngym_server.environment import ActionResult, Environment, Limits, Options, Start, register
from turngym_server.rng import Rng


class HostileOptions(Options):
    note: str = Field(default=HOSTILE, description=HOSTILE)


@register(
    id="hostile",
    version="1.0",
    family="hostile",
    summary=HOSTILE,
    options=HostileOptions,
    limits=Limits(max_turns=3, max_actions=3, max_actions_per_turn=1),
    action_separator="",
)
class Hostile(Environment[HostileOptions]):
    """Any action is right, in the third turn."""

    @classmethod
    def instructions(cls, options: HostileOptions, limits: Limits) -> str:
        return HOSTILE

    def reset(self, level: Rng) -> Start:
        self.word = level.below(1 << 20)
        self.played = 0
        return Start(HOSTILE)

    def step(self, action: str, noise: Rng) -> ActionResult:
        self.played += 1
        over = self.played == 3
        return ActionResult(f"{HOSTILE}\n{action}", 0.5, terminated=over, success=over)

    def world(self) -> bytes:
        return str(self.word).encode()

    def legal_actions(self) -> None:
        return None
