"""Turns episodes into the numbers of a row, and rows into comparisons. Knows nothing of servers or agents."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turngym_leaderboard import statistics
from turngym_leaderboard.binomial import Interval
from turngym_leaderboard.protocol import Instance
from turngym_leaderboard.ranking import MISSING, Environment, Ranking, rank, solved_attempts
from turngym_leaderboard.record import (
    Comparison,
    EpisodeRecord,
    Overall,
    Rate,
    RowRecord,
    Score,
    Spent,
    Statistics,
    by_kind,
    total,
)

BOOTSTRAP_SEED = 0
"""Of the intervals whose floor or ceiling was played."""
UNRANKED_OVER = 0.01
"""Share of unresolved episodes over which a row is not ranked."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Floor or ceiling of each instance, by draw, and where they come from. Empty: there is none."""

    values: Mapping[int, float]
    source: Literal["exact", "played"]


def outcomes_by_draw(episodes: Sequence[EpisodeRecord]) -> dict[int, list[bool | None]]:
    """Success of each attempt, by the instance's draw, in the order of play."""
    outcomes: defaultdict[int, list[bool | None]] = defaultdict(list)
    for episode in episodes:
        outcomes[episode.draw].append(episode.success)
    return dict(outcomes)


def resolved_by_draw(episodes: Sequence[EpisodeRecord]) -> dict[int, list[bool]]:
    """The same without what is unresolved; instances without any resolved attempt are left out."""
    resolved = {
        draw: [success for success in attempts if success is not None]
        for draw, attempts in outcomes_by_draw(episodes).items()
    }
    return {draw: attempts for draw, attempts in resolved.items() if attempts}


def reference(
    instances: Sequence[Instance], which: Literal["floor", "ceiling"], played: Sequence[EpisodeRecord]
) -> Reference:
    """Floors or ceilings of the instances: exact where every one has it, else as the scripted row played them."""
    exact = {instance.draw: getattr(instance, which) for instance in instances}
    if all(value is not None for value in exact.values()):
        return Reference(exact, "exact")
    means = {draw: sum(attempts) / len(attempts) for draw, attempts in resolved_by_draw(played).items()}
    return Reference(means, "played")


def summarise(episodes: Sequence[EpisodeRecord], floor: Reference, ceiling: Reference, *, samples: bool) -> Statistics:
    """The numbers of a row.

    Args:
        samples: the agent's attempts differ by its own chance; pass@k and pass^k are told only then.
    """
    everything = outcomes_by_draw(episodes)
    resolved = resolved_by_draw(episodes)
    bounds = statistics.unresolved_bounds(list(everything.values()))
    kept = [episode for episode in episodes if episode.success is not None]
    unresolved = len(episodes) - len(kept)
    tokens = [episode.tokens for episode in kept if episode.tokens is not None]
    spent = Spent(
        solved=sum(bool(episode.success) for episode in kept),
        turns=sum(len(episode.actions) for episode in kept),
        tokens=total(tokens),
        tokens_in=total(episode.tokens_in for episode in kept),
        cost=total(episode.cost for episode in kept),
    )
    turns = spent.turns
    score, missing = _score(resolved, floor, ceiling)
    score_bounds = _score_bounds(everything, floor, ceiling) if score is not None else None
    attempts = min((len(a) for a in resolved.values()), default=0) if samples else 0
    ks = range(1, attempts + 1) if attempts > 1 else ()
    return Statistics(
        success=Rate.of(statistics.success(list(resolved.values()))) if resolved else None,
        score=score,
        score_missing=missing,
        instances=len(resolved),
        episodes=len(episodes),
        unresolved=unresolved,
        ranked=unresolved <= UNRANKED_OVER * len(episodes),
        low_bound=bounds.low,
        high_bound=bounds.high,
        mean_return=_share(sum(episode.total_reward for episode in kept), len(kept)),
        turns=_share(turns, len(kept)),
        tokens=_share(sum(tokens), len(tokens)),
        turns_per_solved=spent.per_solved("turns"),
        tokens_per_solved=spent.per_solved("tokens"),
        invalid_action_rate=_share(sum(episode.invalid_turns for episode in kept), turns),
        unparsed_rate=_share(sum(episode.unparsed_turns for episode in kept), turns),
        truncation_rate=_share(sum(episode.truncated for episode in kept), len(kept)),
        cut_off_rate=_share(sum(episode.cut_off_turns for episode in kept), turns),
        agent_faults=sum(episode.outcome == "agent_fault" for episode in episodes),
        environment_faults=sum(episode.outcome == "environment_fault" for episode in episodes),
        spent=spent,
        score_low_bound=score_bounds.low if score_bounds else None,
        score_high_bound=score_bounds.high if score_bounds else None,
        faults=by_kind(episode.fault for episode in episodes if episode.outcome == "agent_fault"),
        failures=_sum_by_kind(episode.failures for episode in kept),
        pass_at={k: statistics.pass_at_k(list(resolved.values()), k) for k in ks},
        pass_hat={k: statistics.pass_hat_k(list(resolved.values()), k) for k in ks},
    )


