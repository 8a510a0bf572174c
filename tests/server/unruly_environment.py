"""`Unruly`, registered; imported by servers under test only, as the registry of the tests holds what is served."""

from unruly import Unruly, UnrulyOptions

from turngym_server.environment import Limits, register

register(
    id="unruly",
    version="1.0",
    family="unruly",
    summary="Does what no environment should.",
    options=UnrulyOptions,
    limits=Limits(max_turns=20, max_actions=20, max_actions_per_turn=1),
    step_deadline=1.0,
)(Unruly)
