"""Checks every rule against a server. A rule that fails, whatever the server did to it, never keeps others from it."""

from collections.abc import Iterator, Sequence

from turngym_server.conformance import (  # Importing a module adds its rules; errors come last, as they look back.
    access,
    batches,
    copies,
    errors,
    information,
    leases,
    replay,
    resets,
    splits,
    stream,
    transitions,
    turns,
)
from turngym_server.conformance.connection import CallFailed, Connection, retry_seconds
from turngym_server.conformance.probe import Probe
from turngym_server.conformance.rule import RULES, Finding, NotApplicable, Rule, Verdict, Violation

SUBJECTS = (access, information, resets, batches, turns, stream, transitions, splits, replay, copies, leases, errors)
"""In the order in which their rules are checked."""


def check(connection: Connection, environment_ids: Sequence[str], words: str = "") -> Iterator[Finding]:
    """What comes of each rule: those of each environment, and those of the server, with the first one.

    Args:
        words: only rules whose sentences hold them.

    Raises:
        CallFailed: the server does not say what it is, or does not know one of the environments.
    """
    probes = [Probe(connection, environment_id) for environment_id in environment_ids]
    order = [subject.__name__ for subject in SUBJECTS]
    chosen = [rule for rule in RULES if words in rule.sentence]
    for rule in sorted(chosen, key=lambda rule: order.index(rule.check.__module__)):
        for probe in probes[:1] if rule.once else probes:
            yield _checked(rule, probe)


def _checked(rule: Rule, probe: Probe) -> Finding:
    verdict, detail = Verdict.HOLDS, ""
    try:
        try:
            rule.check(probe)
        finally:
            probe.close_sessions()
    except NotApplicable as reason:
        verdict, detail = Verdict.SKIPPED, str(reason)
    except CallFailed as failure:
        # A quota is the operator's affair; the rules about errors look at how it was refused.
        verdict = Verdict.SKIPPED if retry_seconds(failure.status) is not None else Verdict.FAILS
        detail = str(failure)
    except Violation as violation:
        verdict, detail = Verdict.FAILS, str(violation)
    except (IndexError, KeyError, ValueError) as error:
        # The rules read replies by the contract; one that cannot be read that way breaks it.
        verdict, detail = Verdict.FAILS, f"the reply could not be read: {type(error).__name__}: {error}"
    return Finding(rule, probe.spec.id, verdict, detail)
