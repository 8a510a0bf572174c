"""Policies: a causal language model with its tokenizer, chat format and stopping rule.

Knows nothing of environments or training. A policy comes from `load_policy`: "tiny" (built in code), "smollm2" (see
`smollm2`), or a folder with a Hugging Face causal model in safetensors. What `Policy.save` writes is such a folder.
"""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from turngym_trainer import smollm2, tiny_tokenizer

ANSWER_END: Final = "</answer>"

INIT_STD: Final = 0.02

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PolicyError(ValueError):
    """A policy that cannot be loaded; says what was expected."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama that is built in code."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    positions: int


TINY: Final = Shape(hidden=128, layers=4, heads=4, feed_forward=256, positions=2048)
"""About 0.76 million parameters."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The text that a chat template puts around one system message and what user and assistant say.

    A conversation reads: opening ‖ user ‖ reply ‖ assistant ‖ following ‖ user ‖ reply ‖ assistant …, so that a longer
    conversation only ever appends to a shorter one.
    """

    opening: str
    reply: str
    following: str


class Policy:
    """A model that answers conversations.

    Attributes:
        model: the causal language model.
        tokenizer: its tokenizer; `pad_id` pads what it encodes.
        stop_ids: tokens that end an answer by themselves.
        closing: bool [V]; tokens after which an answer may have ended with `</answer>` in several tokens.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = model
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        # Ten times as quick as through transformers, which resets these two at each call.
        self._encoder = tokenizer.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.stop_ids = _stop_ids(model, tokenizer, vocabulary)
        self.eos_ids = self.stop_ids - {vocabulary[ANSWER_END]} if ANSWER_END in vocabulary else self.stop_ids
        self.pad_id = int(cast("int | None", tokenizer.pad_token_id) or min(self.eos_ids, default=0))
        self.closing = np.zeros(int(model.config.vocab_size), np.bool_)
        if ANSWER_END not in vocabulary:
            self.closing[[index for piece, index in vocabulary.items() if ">" in piece]] = True
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model can read, in tokens."""
        return int(self.model.config.max_position_embeddings)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Token ids of text in which special tokens are read as such."""
        return np.asarray(self._encoder.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: NDArray[np.int64]) -> str:
        """Text of token ids, an end-of-turn token left out."""
        kept = [int(token) for token in ids if int(token) not in self.eos_ids]
        return self._encoder.decode(kept, skip_special_tokens=False)

    def plain(self, text: str) -> str:
        """`text` in which nothing reads as a special token, so that an observation cannot end its own message."""
        for token in self.tokenizer.all_special_tokens:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def chat_format(self, system: str) -> ChatFormat:
        """How this policy's chat template wraps a conversation. `system`: the system message; empty: none.

        A template without system messages gets `system` as the beginning of the first user message.
        """
        try:
            return self._chat_format([{"role": "system", "content": system}] if system else [], "")
        except Exception:  # jinja raises what the template's author chose
            if not system:
                raise
            return self._chat_format([], system + "\n\n")

    def _chat_format(self, system: list[dict[str, str]], prefix: str) -> ChatFormat:
        user, assistant, again = "\x01user\x01", "\x01assistant\x01", "\x01again\x01"
        messages = [
            *system,
            {"role": "user", "content": prefix + user},
            {"role": "assistant", "content": assistant},
            {"role": "user", "content": again},
        ]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        opening, rest = rendered.split(user)
        _, rest = rest.split(assistant)
        following, reply = rest.split(again)
        return ChatFormat(opening, reply, following)

    def logits(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits in float32.

        Args:
            ids: int64 [B, T].
            mask: [B, S + T], 0 at padding; S is what the cache holds. None: there is no padding.
            positions: int64 [B, T]; None: counted on from the cache.
            cache: extended in place.
            last_only: only the last position's.

        Returns:
            float32 [B, T or 1, V].
        """
        arguments: dict[str, Any] = {"use_cache": cache is not None, self._cache_argument: cache}
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=1 if last_only else 0,
            **arguments,
        )
        return cast(Tensor, output.logits).float()

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Writes model and tokenizer in Hugging Face's layout, safetensors. `weights`: in place of the model's own."""
        self.model.save_pretrained(folder, safe_serialization=True, state_dict=weights)
        self.tokenizer.save_pretrained(folder)


def load_policy(spec: str, *, device: str = "cpu", dtype: str = "float32", seed: int = 0) -> Policy:
    """Loads a policy.

    Args:
        spec: "tiny", "smollm2", or the folder of a causal language model.
        device: cpu, cuda or cuda:N.
        dtype: "float32", "bfloat16" or "float16".
        seed: what the weights of "tiny" are drawn from.

    Raises:
        PolicyError: unknown dtype, no such device, the folder holds no model that can be read, or "smollm2" is not
            installed (the message says how to).
    """
    _check_device(device)
    if dtype not in _DTYPES:
        raise PolicyError(f"dtype {dtype!r}: expected one of {', '.join(_DTYPES)}")
    # A progress bar for each file would write over the caller's own.
    transformers.logging.disable_progress_bar()
    makers = {"tiny": lambda: drawn_policy(TINY, seed), "smollm2": lambda: _from_folder(_smollm2_folder())}
    policy = makers.get(spec, lambda: _from_folder(Path(spec)))()
    model = cast(torch.nn.Module, policy.model).to(device=device)
    # Weights only: buffers such as the frequencies of positions are few, and rounding them costs most.
    for weight in model.parameters():
        weight.data = weight.data.to(_DTYPES[dtype])
    policy.model.eval()
    return policy


def _check_device(name: str) -> None:
    """Raises PolicyError where a device is none of cpu, cuda and cuda:N, or is not there."""
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise PolicyError(f"device {name!r}: expected cpu, cuda or cuda:N")
    if name == "cpu":
        return
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        raise PolicyError(f"device {name!r}: CUDA is not available to torch {torch.__version__} here; expected cpu")
    if int(match[1] or 0) >= devices:
        raise PolicyError(f"device {name!r}: expected cpu, cuda or cuda:0 to cuda:{devices - 1}")


def drawn_policy(shape: Shape, seed: int) -> Policy:
    """A Llama with the compact tokenizer, the embeddings tied; weights are a function of `shape` and `seed`."""
    tokenizer = tiny_tokenizer.load()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.get_vocab()[tiny_tokenizer.PAD],
        eos_token_id=tokenizer.get_vocab()[tiny_tokenizer.END],
        bos_token_id=None,
    )
    # The constructor draws weights from torch's global generator; they are drawn again below, from ours.
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, INIT_STD, generator=generator)
    return Policy(model, tokenizer)


