"""Seeds of a board, as functions of its secret and of where they are used.

Each is the first eight bytes, big-endian, of HMAC-SHA256(secret, canonical JSON of what it is for): whoever knows the
secret can derive all of them, nobody else can guess one from others. Knows nothing of environments or agents.
"""

import hmac
import json


def level_seed(secret: bytes, environment: str, draw: int) -> int:
    """Seed of the level of one draw of the walk over levels, in [0, 2^64)."""
    return _derive(secret, "level", environment, draw)


def noise_seed(secret: bytes, environment: str, draw: int, attempt: int) -> int:
    """Seed of the environment's noise in one attempt: the same for every agent, so that luck is shared."""
    return _derive(secret, "noise", environment, draw, attempt)


def agent_seed(secret: bytes, environment: str, draw: int, attempt: int) -> int:
    """Seed of the agent's own sampling in one attempt."""
    return _derive(secret, "agent", environment, draw, attempt)


def request_seed(agent_seed: int, agent: str, turn: int) -> int:
    """Seed of one request to a server that samples for an agent, in [0, 2^31), which every server takes.

    It differs from agent to agent, so that no server knows by it which attempt it has met before.
    """
    return _derive(str(agent_seed).encode(), "request", agent, turn) >> 33


def lot(secret: bytes, agent: str, draw: int, attempt: int) -> int:
    """An episode's lot where a few of an agent's are drawn to be checked: the lowest are taken."""
    return _derive(secret, "lot", agent, draw, attempt)


def _derive(secret: bytes, *what: str | int) -> int:
    message = json.dumps(what, separators=(",", ":"), ensure_ascii=False).encode()
    return int.from_bytes(hmac.digest(secret, message, "sha256")[:8], "big")
