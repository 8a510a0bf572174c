"""`Unruly`, registered; imported by servers under test only, as the registry of the tests holds what is served."""

from unruly import Unruly, UnrulyOptions

from turngym_server.environment import Determinism, Limits, register


class Unsure(Unruly):
    """The same, without a promise."""


register(
    id="unruly",
    version="1.0",
    family="unruly",
    summary="Does what no environment should.",
    options=UnrulyOptions,
    limits=Limits(max_turns=20, max_actions=20, max_actions_per_turn=1),
    step_deadline=1.0,
)(Unruly)

register(
    id="unsure",
    version="1.0",
    family="unsure",
    summary="Does what no environment should, and not always the same.",
    options=UnrulyOptions,
    limits=Limits(max_turns=20, max_actions=20, max_actions_per_turn=1),
    determinism=Determinism.NONE,
)(Unsure)
