"""The examination of a folder as files: everything that can be known of a checkpoint before any of it is loaded."""

import re
import stat
from pathlib import Path
from typing import Final

from turngym_leaderboard.intake import Accepted, IntakeLimits, Refused, model, names
from turngym_leaderboard.intake.documents import read_document
from turngym_leaderboard.intake.weights import check_finite

_FOLDERS: Final = {name.rpartition("/")[0] for name in names.MAX_BYTES if "/" in name}
_MODEL_TYPE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


def check_folder(folder: Path, limits: IntakeLimits) -> Accepted:
    """Examines a folder, cheapest first: names and sizes, settings, headers, fit, and last every weight.

    Raises:
        Refused: it is no checkpoint that a board may load.
        OSError: it cannot be read.
    """
    sizes = _sizes(folder)
    check_sizes(sizes, limits)
    found = set(sizes)
    model.check_settings(folder, found)
    config = read_document(folder / names.CONFIG, names.MAX_BYTES[names.CONFIG])
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _MODEL_TYPE.fullmatch(model_type):
        raise Refused("config.json: model_type is missing; it names the architecture, as in llama or qwen3")
    tensors = model.read_tensors(folder, found, limits)
    model.check_sizes(config, tensors)
    vocabulary = model.vocabulary_size(config)
    model.check_tokenizer(read_document(folder / names.TOKENIZER, names.MAX_BYTES[names.TOKENIZER]), vocabulary)
    for name in (names.TRAINED, names.WARM_STARTED):
        if name in found:
            read_document(folder / name, names.MAX_BYTES[name])
    for file, held in tensors.items():
        check_finite(folder / file, held)
    return Accepted(
        model_type=model_type,
        parameters=model.count_parameters(tensors),
        bytes=sum(sizes.values()),
        vocabulary=vocabulary,
    )


def check_sizes(sizes: dict[str, int], limits: IntakeLimits) -> None:
    """Raises Refused where files of these names and bytes cannot be a checkpoint's, which is known before they come."""
    if len(sizes) > names.MAX_FILES:
        raise Refused(f"there are {len(sizes)} files; a checkpoint has at most {names.MAX_FILES}")
    for name, size in sizes.items():
        if fault := names.name_fault(name) or names.size_fault(name, size, limits.max_bytes):
            raise Refused(fault)
    if (total := sum(sizes.values())) > limits.max_bytes:
        raise Refused(f"the files have {total} bytes together; this board takes at most {limits.max_bytes}")
    if missing := [name for name in names.REQUIRED if name not in sizes]:
        raise Refused(f"{' and '.join(missing)} missing; {names.EXPECTED}")
    if not any(map(names.is_weights, sizes)):
        raise Refused(f"there are no weights; {names.EXPECTED}")


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file by its name. Anything but plain files in plain folders is refused."""
    sizes: dict[str, int] = {}
    waiting = [folder]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(folder).as_posix()
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode) and name in _FOLDERS:
                waiting.append(path)
            elif stat.S_ISREG(mode):
                sizes[name] = path.lstat().st_size
            elif stat.S_ISDIR(mode):
                raise Refused(f"{name[:80]!r} is a folder that no checkpoint has; {names.EXPECTED}")
            else:
                raise Refused(f"{name[:80]!r} is a link or no plain file; send the file itself")
            if len(sizes) > names.MAX_FILES:
                raise Refused(f"there are more than {names.MAX_FILES} files; {names.EXPECTED}")
    return sizes
