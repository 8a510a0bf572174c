"""Examines a folder in a process of its own, bounded in time and memory: the one call that a board makes.

What a stranger sent can keep a parser busy for ever, take all memory, or bring the interpreter down. Here that ends one
process, and is told as a refusal. The process has no network use of transformers' and none of the caller's variables
but those that name its libraries, so no password of the board lies within its reach.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from turngym_leaderboard.intake import GIBIBYTE, Accepted, IntakeLimits, Refused
from turngym_leaderboard.intake.folder import check_folder

EXAMINED_WITHIN: Final = 900.0
"""Seconds."""

_BASE_BYTES: Final = 12 * GIBIBYTE
"""Of addresses, not of memory in use: what torch reserves before any model is there, many times what it touches."""
_BYTES_A_PARAMETER: Final = 16
"""The model twice in float32 while it is loaded, and its files mapped beside it."""
_LARGEST_OUTPUT: Final = 1 << 20
"""Bytes of any file that the process may write; it has no reason to write one."""
_INHERITED: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LANG")


class CannotExamine(RuntimeError):
    """The examination itself failed, which says nothing of the folder: the machine's fault, to be tried again."""


class _Verdict(BaseModel):
    """What the process says on its last line: exactly one of these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: Accepted | None = None
    refused: str = ""
    unable: str = ""


def examine(
    folder: Path, limits: IntakeLimits | None = None, *, device: str = "cpu", seconds: float = EXAMINED_WITHIN
) -> Accepted:
    """Says what a folder holds, once it has been found harmless and has played a turn.

    Args:
        limits: None: those that `IntakeLimits` has by itself.
        device: where it would play. seconds: that the whole may take.

    Raises:
        Refused: it may not be played; the message is for whoever sent it.
        CannotExamine: nothing can be said.
    """
    bounds = limits or IntakeLimits()
    command = [sys.executable, "-m", __spec__.name, str(folder.resolve()), json.dumps(asdict(bounds)), device]
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(  # noqa: S603 — our own module
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env=_variables(home),
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Refused(
                f"the checkpoint could not be read and play one turn within {seconds:g} s; try it with `leaderboard "
                "evaluate`, and look at the chat template and the tokenizer's patterns"
            ) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        said.seek(0)
        return _judged(process.returncode, output, said.read()[-2000:].decode("utf-8", "replace"))


def _judged(status: int, output: bytes, said: str) -> Accepted:
    """What the process's end comes to."""
    lines = output.decode("utf-8", "replace").splitlines()
    try:
        verdict = _Verdict.model_validate_json(lines[-1] if lines else "")
    except ValidationError:
        if status < 0:
            name = signal.Signals(-status).name
            raise Refused(
                f"loading the checkpoint ended the process that tried ({name}), as too large a model does"
            ) from None
        raise CannotExamine(
            f"the examination ended with exit code {status}: {said.strip() or 'it said nothing'}"
        ) from None
    if verdict.unable:
        raise CannotExamine(verdict.unable)
    if verdict.accepted is None:
        raise Refused(verdict.refused)
    return verdict.accepted


def _variables(home: str) -> Mapping[str, str]:
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**kept, **offline, "HOME": home, "HF_HOME": home, "TOKENIZERS_PARALLELISM": "false"}


def _examine_here(folder: Path, limits: IntakeLimits, device: str) -> _Verdict:
    try:
        _bound_this_process(_BASE_BYTES)
        accepted = check_folder(folder, limits)
        # CUDA reserves addresses for all memory that there is, so only processors can be bounded this way.
        if device == "cpu":
            _bound_this_process(_BASE_BYTES + _BYTES_A_PARAMETER * accepted.parameters)
        else:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            from turngym_leaderboard.intake.trial import try_out
        except ModuleNotFoundError as error:
            return _Verdict(unable=f"checkpoints need the trainer: pip install 'turngym[board]' ({error})")
        try_out(folder, accepted, limits, device)
    except Refused as error:
        return _Verdict(refused=str(error))
    except OSError as error:
        return _Verdict(unable=f"{folder} cannot be read: {error}")
    except MemoryError:
        return _Verdict(refused="the checkpoint needs more memory than its size allows; look at config.json")
    return _Verdict(accepted=accepted)


def _bound_this_process(addresses: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (addresses, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_OUTPUT, _LARGEST_OUTPUT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Examines the folder that the arguments name, and prints the verdict as a line of JSON."""
    folder, limits, device = sys.argv[1:]
    verdict = _examine_here(Path(folder), IntakeLimits(**json.loads(limits)), device)
    print(verdict.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
