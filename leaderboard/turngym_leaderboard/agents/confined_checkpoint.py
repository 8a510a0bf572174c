"""A checkpoint of a stranger's as an agent: it plays in a process of its own, within bounds of time and memory.

A chat template, a tokenizer's patterns or a forward pass can keep a process busy for ever, take all memory or bring it
down, in C as well as in Python, and only when they meet some text. Here that ends one process, which is started again
for the next batch. What its own doing ended is a fault of the agent's; what somebody else killed is lost, and played
again. `confined_process` is the other side.
"""

import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from turngym.lifeline import describe_exit
from turngym_leaderboard import confined
from turngym_leaderboard.agents import (
    OVERRAN,
    AgentFault,
    AgentLost,
    AgentOverran,
    AgentUnavailable,
    Fault,
    Reply,
    Seat,
    View,
)
from turngym_leaderboard.protocol import Decoding

MOST_KILLED: Final = 3
"""So often at one place of its play, being killed is what it brings about, as by taking all memory there is."""
START_SECONDS: Final = 20.0
"""For what is done before the first token: a chat template is filled in, texts are encoded."""
_BASE_BYTES: Final = 2 << 30
"""Of memory: torch, transformers and a tokenizer, with room to spare."""
_WEIGHTS_TIMES: Final = 4
"""Weights in float32 are up to twice their files, and there twice while they are loaded."""
_CONVERSATION_BYTES: Final = 16 << 20
"""Beside a quarter of its weights: what a model holds of each conversation, its cache and activations."""
_LOAD_SECONDS: Final = 1_800.0
"""It has been loaded before, by the examination; a disk may be slower now."""
_ENDS_WITHIN: Final = 5.0
"""Seconds between the end of its connection and its own."""
_FROM_OUTSIDE: Final = confined.STOPS | {signal.SIGKILL}
_MOST_BYTES: Final = 1 << 30
"""Of one message, which the agent's side keeps far below."""
_MODULE: Final = "turngym_leaderboard.agents.confined_process"

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a checkpoint may take.

    Attributes:
        memory: bytes of its process, on a processor. CUDA reserves what it may never take, so there only the kernel
            bounds it, which ends this process before any other.
        by_size: it gets no more of that than a checkpoint of its size needs: `needed`.
        seconds_per_token: of a turn of all conversations together, per token that an answer may have; beside
            START_SECONDS.
    """

    memory: int
    seconds_per_token: float
    by_size: bool = False

    def memory_of(self, folder: Path, conversations: int) -> int:
        """Bytes for the checkpoint of a folder that plays so many conversations at once."""
        return min(self.memory, needed(folder, conversations)) if self.by_size else self.memory


def needed(folder: Path, conversations: int) -> int:
    """Bytes of memory that a checkpoint needs, by an estimate that no usual architecture comes near."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return _BASE_BYTES + _WEIGHTS_TIMES * weights + conversations * (_CONVERSATION_BYTES + weights // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The first order: see `CheckpointAgent` for the rest. `memory`: as in `Bounds`."""

    folder: Path
    name: str
    device: str
    threads: int
    most_tokens: int
    memory: int


@dataclass(frozen=True, slots=True)
class Start:
    seats: tuple[Seat, ...]
    decoding: Decoding


@dataclass(frozen=True, slots=True)
class Act:
    views: tuple[View, ...]


