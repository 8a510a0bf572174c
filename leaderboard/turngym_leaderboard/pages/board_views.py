"""A board's values, as the store gives them, turned into what pages show. Pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime

from turngym_leaderboard import statistics
from turngym_leaderboard.naming import folded
from turngym_leaderboard.pages.board_ranking import BoardRanking, overall
from turngym_leaderboard.pages.episodes import ending
from turngym_leaderboard.pages.plain_text import name
from turngym_leaderboard.pages.render import dollars, number, percent
from turngym_leaderboard.pages.views import (
    BoardRow,
    Column,
    EnvironmentComparison,
    EnvironmentResult,
    EpisodeRow,
    Estimate,
    InstancePair,
    OwnLine,
    Side,
    WaitingRow,
    verdict,
)
from turngym_leaderboard.record import Overall, Rate, Score, Statistics
from turngym_leaderboard.store.episodes import Outcomes
from turngym_leaderboard.store.values import Board, Environment, Episode, Kind, Result, Submission


def when(moment: datetime | None) -> str:
    """A time to the minute, UTC; "" for None."""
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M UTC")


def owner_of(submission: Submission) -> str:
    """Who submitted it; "": the board itself."""
    return submission.owner.name if submission.owner else ""


def score_of(told: Overall) -> Estimate | None:
    """The overall normalised score."""
    if told.value is None or told.low is None or told.high is None:
        return None
    return Estimate(told.value, told.low, told.high)


def price_unit(told: Sequence[Overall]) -> str:
    """What a solved episode's price is told in: "$" where any row has a cost, else "tokens" where any tells those."""
    spent = [each.spent for each in told if each.spent is not None]
    if any(each.cost is not None for each in spent):
        return "$"
    return "tokens" if any(each.tokens is not None for each in spent) else ""


def column(environment: Environment, results: Sequence[Mapping[str, Result]]) -> Column:
    """An environment, with floor and ceiling as the rows that know them tell."""
    scores = [score for each in results if (score := _score(each.get(environment.label))) is not None]
    definition = environment.definition
    limits = definition.limits
    attempts = "1 attempt" if definition.attempts == 1 else f"{definition.attempts} attempts"
    told = (
        f"{definition.id} {environment.version}, split {definition.split.value}: {definition.instances:,} instances, "
        f"{attempts} each, "
        f"{limits.max_turns or 'the environment’s'} turns, {limits.max_actions or 'the environment’s'} actions, "
        f"{definition.decoding}"
    )
    return Column(
        label=environment.label,
        environment=definition.id,
        floor=scores[0].floor if scores else None,
        ceiling=scores[0].ceiling if scores else None,
        protocol=told,
        overall=definition.overall,
    )


def board_row(
    board: Board, submission: Submission, results: Mapping[str, Result], ranking: BoardRanking, unit: str
) -> BoardRow:
    """A submission with its numbers."""
    told = overall(board, results)
    spent = told.spent
    notes = [
        f"{environment.label}: {result.unavailable}"
        for environment in board.environments
        if (result := results.get(environment.label)) is not None and result.unavailable
    ]
    if submission.kind is Kind.REMOTE and any(each.definition.attempts > 1 for each in board.environments):
        notes.append("it is dealt one attempt of each instance, and compared with others by their first ones")
    if told.unresolved:
        kept = "" if told.ranked else ", so it is not ranked"
        notes.append(f"{told.unresolved:,} of {told.episodes:,} episodes are not resolved{kept}")
    return BoardRow(
        id=submission.public_id,
        name=submission.name,
        kind=submission.kind.value,
        owner=owner_of(submission),
        score=score_of(told),
        lacking=told.missing,
        ranks=ranking.ranks(submission.public_id),
        successes=tuple(_success(results.get(environment.label)) for environment in board.environments),
        price=spent.per_solved("cost" if unit == "$" else "tokens") if spent and unit else None,
        notes=tuple(notes),
        private=is_private(submission),
    )


def place(row: BoardRow) -> tuple[float, str]:
    """The order of rows: the best score first, those without one last."""
    return (-row.score.value if row.score else float("inf"), row.name)


def waiting_row(submission: Submission, board: Board) -> WaitingRow:
    """A submission without numbers."""
    return WaitingRow(
        id=submission.public_id,
        name=submission.name,
        kind=submission.kind.value,
        owner=owner_of(submission),
        state=submission.state.value,
        reason=submission.reason_on(board),
        episodes=submission.episodes,
        total=submission.total,
        private=is_private(submission),
    )


def own_line(submission: Submission, board: Board) -> OwnLine:
    """A submission on this board, for its owner."""
    return OwnLine(
        id=submission.public_id,
        board=board.slug,
        name=submission.name,
        kind=submission.kind.value,
        state=submission.state.value,
        reason=submission.reason_on(board),
        private=is_private(submission),
    )


def told_apart(found: Sequence[Submission]) -> tuple[tuple[str, str], ...]:
    """Ids of submissions and what a choice calls them: by name, and where others have that too by kind and owner.

    Where these are the same as well, by the id.
    """
    whose = {each.id: f"{each.kind.value}, {owner_of(each) or 'the board’s own'}" for each in found}
    names = Counter(folded(each.name) for each in found)
    whole = Counter((folded(each.name), whose[each.id]) for each in found)

    def told(each: Submission) -> str:
        if names[folded(each.name)] == 1:
            return name(each.name)
        also = f", {each.public_id}" if whole[folded(each.name), whose[each.id]] > 1 else ""
        return f"{name(each.name, 40)} ({name(whose[each.id])}{also})"

    return tuple((each.public_id, told(each)) for each in found)


