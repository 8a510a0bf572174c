"""Shows a record on a terminal. Knows nothing of how one is made."""

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from turngym_leaderboard import statistics, summary
from turngym_leaderboard.binomial import Interval
from turngym_leaderboard.protocol import plays_level_file
from turngym_leaderboard.record import Comparison, ProtocolRecord, Record, RowRecord, Score, Statistics


def show(console: Console, record: Record) -> None:
    """Prints protocol, rows and comparisons of a record."""
    console.print(Text(protocol_line(record), style="bold"))
    for line in agent_lines(record):
        console.print(Text(line))
    for note in notes(record):
        console.print(Text(note, style="yellow"))
    console.print(table(record))
    for comparison in record.comparisons:
        console.print(Text(comparison_line(comparison)))
    for line in [*rank_lines(record), *cost_lines(record)]:
        console.print(Text(line))


def protocol_line(record: Record) -> str:
    """What was played, in one paragraph."""
    protocol, environment = record.protocol, record.environment
    found = len(environment.instances)
    worlds = f"{_count(found, 'distinct world')} of split {protocol.split}"
    options = f" with options {environment.options_json}" if protocol.options or _from_file(record) else ""
    return (
        f"{protocol.environment} {environment.version}{options}: {worlds} (seed {protocol.seed}), "
        f"{_limits(record)}, {_count(protocol.attempts, 'attempt')} each, {_decoding(protocol)}"
    )


def _from_file(record: Record) -> bool:
    return plays_level_file(record.environment.options_json)


def _limits(record: Record) -> str:
    asked, limits = record.protocol.limits, record.environment.limits
    if _from_file(record) and not (asked.max_turns and asked.max_actions and asked.max_actions_per_turn):
        return "each level's own limits where none were asked for"
    return f"{limits.max_turns} turns of at most {limits.max_actions_per_turn} actions, {limits.max_actions} actions"


def agent_lines(record: Record) -> list[str]:
    """What an agent that samples reads and may write, once for each."""
    lines: dict[str, str] = {}
    for row in reversed(record.rows):
        told = row.description
        where = {
            "checkpoint": told.get("folder", ""),
            "endpoint": f"model {told.get('model')} at {told.get('url')}",
        }.get(told.get("kind", ""))
        if where is not None:
            lines[where] = (
                f"{row.agent}: reads {told['context']}, instructions {told['instructions']}, "
                f"writes at most {told['max_response_tokens']} tokens a turn; {where}"
            )
    return list(reversed(lines.values()))


def notes(record: Record) -> list[str]:
    """What a reader has to know before the numbers."""
    said: list[str] = []
    found, wanted = len(record.environment.instances), record.protocol.instances
    if found < wanted:
        said.append(
            f"only {_count(found, 'distinct world')} of the {wanted} asked for "
            f"in {_count(record.environment.draws, 'draw')}; what there is was played"
        )
    if record.protocol.split != "held_out":
        said.append(f"split {record.protocol.split} is not held out: agents may have been trained on these worlds")
    for row in record.rows:
        said += _met_before(record, row)
        if row.unavailable:
            said.append(f"{row.agent}: {row.unavailable}")
        told = row.statistics
        if told is None:
            continue
        if told.unresolved:
            ranked = "incomplete" if told.ranked else "incomplete and unranked"
            said.append(
                f"{row.agent}: {told.unresolved} of {told.episodes} episodes are unresolved, so the row is {ranked}; "
                f"success is {percent(told.low_bound)} if they all failed, {percent(told.high_bound)} if none did"
            )
        if told.agent_faults or told.environment_faults:
            said.append(
                f"{row.agent}: {told.agent_faults} faults of the agent's{_kinds(told.faults)} and "
                f"{told.environment_faults} of the environment's count as failures"
            )
        if told.failures:
            said.append(f"{row.agent}: turns whose answer was at fault{_kinds(told.failures)}")
        if told.score_missing:
            said.append(f"{row.agent}: no normalised score: {told.score_missing}")
    return said


def _met_before(record: Record, row: RowRecord) -> list[str]:
    """Whether an agent's own training may have met the worlds that it is scored on."""
    if record.protocol.environment not in row.description.get("trained_in", "").split(", "):
        return []
    said: list[str] = []
    if row.description.get("trained_split") == "all":
        said.append(f"{row.agent}: was trained on split all, so nothing was held out from it")
    epoch = int(row.description.get("trained_split_epoch", record.environment.split_epoch))
    if epoch != record.environment.split_epoch:
        said.append(
            f"{row.agent}: was trained under split epoch {epoch}, but these worlds are of epoch "
            f"{record.environment.split_epoch}: some may not have been held out from it"
        )
    return said


