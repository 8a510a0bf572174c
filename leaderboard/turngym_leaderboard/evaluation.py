"""Plays a protocol with several agents on the same instances and puts the record together.

The rows of a record are the random player, the agents in the order given, and the oracle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from turngym_client import Client, EnvironmentInfo, ServerInfo, Split
from turngym_leaderboard import summary
from turngym_leaderboard.agents import Agent, AgentUnavailable
from turngym_leaderboard.agents.scripted import OracleAgent, RandomAgent
from turngym_leaderboard.protocol import Protocol, Selection, plays_level_file, select_instances
from turngym_leaderboard.record import (
    EnvironmentRecord,
    ProtocolRecord,
    Record,
    RowRecord,
    Trajectory,
    code_record,
    now,
)
from turngym_leaderboard.runner import Played, play

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class CannotEvaluate(Exception):
    """The evaluation cannot begin. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A record and the trajectories of its episodes."""

    record: Record
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    agent: Agent
    protocol: Protocol
    played: tuple[Played, ...] = ()
    unavailable: str = ""


def evaluate(
    client: Client,
    protocol: Protocol,
    agents: Sequence[Agent],
    *,
    server: Sequence[str] = (),
    also_greedy: bool = False,
    sessions: int = 128,
    progress: Progress = lambda what, done, total: None,
) -> Evaluation:
    """Plays the random player, the agents and the oracle on the same instances with the same seeds.

    Comparisons of the record are the paired differences between the agents, later less earlier: for [before, after] on
    the instances of one evaluation, what came between them.

    Args:
        server: addresses, for the record.
        also_greedy: agents that sample are played greedily as well, in rows of their own.
        sessions: episodes held at once; fewer where the server allows fewer.

    Raises:
        CannotEvaluate: the split is not served, no level was found, or two agents have one name.
        AgentUnavailable: one of the agents cannot play.
        TurngymError: as the client and `play` do.
    """
    information = client.server()
    details = client.environment(protocol.environment, options=protocol.options, limits=protocol.limits)
    check_split(protocol, details, information, shows_token=client.shows_token)
    sessions = min(sessions, information.max_sessions or sessions)
    progress("levels", 0, protocol.instances)
    selection = select_instances(client, protocol, sessions=sessions)
    progress("levels", protocol.instances, protocol.instances)
    if not selection.instances:
        raise CannotEvaluate(f"no level of split {protocol.split.value} of {protocol.environment} was found")
    rows = [
        _play_row(client, row, selection, sessions, progress)
        for row in _rows(protocol, agents, also_greedy=also_greedy)
    ]
    records = _row_records(rows, selection)
    record = Record(
        created=now(),
        code=code_record(),
        server=tuple(server),
        server_version=information.version,
        protocol=ProtocolRecord.of(protocol),
        environment=EnvironmentRecord.of(selection),
        sessions=sessions,
        rows=records,
        comparisons=summary.compare_agents(records, greedy=protocol.decoding.greedy),
    )
    return Evaluation(record, tuple(_trajectories(rows)))


def check_split(protocol: Protocol, details: EnvironmentInfo, information: ServerInfo, *, shows_token: bool) -> None:
    """Raises CannotEvaluate with what to do where the server does not serve the protocol's split."""
    listed = details.splits.get(protocol.split)
    if listed is not None and listed.served:
        return
    served = [split.value for split, told in details.splits.items() if told.served]
    what = f"the server does not serve split {protocol.split.value} of {protocol.environment}"
    if plays_level_file(details.options_json) and details.splits[Split.ALL].served:
        raise CannotEvaluate(
            f"{what}: it plays a level file, which is divided only where it has 200 held-out worlds. "
            "Play it with --split all"
        )
    if protocol.split in information.splits:
        raise CannotEvaluate(
            f"{what}: under these options it has too few worlds to be divided. "
            f"Play another with --split; it serves {', '.join(served) or 'none'}"
        )
    if shows_token:
        # What a server tells is what the token's role may play, so its own --splits are not known here.
        raise CannotEvaluate(
            f"the server does not serve split {protocol.split.value} of {protocol.environment} to this token "
            f"(served to it: {', '.join(served) or 'none'}): the token's role does not allow it, or the server was "
            "started without it. Ask its operator for a token of role evaluate"
        )
    wanted = ",".join(dict.fromkeys([*(split.value for split in information.splits), protocol.split.value]))
    raise CannotEvaluate(
        f"{what} (it serves {', '.join(served) or 'none'}); "
        f"start it again as it was started, but with --splits {wanted}"
    )


def _rows(protocol: Protocol, agents: Sequence[Agent], *, also_greedy: bool) -> list[_Row]:
    greedy = replace(protocol, decoding=replace(protocol.decoding, greedy=True))
    scripted = {agent.name: agent for agent in agents if isinstance(agent, RandomAgent | OracleAgent)}
    rows = [_Row("random", scripted.get("random", RandomAgent()), protocol)]
    for agent in agents:
        if agent.name in scripted:
            continue
        rows.append(_Row(agent.name, agent, protocol))
        if also_greedy and agent.samples and not protocol.decoding.greedy:
            rows.append(_Row(f"{agent.name} (greedy)", agent, greedy))
    rows.append(_Row("oracle", scripted.get("oracle", OracleAgent()), protocol))
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CannotEvaluate(f"two agents are called {twice[0]!r}; tell them apart with --agent NAME=KIND:PATH")
    return rows


def _play_row(client: Client, row: _Row, selection: Selection, sessions: int, progress: Progress) -> _Row:
    total = len(selection.instances) * row.protocol.attempts
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(row.name, done, total)

    progress(row.name, 0, total)
    try:
        played = play(client, row.protocol, selection, row.agent, sessions=sessions, on_episodes=advance)
    except AgentUnavailable as error:
        # The two scripted rows are shown even where there is nothing in them; an agent that was asked for must play.
        if not isinstance(row.agent, RandomAgent | OracleAgent):
            raise
        return replace(row, unavailable=str(error))
    return replace(row, played=tuple(played))


def _row_records(rows: Sequence[_Row], selection: Selection) -> tuple[RowRecord, ...]:
    episodes = [[played.record for played in row.played] for row in rows]
    floor = summary.reference(selection.instances, "floor", episodes[0])
    ceiling = summary.reference(selection.instances, "ceiling", episodes[-1])
    return tuple(
        RowRecord(
            agent=row.name,
            description=row.agent.description,
            decoding=str(row.protocol.decoding) if row.agent.samples else "",
            unavailable=row.unavailable,
            statistics=summary.summarise(
                played, floor, ceiling, samples=row.agent.samples and not row.protocol.decoding.greedy
            )
            if played
            else None,
            episodes=tuple(played),
        )
        for row, played in zip(rows, episodes, strict=True)
    )


def _trajectories(rows: Sequence[_Row]) -> list[Trajectory]:
    return [
        Trajectory(
            agent=row.name,
            draw=played.record.draw,
            attempt=played.record.attempt,
            turns=played.turns,
            last_observation=played.last_observation,
        )
        for row in rows
        for played in row.played
    ]
