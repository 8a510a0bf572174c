"""The tokenizer of the `tiny` policy, built from the lists below and committed as `tiny/tokenizer.json`.

One token for each symbol inside a grid, action, tag and common word, each also with the space before it. What is always
the same is fused, for speed on a CPU: the wall between the ends of two rows (`#`, newline, `#`), the first and the last
row of wall, a separator and the action after it, a cell's row and column (`3,5`). So a 6×6 board is 21 tokens, and a
turn of five actions six. Text that the lists do not know falls apart into characters, and characters into bytes:
anything can be encoded and comes back unchanged. A plain `PreTrainedTokenizerFast`; nothing of it needs code from here
to be loaded.

Rewrite the committed files after a change: `python -m turngym_trainer.tiny_tokenizer`. Ids move then, so weights saved
before do not fit any longer (each saved policy carries its own tokenizer).
"""

import string
from pathlib import Path
from typing import Final, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER: Final = Path(__file__).parent / "tiny"

PAD: Final = "<|pad|>"
END: Final = "<|end|>"
ROLES: Final = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS: Final = ("<think>", "</think>", "<answer>", "</answer>")
SEPARATOR: Final = " || "

ACTIONS: Final = ("Up", "Down", "Left", "Right", "Phoenix", "Dragon")

_WORDS: Final = """
a action actions adjacent agent all already an and answer any are arm arms as at away be because before behind best
between box boxes but by can cannot cell cells choose corner cost costs could do does each empty end ends episode
every exactly fall first floor follow for four free from get go goal goes grid hard high hole holes if in into
invalid is it its know lake lava left legal less low many means most move moves must name need next no not of off on
once one only onto or other out outside over pays per pick place plan play player probability pull push pushed
pushes pushing reach reached reward rewards right risk row safe separate separated side sides slip slippery so solve
solved space square squares stand stands start stay step steps stop symbols target targets task than that the them
then there this three time times to toward towards turn turns two under until up use used walk walks wall walls way
when where which while will with without write you your A Actions An Answer Box Choose Each Every From Go Goal If In
It Move No Now On Only Push Reach Reward Stand Step The Then There This Turns Use Walk You Your
"""
WORDS: Final = tuple(_WORDS.split())
"""Whole words: letters only; anything else is a token a character."""

_SIDES: Final = range(3, 13)
"""Widths of boards whose first and last row of wall are one token."""
WALLS: Final = ("#\n#", *("#" * side + "\n#" for side in _SIDES), *("#\n" + "#" * side for side in _SIDES))
CELLS: Final = tuple(f"{row},{column}" for row in range(1, 10) for column in range(1, 10))

CHARACTERS: Final = (*string.printable.split("\t")[0], "\n", "\t", "√", "×", "−", "–", "…", "’", "“", "”")

_PIECES: Final = r"\A#+\n#|#\n#+\z|#\n#|\|\|| ?\d,\d| ?[A-Za-z]+|[\s\S]"

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build() -> PreTrainedTokenizerFast:
    """The tokenizer, from the lists of this module alone."""
    added = [AddedToken(token, special=True, normalized=False) for token in (PAD, END, *ROLES)]
    added += [AddedToken(tag, special=False, normalized=False) for tag in TAGS]
    added += [AddedToken(SEPARATOR + action, special=False, normalized=False) for action in ("", *ACTIONS)]
    words = dict.fromkeys((*ACTIONS, *WORDS, *CELLS))
    pieces = [token.content for token in added]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*CHARACTERS, *WALLS, "||", *words, *(f" {word}" for word in words)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load() -> PreTrainedTokenizerFast:
    """The committed tokenizer."""
    return cast(PreTrainedTokenizerFast, PreTrainedTokenizerFast.from_pretrained(FOLDER))


if __name__ == "__main__":
    build().save_pretrained(FOLDER)
