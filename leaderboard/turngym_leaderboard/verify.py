"""Holds a record against what the protocol and a server say: does it tell what was played, and who chose it?

Levels, floors and ceilings are asked for again, every resolved episode is played again, and the scripted agents choose
again. That a digest agrees proves what actions earn, not who chose them: for that, a checkpoint's policy has to be at
hand. `unchecked` says what remains.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from turngym_client import Client
from turngym_leaderboard import record as records
from turngym_leaderboard import replay, seeds, summary
from turngym_leaderboard.agents import Agent
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.protocol import Protocol, Selection, level_seed, select_instances
from turngym_leaderboard.record import (
    TRAJECTORIES,
    LimitsRecord,
    Record,
    RecordError,
    RowRecord,
    Trajectory,
    by_kind,
    total,
)
from turngym_leaderboard.replay import Replay, first_difference, of_turn, shown, where

SAMPLED: Final = 32
"""Episodes of a row in which its policy chooses again, unless told otherwise."""
_SAME: Final = 1e-9
"""Floors and ceilings that differ by less do so by rounding."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Which episodes of a checkpoint's row its policy plays again: so many, drawn by the seed."""

    episodes: int
    seed: int


def verify(
    client: Client,
    record: Record,
    *,
    trajectories: Sequence[Trajectory] = (),
    policies: Sequence[Agent] = (),
    sample: Sample = Sample(SAMPLED, 0),
    on_episodes: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Everything in which the record differs from what playing it again comes to; empty: nothing.

    Checked are the rows' names and kinds, seeds, levels with their floors and ceilings, that each was played as often
    as the protocol says, what came of every resolved episode, what the scripted agents choose in it, and that
    statistics and comparisons are those of the episodes.

    Args:
        trajectories: of the record; what was read in the episodes is then compared as well.
        policies: agents that choose again in a sample of the rows that were played with the same weights.
        on_episodes: called with the number of episodes that have just been compared, `episodes_to_play` in all.

    Raises:
        RecordError: none of the rows was played with the weights of one of the policies.
        TurngymError: the server cannot play it, for example because it has another version of the environment.
    """
    protocol = replace(record.protocol.protocol(), version=record.environment.version)
    agents = _policies_of_rows(record, policies)
    sessions = min(record.sessions, client.server().max_sessions or record.sessions)
    selection = select_instances(client, protocol, sessions=sessions)
    faults = [
        *_wrong_rows(record, protocol),
        *_wrong_environment(record, selection),
        *_wrong_seeds(record, protocol),
        *_wrong_deals(record),
        *_wrong_statistics(record),
    ]
    again = Replay(
        client=client,
        protocol=protocol,
        selection=selection,
        sessions=sessions,
        trajectories={(each.agent, each.draw, each.attempt): each for each in trajectories},
        on_episodes=on_episodes,
    )
    scripted = {agent.name: agent for agent in (RandomAgent(), OracleAgent())}
    for row in record.rows:
        if row.agent in scripted:
            faults += replay.scripted(again, row, scripted[row.agent])
        else:
            faults += replay.recorded(again, row)
        if row.agent in agents:
            drawn = replay.drawn(row, sample.episodes, sample.seed)
            faults += replay.policy(again, row, agents[row.agent], drawn)
    return list(dict.fromkeys(faults))


def episodes_to_play(record: Record, policies: Sequence[Agent], sample: Sample) -> int:
    """How many episodes `verify` tells of. Raises RecordError as it does."""
    agents = _policies_of_rows(record, policies)
    return sum(
        len(row.episodes) + (len(replay.drawn(row, sample.episodes, sample.seed)) if row.agent in agents else 0)
        for row in record.rows
    )


def most_tokens(record: Record) -> int:
    """That any checkpoint of a record wrote in a turn: a board may allow fewer than its own run did. 0: it has none."""
    told = [
        row.description["max_response_tokens"] for row in record.rows if row.description.get("kind") == "checkpoint"
    ]
    return max((int(each) for each in told if each.isdecimal()), default=0)


def checked(record: Record, policies: Sequence[Agent], sample: Sample) -> list[str]:
    """What was played again by a policy, in sentences."""
    agents = _policies_of_rows(record, policies)
    return [
        f"{row.agent}: its policy chose again in {len(replay.drawn(row, sample.episodes, sample.seed))} of "
        f"{len(row.episodes)} episodes, drawn with seed {sample.seed}"
        for row in record.rows
        if row.agent in agents
    ]


def unchecked(record: Record, policies: Sequence[Agent], *, trajectories: bool) -> list[str]:
    """What `verify` has not checked, in sentences.

    Args:
        trajectories: they were compared.
    """
    agents = _policies_of_rows(record, policies)
    said: list[str] = []
    for row in record.rows:
        if row.agent not in (RandomAgent.name, OracleAgent.name):
            if row.agent not in agents:
                folder = row.description.get("folder")
                hint = f"; give the policy's folder with --policy (it was {folder})" if folder else ""
                said.append(f"{row.agent}: who chose its actions, and its texts and tokens{hint}")
            elif failed := sum(episode.outcome == "agent_fault" for episode in row.episodes):
                said.append(f"{row.agent}: whether the agent failed in {failed} episodes, which count as failures")
        if sealed := sum(episode.sealed for episode in row.episodes):
            said.append(f"{row.agent}: the digests of {sealed} episodes, whose server was given sealed seeds")
        if unresolved := sum(episode.outcome == "unresolved" for episode in row.episodes):
            said.append(f"{row.agent}: whether the server failed in {unresolved} episodes, which count as neither")
    if not trajectories:
        said.append(f"{TRAJECTORIES}: what was read and written in the episodes")
    said.append("when, where and with which code the episodes were played first")
    return said


def _policies_of_rows(record: Record, policies: Sequence[Agent]) -> dict[str, Agent]:
    """The policies by the names of the rows that were played with their weights."""
    found: dict[str, Agent] = {}
    for agent in policies:
        weights = agent.description.get("sha256")
        names = [row.agent for row in record.rows if weights and row.description.get("sha256") == weights]
        if not names:
            raise RecordError(
                f"no row was played with the weights in {agent.description.get('folder', agent.name)} "
                f"(SHA-256 {str(weights)[:16]}…); the record's are "
                + (
                    ", ".join(
                        f"{r.agent}: {r.description['sha256'][:16]}…" for r in record.rows if "sha256" in r.description
                    )
                    or "none"
                )
            )
        found |= dict.fromkeys(names, agent)
    return found


def verify_trajectories(path: Path, record: Record) -> list[str]:
    """Everything in which a record's rows differ from the trajectories beside it; empty: nothing.

    A record from before it covered that file is not held against it.

    Args:
        path: the record's folder or file.

    Raises:
        RecordError: the file is as it was saved, but holds no trajectories.
    """
    if record.trajectories is None:
        return []
    if (fault := records.trajectories_fault(path, record)) is not None:
        return [fault]
    kept: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in records.load_trajectories(path if path.is_dir() else path.parent):
        kept[trajectory.agent].append(trajectory)
    names = {row.agent for row in record.rows}
    faults = [
        f"{TRAJECTORIES} holds {len(episodes)} episodes of {agent!r}, but the record has no row of that name"
        for agent, episodes in kept.items()
        if agent not in names
    ]
    for row in record.rows:
        faults += _wrong_trajectories(row, kept.get(row.agent, []))
    return faults


def _wrong_trajectories(row: RowRecord, trajectories: Sequence[Trajectory]) -> Iterator[str]:
    if row.episodes and not trajectories:
        yield f"{row.agent}: {TRAJECTORIES} holds no episode of an agent of that name"
        return
    played = [(trajectory.draw, trajectory.attempt) for trajectory in trajectories]
    if played != [(episode.draw, episode.attempt) for episode in row.episodes]:
        yield f"{row.agent}: its {len(row.episodes)} episodes are not the {len(played)} that {TRAJECTORIES} holds"
        return
    for episode, trajectory in zip(row.episodes, trajectories, strict=True):
        turns = trajectory.turns
        by_turn = {
            "actions": (episode.actions, tuple(turn.actions for turn in turns)),
            "reward": (episode.rewards, tuple(turn.reward for turn in turns)),
        }
        for name, (here, there) in by_turn.items():
            if (turn := first_difference(here, there)) is not None:
                yield (
                    f"{where(row, episode)}, turn {turn}: {name}: the record says {of_turn(here, turn)}, "
                    f"{TRAJECTORIES} {of_turn(there, turn)}"
                )
        told = {
            "invalid_turns": (episode.invalid_turns, sum(not turn.action_valid for turn in turns)),
            "unparsed_turns": (episode.unparsed_turns, sum(not turn.valid_format for turn in turns)),
            "cut_off_turns": (episode.cut_off_turns, sum(turn.cut_off for turn in turns)),
            "tokens": (episode.tokens, total(turn.tokens for turn in turns)),
            "tokens_in": (episode.tokens_in, total(turn.tokens_in for turn in turns)),
            "cost": (episode.cost, total(turn.cost for turn in turns)),
            "failures": (episode.failures, by_kind(turn.failure for turn in turns)),
        }
        for name, (here, there) in told.items():
            if here != there:
                yield f"{where(row, episode)}: {name}: the record says {here}, {TRAJECTORIES} {there}"


def _wrong_rows(record: Record, protocol: Protocol) -> Iterator[str]:
    """The first row is the random player's, the last the oracle's, and no other is scripted."""
    rows = record.rows
    for name, count in Counter(row.agent for row in rows).items():
        if count > 1:
            yield f"{count} rows are called {name!r}"
    for which, row, name in (("first", rows[0], RandomAgent.name), ("last", rows[-1], OracleAgent.name)):
        if row.agent != name:
            yield f"the {which} row is {row.agent!r}, but every record's is {name!r}"
    for row in rows:
        scripted, kind = row.agent in (RandomAgent.name, OracleAgent.name), row.description.get("kind")
        if scripted != (kind == "scripted"):
            yield f"{row.agent}: its description says kind {kind!r}, which an agent of that name is not"
        if row.decoding not in ("", *(() if scripted else (str(protocol.decoding), "greedy"))):
            yield f"{row.agent}: decoding {row.decoding!r} is not the protocol's"
        if kind in ("checkpoint", "endpoint") and not row.decoding:
            yield f"{row.agent}: the record does not say how this {kind} was decoded"
        if row.unavailable and not scripted:
            yield f"{row.agent}: the record says that it could not play ({row.unavailable}); of its kind none is kept"


def _wrong_environment(record: Record, found: Selection) -> Iterator[str]:
    """The levels are those of the protocol's walk, in its order, and all that was told of them and of it is so."""
    told = record.environment
    for name, here in (
        ("split_epoch", found.split_epoch),
        ("options_json", found.options_json),
        ("limits", LimitsRecord.of(found.limits)),
        ("draws", found.draws),
    ):
        if getattr(told, name) != here:
            yield f"environment: {name}: the record says {shown(getattr(told, name))}, the server's is {shown(here)}"
    walked = {instance.draw: instance for instance in found.instances}
    for draw, count in Counter(instance.draw for instance in told.instances).items():
        if count > 1:
            yield f"instance of draw {draw}: the record has it {count} times"
        if draw not in walked:
            yield f"instance of draw {draw}: the record has it, but the protocol's walk over levels has not"
    kept = [instance.draw for instance in told.instances]
    for draw in walked.keys() - set(kept):
        yield f"instance of draw {draw}: the protocol's walk over levels has it, but the record has not"
    if sorted(kept) == sorted(walked) and kept != list(walked):
        place = first_difference(kept, list(walked))
        assert place is not None
        yield f"instance {place}: the record has draw {kept[place]}, the protocol's walk {list(walked)[place]}"
    for instance in told.instances:
        if (true := walked.get(instance.draw)) is None:
            continue
        for name in ("level_seed", "instance_id", "world_id"):
            said, here = getattr(instance, name), getattr(true, name)
            if said != here:
                yield f"instance of draw {instance.draw}: {name}: the record says {shown(said)}, found was {here!r}"
        for name in ("floor", "ceiling"):
            said, here = getattr(instance, name), getattr(true, name)
            if (said is None) != (here is None) or (said is not None and not math.isclose(said, here, abs_tol=_SAME)):
                yield f"instance of draw {instance.draw}: {name}: the record says {said}, the server's is {here}"


def _wrong_seeds(record: Record, protocol: Protocol) -> Iterator[str]:
    """Seeds follow from the protocol's, and episodes are on the record's levels."""
    name, secret = protocol.environment, protocol.secret
    known = {instance.draw: instance for instance in record.environment.instances}
    for row in record.rows:
        for episode in row.episodes:
            expected = {
                "level_seed": level_seed(protocol, record.environment.options_json, episode.draw),
                "noise_seed": seeds.noise_seed(secret, name, episode.draw, episode.attempt),
                "agent_seed": seeds.agent_seed(secret, name, episode.draw, episode.attempt),
            }
            for which, seed in expected.items():
                if (said := getattr(episode, which)) != seed:
                    yield f"{where(row, episode)}: {which}: the record says {said}, from the protocol's follows {seed}"
            instance = known.get(episode.draw)
            if instance is None or instance.instance_id != episode.instance_id:
                yield f"{where(row, episode)}: its instance {episode.instance_id} is not one of the record's"


def _wrong_deals(record: Record) -> Iterator[str]:
    """Every row was dealt every attempt once, in order: one that is left out would be one that was lost on purpose. Of
    remote agents that is the first attempt of each instance.
    """
    attempts = range(record.protocol.attempts)
    wanted = [(instance.draw, attempt) for instance in record.environment.instances for attempt in attempts]
    first = [(draw, attempt) for draw, attempt in wanted if not attempt]
    for row in record.rows:
        dealt = [(episode.draw, episode.attempt) for episode in row.episodes]
        due = [] if row.unavailable else first if row.description.get("kind") == "remote" else wanted
        for (draw, attempt), count in (Counter(dealt) - Counter(due)).items():
            yield f"{row.agent}, draw {draw}, attempt {attempt}: the record has this episode {count} times too often"
        for draw, attempt in Counter(due) - Counter(dealt):
            yield f"{row.agent}, draw {draw}, attempt {attempt}: the record lacks this episode"
        if sorted(dealt) == sorted(due) and (place := first_difference(dealt, due)) is not None:
            (draw, attempt), (next_draw, next_attempt) = dealt[place], due[place]
            yield (
                f"{row.agent}, draw {draw}, attempt {attempt}: it is episode {place} of the record, where draw "
                f"{next_draw}, attempt {next_attempt} is due"
            )


def _wrong_statistics(record: Record) -> Iterator[str]:
    instances = record.environment.selection().instances
    floor = summary.reference(instances, "floor", record.rows[0].episodes)
    ceiling = summary.reference(instances, "ceiling", record.rows[-1].episodes)
    for row in record.rows:
        if (row.statistics is None) != (not row.episodes):
            yield f"{row.agent}: it has {len(row.episodes)} episodes {'and no' if row.episodes else 'but'} statistics"
        elif row.statistics is not None:
            samples = bool(row.decoding) and row.decoding != "greedy"
            found = summary.summarise(row.episodes, floor, ceiling, samples=samples)
            # A record from before a number was told says nothing of it.
            told = row.statistics.model_fields_set
            if found.model_dump(include=told) != row.statistics.model_dump(include=told):
                yield f"{row.agent}: its statistics are not those of its episodes"
    if summary.compare_agents(record.rows, greedy=record.protocol.greedy) != record.comparisons:
        yield "the comparisons are not those of the rows' episodes"
