"""Loads a checkpoint whose files were found harmless, and lets it play one turn as it would on the board.

Imports torch, transformers and, through the agent, the trainer: only `examination` imports this, in a process that may
die of it. What can only be known here: whether transformers has the architecture, whether every weight it wants is
there (what is missing it would draw at random, so that no two scores were alike), and whether the agent can answer.
"""

from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from turngym_client import Transition
from turngym_client.types import EndReason
from turngym_leaderboard.agents import AgentFault, AgentUnavailable, Seat, View
from turngym_leaderboard.agents.checkpoint import CheckpointAgent
from turngym_leaderboard.intake import Accepted, IntakeLimits, Refused
from turngym_leaderboard.protocol import Decoding

_TOLD: Final = 4
"""Names of tensors that a refusal lists."""
_TRIAL_TOKENS: Final = 16
"""That the agent may write: whether it can is known by then."""
_Mismatches = set[tuple[str, tuple[int, ...], tuple[int, ...]]]
"""Name, shape in the files, shape in the model."""
_TRIAL_SEAT: Final = Seat("trial", "Answer Up or Down.", "||", 5, seed=0)
_TRIAL_STATE: Final = Transition(
    observation="#####\n#_OX#\n#P__#\n#####",
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


def try_out(folder: Path, accepted: Accepted, limits: IntakeLimits, device: str) -> None:
    """Loads the checkpoint, and has it answer once. What it answers does not matter, numbers that are none included.

    Args:
        accepted: what `check_folder` found there.
        device: where it would play: cpu, cuda or cuda:N.

    Raises:
        Refused: it cannot be loaded, its weights are not all there, or it cannot answer.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        _check_architecture(folder, accepted, limits)
        _check_weights(folder)
        agent = CheckpointAgent(folder, name="trial", device=device, most_tokens=_TRIAL_TOKENS)
    except Refused:
        raise
    except AgentUnavailable as error:
        raise Refused(str(error)) from error
    except Exception as error:  # transformers raises whatever its classes meet in settings that they did not expect.
        raise Refused(f"transformers cannot load the checkpoint: {_one_line(error)}") from error
    try:
        agent.start([_TRIAL_SEAT], Decoding(greedy=True))
        agent.act([View(seat=0, turn=0, transition=_TRIAL_STATE)])
    except AgentFault:
        return  # It plays badly, which is what scores are for.
    except Exception as error:  # A chat template raises what its author chose; a forward pass whatever shapes lead to.
        raise Refused(
            f"the checkpoint loads, but cannot play a turn: {_one_line(error)}; try it with `leaderboard evaluate`"
        ) from error


def _check_architecture(folder: Path, accepted: Accepted, limits: IntakeLimits) -> None:
    """Refuses what is no causal language model of transformers' own, or would be larger than its files."""
    if accepted.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise Refused(
            f"config.json: model_type {accepted.model_type!r} is no causal language model of the transformers release "
            "that this board runs; code that comes with a model is not run"
        )
    config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    # Without memory for weights, so that a model of any size can be counted.
    with torch.device("meta"):
        model = cast(Any, AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    parameters = cast(int, model.num_parameters())
    if parameters > limits.max_parameters:
        raise Refused(
            f"config.json describes a model of {parameters} parameters; this board takes at most "
            f"{limits.max_parameters}"
        )


def _check_weights(folder: Path) -> None:
    """Refuses a checkpoint in which weights are missing or of other sizes than the model's."""
    _, told = cast(
        "tuple[object, dict[str, object]]",
        AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        ),
    )
    missing = sorted(cast("set[str]", told["missing_keys"]))
    missing += [
        f"{name} of shape {list(shape)}" for name, _, shape in sorted(cast(_Mismatches, told["mismatched_keys"]))
    ]
    if missing:
        more = f" and {len(missing) - _TOLD} more" if len(missing) > _TOLD else ""
        raise Refused(
            f"the files hold no weights for {', '.join(missing[:_TOLD])}{more}, which transformers would draw at "
            "random; save the whole model"
        )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
