"""Plays a sample of a checkpoint's episodes anew: do its files still choose what the board shows?

That actions earn a score is shown by sending them again (`turngym_leaderboard.verify`); who chose them, by letting the
policy choose again. Drawn are whole parts, since a policy's choices depend in their last bits on what it plays beside
an episode, by the board's secret, so that nobody knows beforehand which ones.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from turngym_client import Client
from turngym_leaderboard import seeds
from turngym_leaderboard.agents import Agent, AgentLost
from turngym_leaderboard.agents.guarded import Guarded
from turngym_leaderboard.playing import Part, SealOf, parts, servers_errors
from turngym_leaderboard.protocol import Seal
from turngym_leaderboard.record import EpisodeRecord
from turngym_leaderboard.runner import Played, play
from turngym_leaderboard.store import Store, boards, episodes, work
from turngym_leaderboard.store.values import Board, Deal, Environment, Submission

SHARE: Final = 0.05
"""Of a submission's scored episodes in each environment, at least one part."""
TOLD: Final = "played_anew"
"""Under which a submission tells what came of it."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Anew:
    """What came of a sample.

    Attributes:
        played: episodes that were played anew, of `scored`.
        differing: of those, how many came out otherwise.
    """

    played: int
    scored: int
    differing: int

    def __str__(self) -> str:
        came = f"{self.differing} came out otherwise" if self.differing else "all came out the same"
        return f"{self.played} of {self.scored} scored episodes, drawn by the board's secret: {came}"


def play_anew(
    client: Client,
    store: Store,
    board: Board,
    submission: Submission,
    agent: Agent,
    seal_of: SealOf,
    *,
    share: float = SHARE,
    after_part: Callable[[Guarded], object] = lambda guarded: None,
) -> Anew:
    """Plays a sample of a submission's episodes anew, and compares.

    Left out are episodes that a server failed in, and those in which the agent never chose an action.

    Args:
        share: of the scored episodes in each environment.
        after_part: called after each part with the agent that played it.

    Raises:
        ServersGone, CannotPlay: as `playing.play_submission` does.
        AgentUnavailable: the agent cannot be had any more.
    """
    secret = boards.secret(store, board)
    guarded = Guarded(agent)
    played = scored = differing = 0
    for environment in board.environments:
        kept = {(each.draw, each.attempt): each for each in episodes.records(store, submission, environment.id)}
        if not kept:
            continue
        scored += len(kept)
        deal = boards.deal(store, environment.id)
        for part in drawn(environment, deal, board.definition.batch, share, secret, submission.public_id):
            chosen = {key: each for key in part.keys if (each := kept.get(key)) is not None and each.actions}
            if not chosen:
                continue
            seal = seal_of(environment)
            for found in _play_part(client, environment, deal, secret, guarded, part, seal):
                known = chosen.get((found.draw, found.attempt))
                if known is None or work.UNRESOLVED in (known.outcome, found.outcome):
                    continue
                played += 1
                if not _same(known, found, sealed=seal is not None):
                    differing += 1
                    _log.warning(
                        "%s in %s: draw %d, attempt %d came out otherwise when it was played anew",
                        submission.public_id,
                        environment.label,
                        found.draw,
                        found.attempt,
                    )
            after_part(guarded)
    return Anew(played, scored, differing)


def drawn(environment: Environment, deal: Deal, size: int, share: float, secret: int, public_id: str) -> list[Part]:
    """The parts with the lowest lots, as many as hold this share of an environment's scored episodes.

    Args:
        size: of a part.
        public_id: of the submission.
    """

    def lot(part: Part) -> int:
        draw, attempt = part.keys[0]
        return seeds.lot(str(secret).encode(), f"{public_id}/{environment.label}", draw, attempt)

    scored = [part for part in parts(environment, deal, size) if not part.showcase]
    wanted = math.ceil(share * sum(len(part.keys) for part in scored))
    taken: list[Part] = []
    for part in sorted(scored, key=lot):
        if sum(len(each.keys) for each in taken) >= wanted:
            break
        taken.append(part)
    return taken


def _play_part(
    client: Client, environment: Environment, deal: Deal, secret: int, agent: Agent, part: Part, seal: Seal | None
) -> Sequence[EpisodeRecord]:
    protocol = environment.definition.protocol(secret, version=environment.version)

    def once() -> list[Played]:
        return play(client, protocol, deal.scored, agent, sessions=len(part.keys), only=set(part.keys), seal=seal)

    with servers_errors(environment.label):
        while True:
            try:
                return [played.record for played in once()]
            except AgentLost as lost:  # Not for ever: see `confined_checkpoint`.
                _log.warning("%s: a part is played again", lost)


def _same(known: EpisodeRecord, found: EpisodeRecord, *, sealed: bool) -> bool:
    """A digest tells the sealed seed, which is another one each time; what a fault says of the machine may differ."""
    told = {"fault": known.fault, "digest": known.digest} if sealed else {"fault": known.fault}
    return found.model_copy(update=told) == known
