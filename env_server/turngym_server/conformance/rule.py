"""What a rule is, and what can come of checking one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from turngym_server.conformance.probe import Probe


class Violation(Exception):
    """The server broke the rule. Says what came in place of what the rule demands."""


class NotApplicable(Exception):
    """The rule cannot be checked on this server or environment. Says why."""


class Verdict(enum.Enum):
    HOLDS = "holds"
    FAILS = "fails"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Rule:
    """One sentence of the contract.

    Attributes:
        name: of the function that checks it.
        sentence: what must hold.
        check: raises Violation or NotApplicable.
        once: it is about the server, not about each environment.
    """

    name: str
    sentence: str
    check: Callable[[Probe], None]
    once: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one rule.

    Attributes:
        environment_id: that it was checked with.
        detail: what came instead, or why it was skipped; "" where the rule holds.
    """

    rule: Rule
    environment_id: str
    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        where = "" if self.rule.once else f"{self.environment_id}: "
        return f"{where}{self.rule.sentence}{f'; {self.detail}' if self.detail else ''}"


RULES: Final[list[Rule]] = []
"""Every rule, in the order in which they are checked."""


def rule(check: Callable[[Probe], None]) -> Callable[[Probe], None]:
    """Adds a rule that is checked with each environment."""
    RULES.append(_rule(check, once=False))
    return check


def server_rule(check: Callable[[Probe], None]) -> Callable[[Probe], None]:
    """Adds a rule that is checked once."""
    RULES.append(_rule(check, once=True))
    return check


def _rule(check: Callable[[Probe], None], *, once: bool) -> Rule:
    assert check.__doc__
    return Rule(check.__name__, " ".join(check.__doc__.split()).removesuffix("."), check, once)
