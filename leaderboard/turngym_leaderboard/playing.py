"""Plays one submission on its board: whatever of its episodes is missing, each committed when it is finished.

Episodes are played in parts whose membership is fixed by the board, since a policy's choices depend in their last bits
on what shares a batch with them. A part of which anything is missing is played whole; what had been committed of it
stays as it was and is compared. So a submission whose worker was killed comes to the same scores as one that was not.

Knows nothing of processes, of how leases are kept, or of numbers over episodes.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from turngym_client import Client, ServerBusy, ServerUnavailable, TurngymError
from turngym_leaderboard.agents import Agent, AgentLost, AgentUnavailable
from turngym_leaderboard.agents.guarded import Guarded
from turngym_leaderboard.protocol import Protocol, Seal, Selection
from turngym_leaderboard.record import Trajectory
from turngym_leaderboard.runner import Played, play
from turngym_leaderboard.store import Store, boards, work
from turngym_leaderboard.store.values import Board, Deal, Environment

ROUNDS: Final = 3
"""How often the parts in which a server failed are played before what is unresolved stays so."""

SealOf = Callable[[Environment], Seal | None]
"""How seeds of an environment are sealed for the server; None: they are sent openly."""

_log = logging.getLogger(__name__)


class CannotPlay(Exception):
    """These servers do not serve what the board was dealt from. The message says in what they differ.

    Attributes:
        public: the same in words that everybody may read: a server's own may name addresses and seeds.
    """

    def __init__(self, message: str, public: str = "the environment server refuses to play it") -> None:
        super().__init__(message)
        self.public = public


class OverranTooOften(Exception):
    """The agent took more time or memory than it may, again and again. The message says which, the last time."""


class ServersGone(Exception):
    """No server answers: what is not played yet has to wait."""


@dataclass(frozen=True, slots=True)
class Part:
    """Episodes that are played together, always just these.

    Attributes:
        keys: draw and attempt of each.
    """

    showcase: bool
    keys: tuple[work.Key, ...]


def check_board(client: Client, board: Board) -> None:
    """Raises CannotPlay, or ServersGone where nothing can be said."""
    with servers_errors(board.slug):
        _check_board(client, board)


def _check_board(client: Client, board: Board) -> None:
    room = client.server().max_sessions
    if room and room < board.definition.batch:
        told = f"it plays {board.definition.batch} episodes at once, but the environment server holds {room} sessions"
        raise CannotPlay(f"{board.slug}: {told}", told)
    for environment in board.environments:
        definition = environment.definition
        try:
            found = client.environment(definition.id, options=definition.options, limits=definition.limits.limits())
        except (ServerUnavailable, ServerBusy):
            raise
        except TurngymError as error:
            told = f"the environment server does not serve {definition.id} with the board's options"
            raise CannotPlay(f"{board.slug}: {error}", told) from error
        for what, dealt, here in (
            ("version", environment.version, found.version),
            ("split epoch", environment.split_epoch, found.split_epoch),
            ("options", environment.options_json, found.options_json),
        ):
            if dealt != here:
                told = f"it was dealt from {definition.id} of {what} {dealt}, the environment server's is {here}"
                raise CannotPlay(f"{board.slug}: {told}", told)
        if not found.splits[definition.split].served:
            told = f"it plays split {definition.split.value}, which the environment server does not serve"
            raise CannotPlay(f"{board.slug}: {told}", told)


def parts(environment: Environment, deal: Deal, size: int) -> Iterator[Part]:
    """All episodes of a submission in an environment, in the order of play: the showcase first."""
    shown = [(instance.draw, 0) for instance in deal.showcase]
    attempts = range(environment.definition.attempts)
    scored = [(instance.draw, attempt) for instance in deal.scored.instances for attempt in attempts]
    for showcase, keys in ((True, shown), (False, scored)):
        for start in range(0, len(keys), size):
            yield Part(showcase, tuple(keys[start : start + size]))


def play_submission(
    client: Client,
    store: Store,
    lease: work.Lease,
    board: Board,
    agent: Agent,
    seal_of: SealOf,
    *,
    between_parts: Callable[[], object] = lambda: None,
    whole_parts: bool = True,
) -> dict[int, str]:
    """Plays what is missing of a submission.

    Args:
        between_parts: called after each part; no episode is open then.
        whole_parts: play all of a part of which anything is missing. False, for an agent that does not depend on what
            is played beside an episode, and costs money: only what is missing.

    Returns:
        Why the agent cannot play at all, by the number of the environment.

    Raises:
        ServersGone: the rest has to wait.
        CannotPlay: the server refuses what `check_board` found that it serves: it is another one now.
        OverranTooOften: the rest is not worth the time.
        LeaseLost: the submission is no longer this worker's.
    """
    secret = boards.secret(store, board)
    guarded = Guarded(agent)
    unavailable: dict[int, str] = {}
    for _ in range(ROUNDS):
        for environment in board.environments:
            deal = boards.deal(store, environment.id)
            done = work.done(store, lease.submission.id, environment.id)
            due = due_parts(parts(environment, deal, board.definition.batch), done, whole=whole_parts)
            seal = None if agent.wants_advice else seal_of(environment)
            table = _Table(client, store, lease, environment, deal, secret, seal)
            try:
                for part in due:
                    _play_part(table, guarded, part)
                    between_parts()
                    count_overrun(store, lease, guarded)
            except AgentUnavailable as error:
                unavailable[environment.id] = str(error)
    return unavailable


def count_overrun(store: Store, lease: work.Lease, guarded: Guarded) -> None:
    """Notes that an agent overran in a part, where it did.

    Raises:
        OverranTooOften: it has done so before.
        LeaseLost: the submission is no longer this worker's.
    """
    overran, guarded.overran = guarded.overran, ""
    if overran and work.count_failure(store, lease) >= work.MOST_FAILURES:
        raise OverranTooOften(overran)


def due_parts(all_parts: Iterator[Part], done: dict[work.Key, str], *, whole: bool = True) -> list[Part]:
    """Those of which an episode has not been played, or could not be resolved; or such episodes alone."""
    missing = [
        (part, tuple(key for key in part.keys if done.get(key, work.UNRESOLVED) == work.UNRESOLVED))
        for part in all_parts
    ]
    return [part if whole else replace(part, keys=keys) for part, keys in missing if keys]


@dataclass(frozen=True, slots=True)
class _Table:
    client: Client
    store: Store
    lease: work.Lease
    environment: Environment
    deal: Deal
    secret: int
    seal: Seal | None

    def protocol(self, part: Part) -> Protocol:
        protocol = self.environment.definition.protocol(self.secret, version=self.environment.version)
        return replace(protocol, attempts=1) if part.showcase else protocol

    def selection(self, part: Part) -> Selection:
        scored = self.deal.scored
        return replace(scored, instances=self.deal.showcase) if part.showcase else scored


def _play_part(table: _Table, agent: Agent, part: Part) -> None:
    while True:
        try:
            return _play_part_once(table, agent, part)
        except AgentLost as lost:  # Not for ever: see `confined_checkpoint`.
            _log.warning("%s: %s; a part is played again", table.lease.submission.public_id, lost)


def _play_part_once(table: _Table, agent: Agent, part: Part) -> None:
    name = table.lease.submission.name

    def keep(played: Sequence[Played]) -> None:
        committed = work.commit(
            table.store,
            table.lease,
            table.environment,
            [(each.record, _trajectory(name, each)) for each in played],
            showcase=part.showcase,
            sealed=table.seal is not None,
            now=datetime.now(UTC),
        )
        for draw, attempt in committed.differing:
            _log.warning(
                "%s in %s: draw %d, attempt %d came out otherwise when its part was played again; it stays as it was",
                table.lease.submission.public_id,
                table.environment.label,
                draw,
                attempt,
            )

    with servers_errors(table.environment.label):
        played = play(
            table.client,
            table.protocol(part),
            table.selection(part),
            agent,
            sessions=len(part.keys),
            only=set(part.keys),
            seal=table.seal,
            on_finished=keep,
        )
        if all(each.record.outcome == work.UNRESOLVED for each in played):
            table.client.server()  # It answers, so those episodes are what it fails in.


@contextmanager
def servers_errors(where: str) -> Generator[None]:
    """What servers refuse, as what follows from it."""
    try:
        yield
    except (ServerUnavailable, ServerBusy) as error:
        raise ServersGone(str(error)) from error
    except TurngymError as error:
        raise CannotPlay(f"{where}: {error}") from error


def _trajectory(name: str, played: Played) -> Trajectory:
    return Trajectory(
        agent=name,
        draw=played.record.draw,
        attempt=played.record.attempt,
        turns=played.turns,
        last_observation=played.last_observation,
    )
