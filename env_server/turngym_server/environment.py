"""What an environment is: one class in one file, registered with `@register`.

An environment knows one episode. It knows nothing of sessions, splits, seeds, turns, limits that end an episode, or
the network: the session counts turns and actions, truncates, and hands in the randomness. The smallest one:

    class CoinOptions(Options):
        heads: int = Field(default=1, ge=1, description="Times heads must be called right.")

    @register(id="coin", version="1.0", family="coin", summary="Call the coin.", options=CoinOptions,
              limits=Limits(max_turns=3, max_actions=3, max_actions_per_turn=1))
    class Coin(Environment[CoinOptions]):
        @classmethod
        def instructions(cls, options, limits): return "Answer Heads or Tails."
        def reset(self, level): ...
        def step(self, action, noise): ...
        def world(self): return b""
        def legal_actions(self): return ("Heads", "Tails")
"""

from __future__ import annotations

import copy
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from turngym_server.rng import Rng


class Options(BaseModel):
    """Base of option models: frozen, and an unknown key is an error.

    Validators run in the server, in a thread, which has some seconds for them: they must be quick, raise ValueError
    only, and keep nothing from other threads, as a regular expression of `re` that backtracks would; those of
    `Field(pattern=…)` do not backtrack.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class NoOperatorOptions(Options):
    """What `--option` may set for an environment that has nothing for the operator to set."""


class ActionKind(enum.Enum):
    TEXT = "text"
    TOOL_CALL = "tool_call"


class Determinism(enum.Enum):
    """BYTES: the same version, options, seeds and actions give the same bytes anywhere. NONE: no promise, no replay."""

    BYTES = "bytes"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of an episode: turns, actions in all, actions a turn, and seconds (None: no wall-clock limit)."""

    max_turns: int
    max_actions: int
    max_actions_per_turn: int
    wall_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of an episode's limits at some state, for oracles and exact values."""

    turns: int
    actions: int
    actions_per_turn: int

    @property
    def reachable_actions(self) -> int:
        """The most actions that can still be run."""
        return min(self.actions, self.turns * self.actions_per_turn)


def _nothing() -> dict[str, float]:
    # `dict[str, float]()` takes eight times as long, on the path of every step.
    return {}


@dataclass(frozen=True, slots=True)
class Start:
    """A fresh episode.

    Attributes:
        observation: what the agent reads first.
        metrics: the environment's own measures; neither reward nor digest depends on them.
        limits: this instance's default limits, where they differ from the spec's (a level file's).
    """

    observation: str
    metrics: Mapping[str, float] = field(default_factory=_nothing)
    limits: Limits | None = None


