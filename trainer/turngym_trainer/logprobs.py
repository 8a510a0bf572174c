"""Log-probabilities and entropies of action tokens under a model, in micro-batches of a fixed plan.

Letters: R sequences of a micro-batch, T its padded width, K its action tokens, H hidden size, V vocabulary. Only hidden
states at the positions before action tokens go through the output layer: prompts, observations and padding cost no
logits. Answers to the same prompt (members of a group in the same state) are laid behind one copy of it, where they
cannot see each other, so a prompt is read once for all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from turngym_trainer.batch import Batch

GROWTH = 2
"""A sequence with several answers is at most so many times as long as its prompt with the longest of them."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through a model together, padded on the right, where causal attention never looks.

    Attributes:
        ids: token ids, [R, T].
        places: each token's position in its own row, [R, T]; None: 0, 1, 2 … as always.
        mask: which token sees which, bool [R, 1, T, T]; None: all before it, as always.
        positions: index into the flattened [R·T] of the position before each action token, [K].
        targets: the action tokens' ids, [K].
        tokens: where they are in the batch's flat order, [K].
    """

    ids: Tensor
    places: Tensor | None
    mask: Tensor | None
    positions: Tensor
    targets: Tensor
    tokens: NDArray[np.int64]


@dataclass(slots=True)
class _Sequence:
    """Rows that begin alike. `prompt` is the length of what they share, `length` that of all that is read."""

    rows: list[int]
    prompt: int
    length: int


class MicroBatches:
    """A plan of micro-batches, each made when it is its turn. Made by `micro_batches`."""

    def __init__(self, batch: Batch, plan: list[list[_Sequence]], device: torch.device) -> None:
        self._batch = batch
        self._plan = plan
        self._device = device

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (_micro_batch(self._batch, sequences, self._device) for sequences in self._plan)


def micro_batches(
    batch: Batch, rows: NDArray[np.int64], token_budget: int, device: torch.device, *, share_prompts: bool = False
) -> MicroBatches:
    """Splits rows into micro-batches of at most `token_budget` padded tokens (at least one sequence each).

    Sequences of like length go together. The plan is a function of the rows' tokens and indices alone, so a run that is
    resumed makes the same one.
    """
    sequences = _sequences(batch, rows, share_prompts=share_prompts)
    sequences.sort(key=lambda sequence: (sequence.length, sequence.rows[0]))
    plan: list[list[_Sequence]] = []
    start = 0
    for stop in range(1, len(sequences) + 1):
        if stop == len(sequences) or (stop + 1 - start) * sequences[stop].length > token_budget:
            plan.append(sequences[start:stop])
            start = stop
    return MicroBatches(batch, plan, device)


def _sequences(batch: Batch, rows: NDArray[np.int64], *, share_prompts: bool) -> list[_Sequence]:
    """Joins rows with the same tokens before their first action, as far as `GROWTH` lets them."""
    alike: dict[bytes, list[int]] = {}
    for row in rows:
        first = int(batch.rows[int(row)].is_action.argmax())
        key = batch.rows[int(row)].ids[:first].tobytes() if share_prompts else int(row).to_bytes(8, "big")
        alike.setdefault(key, []).append(int(row))
    sequences: list[_Sequence] = []
    for together in alike.values():
        prompt = int(batch.rows[together[0]].is_action.argmax())
        answers = [_read_tokens(batch, row) - prompt for row in together]
        most = GROWTH * (prompt + max(answers))
        sequences.append(_Sequence([together[0]], prompt, prompt + answers[0]))
        for row, answer in zip(together[1:], answers[1:], strict=True):
            if sequences[-1].length + answer > most:
                sequences.append(_Sequence([row], prompt, prompt + answer))
            else:
                sequences[-1].rows.append(row)
                sequences[-1].length += answer
    return sequences


def _read_tokens(batch: Batch, row: int) -> int:
    """Tokens of a row that a model must read: all before its last action token."""
    return int(np.flatnonzero(batch.rows[row].is_action)[-1])


def _micro_batch(batch: Batch, sequences: list[_Sequence], device: torch.device) -> MicroBatch:
    width = max(sequence.length for sequence in sequences)
    ids = np.zeros((len(sequences), width), dtype=np.int64)
    places = np.broadcast_to(np.arange(width), ids.shape).copy()
    answers = np.zeros_like(ids)
    positions: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    for index, sequence in enumerate(sequences):
        prompt = end = sequence.prompt
        ids[index, :prompt] = batch.rows[sequence.rows[0]].ids[:prompt]
        for number, row_index in enumerate(sequence.rows):
            row, read = batch.rows[row_index], _read_tokens(batch, row_index)
            begin, end = end, end + read - prompt
            ids[index, begin:end] = row.ids[prompt:read]
            places[index, begin:end] = np.arange(prompt, read)
            answers[index, begin:end] = number + 1
            before = np.flatnonzero(row.is_action) - 1
            positions.append(index * width + np.where(before < prompt, before, before + begin - prompt))
            targets.append(row.ids[row.is_action])
            tokens.append(np.arange(int(batch.row_offsets[row_index]), int(batch.row_offsets[row_index + 1])))
    shared = any(len(sequence.rows) > 1 for sequence in sequences)
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        places=torch.from_numpy(places).to(device) if shared else None,
        mask=torch.from_numpy(_visible(answers)).to(device) if shared else None,
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        tokens=np.concatenate(tokens),
    )


def _visible(answers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which token sees which, [R, 1, T, T]: itself and what is before it in the prompt (0) and in its own answer."""
    width = answers.shape[1]
    earlier = np.tri(width, dtype=np.bool_)
    own = answers[:, :, None] == answers[:, None, :]
    return (earlier & (own | (answers == 0)[:, None, :]))[:, None]


