"""A two-armed bandit whose arms are told apart by their names alone (after RAGEN's, arXiv 2504.20073, section 3)."""

from collections.abc import Sequence
from typing import Final, Literal

from pydantic import Field

from turngym_server.environment import ActionResult, Environment, Left, Limits, Options, Start, register
from turngym_server.rng import Rng

LOW_PAY: Final = 0.1

_STEADY: Final = """
Abbey Anchor Anvil Archive Barn Beacon Bedrock Bench Bookkeeper Brick Butler Calendar Cathedral Cedar Cellar Clerk
Clock Cobble Cornerstone Cottage Cradle Donkey Farmer Fence Foundation Glacier Granary Granite Harbour Hearth Hedge
Keel Ledger Lighthouse Loom Mason Meadow Metronome Mill Monastery Monk Mortar Mule Oak Orchard Ox Pantry Pasture
Pendulum Pension Pillar Plough Postman Quarry Reservoir Rock Shepherd Signpost Snail Sundial Tortoise Turtle Vault
Willow
"""
_BOLD: Final = """
Acrobat Adventurer Avalanche Barracuda Blaze Blizzard Buccaneer Chimera Cobra Comet Conqueror Corsair Cyclone
Daredevil Dynamo Earthquake Explosion Falcon Firestorm Fury Gambler Geyser Gladiator Hawk Hazard Hurricane Hydra
Inferno Jackpot Jaguar Kraken Leopard Lightning Lion Maelstrom Mammoth Maverick Meteor Mustang Outlaw Panther
Pioneer Pirate Rebel Rocket Sabre Scorpion Shark Supernova Tempest Thunder Tiger Titan Tornado Trickster Typhoon
Vandal Viking Viper Volcano Vortex Wildfire Wolf Wyvern
"""
STEADY_NAMES: Final = tuple(_STEADY.split())
BOLD_NAMES: Final = tuple(_BOLD.split())


class BanditOptions(Options):
    names: Literal["phoenix_dragon", "pairs"] = Field(
        default="phoenix_dragon",
        description="Phoenix (steady) against Dragon (bold), or a steady and a bold name drawn from 64 × 64.",
    )
    reversed: bool = Field(
        default=False, description="The steady name is on the arm that pays more, against its meaning."
    )
    high_pays: float = Field(
        default=0.25, gt=LOW_PAY, le=1.0, description="Probability that the arm that pays more pays 1 rather than 0."
    )


class BanditReversedOptions(BanditOptions):
    reversed: bool = Field(
        default=True, description="The steady name is on the arm that pays more, against its meaning."
    )


@register(
    id="bandit",
    version="1.0",
    family="bandit",
    summary="One pull at one of two arms, whose names hint at how they pay.",
    options=BanditOptions,
    limits=Limits(max_turns=1, max_actions=1, max_actions_per_turn=1),
    action_separator="",
    inline=True,
)
@register(
    id="bandit_reversed",
    version="1.0",
    family="bandit",
    summary="The bandit with the two names swapped: what was learnt from the names misleads.",
    options=BanditReversedOptions,
    limits=Limits(max_turns=1, max_actions=1, max_actions_per_turn=1),
    action_separator="",
    inline=True,
)
class Bandit(Environment[BanditOptions]):
    """One pull at one of two named arms.

    Observation, as served for seed 0:

        Arms: Dragon, Phoenix

    Legal actions: the two names, in any case; their order on show is drawn with the instance.

    | arm | reward |
    |---|---|
    | low (Phoenix) | 0.1 always |
    | high (Dragon) | 1 with probability 0.25, else 0 |

    Ends after one valid pull. Success: the arm that pays more on average was pulled, whatever it paid this time. Any
    other action pays 0 and ends nothing. `bandit_reversed` gives the same instructions: what the names say misleads.

    Floor 0.5 and ceiling 1, both exact for each of the two instances (the orders on show). With the default names there
    is one world, so there is nothing to hold out; `names=pairs` has 4,096.
    """

    _low: str
    _high: str
    _shown: tuple[str, str]

    @classmethod
    def instructions(cls, options: BanditOptions, limits: Limits) -> str:
        return (
            "There are two arms, each with a name and with its own odds. One pays a small amount every time. The other "
            "pays nothing most of the time and a large amount now and then. The names tell of the arms' characters: "
            "weigh what they stand for, and pull the arm that you expect to pay more on average.\n"
            "Answer with the name of one arm."
        )

    @classmethod
    def world_count(cls, options: BanditOptions) -> int:
        return 1 if options.names == "phoenix_dragon" else len(STEADY_NAMES) * len(BOLD_NAMES)

    def reset(self, level: Rng) -> Start:
        steady, bold = "Phoenix", "Dragon"
        if self.options.names == "pairs":
            steady, bold = level.choice(STEADY_NAMES), level.choice(BOLD_NAMES)
        self._low, self._high = (bold, steady) if self.options.reversed else (steady, bold)
        self._shown = (steady, bold) if level.below(2) else (bold, steady)
        return Start(self._observation())

    def step(self, action: str, noise: Rng) -> ActionResult:
        name = action.strip().casefold()
        if name == self._low.casefold():
            return ActionResult(f"{self._low} paid {LOW_PAY}.", LOW_PAY, terminated=True, success=False)
        if name == self._high.casefold():
            pay = 1.0 if noise.random() < self.options.high_pays else 0.0
            return ActionResult(f"{self._high} paid {pay:.0f}.", pay, terminated=True, success=True)
        return ActionResult(
            f"Not an arm. Answer {self._shown[0]} or {self._shown[1]}.\n{self._observation()}",
            0.0,
            success=False,
            valid=False,
        )

    def world(self) -> bytes:
        return "\n".join(sorted(self._shown)).encode()

    def legal_actions(self) -> Sequence[str]:
        return self._shown

    def oracle(self, left: Left) -> Sequence[str]:
        return (self._high,) if left.reachable_actions else ()

    def explain(self, left: Left) -> str:
        return f"{self._high} pays more on average than {self._low}."

    def ceiling(self, left: Left) -> float:
        return 1.0 if left.reachable_actions else 0.0

    def floor(self, left: Left) -> float:
        return 0.5 if left.reachable_actions else 0.0

    def _observation(self) -> str:
        return f"Arms: {self._shown[0]}, {self._shown[1]}"
