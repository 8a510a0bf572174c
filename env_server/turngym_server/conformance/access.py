"""Rules about tokens."""

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import expect
from turngym_server.conformance.connection import CallFailed, Connection
from turngym_server.conformance.probe import Probe, new_request_id
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


@server_rule
def sessions_of_another_token(probe: Probe) -> None:
    """Access: another token's session must look unknown to Step, Fork, Advise, KeepAlive and Close, and live on."""
    other = probe.connection.another_caller()
    if other is None:
        raise NotApplicable("there is no other token to ask with")
    episode = probe.live()
    session_id = episode.session_id
    step = pb.StepRequest(items=[episode.item(episode.an_action())])
    fork = pb.ForkRequest(items=[pb.ForkItem(request_id=new_request_id(), session_id=session_id, same_noise=True)])
    advise = pb.AdviseRequest(items=[pb.AdviseItem(session_id=session_id)])
    for rpc, outcomes in (
        ("Step", other.step(step).outcomes),
        ("Fork", other.fork(fork).outcomes),
        ("Advise", other.advise(advise).outcomes),
        ("KeepAlive", other.keep_alive([session_id]).outcomes),
    ):
        with expect.case(rpc):
            expect.refused(expect.one_each(outcomes, [session_id])[0], "SESSION_UNKNOWN")
    expect.same([outcome.closed for outcome in other.close([session_id]).outcomes], [False], "closed, by the other,")
    episode.play(episode.an_action())