@dataclass(slots=True)  # Not frozen, as one is made for every action and that takes three times as long.
class ActionResult:
    """What one action did.

    Attributes:
        observation: what the agent would read if its turn ended here.
        reward: finite.
        terminated: the environment reached an end of its own.
        success: whether the task is accomplished as things stand; None: unknown.
        valid: False when the action could not be parsed or is illegal. Such an action is play: it costs what a step
            costs, the observation says what was wrong, and the rest of the turn is dropped.
        reward_components: named parts of the reward.
        metrics: as in `Start`.
    """

    observation: str
    reward: float
    terminated: bool = False
    success: bool | None = None
    valid: bool = True
    reward_components: Mapping[str, float] = field(default_factory=_nothing)
    metrics: Mapping[str, float] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Levels that an operator gave in place of a generator (`--option levels=FILE`), in file order.

    Attributes:
        worlds: `worlds[i]` is what `world()` returns after `load(levels[i])`.
        options: names of the episode's options that matter to these levels too. The others belong to the generator and
            are refused.
    """

    levels: tuple[str, ...]
    worlds: tuple[bytes, ...]
    options: frozenset[str] = frozenset()


class NoInstance(Exception):
    """Raised by `reset` where the options leave no instance, or none within reasonable work. Says what to change."""


OptionsT = TypeVar("OptionsT", bound=Options)


class Environment(ABC, Generic[OptionsT]):
    """One episode. Everything it does is a function of its options, the random words handed in, and the actions.

    The state must survive `copy.deepcopy`, which is what a fork is; override `fork` where it would not.
    """

    def __init__(self, options: OptionsT) -> None:
        self.options = options

    @classmethod
    @abstractmethod
    def instructions(cls, options: OptionsT, limits: Limits) -> str:
        """All an agent needs to be told to play well: goal, symbols, legal actions, rewards, limits.

        How an answer is wrapped (`<answer>`) is the agent's affair and is not said here. Runs in the server even where
        instances have processes of their own, once for each options and limits, so it must be quick. At most 256 KiB.
        """

    @abstractmethod
    def reset(self, level: Rng) -> Start:
        """Draws an instance. Called again with another stream when the instance is of another split.

        Raises:
            NoInstance: the options leave none.
        """

    @abstractmethod
    def step(self, action: str, noise: Rng) -> ActionResult:
        """Plays one action; never called after the end. `noise` is this action's own."""

    @abstractmethod
    def world(self) -> bytes:
        """Canonical bytes of what neither play nor presentation can change about the instance. Decides its split."""

    @abstractmethod
    def legal_actions(self) -> Sequence[str] | None:
        """Legal actions now, in a fixed order; None: an open set (free text)."""

    def oracle(self, left: Left) -> Sequence[str] | None:
        """A best next turn, at most `left.actions_per_turn` actions; empty: no way on; None: there is no oracle."""
        return None

    def explain(self, left: Left) -> str:
        """The reasoning behind `oracle(left)`, as short as an agent might think it."""
        return ""

    def ceiling(self, left: Left) -> float | None:
        """Exact success probability of the best possible player from here; None: not known exactly."""
        return None

    def floor(self, left: Left) -> float | None:
        """Exact success probability from here of a player that fills every turn with uniform legal actions."""
        return None

    @classmethod
    def world_count(cls, options: OptionsT) -> int | None:
        """Distinct worlds under these options where that is known by construction; None: it has to be counted.

        Runs in the server, as validators of the options do.
        """
        return None

    @classmethod
    def open_catalogue(cls, operator: Options) -> Catalogue | None:
        """Reads what the operator's options name, once, at server start. Raises ValueError naming file and line."""
        return None

    def load(self, level: str) -> Start:
        """Starts a level of the catalogue instead of drawing one."""
        raise NotImplementedError(f"{type(self).__name__} has no catalogue")

    def fork(self) -> Self:
        """An independent copy of the episode as it stands."""
        return copy.deepcopy(self)

    def close(self) -> None:
        """Frees what the episode holds outside its own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Each instance lives in a process of its own, which is killed where it misses the step deadline.

    For what may hang or crash, and for what cannot live in a server's process, such as a Java virtual machine. The
    class is imported by the server too, for what it knows without an instance; only its instances are apart.

    Attributes:
        memory_mebibytes: address space of a process; beyond it Python raises MemoryError. None: unbounded. Java needs
            far more address space than memory.
        cpu_seconds: processor time of a process, which is killed after it. None: unbounded.
    """

    memory_mebibytes: int | None = None
    cpu_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What the registry knows of an environment.

    Attributes:
        id: name that clients ask for.
        version: changes whenever the same seeds and actions would give other bytes.
        family: shared by all ids and versions that make the same kind of world; keys the splits.
        summary: one sentence.
        environment: the class.
        options: the episode's options, set by clients.
        operator_options: the operator's options, set by `--option`; clients cannot name them.
        limits: default limits. caps: the most that clients may ask for.
        action_separator: separates several actions in an agent's text; "" where a turn is one action.
        split_epoch: grows when a rule change moves instances between splits.
        inline: a step takes microseconds and may run on the event loop; False: it runs in a thread.
        step_deadline: seconds after which a turn has failed: on the clock, not of a processor, so leave room for busy
            machines. A turn of an environment that is inline is not cut off.
        isolation: its instances live in processes of their own, whatever `inline` says; None: in the server's.
    """

    id: str
    version: str
    family: str
    summary: str
    environment: type[Environment[Any]]
    options: type[Options]
    operator_options: type[Options]
    limits: Limits
    caps: Limits
    action_separator: str
    action_kind: ActionKind
    tools: tuple[str, ...]
    determinism: Determinism
    split_epoch: int
    inline: bool
    step_deadline: float
    isolation: Isolation | None = None


DEFAULT_CAPS = Limits(max_turns=1_000, max_actions=10_000, max_actions_per_turn=1_000, wall_seconds=86_400.0)

REGISTRY: dict[str, EnvironmentSpec] = {}
"""Every environment registered in this process, by id."""

LEVELS_OPTION: Final = "levels"
"""Names the catalogue in the resolved options of the episodes that are played from it; no episode option of its own."""

EnvironmentT = TypeVar("EnvironmentT", bound=type[Environment[Any]])


def register(
    *,
    id: str,
    version: str,
    family: str,
    summary: str,
    options: type[Options],
    limits: Limits,
    operator_options: type[Options] = NoOperatorOptions,
    caps: Limits = DEFAULT_CAPS,
    action_separator: str = "||",
    action_kind: ActionKind = ActionKind.TEXT,
    tools: tuple[str, ...] = (),
    determinism: Determinism = Determinism.BYTES,
    split_epoch: int = 1,
    inline: bool = False,
    step_deadline: float = 30.0,
    isolation: Isolation | None = None,
) -> Callable[[EnvironmentT], EnvironmentT]:
    """Adds an environment class to the registry; see `EnvironmentSpec` for the arguments.

    May be called on one class several times, for ids that differ in their options' defaults.

    Raises:
        ValueError: the id is taken by another class, or an option has a name that is not its to take.
    """
    if LEVELS_OPTION in options.model_fields:
        raise ValueError(f"{id}: the option {LEVELS_OPTION!r} is the operator's; give the episode's another name")

    def add(environment: EnvironmentT) -> EnvironmentT:
        if (taken := REGISTRY.get(id)) is not None and taken.environment.__qualname__ != environment.__qualname__:
            raise ValueError(f"environment id {id!r} is already registered by {taken.environment.__qualname__}")
        REGISTRY[id] = EnvironmentSpec(
            id=id,
            version=version,
            family=family,
            summary=summary,
            environment=environment,
            options=options,
            operator_options=operator_options,
            limits=limits,
            caps=caps,
            action_separator=action_separator,
            action_kind=action_kind,
            tools=tools,
            determinism=determinism,
            split_epoch=split_epoch,
            inline=inline,
            step_deadline=step_deadline,
            isolation=isolation,
        )
        return environment

    return add
