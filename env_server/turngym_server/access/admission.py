"""Who calls, and whether they may: tokens, roles and quotas, checked once for each call.

Knows nothing of sessions; `turngym_server.sessions.table` holds who owns which.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from turngym_server.access.caller import CLIENT_KEY, MAX_CLIENT_CHARACTERS, Caller, Metadata, stranger
from turngym_server.access.ledger import Ledger
from turngym_server.access.quotas import Meter, Quotas
from turngym_server.access.roles import ROLES_OF_RPC
from turngym_server.access.tokens import Token, TokenFile
from turngym_server.config import ServerConfig
from turngym_server.errors import MAX_RETRY_SECONDS, ItemError, Reason

TOKEN_KEY: Final = "authorization"  # noqa: S105  # The key's name.

NO_TOKEN: Final = "this server needs a token, sent as metadata `authorization: Bearer TOKEN`; its operator issues them"  # noqa: S105
WRONG_TOKEN: Final = "the token is not known here: mistyped, withdrawn, or another server's"  # noqa: S105


class Visit:
    """What a call shows to be let in. All messages of a stream show the same, so what it led to is kept.

    Attributes:
        rpc: its name.
        metadata: what its caller sent along.
        stranger: the caller before any token was looked at.
        pass_: what was found out; None: nothing yet.
    """

    __slots__ = ("metadata", "pass_", "rpc", "stranger")

    def __init__(self, rpc: str, metadata: Metadata) -> None:
        self.rpc = rpc
        self.metadata = metadata
        self.stranger = stranger(metadata)
        self.pass_: _Pass | None = None


class _Pass:
    """The caller that a visit's token makes, and what its requests are counted on, while the tokens are the same."""

    __slots__ = ("caller", "meter", "token", "tokens")

    def __init__(self, tokens: Mapping[str, Token], token: Token, caller: Caller, meter: Meter) -> None:
        self.tokens = tokens
        self.token = token
        self.caller = caller
        self.meter = meter


class Access:
    """Lets callers in: checked once a call, or once a message of a stream.

    Args:
        tokens: None: everybody may do everything.
        ledger: of what is used of the quotas, where several processes serve together; None: this one is alone.
        clock: seconds, monotonic; quotas are counted on it. now: seconds since 1970; tokens expire by it.
    """

    def __init__(
        self,
        tokens: TokenFile | None,
        *,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._tokens = tokens
        self._ledger = ledger
        self._clock = clock
        self._now = now
        self._meters: dict[str, tuple[Quotas, Meter]] = {}

    def admit(self, visit: Visit, size: int, charged: bool = False) -> Caller:
        """The caller of a visit whose request has `size` bytes.

        Args:
            charged: another process of this server has let the call in, and counted it.

        Raises:
            ItemError: UNAUTHENTICATED, NOT_PERMITTED, QUOTA_EXCEEDED, or INVALID_ITEM for its client's name.
        """
        if self._tokens is None:
            _check_client(visit.stranger)
            return visit.stranger
        found = visit.pass_
        if found is None or found.tokens is not self._tokens.current() or self._has_expired(found.token):
            found = visit.pass_ = self._recognised(visit)
        quota, wait = ("", 0.0) if charged else found.meter.admit(size)
        if quota:
            raise ItemError(
                Reason.QUOTA_EXCEEDED,
                f"token {found.token.name!r} has used up its {quota}; "
                f"ask again in {min(wait, MAX_RETRY_SECONDS):.3f} s",
                metadata={"quota": quota},
                retry_after=wait,
            )
        return found.caller

    @property
    def known_tokens(self) -> Mapping[str, Token] | None:
        """The tokens that are known now, by name; None: none are needed."""
        return None if self._tokens is None else self._tokens.current()

    @property
    def is_open(self) -> bool:
        """Whether no token is needed."""
        return self._tokens is None

    def check(self, rpc: str, metadata: Metadata) -> Token:
        """The token of a caller who may call the RPC, whatever its quotas have left. For servers that need tokens.

        Raises:
            ItemError: UNAUTHENTICATED or NOT_PERMITTED.
        """
        assert self._tokens is not None
        token = self._authenticated(self._tokens, metadata)
        if token.role not in ROLES_OF_RPC.get(rpc, ()):
            raise ItemError(
                Reason.NOT_PERMITTED,
                f"{rpc} is not for role {token.role.value!r}, which token {token.name!r} has",
                metadata={"role": token.role.value},
            )
        return token

    def charge(self, caller: Caller, size: int) -> None:
        """Counts the bytes of a reply."""
        if caller.owner and (metered := self._meters.get(caller.owner)) is not None:
            metered[1].charge(size)

    def _recognised(self, visit: Visit) -> _Pass:
        """Whoever shows this token. Raises ItemError where it may not call the RPC."""
        assert self._tokens is not None
        _check_client(visit.stranger)
        token = self.check(visit.rpc, visit.metadata)
        caller = Caller(
            owner=token.owner,
            client=visit.stranger.client,
            name=token.name,
            role=token.role,
            max_sessions=token.quotas.max_sessions,
        )
        return _Pass(self._tokens.tokens, token, caller, self._meter(token.owner, token.quotas))

    def _has_expired(self, token: Token) -> bool:
        return token.expires is not None and self._now() >= token.expires.timestamp()

    def _authenticated(self, tokens: TokenFile, metadata: Metadata) -> Token:
        given = [value for key, value in metadata if key == TOKEN_KEY]
        if not given:
            raise ItemError(Reason.UNAUTHENTICATED, NO_TOKEN)
        scheme, _, presented = given[0].partition(" ") if isinstance(given[0], str) else ("", "", "")
        token = tokens.find(presented.strip()) if scheme.lower() == "bearer" and len(given) == 1 else None
        if token is None:
            raise ItemError(Reason.UNAUTHENTICATED, WRONG_TOKEN)
        if token.expires is not None and self._has_expired(token):
            raise ItemError(
                Reason.UNAUTHENTICATED,
                f"token {token.name!r} expired at {token.expires.isoformat()}; "
                f"it is {datetime.fromtimestamp(self._now(), UTC).isoformat(timespec='seconds')} here",
            )
        return token

    def _meter(self, owner: str, quotas: Quotas) -> Meter:
        metered = self._meters.get(owner)
        if metered is None or metered[0] != quotas:
            usage = self._ledger.usage(owner) if self._ledger and quotas.of_a_second else None
            metered = self._meters[owner] = quotas, Meter(quotas, self._clock, usage)
        return metered[1]


def _check_client(stranger: Caller) -> None:
    if len(stranger.client) > MAX_CLIENT_CHARACTERS:
        raise ItemError(
            Reason.INVALID_ITEM,
            f"metadata {CLIENT_KEY} is longer than {MAX_CLIENT_CHARACTERS} characters; send 16 random bytes in hex",
        )


def access_of(
    config: ServerConfig,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time.time,
    *,
    ledger: Ledger | None = None,
) -> Access:
    """Who may call a server, as its operator wants it.

    Raises:
        OSError, ValueError: the file of tokens cannot be read, or is malformed.
    """
    tokens = TokenFile(config.tokens, clock, config.known_tokens) if config.tokens else None
    return Access(tokens, ledger=ledger, clock=clock, now=now)
