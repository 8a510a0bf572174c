"""An environment as a third party would write it; imported by the command under test only."""

from sample_environments import DiceOptions, LevelOptions, Levels

from turngym_server.environment import Limits, register


@register(
    id="third_party",
    version="0.1",
    family="third_party",
    summary="Somebody else's.",
    options=DiceOptions,
    operator_options=LevelOptions,
    limits=Limits(max_turns=3, max_actions=3, max_actions_per_turn=1),
)
class ThirdParty(Levels):
    """Dice with levels, registered."""
