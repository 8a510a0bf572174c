"""Who is better than whom on a board, among those that whoever looks may see. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from turngym_leaderboard import summary
from turngym_leaderboard.ranking import (
    MISSING,
    Environment,
    Ranking,
    first_attempts,
    overall_weights,
    rank,
    solved_attempts,
)
from turngym_leaderboard.record import Overall, Statistics
from turngym_leaderboard.store.episodes import Outcomes
from turngym_leaderboard.store.values import Board, Kind, Result, State, Submission

WITH_RESULTS = (State.SCORED, State.INCOMPLETE)
"""States in which a submission has numbers."""


@dataclass(frozen=True, slots=True)
class BoardRanking:
    """A ranking of submissions.

    Attributes:
        ids: public ids, in the place of the ranking's agents. ranking: None where there are fewer than two.
    """

    ids: tuple[str, ...]
    ranking: Ranking | None

    @property
    def detectable(self) -> float | None:
        """The smallest true difference of scores that is found in 80 % of cases."""
        return self.ranking.detectable if self.ranking else None

    def ranks(self, public_id: str) -> tuple[int, int] | None:
        """Best and worst rank that the tests leave open; None: it is not ranked."""
        if self.ranking is None or public_id not in self.ids:
            return None
        return self.ranking.ranks[self.ids.index(public_id)]

    def adjusted(self, one: str, other: str) -> float | None:
        """The p-value of a pair, adjusted over all pairs; None: they are not both ranked."""
        if self.ranking is None:
            return None
        pairs = {frozenset((self.ids[p.first], self.ids[p.second])): p.adjusted for p in self.ranking.pairs}
        return pairs.get(frozenset((one, other)))


def by_label(results: Sequence[Result]) -> dict[str, Result]:
    """Results by the label of their environment."""
    return {result.environment: result for result in results}


def overall(board: Board, results: Mapping[str, Result]) -> Overall:
    """A submission's numbers in all environments that count."""
    counted: dict[str, Statistics | None] = {}
    for environment in board.environments:
        if environment.definition.overall:
            result = results.get(environment.label)
            counted[environment.label] = result.statistics if result else None
    return summary.overall(counted)


def rank_board(
    board: Board,
    visible: Sequence[Submission],
    results: Mapping[int, Mapping[str, Result]],
    outcomes: Mapping[int, Mapping[str, Outcomes]],
) -> BoardRanking:
    """Ranks the submissions that have every number it takes; the board's own rows are what they are measured by.

    Args:
        results, outcomes: by submission, then by environment.
    """
    able = [
        submission
        for submission in visible
        if submission.kind is not Kind.SCRIPTED
        and submission.state in WITH_RESULTS
        and overall(board, results.get(submission.id, {})).ranked
    ]
    counted = [environment for environment in board.environments if environment.definition.overall]
    played = {
        environment.label: _played(
            able,
            [outcomes.get(each.id, {}).get(environment.label, {}) for each in able],
            environment.definition.attempts,
        )
        for environment in counted
    }
    whole = [all(bool((played[e.label].solved[k] != MISSING).any()) for e in counted) for k in range(len(able))]
    able = [each for each, is_whole in zip(able, whole, strict=True) if is_whole]
    if len(able) < 2:
        return BoardRanking(tuple(each.public_id for each in able), None)
    weights = overall_weights([_span(results[able[0].id][environment.label]) for environment in counted])
    environments = [
        played[environment.label].of(whole, weight) for environment, weight in zip(counted, weights, strict=True)
    ]
    return BoardRanking(tuple(each.public_id for each in able), rank(environments))


def _played(able: Sequence[Submission], outcomes: Sequence[Outcomes], attempts: int) -> Environment:
    """What agents came to in an environment; remote ones, by the one attempt of each instance that they are dealt."""
    single = np.array([each.kind is Kind.REMOTE for each in able], np.bool_)
    solved = solved_attempts(outcomes, attempts)
    if not single.any():
        return Environment(solved, attempts)
    first = first_attempts(outcomes, attempts)
    return Environment(np.where(single[:, np.newaxis], first, solved), attempts, first=first, single=single)


def _span(result: Result) -> float:
    """What a normalised score divides a success rate by."""
    assert result.statistics is not None
    assert result.statistics.score is not None
    return result.statistics.score.ceiling - result.statistics.score.floor
