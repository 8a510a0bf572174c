"""A board's submission as records that `leaderboard verify` plays again: one for each environment, between the scripted
rows that it is measured by.

A record tells the seed that all others follow from, which is the board's secret: while the season lasts it is for the
board's operator. Numbers are computed anew from the episodes, by the code that the record names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from turngym_leaderboard import anew, summary
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.record import (
    EnvironmentRecord,
    EpisodeRecord,
    ProtocolRecord,
    Record,
    RowRecord,
    Statistics,
    Trajectory,
    code_record,
)
from turngym_leaderboard.store import Store, WrongState, boards, episodes, submissions
from turngym_leaderboard.store.values import Board, Environment, Kind, State, Submission

_FINISHED: Final = (State.SCORED, State.INCOMPLETE)
_OF_THE_BOARD: Final = frozenset({"model_type", "parameters", "vocabulary", "bytes", "endpoint", anew.TOLD})
"""Of a description: what a board adds to what its agent says of itself."""
_SAMPLES: Final = (Kind.CHECKPOINT, Kind.ENDPOINT)


@dataclass(frozen=True, slots=True)
class BoardRecord:
    """A record of one environment; what was read and written in its episodes is read when it is asked for."""

    environment: Environment
    record: Record
    store: Store
    rows: tuple[tuple[str, Submission], ...]

    def trajectories(self) -> Iterator[Trajectory]:
        """In the order of the record's rows."""
        for name, submission in self.rows:
            for _, trajectory in episodes.whole(self.store, submission, self.environment.id):
                yield trajectory.model_copy(update={"agent": name})


def board_records(store: Store, board: Board, submission: Submission) -> Iterator[BoardRecord]:
    """A record for each environment that a submission has played.

    Raises:
        WrongState: it, or a scripted row, is not played to its end.
    """
    random, oracle = _scripted(store, board)
    for row in (random, submission, oracle):
        ended = _FINISHED if row.kind is not Kind.SCRIPTED else (*_FINISHED, State.FAILED)
        if row.state not in ended:
            raise WrongState(f"{row.name} ({row.public_id}) is {row.state.value}; a record is of what has ended")
    for environment in board.environments:
        middle = [] if submission.kind is Kind.SCRIPTED else [submission]
        if middle and not episodes.records(store, submission, environment.id):
            continue  # It could not play it, or was not dealt it.
        yield _record(store, board, environment, [random, *middle, oracle])


def _record(store: Store, board: Board, environment: Environment, rows: list[Submission]) -> BoardRecord:
    deal = boards.deal(store, environment.id)
    protocol = environment.definition.protocol(boards.secret(store, board), version=environment.version)
    played = [[record for record, _ in episodes.whole(store, row, environment.id)] for row in rows]
    floor = summary.reference(deal.scored.instances, "floor", played[0])
    ceiling = summary.reference(deal.scored.instances, "ceiling", played[-1])
    results = episodes.results(store, board)

    def row_record(row: Submission, told: list[EpisodeRecord]) -> RowRecord:
        decoding = str(environment.definition.decoding) if row.kind in _SAMPLES else ""
        samples = bool(decoding) and not environment.definition.greedy
        statistics: Statistics | None = summary.summarise(told, floor, ceiling, samples=samples) if told else None
        missing = {each.environment: each.unavailable for each in results.get(row.id, [])}
        return RowRecord(
            agent=_name(row),
            description=_description(row),
            decoding=decoding,
            unavailable="" if told else missing.get(environment.label, ""),
            statistics=statistics,
            episodes=tuple(told),
        )

    records = tuple(row_record(row, told) for row, told in zip(rows, played, strict=True))
    finished = max((row.finished for row in rows if row.finished is not None), default=board.created)
    record = Record(
        created=finished.isoformat(timespec="seconds"),
        code=code_record(),
        server=(),
        server_version="",
        protocol=ProtocolRecord.of(protocol),
        environment=EnvironmentRecord.of(deal.scored),
        sessions=board.definition.batch,
        rows=records,
        comparisons=summary.compare_agents(records, greedy=protocol.decoding.greedy),
    )
    return BoardRecord(environment, record, store, tuple((_name(row), row) for row in rows))


def _scripted(store: Store, board: Board) -> tuple[Submission, Submission]:
    rows = {row.name: row for row in submissions.of_board(store, board) if row.kind is Kind.SCRIPTED}
    return rows[RandomAgent.name], rows[OracleAgent.name]


def _name(row: Submission) -> str:
    """Names of agents are unique in a record, and those of the scripted rows are theirs."""
    taken = row.kind is not Kind.SCRIPTED and row.name in (RandomAgent.name, OracleAgent.name)
    return f"{row.name} ({row.public_id})" if taken else row.name


def _description(row: Submission) -> dict[str, str]:
    told = {key: value for key, value in row.description.items() if key not in _OF_THE_BOARD}
    # Where its files lie on the board's machine is nobody's business.
    return {**told, "folder": ""} if row.kind is Kind.CHECKPOINT else told
