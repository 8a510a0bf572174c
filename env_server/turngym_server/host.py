"""Starts and resumes episodes of one environment: options, limits, splits, seeds, instances.

Knows nothing of sessions, time or the network. Everything here may be called from any thread.
"""

import contextlib
import difflib
import functools
import hashlib
import json
import logging
import math
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from turngym.sealed import Seal
from turngym_server.access.roles import Role
from turngym_server.environment import (
    LEVELS_OPTION,
    Catalogue,
    Environment,
    EnvironmentSpec,
    Limits,
    NoInstance,
    Options,
    Start,
)
from turngym_server.errors import ENVIRONMENT_ERRORS, ItemError, Reason, exception_text
from turngym_server.processes.isolation import Isolator
from turngym_server.reference import (
    LEAST_HELD_OUT_WORLDS,
    NOTHING,
    Score,
    WorldCount,
    read_reference,
)
from turngym_server.rng import LEVEL_STREAM, Rng
from turngym_server.sessions.digest import canonical_json, first_digest
from turngym_server.sessions.episode import (
    Episode,
    NoiseSegment,
    Turn,
    check_returned,
    checked_instructions,
    checked_observation,
    finite_metrics,
)
from turngym_server.splits import HELD_OUT_SHARE, Split, split_of, world_id
from turngym_server.watching.logs import Event

log: Final = logging.getLogger(__name__)

MAX_DRAWS: Final = 1_000
"""Draws of an instance until one of the asked split comes."""
MAX_OPTIONS_BYTES: Final = 64 * 1024
MAX_OPTIONS_DEPTH: Final = 32
"""Objects and arrays within each other, the options themselves included. Whatever reads JSON does so by recursion."""
MAX_OPTIONS: Final = 256
"""No environment has as many; each unknown one would be an error of its own to write."""
MAX_NAME_CHARACTERS: Final = 100
"""Longer names are like no other: comparing takes time with their length, on the event loop."""

