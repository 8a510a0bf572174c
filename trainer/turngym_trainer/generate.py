"""Sampling answers from a policy, many at a time.

Sampling is by inverse CDF of uniforms that the caller gives, so an answer is a function of (weights, prompt, uniforms)
up to rounding; rows, their order and the padded width of every forward pass depend on prompts and sampled tokens only,
never on time. Knows nothing of environments.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from turngym_trainer.cache import Memory, new_cache
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


@dataclass(slots=True)
class _Reading:
    """Prompts that were read, B rows.

    Attributes:
        logits: behind each prompt, [B, V].
        positions: of its last token, [B].
        filled: int64 [B, T + tokens of an answer]; 1 where a column of the cache holds a token of the prompt.
        width: T, columns read so far.
    """

    logits: Tensor
    positions: Tensor
    filled: Tensor
    width: int
    cache: Cache


@torch.inference_mode()
def generate(
    policy: Policy,
    prompts: Sequence[NDArray[np.int64]],
    uniforms: NDArray[np.float64] | None,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    memory: Memory | None = None,
    names: Sequence[Hashable] | None = None,
) -> list[Response]:
    """Continues each prompt until `</answer>`, end of turn or `max_new_tokens`.

    Args:
        policy: its model is left in evaluation mode.
        prompts: token ids, none empty; a prompt that occurs several times is read once.
        uniforms: float64 [B, max_new_tokens]; None: greedy.
        max_new_tokens: most tokens of an answer, at least 1.
        temperature: divides the logits; above 0.
        memory: what was read before, so that it need not be again; afterwards it holds what has been read now.
        names: of the conversations in `memory`, B different ones.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: expected more than 0; greedy is asked for with uniforms=None")
    if not prompts:
        return []
    if uniforms is not None and uniforms.shape != (len(prompts), max_new_tokens):
        raise ValueError(f"uniforms {uniforms.shape}: expected {(len(prompts), max_new_tokens)}")
    names = range(len(prompts)) if names is None else names
    if len(set(names)) != len(prompts):
        raise ValueError(f"{len(set(names))} different names: expected one for each of {len(prompts)} prompts")
    policy.model.eval()
    device = policy.device
    scale = 1.0 if uniforms is None else temperature
    draws = None if uniforms is None else torch.from_numpy(uniforms).to(device)

    reading = _read(policy, prompts, names, memory, max_new_tokens)
    logits, positions, filled, cache = reading.logits, reading.positions, reading.filled, reading.cache
    padded = bool((filled[:, : reading.width] == 0).any())
    # Rows in the cache's order: the first `decoded` of them go on, the others have left.
    order = np.arange(len(prompts))
    decoded = len(prompts)
    ids = np.full((len(prompts), max_new_tokens), policy.pad_id, np.int64)
    logprobs = np.zeros((len(prompts), max_new_tokens), np.float32)
    lengths = np.zeros(len(prompts), np.int64)
    complete = np.zeros(len(prompts), np.bool_)
    running = np.ones(len(prompts), np.bool_)

    for step in range(max_new_tokens):
        rows = order[:decoded]
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
        if 2 * int(keep.sum()) <= decoded:
            chosen_rows = torch.from_numpy(np.flatnonzero(keep)).to(device)
            cache.batch_select_indices(chosen_rows)
            tokens, positions, filled = tokens[chosen_rows], positions[chosen_rows], filled[chosen_rows]
            order[:decoded] = np.concatenate([rows[keep], rows[~keep]])
            decoded = len(chosen_rows)
        positions = positions + 1
        column = reading.width + step
        filled[:, column] = 1
        mask = filled[:, : column + 1] if padded else None
        logits = policy.logits(tokens[:, None], mask, positions[:, None], cache=cache, last_only=True)[:, -1]

    responses = [
        Response(ids[row, :n].copy(), logprobs[row, :n].copy(), bool(complete[row])) for row, n in enumerate(lengths)
    ]
    if memory is not None:
        _remember(memory, names, prompts, responses, reading, np.argsort(order))
    return responses


def _read(
    policy: Policy,
    prompts: Sequence[NDArray[np.int64]],
    names: Sequence[Hashable],
    memory: Memory | None,
    max_new_tokens: int,
) -> _Reading:
    """Reads the distinct prompts, less what `memory` knows of them, and spreads the result over the rows.

    Columns are: padding, what is known, padding, what is new. So both end in one column for all rows, and their widths
    depend on nothing but the prompts' tokens.
    """
    places: dict[bytes, int] = {}
    spread = [places.setdefault(prompt.tobytes(), len(places)) for prompt in prompts]
    first = [spread.index(place) for place in range(len(places))]
    distinct = [prompts[row] for row in first]
    known = [memory.known(names[row], prompts[row]) if memory else 0 for row in first]
    begin = max(known)
    width = begin + max(len(prompt) - length for prompt, length in zip(distinct, known, strict=True))
    ids = np.full((len(distinct), width - begin), policy.pad_id, np.int64)
    filled = np.zeros((len(distinct), width + max_new_tokens), np.int64)
    for row, (prompt, length) in enumerate(zip(distinct, known, strict=True)):
        new = len(prompt) - length
        ids[row, width - begin - new :] = prompt[length:]
        filled[row, begin - length : begin] = 1
        filled[row, width - new : width] = 1
    room = filled.shape[1]
    cache = memory.recall([names[row] for row in first], known, room) if memory else None
    if cache is None:
        cache = new_cache(policy.model, room)
    device = policy.device
    held = torch.from_numpy(filled).to(device)
    positions = (held[:, :width].cumsum(-1) - 1).clamp(min=0)
    mask = held[:, :width] if bool((filled[:, :width] == 0).any()) else None
    logits = policy.logits(torch.from_numpy(ids).to(device), mask, positions[:, begin:], cache=cache, last_only=True)[
        :, -1
    ]
    positions = positions[:, -1]
    if len(distinct) < len(prompts):
        index = torch.tensor(spread, device=device)
        cache.batch_select_indices(index)
        logits, held, positions = logits[index], held[index], positions[index]
    return _Reading(logits, positions, held, width, cache)


def _may_end(policy: Policy, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where a token may have ended its answer; cheap, so that few answers are looked at closely."""
    return policy.closing[tokens] | np.isin(tokens, list(policy.stop_ids))


def _has_ended(policy: Policy, ids: NDArray[np.int64]) -> bool:
    return int(ids[-1]) in policy.stop_ids or ANSWER_END in policy.decode(ids[-_TAIL_TOKENS:])


def _remember(
    memory: Memory,
    names: Sequence[Hashable],
    prompts: Sequence[NDArray[np.int64]],
    responses: Sequence[Response],
    reading: _Reading,
    rows: NDArray[np.int64],
) -> None:
    """Hands over prompts and answers as they were read. `rows`: where in the cache each is, [B].

    An answer's last token has been sampled, but not read. What was sampled in a row after it is no part of anything.
    """
    ids = [np.concatenate([prompt, response.ids[:-1]]) for prompt, response in zip(prompts, responses, strict=True)]
    filled = reading.filled[:, : reading.width].cpu().numpy()
    columns = [
        np.concatenate([np.flatnonzero(of_prompt), np.arange(reading.width, reading.width + len(response.ids) - 1)])
        for of_prompt, response in zip(filled, responses, strict=True)
    ]
    memory.keep(names, ids, columns, rows.tolist(), reading.cache)
