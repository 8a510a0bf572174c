"""`RemoteVectorEnv`: episodes of one environment side by side, as a `gymnasium.vector.VectorEnv`.

Loads gymnasium and numpy, which `import turngym_client` does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Tuple
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from turngym_client.gym import DEFAULT_LIMITS, UnicodeText, actions_of, draw_seed, info_of, noise_seed_of
from turngym_client.sync import Client, Episode, connect
from turngym_client.types import EpisodeRequest, Limits, Split, check_type, told

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class RemoteVectorEnv(VectorEnv[tuple[str, ...], Sequence[str], NDArray[Any]]):
    """`num_envs` episodes, all stepped in as few calls as they take.

    Nothing is reset by itself: `reset(options={"reset_mask": mask})` starts new episodes where the mask is True, and a
    step while any episode is over is an error. Observations are a tuple of texts. `reset(seed=s)` starts levels s,
    s + 1, …; a list of seeds (None: drawn) sets each one's. Noise and later seeds are as in `RemoteEnv`.

    Args:
        address: host:port, several of them, or a `Client`, which is then not closed with the environment.
        environment_id: what to play.
        num_envs: episodes side by side.
        options, limits, split: as in `EpisodeRequest`.
    """

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.DISABLED}  # type: ignore[misc]

    def __init__(
        self,
        address: str | list[str] | Client,
        environment_id: str,
        num_envs: int,
        *,
        options: Mapping[str, object] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        split: Split = Split.TRAIN,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}, but must be at least 1")
        self.num_envs = num_envs
        self.single_observation_space = UnicodeText()
        self.single_action_space = UnicodeText()
        self.observation_space = Tuple([UnicodeText() for _ in range(num_envs)])
        self.action_space = Tuple([UnicodeText() for _ in range(num_envs)])
        self._owns_client = not isinstance(address, Client)
        self._client = address if isinstance(address, Client) else connect(address)
        self._environment_id = environment_id
        self._options = options or {}
        self._limits = limits
        self._split = split
        self._episodes: list[Episode] = []

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """The episodes being played; none before the first reset."""
        return tuple(self._episodes)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        mask = self._reset_mask(options)
        super().reset(seed=int(seed) if isinstance(seed, int | np.integer) else None)
        chosen = [index for index in range(self.num_envs) if mask[index]]
        seeds = self._level_seeds(seed)
        fresh = self._client.reset_many(
            [
                EpisodeRequest(
                    environment_id=self._environment_id,
                    options=self._options,
                    limits=self._limits,
                    split=self._split,
                    level_seed=seeds[index],
                    noise_seed=None if (level_seed := seeds[index]) is None else noise_seed_of(level_seed),
                )
                for index in chosen
            ]
        )
        if self._episodes:
            self._client.close_many([self._episodes[index] for index in chosen])
            for index, episode in zip(chosen, fresh, strict=True):
                self._episodes[index] = episode
        else:
            self._episodes = fresh
        return self._observations(), self._infos(mask)

    def step(self, actions: Sequence[str]) -> tuple[tuple[str, ...], Floats, Bools, Bools, dict[str, Any]]:
        if not self._episodes:
            raise ResetNeeded("call reset before anything else")
        given = cast("object", actions)
        if isinstance(given, str | bytes) or not isinstance(given, Sequence | np.ndarray):
            raise TypeError(f"actions is {told(given)}, but must be a sequence of {self.num_envs} str")
        if len(actions) != self.num_envs:
            raise ValueError(f"{len(actions)} actions for {self.num_envs} environments")
        for place, action in enumerate(actions):
            check_type(f"actions[{place}]", action, str)
        if over := [index for index, episode in enumerate(self._episodes) if episode.done]:
            raise ResetNeeded(f'episodes {over} are over; reset(options={{"reset_mask": …}}) starts new ones there')
        states = self._client.step_many(
            [
                (episode, actions_of(action, episode.action_separator))
                for episode, action in zip(self._episodes, actions, strict=True)
            ]
        )
        return (
            self._observations(),
            np.array([state.reward for state in states], dtype=np.float64),
            np.array([state.terminated for state in states], dtype=np.bool_),
            np.array([state.truncated for state in states], dtype=np.bool_),
            self._infos(np.ones(self.num_envs, dtype=np.bool_)),
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Frees the episodes, and the client unless it was given."""
        self._client.close_many(self._episodes)
        self._episodes = []
        if self._owns_client:
            self._client.close()

    def _reset_mask(self, options: Mapping[str, Any] | None) -> Bools:
        if options is None or "reset_mask" not in options:
            return np.ones(self.num_envs, dtype=np.bool_)
        mask: Bools = np.asarray(options["reset_mask"])
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise ValueError(f"reset_mask is {mask!r}, but must be a boolean array of shape ({self.num_envs},)")
        if not mask.any():
            raise ValueError("reset_mask chooses no environment; at least one entry must be True")
        if not self._episodes and not mask.all():
            raise ResetNeeded("the first reset must be of all environments")
        return mask

    def _level_seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        """A level seed for each environment; None where the server draws one."""
        if isinstance(seed, int | np.integer):
            return [int(seed) + index for index in range(self.num_envs)]
        if seed is not None:
            if len(seed) != self.num_envs:
                raise ValueError(f"{len(seed)} seeds for {self.num_envs} environments")
            return list(seed)
        if self._np_random is None:
            return [None] * self.num_envs
        return [draw_seed(self._np_random) for _ in range(self.num_envs)]

    def _observations(self) -> tuple[str, ...]:
        return tuple(episode.state.observation for episode in self._episodes)

    def _infos(self, mask: Bools) -> dict[str, Any]:
        """Each key's values as an array of objects, None where `mask` is False, and the mask as `_key`."""
        infos: dict[str, Any] = {}
        for index in np.flatnonzero(mask):
            episode = self._episodes[index]
            for key, value in info_of(episode, episode.state).items():
                infos.setdefault(key, np.full(self.num_envs, None, dtype=object))[index] = value
        return infos | {f"_{key}": mask.copy() for key in infos}