_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[][{}]', re.DOTALL)
"""Of a JSON text its brackets, and its strings, whose own are none. One that never ends is taken as a whole too."""
_LIMIT_NAMES: Final = ("max_turns", "max_actions", "max_actions_per_turn")


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """An episode's options, and the canonical JSON that names them.

    Attributes:
        divides: whether there are enough worlds under them to divide these into splits.
    """

    json: str
    model: Options = field(compare=False)
    divides: bool = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedLimits:
    """Limits as a client asks for them; 0: the instance's or the environment's default."""

    max_turns: int = 0
    max_actions: int = 0
    max_actions_per_turn: int = 0
    wall_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An episode to start.

    Attributes:
        noise: at least one segment; the first from step 1, the others from a step that `turns` leads up to.
        turns: actions of each turn to play again.
        digest: what playing them must lead to; None where nothing is resumed.
        seal: what stands for the seeds of a sealed episode; None: they are no secret.
        withheld_from: the caller's role, where that never meets a held-out world; None: it may.
        drawn: nobody has chosen the level seed, so that another will do where it comes to a withheld world.
    """

    options: ResolvedOptions
    limits: RequestedLimits
    split: Split
    level_seed: int
    noise: tuple[NoiseSegment, ...]
    turns: tuple[tuple[str, ...], ...] = ()
    digest: bytes | None = None
    seal: Seal | None = None
    withheld_from: Role | None = None
    drawn: bool = False

    @property
    def level(self) -> str:
        """Names the level in errors."""
        return f"level seed {self.level_seed}" if self.seal is None else f"sealed seed {self.seal.name}"

    @property
    def level_identity(self) -> dict[str, str]:
        """What stands for the level in the digest."""
        return {"level_seed": str(self.level_seed)} if self.seal is None else {"sealed": self.seal.digest_salt}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEpisode:
    """An episode that stands where its plan wanted it, with the last turn's result (or the reset's).

    Attributes:
        level_seed: the plan's, or the one that was drawn in its place.
    """

    episode: Episode
    level_seed: int
    state: Turn
    last_actions: tuple[str, ...] | None
    instance_id: str
    world_id: str
    instructions: str


class EnvironmentHost:
    """One environment as an operator serves it.

    Args:
        spec: from the registry.
        operator: what `--option` set, by name.

    Attributes:
        options_schema: JSON Schema of what clients may ask for.
        defaults: the options of an episode that asks for none.

    Raises:
        ValueError: an operator option is unknown or malformed, or what it names cannot be read; or no client could
            play the environment, as its own options have no defaults or no schema.
    """

    def __init__(self, spec: EnvironmentSpec, operator: Mapping[str, object] | None = None) -> None:
        # What has a process of its own is waited for, so not on the event loop.
        self.spec = spec if spec.isolation is None else replace(spec, inline=False)
        self._isolator = None if spec.isolation is None else Isolator(spec)
        try:
            options = spec.operator_options.model_validate(dict(operator or {}))
        except ValidationError as error:
            words = _in_words(error.errors()[0], spec.operator_options.model_fields)
            raise ValueError(f"{spec.id}: {words}") from error
        self._catalogue = spec.environment.open_catalogue(options)
        self._levels_id = _levels_id(self._catalogue) if self._catalogue else ""
        self._reference = NOTHING if self._catalogue else read_reference(spec)
        self._catalogue_splits = _catalogue_splits(spec, self._catalogue) if self._catalogue else {}
        self._spared_levels = [
            level for split in (Split.TRAIN, Split.VALIDATION) for level in self._catalogue_splits.get(split, ())
        ]
        # Bound here, so that the cache lives as long as its host.
        self.instructions = functools.lru_cache(maxsize=256)(self._instructions)
        self.options_schema = self._options_schema()
        try:
            # Twice, as defaults are not held to what clients' values are.
            self.defaults = self.resolve_options(self.resolve_options("").json)
        except ItemError as error:
            raise ValueError(f"{spec.id}: its options need defaults that can be had: {error.message}") from error

    def open(self) -> None:
        """Starts what the instances need beside themselves. Raises CannotIsolate where it cannot be had."""
        if self._isolator is not None:
            self._isolator.open()

    def close(self) -> None:
        """Ends what `open` started, and with it isolated instances."""
        if self._isolator is not None:
            self._isolator.close()

    def resolve_options(self, options_json: str) -> ResolvedOptions:
        """Options from a client's JSON object; "" means all defaults.

        Runs the environment's own code, which may take long: not on an event loop.

        Raises:
            ItemError: INVALID_OPTIONS, or ENVIRONMENT_FAILED where a validator raises what pydantic does not expect,
                or the worlds cannot be counted.
        """
        if (size := len(options_json.encode())) > MAX_OPTIONS_BYTES:
            raise _invalid_options(f"options of {size} bytes; expected at most {MAX_OPTIONS_BYTES}")
        given = _read_object(options_json or "{}")
        if len(given) > MAX_OPTIONS:
            raise _invalid_options(f"{len(given)} options of {self.spec.id}; expected at most {MAX_OPTIONS}")
        if self._catalogue is not None:
            self._take_levels_option(given)
            self._refuse_without_effect(given, self._catalogue)
        try:
            # As JSON, so that a strict model takes what JSON writes as text: a path, an enum's value.
            model = self.spec.options.model_validate_json(json.dumps(given, allow_nan=False), strict=True)
            resolved = canonical_json(self._named(model))
            resolved.encode()
        except ValidationError as error:
            raise self._option_error(error) from error
        except ValueError as error:
            raise _invalid_options(f"options of {self.spec.id} cannot be written as JSON in UTF-8: {error}") from error
        except ENVIRONMENT_ERRORS as error:
            raise self._failed("reading options; a validator must raise ValueError", error) from error
        return ResolvedOptions(resolved, model, self._divides(model, resolved))

    def _failed(self, what: str, error: BaseException) -> ItemError:
        log.error("%s failed in %s", self.spec.id, what, exc_info=error, extra=Event(environment=self.spec.id))
        return ItemError(Reason.ENVIRONMENT_FAILED, f"{self.spec.id} failed in {what}: {exception_text(error)}")

    def _option_error(self, error: ValidationError) -> ItemError:
        faults = error.errors(include_url=False)
        unknown = [str(fault["loc"][0]) for fault in faults if fault["type"] == "extra_forbidden"]
        if unknown and unknown[0] in self.spec.operator_options.model_fields:
            return _invalid_options(f"{unknown[0]!r} of {self.spec.id} is set by the server's operator, not by clients")
        known = self.spec.options.model_fields if self._catalogue is None else self._catalogue.options
        return _invalid_options(f"{self.spec.id}: {_in_words(faults[0], known)}")

    def _take_levels_option(self, given: dict[str, object]) -> None:
        """Removes the option that names the catalogue, which resolved options hold."""
        asked = given.pop(LEVELS_OPTION, self._levels_id)
        if asked != self._levels_id:
            raise _invalid_options(
                f"{LEVELS_OPTION} {str(asked)[:100]!r} of {self.spec.id}: this server serves levels "
                f"{self._levels_id!r}; leave the option out, or ask a server that was given those levels"
            )

    def _refuse_without_effect(self, given: Mapping[str, object], catalogue: Catalogue) -> None:
        for name in given:
            if name in self.spec.options.model_fields and name not in catalogue.options:
                raise _invalid_options(
                    f"option {name!r} of {self.spec.id} has no effect: this server plays the levels of its operator's "
                    "file and generates none; leave it out. "
                    f"With effect: {', '.join(sorted(catalogue.options)) or 'none'}"
                )

    def _named(self, model: Options) -> dict[str, object]:
        """The options that name an episode: all, or those with an effect on a catalogue's levels, and the catalogue."""
        options = model.model_dump(mode="json")
        if self._catalogue is None:
            return options
        return {LEVELS_OPTION: self._levels_id, **{name: options[name] for name in self._catalogue.options}}

    def _options_schema(self) -> Mapping[str, object]:
        """JSON Schema of what clients may ask for. Raises ValueError where there is none."""
        try:
            schema = self.spec.options.model_json_schema()
        except Exception as error:  # An option's type may raise what it likes.
            raise ValueError(f"{self.spec.id}: its options have no JSON Schema: {exception_text(error)}") from error
        if self._catalogue is not None:
            known = schema["properties"]
            levels = {"const": self._levels_id, "description": "The levels that this server plays."}
            schema["properties"] = {LEVELS_OPTION: levels, **{name: known[name] for name in self._catalogue.options}}
        return schema

    def _instructions(self, options: ResolvedOptions, limits: Limits) -> str:
        """What an agent has to be told.

        Raises:
            EnvironmentFault: it cannot be sent.
            Exception: whatever the environment raises.
        """
        return checked_instructions(self.spec.environment.instructions(options.model, limits))

    def resolve_limits(self, requested: RequestedLimits, default: Limits | None = None) -> Limits:
        """Limits with defaults filled in, from `default` or else the spec.

        Raises:
            ItemError: INVALID_ITEM, where one is over its cap, negative or no number.
        """
        default = default or self.spec.limits
        caps = self.spec.caps
        for name in _LIMIT_NAMES:
            asked, cap = getattr(requested, name), getattr(caps, name)
            if asked > cap:
                raise _invalid_item(f"{name} {asked} of {self.spec.id}: expected at most {cap}")
        seconds = requested.wall_seconds
        if not math.isfinite(seconds) or seconds < 0 or (caps.wall_seconds is not None and seconds > caps.wall_seconds):
            raise _invalid_item(
                f"wall_seconds {seconds} of {self.spec.id}: expected 0 (the default) to {caps.wall_seconds}"
            )
        return Limits(
            max_turns=requested.max_turns or default.max_turns,
            max_actions=requested.max_actions or default.max_actions,
            max_actions_per_turn=requested.max_actions_per_turn or default.max_actions_per_turn,
            wall_seconds=seconds or default.wall_seconds,
        )

    @staticmethod
    def splits(options: ResolvedOptions, offered: Collection[Split]) -> tuple[Split, ...]:
        """Splits served under these options: of those that the operator offers, or `all` alone.

        Where there are too few worlds to divide, `all` is the only split and is served whatever is offered.
        """
        if not options.divides:
            return (Split.ALL,)
        return tuple(split for split in Split if split in offered)

    def world_count(self, options_json: str, split: Split) -> WorldCount | None:
        """Distinct worlds of a split under resolved options; None: never counted."""
        if self._catalogue is None:
            return self._reference.worlds.get((options_json, split))
        worlds = {self._catalogue.worlds[level] for level in self._catalogue_splits[split]}
        return WorldCount(worlds=len(worlds), exact=True)

    def scores(self, options_json: str, limits: Limits, split: Split) -> tuple[Score | None, Score | None]:
        """(floor, ceiling) for exactly these options, limits and split; None: not measured."""
        return self._reference.scores.get((options_json, limits, split), (None, None))

    def _divides(self, options: Options, options_json: str) -> bool:
        """Whether there are enough worlds under resolved options to divide them into splits."""
        if self._catalogue is not None:
            held_out = self.world_count(options_json, Split.HELD_OUT)
            return held_out is not None and held_out.worlds >= LEAST_HELD_OUT_WORLDS
        try:
            worlds = self.spec.environment.world_count(options)
        except ENVIRONMENT_ERRORS as error:
            raise self._failed("world_count", error) from error
        if worlds is not None:
            return worlds * HELD_OUT_SHARE >= LEAST_HELD_OUT_WORLDS
        return self._reference.divides(options_json)

    def holds_out(self) -> bool:
        """Whether worlds of the family are held out somewhere, though too few may be there to divide."""
        return self._catalogue is not None or self.defaults.divides

    def draw_level_seed(self, split: Split, withheld_from: Role | None = None) -> int:
        """A level seed nobody has chosen.

        Args:
            withheld_from: as in `Plan`; a catalogue's held-out worlds are left out where it has others.

        Raises:
            ItemError: NO_SUCH_INSTANCE, where the catalogue has no level of the split.
        """
        if self._catalogue is None:
            return secrets.randbits(64)
        levels = self._catalogue_splits[split]
        if not levels:
            raise self._past_the_end("any level", split)
        if withheld_from and split is Split.ALL and self._spared_levels:
            return secrets.choice(self._spared_levels)
        return secrets.randbelow(len(levels))

    def start(self, plan: Plan, now: float) -> StartedEpisode:
        """Starts an episode and plays again what the plan says.

        Args:
            now: when wall-clock seconds are counted from.

        Raises:
            ItemError: NO_SUCH_INSTANCE, NOT_PERMITTED or DIGEST_MISMATCH.
            Exception: whatever the environment raises.
        """
        make = self.spec.environment if self._isolator is None else self._isolator.make
        environment = make(plan.options.model)
        try:
            return self._start(environment, plan, now)
        except BaseException:
            with contextlib.suppress(Exception):
                environment.close()
            raise

    def _start(self, environment: Environment[Any], plan: Plan, now: float) -> StartedEpisode:
        plan, start, world = self._permitted(environment, plan)
        limits = self.resolve_limits(plan.limits, start.limits)
        instructions = self.instructions(plan.options, limits)
        observation = checked_observation(start.observation)
        digest = first_digest(
            canonical_json(
                {
                    "environment": self.spec.id,
                    "version": self.spec.version,
                    "split_epoch": self.spec.split_epoch,
                    "split": plan.split.value,
                    "options": json.loads(plan.options.json),
                    "limits": asdict(limits),
                    **plan.level_identity,
                }
            ),
            plan.noise[0].noise_seed,
            observation,
        )
        episode = Episode(environment, limits=limits, noise=plan.noise[0], digest=digest, started=now)
        state = Turn(observation, digest, metrics=finite_metrics(start.metrics))
        if plan.digest is not None:
            state = self._replay(episode, state, plan, plan.digest, now)
        return StartedEpisode(
            episode=episode,
            level_seed=plan.level_seed,
            state=state,
            last_actions=plan.turns[-1] if plan.turns else None,
            instance_id=self._instance_id(plan.options, observation, world),
            world_id=world_id(self.spec.family, self.spec.split_epoch, world),
            instructions=instructions,
        )

    def _permitted(self, environment: Environment[Any], plan: Plan) -> tuple[Plan, Start, bytes]:
        """`_instance` of the plan, or of one with another seed where that was drawn and comes to a withheld world."""
        start, world = self._instance(environment, plan)
        for _ in range(MAX_DRAWS if plan.drawn else 0):
            if not self._is_withheld(plan, world):
                break
            plan = replace(plan, level_seed=self.draw_level_seed(plan.split, plan.withheld_from))
            start, world = self._instance(environment, plan)
        if plan.withheld_from and self._is_withheld(plan, world):
            role = plan.withheld_from.value
            what = f"each of {MAX_DRAWS} levels drawn" if plan.drawn else plan.level
            raise ItemError(
                Reason.NOT_PERMITTED,
                f"{what} of {self.spec.id} is a held-out world, which role {role!r} never meets; "
                f"ask for {'other options' if plan.drawn else 'another level seed'}",
                metadata={"role": role},
            )
        return plan, start, world

    def _is_withheld(self, plan: Plan, world: bytes) -> bool:
        return plan.withheld_from is not None and self._split_of(world) is Split.HELD_OUT and self.holds_out()

    def _instance(self, environment: Environment[Any], plan: Plan) -> tuple[Start, bytes]:
        """Leaves `environment` at the instance that the plan's seed names, and returns its start and world."""
        split = plan.split
        if self._catalogue is not None:
            levels = self._catalogue_splits[split]
            if plan.level_seed >= len(levels):
                raise self._past_the_end(plan.level, split)
            level = levels[plan.level_seed]
            start = environment.load(self._catalogue.levels[level])
            check_returned(environment, "load", start, Start)
            return start, self._catalogue.worlds[level]
        for draw in range(MAX_DRAWS):
            try:
                start = environment.reset(Rng(plan.level_seed, LEVEL_STREAM + draw))
            except NoInstance as error:
                # Of a sealed seed, what the environment says may quote the level.
                why = str(error) if plan.seal is None else f"no instance for {plan.level}"
                raise ItemError(Reason.NO_SUCH_INSTANCE, f"{self.spec.id}: {why}") from None
            check_returned(environment, "reset", start, Start)
            world = environment.world()
            if split is Split.ALL or self._split_of(world) is split:
                return start, world
        raise ItemError(
            Reason.NO_SUCH_INSTANCE,
            f"{self.spec.id} drew no instance of split {split.value} in {MAX_DRAWS} draws from {plan.level}: "
            "these options leave too few worlds; ask for split all or other options",
        )

    def _split_of(self, world: bytes) -> Split:
        return split_of(self.spec.family, self.spec.split_epoch, world)

    def _past_the_end(self, level: str, split: Split) -> ItemError:
        count = len(self._catalogue_splits[split])
        return ItemError(
            Reason.NO_SUCH_INSTANCE,
            f"{level} of {self.spec.id}: the operator's levels hold {count} of split {split.value}, "
            f"seeds {f'0 to {count - 1}' if count else 'none'}",
            metadata={"count": str(count)},
        )

    def _replay(self, episode: Episode, state: Turn, plan: Plan, digest: bytes, now: float) -> Turn:
        """Plays the plan's turns, and checks that they lead where they led before."""
        segments = list(plan.noise[1:])
        for step_index, actions in enumerate(plan.turns, start=1):
            _enter_noise(episode, segments, step_index)
            if episode.ended:
                raise ItemError(
                    Reason.DIGEST_MISMATCH,
                    f"the episode of {self.spec.id} ended after turn {step_index - 1}, but {len(plan.turns)} were sent",
                )
            state = episode.play(actions, now)
        _enter_noise(episode, segments, len(plan.turns) + 1)
        state.digest = episode.digest
        if episode.digest != digest:
            raise ItemError(
                Reason.DIGEST_MISMATCH,
                f"replaying {len(plan.turns)} turns of {self.spec.id} {self.spec.version} led to digest "
                f"{episode.digest.hex()}, not {digest.hex()}: seeds, options, limits or actions differ, "
                "or the environment changed without a new version",
            )
        return state

    def _instance_id(self, options: ResolvedOptions, observation: str, world: bytes) -> str:
        named = canonical_json(
            {
                "environment": self.spec.id,
                "version": self.spec.version,
                "options": json.loads(options.json),
                "level": observation + world.hex(),
            }
        )
        return hashlib.sha256(b"turngym-instance/1\0" + named.encode()).digest()[:16].hex()


