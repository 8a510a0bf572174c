"""What an undisturbed episode of Dice is, written down apart from the server: rules, limits and digests."""

import hashlib
import json
import struct
from dataclasses import dataclass, field

from sample_environments import DICE

from turngym_server.rng import Rng


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


@dataclass
class DiceModel:
    """One episode, default limits: 20 turns, 30 actions, 3 a turn."""

    environment: str
    level_seed: int
    noise: list[tuple[int, int]]
    split: str = "all"
    turns: list[tuple[str, ...]] = field(default_factory=list)
    total: int = 0
    actions: int = 0
    reward: float = 0.0
    ended: bool = False
    truncated: bool = False
    observation: str = ""
    digest: bytes = b""

    def __post_init__(self) -> None:
        self.target = Rng(self.level_seed, 0).below(1_000_000)
        self.observation = f"Target {self.target}."
        identity = json.dumps(
            {
                "environment": self.environment,
                "level_seed": str(self.level_seed),
                "limits": {"max_actions": 30, "max_actions_per_turn": 3, "max_turns": 20, "wall_seconds": None},
                "options": {"faces": 6, "worlds": 1_000_000},
                "split": self.split,
                "split_epoch": 1,
                "version": DICE.version,
            },
            separators=(",", ":"),
        )
        self.digest = sha(text(identity), struct.pack("<Q", self.noise[0][1]), text(self.observation))

    def new_noise(self, seed: int) -> None:
        step_index = len(self.turns) + 1
        self.noise.append((step_index, seed))
        self.digest = sha(self.digest, b"noise", struct.pack("<I", step_index), struct.pack("<Q", seed))

    def play(self, actions: tuple[str, ...]) -> None:
        assert not self.ended
        self.turns.append(actions)
        self.reward, terminated, valid, success = 0.0, False, True, None
        for action in actions[: min(3, 30 - self.actions)]:
            noise = Rng(self.noise[-1][1], 2**32 + self.actions)
            self.actions += 1
            if action == "stop":
                self.observation, terminated, success = f"Stopped at {self.total}.", True, self.total == self.target
                self.reward += 1.0
                break
            if action not in ("roll", "slow"):
                self.observation, valid = "Say roll, slow or stop.", False
                self.reward -= 0.1
                success = None
                break
            rolled = noise.below(6)
            self.total += rolled
            self.reward += rolled - 2.5
            self.observation, success = f"Rolled {rolled}, total {self.total}.", False
        reason = 1 if terminated else 2 if len(self.turns) == 20 else 3 if self.actions == 30 else 0
        self.ended, self.truncated = reason > 0, reason > 1
        flag = 2 if not self.ended or success is None else int(success)
        self.digest = sha(
            self.digest,
            struct.pack("<II", len(self.turns), len(actions)),
            *(text(action) for action in actions),
            text(self.observation),
            struct.pack("<d", self.reward),
            bytes([terminated, self.truncated, flag, valid, reason]),
        )
