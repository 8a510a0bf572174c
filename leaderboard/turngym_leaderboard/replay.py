"""Plays episodes of a record again and says in what they come out otherwise.

Scripted agents choose anew; of other agents the actions that were kept are sent, or, with the policy at hand, the
policy chooses anew in some episodes. Turns are numbered from 0. Knows nothing of statistics.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final

from turngym_client import Client, Episode, TurngymError
from turngym_leaderboard import seeds
from turngym_leaderboard.agents import Agent, AgentUnavailable
from turngym_leaderboard.protocol import Instance, Protocol, Selection, request
from turngym_leaderboard.record import TRAJECTORIES, EpisodeRecord, RowRecord, Trajectory, TurnRecord
from turngym_leaderboard.runner import Played, play

Key = tuple[int, int]
"""Draw and attempt: an episode of a row."""

_COMPARED: Final = (
    "instance_id",
    "world_id",
    "outcome",
    "success",
    "truncated",
    "end_reason",
    "invalid_turns",
    "unparsed_turns",
    "cut_off_turns",
    "tokens",
    "digest",
)
"""What is compared of an episode beside actions and rewards. Seeds are derived again and not played."""
_COMPARED_SEALED: Final = tuple(name for name in _COMPARED if name != "digest")

_OF_THE_PLACE: Final = {"folder", "device", "threads"}
"""Of an agent's description: where it was, and not what."""

_LONGEST: Final = 80
"""Characters of a text that a fault shows."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What episodes are played again with.

    Attributes:
        protocol: of the record, demanding its version of the environment.
        selection: the protocol's levels as the server tells them now.
        sessions: episodes held at once, as many as when they were played first.
        trajectories: of the record, by agent, draw and attempt; empty: not compared.
        on_episodes: called with the number of episodes that have just been compared.
    """

    client: Client
    protocol: Protocol
    selection: Selection
    sessions: int
    trajectories: Mapping[tuple[str, int, int], Trajectory] = field(
        default_factory=dict[tuple[str, int, int], Trajectory]
    )
    on_episodes: Callable[[int], None] = lambda count: None


def where(row: RowRecord, episode: EpisodeRecord | Trajectory) -> str:
    """How a fault names an episode."""
    return f"{row.agent}, draw {episode.draw}, attempt {episode.attempt}"


def shown(value: object) -> str:
    """A value as a fault shows it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def first_difference(kept: Sequence[object], found: Sequence[object]) -> int | None:
    """The first turn in which two sequences differ, or at which one of them has ended; None: they are equal."""
    missing = object()
    pairs = zip_longest(kept, found, fillvalue=missing)
    return next((turn for turn, (one, other) in enumerate(pairs) if one != other), None)


def of_turn(values: Sequence[object], turn: int) -> str:
    """One turn's value as a fault shows it."""
    return shown(values[turn]) if turn < len(values) else "no such turn"


def scripted(replay: Replay, row: RowRecord, agent: Agent) -> Iterator[str]:
    """Lets a scripted agent choose again, in every episode that was resolved."""
    kept = _resolved(replay, row)
    try:
        if row.unavailable:
            # Whether it can play shows in its first turn.
            _play(replay, agent, replay.protocol, [(replay.selection.instances[0].draw, 0)])
            yield f"{row.agent}: the record says that it could not play ({row.unavailable}), but it can"
            return
        played = _play(replay, agent, replay.protocol, _keys(kept), replay.on_episodes)
    except AgentUnavailable as error:
        if not row.unavailable:
            yield f"{row.agent}: the record holds {len(row.episodes)} episodes, but it cannot play: {error}"
        return
    replay.on_episodes(len(row.episodes) - len(kept))
    for episode in kept:
        yield from _differences(replay, row, episode, played[episode.draw, episode.attempt], f"{row.agent} chooses")


def recorded(replay: Replay, row: RowRecord) -> Iterator[str]:
    """Sends the actions of every resolved episode again, under the seeds that follow from the protocol."""
    instances = {instance.draw: instance for instance in replay.selection.instances}
    kept = _resolved(replay, row)
    for start in range(0, len(kept), replay.sessions):
        batch = kept[start : start + replay.sessions]
        yield from _send(replay, row, batch, [instances[episode.draw] for episode in batch])
        replay.on_episodes(len(batch))
    replay.on_episodes(len(row.episodes) - len(kept))


