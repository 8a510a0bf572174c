"""A player for the fault matrix: plays its episodes, and commits each finished one to a file, as a trainer would.

Killed and started again with the same arguments, it reads what was committed and plays the rest from their beginning.
Which actions are played depends on the seeds alone, and two that follow each other always differ, so that an action
that was executed twice shows in the journal wherever it happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from fault_journal import IDS, OPTIONS, head, mark_of

from turngym_client import (
    AsyncClient,
    AsyncEpisode,
    EpisodeLost,
    Split,
    TurngymError,
    VersionMismatch,
    aconnect,
)
from turngym_server.rng import Rng

LANES: Final = 3
"""Episodes of each environment that are played at a time."""
ACTION_STREAM: Final = 1 << 40
THINK_STREAM: Final = 1 << 41
THINK_SECONDS: Final = (0.05, 0.15)
LONG_THINK_SECONDS: Final = (0.3, 0.6)
"""Where an episode is one turn: so that it is under way as long as others are."""
NONSENSE: Final = "nonsense"
VERSION: Final = "1.0"

FINISHED: Final = "finished"
LOST: Final = "lost"
REFUSED: Final = "refused"
WRONG_REPLY: Final = "wrong reply"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """An episode that is over, for this player.

    Attributes:
        outcome: finished; lost or refused (another version), by name; wrong reply (somebody else's); or failed.
        digests: after the reset and after each turn, hex.
        sessions: ids that it had, in order.
        error: class and message; reason: the contract's.
    """

    environment: str
    level_seed: int
    outcome: str
    turns: int = 0
    digests: list[str] = field(default_factory=list[str])
    rewards: list[float] = field(default_factory=list[float])
    sessions: list[str] = field(default_factory=list[str])
    error: str = ""
    reason: str = ""


class WrongReply(Exception):
    """A reply that is another episode's, or another turn's."""


def level_seed_of(player: int, environment: str, episode: int) -> int:
    return (player * len(IDS) + IDS.index(environment)) * 1_000_000 + episode


def read_committed(path: Path) -> list[Committed]:
    """What was committed. A last line that was cut off was not."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [Committed(**json.loads(line)) for line in lines]


def turn_of(level_seed: int, turn: int, legal: Sequence[str], most: int, before: str) -> list[str]:
    """The actions of a turn: one or two, now and then an invalid one; none is the same as the one before it."""
    rng = Rng(level_seed, ACTION_STREAM + turn)
    actions: list[str] = []
    for _ in range(1 + rng.below(min(most, 2))):
        choices = [action for action in legal if action != before]
        before = NONSENSE if before != NONSENSE and rng.below(8) == 0 else rng.choice(choices)
        actions.append(before)
    return actions


async def play(client: AsyncClient, environment: str, level_seed: int) -> Committed:
    """Plays one episode to its end, and checks that every reply is its own."""
    digests: list[str] = []
    rewards: list[float] = []
    sessions: list[str] = []

    def committed(outcome: str, error: Exception | None = None, reason: str = "") -> Committed:
        return Committed(
            environment=environment,
            level_seed=level_seed,
            outcome=outcome,
            turns=len(rewards),
            digests=digests,
            rewards=rewards,
            sessions=sessions,
            error=f"{type(error).__name__}: {error}" if error else "",
            reason=reason,
        )

    try:
        episode = await client.reset(
            environment,
            options=OPTIONS.get(environment),
            split=Split.ALL,
            level_seed=level_seed,
            noise_seed=level_seed + 1,
            expected_version=VERSION,
            want_legal_actions=True,
        )
        legal = episode.state.legal_actions
        executed = 0
        before = ""
        while True:
            _check(episode.state.observation, level_seed, executed)
            digests.append(episode.state.digest.hex())
            sessions += [episode.session.id] if episode.session.id not in sessions else []
            if episode.done:
                break
            await _think(episode, level_seed)
            assert legal is not None
            actions = turn_of(level_seed, episode.step_index, legal, episode.limits.max_actions_per_turn, before)
            transition = await episode.step(actions)
            executed += transition.actions_executed
            before = actions[transition.actions_executed - 1]
            rewards.append(transition.reward)
        await episode.close()
    except EpisodeLost as error:
        return committed(LOST, error, error.reason)
    except VersionMismatch as error:
        return committed(REFUSED, error, error.reason)
    except WrongReply as error:
        return committed(WRONG_REPLY, error)
    except TurngymError as error:
        return committed(FAILED, error, error.reason)
    return committed(FINISHED)


def _check(observation: str, level_seed: int, executed: int) -> None:
    expected = head(mark_of(level_seed), executed)
    if not observation.startswith(expected):
        raise WrongReply(f"expected {expected!r}, got {observation[:60]!r}")


async def _think(episode: AsyncEpisode, level_seed: int) -> None:
    least, most = LONG_THINK_SECONDS if episode.limits.max_turns == 1 else THINK_SECONDS
    await asyncio.sleep(least + (most - least) * Rng(level_seed, THINK_STREAM + episode.step_index).random())


async def run(arguments: argparse.Namespace) -> None:
    done = {(each.environment, each.level_seed) for each in read_committed(arguments.commits)}
    file = os.open(arguments.commits, os.O_RDWR | os.O_CREAT, 0o644)
    whole = arguments.commits.read_bytes().rfind(b"\n") + 1
    os.ftruncate(file, whole)
    os.lseek(file, whole, os.SEEK_SET)

    async def lane(client: AsyncClient, environment: str, first: int) -> None:
        for number in range(first, arguments.episodes, LANES):
            level_seed = level_seed_of(arguments.player, environment, number)
            if (environment, level_seed) in done:
                continue
            committed = await play(client, environment, level_seed)
            os.write(file, json.dumps(asdict(committed)).encode() + b"\n")
            os.fsync(file)

    async with aconnect(
        arguments.address, deadline=arguments.deadline, patience=arguments.patience, failover=arguments.failover
    ) as client:
        await asyncio.gather(*(lane(client, environment, first) for environment in IDS for first in range(LANES)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("commits", type=Path, help="file of finished episodes, one JSON object a line")
    parser.add_argument("--player", type=int, default=0, help="its number; players with other numbers have other seeds")
    parser.add_argument("--episodes", type=int, default=12, help="of each environment")
    parser.add_argument("--deadline", type=float, default=1.0)
    parser.add_argument("--patience", type=float, default=120.0)
    parser.add_argument("--failover", type=float, default=0.5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
