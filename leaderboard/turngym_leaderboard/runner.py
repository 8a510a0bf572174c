"""Plays a protocol's instances with one agent, and says for each episode what came of it and whose fault it was.

The agent's faults are failures. The server's are not: such an episode is played again with the same seeds, and what
stays unresolved is marked so. An environment that fails after an agent's action is played again too; if it fails each
time, it is a failure, else crashing a losing episode would pay. Knows nothing of statistics or of what is kept.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from turngym_client import (
    Advice,
    Client,
    CloseReason,
    EnvironmentFailed,
    Episode,
    InvalidRequest,
    NoOracle,
    NoSuchInstance,
    NotServed,
    Transition,
    TurngymError,
    UnknownEnvironment,
    VersionMismatch,
)
from turngym_leaderboard import seeds
from turngym_leaderboard.agents import Agent, AgentFault, Fault, Reply, Seat, View
from turngym_leaderboard.protocol import Instance, Protocol, Seal, Selection, request
from turngym_leaderboard.record import EpisodeRecord, TurnRecord, by_kind, total

TRIES: Final = 3
"""How often an episode is begun before its fault stands."""

_CALLER: Final = (InvalidRequest, UnknownEnvironment, NotServed, VersionMismatch, NoSuchInstance)
"""Errors of the whole evaluation, which no second try can mend."""


@dataclass(frozen=True, slots=True)
class Played:
    """One episode: what is kept of it, and what was read and written in it."""

    record: EpisodeRecord
    turns: tuple[TurnRecord, ...]
    last_observation: str


Blame = Literal["", "agent", "environment", "server"]
"""Whose fault it is that an episode did not come to its end; "": nobody's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which episode it is of those that every agent plays, and the seeds that follow from that."""

    instance: Instance
    attempt: int
    noise_seed: int
    agent_seed: int

    @classmethod
    def of(cls, protocol: Protocol, instance: Instance, attempt: int) -> "Place":
        of = (protocol.secret, protocol.environment, instance.draw, attempt)
        return cls(instance, attempt, seeds.noise_seed(*of), seeds.agent_seed(*of))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode ended, by its own or by somebody's fault.

    Attributes:
        success, truncated, end_reason, digest: as the last transition has them.
        outgrown: the agent could read no more.
    """

    blame: Blame = ""
    fault: str = ""
    success: bool | None
    truncated: bool
    end_reason: str
    digest: str
    outgrown: bool = False


@dataclass(slots=True)
class _Run:
    """One try of an episode."""

    place: Place
    episode: Episode | None = None
    turns: list[TurnRecord] = field(default_factory=list[TurnRecord])
    fault: str = ""
    blame: Blame = ""
    outgrown: bool = False

    @property
    def live(self) -> bool:
        return self.episode is not None and not self.blame and not self.episode.done

    @property
    def stands(self) -> bool:
        """It has ended by itself or by its agent, so it is not tried again."""
        return self.blame == "agent" or (not self.blame and self.episode is not None and self.episode.done)


@dataclass(frozen=True, slots=True)
class _Table:
    """What runs are played with."""

    client: Client
    protocol: Protocol
    selection: Selection
    agent: Agent
    seal: Seal | None
    on_finished: Callable[[Sequence[Played]], None]


def play(
    client: Client,
    protocol: Protocol,
    selection: Selection,
    agent: Agent,
    *,
    sessions: int = 128,
    only: Collection[tuple[int, int]] | None = None,
    seal: Seal | None = None,
    on_episodes: Callable[[int], None] = lambda count: None,
    on_finished: Callable[[Sequence[Played]], None] = lambda played: None,
) -> list[Played]:
    """Plays every attempt on every instance, in their order.

    Episodes are played in batches of fixed membership: which ones share a batch is a function of the order and of
    `sessions`, never of who is quick, so an agent whose arithmetic depends on its neighbours repeats itself. After a
    batch of which nothing could be resolved the server counts as gone, and the rest is unresolved without being tried.

    Args:
        sessions: episodes held at once.
        only: (draw, attempt) of what is played; None: everything.
        seal: of the board, where its server is not to be told the seeds openly.
        on_episodes: called with the number of episodes that have just been finished.
        on_finished: called with episodes that need not be played again, each as soon as that is known.

    Raises:
        AgentUnavailable: as the agent does.
        TurngymError: what no second try can mend, such as a split that is not served.
    """
    places = [
        Place.of(protocol, instance, attempt)
        for instance in selection.instances
        for attempt in range(protocol.attempts)
        if only is None or (instance.draw, attempt) in only
    ]
    played: list[Played] = []
    gone = False
    for start in range(0, len(places), sessions):
        batch = [_Run(place) for place in places[start : start + sessions]]
        if gone:
            for run in batch:
                run.fault, run.blame = "not played: nothing of the batch before could be resolved", "server"
            played += [_finished(run) for run in batch]
            continue
        table = _Table(client, protocol, selection, agent, seal, on_finished)
        _play_batch(table, batch)
        for _ in range(TRIES - 1):
            again = [i for i, run in enumerate(batch) if run.blame in ("environment", "server")]
            if not again:
                break
            retries = [_Run(batch[i].place) for i in again]
            _play_batch(table, retries)
            for i, run in zip(again, retries, strict=True):
                batch[i] = run
        gone = all(run.blame == "server" for run in batch)
        if failed := [_finished(run) for run in batch if not run.stands]:
            on_finished(failed)
        played += [_finished(run) for run in batch]
        on_episodes(len(batch))
    return played


def _play_batch(table: _Table, runs: Sequence[_Run]) -> None:
    """Plays these runs to their ends or faults."""
    _reset(table, runs)
    begun = [run for run in runs if run.episode is not None]
    waiting = begun
    try:
        table.agent.start([_seat(run) for run in begun], table.protocol.decoding)
        while any(run.live for run in begun):
            _play_turn(table.client, table.agent, begun)
            if ended := [_finished(run) for run in waiting if run.stands]:
                table.on_finished(ended)
                waiting = [run for run in waiting if not run.stands]
    finally:
        table.client.close_many([run.episode for run in begun if run.episode is not None], CloseReason.FINISHED)


def _reset(table: _Table, runs: Sequence[_Run]) -> None:
    requests = [
        request(
            table.protocol,
            level_seed=run.place.instance.level_seed,
            noise_seed=run.place.noise_seed,
            version=table.selection.version,
            seal=table.seal,
        )
        for run in runs
    ]
    wanted = table.agent.wants_legal_actions
    outcomes = table.client.reset_many(requests, want_legal_actions=wanted, return_exceptions=True)
    for run, outcome in zip(runs, outcomes, strict=True):
        if isinstance(outcome, TurngymError):
            _blame(run, outcome, "server")
        else:
            run.episode = outcome


def _seat(run: _Run) -> Seat:
    episode = _episode(run)
    return Seat(
        environment=episode.environment_id,
        instructions=episode.instructions,
        action_separator=episode.action_separator,
        max_actions_per_turn=episode.limits.max_actions_per_turn,
        seed=run.place.agent_seed,
    )


def _play_turn(client: Client, agent: Agent, begun: Sequence[_Run]) -> None:
    """One turn of every live run."""
    advice = _advise(client, [run for run in begun if run.live]) if agent.wants_advice else {}
    live = [(seat, run) for seat, run in enumerate(begun) if run.live]
    if not live:
        return
    views = [
        View(seat=seat, turn=len(run.turns), transition=_episode(run).state, advice=advice.get(id(run)))
        for seat, run in live
    ]
    try:
        answers = agent.act(views)
    except AgentFault as fault:
        for _, run in live:
            run.fault, run.blame = str(fault), "agent"
        return
    playing: list[tuple[_Run, View, Reply]] = []
    for (_, run), view, answer in zip(live, views, answers, strict=True):
        if isinstance(answer, Fault):
            run.fault, run.blame, run.outgrown = answer.reason, "agent", answer.truncated
        else:
            playing.append((run, view, answer))
    steps = [(_episode(run), reply.actions) for run, _, reply in playing]
    outcomes = client.step_many(steps, want_legal_actions=agent.wants_legal_actions, return_exceptions=True)
    for (run, view, reply), outcome in zip(playing, outcomes, strict=True):
        if isinstance(outcome, EnvironmentFailed):
            _blame(run, outcome, "environment")
        elif isinstance(outcome, TurngymError):
            _blame(run, outcome, "server")
        else:
            run.turns.append(turn_record(view.transition.observation, reply, outcome))
            if outcome.done and outcome.success is None:
                run.fault, run.blame = "the environment did not say whether it succeeded", "server"


def _advise(client: Client, live: Sequence[_Run]) -> dict[int, Advice]:
    """Advice by run, where the environment has an oracle."""
    advice: dict[int, Advice] = {}
    outcomes = client.advise_many([_episode(run) for run in live], return_exceptions=True)
    for run, outcome in zip(live, outcomes, strict=True):
        if isinstance(outcome, Advice):
            advice[id(run)] = outcome
        elif not isinstance(outcome, NoOracle):
            _blame(run, outcome, "server")
    return advice


def _blame(run: _Run, error: TurngymError, blame: Blame) -> None:
    if isinstance(error, _CALLER):
        raise error
    run.fault, run.blame = f"{type(error).__name__}: {error}", blame


def _episode(run: _Run) -> Episode:
    assert run.episode is not None
    return run.episode


def turn_record(observation: str, reply: Reply, outcome: Transition) -> TurnRecord:
    """What is kept of a turn.

    Args:
        observation: that the agent read before it.
    """
    return TurnRecord(
        observation=observation,
        text=reply.text,
        reasoning=reply.reasoning,
        actions=reply.actions,
        actions_executed=outcome.actions_executed,
        reward=outcome.reward,
        action_valid=outcome.action_valid,
        valid_format=reply.valid_format,
        cut_off=reply.cut_off,
        tokens=reply.tokens,
        tokens_in=reply.tokens_in,
        cost=reply.cost,
        failure=reply.failure,
    )


def _finished(run: _Run) -> Played:
    """What is kept of a run that is not tried again."""
    state = run.episode.state if run.episode is not None else None
    ending = Ending(
        blame=run.blame,
        fault=run.fault,
        success=state.success if state is not None else None,
        truncated=state.truncated if state is not None else False,
        end_reason=state.end_reason.value if state is not None else "",
        digest=state.digest.hex() if state is not None else "",
        outgrown=run.outgrown,
    )
    record = episode_record(run.place, run.turns, ending)
    return Played(record, tuple(run.turns), state.observation if state is not None else "")


def episode_record(place: Place, turns: Sequence[TurnRecord], ending: Ending) -> EpisodeRecord:
    """What is kept of an episode that is not tried again."""
    outcomes: dict[Blame, Literal["played", "agent_fault", "environment_fault", "unresolved"]] = {
        "": "played",
        "agent": "agent_fault",
        "environment": "environment_fault",
        "server": "unresolved",
    }
    return EpisodeRecord(
        draw=place.instance.draw,
        attempt=place.attempt,
        level_seed=place.instance.level_seed,
        noise_seed=place.noise_seed,
        agent_seed=place.agent_seed,
        instance_id=place.instance.instance_id,
        world_id=place.instance.world_id,
        outcome=outcomes[ending.blame],
        fault=ending.fault,
        success=None if ending.blame == "server" else (not ending.blame and bool(ending.success)),
        truncated=ending.outgrown or ending.truncated,
        end_reason=ending.end_reason,
        actions=tuple(turn.actions for turn in turns),
        rewards=tuple(turn.reward for turn in turns),
        invalid_turns=sum(not turn.action_valid for turn in turns),
        unparsed_turns=sum(not turn.valid_format for turn in turns),
        cut_off_turns=sum(turn.cut_off for turn in turns),
        tokens=total(turn.tokens for turn in turns),
        tokens_in=total(turn.tokens_in for turn in turns),
        cost=total(turn.cost for turn in turns),
        failures=by_kind(turn.failure for turn in turns),
        digest=ending.digest,
    )
