"""Action tokens of many episodes as one flat numbering, and its padded form.

Letters: B episodes, R rows, T tokens of a row, N action tokens of all episodes, M most of one episode. The flat order
is episodes in order, their rows in order, tokens in order, so a row's and an episode's tokens are slices of it.
Everything that is known of an action token is an array [N]. Knows nothing of models or rewards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turngym_trainer.trajectory import Row, Trajectory


@dataclass(frozen=True, slots=True)
class Batch:
    """B episodes laid out. Made by `lay_out`.

    Attributes:
        rows: the rows of all episodes, R of them.
        row_episodes: episode of each row, [R].
        row_offsets: row r's action tokens are row_offsets[r]:row_offsets[r + 1] of the flat order, [R + 1].
        episode_offsets: the same for episodes, [B + 1].
        logprobs: log-probability under which each token was sampled, [N].
        turns: turn of its episode that each token belongs to, [N].
        turn_ends: the token is the last action token of its turn, [N].
    """

    rows: tuple[Row, ...]
    row_episodes: NDArray[np.int64]
    row_offsets: NDArray[np.int64]
    episode_offsets: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    turns: NDArray[np.int64]
    turn_ends: NDArray[np.bool_]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Action tokens of each episode, [B]."""
        return np.diff(self.episode_offsets)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Where the padded form holds a token, [B, M]."""
        return np.arange(int(self.lengths.max())) < self.lengths[:, None]

    def padded(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        """A value of each token, [N], as [B, M] with 0 in the padding."""
        mask = self.mask
        padded = np.zeros(mask.shape, dtype=np.float64)
        padded[mask] = flat
        return padded

    def padded_turn_ends(self) -> NDArray[np.bool_]:
        """`turn_ends` as [B, M], False in the padding."""
        mask = self.mask
        padded = np.zeros(mask.shape, dtype=np.bool_)
        padded[mask] = self.turn_ends
        return padded

    def rows_of(self, episodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ascending indices of the rows of some episodes."""
        return np.flatnonzero(np.isin(self.row_episodes, episodes))

    def tokens_of(self, episodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which action tokens belong to some episodes, [N]."""
        chosen = np.isin(np.arange(len(self.lengths)), episodes)
        return np.repeat(chosen, self.lengths)

    def gather(self, by_row: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        """Values laid on the tokens of each row, R arrays [T], as the values of the action tokens, [N].

        Raises:
            ValueError: a value other than 0 lies on a token that is no action: it would be lost without a word.
        """
        for index, (row, values) in enumerate(zip(self.rows, by_row, strict=True)):
            if misplaced := np.flatnonzero((values != 0.0) & ~row.is_action).tolist():
                raise ValueError(
                    f"row {index} of episode {self.row_episodes[index]} has {values[misplaced[0]]} on token "
                    f"{misplaced[0]}, which the policy did not choose; lay it on an action token"
                )
        return np.concatenate([values[row.is_action] for row, values in zip(self.rows, by_row, strict=True)])


def lay_out(trajectories: Sequence[Trajectory]) -> Batch:
    """Numbers the action tokens of episodes.

    Raises:
        ValueError: there are no episodes, or an episode's turns are not 0, 1, 2 … each with an action token.
    """
    if not trajectories:
        raise ValueError("no episodes to lay out")
    rows = tuple(row for trajectory in trajectories for row in trajectory.rows)
    row_lengths = np.array([int(row.is_action.sum()) for row in rows], dtype=np.int64)
    row_episodes = np.repeat(np.arange(len(trajectories)), [len(trajectory.rows) for trajectory in trajectories])
    episode_lengths = np.bincount(row_episodes, weights=row_lengths, minlength=len(trajectories)).astype(np.int64)
    turns = np.concatenate([row.turn[row.is_action] for row in rows])
    episodes = np.repeat(np.arange(len(trajectories)), episode_lengths)
    turn_ends = np.ones(len(turns), dtype=np.bool_)
    turn_ends[:-1] = (turns[1:] != turns[:-1]) | (episodes[1:] != episodes[:-1])
    for index, trajectory in enumerate(trajectories):
        found = turns[turn_ends & (episodes == index)].tolist()
        if found != list(range(len(trajectory.turns))):
            raise ValueError(
                f"episode {index} ({trajectory.environment}, group {trajectory.group}, member {trajectory.member}) "
                f"has {len(trajectory.turns)} turns, but action tokens of turns {found}: a reward would have no token"
            )
    return Batch(
        rows=rows,
        row_episodes=row_episodes,
        row_offsets=np.concatenate([[0], np.cumsum(row_lengths)]),
        episode_offsets=np.concatenate([[0], np.cumsum(episode_lengths)]),
        logprobs=np.concatenate([row.logprobs[row.is_action] for row in rows]),
        turns=turns,
        turn_ends=turn_ends,
    )


def lay_out_prompts(prompts: Sequence[NDArray[np.int64]]) -> Batch:
    """Prompts as episodes of one row, each with one action token behind it that nothing reads.

    The value of that token is the prompt's: values are read at the position before.
    """
    rows = tuple(
        Row(
            ids=np.append(prompt, 0),
            is_action=np.arange(len(prompt) + 1) == len(prompt),
            turn=np.append(np.full(len(prompt), -1), 0),
            logprobs=np.zeros(len(prompt) + 1, np.float32),
        )
        for prompt in prompts
    )
    offsets = np.arange(len(rows) + 1)
    return Batch(
        rows=rows,
        row_episodes=offsets[:-1],
        row_offsets=offsets,
        episode_offsets=offsets,
        logprobs=np.zeros(len(rows), np.float32),
        turns=np.zeros(len(rows), np.int64),
        turn_ends=np.ones(len(rows), np.bool_),
    )
