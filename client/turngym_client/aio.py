"""The client, for asyncio. `turngym_client.sync` runs this very code for ordinary callers.

An episode keeps its seeds and actions, so it outlives its server: `turngym_client.session`. Concurrent steps share
requests: `turngym_client.coalesce`. Deadlines and retries: the table in `turngym_client.transport`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Literal, Self, TypeVar, cast, overload

from turngym.v1 import environment_pb2 as pb
from turngym_client.credentials import TlsConfig, find_credentials
from turngym_client.episode import EpisodeFacts, record_of
from turngym_client.errors import (
    EnvironmentFailed,
    EpisodeEnded,
    EpisodeLost,
    ServerBusy,
    ServerUnavailable,
    StepOrderError,
    TurngymError,
)
from turngym_client.messages import (
    CLOSE_REASON_TO_PB,
    StatusError,
    Verdict,
    advice_from_pb,
    clean_text,
    environment_from_pb,
    limits_to_pb,
    options_to_json,
    request_to_pb,
    server_from_pb,
    split_from_pb,
    summary_from_pb,
    transition_from_pb,
)
from turngym_client.session import Session, start
from turngym_client.transport import MAX_BATCH_BYTES, SHORT_DEADLINE, Pool, Server, matched
from turngym_client.types import (
    Advice,
    CloseReason,
    EnvironmentInfo,
    EnvironmentSummary,
    EpisodeRequest,
    Limits,
    ServerInfo,
    Split,
    Transition,
    check_seed,
    check_type,
    cut,
    told,
)

ResultT = TypeVar("ResultT")

DEFAULT_LIMITS = Limits()


def aconnect(
    addresses: str | Sequence[str],
    *,
    deadline: float = 30.0,
    patience: float = 60.0,
    failover: float = 2.0,
    token: str | None = None,
    tls: TlsConfig | None = None,
    insecure: bool | None = None,
) -> AsyncClient:
    """A client for one server, or for several that serve the same environments; sessions are spread over them.

    Connects when first used. Close it, or use it as `async with`.

    Args:
        addresses: host:port, or several. IPv6 as [::1]:port; gRPC targets such as dns:///host:port or unix:path too.
        deadline: seconds that one call may take.
        patience: seconds that an operation goes on trying while servers are away or full.
        failover: seconds for which a session's own server is tried before its episode moves to another one.
        token: shown to the server; "" is none. tls: how the server is known, and the client's own certificate.
        insecure: send the token in the clear, to other machines too. Of these three, None leaves it to the
            environment: see `turngym_client.credentials`.

    Raises:
        TypeError, ValueError: what is given is no address or token, or the token would go to another machine in the
            clear. OSError: a file of a token or certificate cannot be read.
    """
    given = [addresses] if isinstance(addresses, str) else list(addresses)
    credentials = find_credentials(token, tls, insecure)
    return AsyncClient(Pool(given, deadline=deadline, patience=patience, failover=failover, credentials=credentials))


class AsyncEpisode(EpisodeFacts):
    """One episode. Made by `AsyncClient.reset` and `fork`; dropped without `close`, its session ends with its lease.

    Calls on one episode are played one after another.
    """

    def __init__(self, pool: Pool, session: Session) -> None:
        self.session = session
        self._pool = pool
        self._record = session.record
        self._lock = asyncio.Lock()
        self._under_way: tuple[str, ...] | None = None
        self._failure: TurngymError | None = None

    @property
    def closed(self) -> bool:
        return self.session.closed

    async def step(self, actions: str | Sequence[str], *, want_legal_actions: bool = False) -> Transition:
        """Plays one turn, exactly once, and waits for what it did.

        A step that was cut off (cancelled, or `ServerUnavailable`) may have been played: send the same actions again
        to collect its result.

        Args:
            actions: one action or several, run in order until the end, the first invalid one, or a limit.
            want_legal_actions: list what is legal afterwards.

        Raises:
            TypeError: an action is no string. ValueError: there is none.
            EpisodeEnded, StepOrderError, EnvironmentFailed, EpisodeLost, ServerBusy, ServerUnavailable.
        """
        turn = _turn_of(actions)
        async with self._lock:
            self._check_next(turn)
            self._under_way = turn
            index = self.step_index + 1

            def attempt(server: Server, session_id: str) -> asyncio.Future[pb.Transition]:
                item = pb.StepItem(session_id=session_id, step_index=index, actions=turn)
                return server.step(self.environment_id, want_legal_actions, item)

            try:
                transition = transition_from_pb(await self.session.run(attempt))
            except (ServerUnavailable, ServerBusy):
                raise
            except TurngymError as error:
                self._under_way = None
                if isinstance(error, EnvironmentFailed | EpisodeLost):
                    self._failure = error
                raise
            self._record.turns.append(turn)
            self._record.state = transition
            self._under_way = None
            return transition

    async def advise(self) -> Advice:
        """What the oracle would do now. Changes nothing. Raises NoOracle where the environment has none."""

        def attempt(server: Server, session_id: str) -> asyncio.Future[pb.Advice]:
            return server.advise(pb.AdviseItem(session_id=session_id))

        async with self._lock:
            self._check_settled()
            return advice_from_pb(await self._run(attempt))

    async def fork(self, noise_seed: int | None = None, *, same_noise: bool = False) -> AsyncEpisode:
        """An independent copy of the episode as it stands.

        Args:
            noise_seed: noise of the copy from here on; None: the server draws one.
            same_noise: the copy meets the same noise as the original. Excludes `noise_seed`.
        """
        check_seed("noise_seed", noise_seed)
        if same_noise and noise_seed is not None:
            raise ValueError(f"same_noise excludes noise_seed, but noise_seed {noise_seed} was given too")
        # A retry must send the same item, and a resumed session needs another one.
        items: dict[str, pb.ForkItem] = {}

        async def attempt(server: Server, session_id: str) -> tuple[Server, pb.Started]:
            item = items.setdefault(session_id, self._fork_item(session_id, noise_seed, same_noise))
            while True:
                response = await server.fork(pb.ForkRequest(items=[item]))
                [outcome] = matched([item], response.outcomes)
                if outcome.HasField("error"):
                    raise StatusError(outcome.error, of_item=True)
                if outcome.HasField("started"):
                    return server, outcome.started

        async with self._lock:
            self._check_settled()
            server, started = await self._run(attempt)
            record = record_of(started, list(self._record.turns))
        return AsyncEpisode(self._pool, Session(self._pool, record, server, started.session_id))

    async def keep_alive(self) -> float:
        """Renews the session's lease and gives the seconds left from now. A session that is gone is resumed."""

        async def attempt(server: Server, session_id: str) -> float:
            response = await server.keep_alive(pb.KeepAliveRequest(session_ids=[session_id]))
            [outcome] = matched([session_id], response.outcomes)
            if outcome.HasField("error"):
                raise StatusError(outcome.error, of_item=True)
            return outcome.lease_seconds

        async with self._lock:
            self._check_alive()
            return await self._run(attempt)

    async def close(self, reason: CloseReason = CloseReason.FINISHED) -> None:
        """Frees the session. Idempotent, and no error where it or its server is gone."""
        await close_all(self._pool, [self], reason)

    async def _run(self, attempt: Callable[[Server, str], Awaitable[ResultT]]) -> ResultT:
        try:
            return await self.session.run(attempt)
        except EpisodeLost as error:
            self._failure = error
            raise

    def _fork_item(self, session_id: str, noise_seed: int | None, same_noise: bool) -> pb.ForkItem:
        item = pb.ForkItem(request_id=secrets.token_bytes(16), session_id=session_id, step_index=self.step_index)
        if same_noise:
            item.same_noise = True
        elif noise_seed is not None:
            item.noise_seed = noise_seed
        return item

    def _check_alive(self) -> None:
        if self.closed:
            raise EpisodeEnded(f"{self._record.describe()}: closed; reset a new one")
        if (failure := self._failure) is not None:
            raise type(failure)(str(failure), reason=failure.reason, metadata=failure.metadata) from failure

    def _check_settled(self) -> None:
        self._check_alive()
        if self._under_way is not None:
            raise self._cut_off("before anything else")

    def _check_next(self, turn: tuple[str, ...]) -> None:
        self._check_alive()
        if self.done:
            raise EpisodeEnded(f"{self._record.describe()}: ended ({self.state.end_reason.value}); reset a new one")
        if self._under_way not in (None, turn):
            raise self._cut_off(f"not {cut(str(list(turn)))}")

    def _cut_off(self, instead: str) -> StepOrderError:
        return StepOrderError(
            f"{self._record.describe()}: step {self.step_index + 1} was cut off and may have been played; send its"
            f" actions {cut(str(list(self._under_way or ())))} again to collect the result, {instead}"
        )


