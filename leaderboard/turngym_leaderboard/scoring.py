"""Turns the episodes of submissions into the numbers that their board shows.

Numbers are derived, and computed anew from the episodes whenever what they are measured by has changed: where an
environment tells no exact floor or ceiling, those are what the scripted rows played. Knows nothing of how it is played.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from turngym_leaderboard import summary
from turngym_leaderboard.agents import OVERRAN
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.record import EpisodeRecord, Statistics
from turngym_leaderboard.store import Store, boards, episodes, submissions, work
from turngym_leaderboard.store.values import Board, Deal, Environment, Kind, State, Submission

_WITH_NUMBERS = (State.SCORED, State.INCOMPLETE)
_NEVER: Final = "none of its scored episodes got to a single turn; most often"


@dataclass(frozen=True, slots=True)
class _Scripted:
    """The rows that others are measured by."""

    random: Submission
    oracle: Submission


def numbers(store: Store, board: Board, submission: Submission, unavailable: Mapping[int, str]) -> list[work.NewResult]:
    """What a submission's episodes come to in each environment, by its play so far.

    Args:
        unavailable: why it cannot play an environment, by the environment's number.
    """
    scripted = _scripted(store, board)
    return [
        work.NewResult(environment.id, None, reason)
        if (reason := unavailable.get(environment.id))
        else _result(store, environment, submission, scripted)
        for environment in board.environments
    ]


def refresh(store: Store, board: Board) -> int:
    """Computes anew what was computed before a scripted row was finished; returns for how many submissions."""
    every = submissions.of_board(store, board)
    finished = [row.finished for row in every if row.kind is Kind.SCRIPTED and row.finished is not None]
    known = episodes.results(store, board)
    stale = [
        submission
        for submission in every
        if submission.state in _WITH_NUMBERS
        and (
            submission.id not in known
            or any(result.computed <= moment for result in known[submission.id] for moment in finished)
        )
    ]
    for submission in stale:
        told = {result.environment: result.unavailable for result in known.get(submission.id, [])}
        unavailable = {each.id: told.get(each.label, "") for each in board.environments}
        results = numbers(store, board, submission, unavailable)
        work.keep_results(store, submission.id, results, now=datetime.now(UTC))
    return len(stale)


def state_of(results: list[work.NewResult]) -> tuple[State, str]:
    """How a submission whose play is over ends, and why."""
    reasons = [result.unavailable for result in results if result.statistics is None]
    if len(reasons) == len(results):
        return State.FAILED, reasons[0]
    counted = [result.statistics for result in results if result.statistics is not None]
    total = sum(statistics.episodes for statistics in counted)
    if unresolved := sum(statistics.unresolved for statistics in counted):
        return State.INCOMPLETE, f"{unresolved} of {total} episodes could not be played: the servers failed"
    return State.SCORED, ""


def ending(store: Store, board: Board, submission: Submission, results: list[work.NewResult]) -> tuple[State, str]:
    """As `state_of`, and what its own faults add: an agent that never played a turn has failed, and one that sometimes
    faulted is told how. A remote agent's turns are its owner's to send.
    """
    state, reason = state_of(results)
    if state is State.FAILED:
        return state, reason
    played = [each for of in board.environments for each in episodes.records(store, submission, of.id)]
    faults = [record.fault for record in played if record.outcome == "agent_fault"]
    if not faults:
        return state, reason
    fault, _ = Counter(map(_told, faults)).most_common(1)[0]
    if submission.kind is not Kind.REMOTE and len(faults) == len(played) and not any(each.actions for each in played):
        return State.FAILED, f"{_NEVER}: {fault}; try it with `leaderboard evaluate`"
    faulted = (
        f"{len(faults)} of {len(played)} scored episodes were ended by a fault of the agent's, most often: {fault}"
    )
    return state, f"{reason}; {faulted}" if reason else faulted


def _told(fault: str) -> str:
    """What its owner is told of a fault: its kind alone, since an agent may put what it read into the rest."""
    return fault if fault.startswith(f"{OVERRAN}: ") else fault.partition(":")[0]


def _scripted(store: Store, board: Board) -> _Scripted:
    rows = {row.name: row for row in submissions.of_board(store, board) if row.kind is Kind.SCRIPTED}
    return _Scripted(rows[RandomAgent.name], rows[OracleAgent.name])


def _result(store: Store, environment: Environment, submission: Submission, scripted: _Scripted) -> work.NewResult:
    deal = boards.deal(store, environment.id)
    played = episodes.records(store, submission, environment.id)
    floors = episodes.records(store, scripted.random, environment.id)
    ceilings = episodes.records(store, scripted.oracle, environment.id)
    samples = submission.kind is not Kind.SCRIPTED and not environment.definition.greedy
    return work.NewResult(environment.id, _statistics(deal, played, floors, ceilings, samples=samples))


def _statistics(
    deal: Deal,
    played: list[EpisodeRecord],
    floors: list[EpisodeRecord],
    ceilings: list[EpisodeRecord],
    *,
    samples: bool,
) -> Statistics:
    instances = deal.scored.instances
    floor = summary.reference(instances, "floor", floors)
    ceiling = summary.reference(instances, "ceiling", ceilings)
    return summary.summarise(played, floor, ceiling, samples=samples)
