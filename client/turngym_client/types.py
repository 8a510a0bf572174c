"""What a client gives and gets: frozen values in plain Python types.

Knows nothing of gRPC or protobuf; `turngym_client.messages` converts.
"""

from __future__ import annotations

import enum
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import SupportsIndex

SEED_MAX = (1 << 64) - 1
"""Seeds are unsigned 64-bit integers."""
COUNT_MAX = (1 << 32) - 1
"""Counts of turns and actions are unsigned 32-bit integers."""


class Split(enum.Enum):
    """Which instances may be met; decided by an instance's world, never by its seed."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"
    ALL = "all"


class EndReason(enum.Enum):
    """Why an episode ended; NONE while it goes on."""

    NONE = ""
    ENVIRONMENT = "environment"
    MAX_TURNS = "max_turns"
    MAX_ACTIONS = "max_actions"
    WALL_CLOCK = "wall_clock"


class CloseReason(enum.Enum):
    """What a caller tells the server when it closes a session."""

    FINISHED = "finished"
    ABANDONED = "abandoned"
    ERROR = "error"


class ActionKind(enum.Enum):
    TEXT = "text"
    TOOL_CALL = "tool_call"


class Determinism(enum.Enum):
    """BYTES: the same version, options, seeds and actions give the same bytes anywhere. NONE: never replayed."""

    BYTES = "bytes"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of an episode. Asked for, 0 means the environment's default; of an episode, every field is resolved.

    Attributes:
        max_turns: turns an episode may take.
        max_actions: actions an episode may take over all its turns; an invalid one counts.
        max_actions_per_turn: actions of one turn that are run; further ones are left out.
        wall_seconds: seconds after which the next turn ends the episode; 0 in an episode: no such limit.

    Raises:
        TypeError: a limit that is no number. ValueError: one out of range.
    """

    max_turns: int = 0
    max_actions: int = 0
    max_actions_per_turn: int = 0
    wall_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_integer("max_turns", self.max_turns, COUNT_MAX)
        check_integer("max_actions", self.max_actions, COUNT_MAX)
        check_integer("max_actions_per_turn", self.max_actions_per_turn, COUNT_MAX)
        check_seconds("wall_seconds", self.wall_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode to start.

    Attributes:
        options: the environment's options; unset ones take their defaults.
        level_seed: chooses the instance, 0 to 2^64 − 1; None: the server draws one and tells it.
        noise_seed: chooses what happens in play; None: the server draws one and tells it.
        sealed_seed: both seeds as a board has sealed them for its server, in their place. The episode then shows
            neither seeds nor instance, cannot be forked, and gets no advice.
        expected_version: refuse any other version of the environment; "": any.

    Raises:
        TypeError: a field of another type. ValueError: a seed out of range, or seeds beside a sealed one.
    """

    environment_id: str
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    limits: Limits = field(default_factory=Limits)
    split: Split = Split.TRAIN
    level_seed: int | None = None
    noise_seed: int | None = None
    expected_version: str = ""
    sealed_seed: bytes | None = None

    def __post_init__(self) -> None:
        check_type("environment_id", self.environment_id, str)
        check_type("limits", self.limits, Limits)
        check_type("split", self.split, Split)
        check_seed("level_seed", self.level_seed)
        check_seed("noise_seed", self.noise_seed)
        check_type("expected_version", self.expected_version, str)
        if self.sealed_seed is not None:
            check_type("sealed_seed", self.sealed_seed, bytes)
            if not self.sealed_seed:
                raise ValueError("sealed_seed is empty, but must be what a board's key sealed, or None")
            if self.level_seed is not None or self.noise_seed is not None:
                raise ValueError("sealed_seed holds level and noise seed; give no level_seed or noise_seed beside it")


def check_type(name: str, value: object, kind: type) -> None:
    """Raises TypeError unless `value` is a `kind`; of an enum, it lists the members."""
    if not isinstance(value, kind):
        members = f" ({', '.join(map(str, kind))})" if issubclass(kind, enum.Enum) else ""
        raise TypeError(f"{name} is {told(value)}, but must be a {kind.__name__}{members}")


def check_seed(name: str, seed: object) -> None:
    """Raises TypeError or ValueError unless `seed` is None or an integer of 64 bits."""
    if seed is not None:
        check_integer(name, seed, SEED_MAX)


def check_integer(name: str, value: object, most: int) -> None:
    """Raises TypeError or ValueError unless `value` is an integer, NumPy's included, in 0 … `most`."""
    # Whether a value is an instance of a protocol takes Python 20 µs, so that comes last.
    if isinstance(value, bool) or not (isinstance(value, int) or isinstance(value, SupportsIndex)):  # noqa: SIM101
        raise TypeError(f"{name} is {told(value)}, but must be an integer in 0 … {most}")
    if not 0 <= operator.index(value) <= most:
        raise ValueError(f"{name} is {value}, but must lie in 0 … 2^{most.bit_length()} − 1 ({most})")


def check_seconds(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless `value` is a finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {told(value)}, but must be a number of seconds, 0 or more")
    if not 0 <= float(value) < float("inf"):
        raise ValueError(f"{name} is {value}, but must be a finite number of seconds, 0 or more")


def told(value: object) -> str:
    """A value and its type, for an error."""
    return f"{cut(repr(value))} ({type(value).__name__})"


def cut(text: str, most: int = 100) -> str:
    """The text for an error, of at most so many characters: what came may be a megabyte."""
    return text if len(text) <= most else text[: most - 1] + "…"


@dataclass(frozen=True, slots=True)
class NoiseSegment:
    """From this step index on (1 is the first turn), noise is drawn from this seed."""

    from_step: int
    noise_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What one turn did, or where an episode stands after a reset (reward 0) or fork (the last turn's).

    Attributes:
        observation: what the agent reads next.
        reward: sum of `action_rewards`, one for each action that was run.
        actions_executed: actions run, up to the end, the first invalid one, or a limit.
        terminated: the environment reached an end of its own; truncated: a limit ended the episode.
        success: whether the task was accomplished; set only at the end, None where unknown.
        action_valid: False when an action could not be parsed or is illegal. True after a reset.
        metrics: the environment's own measures; no part of the reward.
        digest: SHA-256 chain over the whole episode so far, 32 bytes.
        legal_actions: None unless asked for, or where they cannot be listed.
        legal_actions_complete: whether `legal_actions` are all of them.
    """

    observation: str
    reward: float
    action_rewards: tuple[float, ...]
    actions_executed: int
    terminated: bool
    truncated: bool
    success: bool | None
    end_reason: EndReason
    action_valid: bool
    reward_components: Mapping[str, float]
    metrics: Mapping[str, float]
    digest: bytes
    legal_actions: tuple[str, ...] | None
    legal_actions_complete: bool

    @property
    def done(self) -> bool:
        """The episode is over, for whichever reason."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the oracle would do now.

    Attributes:
        step_index: turns played when the advice was given.
        actions: its next turn; empty: it knows no way on.
        explanation: the reasoning in words, "" where there is none.
        ceiling: exact probability of success from here of the best possible player; None: not known.
        floor: the same of a uniform random player over legal actions that fills every turn.
    """

    step_index: int
    actions: tuple[str, ...]
    explanation: str
    ceiling: float | None
    floor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server is. `addresses` are its worker processes (host:port); empty: only the one that was called."""

    version: str
    addresses: tuple[str, ...]
    splits: tuple[Split, ...]
    max_sessions: int
    sessions: int
    lease_seconds: float
    max_batch_items: int
    max_action_bytes: int
    max_observation_bytes: int
    max_message_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSummary:
    id: str
    version: str
    family: str
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A success rate, 0 to 1, with half of its 95 % interval over instances.

    Attributes:
        instances: how many it was computed on.
        exact: each instance's value is exact, not played.
    """

    value: float
    half_width: float
    instances: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitInfo:
    """One split of an environment under given options and limits.

    Attributes:
        served: whether the server starts episodes of it.
        worlds: distinct worlds; None: never counted. An estimate from below unless `worlds_exact`.
        floor: the uniform random player's success; ceiling: the best possible one's. None: not measured, so scores
            of this split cannot be normalised.
    """

    served: bool
    worlds: float | None
    worlds_exact: bool
    floor: Reference | None
    ceiling: Reference | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """Everything about one environment under given options and limits.

    Attributes:
        version: changes whenever the same seeds and actions would give other bytes.
        family: shared by all environments that make the same kind of world; keys the splits.
        options_schema: JSON Schema of what options may hold.
        options_json: the resolved options, canonical JSON.
        instructions: what an agent has to be told.
        action_separator: separates several actions in an agent's text; "": one action a turn.
        tools: JSON Schemas of the tools, for ActionKind.TOOL_CALL.
        limits: resolved; caps: the most that may be asked for, 0 meaning unbounded.
        split_epoch: grows when a rule change moves instances between splits.
        step_deadline_seconds: a turn that takes longer fails, its episode with it. On the clock, not of a processor.
    """

    id: str
    version: str
    family: str
    summary: str
    options_schema: Mapping[str, object]
    options_json: str
    instructions: str
    action_separator: str
    action_kind: ActionKind
    tools: tuple[Mapping[str, object], ...]
    limits: Limits
    caps: Limits
    determinism: Determinism
    splits: Mapping[Split, SplitInfo]
    split_epoch: int
    step_deadline_seconds: float
