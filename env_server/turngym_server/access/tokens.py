"""The operator's file of tokens: who may use a server, in TOML.

    [alice]                                  # the token's name: in the token itself, in logs and in errors
    role = "train"                           # train, evaluate or admin; see turngym_server.access.roles
    sha256 = "9f86d081884c7d659a2feaa0c5…"   # of the whole token, 64 hexadecimal digits
    expires = 2027-06-30T00:00:00Z           # optional, with a time zone
    max_sessions = 512                       # optional quotas, of all workers together
    requests_per_second = 200
    bytes_per_second = 10_000_000

A token is its name, a dot and 256 random bits: `alice.PVEj8…`. Only its SHA-256 is kept. A slow hash would add nothing:
those slow down guessing, and 256 random bits cannot be guessed. `env_server_token` makes a token and its lines.

Knows nothing of RPCs.
"""

import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from turngym.private_file import read_private
from turngym_server.access.quotas import (
    MAX_BYTES_PER_SECOND,
    MAX_REQUESTS_PER_SECOND,
    MAX_SESSIONS,
    MIN_BYTES_PER_SECOND,
    MIN_REQUESTS_PER_SECOND,
    Quotas,
)
from turngym_server.access.roles import Role
from turngym_server.host import nearest

log: Final = logging.getLogger(__name__)

SECRET_BYTES: Final = 32
MAX_TOKEN_CHARACTERS: Final = 256
TELL_SECONDS: Final = 10.0
"""While the file cannot be read, the log says so this often; reading it is tried at every call."""
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What a token may be called: a bare key of TOML."""
MAX_TOLD: Final = 32
"""Characters of the longest name or value that an error shows; a secret has 43, its SHA-256 64."""
_EXPECTED: Final = """[name] and under it lines such as role = "train" and sha256 = "…", each text in quotes"""
_EXPECTED_VALUES: Final = {
    "role": f"{', '.join(role.value for role in list(Role)[:-1])} or {list(Role)[-1].value}",
    "sha256": "the 64 hexadecimal digits of a token's SHA-256, never the token itself",
    "expires": "a time with its zone, such as 2027-06-30T00:00:00Z",
    "max_sessions": f"a whole number from 1 to {MAX_SESSIONS}",
    "requests_per_second": f"a number from {MIN_REQUESTS_PER_SECOND:g} to {MAX_REQUESTS_PER_SECOND:g}",
    "bytes_per_second": f"a number from {MIN_BYTES_PER_SECOND:g} to {MAX_BYTES_PER_SECOND:g}",
}
_NO_DIGEST: Final = b"\0" * hashlib.sha256().digest_size
"""Compared with where there is no token of that name, so that it takes as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One entry of the file.

    Attributes:
        digest: SHA-256 of the token.
        expires: None: never.
        owner: whose sessions these are. Another role or secret under the same name is another owner.
    """

    name: str
    role: Role
    digest: bytes
    expires: datetime | None
    quotas: Quotas
    owner: str


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Role
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    expires: AwareDatetime | None = None
    max_sessions: int | None = Field(default=None, ge=1, le=MAX_SESSIONS, strict=True)
    requests_per_second: float | None = Field(
        default=None, ge=MIN_REQUESTS_PER_SECOND, le=MAX_REQUESTS_PER_SECOND, allow_inf_nan=False
    )
    bytes_per_second: float | None = Field(
        default=None, ge=MIN_BYTES_PER_SECOND, le=MAX_BYTES_PER_SECOND, allow_inf_nan=False
    )


def new_token(name: str) -> str:
    """A token of that name that nobody has seen.

    Raises:
        ValueError: it is no name for a token.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"token name {name[:100]!r}: expected 1 to 64 letters, digits, _ or -")
    return f"{name}.{secrets.token_urlsafe(SECRET_BYTES)}"


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def read_tokens(path: Path) -> dict[str, Token]:
    """The tokens of a file, by name.

    Raises:
        OSError, MemoryError: it cannot be read now.
        ValueError: it is no regular file, others than its owner and group may read it, others than its owner may write
            it, or it is malformed.
    """
    text = read_private(path)
    try:
        return _tokens(path, text)
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # Whatever a file makes a parser do, it is the file that is wrong.
        raise ValueError(f"{path} is malformed: {type(error).__name__}") from error


def _tokens(path: Path, text: str) -> dict[str, Token]:
    try:
        content = tomllib.loads(text)
    except ValueError as error:  # Not TOMLDecodeError alone: of a number of too many digits int says so.
        raise ValueError(f"{path}: no TOML{_toml_fault(error)}; expected {_EXPECTED}") from None  # May hold a secret.
    except RecursionError as error:
        raise ValueError(f"{path}: no TOML: nested too deeply") from error
    if not content:
        raise ValueError(f"{path} holds no token; `env_server_token NAME --role ROLE --file {path}` adds one")
    return {name: _token(path, text, name, entry) for name, entry in content.items()}