class AsyncClient:
    """A client for asyncio; `aconnect` makes one. Belongs to one event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections. Idempotent. Sessions still open end with their leases."""
        await self._pool.close()

    @property
    def shows_token(self) -> bool:
        """Whether a token goes with every call; then what a server says that it serves is what the token may have."""
        return self._pool.shows_token

    async def server(self) -> ServerInfo:
        """What the server is, its workers together; of several addresses, one that answers."""
        patience = self._pool.patience()
        while True:
            front = self._pool.front()
            try:
                return server_from_pb(await front.get_server())
            except StatusError as error:
                if error.verdict is Verdict.FINAL:
                    raise error.to_error("GetServer") from error
                front.avoid()
                await patience.pause(error, "GetServer")

    async def environments(self) -> list[EnvironmentSummary]:
        """Every environment served, ordered by id."""
        summaries: list[EnvironmentSummary] = []
        token = ""
        while True:
            request = pb.ListEnvironmentsRequest(page_token=token)

            async def call(
                server: Server, request: pb.ListEnvironmentsRequest = request
            ) -> pb.ListEnvironmentsResponse:
                return await server.list_environments(request)

            page = await self._anywhere("ListEnvironments", call)
            summaries += map(summary_from_pb, page.environments)
            if not (token := page.next_page_token):
                return summaries

    async def environment(
        self, id: str, options: Mapping[str, object] | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> EnvironmentInfo:
        """Everything about one environment under these options and limits."""
        check_type("id", id, str)
        check_type("limits", limits, Limits)
        request = pb.GetEnvironmentRequest(
            environment_id=clean_text(id), options_json=options_to_json(options or {}), limits=limits_to_pb(limits)
        )

        async def call(server: Server) -> pb.GetEnvironmentResponse:
            return await server.get_environment(request)

        return environment_from_pb((await self._anywhere(f"environment {cut(repr(id))}", call)).environment)

    async def reset(
        self,
        environment_id: str,
        *,
        options: Mapping[str, object] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        split: Split = Split.TRAIN,
        level_seed: int | None = None,
        noise_seed: int | None = None,
        expected_version: str = "",
        sealed_seed: bytes | None = None,
        want_legal_actions: bool = False,
    ) -> AsyncEpisode:
        """Starts an episode; see `EpisodeRequest` for the arguments.

        Raises:
            TypeError: an argument of another type. ValueError: a seed out of range, or seeds beside a sealed one.
            UnknownEnvironment, InvalidRequest, NotServed, VersionMismatch, NoSuchInstance, EnvironmentFailed,
            ServerBusy, ServerUnavailable.
        """
        request = EpisodeRequest(
            environment_id=environment_id,
            options=options or {},
            limits=limits,
            split=split,
            level_seed=level_seed,
            noise_seed=noise_seed,
            expected_version=expected_version,
            sealed_seed=sealed_seed,
        )
        [episode] = await self.reset_many([request], want_legal_actions=want_legal_actions)
        return episode

    @overload
    async def reset_many(
        self,
        requests: Sequence[EpisodeRequest],
        *,
        want_legal_actions: bool = False,
        return_exceptions: Literal[False] = False,
    ) -> list[AsyncEpisode]: ...
    @overload
    async def reset_many(
        self, requests: Sequence[EpisodeRequest], *, want_legal_actions: bool = False, return_exceptions: bool
    ) -> list[AsyncEpisode | TurngymError]: ...
    async def reset_many(
        self, requests: Sequence[EpisodeRequest], *, want_legal_actions: bool = False, return_exceptions: bool = False
    ) -> list[AsyncEpisode] | list[AsyncEpisode | TurngymError]:
        """Starts episodes, spread over the addresses, in as few calls as these take.

        Args:
            return_exceptions: put a `TurngymError` in the place of an episode that could not be started. Otherwise the
                first one is raised, after the other episodes have been closed.
        """
        if not requests:
            return []
        items = [request_to_pb(request, secrets.token_bytes(16)) for request in requests]
        patience = self._pool.patience()
        chunks = _spread(items, await self._pool.candidates(patience))
        started = await asyncio.gather(
            *(self._start_chunk(server, chunk, want_legal_actions) for server, chunk in chunks)
        )
        by_id = {request_id: result for results in started for request_id, result in results.items()}
        results = [by_id[item.request_id] for item in items]
        if return_exceptions:
            return results
        episodes = [result for result in results if isinstance(result, AsyncEpisode)]
        if len(episodes) < len(results):
            await self.close_many(episodes, CloseReason.ABANDONED)
        return _all_or_raise(results)

    @overload
    async def step_many(
        self,
        turns: Iterable[tuple[AsyncEpisode, str | Sequence[str]]],
        *,
        want_legal_actions: bool = False,
        return_exceptions: Literal[False] = False,
    ) -> list[Transition]: ...
    @overload
    async def step_many(
        self,
        turns: Iterable[tuple[AsyncEpisode, str | Sequence[str]]],
        *,
        want_legal_actions: bool = False,
        return_exceptions: bool,
    ) -> list[Transition | TurngymError]: ...
    async def step_many(
        self,
        turns: Iterable[tuple[AsyncEpisode, str | Sequence[str]]],
        *,
        want_legal_actions: bool = False,
        return_exceptions: bool = False,
    ) -> list[Transition] | list[Transition | TurngymError]:
        """Plays one turn in each episode and waits for all of them.

        Args:
            return_exceptions: put a `TurngymError` in the place of a transition. Otherwise the first one is raised,
                after all have finished.

        Raises:
            TypeError: an action is no string. ValueError: a turn without actions, or the same episode twice.
        """
        # All turns are looked at before the first one is played.
        pairs = [(episode, _turn_of(actions)) for episode, actions in turns]
        _distinct([episode for episode, _ in pairs])
        results = await _gather(
            [episode.step(actions, want_legal_actions=want_legal_actions) for episode, actions in pairs]
        )
        return results if return_exceptions else _all_or_raise(results)

    @overload
    async def advise_many(
        self, episodes: Iterable[AsyncEpisode], return_exceptions: Literal[False] = False
    ) -> list[Advice]: ...
    @overload
    async def advise_many(
        self, episodes: Iterable[AsyncEpisode], return_exceptions: bool
    ) -> list[Advice | TurngymError]: ...
    async def advise_many(
        self, episodes: Iterable[AsyncEpisode], return_exceptions: bool = False
    ) -> list[Advice] | list[Advice | TurngymError]:
        """The oracle's advice in each episode; `return_exceptions` as in `step_many`."""
        results = await _gather([episode.advise() for episode in episodes])
        return results if return_exceptions else _all_or_raise(results)

    async def close_many(self, episodes: Iterable[AsyncEpisode], reason: CloseReason = CloseReason.FINISHED) -> None:
        """Frees the episodes' sessions. Idempotent, and no error where one or its server is gone."""
        await close_all(self._pool, episodes, reason)

    async def _anywhere(self, where: str, call: Callable[[Server], Awaitable[ResultT]]) -> ResultT:
        patience = self._pool.patience()
        while True:
            server = await self._pool.choose(patience)
            try:
                return await call(server)
            except StatusError as error:
                if error.verdict is Verdict.FINAL:
                    raise error.to_error(where) from error
                server.avoid()
                await patience.pause(error, where)

    async def _start_chunk(
        self, server: Server, items: Sequence[pb.ResetItem], want_legal_actions: bool
    ) -> dict[bytes, AsyncEpisode | TurngymError]:
        """Episodes or errors by request id. What a server has no room for, or does not answer to, goes elsewhere."""
        results: dict[bytes, AsyncEpisode | TurngymError] = {}
        patience = self._pool.patience()
        failing_since: float | None = None
        left = items
        while True:
            again: StatusError | None = None
            for request_id, result in (await self._try_start(server, left, want_legal_actions)).items():
                if isinstance(result, AsyncEpisode):
                    results[request_id] = result
                elif result.verdict is Verdict.FINAL:
                    results[request_id] = result.to_error(_describe(items, request_id))
                else:
                    again = result
            left = [item for item in left if item.request_id not in results]
            if again is None:
                return results
            try:
                await patience.pause(again, f"{len(left)} episodes of {cut(left[0].environment_id)}")
                failing_since = failing_since or time.monotonic()
                if again.verdict is Verdict.BUSY or await self._pool.may_move(server, again, failing_since):
                    server, failing_since = await self._pool.choose(patience, [server]), None
            except (ServerBusy, ServerUnavailable) as error:
                return results | {item.request_id: error for item in left}

    async def _try_start(
        self, server: Server, items: Sequence[pb.ResetItem], want_legal_actions: bool
    ) -> dict[bytes, AsyncEpisode | StatusError]:
        try:
            outcomes = await start(self._pool, server, items, want_legal_actions=want_legal_actions)
        except StatusError as error:
            return {item.request_id: error for item in items}
        return {
            item.request_id: StatusError(outcome.error, of_item=True)
            if outcome.HasField("error")
            else AsyncEpisode(
                self._pool,
                Session(
                    self._pool,
                    record_of(outcome.started, [], item.sealed_seed or None),
                    server,
                    outcome.started.session_id,
                ),
            )
            for item, outcome in zip(items, outcomes, strict=True)
        }


async def close_all(pool: Pool, episodes: Iterable[AsyncEpisode], reason: CloseReason) -> None:
    """Closes sessions, one call for each server, and marks their episodes closed."""
    check_type("reason", reason, CloseReason)
    by_server: defaultdict[Server, list[str]] = defaultdict(list)
    for episode in episodes:
        if (server := episode.session.server) is not None:
            by_server[server].append(episode.session.id)
        episode.session.end()
    if not pool.closed:
        await asyncio.gather(
            *(
                _close_sessions(server, chunk, reason)
                for server, ids in by_server.items()
                for chunk in _chunks(ids, server.max_batch_items(), len)
            )
        )


async def _close_sessions(server: Server, ids: Sequence[str], reason: CloseReason) -> None:
    """Frees sessions. What cannot be closed ends with its lease."""
    request = pb.CloseRequest(session_ids=ids, reason=CLOSE_REASON_TO_PB[reason])
    end = time.monotonic() + SHORT_DEADLINE
    with contextlib.suppress(StatusError):
        while True:
            try:
                await server.close_sessions(request)
            except StatusError as error:
                if error.verdict is not Verdict.BUSY or time.monotonic() > end:
                    raise
                await asyncio.sleep(error.retry_after or 0.0)
            else:
                return


def _turn_of(actions: str | Iterable[str]) -> tuple[str, ...]:
    """The turn's actions as they are sent. Raises TypeError where one is no string, ValueError where there is none."""
    if isinstance(actions, str):
        return (clean_text(actions),)
    given = cast("object", actions)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise TypeError(f"actions is {told(given)}, but must be a str or a sequence of str")
    turn = tuple(actions)
    if not turn:
        raise ValueError('a turn without actions; expected at least one ("" where an answer could not be read)')
    for place, action in enumerate(turn):
        check_type(f"actions[{place}]", action, str)
    return tuple(map(clean_text, turn))


def _describe(items: Sequence[pb.ResetItem], request_id: bytes) -> str:
    [item] = [item for item in items if item.request_id == request_id]
    seeds = {"level_seed": f", level seed {item.level_seed}", "sealed_seed": ", sealed seed"}
    seed = seeds.get(item.WhichOneof("level") or "", "")
    return f"reset of {cut(repr(item.environment_id))}, split {split_from_pb(item.split).value}{seed}"


def _spread(items: Sequence[pb.ResetItem], servers: Sequence[Server]) -> list[tuple[Server, Sequence[pb.ResetItem]]]:
    """Each item to the server that then has the fewest sessions, in chunks of one call."""
    load = {server: len(server.sessions) for server in servers}
    by_server: defaultdict[Server, list[pb.ResetItem]] = defaultdict(list)
    for item in items:
        server = min(load, key=load.__getitem__)
        load[server] += 1
        by_server[server].append(item)
    return [
        (server, chunk)
        for server, mine in by_server.items()
        for chunk in _chunks(mine, server.max_batch_items(), pb.ResetItem.ByteSize)
    ]


def _chunks(items: Sequence[ResultT], most: int, size: Callable[[ResultT], int]) -> list[Sequence[ResultT]]:
    """The items in order, at most so many and MAX_BATCH_BYTES together; a larger one alone."""
    chunks: list[list[ResultT]] = []
    left = 0
    for item in items:
        its = size(item)
        if not chunks or len(chunks[-1]) == most or its > left:
            chunks.append([])
            left = MAX_BATCH_BYTES
        chunks[-1].append(item)
        left -= its
    return [*chunks]


async def _gather(calls: Iterable[Coroutine[object, object, ResultT]]) -> list[ResultT | TurngymError]:
    """Waits for all, then gives results and `TurngymError`s in order. Any other exception is raised."""
    results: list[ResultT | TurngymError] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, TurngymError):
            raise result
        results.append(result)
    return results


def _all_or_raise(results: Iterable[ResultT | TurngymError]) -> list[ResultT]:
    """The results; raises the first error among them."""
    fine: list[ResultT] = []
    for result in results:
        if isinstance(result, TurngymError):
            raise result
        fine.append(result)
    return fine


def _distinct(episodes: Sequence[AsyncEpisode]) -> None:
    repeated = [episode for episode, count in Counter(map(id, episodes)).items() if count > 1]
    if repeated:
        occur = "1 episode occurs" if len(repeated) == 1 else f"{len(repeated)} episodes occur"
        raise ValueError(f"{occur} more than once; each plays one turn in a call")