def nearest(name: str, known: Collection[str]) -> str:
    """The known name most like `name`, or ""."""
    if len(name) > MAX_NAME_CHARACTERS:
        return ""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.4)), "")


def did_you_mean(close: str) -> str:
    """Ends the clause of an error about an unknown name: `; did you mean 'it'?`, or a full stop where nothing is."""
    return f"; did you mean {close!r}?" if close else "."


def _read_object(text: str) -> dict[str, object]:
    """The JSON object in a client's text. Raises ItemError (INVALID_OPTIONS)."""
    if _is_deeper(text, MAX_OPTIONS_DEPTH):
        raise _invalid_options(
            f"options nested more than {MAX_OPTIONS_DEPTH} deep; expected at most {MAX_OPTIONS_DEPTH}"
        )
    try:
        given: object = json.loads(text, parse_constant=_no_constant, object_pairs_hook=distinct)
    except ValueError as error:
        raise _invalid_options(f"options are no JSON: {error}") from error
    if not isinstance(given, dict):
        raise _invalid_options(f"options must be a JSON object, not {text[:100]}")
    return cast("dict[str, object]", given)


def _is_deeper(text: str, most: int) -> bool:
    """Whether objects and arrays of a JSON text are nested more than `most` deep."""
    depth = 0
    for bracket in _BRACKETS.finditer(text):
        match bracket[0]:
            case "{" | "[":
                depth += 1
                if depth > most:
                    return True
            case "}" | "]":
                depth -= 1
            case _:
                pass  # A string, whatever it holds.
    return False