def table(record: Record) -> RenderableType:
    """The rows of a record."""
    drawn = Table(caption=_caption(record), caption_justify="left")
    drawn.add_column("agent", overflow="fold")
    for heading in (
        "success\n95 % interval",
        "normalised\n95 % interval",
        "mean\nreturn",
        "turns",
        "invalid\nactions",
        "truncated\nepisodes",
        "tokens",
    ):
        drawn.add_column(heading, justify="right", overflow="fold")
    for row in record.rows:
        drawn.add_row(_name(row), *_cells(row.statistics))
    several = [row for row in record.rows if row.statistics is not None and row.statistics.pass_at]
    if not several:
        return drawn
    return Group(drawn, *(Text(_passes(row)) for row in several))


def comparison_line(comparison: Comparison) -> str:
    """A paired difference in words."""
    excluded = comparison.low > 0 or comparison.high < 0
    interval = Interval(comparison.low, comparison.high)
    which = statistics.disagreement(comparison.p_value, interval, comparison.instances)
    return (
        f"{comparison.second} − {comparison.first}: {comparison.difference * 100:+.1f} points, 95 % interval "
        f"{comparison.low * 100:+.1f} to {comparison.high * 100:+.1f} ({'excludes' if excluded else 'includes'} 0; "
        f"paired over {comparison.instances} instances; exact {comparison.test} p = {comparison.p_value:.2g}, "
        f"Holm {comparison.holm_p_value:.2g})" + (f". {which}." if which else "")
    )


def rank_lines(record: Record) -> list[str]:
    """Ranks of the agents, where there are several, and what this comparison could have told apart."""
    protocol = record.protocol
    lines: list[str] = []
    for names, ranking in summary.rank_agents(record.rows, attempts=protocol.attempts, greedy=protocol.greedy):
        ranks = ", ".join(f"{names[agent]} {_range(*ranking.ranks[agent])}" for agent in ranking.order)
        assert ranking.detectable is not None
        lines.append(
            f"ranks: {ranks} ({_count(len(ranking.pairs), 'pair')}, any false difference in at most "
            f"{ranking.level * 100:g} % of cases; a difference of {ranking.detectable * 100:.1f} points is found in 4 "
            "of 5)"
        )
    return lines


def cost_lines(record: Record) -> list[str]:
    """What agents read, and what that and their answers cost, where it is known."""
    lines: list[str] = []
    for row in record.rows:
        spent = row.statistics.spent if row.statistics else None
        if spent is None or row.statistics is None or spent.tokens_in is None:
            continue
        episodes = row.statistics.episodes - row.statistics.unresolved
        line = f"{row.agent}: {spent.tokens_in / episodes:.1f} tokens read an episode"
        if spent.cost is not None:
            solved = spent.per_solved("cost")
            line += f", ${spent.cost:.2f} in all, " + (f"${solved:.4g} a solved episode" if solved else "none solved")
        lines.append(line)
    return lines


def _kinds(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{kind} {count}' for kind, count in counts.items())})" if counts else ""


def _range(best: int, worst: int) -> str:
    return str(best) if best == worst else f"{best}–{worst}"


def _name(row: RowRecord) -> str:
    return row.agent


def _cells(told: Statistics | None) -> list[str]:
    if told is None:
        return ["–"] * 7
    success = told.success
    return [
        f"{percent(success.rate)}\n{success.low * 100:.1f} to {success.high * 100:.1f}" if success else "–",
        _score(told.score),
        _number(told.mean_return, 2),
        _number(told.turns, 2),
        percent(told.invalid_action_rate),
        percent(told.truncation_rate),
        _number(told.tokens, 1),
    ]


def _score(score: Score | None) -> str:
    return f"{score.value:.3f}\n{score.low:.3f} to {score.high:.3f}" if score else "–"


def _passes(row: RowRecord) -> str:
    told = row.statistics
    assert told is not None
    pairs = ", ".join(
        f"pass@{k} {percent(told.pass_at[k])}, pass^{k} {percent(told.pass_hat[k])}" for k in told.pass_at if k > 1
    )
    return f"{row.agent}: {pairs}"


def _caption(record: Record) -> str:
    told = next((row.statistics for row in record.rows if row.statistics and row.statistics.success), None)
    if told is None or told.success is None:
        return "nothing was resolved"
    method = told.success.method.replace("clopper-pearson", "Clopper–Pearson").replace("wilson", "Wilson")
    said = "Turns and tokens are means an episode; invalid actions are shares of turns."
    if told.score is not None:
        said += (
            f"\nNormalised: 0 is a random player ({percent(told.score.floor)}, {told.score.floor_source}), 1 the best "
            f"possible ({percent(told.score.ceiling)}, {told.score.ceiling_source}) on these very instances."
        )
    return f"Success intervals by world ({method} for the first row). {said}"


def _decoding(protocol: ProtocolRecord) -> str:
    return "greedy" if protocol.greedy else f"T = {protocol.temperature:g}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def percent(share: float | None) -> str:
    """A share between 0 and 1; – where there is none."""
    return "–" if share is None else f"{share * 100:.1f} %"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