def _smollm2_folder() -> Path:
    try:
        return smollm2.folder()
    except RuntimeError as error:
        raise PolicyError(str(error)) from error


def _from_folder(folder: Path) -> Policy:
    fault = None
    if not folder.is_dir():
        fault = "there is no such folder"
    elif not (folder / "config.json").is_file():
        fault = "the folder has no config.json"
    elif not list(folder.glob("*.safetensors")):
        fault = "the folder has no *.safetensors, and other weight formats are not read"
    if fault:
        raise PolicyError(
            f"no policy at {folder}: {fault}; expected tiny, smollm2, or a folder with config.json and *.safetensors "
            "(of a model on a hub: `hf download OWNER/NAME --local-dir FOLDER` first)"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = cast(object, AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise PolicyError(f"the model in {folder} cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PolicyError(f"{folder} has a {type(tokenizer).__name__}; only fast tokenizers (tokenizer.json) are read")
    if tokenizer.chat_template is None:
        raise PolicyError(f"the tokenizer in {folder} has no chat template; conversations cannot be rendered")
    return Policy(cast(PreTrainedModel, model), tokenizer)


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, vocabulary: dict[str, int]) -> set[int]:
    """Ids of end-of-turn tokens, and of `</answer>` where it is one token."""
    found: set[int] = set()
    for owner in (tokenizer, model.config, model.generation_config):
        value = cast("int | list[int] | None", getattr(owner, "eos_token_id", None))
        found.update([value] if isinstance(value, int) else value or [])
    if ANSWER_END in vocabulary:
        found.add(vocabulary[ANSWER_END])
    return found
