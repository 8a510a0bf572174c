"""The client, for ordinary code: `turngym_client.aio`, run on one background event-loop thread.

All open clients of a process share the thread; closing the last one stops it. Safe to use from several threads, whose
steps then share requests. Where a process has used a client, even one that is closed, no child that it forks may use
one: start such children by `spawn`, or before.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Self, TypeVar, overload

from turngym_client.aio import DEFAULT_LIMITS, AsyncClient, AsyncEpisode, aconnect
from turngym_client.credentials import TlsConfig
from turngym_client.episode import EpisodeFacts
from turngym_client.errors import ServerUnavailable, TurngymError
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
)

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def connect(
    addresses: str | Sequence[str],
    *,
    deadline: float = 30.0,
    patience: float = 60.0,
    failover: float = 2.0,
    token: str | None = None,
    tls: TlsConfig | None = None,
    insecure: bool | None = None,
) -> Client:
    """A client for one server, or for several that serve the same environments; sessions are spread over them.

    Connects when first used. Close it, or use it as `with`. The arguments are those of `turngym_client.aconnect`.
    """
    return Client(
        aconnect(
            addresses,
            deadline=deadline,
            patience=patience,
            failover=failover,
            token=token,
            tls=tls,
            insecure=insecure,
        )
    )


class _LoopThread:
    """An event loop on a daemon thread, which runs while somebody holds it.

    One for the process: grpc.aio polls for all loops from one thread, and several loops cost each other wake-ups.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holders = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def acquire(self) -> asyncio.AbstractEventLoop:
        with self._guard:
            self._holders += 1
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="turngym-client", daemon=True)
                self._thread.start()
            return self._loop

    def release(self) -> None:
        with self._guard:
            self._holders -= 1
            if self._holders or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None


_loop_thread = _LoopThread()


class _Runner:
    """Runs coroutine functions on the shared loop, until closed."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = _loop_thread.acquire()
        self._under_way: set[concurrent.futures.Future[Any]] = set()

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, ResultT]], *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """What the function returns. An interrupted caller cancels it.

        Raises:
            ServerUnavailable: the client is closed.
        """
        with self._guard:
            if self._loop is None:
                raise ServerUnavailable("the client is closed")
            future = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop)
            self._under_way.add(future)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._under_way.discard(future)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `last`, which makes whatever is under way end, and lets the loop go. Idempotent."""
        with self._guard:
            loop, self._loop = self._loop, None
        if loop is not None:
            try:
                asyncio.run_coroutine_threadsafe(last(), loop).result()
                concurrent.futures.wait(list(self._under_way))
            finally:
                _loop_thread.release()


class Episode(EpisodeFacts):
    """One episode. Made by `Client.reset` and `fork`; dropped without `close`, its session ends with its lease."""

    def __init__(self, run: _Runner, episode: AsyncEpisode) -> None:
        self.aio = episode
        self._run = run
        self._record = episode.session.record

    @property
    def closed(self) -> bool:
        return self.aio.closed

    def step(self, actions: str | Sequence[str], *, want_legal_actions: bool = False) -> Transition:
        """Plays one turn, exactly once; see `AsyncEpisode.step`."""
        return self._run(self.aio.step, actions, want_legal_actions=want_legal_actions)

    def advise(self) -> Advice:
        """What the oracle would do now; see `AsyncEpisode.advise`."""
        return self._run(self.aio.advise)

    def fork(self, noise_seed: int | None = None, *, same_noise: bool = False) -> Episode:
        """An independent copy of the episode as it stands; see `AsyncEpisode.fork`."""
        return Episode(self._run, self._run(self.aio.fork, noise_seed, same_noise=same_noise))

    def keep_alive(self) -> float:
        """Renews the session's lease and gives the seconds left from now."""
        return self._run(self.aio.keep_alive)

    def close(self, reason: CloseReason = CloseReason.FINISHED) -> None:
        """Frees the session. Idempotent, and no error where it, its server, or the client is gone."""
        try:
            self._run(self.aio.close, reason)
        except ServerUnavailable:
            self.aio.session.end()