def _token(path: Path, text: str, name: str, entry: object) -> Token:
    where = f"{path}, line {_line_of(text, name)}"
    if not isinstance(entry, dict):
        raise ValueError(  # noqa: TRY004  # What is wrong is the file.
            f"{where}: {_shown(name)} stands outside of any [token]; expected sections such as [alice]"
        )
    if not NAME.fullmatch(name):
        raise ValueError(f"{where}: token name {_shown(name)}: expected 1 to 64 letters, digits, _ or -")
    try:
        read = _Entry.model_validate(entry)
    except ValidationError as error:
        section = name if len(name) <= MAX_TOLD else "…"
        raise ValueError(f"{where}, [{section}]: {_first_fault(error)}") from None  # Its input may be a secret.
    return Token(
        name=name,
        role=read.role,
        digest=bytes.fromhex(read.sha256),
        expires=read.expires,
        quotas=Quotas(
            max_sessions=read.max_sessions,
            requests_per_second=read.requests_per_second,
            bytes_per_second=read.bytes_per_second,
        ),
        owner=f"{name} {read.role.value} {read.sha256}",
    )


def _shown(text: str) -> str:
    """What an error shows of a name or value: nothing of what is long enough for a secret in its place."""
    return repr(text) if len(text) <= MAX_TOLD else f"… ({len(text)} characters)"


def _line_of(text: str, name: str) -> int:
    """Where a section, or a key outside of one, begins."""
    begins = re.compile(rf"""\s*(\[\s*)?(["']?){re.escape(name)}\2\s*[\].=]""")
    return next((number for number, line in enumerate(text.splitlines(), start=1) if begins.match(line)), 1)


def _toml_fault(error: ValueError) -> str:
    """Where a file stops being TOML. tomllib's other words may quote a secret in it."""
    place = re.search(r"\((at line \d+, column \d+|at end of document)\)$", str(error))
    return f" {place[1]}" if place else ": a number has too many digits"


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_context=False)[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        close = nearest(key, _Entry.model_fields)
        remedy = f"did you mean {close!r}?" if close else f"expected {', '.join(_Entry.model_fields)}"
        return f"unknown key {_shown(key)}; {remedy}"
    if key == "sha256":
        return f"sha256: expected {_EXPECTED_VALUES[key]}"
    expected = _EXPECTED_VALUES[key]
    if fault["type"] == "missing":
        return f"{key}: missing; expected {expected}"
    return f"{key}: got {_shown(str(fault['input']))}; expected {expected}"


class TokenFile:
    """The tokens of a file, read again whenever it has changed.

    A new file that cannot be read, or is malformed, is an error in the log and changes nothing: a half-written file
    must lock nobody out. So replace the file in one move (`mv`) where many use it. One that was read and is malformed
    waits for its next change; one that could not be read is tried again at every call, since what it withdraws must
    not work until somebody touches it.

    Args:
        path: the file.
        clock: seconds, monotonic; how often the log says that the file cannot be read is counted on it.
        known: what the file held when another process read it, where that has to do for now; None: it may not.

    Raises:
        OSError, ValueError: see `read_tokens`; only where nothing is known.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        known: Mapping[str, Token] | None = None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._tell_after = -math.inf
        self._seen: tuple[int, ...] | None = None
        self.tokens: Mapping[str, Token] = known or {}
        if known is None:
            self._seen = _state(path)
            self.tokens = read_tokens(path)

    def find(self, presented: str) -> Token | None:
        """The entry of a token, expired or not. Takes as long for a wrong one of whatever name."""
        token = self.current().get(presented.partition(".")[0])
        expected = _NO_DIGEST if token is None else token.digest
        return token if hmac.compare_digest(digest_of(presented[:MAX_TOKEN_CHARACTERS]), expected) else None

    def current(self) -> Mapping[str, Token]:
        """The tokens as the file has them now, by name: another object once they have changed."""
        self._refresh()
        return self.tokens

    def _refresh(self) -> None:
        state = _state(self._path)  # 2 µs a call; a removed token must not work once more.
        if state is not None and state == self._seen:
            return
        try:
            self.tokens = read_tokens(self._path)
        except (OSError, MemoryError) as error:
            self._tell_unreadable(error)
            return
        except ValueError as error:
            log.error("tokens stay as they were: %s", error)  # noqa: TRY400  # A traceback tells an operator nothing.
        else:
            log.warning("tokens read again from %s: %d", self._path, len(self.tokens))
        self._seen = state
        self._tell_after = -math.inf

    def _tell_unreadable(self, error: OSError | MemoryError) -> None:
        now = self._clock()
        if now < self._tell_after:
            return
        self._tell_after = now + TELL_SECONDS
        why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        log.error("tokens stay as they were, until %s can be read: %s", self._path, why)


def _state(path: Path) -> tuple[int, ...] | None:
    """What differs once a file has been changed or replaced; None where it cannot be found."""
    try:
        found = os.stat(path)  # noqa: PTH116  # A third of the time of Path.stat.
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
