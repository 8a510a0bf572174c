"""Log-probabilities and entropies of action tokens under a model, in micro-batches of a fixed plan.

Letters: R rows of a micro-batch, T its padded width, K its action tokens, H hidden size, V vocabulary. Only hidden
states at the positions before action tokens go through the output layer: prompts, observations and padding cost no
logits. Rows are padded on the right, where causal attention never looks back from, so there is no attention mask.
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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through a model together.

    Attributes:
        ids: padded token ids, each row up to the one before its last action token, [R, T].
        positions: index into the flattened [R·T] of the position before each action token, [K].
        targets: the action tokens' ids, [K].
        tokens: where they are in the batch's flat order, [K].
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    tokens: NDArray[np.int64]


def micro_batches(
    batch: Batch, rows: NDArray[np.int64], token_budget: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Splits rows into micro-batches of at most `token_budget` padded tokens (at least one row each).

    Rows of like length go together. The plan is a function of the rows' lengths and indices alone, so a run that is
    resumed makes the same one.
    """
    lengths = np.array([int(np.flatnonzero(batch.rows[int(row)].is_action)[-1]) for row in rows], dtype=np.int64)
    order = np.lexsort((rows, lengths))
    start = 0
    for stop in range(1, len(order) + 1):
        full = stop == len(order) or (stop + 1 - start) * int(lengths[order[stop]]) > token_budget
        if full:
            chosen = order[start:stop]
            yield _micro_batch(batch, rows[chosen], lengths[chosen], device)
            start = stop


def _micro_batch(batch: Batch, rows: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device) -> MicroBatch:
    width = int(lengths.max())
    ids = np.zeros((len(rows), width), dtype=np.int64)
    positions: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    for place, index in enumerate(rows):
        row = batch.rows[int(index)]
        ids[place, : lengths[place]] = row.ids[: lengths[place]]
        actions = np.flatnonzero(row.is_action)
        positions.append(place * width + actions - 1)
        targets.append(row.ids[actions])
        tokens.append(np.arange(int(batch.row_offsets[index]), int(batch.row_offsets[index + 1])))
    return MicroBatch(
        ids=torch.from_numpy(ids).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        tokens=np.concatenate(tokens),
    )


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
        self._head_is_last = self._probe()

    @torch.inference_mode()
    def _probe(self) -> bool:
        """Whether logits are the head's output as it is: some models scale or bound them afterwards."""
        ids = torch.arange(4, device=self.model.device)[None]
        logits = self.model(input_ids=ids, use_cache=False).logits
        return torch.allclose(logits, self._head(hidden_states(self._trunk, ids))[None], rtol=1e-4, atol=1e-5)

    def hidden(self, part: MicroBatch) -> Tensor:
        """Hidden states that the output layer reads, at the positions before the action tokens, [K, H]."""
        return hidden_states(self._trunk, part.ids)[part.positions]

    def score(self, part: MicroBatch, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probability of each action token and entropy of the distribution it came from, float32 [K] each.

        Args:
            hidden: what `hidden(part)` returned, where it has been computed already.
        """
        if self._head_is_last:
            logits = self._head(self.hidden(part) if hidden is None else hidden)
        else:
            output = self.model(input_ids=part.ids, use_cache=False)
            logits = output.logits.flatten(0, 1)[part.positions]
        distribution = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, part.targets[:, None]).squeeze(-1), entropy

    @torch.no_grad()
    def logprobs(self, batch: Batch, token_budget: int) -> NDArray[np.float32]:
        """Log-probability of every action token of a batch, without gradients, [N]."""
        scored = np.zeros(len(batch.logprobs), dtype=np.float32)
        for part in micro_batches(batch, np.arange(len(batch.rows)), token_budget, self.model.device):
            scored[part.tokens] = self.score(part)[0].cpu().numpy()
        return scored


def hidden_states(trunk: nn.Module, ids: Tensor) -> Tensor:
    """Last hidden states of every position, flattened, [R·T, H]."""
    return cast(Tensor, trunk(input_ids=ids, use_cache=False).last_hidden_state).flatten(0, 1)
