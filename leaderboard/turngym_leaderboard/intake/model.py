"""Whether settings, tokenizer and weights of a checkpoint fit together, and ask for nothing but data.

Knows JSON and shapes, and nothing of transformers: what only it can tell, `trial` asks.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, cast

from turngym_leaderboard.intake import IntakeLimits, Refused, names
from turngym_leaderboard.intake.documents import Document, read_document
from turngym_leaderboard.intake.weights import Tensor, read_header

_FORBIDDEN: Final = {
    "auto_map": "code that comes with a model is not run; use an architecture that transformers has itself",
    "custom_generate": "code that comes with a model is not run; remove it",
    "custom_pipelines": "code that comes with a model is not run; remove it",
    "trust_remote_code": "code that comes with a model is not run; remove it",
    "use_kernels": "compute kernels are not fetched from elsewhere; remove it",
    "kernel_config": "compute kernels are not fetched from elsewhere; remove it",
    "fusion_config": "layers are not exchanged; remove it",
    "per_layer_config": "layers are not exchanged; remove it",
    "quantization_config": "quantised weights are not read; save the model as float32, bfloat16 or float16",
    "transformers_weights": "weights are read from model*.safetensors only; remove it",
    "gguf_file": "weights are read from model*.safetensors only; remove it",
    "fast_tokenizer_files": "the tokenizer is read from tokenizer.json only; remove it",
    "adapter_config": "adapters are not read; merge them into the model",
}
"""Keys that make transformers fetch, import or open something, anywhere in a checkpoint's settings."""
_ATTENTION: Final = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_EXPERTS: Final = ("experts_implementation", "_experts_implementation", "_experts_implementation_internal")
_IMPLEMENTATIONS: Final = {
    **dict.fromkeys(_ATTENTION, (None, "eager", "sdpa")),
    **dict.fromkeys(_EXPERTS, (None, "eager", "batched_mm", "grouped_mm")),
}
"""Whose code is part of torch and transformers."""
_DTYPES: Final = (None, "float32", "bfloat16", "float16", "float64")


def check_settings(folder: Path, found: set[str]) -> None:
    """Raises Refused where the settings of transformers ask for code, kernels or files of elsewhere."""
    for name in (names.CONFIG, names.GENERATION_CONFIG, names.TOKENIZER_CONFIG, names.SPECIAL_TOKENS):
        if name in found:
            for key, value in _entries(read_document(folder / name, names.MAX_BYTES[name])):
                if fault := _setting_fault(key, value):
                    raise Refused(f"{name}: {fault}")


def read_tensors(folder: Path, found: set[str], limits: IntakeLimits) -> dict[str, list[Tensor]]:
    """The tensors of each file of weights.

    Raises:
        Refused: files are missing or too many, do not keep to the format, contradict the index, or hold too much.
    """
    files = _weight_files(found)
    tensors = {file: read_header(folder / file) for file in files}
    where = {tensor.name: file for file in files for tensor in tensors[file]}
    if len(where) != sum(map(len, tensors.values())):
        raise Refused("two files of weights hold a tensor of the same name; save the model again")
    if names.INDEX in found:
        _check_index(read_document(folder / names.INDEX, names.MAX_BYTES[names.INDEX]), where)
    parameters = count_parameters(tensors)
    if parameters > limits.max_parameters:
        raise Refused(f"the model has {parameters} parameters; this board takes at most {limits.max_parameters}")
    return tensors


def count_parameters(tensors: Mapping[str, list[Tensor]]) -> int:
    """Elements of all tensors."""
    return sum(tensor.elements for file in tensors.values() for tensor in file)


def check_sizes(config: Document, tensors: Mapping[str, list[Tensor]]) -> None:
    """Raises Refused where the settings describe a larger model than the weights are.

    Without it a small file could make the loader build, and fill at random, a model of any size.
    """
    parameters, count = count_parameters(tensors), sum(map(len, tensors.values()))
    layers, vocabulary, width = (whole(config, key) for key in ("num_hidden_layers", "vocab_size", "hidden_size"))
    if layers is not None and layers > count:
        raise Refused(f"config.json: num_hidden_layers is {layers}, but the weights are {count} tensors")
    if vocabulary is not None and width is not None and vocabulary * width > parameters:
        raise Refused(
            f"config.json: vocab_size {vocabulary} times hidden_size {width} is more than the {parameters} parameters "
            "that the weights hold"
        )


