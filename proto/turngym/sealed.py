"""Seeds that whoever plays them cannot read: a board seals them, and a server that has the board's key opens them.

    key = read_seal_key(Path("board.key"))                      # made by `env_server_seal_key board.key`
    board = Board("sokoban", options_json, "held_out")          # options_json as GetEnvironment resolves it
    sealed = key.seal(board, Seeds(level_seed, noise_seed))     # ResetItem.sealed_seed

A sealed seed is a byte 1, a nonce of 12 random bytes, and AES-256-GCM of both seeds (u64, little-endian) with its tag
of 16 bytes. Environment, options and split are authenticated with it, so it opens for no other board; the environment's
version and the limits are not, so a board outlives a release, and whoever resets names the limits.

What is sealed is only as secret as its seeds are many: draw 64 random bits for each (`random_seeds`), never a running
number, since anybody can generate the levels of small seeds and compare. The key stays with board and server.

Knows nothing of sessions. Sealing and opening need the package `cryptography` (pip install 'turngym[sealed]'), which is
imported only then.
"""

import base64
import binascii
import hashlib
import hmac
import importlib.util
import json
import secrets
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from turngym.private_file import read_private

KEY_BYTES: Final = 32
SEALED_BYTES: Final = 45
"""Length of every sealed seed."""

_FORMAT: Final = b"\x01"
_NONCE_BYTES: Final = 12
_SEEDS: Final = struct.Struct("<QQ")


class CannotOpen(ValueError):
    """A sealed seed that was made with another key or for another board, or is none."""


@dataclass(frozen=True, slots=True)
class Board:
    """What a sealed seed is good for.

    Attributes:
        options_json: resolved options, canonical JSON, as GetEnvironment and Started have them.
        split: its name in lower case.
    """

    environment_id: str
    options_json: str
    split: str

    @property
    def associated_data(self) -> bytes:
        named = {"environment": self.environment_id, "options": self.options_json, "split": self.split}
        return b"turngym-sealed/1\0" + _canonical_json(named).encode()


@dataclass(frozen=True, slots=True)
class Seeds:
    """What is sealed; both are 0 to 2^64 − 1."""

    level_seed: int
    noise_seed: int


@dataclass(frozen=True, slots=True)
class Seal:
    """What stands for the seeds of a sealed episode where they must not be seen.

    Attributes:
        name: in logs and errors: how the SHA-256 of the sealed seed begins, in hexadecimal.
        digest_salt: in the digest, in the place of the level seed; see `SealKey.digest_salt`.
    """

    name: str
    digest_salt: str


def random_seeds() -> Seeds:
    """Seeds that nobody can guess."""
    return Seeds(secrets.randbits(64), secrets.randbits(64))


@dataclass(frozen=True, slots=True)
class SealKey:
    """A board's key.

    Args:
        key: 32 random bytes.

    Raises:
        ValueError: of another length.
    """

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"a seal key of {len(self.key)} bytes; expected {KEY_BYTES}")

    def seal(self, board: Board, seeds: Seeds) -> bytes:
        """The seeds, for this board only. The same seeds sealed again look different."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        plain = _SEEDS.pack(seeds.level_seed, seeds.noise_seed)
        return _FORMAT + nonce + self._cipher().encrypt(nonce, plain, board.associated_data)

    def open(self, board: Board, sealed: bytes) -> tuple[Seeds, Seal]:
        """The seeds that were sealed for this board, and what stands for them.

        Raises:
            CannotOpen: they were not.
        """
        from cryptography.exceptions import InvalidTag

        nonce, encrypted = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            if len(sealed) != SEALED_BYTES or not sealed.startswith(_FORMAT):
                raise CannotOpen(f"{len(sealed)} bytes that are no sealed seed")
            seeds = Seeds(*_SEEDS.unpack(self._cipher().decrypt(nonce, encrypted, board.associated_data)))
        except InvalidTag as error:
            raise CannotOpen("it was sealed with another key, or for another environment, options or split") from error
        return seeds, Seal(hashlib.sha256(sealed).hexdigest()[:16], self.digest_salt(board, seeds))

    def digest_salt(self, board: Board, seeds: Seeds) -> str:
        """What stands in an episode's digest for its level seed: 64 hexadecimal digits.

        Without the key nobody can compute it, so nobody can try seeds against a digest; with it, the same seeds of the
        same board give the same digests, however often they were sealed.
        """
        named = board.associated_data + b"\0" + _SEEDS.pack(seeds.level_seed, seeds.noise_seed)
        return hmac.new(self._derived(b"digest"), named, "sha256").hexdigest()

    def _cipher(self) -> "AESGCM":
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._derived(b"seeds"))

    def _derived(self, purpose: bytes) -> bytes:
        """A key for one purpose, so that no two uses of the board's key meet."""
        return hmac.digest(self.key, b"turngym-sealed/1\0" + purpose, "sha256")


def read_seal_key(path: Path) -> SealKey:
    """The key in a file of base64.

    Raises:
        OSError: it cannot be read.
        ValueError: others may read it, it holds no key, or the package `cryptography` is missing.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ValueError("sealed seeds need the package cryptography: pip install 'turngym[sealed]'")
    text = read_private(path)
    try:
        return SealKey(base64.b64decode(text.strip(), validate=True))
    except (binascii.Error, ValueError):
        # Neither the text nor the error's own words: both could hold a part of some secret.
        raise ValueError(
            f"{path} holds no seal key: expected {KEY_BYTES} bytes in base64; `env_server_seal_key FILE` makes one"
        ) from None


def _canonical_json(value: dict[str, str]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