def overall(environments: Mapping[str, Statistics | None]) -> Overall:
    """A row's numbers in several environments together.

    Args:
        environments: by what they are called; None: the agent cannot play there.

    Raises:
        ValueError: there is none.
    """
    if not environments:
        raise ValueError("an overall score needs at least one environment")
    told = [each for each in environments.values() if each is not None]
    scores = [each.score for each in told if each.score is not None]
    value = error = interval = low_bound = high_bound = None
    lacking = [name for name, each in environments.items() if each is None or each.score is None]
    if not lacking:
        value, error, interval = statistics.mean_score(
            [score.value for score in scores],
            [score.standard_error for score in scores],
            [Interval(score.low, score.high) for score in scores],
        )
        low_bound = _mean([each.score_low_bound for each in told])
        high_bound = _mean([each.score_high_bound for each in told])
    return Overall(
        value=value,
        standard_error=error,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        missing=f"no normalised score in {', '.join(lacking)}" if lacking else "",
        ranked=not lacking and all(each.ranked for each in told),
        low_bound=low_bound,
        high_bound=high_bound,
        episodes=sum(each.episodes for each in told),
        unresolved=sum(each.unresolved for each in told),
        spent=_together([each.spent for each in told]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _together(spent: Sequence[Spent | None]) -> Spent | None:
    known = [each for each in spent if each is not None]
    if not known or len(known) < len(spent):
        return None
    return Spent(
        solved=sum(each.solved for each in known),
        turns=sum(each.turns for each in known),
        tokens=total(each.tokens for each in known),
        tokens_in=total(each.tokens_in for each in known),
        cost=total(each.cost for each in known),
    )


def compare_agents(rows: Sequence[RowRecord], *, greedy: bool) -> tuple[Comparison, ...]:
    """The comparisons of a record: of the rows between the scripted ones, those sampled and those greedy apart.

    Args:
        greedy: the protocol's; then every row is greedy.
    """
    return tuple(comparison for side in _sides(rows, greedy=greedy) for comparison in compare(side))


def rank_agents(rows: Sequence[RowRecord], *, attempts: int, greedy: bool) -> tuple[tuple[list[str], Ranking], ...]:
    """The rankings of a record with the names of those ranked: of the rows between the scripted ones.

    Left out is who is unranked, and a ranking of fewer than two.

    Args:
        attempts: that every agent was dealt on each instance.
        greedy: as in `compare_agents`.
    """
    rankings: list[tuple[list[str], Ranking]] = []
    for side in _sides(rows, greedy=greedy):
        able = [row for row in side if row.statistics is not None and row.statistics.ranked]
        solved = solved_attempts([outcomes_by_draw(row.episodes) for row in able], attempts)
        whole = (solved != MISSING).any(axis=1)
        names = [row.agent for row, is_whole in zip(able, whole, strict=True) if is_whole]
        if len(names) > 1:
            rankings.append((names, rank([Environment(solved[whole], attempts)])))
    return tuple(rankings)


def _sides(rows: Sequence[RowRecord], *, greedy: bool) -> tuple[list[RowRecord], list[RowRecord]]:
    """The rows between the scripted ones: those sampled, and those greedy."""
    contestants = [(row, greedy or row.decoding == "greedy") for row in rows[1:-1]]
    sampled, most_likely = ([row for row, is_greedy in contestants if is_greedy == side] for side in (False, True))
    return sampled, most_likely


def compare(rows: Sequence[RowRecord]) -> tuple[Comparison, ...]:
    """Every pair of rows, later less earlier, on the instances whose attempts are all resolved in both.

    P-values are also told adjusted by Holm over all pairs. A pair without a common instance is left out.
    """
    found: list[tuple[str, str, statistics.Difference]] = []
    for first, second in itertools.combinations(rows, 2):
        one, other = outcomes_by_draw(first.episodes), outcomes_by_draw(second.episodes)
        draws = [draw for draw in one if draw in other and None not in one[draw] and None not in other[draw]]
        if draws:
            before, after = ([[bool(success) for success in side[draw]] for draw in draws] for side in (one, other))
            found.append((first.agent, second.agent, statistics.paired_difference(before, after)))
    adjusted = statistics.holm([difference.p_value for _, _, difference in found])
    return tuple(
        Comparison(
            first=first,
            second=second,
            difference=difference.value,
            low=difference.interval.low,
            high=difference.interval.high,
            instances=difference.instances,
            p_value=difference.p_value,
            holm_p_value=holm,
            test=difference.test,
        )
        for (first, second, difference), holm in zip(found, adjusted, strict=True)
    )


def _score(resolved: Mapping[int, list[bool]], floor: Reference, ceiling: Reference) -> tuple[Score | None, str]:
    """The normalised score over the instances that have everything it needs, or why there is none."""
    draws = [draw for draw in resolved if draw in floor.values and draw in ceiling.values]
    sides = (
        [resolved[draw] for draw in draws],
        [floor.values[draw] for draw in draws],
        [ceiling.values[draw] for draw in draws],
    )
    if len(draws) < 2:
        return None, f"{len(draws)} instances have a floor and a ceiling; a normalised score needs 2"
    try:
        if floor.source == ceiling.source == "exact":
            result = statistics.normalised(*sides)
        else:
            result = statistics.normalised_by_bootstrap(*sides, seed=BOOTSTRAP_SEED)
    except ValueError as error:
        return None, str(error)
    return Score(
        value=result.value,
        standard_error=result.standard_error,
        low=result.interval.low,
        high=result.interval.high,
        floor=result.floor,
        ceiling=result.ceiling,
        method=result.method,
        floor_source=floor.source,
        ceiling_source=ceiling.source,
    ), ""


def _score_bounds(outcomes: Mapping[int, list[bool | None]], floor: Reference, ceiling: Reference) -> Interval:
    """The normalised score if every unresolved attempt had failed, and if it had succeeded."""
    draws = [draw for draw in outcomes if draw in floor.values and draw in ceiling.values]
    sides = [np.array([reference.values[draw] for draw in draws]) for reference in (floor, ceiling)]
    low, high = (
        statistics.normalised_value(
            statistics.instance_means([[fill if o is None else o for o in outcomes[draw]] for draw in draws]), *sides
        )
        for fill in (False, True)
    )
    return Interval(low, high)


def _sum_by_kind(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    summed: Counter[str] = Counter()
    for each in counts:
        summed.update(each)
    return dict(sorted(summed.items()))


def _share(total: float, count: int) -> float | None:
    return total / count if count else None
