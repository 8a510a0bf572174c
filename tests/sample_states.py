"""What agents are shown, where nothing but the observation matters."""

from turngym_client import Transition
from turngym_client.types import EndReason


def shown(observation: str) -> Transition:
    """An episode that goes on."""
    return Transition(
        observation=observation,
        reward=0.0,
        action_rewards=(),
        actions_executed=0,
        terminated=False,
        truncated=False,
        success=None,
        end_reason=EndReason.NONE,
        action_valid=True,
        reward_components={},
        metrics={},
        digest=b"",
        legal_actions=None,
        legal_actions_complete=False,
    )
