"""What every agent of a comparison is made to play, and which levels that comes to on a server.

Knows the client's requests, and nothing of agents or of how episodes are played.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from turngym_client import (
    Advice,
    Client,
    Episode,
    EpisodeRequest,
    Limits,
    NoOracle,
    NoSuchInstance,
    Split,
    TurngymError,
)
from turngym_leaderboard import seeds

DRAWS_WITHOUT_A_NEW_WORLD: Final = 2_000
"""The walk over levels ends after so many draws in a row that brought no new world."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an agent that samples is to sample. Greedy: always the most likely token, whatever the temperature."""

    temperature: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature {self.temperature:g} must be over 0 and finite; "
                "greedy (--greedy) takes the most likely tokens"
            )

    def __str__(self) -> str:
        return "greedy" if self.greedy else f"T = {self.temperature:g}"


SAMPLED: Final = Decoding()
"""As it comes: temperature 1."""

GRID_LIMITS: Final = Limits(max_turns=5, max_actions=10, max_actions_per_turn=5)
"""The limits under which the grids are scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The rules of one comparison. The defaults are the reference protocol of the grids.

    Attributes:
        environment: id on the server.
        version: the environment's version that is demanded; "": whichever is served.
        options: the environment's options; unnamed ones have its defaults.
        split: whose levels are played.
        instances: distinct worlds asked for.
        limits: of an episode; zeros are the environment's defaults.
        attempts: episodes an agent plays on each instance.
        decoding: of the agents that sample. How many turns of an episode an agent sees is its own affair and stands in
            its description.
        seed: all level, noise and agent seeds follow from it.
    """

    environment: str = "sokoban"
    version: str = ""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    split: Split = Split.HELD_OUT
    instances: int = 512
    limits: Limits = GRID_LIMITS
    attempts: int = 1
    decoding: Decoding = SAMPLED
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 1 or self.attempts < 1:
            raise ValueError(f"{self.instances} instances with {self.attempts} attempts: expected at least 1 of each")

    @property
    def secret(self) -> bytes:
        """What the seeds are derived from."""
        return str(self.seed).encode()


REFERENCE: Final = Protocol()
"""Of the grids: 512 distinct held-out worlds, 5 turns of at most 5 actions, 10 actions, T = 1."""


Seal = Callable[[int, int], bytes]
"""Seals a level and a noise seed for the server that has the board's key."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One level that every agent plays.

    Attributes:
        draw: its number in the walk over level seeds.
        floor, ceiling: exact success probabilities of the random and of the best possible player under the limits;
            None where they are not known exactly.
    """

    draw: int
    level_seed: int
    instance_id: str
    world_id: str
    floor: float | None
    ceiling: float | None


@dataclass(frozen=True, slots=True)
class Selection:
    """The instances of a protocol on a server.

    Attributes:
        instances: distinct worlds, in the order of the walk.
        draws: level seeds that the walk tried.
        limits: those of the protocol, resolved by the server. Of a level file, what the protocol leaves at 0 is each
            level's own, and stands here as the environment's.
    """

    instances: tuple[Instance, ...]
    draws: int
    version: str
    split_epoch: int
    options_json: str
    limits: Limits


def plays_level_file(options_json: str) -> bool:
    """Whether a server with these resolved options plays an operator's level file, whose id is among them."""
    return "levels" in json.loads(options_json)


def level_seed(protocol: Protocol, options_json: str, draw: int) -> int:
    """Seed of the level of one draw of the walk over levels.

    A level file is walked in its own order, where seed i is the i-th level; it has none beyond its end.
    """
    if plays_level_file(options_json):
        return draw
    return seeds.level_seed(protocol.secret, protocol.environment, draw)


def select_instances(client: Client, protocol: Protocol, *, sessions: int = 128) -> Selection:
    """Walks over level seeds and keeps the first level of each world, until there are as many as the protocol asks for.

    The walk ends early when the server says that it has met every world, when 2,000 draws in a row brought no new one,
    or at the end of a level file: `Selection.instances` is then shorter. What is kept does not depend on `sessions`,
    the levels held at once.

    Raises:
        TurngymError: as the client does; NotServed where the server does not serve the split.
    """
    details = client.environment(protocol.environment, options=protocol.options, limits=protocol.limits)
    listed = details.splits.get(protocol.split)
    worlds = listed.worlds if listed is not None and listed.worlds_exact else None
    wanted = protocol.instances if not worlds else min(protocol.instances, int(worlds))
    found: dict[str, Instance] = {}
    draw = last_new = 0
    while len(found) < wanted and draw - last_new < DRAWS_WITHOUT_A_NEW_WORLD:
        size = min(sessions, DRAWS_WITHOUT_A_NEW_WORLD - (draw - last_new))
        drawn = _draw_levels(client, protocol, details.options_json, range(draw, draw + size), set(found))
        for instance in drawn:
            draw = instance.draw + 1
            if instance.world_id not in found:
                found[instance.world_id] = instance
                last_new = draw
            if len(found) == wanted:
                break
        if len(drawn) < size:
            break
    return Selection(
        instances=tuple(found.values()),
        draws=draw,
        version=details.version,
        split_epoch=details.split_epoch,
        options_json=details.options_json,
        limits=details.limits,
    )


def _draw_levels(
    client: Client, protocol: Protocol, options_json: str, draws: range, known: set[str]
) -> list[Instance]:
    """The levels of these draws, up to the end of a level file.

    Floor and ceiling are asked for where the world is not among the known ones.
    """
    level_seeds = [level_seed(protocol, options_json, draw) for draw in draws]
    requests = [request(protocol, level_seed=seed, noise_seed=0) for seed in level_seeds]
    started = client.reset_many(requests, return_exceptions=True)
    episodes = [episode for episode in started if isinstance(episode, Episode)]
    try:
        for refusal in started:
            past_the_end = isinstance(refusal, NoSuchInstance) and plays_level_file(options_json)
            if isinstance(refusal, TurngymError) and not past_the_end:
                raise refusal
        fresh = {episode.world_id: k for k, episode in reversed(list(enumerate(episodes)))}
        asked = [k for world, k in fresh.items() if world not in known]
        advice = dict(zip(asked, client.advise_many([episodes[k] for k in asked], return_exceptions=True), strict=True))
    finally:
        client.close_many(episodes)
    instances: list[Instance] = []
    # Seeds past a level file's end come last, so the episodes are those of the first seeds.
    for k, (draw, seed, episode) in enumerate(zip(draws, level_seeds, episodes, strict=False)):
        told = advice.get(k)
        if isinstance(told, BaseException) and not isinstance(told, NoOracle):
            raise told
        exact = told if isinstance(told, Advice) else None
        instances.append(
            Instance(
                draw=draw,
                level_seed=seed,
                instance_id=episode.instance_id,
                world_id=episode.world_id,
                floor=exact.floor if exact else None,
                ceiling=exact.ceiling if exact else None,
            )
        )
    return instances


def request(
    protocol: Protocol, *, level_seed: int, noise_seed: int, version: str = "", seal: Seal | None = None
) -> EpisodeRequest:
    """A reset under this protocol; `version` is demanded where the protocol itself demands none."""
    return EpisodeRequest(
        environment_id=protocol.environment,
        options=protocol.options,
        limits=protocol.limits,
        split=protocol.split,
        level_seed=level_seed if seal is None else None,
        noise_seed=noise_seed if seal is None else None,
        sealed_seed=None if seal is None else seal(level_seed, noise_seed),
        expected_version=protocol.version or version,
    )