class Client:
    """A client for ordinary code; `connect` makes one. Every method is that of `AsyncClient`, waited for."""

    def __init__(self, client: AsyncClient) -> None:
        self._aio = client
        self._run = _Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. Idempotent. Sessions still open end with their leases."""
        self._run.close(self._aio.close)

    @property
    def shows_token(self) -> bool:
        """Whether a token goes with every call; then what a server says that it serves is what the token may have."""
        return self._aio.shows_token

    def server(self) -> ServerInfo:
        """What the server is; of several addresses, one that answers."""
        return self._run(self._aio.server)

    def environments(self) -> list[EnvironmentSummary]:
        """Every environment served, ordered by id."""
        return self._run(self._aio.environments)

    def environment(
        self, id: str, options: Mapping[str, object] | None = None, limits: Limits = DEFAULT_LIMITS
    ) -> EnvironmentInfo:
        """Everything about one environment under these options and limits."""
        return self._run(self._aio.environment, id, options, limits)

    def reset(
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
    ) -> Episode:
        """Starts an episode; see `AsyncClient.reset`."""
        episode = self._run(
            self._aio.reset,
            environment_id,
            options=options,
            limits=limits,
            split=split,
            level_seed=level_seed,
            noise_seed=noise_seed,
            expected_version=expected_version,
            sealed_seed=sealed_seed,
            want_legal_actions=want_legal_actions,
        )
        return Episode(self._run, episode)

    @overload
    def reset_many(
        self,
        requests: Sequence[EpisodeRequest],
        *,
        want_legal_actions: bool = False,
        return_exceptions: Literal[False] = False,
    ) -> list[Episode]: ...
    @overload
    def reset_many(
        self, requests: Sequence[EpisodeRequest], *, want_legal_actions: bool = False, return_exceptions: bool
    ) -> list[Episode | TurngymError]: ...
    def reset_many(
        self, requests: Sequence[EpisodeRequest], *, want_legal_actions: bool = False, return_exceptions: bool = False
    ) -> list[Episode] | list[Episode | TurngymError]:
        """Starts episodes; see `AsyncClient.reset_many`."""
        return [
            Episode(self._run, result) if isinstance(result, AsyncEpisode) else result
            for result in self._run(
                self._aio.reset_many,
                requests,
                want_legal_actions=want_legal_actions,
                return_exceptions=return_exceptions,
            )
        ]

    @overload
    def step_many(
        self,
        turns: Iterable[tuple[Episode, str | Sequence[str]]],
        *,
        want_legal_actions: bool = False,
        return_exceptions: Literal[False] = False,
    ) -> list[Transition]: ...
    @overload
    def step_many(
        self,
        turns: Iterable[tuple[Episode, str | Sequence[str]]],
        *,
        want_legal_actions: bool = False,
        return_exceptions: bool,
    ) -> list[Transition | TurngymError]: ...
    def step_many(
        self,
        turns: Iterable[tuple[Episode, str | Sequence[str]]],
        *,
        want_legal_actions: bool = False,
        return_exceptions: bool = False,
    ) -> list[Transition] | list[Transition | TurngymError]:
        """Plays one turn in each episode; see `AsyncClient.step_many`."""
        return self._run(
            self._aio.step_many,
            [(episode.aio, actions) for episode, actions in turns],
            want_legal_actions=want_legal_actions,
            return_exceptions=return_exceptions,
        )

    @overload
    def advise_many(self, episodes: Iterable[Episode], return_exceptions: Literal[False] = False) -> list[Advice]: ...
    @overload
    def advise_many(self, episodes: Iterable[Episode], return_exceptions: bool) -> list[Advice | TurngymError]: ...
    def advise_many(
        self, episodes: Iterable[Episode], return_exceptions: bool = False
    ) -> list[Advice] | list[Advice | TurngymError]:
        """The oracle's advice in each episode; see `AsyncClient.advise_many`."""
        return self._run(self._aio.advise_many, [episode.aio for episode in episodes], return_exceptions)

    def close_many(self, episodes: Iterable[Episode], reason: CloseReason = CloseReason.FINISHED) -> None:
        """Frees the episodes' sessions. Idempotent, and no error where one or its server is gone."""
        inner = [episode.aio for episode in episodes]
        try:
            self._run(self._aio.close_many, inner, reason)
        except ServerUnavailable:
            for episode in inner:
                episode.session.end()
