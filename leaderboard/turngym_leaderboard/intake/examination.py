"""Examines a folder in a process of its own, bounded in time and memory: the one call that a board makes.

What a stranger sent can keep a parser busy for ever, take all memory, or bring the interpreter down. Here that ends one
process, and is told as a refusal. `turngym_leaderboard.confined` says what else the process may not.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from turngym.lifeline import describe_exit
from turngym_leaderboard import confined
from turngym_leaderboard.intake import GIBIBYTE, Accepted, IntakeLimits, Refused
from turngym_leaderboard.intake.folder import check_folder

SECONDS: Final = 60
SECONDS_PER_GIBIBYTE: Final = 60
"""Of processor time, for an examination and for what is to be examined; a minute of it is many times what it takes."""
_WAITED: Final = 5
"""Seconds that may pass for each of them, on a machine that has others to serve."""
_BASE_BYTES: Final = 4 * GIBIBYTE
"""Of memory: what torch and transformers take before any model is there, many times over."""
_BYTES_A_PARAMETER: Final = 16
"""The model twice in float32 while it is loaded, and twice more while it is looked at."""


class CannotExamine(RuntimeError):
    """The examination itself failed, which says nothing of the folder: the machine's fault, to be tried again."""


class EndedUnexpectedly(CannotExamine):
    """Somebody killed the examination, or it met what nobody expected: the machine's fault unless it does so again."""


class _Verdict(BaseModel):
    """What the process says on its last line: exactly one of these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: Accepted | None = None
    refused: str = ""
    unable: str = ""


def examine(
    folder: Path, limits: IntakeLimits | None = None, *, device: str = "cpu", seconds: int | None = None
) -> Accepted:
    """Says what a folder holds, once it has been found harmless and has played a turn.

    Args:
        limits: None: those that `IntakeLimits` has by itself.
        device: where it would play. seconds: of processor time that it may take; None: by its size.

    Raises:
        Refused: it may not be played; the message is for whoever sent it.
        CannotExamine: nothing can be said.
    """
    try:
        return _examine(folder, limits or IntakeLimits(), device, seconds or _seconds(folder))
    except Refused as refusal:
        raise Refused(confined.without_place(str(refusal), folder)) from refusal


def _seconds(folder: Path) -> int:
    try:
        size = sum(file.lstat().st_size for file in folder.rglob("*"))
    except OSError as error:
        raise CannotExamine(f"{folder} cannot be read: {error}") from error
    return SECONDS + SECONDS_PER_GIBIBYTE * size // GIBIBYTE


def _examine(folder: Path, limits: IntakeLimits, device: str, seconds: int) -> Accepted:
    arguments = [str(folder.resolve()), json.dumps(asdict(limits)), device, str(seconds)]
    too_long = Refused(
        f"the checkpoint could not be read and play one turn within {seconds} s; try it with `leaderboard evaluate`, "
        "and look at the chat template and the tokenizer's patterns"
    )
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as said:
        process = confined.start(__spec__.name, arguments, home, stdout=subprocess.PIPE, stderr=said)
        try:
            output, _ = process.communicate(timeout=_WAITED * seconds)
        except subprocess.TimeoutExpired:
            raise too_long from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode == -signal.SIGXCPU:
            raise too_long
        said.seek(max(0, said.seek(0, os.SEEK_END) - 2_000))
        return _judged(process.returncode, output, said.read().decode("utf-8", "replace"))


def _judged(status: int, output: bytes, said: str) -> Accepted:
    """What the process's end comes to."""
    lines = output.decode("utf-8", "replace").splitlines()
    try:
        verdict = _Verdict.model_validate_json(lines[-1] if lines else "")
    except ValidationError:
        told = f"{describe_exit(status)}; {said.strip() or 'it said nothing'}"
        if -status in confined.STOPS:
            raise CannotExamine(f"the examination was stopped before it was over: {told}") from None
        if status >= 0 or -status == signal.SIGKILL:
            raise EndedUnexpectedly(f"the examination ended before it was over: {told}") from None
        raise Refused(
            f"the process that tried the checkpoint was ended by it ({describe_exit(status)}), as when a model takes "
            "more memory than its size allows, or a library fails on a file; try it with `leaderboard evaluate`"
        ) from None
    if verdict.unable:
        raise CannotExamine(verdict.unable)
    if verdict.accepted is None:
        raise Refused(verdict.refused)
    return verdict.accepted


def _examine_here(folder: Path, limits: IntakeLimits, device: str) -> _Verdict:
    try:
        confined.bound_this_process(memory=_BASE_BYTES)
        accepted = check_folder(folder, limits)
        # CUDA reserves what it may never take.
        memory = _BASE_BYTES + _BYTES_A_PARAMETER * accepted.parameters if device == "cpu" else resource.RLIM_INFINITY
        confined.bound_this_process(memory=memory)
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


def main() -> None:
    """Examines the folder that the arguments name, and prints the verdict as a line of JSON."""
    folder, limits, device, seconds = sys.argv[1:]
    confined.bound_this_process(seconds=int(seconds))
    verdict = _examine_here(Path(folder), IntakeLimits(**json.loads(limits)), device)
    print(verdict.model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