def is_private(submission: Submission) -> bool:
    """Its owner and admins alone see it."""
    return not submission.public


def times_of(submission: Submission) -> tuple[tuple[str, str], ...]:
    """What happened to a submission, and when."""
    told = (
        ("submitted", submission.created),
        ("finished", submission.finished),
    )
    return tuple((what, when(moment)) for what, moment in told if moment is not None)


def environment_result(environment: Environment, result: Result) -> EnvironmentResult:
    """What a submission came to in one environment."""
    told = result.statistics
    score = _score(result)
    return EnvironmentResult(
        label=environment.label,
        environment=environment.definition.id,
        unavailable=result.unavailable,
        success=_success(result),
        score=_interval(score),
        score_missing=told.score_missing if told else "",
        floor=score.floor if score else None,
        ceiling=score.ceiling if score else None,
        instances=told.instances if told else 0,
        episodes=told.episodes if told else 0,
        unresolved=told.unresolved if told else 0,
        bounds=(told.low_bound, told.high_bound) if told and told.unresolved else None,
        figures=tuple(_figures(told)) if told else (),
        faults=_most_first(told.faults) if told else (),
        failures=_most_first(told.failures) if told else (),
    )


def episode_row(submission: Submission, line: Episode) -> EpisodeRow:
    """A line of a list of a submission's episodes. Its key holds the submission's public id."""
    attempt = "showcase" if line.showcase else f"attempt {line.attempt + 1}"
    return EpisodeRow(
        number=line.id,
        key=f"{submission.public_id}.{line.id}",
        agent=submission.name,
        environment=line.environment,
        label=f"instance {line.draw}, {attempt}",
        instance=f"{line.environment} {line.draw}",
        verdict=verdict(line.success),
        turns=line.turns,
        total=line.total_reward,
        faults=ending(line.outcome),
    )


def environment_comparison(
    environment: Environment, one: Outcomes, other: Outcomes, results: tuple[Result | None, Result | None]
) -> EnvironmentComparison:
    """Two submissions on the instances whose attempts are all resolved in both, of those attempts that both were dealt:
    of a remote agent's and another's the first of each instance.

    Args:
        one, other: success of each attempt, by instance.
        results: what each came to.
    """
    attempts = min(max(map(len, outcomes.values()), default=0) for outcomes in (one, other))
    both = [draw for draw in sorted(one) if draw in other and attempts <= min(len(one[draw]), len(other[draw]))]
    draws = [draw for draw in both if None not in (*one[draw][:attempts], *other[draw][:attempts])]
    first, second = ([list(map(bool, outcomes[draw][:attempts])) for draw in draws] for outcomes in (one, other))
    difference = statistics.paired_difference(first, second) if draws else None
    interval = difference.interval if difference else None
    return EnvironmentComparison(
        label=environment.label,
        one=_success(results[0]),
        other=_success(results[1]),
        difference=Estimate(difference.value, interval.low, interval.high) if difference and interval else None,
        p_value=difference.p_value if difference else None,
        test={"mcnemar": "exact McNemar", "sign-flip": "exact sign-flip"}.get(difference.test, "")
        if difference
        else "",
        disagreement=statistics.disagreement(difference.p_value, difference.interval, difference.instances)
        if difference
        else "",
        attempts=attempts,
        instances=tuple(_pair(*each) for each in zip(draws, map(sum, first), map(sum, second), strict=True)),
    )


def _pair(draw: int, one: int, other: int) -> InstancePair:
    side: Side = "one" if one > other else "other" if other > one else "both" if one else "neither"
    return InstancePair(draw, one, other, side)


def _figures(told: Statistics) -> list[tuple[str, str]]:
    cost = told.spent.per_solved("cost") if told.spent else None
    figures = [
        ("mean return", number(told.mean_return)),
        ("turns an episode", number(told.turns)),
        ("turns a solved episode", number(told.turns_per_solved)),
        ("tokens written an episode", number(told.tokens, 1)),
        ("tokens a solved episode", number(told.tokens_per_solved, 1)),
        ("cost a solved episode", "–" if cost is None else dollars(cost)),
        ("turns with an invalid action", percent(told.invalid_action_rate)),
        ("turns that could not be parsed", percent(told.unparsed_rate)),
        ("turns cut off", percent(told.cut_off_rate)),
        ("episodes ended by a limit", percent(told.truncation_rate)),
        ("faults of the agent", f"{told.agent_faults:,}"),
        ("faults of the environment", f"{told.environment_faults:,}"),
        *((f"pass@{k}", percent(share)) for k, share in told.pass_at.items()),
        *((f"pass^{k}", percent(share)) for k, share in told.pass_hat.items()),
    ]
    return [(what, how) for what, how in figures if how not in ("–", "0")]


def _most_first(counts: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(counts.items(), key=lambda counted: (-counted[1], counted[0])))


def _success(result: Result | None) -> Estimate | None:
    rate: Rate | None = result.statistics.success if result and result.statistics else None
    return Estimate(rate.rate, rate.low, rate.high) if rate else None


def _score(result: Result | None) -> Score | None:
    return result.statistics.score if result and result.statistics else None


def _interval(score: Score | None) -> Estimate | None:
    return Estimate(score.value, score.low, score.high) if score else None


def is_contestant(submission: Submission) -> bool:
    """It is not one of the board's own rows."""
    return submission.kind is not Kind.SCRIPTED