class Scorer:
    """Reads a causal language model's distribution over action tokens.

    Args:
        model: its gradients flow through what is returned.
        temperature: what its logits are divided by; the sampler's.
    """

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self._trunk = model.base_model
        self._head = cast(nn.Module, model.get_output_embeddings())
        self._head_is_last = self._probe_head()
        self.shares_prompts = self._probe_sharing()

    @torch.inference_mode()
    def _probe_head(self) -> bool:
        """Whether logits are the head's output as it is: some models scale or bound them afterwards."""
        ids = torch.arange(4, device=self.model.device)[None]
        logits = self.model(input_ids=ids, use_cache=False).logits
        return torch.allclose(logits, self._head(_run(self._trunk, ids, None, None))[None], rtol=1e-4, atol=1e-5)

    @torch.inference_mode()
    def _probe_sharing(self) -> bool:
        """Whether the model keeps to a mask and positions of our own, so that answers can share a prompt.

        The prompt 0 1 with the answers 2 3 and 4 5, in one sequence and in two.
        """
        device = self.model.device
        answers = np.array([[0, 0, 1, 1, 2, 2]])
        places = torch.tensor([[0, 1, 2, 3, 2, 3]], device=device)
        mask = torch.from_numpy(_visible(answers)).to(device)
        together = _run(self._trunk, torch.arange(6, device=device)[None], places, mask)
        apart = _run(self._trunk, torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]], device=device), None, None)
        return torch.allclose(together, apart[[0, 1, 2, 3, 6, 7]], rtol=1e-4, atol=1e-5)

    def micro_batches(self, batch: Batch, rows: NDArray[np.int64], token_budget: int) -> MicroBatches:
        """Micro-batches on the model's device, with shared prompts where the model can."""
        return micro_batches(batch, rows, token_budget, self.model.device, share_prompts=self.shares_prompts)

    def hidden(self, part: MicroBatch) -> Tensor:
        """Hidden states that the output layer reads, at the positions before the action tokens, [K, H]."""
        return hidden_states(self._trunk, part)

    def score(self, part: MicroBatch, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability of each action token and entropy of the distribution it came from, float32 [K] each.

        Args:
            hidden: what `hidden(part)` returned, where it has been computed already.
        """
        if self._head_is_last:
            logits = self._head(self.hidden(part) if hidden is None else hidden)
        else:
            output = self.model(input_ids=part.ids, position_ids=part.places, attention_mask=part.mask, use_cache=False)
            logits = output.logits.flatten(0, 1)[part.positions]
        distribution = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, part.targets[:, None]).squeeze(-1), entropy

    @torch.no_grad()
    def logprobs(self, batch: Batch, token_budget: int, rows: NDArray[np.int64] | None = None) -> NDArray[np.float32]:
        """Log-probability of every action token of a batch, without gradients, [N]; 0 outside `rows`, if given."""
        scored = np.zeros(len(batch.logprobs), dtype=np.float32)
        for part in self.micro_batches(batch, np.arange(len(batch.rows)) if rows is None else rows, token_budget):
            scored[part.tokens] = self.score(part)[0].cpu().numpy()
        return scored


def hidden_states(trunk: nn.Module, part: MicroBatch) -> Tensor:
    """Last hidden states at the positions before the action tokens, [K, H]."""
    return _run(trunk, part.ids, part.places, part.mask)[part.positions]


def _run(trunk: nn.Module, ids: Tensor, places: Tensor | None, mask: Tensor | None) -> Tensor:
    """Last hidden states of every position, flattened, [R·T, H]."""
    output = trunk(input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False)
    return cast(Tensor, output.last_hidden_state).flatten(0, 1)
