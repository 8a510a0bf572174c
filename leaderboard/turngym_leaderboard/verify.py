"""Plays a record again: do its actions earn what it says?

That the digests agree proves what the actions earn, not who chose them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from turngym_client import Client, Episode, TurngymError
from turngym_leaderboard import record as records
from turngym_leaderboard import seeds, summary
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.protocol import Protocol, level_seed, request
from turngym_leaderboard.record import TRAJECTORIES, EpisodeRecord, Record, RowRecord, Trajectory


def verify(client: Client, record: Record, *, on_episodes: Callable[[int], None] = lambda count: None) -> list[str]:
    """Everything in which the record differs from what playing it again comes to; empty: nothing.

    Checked are the rows' names and kinds, the seeds, the instances, the digest, rewards and success of every episode
    that was resolved, and that statistics and comparisons are those of the episodes.

    Raises:
        TurngymError: the server cannot play it, for example because it has another version of the environment.
    """
    protocol = record.protocol.protocol()
    faults = [
        *_wrong_rows(record, protocol),
        *_wrong_instances(record, protocol),
        *_wrong_seeds(record, protocol),
        *_wrong_statistics(record),
    ]
    for row in record.rows:
        resolved = [episode for episode in row.episodes if episode.outcome != "unresolved"]
        for start in range(0, len(resolved), record.sessions):
            batch = resolved[start : start + record.sessions]
            faults += _replay(client, protocol, record.environment.version, row, batch)
            on_episodes(len(batch))
    return faults


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
        tokens = [turn.tokens for turn in turns if turn.tokens is not None]
        told = {
            "actions": (episode.actions, tuple(turn.actions for turn in turns)),
            "rewards": (episode.rewards, tuple(turn.reward for turn in turns)),
            "invalid_turns": (episode.invalid_turns, sum(not turn.action_valid for turn in turns)),
            "unparsed_turns": (episode.unparsed_turns, sum(not turn.valid_format for turn in turns)),
            "cut_off_turns": (episode.cut_off_turns, sum(turn.cut_off for turn in turns)),
            "tokens": (episode.tokens, sum(tokens) if tokens else None),
        }
        if differing := [name for name, (here, there) in told.items() if here != there]:
            yield f"{_where(row, episode)}: {', '.join(differing)}: not as {TRAJECTORIES} has them"


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


def _wrong_instances(record: Record, protocol: Protocol) -> Iterator[str]:
    """Levels are the protocol's walk, and the worlds of the episodes played on them."""
    instances = record.environment.instances
    if len({instance.world_id for instance in instances}) < len(instances):
        yield "two of the instances have the same world"
    played = {episode.draw: episode for row in record.rows for episode in row.episodes}
    for instance in instances:
        where = f"instance of draw {instance.draw}"
        if instance.level_seed != level_seed(protocol, record.environment.options_json, instance.draw):
            yield f"{where}: its level_seed does not follow from the protocol's seed"
        episode = played.get(instance.draw)
        if episode is not None and instance.world_id != episode.world_id:
            yield f"{where}: its world_id is not that of the episodes played on it"


def _wrong_seeds(record: Record, protocol: Protocol) -> Iterator[str]:
    name, secret = protocol.environment, protocol.secret
    known = {instance.draw: instance for instance in record.environment.instances}
    for row in record.rows:
        for episode in row.episodes:
            expected = (
                level_seed(protocol, record.environment.options_json, episode.draw),
                seeds.noise_seed(secret, name, episode.draw, episode.attempt),
                seeds.agent_seed(secret, name, episode.draw, episode.attempt),
            )
            if (episode.level_seed, episode.noise_seed, episode.agent_seed) != expected:
                yield f"{_where(row, episode)}: its seeds do not follow from the protocol's seed"
            instance = known.get(episode.draw)
            if instance is None or instance.instance_id != episode.instance_id:
                yield f"{_where(row, episode)}: its instance is not one of the record's"


def _wrong_statistics(record: Record) -> Iterator[str]:
    instances = record.environment.selection().instances
    floor = summary.reference(instances, "floor", record.rows[0].episodes)
    ceiling = summary.reference(instances, "ceiling", record.rows[-1].episodes)
    for row in record.rows:
        # Every row was dealt every attempt once; one that was left out would be one that was lost on purpose.
        dealt = [(episode.draw, episode.attempt) for episode in row.episodes]
        wanted = [(i.draw, attempt) for i in instances for attempt in range(record.protocol.attempts)]
        if dealt != (wanted if not row.unavailable else []):
            yield f"{row.agent}: its episodes are not one for each instance and attempt"
        elif (row.statistics is None) != (not row.episodes):
            yield f"{row.agent}: it has {len(row.episodes)} episodes {'and no' if row.episodes else 'but'} statistics"
        elif row.statistics is not None:
            samples = bool(row.decoding) and row.decoding != "greedy"
            if summary.summarise(row.episodes, floor, ceiling, samples=samples) != row.statistics:
                yield f"{row.agent}: its statistics are not those of its episodes"
    if summary.compare_agents(record.rows, greedy=record.protocol.greedy) != record.comparisons:
        yield "the comparisons are not those of the rows' episodes"


def _replay(
    client: Client, protocol: Protocol, version: str, row: RowRecord, batch: Sequence[EpisodeRecord]
) -> Iterator[str]:
    requests = [
        request(protocol, level_seed=kept.level_seed, noise_seed=kept.noise_seed, version=version) for kept in batch
    ]
    episodes = client.reset_many(requests)
    try:
        rewards: list[list[float]] = [[] for _ in batch]
        failed = {}
        for turn in range(max((len(kept.actions) for kept in batch), default=0)):
            playing = [
                i
                for i, kept in enumerate(batch)
                if turn < len(kept.actions) and i not in failed and not episodes[i].done
            ]
            steps = [(episodes[i], batch[i].actions[turn]) for i in playing]
            for i, outcome in zip(playing, client.step_many(steps, return_exceptions=True), strict=True):
                if isinstance(outcome, TurngymError):
                    failed[i] = outcome
                else:
                    rewards[i].append(outcome.reward)
        for i, (kept, episode) in enumerate(zip(batch, episodes, strict=True)):
            if i in failed:
                yield f"{_where(row, kept)}: cannot be played again: {failed[i]}"
            else:
                yield from _differences(row, kept, episode, rewards[i])
    finally:
        client.close_many(episodes)


def _differences(row: RowRecord, kept: EpisodeRecord, episode: Episode, rewards: Sequence[float]) -> Iterator[str]:
    where = _where(row, kept)
    if episode.instance_id != kept.instance_id or episode.world_id != kept.world_id:
        yield f"{where}: the level is another one"
    if episode.state.digest.hex() != kept.digest:
        yield f"{where}: digest {episode.state.digest.hex()[:16]}…, but the record says {kept.digest[:16]}…"
    if tuple(rewards) != kept.rewards:
        yield f"{where}: rewards {list(rewards)}, but the record says {list(kept.rewards)}"
    earned = bool(episode.state.success) and kept.outcome == "played"
    if earned != kept.success:
        yield f"{where}: success {earned}, but the record says {kept.success}"


def _where(row: RowRecord, episode: EpisodeRecord) -> str:
    return f"{row.agent}, draw {episode.draw}, attempt {episode.attempt}"
