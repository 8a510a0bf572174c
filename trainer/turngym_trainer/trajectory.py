"""What a rollout hands to the update: token records and the episodes they belong to.

Every token is labelled at the moment it is sampled or shown; nothing is decoded and encoded again. Knows nothing of
policies, advantages or the network.

An episode is one or several rows. A row is one sequence that the model reads in one forward pass: with full history
the whole episode is one row; with last-turn context each turn is a row of its own. The action tokens of an episode,
m = 1 … M, are numbered over its rows in order.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence as the model saw it. All arrays have length T.

    Attributes:
        ids: token ids.
        is_action: True where the policy sampled the token; False for prompts, observations and prefilled tokens.
        turn: turn of the episode (from 0) that an action token belongs to; −1 elsewhere.
        logprobs: log-probability under which an action token was sampled; 0 elsewhere.
    """

    ids: NDArray[np.int64]
    is_action: NDArray[np.bool_]
    turn: NDArray[np.int64]
    logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.is_action), len(self.turn), len(self.logprobs)}
        if len(lengths) != 1:
            raise ValueError(f"a row's arrays differ in length: {sorted(lengths)}")
        if bool(((self.turn >= 0) != self.is_action).any()):
            raise ValueError("a row's turn must be set exactly where its token is an action")
        if self.is_action[0]:
            raise ValueError("a row begins with an action token, which nothing predicts")


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of an episode, as text and as outcome.

    Attributes:
        prompt: what the policy was shown since its last turn (the observation).
        response: what it wrote, prefilled text included.
        reasoning: the part between `<think>` and `</think>`.
        actions: what was sent to the environment.
        reward: the environment's reward.
        valid_format: the answer could be parsed and was not cut off.
        valid_action: every action that was run was legal.
        actions_executed: actions that were run.
        reasoning_tokens: of the policy's tokenizer.
        observation: what the environment replied.
        process: value of `reward.process`, not weighted; None: there is no such function.
    """

    prompt: str
    response: str
    reasoning: str
    actions: tuple[str, ...]
    reward: float
    valid_format: bool
    valid_action: bool
    actions_executed: int
    reasoning_tokens: int = 0
    observation: str = ""
    process: float | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode.

    Attributes:
        environment: id, or name in the run's mixture, that it was played in.
        group: index of the level seed within the iteration; members of a group share the level.
        member: index within the group.
        success: the environment's verdict; None: unknown.
        truncated: a limit ended it: the environment's, or the model's.
        outgrown: the model's did: there was no room left for another answer. Such an episode may have no turn at all.
        digest: the server's digest chain over the whole episode, hexadecimal.
        rows: what the model saw, in order.
        turns: the same as text.
        last_prompt: token ids that the policy would have read next, where a limit ended the episode and its model can
            read as many; else None.
        old_logprobs: log-probabilities of the action tokens, [M], under the policy that played it, as the trainer
            computes them; None: not computed.
    """

    environment: str
    group: int
    member: int
    level_seed: int
    noise_seed: int
    world_id: str
    success: bool | None
    terminated: bool
    truncated: bool
    digest: str
    rows: tuple[Row, ...]
    turns: tuple[TurnRecord, ...] = field(default_factory=tuple[TurnRecord, ...])
    last_prompt: NDArray[np.int64] | None = None
    outgrown: bool = False
    old_logprobs: NDArray[np.float32] | None = None

    @property
    def environment_return(self) -> float:
        """Sum of the environment's rewards, shaping left out."""
        return sum(turn.reward for turn in self.turns)

    @property
    def action_tokens(self) -> int:
        """M, the number of sampled tokens over all rows."""
        return sum(int(row.is_action.sum()) for row in self.rows)
