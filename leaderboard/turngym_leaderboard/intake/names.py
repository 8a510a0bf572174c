"""Which files a checkpoint may hold on a board: the one list that senders, the service and the examination go by.

A path is only ever compared with this list, never cleaned or joined before, so that none can lead out of its folder.
"""

import re
from pathlib import Path
from typing import Final

KIBIBYTE: Final = 1 << 10
MEBIBYTE: Final = 1 << 20

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = "model.safetensors"
TRAINED: Final = "training/state.json"
WARM_STARTED: Final = "warm_start.json"

SHARD: Final = re.compile(r"model-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.ASCII)
MAX_FILES: Final = 256

MAX_BYTES: Final = {
    CONFIG: MEBIBYTE,
    GENERATION_CONFIG: MEBIBYTE,
    TOKENIZER: 64 * MEBIBYTE,
    TOKENIZER_CONFIG: 16 * MEBIBYTE,
    SPECIAL_TOKENS: MEBIBYTE,
    CHAT_TEMPLATE: 256 * KIBIBYTE,
    INDEX: 16 * MEBIBYTE,
    TRAINED: 4 * MEBIBYTE,
    WARM_STARTED: 4 * MEBIBYTE,
}
"""Of each file but weights, whose sizes the board's limits bound."""

REQUIRED: Final = (CONFIG, TOKENIZER, TOKENIZER_CONFIG)
"""Beside weights."""

EXPECTED: Final = (
    "expected config.json, tokenizer.json, tokenizer_config.json and model.safetensors, or model-NNNNN-of-NNNNN."
    "safetensors with model.safetensors.index.json; and if there are any, generation_config.json, "
    "special_tokens_map.json, chat_template.jinja, and of turngym's trainer training/state.json or warm_start.json"
)

_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".msgpack", ".h5")
_ARCHIVES: Final = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
_CODE: Final = (".py", ".pyc", ".so", ".sh", ".js", ".pth")
_SHOWN: Final = 80


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights."""
    return name == WEIGHTS or SHARD.fullmatch(name) is not None


def name_fault(name: str) -> str | None:
    """Why a checkpoint may not hold a file of this name, relative to its folder, with `/`; None: it may."""
    if name in MAX_BYTES or is_weights(name):
        return None
    shown = repr(name[:_SHOWN])
    ending = name[name.rfind(".") :].lower() if "." in name else ""
    if ending in _CODE:
        return f"{shown}: a checkpoint may hold no code; remove it, and use a model that transformers knows by itself"
    if ending in _PICKLES:
        return f"{shown}: pickled or other weights than safetensors are not read; save the model as safetensors"
    if ending in _ARCHIVES:
        return f"{shown}: archives are not unpacked; send the files of the checkpoint themselves"
    if name.startswith("/") or "\\" in name or ".." in name.split("/"):
        return f"{shown}: a file's name leads out of the checkpoint's folder; {EXPECTED}"
    return f"{shown} is no file of a checkpoint; {EXPECTED}"


def size_fault(name: str, size: int, max_bytes: int) -> str | None:
    """Why a file of an allowed name may not have this size, in bytes; None: it may.

    Args:
        max_bytes: that all files together may have.
    """
    allowed = min(MAX_BYTES.get(name, max_bytes), max_bytes)
    if size > allowed:
        return f"{name} has {size} bytes; at most {allowed} are allowed"
    return None if size else f"{name} is empty"


def files_to_send(folder: Path) -> tuple[list[str], list[str]]:
    """The files of a folder that a board takes, and those that it does not need and would refuse. Links are the latter.

    Raises:
        OSError: the folder cannot be read.
    """
    taken: list[str] = []
    left: list[str] = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            name = path.relative_to(folder).as_posix()
            plain = not path.is_symlink() and path.is_file() and name_fault(name) is None
            (taken if plain else left).append(name)
    return taken, left