def drawn(row: RowRecord, episodes: int, seed: int) -> list[EpisodeRecord]:
    """The episodes of a row in which its policy is to choose again: at most so many, drawn by the seed.

    None whose agent failed: that is a failure already, and a failure of the machine need not recur.
    """
    able = [episode for episode in row.episodes if episode.outcome in ("played", "environment_fault")]
    secret = str(seed).encode()
    return sorted(able, key=lambda e: seeds.lot(secret, row.agent, e.draw, e.attempt))[:episodes]


def policy(replay: Replay, row: RowRecord, agent: Agent, episodes: Sequence[EpisodeRecord]) -> Iterator[str]:
    """Lets a row's policy choose again in these episodes.

    Where it chooses otherwise, the whole batches are played in which those episodes were played first: a policy's
    arithmetic depends on its neighbours. One such batch that differs again is enough; the others are not played.
    """
    told, here = row.description, agent.description
    if differing := [
        f"{row.agent}: {key}: the record says {shown(told.get(key))}, the policy's is {shown(here.get(key))}"
        for key in sorted((told.keys() | here.keys()) - _OF_THE_PLACE)
        if told.get(key) != here.get(key)
    ]:
        yield from differing
        return
    greedy = replay.protocol.decoding.greedy or row.decoding == "greedy"
    protocol = replace(replay.protocol, decoding=replace(replay.protocol.decoding, greedy=greedy))
    known = {(episode.draw, episode.attempt): episode for episode in _resolved(replay, row)}
    kept = [episode for episode in episodes if (episode.draw, episode.attempt) in known]

    def faults(of: Sequence[EpisodeRecord], played: Mapping[Key, Played]) -> dict[Key, list[str]]:
        who = f"the policy in {here.get('folder')} chooses"
        return {
            (e.draw, e.attempt): told
            for e in of
            if (told := list(_differences(replay, row, e, played[e.draw, e.attempt], who)))
        }

    found = faults(kept, _play(replay, agent, protocol, _keys(kept), replay.on_episodes))
    jobs = [(i.draw, attempt) for i in replay.selection.instances for attempt in range(protocol.attempts)]
    size = replay.sessions
    for start in sorted({jobs.index(key) // size * size for key in found}):
        members = jobs[start : start + size]
        again = faults([known[key] for key in members if key in found], _play(replay, agent, protocol, members))
        found = {key: told for key, told in found.items() if key not in members} | again
        if again:
            break
    for told in found.values():
        yield from told


def _resolved(replay: Replay, row: RowRecord) -> list[EpisodeRecord]:
    """Those on a level of the protocol; the others are faults of their own."""
    draws = {instance.draw for instance in replay.selection.instances}
    return [
        episode
        for episode in row.episodes
        if episode.outcome != "unresolved" and episode.draw in draws and 0 <= episode.attempt < replay.protocol.attempts
    ]


def _keys(episodes: Sequence[EpisodeRecord]) -> list[Key]:
    return [(episode.draw, episode.attempt) for episode in episodes]


def _play(
    replay: Replay,
    agent: Agent,
    protocol: Protocol,
    keys: Collection[Key],
    on_episodes: Callable[[int], None] = lambda count: None,
) -> dict[Key, Played]:
    played = play(
        replay.client,
        protocol,
        replay.selection,
        agent,
        sessions=replay.sessions,
        only=set(keys),
        on_episodes=on_episodes,
    )
    return {(one.record.draw, one.record.attempt): one for one in played}


def _send(
    replay: Replay, row: RowRecord, batch: Sequence[EpisodeRecord], instances: Sequence[Instance]
) -> Iterator[str]:
    place = (replay.protocol.secret, replay.protocol.environment)
    requests = [
        request(
            replay.protocol,
            level_seed=instance.level_seed,
            noise_seed=seeds.noise_seed(*place, kept.draw, kept.attempt),
        )
        for kept, instance in zip(batch, instances, strict=True)
    ]
    episodes = replay.client.reset_many(requests)
    try:
        turns: list[list[TurnRecord]] = [[] for _ in batch]
        failed: dict[int, TurngymError] = {}
        for turn in range(max((len(kept.actions) for kept in batch), default=0)):
            playing = [
                i
                for i, kept in enumerate(batch)
                if turn < len(kept.actions) and i not in failed and not episodes[i].done
            ]
            read = [episodes[i].state.observation for i in playing]
            steps = [(episodes[i], batch[i].actions[turn]) for i in playing]
            outcomes = replay.client.step_many(steps, return_exceptions=True)
            for i, observation, outcome in zip(playing, read, outcomes, strict=True):
                if isinstance(outcome, TurngymError):
                    failed[i] = outcome
                    continue
                written = _written(replay, row, batch[i], turn)
                turns[i].append(
                    written.model_copy(
                        update={
                            "observation": observation,
                            "actions": batch[i].actions[turn],
                            "actions_executed": outcome.actions_executed,
                            "reward": outcome.reward,
                            "action_valid": outcome.action_valid,
                        }
                    )
                )
        for i, (kept, episode) in enumerate(zip(batch, episodes, strict=True)):
            if i in failed:
                yield f"{where(row, kept)}, turn {len(turns[i])}: cannot be played again: {failed[i]}"
            else:
                yield from _differences(replay, row, kept, _came_to(kept, episode, turns[i]), "the episode has")
    finally:
        replay.client.close_many(episodes)


_UNWRITTEN: Final = TurnRecord(
    observation="",
    text="",
    reasoning="",
    actions=(),
    actions_executed=0,
    reward=0.0,
    action_valid=True,
    valid_format=True,
    cut_off=False,
    tokens=None,
)


def _written(replay: Replay, row: RowRecord, episode: EpisodeRecord, turn: int) -> TurnRecord:
    """What the agent wrote, which sending its actions again tells nothing of."""
    kept = replay.trajectories.get((row.agent, episode.draw, episode.attempt))
    return kept.turns[turn] if kept is not None and turn < len(kept.turns) else _UNWRITTEN


def _came_to(kept: EpisodeRecord, episode: Episode, turns: Sequence[TurnRecord]) -> Played:
    """The record of an episode whose actions were sent again. A failure before its end is taken as it is told."""
    state = episode.state
    ended = {"outcome": "played", "truncated": state.truncated} if episode.done else {}
    found = kept.model_copy(
        update={
            **ended,
            "instance_id": episode.instance_id,
            "world_id": episode.world_id,
            "success": bool(state.success),
            "end_reason": state.end_reason.value,
            "actions": tuple(turn.actions for turn in turns),
            "rewards": tuple(turn.reward for turn in turns),
            "invalid_turns": sum(not turn.action_valid for turn in turns),
            "digest": state.digest.hex(),
        }
    )
    return Played(found, tuple(turns), state.observation)


def _differences(replay: Replay, row: RowRecord, kept: EpisodeRecord, played: Played, who: str) -> Iterator[str]:
    """In what an episode came out otherwise. What follows from the first other action is not told.

    Args:
        who: chose the actions that were found, with a verb.
    """
    at, found = where(row, kept), played.record
    if found.outcome == "unresolved":
        yield f"{at}, turn {len(found.actions)}: cannot be played again: {found.fault}"
        return
    trajectory = replay.trajectories.get((row.agent, kept.draw, kept.attempt))
    turn = first_difference(kept.actions, found.actions)
    if turn is not None:
        said, here = of_turn(kept.actions, turn), of_turn(found.actions, turn)
        yield f"{at}, turn {turn}: actions: the record says {said}, {who} {here}"
        return
    if kept.outcome == "played" and not found.end_reason:
        yield f"{at}, turn {len(found.actions)}: the record has no such turn, but the episode goes on"
    if (turn := first_difference(kept.rewards, found.rewards)) is not None:
        said, here = of_turn(kept.rewards, turn), of_turn(found.rewards, turn)
        yield f"{at}, turn {turn}: reward: the record says {said}, found was {here}"
    for name in _COMPARED if not kept.sealed else _COMPARED_SEALED:
        said, here = getattr(kept, name), getattr(found, name)
        if said != here:
            yield f"{at}: {name}: the record says {shown(said)}, found was {shown(here)}"
    if trajectory is not None:
        yield from _other_texts(at, trajectory, played)


def _other_texts(at: str, kept: Trajectory, played: Played) -> Iterator[str]:
    """The first turn that was read or written otherwise than the trajectory has it."""
    for turn, (told, found) in enumerate(zip(kept.turns, played.turns, strict=False)):
        for name in TurnRecord.model_fields:
            said, here = getattr(told, name), getattr(found, name)
            if said != here:
                yield f"{at}, turn {turn}: {name}: {TRAJECTORIES} says {shown(said)}, found was {shown(here)}"
                return
    if kept.last_observation != played.last_observation:
        said, here = shown(kept.last_observation), shown(played.last_observation)
        yield f"{at}: last_observation: {TRAJECTORIES} says {said}, found was {here}"