def vocabulary_size(config: Document) -> int:
    """The tokens that the model tells apart. Raises Refused where config.json does not say."""
    size = whole(config, "vocab_size")
    if size is None or size < 1:
        raise Refused("config.json: vocab_size is missing or not a whole number over 0")
    return size


def check_tokenizer(tokenizer: Document, vocabulary: int) -> None:
    """Raises Refused where the tokenizer has tokens that the model does not."""
    largest = -1
    for index in _token_ids(tokenizer):
        if type(index) is not int or index < 0:
            raise Refused(f"tokenizer.json: token id {str(index)[:40]!r} is not a whole number from 0 on")
        largest = max(largest, index)
    if largest < 0:
        raise Refused("tokenizer.json has no vocabulary; save the tokenizer again with save_pretrained")
    if largest >= vocabulary:
        raise Refused(
            f"the tokenizer has token ids up to {largest}, but the model's vocabulary (config.json) has {vocabulary}: "
            "they do not belong together"
        )


def whole(config: Document, key: str) -> int | None:
    """A whole number of config.json, or of the part of it about text; None where it has none."""
    text = config.get("text_config")
    for part in (config, cast(Document, text) if isinstance(text, dict) else {}):
        value = part.get(key)
        if type(value) is int:
            return value
    return None


def _setting_fault(key: str, value: object) -> str | None:
    if key in _FORBIDDEN and value is not None:
        return f"{key!r} is set, but {_FORBIDDEN[key]}"
    if key in _IMPLEMENTATIONS and value not in _IMPLEMENTATIONS[key]:
        return (
            f"{key!r} is {str(value)[:40]!r}; expected one of {', '.join(filter(None, _IMPLEMENTATIONS[key]))}: "
            "kernels are not fetched from elsewhere"
        )
    if key in ("dtype", "torch_dtype") and value not in _DTYPES:
        return f"{key!r} is {str(value)[:40]!r}; expected one of {', '.join(filter(None, _DTYPES))}"
    return None


def _entries(node: object) -> Iterator[tuple[str, object]]:
    """Every key of a document with its value, at any depth."""
    if isinstance(node, dict):
        for key, value in cast(Document, node).items():
            yield key, value
            yield from _entries(value)
    elif isinstance(node, list):
        for value in cast("list[object]", node):
            yield from _entries(value)


def _weight_files(found: set[str]) -> list[str]:
    """The files of weights, whole and in order."""
    shards = sorted(name for name in found if names.SHARD.fullmatch(name))
    if names.WEIGHTS in found:
        if shards or names.INDEX in found:
            raise Refused("there is model.safetensors, and shards or an index beside it; send the one or the other")
        return [names.WEIGHTS]
    if not shards:
        raise Refused(f"there are no weights; {names.EXPECTED}")
    expected = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if shards != expected:
        raise Refused(f"the shards are {', '.join(shards[:8])}; expected {expected[0]} to {expected[-1]}, all of them")
    if names.INDEX not in found:
        raise Refused(f"{names.INDEX} is missing, which says what lies in which of the {len(shards)} shards")
    return shards


def _check_index(index: Document, where: Mapping[str, str]) -> None:
    told = index.get("weight_map")
    if not isinstance(told, dict):
        raise Refused(f"{names.INDEX} has no weight_map; save the model again")
    weight_map = cast(Document, told)
    for tensor in sorted(weight_map.keys() ^ where.keys()):
        holder = "the index" if tensor in weight_map else "a shard"
        raise Refused(f"tensor {tensor[:80]!r} is only in {holder}; the index must list the tensors of all shards")
    for tensor, file in weight_map.items():
        if file != where[tensor]:
            raise Refused(f"{names.INDEX} says that {tensor[:80]!r} is in {str(file)[:80]!r}; it is in {where[tensor]}")


def _token_ids(tokenizer: Document) -> Iterator[object]:
    model = tokenizer.get("model")
    vocabulary = cast(Document, model).get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from cast(Document, vocabulary).values()
    elif isinstance(vocabulary, list):
        yield from range(len(cast("list[object]", vocabulary)))
    added = tokenizer.get("added_tokens")
    for token in cast("list[object]", added) if isinstance(added, list) else []:
        yield cast(Document, token).get("id") if isinstance(token, dict) else token