class Said(BaseModel):
    """The answer to any order, as JSON: nothing of what a stranger sent is unpickled.

    Attributes:
        description: of the agent, when it is loaded.
        fault, unavailable: what the agent raised; "": nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    description: dict[str, str] = {}
    replies: tuple[Reply | Fault, ...] = ()
    fault: str = ""
    unavailable: str = ""


class ConfinedCheckpoint:
    """Plays with the checkpoint of a folder. To be closed; may be used as a context."""

    samples = True
    wants_legal_actions = False
    wants_advice = False

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        bounds: Bounds,
        conversations: int = 1,
        device: str = "cpu",
        threads: int = 0,
        most_tokens: int = 0,
    ) -> None:
        """Loads it. Arguments as `CheckpointAgent` takes them.

        Args:
            conversations: that it plays at once.

        Raises:
            AgentUnavailable: it cannot be loaded, or not within its bounds.
        """
        self.name = name
        self._load = Load(
            folder=folder.resolve(),
            name=name,
            device=device,
            threads=threads,
            most_tokens=most_tokens,
            memory=bounds.memory_of(folder, conversations),
        )
        self._process: _Process | None = None
        self._killed = Counter[tuple[int, int]]()
        self._place = (-1, 0)
        try:
            told = self._loaded_at_last()
        except BaseException:
            self.close()
            raise
        # Where its files lie on this machine is nobody's business.
        self._description = {key: value for key, value in told.items() if key != "folder"}
        self._turn_seconds = START_SECONDS + bounds.seconds_per_token * most_tokens_of(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends its process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    @property
    def description(self) -> dict[str, str]:
        return self._description

    def start(self, seats: Sequence[Seat], decoding: Decoding) -> None:
        """Begins a batch, with another process where the last one is gone. Raises AgentFault and AgentLost."""
        self._place = (seats[0].seed if seats else 0, 0)
        if self._process is None:
            self._load_it()
        self._ask(Start(tuple(seats), decoding), START_SECONDS)

    def act(self, views: Sequence[View]) -> Sequence[Reply | Fault]:
        """Raises as any agent does, and AgentOverran where that was the last of its process."""
        seed, acts = self._place
        self._place = (seed, acts + 1)
        said = self._ask(Act(tuple(views)), self._turn_seconds)
        if len(said.replies) != len(views):
            raise AgentFault(f"{len(said.replies)} answers in {len(views)} conversations")
        return said.replies

    def _loaded_at_last(self) -> dict[str, str]:
        """Its description, from however many tries it takes."""
        while True:
            try:
                return self._load_it()
            except AgentLost as lost:
                _log.warning("%s: %s; it is loaded again", self.name, lost)
            except AgentFault as fault:
                raise AgentUnavailable(f"the checkpoint cannot be loaded: {fault}") from fault

    def _load_it(self) -> dict[str, str]:
        self._process = _Process()
        return self._ask(self._load, _LOAD_SECONDS).description

    def _ask(self, order: Load | Start | Act, seconds: float) -> Said:
        """The answer to an order.

        Raises:
            AgentFault, AgentUnavailable: the agent did. AgentOverran: its process had to be ended, or brought itself
                down. AgentLost: somebody else ended it.
        """
        assert self._process is not None, "its process is gone: a batch has to be begun before it is played"
        try:
            said = self._process.ask(order, seconds)
        except _Ended as ended:
            self.close()
            _log.warning("%s: %s%s", self.name, ended, f": {ended.last_words}" if ended.last_words else "")
            if not ended.from_outside:
                raise AgentOverran(f"{OVERRAN}: {ended}") from ended
            self._killed[self._place] += 1
            if self._killed[self._place] >= MOST_KILLED:
                raise AgentOverran(
                    f"{OVERRAN}: {MOST_KILLED} times it was killed at this place; it takes more memory than there is"
                ) from ended
            raise AgentLost(str(ended)) from ended
        if said.unavailable:
            self.close()
            raise AgentUnavailable(confined.without_place(said.unavailable, self._load.folder))
        if said.fault:
            raise AgentFault(confined.without_place(said.fault, self._load.folder))
        return said


class _Ended(Exception):
    """The process is gone. `last_words`: of what it wrote to its standard error."""

    def __init__(self, message: str, *, from_outside: bool, last_words: str) -> None:
        super().__init__(message)
        self.from_outside = from_outside
        self.last_words = last_words


class _Process:
    """The other side, and the connection to it."""

    def __init__(self) -> None:
        self._held = ExitStack()
        home = self._held.enter_context(tempfile.TemporaryDirectory())
        self._said = self._held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 — it is one
        self._connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = confined.start(
                _MODULE,
                [str(number)],
                home,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=[number],
            )

    def ask(self, order: Load | Start | Act, seconds: float) -> Said:
        """Raises _Ended."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        alarm = threading.Timer(seconds, stop)
        alarm.daemon = True
        alarm.start()
        try:
            self._connection.send(order)
            said = Said.model_validate_json(self._connection.recv_bytes(_MOST_BYTES))
        except (EOFError, OSError, ValidationError) as error:
            raise self._ended(late.is_set(), seconds) from error
        finally:
            alarm.cancel()
        if late.is_set():  # Both at the same moment.
            raise self._ended(True, seconds)
        return said

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._held.close()

    def _ended(self, late: bool, seconds: float) -> _Ended:
        try:
            status = self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            status = 0  # It speaks no sense, but lives.
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - 2_000))
        last_words = self._said.read().decode("utf-8", "replace").strip()
        if late:
            return _Ended(f"it did not answer within {seconds:g} s", from_outside=False, last_words=last_words)
        told = f"its process ended ({describe_exit(status)})"
        return _Ended(told, from_outside=-status in _FROM_OUTSIDE, last_words=last_words)


def most_tokens_of(description: Mapping[str, str]) -> int:
    """How many a checkpoint of this description may write in a turn."""
    return int(description["max_response_tokens"])


def connection_of(number: int) -> "Connection[bytes, Load | Start | Act]":
    """The agent's side of the connection, by the number of its file."""
    return Connection(number)
