"""What is known of an episode: all it takes to tell it apart from others and to play it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from turngym.v1 import environment_pb2 as pb
from turngym_client.messages import (
    SPLIT_TO_PB,
    limits_from_pb,
    limits_to_pb,
    noise_from_pb,
    noise_to_pb,
    split_from_pb,
    transition_from_pb,
)
from turngym_client.types import Limits, NoiseSegment, Split, Transition


@dataclass(slots=True, kw_only=True)
class Record:
    """An episode so far. Options and limits are the resolved ones, so that a replay asks for exactly these.

    Attributes:
        sealed_seed: of a sealed episode, whose level seed is None and whose noise, instance and world are unknown.
    """

    environment_id: str
    version: str
    options_json: str
    limits: Limits
    split: Split
    split_epoch: int
    level_seed: int | None
    sealed_seed: bytes | None
    noise: tuple[NoiseSegment, ...]
    instance_id: str
    world_id: str
    instructions: str
    action_separator: str
    state: Transition
    turns: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])

    def describe(self) -> str:
        """Names the episode in an error message."""
        noise = ", ".join(f"{segment.noise_seed} from step {segment.from_step}" for segment in self.noise)
        seeds = "sealed seed" if self.sealed_seed else f"level seed {self.level_seed}, noise seed {noise}"
        return (
            f"{self.environment_id} {self.version}, split {self.split.value}, {seeds}, {len(self.turns)} turns played"
        )


def record_of(started: pb.Started, turns: list[tuple[str, ...]], sealed_seed: bytes | None = None) -> Record:
    """The record of a session that a server says it has started.

    Args:
        turns: those that lead to its state.
        sealed_seed: what it was started from, where that was sealed.
    """
    return Record(
        environment_id=started.environment_id,
        version=started.version,
        options_json=started.options_json,
        limits=limits_from_pb(started.limits),
        split=split_from_pb(started.split),
        split_epoch=started.split_epoch,
        level_seed=None if sealed_seed else started.level_seed,
        sealed_seed=sealed_seed,
        noise=noise_from_pb(started.noise),
        instance_id=started.instance_id,
        world_id=started.world_id,
        instructions=started.instructions,
        action_separator=started.action_separator,
        state=transition_from_pb(started.state),
        turns=turns,
    )


def resume_item(record: Record, request_id: bytes) -> pb.ResetItem:
    """Asks for the episode to be played again up to where it stands."""
    item = pb.ResetItem(
        request_id=request_id,
        environment_id=record.environment_id,
        expected_version=record.version,
        options_json=record.options_json,
        limits=limits_to_pb(record.limits),
        split=SPLIT_TO_PB[record.split],
        resume=pb.Resume(
            turns=[pb.Actions(actions=turn) for turn in record.turns],
            noise=noise_to_pb(record.noise),
            digest=record.state.digest,
        ),
    )
    if record.sealed_seed is not None:
        item.sealed_seed = record.sealed_seed
    elif record.level_seed is not None:
        item.level_seed = record.level_seed
    return item


class EpisodeFacts:
    """The facts of an episode, which its sync and async forms share."""

    _record: Record

    @property
    def environment_id(self) -> str:
        return self._record.environment_id

    @property
    def version(self) -> str:
        """The environment's version."""
        return self._record.version

    @property
    def options_json(self) -> str:
        """Resolved options, canonical JSON: part of the episode's identity."""
        return self._record.options_json

    @property
    def limits(self) -> Limits:
        """Resolved limits."""
        return self._record.limits

    @property
    def split(self) -> Split:
        return self._record.split

    @property
    def split_epoch(self) -> int:
        return self._record.split_epoch

    @property
    def level_seed(self) -> int | None:
        """None where it is sealed."""
        return self._record.level_seed

    @property
    def noise(self) -> tuple[NoiseSegment, ...]:
        """Noise seeds in the order in which they begin; a fork may have begun a new one. Empty where sealed."""
        return self._record.noise

    @property
    def instance_id(self) -> str:
        """Names the instance: the same options and level give the same. Empty where sealed."""
        return self._record.instance_id

    @property
    def world_id(self) -> str:
        """Names the world that the split is decided by. Empty where sealed."""
        return self._record.world_id

    @property
    def instructions(self) -> str:
        """What an agent has to be told."""
        return self._record.instructions

    @property
    def action_separator(self) -> str:
        """Separates several actions in an agent's text; "": one action a turn."""
        return self._record.action_separator

    @property
    def state(self) -> Transition:
        """The latest transition: where the episode stands."""
        return self._record.state

    @property
    def turns(self) -> tuple[tuple[str, ...], ...]:
        """The actions of every turn played so far."""
        return tuple(self._record.turns)

    @property
    def step_index(self) -> int:
        """Turns played so far."""
        return len(self._record.turns)

    @property
    def done(self) -> bool:
        """The episode has ended."""
        return self._record.state.done
