"""Rules about tokens."""

from turngym_server.conformance import expect
from turngym_server.conformance.connection import CallFailed, Connection
from turngym_server.conformance.probe import Probe
from turngym_server.conformance.rule import NotApplicable, server_rule

WRONG_TOKEN = "no token of any server"  # noqa: S105  # It opens nothing.


@server_rule
def calls_without_a_token(probe: Probe) -> None:
    """Access: where a token is needed, a call without one, or with a wrong one, must be UNAUTHENTICATED."""
    nobody = Connection(probe.connection.channel)
    try:
        nobody.get_server()
    except CallFailed:
        expect.call_refused(nobody.get_server, "UNAUTHENTICATED")
    else:
        raise NotApplicable("the server needs no token")
    stranger = Connection(probe.connection.channel, [("authorization", f"Bearer {WRONG_TOKEN}")])
    expect.call_refused(stranger.get_server, "UNAUTHENTICATED")
