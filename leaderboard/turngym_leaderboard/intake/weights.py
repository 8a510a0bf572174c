"""Reads safetensors as a stranger may have written them: the header by the format's rules, the values in a stream.

A file is eight bytes with the header's length (little-endian), the header as JSON, and the tensors one after the other
without gaps (https://huggingface.co/docs/safetensors). Nothing of it is trusted before it was compared with the file's
size, and no tensor is ever held as a whole. Knows nothing of models.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

import numpy as np

from turngym_leaderboard.intake import Refused
from turngym_leaderboard.intake.documents import parse_document

MAX_HEADER_BYTES: Final = 16 << 20
MAX_TENSORS: Final = 50_000
MAX_NAME_CHARACTERS: Final = 512
MAX_DIMENSIONS: Final = 8
_LENGTH_BYTES: Final = 8
_CHUNK_BYTES: Final = 8 << 20
_METADATA: Final = "__metadata__"

_ITEM_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_EXPONENTS: Final[Mapping[str, np.unsignedinteger]] = {
    "F64": np.uint64(0x7FF0_0000_0000_0000),
    "F32": np.uint32(0x7F80_0000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
}
"""A floating-point number whose exponent has all of these bits is infinite or none."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. `begin`: where its bytes begin, from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * _ITEM_BYTES[self.dtype]


def read_header(file: Path) -> list[Tensor]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        Refused: the file does not keep to the format; the message says where.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise Refused(f"{file.name} is no safetensors file, or was cut off: its header would have {length} bytes")
        if length > MAX_HEADER_BYTES:
            raise Refused(f"{file.name} has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        header = parse_document(stream.read(length), f"the header of {file.name}")
    header.pop(_METADATA, None)
    if not 0 < len(header) <= MAX_TENSORS:
        raise Refused(f"{file.name} holds {len(header)} tensors; expected 1 to {MAX_TENSORS}")
    tensors = [_tensor(file.name, name, told, _LENGTH_BYTES + length) for name, told in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.elements))
    position = _LENGTH_BYTES + length
    for tensor in tensors:
        if tensor.begin != position:
            raise Refused(
                f"{file.name}: tensor {tensor.name!r} begins at byte {tensor.begin}, expected {position}: tensors must "
                "follow each other without gap or overlap; save the model again with safetensors"
            )
        position += tensor.bytes
    if position != size:
        raise Refused(
            f"{file.name} has {size} bytes, but its tensors end at {position}: it was cut off, or holds something else"
        )
    return tensors


def check_finite(file: Path, tensors: list[Tensor]) -> None:
    """Raises Refused where a weight of these tensors of the file is NaN or infinite, naming the first such tensor."""
    with file.open("rb") as stream:
        for tensor in tensors:
            exponent = _EXPONENTS.get(tensor.dtype)
            if exponent is not None and not _is_finite(stream, tensor, exponent):
                raise Refused(
                    f"{file.name}: tensor {tensor.name!r} holds weights that are NaN or infinite; the training "
                    "diverged or the file is damaged: submit an earlier checkpoint"
                )


def _is_finite(stream: BinaryIO, tensor: Tensor, exponent: np.unsignedinteger) -> bool:
    stream.seek(tensor.begin)
    left = tensor.bytes
    while left:
        chunk = stream.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise Refused(f"tensor {tensor.name!r} ends early: the file changed while it was read")
        bits = np.frombuffer(chunk, exponent.dtype.newbyteorder("<"))
        if ((bits & exponent) == exponent).any():
            return False
        left -= len(chunk)
    return True


def _tensor(file: str, name: str, told: object, data: int) -> Tensor:
    """One entry of a header, whose offsets count from byte `data` of the file."""
    where = f"{file}: tensor {name[:80]!r}"
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise Refused(f"{where} has a name that is too long or not printable")
    entry = cast("dict[str, object]", told) if isinstance(told, dict) else {}
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused(f"{where} is described by {str(entry)[:80]}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], _naturals(entry["shape"]), _naturals(entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise Refused(
            f"{where} has dtype {str(dtype)[:20]!r}; expected one of {', '.join(_ITEM_BYTES)}: quantised weights are "
            "not read, save the model as float32, bfloat16 or float16"
        )
    if shape is None or len(shape) > MAX_DIMENSIONS or 0 in shape:
        raise Refused(f"{where} has shape {str(entry['shape'])[:80]}; expected at most {MAX_DIMENSIONS} sizes over 0")
    if offsets is None or len(offsets) != 2:
        raise Refused(f"{where} has data_offsets {str(entry['data_offsets'])[:80]}; expected its first and last byte")
    tensor = Tensor(name, dtype, shape, data + offsets[0])
    if tensor.bytes != offsets[1] - offsets[0]:
        raise Refused(
            f"{where} has {offsets[1] - offsets[0]} bytes, but {dtype} of shape {list(shape)} takes {tensor.bytes}"
        )
    return tensor


def _naturals(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 on; None where it is something else."""
    if not isinstance(value, list):
        return None
    items = cast("list[object]", value)
    return tuple(cast("list[int]", items)) if all(type(item) is int and item >= 0 for item in items) else None
