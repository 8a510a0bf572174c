"""Who makes a call. Knows nothing of how that was found out."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeGuard

from turngym_server.access.roles import ROLES_OF_SEALED, SPLITS_OF_ROLE, Role
from turngym_server.splits import Split

CLIENT_KEY: Final = "turngym-client"
"""Metadata key by which a client names itself."""
MAX_CLIENT_CHARACTERS: Final = 128
"""A longer name is refused: cut, it might be another client's, whose request ids are its own."""

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a call.

    Attributes:
        owner: whose sessions it may use: a token's owner; "" on a server without tokens, where whoever has a
            session's id may use it.
        client: the id that the client chose for itself; "" for all who chose none.
        name: the token's, for logs.
        max_sessions: its own bound; None: the server's.
    """

    owner: str = ""
    client: str = ""
    name: str = ""
    role: Role = Role.ADMIN
    max_sessions: int | None = None

    @property
    def account(self) -> str:
        """Whom sessions and waiting work are counted for."""
        return self.owner or self.client

    def may_meet(self, served: Collection[Split]) -> frozenset[Split]:
        """Of the splits that a server serves, those that this caller may meet."""
        return SPLITS_OF_ROLE[self.role].intersection(served)

    @property
    def withheld_from(self) -> Role | None:
        """Its role, where that never meets a held-out world; None: it may."""
        return None if Split.HELD_OUT in SPLITS_OF_ROLE[self.role] else self.role

    @property
    def may_unseal(self) -> bool:
        """Whether it may play a board's sealed seeds."""
        return self.role in ROLES_OF_SEALED

    def __str__(self) -> str:
        return f"{self.name}/{self.client}" if self.name else self.client


def stranger(metadata: Metadata) -> Caller:
    """Whoever calls, before any token is looked at: it may do everything, so it is for servers without tokens."""
    for key, value in metadata:
        if key == CLIENT_KEY:
            return Caller(client=_legible(value)[: MAX_CLIENT_CHARACTERS + 1])
    return _NOBODY


def _legible(value: str | bytes) -> str:
    """A client's name as a front can pass it on: as it came, or in hex where that is no printable ASCII."""
    if can_be_sent(value):
        return value
    return (value.encode() if isinstance(value, str) else value).hex()


def can_be_sent(value: str | bytes) -> TypeGuard[str]:
    """Whether gRPC takes this for the value of a metadata key; it lets in more than it sends."""
    return isinstance(value, str) and value.isascii() and value.isprintable()


_NOBODY: Final = Caller()
