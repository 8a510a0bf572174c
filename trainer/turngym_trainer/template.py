"""How much of what a policy reasons depends on what it was shown: RAGEN-2's sign of template collapse.

Each of S first turns' reasoning z_i is scored under its own prompt and under those of N prompts of the iteration:
ℓ_ij = Σ_t log p(z_i,t | x_j, z_i,<t). A policy that writes the same whatever it reads makes all ℓ_ij of a row alike.
Source: RAGEN-2 (arXiv 2604.06268). Only measures; no alarm is given for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from turngym_trainer.batch import lay_out
from turngym_trainer.logprobs import Scorer
from turngym_trainer.policy import Policy
from turngym_trainer.trajectory import Row, Trajectory, TurnRecord

LEAST_TOKENS: Final = 3
"""Where reasoning is shorter in the mean, it says nothing, and whole turns are scored in its place."""
_THOUGHT_END: Final = "</think>"
_TURN: Final = TurnRecord("", "", "", (), 0.0, valid_format=True, valid_action=True, actions_executed=0)


@dataclass(frozen=True, slots=True)
class TemplateSigns:
    """What S samples say of N prompts.

    Attributes:
        information: mean of ℓ_own − log(1/N Σ_j e^ℓ_j), in nats: at most log N; 0: reasoning tells nothing of prompts.
        retrieval: share of samples whose own prompt makes them the most likely; chance is 1/N.
        standing: mean of (ℓ_own − log(1/N Σ_j e^ℓ_j)) / (std_j ℓ_j + 1e-3).
        prompts: N. samples: S.
        whole_turns: 1 where whole turns were scored, since reasoning is too short; else 0.
    """

    information: float
    retrieval: float
    standing: float
    prompts: int
    samples: int
    whole_turns: int


def template_signs(
    policy: Policy, scorer: Scorer, trajectories: Sequence[Trajectory], *, prompts: int, samples: int, token_budget: int
) -> TemplateSigns | None:
    """Scores the reasoning of first turns under the prompts of others.

    Args:
        trajectories: of one iteration; the first `prompts` distinct first prompts, in order of groups, are compared.
        samples: most first turns of each prompt.
        token_budget: padded tokens of one forward pass.

    Returns:
        None: fewer than two prompts differ, or nothing was written.
    """
    by_prompt: dict[bytes, list[Row]] = {}
    for trajectory in sorted(trajectories, key=lambda each: (each.group, each.member)):
        row = trajectory.rows[0]
        first = int(row.is_action.argmax())
        written = by_prompt.setdefault(row.ids[:first].tobytes(), [])
        if len(written) < samples:
            written.append(row)
    compared = list(by_prompt.items())[:prompts]
    own = np.repeat(np.arange(len(compared)), [len(rows) for _, rows in compared])
    turns = [row.ids[row.turn == 0] for _, rows in compared for row in rows]
    thoughts = [ids[: thought_tokens(policy, ids)] for ids in turns]
    whole = float(np.mean([len(ids) for ids in thoughts])) < LEAST_TOKENS if thoughts else True
    texts = turns if whole else thoughts
    scored = np.array([len(ids) > 0 for ids in texts], dtype=np.bool_)
    if len(compared) < 2 or not bool(scored.any()):
        return None
    own, texts = own[scored], [ids for ids, has in zip(texts, scored, strict=True) if has]
    asked = [np.frombuffer(prompt, np.int64) for prompt, _ in compared]
    likelihoods = _score(scorer, asked, texts, token_budget)
    return signs_of(likelihoods, own, whole_turns=whole)


def signs_of(likelihoods: NDArray[np.float64], own: NDArray[np.int64], *, whole_turns: bool) -> TemplateSigns:
    """The signs, from ℓ [S, N] and each sample's own prompt [S]."""
    S, N = likelihoods.shape
    assert own.shape == (S,), (own.shape, S)
    matched = likelihoods[np.arange(S), own]
    highest = likelihoods.max(axis=1)
    marginal = highest + np.log(np.exp(likelihoods - highest[:, None]).mean(axis=1))
    gained = matched - marginal
    return TemplateSigns(
        information=float(gained.mean()),
        retrieval=float((likelihoods.argmax(axis=1) == own).mean()),
        standing=float((gained / (likelihoods.std(axis=1) + 1e-3)).mean()),
        prompts=N,
        samples=S,
        whole_turns=int(whole_turns),
    )


def thought_tokens(policy: Policy, ids: NDArray[np.int64]) -> int:
    """How many tokens of an answer come before the one that completes `</think>`; none where there is no such."""
    if _THOUGHT_END not in policy.decode(ids):
        return 0
    low, high = 0, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _THOUGHT_END in policy.decode(ids[:middle]) else (middle, high)
    return high - 1


def _score(
    scorer: Scorer, prompts: Sequence[NDArray[np.int64]], texts: Sequence[NDArray[np.int64]], token_budget: int
) -> NDArray[np.float64]:
    """ℓ of every text under every prompt, [S, N]."""
    rows = [_row(prompt, text) for text in texts for prompt in prompts]
    batch = lay_out(
        [Trajectory("", 0, 0, 0, 0, "", None, False, False, "", rows=(row,), turns=(_TURN,)) for row in rows]
    )
    logprobs = scorer.logprobs(batch, token_budget).astype(np.float64)
    sums = np.add.reduceat(logprobs, batch.row_offsets[:-1])
    return sums.reshape(len(texts), len(prompts))


def _row(prompt: NDArray[np.int64], text: NDArray[np.int64]) -> Row:
    turn = np.concatenate([np.full(len(prompt), -1, np.int64), np.zeros(len(text), np.int64)])
    return Row(
        ids=np.concatenate([prompt, text]),
        is_action=turn >= 0,
        turn=turn,
        logprobs=np.zeros(len(turn), np.float32),
    )