def _levels_id(catalogue: Catalogue) -> str:
    """16 hexadecimal digits that name the levels of a catalogue and their order."""
    return hashlib.sha256(b"turngym-levels/1\0" + canonical_json(catalogue.levels).encode()).hexdigest()[:16]


def _enter_noise(episode: Episode, segments: list[NoiseSegment], step_index: int) -> None:
    """Sets the noise of the segments that begin at `step_index`, the next turn to be played."""
    while segments and segments[0].from_step == step_index:
        episode.change_noise(segments.pop(0).noise_seed)


def _catalogue_splits(spec: EnvironmentSpec, catalogue: Catalogue) -> dict[Split, Sequence[int]]:
    """Indices of the levels of each split, in file order."""
    splits = [split_of(spec.family, spec.split_epoch, world) for world in catalogue.worlds]
    return {split: [index for index, own in enumerate(splits) if split is Split.ALL or own is split] for split in Split}


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def distinct(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """An object's members; JSON leaves open which of two with one name counts, so neither does."""
    members: dict[str, object] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{name[:100]!r} is set twice")
        members[name] = value
    return members


def _in_words(fault: ErrorDetails, known: Collection[str]) -> str:
    """What is wrong with a bad option, in one line."""
    name = ".".join(str(part) for part in fault["loc"]) or "options"
    if fault["type"] != "extra_forbidden":
        return f"option {name!r}: {fault['msg']}; got {str(fault['input'])[:100]!r}"
    return f"unknown option {name!r}{did_you_mean(nearest(name, known))} Known: {', '.join(sorted(known)) or 'none'}."


def _invalid_options(message: str) -> ItemError:
    return ItemError(Reason.INVALID_OPTIONS, message)


def _invalid_item(message: str) -> ItemError:
    return ItemError(Reason.INVALID_ITEM, message)
