"""Rules about leases: KeepAlive, Close, and sessions that are gone."""

import time

from turngym.v1 import environment_pb2 as pb
from turngym_server.conformance import expect
from turngym_server.conformance.probe import UNKNOWN_SESSION, Probe
from turngym_server.conformance.rule import NotApplicable, server_rule

LONGEST_LEASE = 5.0
"""Seconds of a lease whose end the kit waits for."""


@server_rule
def kept_alive(probe: Probe) -> None:
    """KeepAlive: it must renew the lease, as often as it is called."""
    session_id = probe.start().session_id
    for _ in range(2):
        outcome = expect.one_each(probe.connection.keep_alive([session_id]).outcomes, [session_id])[0]
        expect.true(outcome.HasField("lease_seconds"), f"it gave {expect.describe(outcome)}")
        seconds, most = outcome.lease_seconds, probe.server.lease_seconds
        expect.true(0 < seconds <= most, f"{seconds} s are left, of a lease of {most} s")


@server_rule
def closed_twice(probe: Probe) -> None:
    """Close: closing must be true once and then false, and never an error."""
    session_id = probe.start().session_id
    for expected in (True, False, False):
        outcome = expect.one_each(probe.connection.close([session_id]).outcomes, [session_id])[0]
        expect.same(outcome.closed, expected, "closed")
    outcome = probe.connection.close([UNKNOWN_SESSION]).outcomes[0]
    expect.same(outcome.closed, False, "closed, of an unknown session,")


@server_rule
def closed_sessions(probe: Probe) -> None:
    """Close: a closed session must be NOT_FOUND for Step, Fork, Advise and KeepAlive."""
    episode = probe.start()
    probe.connection.close([episode.session_id])
    _gone(episode.probe, episode.session_id, "SESSION_UNKNOWN")


@server_rule
def expired_sessions(probe: Probe) -> None:
    """Leases: a session that is untouched for lease_seconds must be NOT_FOUND SESSION_EXPIRED."""
    lease = probe.server.lease_seconds
    if lease > LONGEST_LEASE:
        raise NotApplicable(f"the lease is of {lease:g} s, and the kit waits for at most {LONGEST_LEASE:g}")
    session_id = probe.start().session_id
    time.sleep(1.5 * lease)
    _gone(probe, session_id, "SESSION_EXPIRED")


def _gone(probe: Probe, session_id: str, reason: str) -> None:
    step = pb.StepItem(session_id=session_id, step_index=1, actions=["a"])
    expect.refused(probe.step([step])[0], reason)
    expect.refused(probe.fork([pb.ForkItem(request_id=b"f" * 16, session_id=session_id, same_noise=True)])[0], reason)
    expect.refused(probe.advise(session_id), reason)
    expect.refused(probe.connection.keep_alive([session_id]).outcomes[0], reason)
