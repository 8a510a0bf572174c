"""Owners of submissions and their tokens. Of a token only the SHA-256 is kept: it is random, so nobody can guess it."""

import hashlib
import secrets
from datetime import datetime
from typing import Final

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from turngym_leaderboard.store import reading
from turngym_leaderboard.store.database import Store
from turngym_leaderboard.store.errors import NotFound, Taken
from turngym_leaderboard.store.models import OwnerRow, TokenRow
from turngym_leaderboard.store.values import Owner, Role, Token

PREFIX: Final = "tgb_"
"""Begins every token, so that one that was left somewhere is recognised."""


def create(store: Store, name: str) -> Owner:
    """A new owner.

    Raises:
        Taken: there is one of that name.
    """
    row = OwnerRow(name=name, created=reading.utc_now())
    try:
        with store.writing() as session:
            session.add(row)
            session.flush()
            return reading.owner(row)
    except IntegrityError as error:
        raise Taken(f"there is an owner {name!r} already") from error


def find(store: Store, name: str) -> Owner:
    """Raises NotFound."""
    with store.reading() as session:
        row = session.scalar(select(OwnerRow).where(OwnerRow.name == name))
        if row is None:
            raise NotFound(f"there is no owner {name!r}")
        return reading.owner(row)


def every(store: Store) -> list[Owner]:
    """All owners, by name."""
    with store.reading() as session:
        return [reading.owner(row) for row in session.scalars(select(OwnerRow).order_by(OwnerRow.name))]


def add_token(store: Store, owner: Owner, role: Role, *, expires: datetime | None = None) -> str:
    """A new token's text, which is told this once."""
    text = PREFIX + secrets.token_urlsafe(32)
    with store.writing() as session:
        session.add(
            TokenRow(owner_id=owner.id, sha256=_hash(text), role=role, created=reading.utc_now(), expires=expires)
        )
    return text


def token(store: Store, text: str, *, now: datetime) -> Token | None:
    """The token of this text; None: there is none, or it is revoked or has expired."""
    with store.reading() as session:
        row = session.scalar(select(TokenRow).where(TokenRow.sha256 == _hash(text)))
        if row is None or row.revoked is not None or (row.expires is not None and row.expires <= now):
            return None
        return reading.token(row)


def tokens(store: Store, owner: Owner) -> list[Token]:
    """All that were made for an owner, oldest first."""
    with store.reading() as session:
        rows = session.scalars(select(TokenRow).where(TokenRow.owner_id == owner.id).order_by(TokenRow.id))
        return [reading.token(row) for row in rows]


def revoke(store: Store, token_id: int) -> None:
    """Makes a token worthless; one that is so already stays so.

    Raises:
        NotFound: there is none.
    """
    with store.writing() as session:
        row = session.get(TokenRow, token_id)
        if row is None:
            raise NotFound(f"there is no token {token_id}")
        row.revoked = row.revoked or reading.utc_now()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
