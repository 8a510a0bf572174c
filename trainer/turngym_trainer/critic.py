"""The critic: a value of each action token, read at the position before it.

The head starts at zero, so the first advantages are plain returns. Inside, everything is divided by the declared range
of returns, so that rates and clips mean the same in every environment; outside, values are in units
of rewards as they are learnt.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turngym_trainer.logprobs import MicroBatch, hidden_states


class Critic(nn.Module):
    """A value head over a trunk.

    Args:
        model: the starting policy. With an own trunk its weights are copied, else its trunk is read and trained along.
        own_trunk: see above.
        reward_range: largest absolute return of an episode, as it is learnt.
    """

    def __init__(self, model: PreTrainedModel, *, own_trunk: bool, reward_range: float) -> None:
        super().__init__()
        self.own_trunk = own_trunk
        self.reward_range = reward_range
        self.head = nn.Linear(int(model.config.hidden_size), 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        trunk = model.base_model
        if own_trunk:
            self.trunk = copy.deepcopy(trunk)
        else:
            # In a tuple, so that the policy's weights are not taken for the critic's.
            self._policy_trunk = (trunk,)

    def trunk_parameters(self) -> list[nn.Parameter]:
        """Weights of a trunk of its own; a shared one's are the policy's."""
        return list(self.trunk.parameters()) if self.own_trunk else []

    def forward(self, part: MicroBatch) -> Tensor:
        """Values of a micro-batch's action tokens divided by the reward range, float32 [K]."""
        return self.scaled_values(self.hidden(part)).clone()  # FSDP warns of views.

    def hidden(self, part: MicroBatch) -> Tensor:
        """Hidden states at the positions before the action tokens, [K, H]."""
        trunk = self.trunk if self.own_trunk else self._policy_trunk[0]
        return hidden_states(trunk, part)

    def scaled_values(self, hidden: Tensor) -> Tensor:
        """Values divided by the reward range, float32 [K]."""
        return cast(Tensor, self.head(hidden.float())).squeeze(-1)
