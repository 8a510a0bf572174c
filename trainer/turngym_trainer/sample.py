"""The episodes of an iteration: P level seeds × N members, and other levels in place of groups that fared alike.

Refilling is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), by rounds: a round plays all groups that are
wanting side by side. Knows nothing of updates.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from turngym_client import Client, EpisodeRequest, Split
from turngym_trainer import seeds
from turngym_trainer.config import Config
from turngym_trainer.distributed import ALONE, Group
from turngym_trainer.evaluate import context_of, environment_limits
from turngym_trainer.grade import RunError, complete_groups, spread_of
from turngym_trainer.mixture import allotted
from turngym_trainer.policy import Policy
from turngym_trainer.process import Judge
from turngym_trainer.rollout import Lost, Planned, Rollout, Sampling, collect
from turngym_trainer.seeds import Place
from turngym_trainer.trajectory import Trajectory

Groups = Mapping[int, tuple[Trajectory, ...]]
"""Episodes by group."""


@dataclass(frozen=True, slots=True)
class Source:
    """One of the run's environments, and what of it episodes are played with.

    Attributes:
        name: what trajectories call it.
        config: the run's settings, with this environment alone.
        version: of the environment, which must not change.
        max_turns: of an episode; 0: the environment's default.
    """

    name: str
    config: Config
    version: str
    max_turns: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What an iteration played.

    Attributes:
        trajectories: finished episodes, by group and member; of each group those of the round that counts.
        lost: episodes that infrastructure took, in all rounds.
        dropped: finished episodes of groups that lost too many members and were played again.
        rounds: 1, and those that refilled.
        refilled: groups that were played again, in all rounds.
        waiting_seconds: see `Rollout`.
    """

    trajectories: tuple[Trajectory, ...]
    lost: tuple[Lost, ...]
    dropped: int
    rounds: int
    refilled: int
    waiting_seconds: float


def roll_out(
    policy: Policy,
    client: Client,
    config: Config,
    place: Place,
    *,
    sources: Sequence[Source],
    iterations: int = 1,
    judge: Judge | None = None,
    group: Group = ALONE,
) -> Sample:
    """Plays P level seeds × N episodes, each with its own noise seed, and refills at most `rollout.refills` times.

    A group is refilled where its members fared alike, or where it lost more than half of them. Those that are wanting
    after the last round stay as they are.

    Args:
        policy: its weights do not change meanwhile.
        client: connected to the server.
        config: the run's.
        place: the iteration's.
        sources: the run's environments; `mixture` says which groups are played in which.
        iterations: that learn from what is played; each has P groups of its own, numbered on.
        judge: puts process rewards on what is played; None: there are none. Of several processes the first one asks it.
        group: processes that share the episodes; each gets all of them.

    Raises:
        RunError: every episode of the first round was lost.
    """
    groups: Groups = {}
    lost: list[Lost] = []
    count = iterations * config.rollout.groups
    wanting: Sequence[int] = range(count)
    of = [
        int(source)
        for iteration in range(place.iteration, place.iteration + iterations)
        for source in allotted(config, iteration, config.rollout.groups)
    ]
    rounds = refilled = dropped = 0
    waiting_seconds = 0.0
    while wanting and rounds <= config.rollout.refills:
        played = _play(
            policy,
            client,
            config,
            round_place(place, rounds, config),
            {index: sources[of[index]] for index in wanting},
            group,
        )
        if not rounds and not played.trajectories:
            raise RunError(
                f"iteration {place.iteration}: all {len(played.lost)} episodes were lost, the first to: "
                f"{played.lost[0].error}. Nothing was learnt from it; see to the server and resume"
            )
        refilled += len(wanting) if rounds else 0
        rounds += 1
        lost += played.lost
        waiting_seconds += played.waiting_seconds
        judged = group.from_first(functools.partial(judge, played.trajectories)) if judge else played.trajectories
        groups, replaced = refill(groups, judged, config.rollout.group_size)
        dropped += replaced
        wanting = wanting_groups(groups, config, count)
    trajectories = tuple(trajectory for index in sorted(groups) for trajectory in groups[index])
    return Sample(trajectories, tuple(lost), dropped, rounds, refilled, waiting_seconds)


def round_place(place: Place, number: int, config: Config) -> Place:
    """The place of a round (from 0): attempts are numbered on over the rounds of every rollback, so none repeats."""
    return Place(place.iteration, place.attempt * (1 + config.rollout.refills) + number)


def wanting_groups(groups: Groups, config: Config, count: int) -> list[int]:
    """Of `count` groups those that are constant, lost more than half of their members, or are missing, ascending."""
    whole = complete_groups([each for of in groups.values() for each in of], config.rollout.group_size)
    spread = spread_of(whole, config)
    sound = set(spread.groups[~spread.constant].tolist())
    return [group for group in range(count) if group not in sound]


def refill(groups: Groups, played: Collection[Trajectory], group_size: int) -> tuple[Groups, int]:
    """Puts what a round played in place of what was there, unless that is complete and the new group is not.

    Returns:
        The groups, and how many finished episodes of incomplete groups have gone.
    """
    merged, dropped = dict(groups), 0
    for group in sorted({trajectory.group for trajectory in played}):
        new = tuple(trajectory for trajectory in played if trajectory.group == group)
        old = groups.get(group, ())
        kept, gone = (old, new) if _is_complete(old, group_size) and not _is_complete(new, group_size) else (new, old)
        merged[group] = kept
        dropped += 0 if _is_complete(gone, group_size) else len(gone)
    return merged, dropped


def _is_complete(members: tuple[Trajectory, ...], group_size: int) -> bool:
    return bool(complete_groups(members, group_size))


def planned(source: Source, place: Place, group: int, member: int) -> Planned:
    """An episode of a run, with the seeds that its place decides."""
    config = source.config
    return Planned(
        EpisodeRequest(
            environment_id=config.environment.id,
            options=config.environment.options,
            limits=replace(environment_limits(config.environment), max_turns=source.max_turns),
            split=Split(config.environment.split),
            level_seed=seeds.level_seed(config.run.seed, place.iteration, place.attempt, group),
            noise_seed=seeds.noise_seed(config.run.seed, place.iteration, place.attempt, group, member),
            expected_version=source.version,
        ),
        group=group,
        member=member,
        environment=source.name,
    )


def _play(
    policy: Policy,
    client: Client,
    config: Config,
    place: Place,
    sources: Mapping[int, Source],
    processes: Group,
) -> Rollout:
    """Plays all members of some groups, each in its environment."""
    return collect(
        policy,
        client,
        [
            planned(source, place, group, member)
            for group, source in sources.items()
            for member in range(config.rollout.group_size)
        ],
        context=context_of(config),
        sampling=Sampling(config.rollout.max_response_tokens, config.rollout.temperature),
        uniforms=lambda group, member, turn, count: seeds.token_uniforms(
            config.run.seed, place.iteration, place.attempt, group, member, turn, count
        ),
        parts=config.rollout.parts,
        keep_cache=config.rollout.keep_cache,
        group=processes,
    )
