"""Seeds of a board against RFC 2104 written out."""

import hashlib

from turngym_leaderboard import seeds


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """RFC 2104 for keys up to a block, by its definition."""
    key = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in key) + message).digest()
    return hashlib.sha256(bytes(b ^ 0x5C for b in key) + inner).digest()


def test_seeds_are_the_first_eight_bytes_of_the_hmac_of_what_they_are_for():
    def expected(message: bytes) -> int:
        return int.from_bytes(hmac_sha256(b"secret", message)[:8], "big")

    assert seeds.level_seed(b"secret", "sokoban", 7) == expected(b'["level","sokoban",7]')
    assert seeds.noise_seed(b"secret", "sokoban", 7, 2) == expected(b'["noise","sokoban",7,2]')
    assert seeds.agent_seed(b"secret", "sokoban", 7, 2) == expected(b'["agent","sokoban",7,2]')


def test_seeds_tell_apart_secret_environment_draw_attempt_and_purpose():
    made = [
        f(secret, environment, draw, attempt)
        for f in (seeds.noise_seed, seeds.agent_seed)
        for secret in (b"0", b"1")
        for environment in ("sokoban", "sokoban_large")
        for draw in (1, 11)
        for attempt in (1, 11)
    ]
    assert len(set(made)) == 32
