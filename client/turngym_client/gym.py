"""`RemoteEnv`: an environment of a turngym server as a `gymnasium.Env`.

    env = RemoteEnv("localhost:50051", "sokoban")
    observation, info = env.reset(seed=7)
    observation, reward, terminated, truncated, info = env.step("Up || Left")

Loads gymnasium and numpy, which `import turngym_client` does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final, SupportsFloat

import gymnasium
import numpy as np

from turngym_client.episode import EpisodeFacts
from turngym_client.sync import Client, Episode, connect
from turngym_client.types import SEED_MAX, Limits, Split, Transition, check_type, cut

MAX_CHARACTERS: Final = 1 << 18
"""Longest text of a `UnicodeText` space by default: an observation is at most 256 KiB."""
DEFAULT_LIMITS = Limits()


class UnicodeText(gymnasium.Space[str]):
    """Every text of at most `max_length` characters, the empty one included.

    `gymnasium.spaces.Text` holds only the characters it lists, and boards use others. Samples are short words.
    """

    def __init__(self, max_length: int = MAX_CHARACTERS, seed: int | np.random.Generator | None = None) -> None:
        self.max_length = max_length
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A word of 1 to 16 lower-case letters. Masks are refused: there is nothing to choose from."""
        if mask is not None or probability is not None:
            raise ValueError("a UnicodeText space takes neither mask nor probability")
        length = int(self.np_random.integers(1, min(16, self.max_length), endpoint=True))
        return "".join(chr(97 + int(letter)) for letter in self.np_random.integers(0, 26, size=length))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash((UnicodeText, self.max_length))

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"


def noise_seed_of(seed: int) -> int:
    """The noise seed of a reset seed: the first 8 bytes, big-endian, of SHA-256("turngym-noise/" + decimal seed)."""
    return int.from_bytes(hashlib.sha256(b"turngym-noise/%d" % seed).digest()[:8], "big")


def draw_seed(rng: np.random.Generator) -> int:
    return int(rng.integers(0, SEED_MAX, dtype=np.uint64, endpoint=True))


def actions_of(text: str, separator: str) -> tuple[str, ...]:
    """The actions in an agent's text: stripped, empty ones dropped; ("",), an invalid action, where there is none."""
    parts = text.split(separator) if separator else [text]
    return tuple(stripped for part in parts if (stripped := part.strip())) or ("",)


def info_of(episode: EpisodeFacts, state: Transition) -> dict[str, Any]:
    """What a step or reset tells beside the observation, in fresh objects."""
    return {
        "success": state.success,
        "action_valid": state.action_valid,
        "actions_executed": state.actions_executed,
        "action_rewards": list(state.action_rewards),
        "end_reason": state.end_reason.value,
        "reward_components": dict(state.reward_components),
        "metrics": dict(state.metrics),
        "digest": state.digest.hex(),
        "step_index": episode.step_index,
        "level_seed": episode.level_seed,
        "noise_seed": episode.noise[-1].noise_seed,
        "instance_id": episode.instance_id,
    }


class RemoteEnv(gymnasium.Env[str, str]):
    """One environment, one episode at a time.

    An action is the agent's text, cut at the environment's separator. `reset(seed=s)` starts level s with noise seed
    `noise_seed_of(s)`; later resets without a seed follow from it, and before any seed the server draws.
    `reset(options={"noise_seed": n})` sets the noise seed alone.

    Args:
        address: host:port, several of them, or a `Client`, which is then not closed with the environment.
        environment_id: what to play.
        options, limits, split: as in `EpisodeRequest`.
        render_mode: "ansi" or None; `render` gives the latest observation.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]

    def __init__(
        self,
        address: str | list[str] | Client,
        environment_id: str,
        *,
        options: Mapping[str, object] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        split: Split = Split.TRAIN,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise ValueError(f'render_mode is {cut(repr(render_mode))}, but must be "ansi" or None')
        self.render_mode = render_mode
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self._owns_client = not isinstance(address, Client)
        self._client = address if isinstance(address, Client) else connect(address)
        self._environment_id = environment_id
        self._options = options
        self._limits = limits
        self._split = split
        self._episode: Episode | None = None

    @property
    def episode(self) -> Episode:
        """The episode being played. Raises gymnasium's ResetNeeded before the first reset."""
        if self._episode is None:
            raise gymnasium.error.ResetNeeded("call reset before anything else")
        return self._episode

    @property
    def instructions(self) -> str:
        """What an agent has to be told."""
        return self.episode.instructions

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        level_seed = seed
        if seed is None and self._np_random is not None:
            level_seed = draw_seed(self._np_random)
        noise_seed: int | None = (options or {}).get("noise_seed")
        if noise_seed is None and level_seed is not None:
            noise_seed = noise_seed_of(level_seed)
        self._close_episode()
        self._episode = self._client.reset(
            self._environment_id,
            options=self._options,
            limits=self._limits,
            split=self._split,
            level_seed=level_seed,
            noise_seed=noise_seed,
        )
        return self._episode.state.observation, info_of(self._episode, self._episode.state)

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        episode = self.episode
        check_type("action", action, str)
        state = episode.step(actions_of(action, episode.action_separator))
        return state.observation, state.reward, state.terminated, state.truncated, info_of(episode, state)

    def render(self) -> str | None:  # type: ignore[override]
        return self.episode.state.observation if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Frees the episode, and the client unless it was given. Idempotent."""
        self._close_episode()
        if self._owns_client:
            self._client.close()

    def _close_episode(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None


gymnasium.register(id="turngym/Remote-v0", entry_point="turngym_client.gym:RemoteEnv", disable_env_checker=True)
