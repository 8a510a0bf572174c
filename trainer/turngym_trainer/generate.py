"""Sampling answers from a policy, many at a time.

Sampling is by inverse CDF of uniforms that the caller gives, so an answer is a function of (weights, prompt, uniforms)
up to rounding; rows, their order and the padded width of every forward pass depend on prompts and sampled tokens only,
never on time. Knows nothing of environments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from turngym_trainer.policy import ANSWER_END, Policy

_TAIL_TOKENS: Final = 16
"""Tokens decoded to look for `</answer>` where it is several tokens: more than its number of characters."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a policy wrote for one prompt.

    Attributes:
        ids: int64 [n]; the tokens that ended it included.
        logprobs: float32 [n]; under the distribution they were sampled from (temperature applied; greedy: T = 1).
        complete: it ended with `</answer>` or end of turn; False: cut off.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    complete: bool


class Uniforms(Protocol):
    """Uniforms in [0, 1) of one answer's tokens, float64 [count]."""

    def __call__(self, group: int, member: int, turn: int, count: int, /) -> NDArray[np.float64]: ...


def inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform.

    Args:
        logprobs: float32 [B, V]; each row sums to 1 in probability, up to rounding that is divided out.
        uniforms: float64 [B] in [0, 1).

    Returns:
        int64 [B]; never a token of probability 0.
    """
    assert logprobs.dim() == 2
    assert uniforms.shape == logprobs.shape[:1]
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    wanted = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)


@torch.inference_mode()
def generate(
    policy: Policy,
    prompts: Sequence[NDArray[np.int64]],
    uniforms: NDArray[np.float64] | None,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
) -> list[Response]:
    """Continues each prompt until `</answer>`, end of turn or `max_new_tokens`.

    Args:
        policy: its model is left in evaluation mode.
        prompts: token ids, none empty; a prompt that occurs several times is read once.
        uniforms: float64 [B, max_new_tokens]; None: greedy.
        max_new_tokens: most tokens of an answer, at least 1.
        temperature: divides the logits; above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: expected more than 0; greedy is asked for with uniforms=None")
    if not prompts:
        return []
    if uniforms is not None and uniforms.shape != (len(prompts), max_new_tokens):
        raise ValueError(f"uniforms {uniforms.shape}: expected {(len(prompts), max_new_tokens)}")
    policy.model.eval()
    device = policy.device
    scale = 1.0 if uniforms is None else temperature
    draws = None if uniforms is None else torch.from_numpy(uniforms).to(device)

    logits, mask, positions, cache = _read(policy, prompts)
    rows = np.arange(len(prompts))
    ids = np.full((len(prompts), max_new_tokens), policy.pad_id, np.int64)
    logprobs = np.zeros((len(prompts), max_new_tokens), np.float32)
    lengths = np.zeros(len(prompts), np.int64)
    complete = np.zeros(len(prompts), np.bool_)
    running = np.ones(len(prompts), np.bool_)

    for step in range(max_new_tokens):
        distribution = torch.log_softmax(logits / scale, -1)
        if draws is None:
            tokens = distribution.argmax(-1)
        else:
            tokens = inverse_cdf(distribution, draws[torch.from_numpy(rows).to(device), step])
        chosen = tokens.cpu().numpy()
        chosen_logprobs = distribution.gather(-1, tokens[:, None]).squeeze(-1).cpu().numpy()
        live = running[rows]
        ids[rows[live], step] = chosen[live]
        logprobs[rows[live], step] = chosen_logprobs[live]
        lengths[rows[live]] = step + 1
        for row in rows[live & _may_end(policy, chosen)]:
            if _has_ended(policy, ids[row, : step + 1]):
                complete[row], running[row] = True, False
        if not running.any() or step + 1 == max_new_tokens:
            break
        keep = running[rows]
        if 2 * int(keep.sum()) <= len(rows):
            chosen_rows = torch.from_numpy(np.flatnonzero(keep)).to(device)
            cache.batch_select_indices(chosen_rows)
            tokens, positions = tokens[chosen_rows], positions[chosen_rows]
            mask = None if mask is None else mask[chosen_rows]
            rows = rows[keep]
        positions = positions + 1
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], -1)
        logits = policy.logits(tokens[:, None], mask, positions[:, None], cache=cache, last_only=True)[:, -1]

    return [
        Response(ids[row, :n].copy(), logprobs[row, :n].copy(), bool(complete[row])) for row, n in enumerate(lengths)
    ]


def _read(policy: Policy, prompts: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor | None, Tensor, DynamicCache]:
    """Reads the distinct prompts, padded on the left, and spreads the result over the rows.

    Returns:
        logits [B, V], mask [B, T] or None, last positions [B], cache.
    """
    places: dict[bytes, int] = {}
    spread = [places.setdefault(prompt.tobytes(), len(places)) for prompt in prompts]
    distinct = [np.frombuffer(key, np.int64) for key in places]
    width = max(len(prompt) for prompt in distinct)
    device = policy.device
    ids = np.full((len(distinct), width), policy.pad_id, np.int64)
    filled = np.zeros((len(distinct), width), np.int64)
    for row, prompt in enumerate(distinct):
        ids[row, width - len(prompt) :] = prompt
        filled[row, width - len(prompt) :] = 1
    mask = torch.from_numpy(filled).to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = bool((filled == 0).any())
    cache = DynamicCache(config=policy.model.config)
    logits = policy.logits(
        torch.from_numpy(ids).to(device), mask if padded else None, positions, cache=cache, last_only=True
    )[:, -1]
    if len(distinct) < len(prompts):
        index = torch.tensor(spread, device=device)
        cache.batch_select_indices(index)
        logits, mask, positions = logits[index], mask[index], positions[index]
    return logits, mask if padded else None, positions[:, -1], cache


def _may_end(policy: Policy, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where a token may have ended its answer; cheap, so that few answers are looked at closely."""
    return policy.closing[tokens] | np.isin(tokens, list(policy.stop_ids))


def _has_ended(policy: Policy, ids: NDArray[np.int64]) -> bool:
    return int(ids[-1]) in policy.stop_ids or ANSWER_END in policy.decode(ids[-_TAIL_TOKENS:])
