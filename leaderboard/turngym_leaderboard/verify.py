"""Plays a record again: do its actions earn what it says?

That the digests agree proves what the actions earn, not who chose them.
"""

from collections.abc import Callable, Iterator, Sequence

from turngym_client import Client, Episode, TurngymError
from turngym_leaderboard import seeds, summary
from turngym_leaderboard.protocol import Protocol, level_seed, request
from turngym_leaderboard.record import EpisodeRecord, Record, RowRecord


def verify(client: Client, record: Record, *, on_episodes: Callable[[int], None] = lambda count: None) -> list[str]:
    """Everything in which the record differs from what playing it again comes to; empty: nothing.

    Checked are the seeds, the digest, rewards and success of every episode that was resolved, and that the statistics
    are those of the episodes.

    Raises:
        TurngymError: the server cannot play it, for example because it has another version of the environment.
    """
    protocol = record.protocol.protocol()
    faults = [*_wrong_seeds(record, protocol), *_wrong_statistics(record)]
    for row in record.rows:
        resolved = [episode for episode in row.episodes if episode.outcome != "unresolved"]
        for start in range(0, len(resolved), record.sessions):
            batch = resolved[start : start + record.sessions]
            faults += _replay(client, protocol, record.environment.version, row, batch)
            on_episodes(len(batch))
    return faults


def _wrong_seeds(record: Record, protocol: Protocol) -> Iterator[str]:
    name, secret = protocol.environment, protocol.secret
    known = {instance.draw: instance for instance in record.environment.instances}
    if len({instance.world_id for instance in known.values()}) < len(record.environment.instances):
        yield "two of the instances have the same world"
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
        elif row.statistics is not None:
            samples = bool(row.decoding) and row.decoding != "greedy"
            if summary.summarise(row.episodes, floor, ceiling, samples=samples) != row.statistics:
                yield f"{row.agent}: its statistics are not those of its episodes"


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
