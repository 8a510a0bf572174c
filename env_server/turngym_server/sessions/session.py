"""One session: an episode whose turns happen exactly once, however often and in whatever order they are asked for.

Everything but the episode's own work runs on the event loop, so the state machine needs no lock of its own. Knows
nothing of leases, request ids or gRPC.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from turngym.sealed import Seal
from turngym.v1 import environment_pb2 as pb
from turngym_server.access.caller import Caller
from turngym_server.environment import Environment, EnvironmentSpec
from turngym_server.errors import ENVIRONMENT_ERRORS, ItemError, Reason, exception_text
from turngym_server.host import EnvironmentHost
from turngym_server.processes.isolation import Killings, ProcessKilled
from turngym_server.rpc import messages
from turngym_server.sessions.digest import encode_actions
from turngym_server.sessions.episode import Episode, NoiseSegment
from turngym_server.sessions.seeds import seeds_event, seeds_in_words
from turngym_server.sessions.threads import Abandoned, Overrun, Threads
from turngym_server.sessions.waiting import Waiting
from turngym_server.splits import Split
from turngym_server.watching.counts import Counts, Departure, Origin
from turngym_server.watching.logs import Event, without_text

log: Final = logging.getLogger(__name__)

T = TypeVar("T")


_WAITING: Final = "waiting for a turn, the oracle or a fork to be done"
"""Where a deadline passed that the episode itself never got to."""
INTERPRETER_THREADS: Final = 2
"""Threads for resets, forks and oracles of inline environments. More would only take turns at the interpreter's lock,
and keep the event loop from it; two, so that one slow oracle does not hold up every reset."""
CHECK_THREADS: Final = 2
"""The same for checks of options, of which each caller has one at a time."""


class Runtime:
    """What the sessions of one server share: a clock, counts, threads, what waits, tasks that no RPC owns."""

    def __init__(self, clock: Callable[[], float], threads: int, max_queued_per_caller: int) -> None:
        self.clock = clock
        self.waiting = Waiting(max_queued_per_caller)
        self.counts = Counts()
        # What hangs keeps its place until its deadline: a quarter is left to other callers.
        self._threads = Threads(threads, share=max(1, threads - threads // 4))
        self._interpreter_threads = Threads(INTERPRETER_THREADS)
        self.check_threads = Threads(CHECK_THREADS, share=1)
        self.killings = Killings()
        self.tasks: set[asyncio.Task[Any]] = set()

    def threads(self, spec: EnvironmentSpec) -> Threads:
        """Where an environment works that may not work on the event loop now."""
        return self._interpreter_threads if spec.inline else self._threads

    def close(self) -> None:
        """Ends idle threads; busy ones end with what they are doing."""
        self._threads.close()
        self._interpreter_threads.close()
        self.check_threads.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Runs `work` to its end, whoever stops waiting for it."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a session plays, and for whom. Shared by its forks but for the id."""

    session_id: str
    caller: Caller
    host: EnvironmentHost
    options_json: str
    split: Split
    level_seed: int
    seal: Seal | None
    instance_id: str
    world_id: str
    instructions: str

    def describe(self, noise: Sequence[NoiseSegment]) -> str:
        """All that is needed to meet the same instance again, for logs."""
        spec = self.host.spec
        return (
            f"session {self.session_id} of {spec.id} {spec.version}, options {self.options_json}, "
            f"split {self.split.value}, {seeds_in_words(self.level_seed, noise, self.seal)}"
        )

    def event(self, noise: Sequence[NoiseSegment], step: int) -> Event:
        """The same as fields of a log record."""
        spec = self.host.spec
        event = Event(
            caller=str(self.caller),
            session=self.session_id,
            environment=spec.id,
            version=spec.version,
            options=self.options_json,
            split=self.split.value,
            step=step,
        )
        return event | seeds_event(self.level_seed, noise, self.seal)

    def refuse_if_sealed(self, what: str) -> None:
        """Raises ItemError (SEALED) where the session hides its instance."""
        if self.seal is not None:
            raise ItemError(Reason.SEALED, f"{what} is refused for a sealed session of {self.host.spec.id}")

    def told(self, error: BaseException) -> str:
        """What the caller is told of an environment's exception; of a sealed session's, which may quote the level, the
        type only."""
        return type(error).__name__ if self.seal is not None else exception_text(error)

    def logged(self, error: BaseException) -> BaseException:
        """What the log shows of an environment's exception; of a sealed session's without its text."""
        return without_text(error) if self.seal is not None else error


class Session:
    """An episode being played.

    Args:
        state: serialised Transition: where the episode stands.
        last_actions: those of its last turn; None before the first.
        legal: legal actions now, where the caller has asked for them already.
    """

    __slots__ = (
        "_advice",
        "_fingerprint",
        "_inline",
        "_legal",
        "_listing",
        "_lock",
        "_result",
        "_running",
        "_runtime",
        "_unclosed",
        "counts",
        "episode",
        "failed",
        "identity",
        "lease_end",
        "start_index",
        "start_noise",
        "start_state",
        "step_index",
        "wire_id",
    )

    def __init__(
        self,
        identity: Identity,
        episode: Episode,
        runtime: Runtime,
        *,
        state: bytes,
        last_actions: "Fingerprint | None",
        legal: pb.LegalActions | None = None,
    ) -> None:
        self.identity = identity
        self.episode = episode
        self.counts = runtime.counts.environment(identity.host.spec.id)
        self.failed = False
        self.step_index = episode.turns_played
        self.start_index = episode.turns_played
        self.start_noise = episode.noise
        self.start_state = state
        self.lease_end = 0.0
        self.wire_id = messages.session_id_field(identity.session_id)
        self._inline = identity.host.spec.inline
        self._runtime = runtime
        self._fingerprint = last_actions
        self._result = messages.transition_field(state)
        self._legal = legal
        self._advice: pb.Advice | None = None
        self._running: asyncio.Task[bytes] | None = None
        self._listing: tuple[int, asyncio.Task[bytes]] | None = None
        self._lock: asyncio.Lock | None = None
        self._unclosed = False

    @property
    def running(self) -> bool:
        """Whether a turn is being played."""
        return self._running is not None

    def began(self, origin: Origin) -> None:
        """Says that the session now exists."""
        self.counts.started[self.identity.split, origin] += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s: %s",
                origin.value,
                self.identity.describe(self.episode.noise),
                extra={**self._event(), "origin": origin.value},
            )

    # A turn

    def step(self, step_index: int, actions: Sequence[str], want_legal: bool) -> "bytes | asyncio.Task[bytes]":
        """Plays a turn, or returns what it did when it was played before.

        Returns:
            The outcome's field of a StepOutcome, or the task that will know it. Of an environment that is `inline`
            it is known at once.

        Raises:
            ItemError: INVALID_ITEM, WRONG_STEP_INDEX, STEP_RUNNING, EPISODE_ENDED or QUEUE_FULL. Nothing was played.
        """
        if not actions:
            raise ItemError(Reason.INVALID_ITEM, f"step {step_index} has no actions; expected at least one")
        encoded = encode_actions(actions)
        fingerprint = fingerprint_of(encoded)
        if step_index == self.step_index and fingerprint == self._fingerprint:
            return self._collect(want_legal)
        if step_index != self.step_index + 1 or self._running is not None or self.failed or self.episode.ended:
            self._refuse_out_of_order(step_index)
        inline = self._inline and not self._busy
        if not inline:
            self._runtime.waiting.check(self.identity.caller.account)
        self.step_index = step_index
        self._fingerprint = fingerprint
        self._legal = None
        self._advice = None
        if inline:
            return self._play_inline(actions, encoded, want_legal)
        self._runtime.waiting.enter(self.identity.caller.account)
        self._running = self._runtime.spawn(self._run(actions, encoded, want_legal))
        return self._running

    def _refuse_out_of_order(self, step_index: int) -> None:
        """Says why a turn that is not the next, or cannot be played, is refused."""
        expected = self.step_index + 1
        if step_index == self.step_index and step_index > 0:
            raise ItemError(
                Reason.WRONG_STEP_INDEX,
                f"step {step_index} was already played with other actions; the next step is {expected}",
                metadata={"expected": str(expected)},
            )
        if self.running and step_index == expected:
            raise ItemError(
                Reason.STEP_RUNNING,
                f"step {self.step_index} is still running; collect it by sending it again, then send step {step_index}",
            )
        if self.failed or (self.episode.ended and not self.running):
            raise ItemError(
                Reason.EPISODE_ENDED,
                f"the episode {'failed' if self.failed else 'ended'} at step {self.step_index}; "
                f"step {step_index} cannot be played",
            )
        if step_index != expected:
            raise ItemError(
                Reason.WRONG_STEP_INDEX,
                f"step index {step_index}; expected {expected}",
                metadata={"expected": str(expected)},
            )

    def _play_inline(self, actions: Sequence[str], encoded: bytes, want_legal: bool) -> bytes:
        actions_before = self.episode.actions_run
        try:
            self._result = self._play(actions, encoded)
        except (*ENVIRONMENT_ERRORS, asyncio.CancelledError) as error:  # Nothing is awaited here.
            return self._fail(self._environment_failed(error))
        self._count_turn(actions_before)
        self._legal = self._list_legal() if want_legal else None
        return self._with_legal(self._result, self._legal)

    async def _run(self, actions: Sequence[str], encoded: bytes, want_legal: bool) -> bytes:
        """Plays a turn that does not fit on the event loop, or that has to wait until the episode is free."""
        try:
            return await self._run_when_free(actions, encoded, want_legal)
        finally:
            self._runtime.waiting.leave(self.identity.caller.account)

    async def _run_when_free(self, actions: Sequence[str], encoded: bytes, want_legal: bool) -> bytes:
        if not await self._take_in_time():
            self._running = None
            return self._fail(self._past_deadline(f"step {self.step_index}", _WAITING))
        release = self._let_go
        try:
            if self._inline:
                return self._play_inline(actions, encoded, want_legal)
            actions_before = self.episode.actions_run
            began = time.perf_counter()
            try:
                self._result, self._legal = await self._runtime.threads(self.identity.host.spec).run(
                    lambda: (self._play(actions, encoded), self._list_legal() if want_legal else None),
                    self.identity.host.spec.step_deadline,
                    late=release,
                    account=self.identity.caller.account,
                )
            finally:
                self.counts.turn_seconds.add(time.perf_counter() - began)
            self._count_turn(actions_before)
            return self._with_legal(self._result, self._legal)
        except Abandoned:
            release = _keep
            raise
        except Overrun as overrun:
            release = _keep if overrun.goes_on else release
            return self._fail(self._past_deadline(f"step {self.step_index}", "in the environment"))
        except ENVIRONMENT_ERRORS as error:
            return self._fail(self._environment_failed(error))
        finally:
            self._running = None
            release()

    def _play(self, actions: Sequence[str], encoded: bytes) -> bytes:
        turn = self.episode.play(actions, self._runtime.clock(), encoded)
        return messages.transition_field(messages.transition(turn).SerializeToString())

    def _count_turn(self, actions_before: int) -> None:
        """Counts a turn that has been played, on the event loop."""
        episode = self.episode
        self.counts.turns += 1
        self.counts.actions += episode.actions_run - actions_before
        if episode.end_reason:
            self.counts.ended[episode.end_reason] += 1

    def _event(self) -> Event:
        return self.identity.event(self.episode.noise, self.step_index)

    def _fail(self, error: ItemError) -> bytes:
        """Makes `error` the last turn's result, and the end of the episode."""
        self.counts.failed[error.reason] += 1
        self._runtime.counts.rpc("Step").item_errors[error.reason] += 1
        self._result = messages.error_field(error.status())
        self.failed = True
        return self._result

    def _past_deadline(self, what: str, where: str) -> ItemError:
        spec = self.identity.host.spec
        message = f"{what} of {spec.id} ran past its deadline of {spec.step_deadline:g} s, {where}"
        log.warning(
            "%s: %s",
            message,
            self.identity.describe(self.episode.noise),
            extra={**self._event(), "reason": Reason.STEP_DEADLINE.value},
        )
        return ItemError(Reason.STEP_DEADLINE, message)

    def _environment_failed(self, error: BaseException) -> ItemError:
        if isinstance(error, ProcessKilled) and (lost := self._lost(error)):
            return lost
        log.error(
            "step %d failed: %s",
            self.step_index,
            self.identity.describe(self.episode.noise),
            exc_info=self.identity.logged(error),
            extra={**self._event(), "reason": Reason.ENVIRONMENT_FAILED.value},
        )
        return ItemError(
            Reason.ENVIRONMENT_FAILED,
            f"{self.identity.host.spec.id} failed in step {self.step_index}: {self.identity.told(error)}",
        )

    def _lost(self, error: ProcessKilled) -> ItemError | None:
        """Ends the session, whose process was killed, so that it is resumed by replay; None: it is the episode's doing.

        Being killed is no result of an episode, as little as the end of a server is. An episode that is killed at the
        same place again and again is not resumed for ever: see `Killings`.
        """
        if not self._runtime.killings.excuses((self.episode.digest, self._fingerprint)):
            return None
        self.failed = True
        self.lease_end = 0.0
        log.warning(
            "after step %d: %s: %s",
            self.episode.turns_played,
            error,
            self.identity.describe(self.episode.noise),
            extra={**self._event(), "reason": Reason.SESSION_EXPIRED.value},
        )
        return ItemError(
            Reason.SESSION_EXPIRED,
            f"session {self.identity.session_id} is gone: {error}, by none of its own doing; resume it by replay",
        )

    # Results

    def _collect(self, want_legal: bool) -> "bytes | asyncio.Task[bytes]":
        """The last turn's result, or the task that will know it."""
        if want_legal and not self.failed and (self.running or self._legal is None):
            # However often it is asked for, one task waits for it.
            if self._listing is None or self._listing[0] != self.step_index or self._listing[1].done():
                self._listing = self.step_index, self._runtime.spawn(self._collect_with_legal())
            return self._listing[1]
        if self._running is not None:
            return self._running
        return self._with_legal(self._result, self._legal if want_legal else None)

    async def _collect_with_legal(self) -> bytes:
        if self._running is not None:
            await asyncio.wait({self._running})
        result = self._result
        return result if self.failed else self._with_legal(result, await self.legal_actions(self.step_index))

    @staticmethod
    def _with_legal(result: bytes, legal: pb.LegalActions | None) -> bytes:
        return result if legal is None else result + messages.legal_actions_field(legal)

    async def legal_actions(self, step_index: int) -> pb.LegalActions | None:
        """Legal actions after turn `step_index`; None once the episode has gone on, or has failed."""
        if self._legal is None and not self.failed and self.step_index == step_index:
            try:
                await self._aside(
                    lambda: lambda: self._keep_legal(step_index), f"legal actions after step {step_index}"
                )
            except ItemError:
                return None
        return self.listed_actions(step_index)

    def listed_actions(self, step_index: int) -> pb.LegalActions | None:
        """Legal actions after turn `step_index`, where they have been listed; None once the episode has gone on."""
        return self._legal if self.step_index == step_index else None

    def _keep_legal(self, step_index: int) -> None:
        if self.step_index == step_index:
            self._legal = self._list_legal()

    def _list_legal(self) -> pb.LegalActions | None:
        """Legal actions now; None where the environment cannot list them, which is no fault of the turn just played."""
        return list_legal(self.episode, self.identity)

    def started(self) -> pb.Started:
        """How the session began; the same however long ago that was. Without lease and legal actions."""
        identity = self.identity
        spec = identity.host.spec
        sealed = identity.seal is not None
        return pb.Started(
            session_id=identity.session_id,
            environment_id=spec.id,
            version=spec.version,
            options_json=identity.options_json,
            limits=messages.limits(self.episode.limits),
            split=messages.SPLITS[identity.split],
            split_epoch=spec.split_epoch,
            level_seed=0 if sealed else identity.level_seed,
            noise=[] if sealed else messages.noise(self.start_noise),
            instance_id="" if sealed else identity.instance_id,
            world_id="" if sealed else identity.world_id,
            instructions=identity.instructions,
            action_separator=spec.action_separator,
            step_index=self.start_index,
            state=pb.Transition.FromString(self.start_state),
        )

    # What else can be asked of an episode

    async def fork(self, identity: Identity, step_index: int, noise_seed: int | None) -> "Session":
        """A session with a copy of the episode as it stands after turn `step_index`.

        Args:
            identity: the copy's.
            noise_seed: of the copy, from the next turn on; None: it meets the same noise.

        Raises:
            ItemError: SEALED, STEP_RUNNING, WRONG_STEP_INDEX, EPISODE_ENDED (it failed), ENVIRONMENT_FAILED,
                STEP_DEADLINE.
        """
        self.identity.refuse_if_sealed("Fork")

        def prepare() -> "Callable[[], tuple[Episode, bytes, Fingerprint | None]]":
            if step_index != self.step_index:
                raise ItemError(
                    Reason.WRONG_STEP_INDEX,
                    f"fork after step {step_index}; the session has played {self.step_index}",
                    metadata={"expected": str(self.step_index)},
                )
            if self.failed:
                raise ItemError(Reason.EPISODE_ENDED, f"the episode failed at step {step_index}; nothing to copy")
            result, fingerprint = self._result, self._fingerprint
            return lambda: (self.episode.fork(), result, fingerprint)

        episode, result, fingerprint = await self._aside(prepare, f"a fork after step {step_index}")
        state = messages.transition_of(result)
        if noise_seed is not None:
            episode.change_noise(noise_seed)
            state.digest = episode.digest
        copy = Session(identity, episode, self._runtime, state=state.SerializeToString(), last_actions=fingerprint)
        copy.began(Origin.FORK)
        return copy

    async def advise(self) -> pb.Advice:
        """What the oracle would do now. It is asked once a turn, however often its advice is.

        Raises:
            ItemError: SEALED, STEP_RUNNING, EPISODE_ENDED, NO_ORACLE, QUEUE_FULL, ENVIRONMENT_FAILED, STEP_DEADLINE.
        """
        self.identity.refuse_if_sealed("Advise")

        def prepare() -> "Callable[[], pb.Advice | None]":
            if self.failed or self.episode.ended:
                raise ItemError(
                    Reason.EPISODE_ENDED, f"the episode ended at step {self.step_index}; there is nothing to advise"
                )
            if (known := self._advice) is not None:
                return lambda: known
            step_index, episode = self.step_index, self.episode
            return lambda: _ask_oracle(step_index, episode)

        waiting, account = self._runtime.waiting, self.identity.caller.account
        waiting.check(account)
        waiting.enter(account)
        try:
            advice = await self._aside(prepare, f"the oracle after step {self.step_index}")
        finally:
            waiting.leave(account)
        if advice is None:
            raise ItemError(Reason.NO_ORACLE, f"{self.identity.host.spec.id} has no oracle")
        if advice.step_index == self.step_index:
            self._advice = advice
        return advice

    async def _aside(self, prepare: Callable[[], Callable[[], T]], what: str) -> T:
        """Works on the episode in a thread, between turns.

        Args:
            prepare: looks at where the session stands, and returns the work; runs once the episode is free.
            what: names the work, for errors.

        Raises:
            ItemError: STEP_RUNNING, ENVIRONMENT_FAILED, STEP_DEADLINE, SESSION_EXPIRED (its process was killed), or
                what `prepare` raises. Waiting for the episode and the work have the deadline each. Past it the
                work keeps the episode until it is done, so that no turn is played under its feet.
        """
        if self.running:
            raise ItemError(
                Reason.STEP_RUNNING, f"step {self.step_index} is still running; collect it by sending it again"
            )
        spec = self.identity.host.spec
        if not await self._take_in_time():
            raise self._past_deadline(what, _WAITING)
        release = self._let_go
        try:
            return await self._runtime.threads(spec).run(
                prepare(), spec.step_deadline, late=release, account=self.identity.caller.account
            )
        except ItemError:
            raise
        except Abandoned:
            release = _keep
            raise
        except Overrun as overrun:
            release = _keep if overrun.goes_on else release
            raise self._past_deadline(what, "in the environment") from None
        except ENVIRONMENT_ERRORS as error:
            if isinstance(error, ProcessKilled) and (lost := self._lost(error)):
                raise lost from None
            log.exception(
                "%s failed: %s",
                what,
                self.identity.describe(self.episode.noise),
                exc_info=self.identity.logged(error),
                extra={**self._event(), "reason": Reason.ENVIRONMENT_FAILED.value},
            )
            raise ItemError(
                Reason.ENVIRONMENT_FAILED, f"{spec.id} failed in {what}: {self.identity.told(error)}"
            ) from self.identity.logged(error)
        finally:
            release()

    # Who has the episode

    @property
    def _busy(self) -> bool:
        return self._lock is not None and self._lock.locked()

    @property
    def _exclusive(self) -> asyncio.Lock:
        """Held by whoever works on the episode off the event loop. Made when first needed: most never are."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    async def _take_in_time(self) -> bool:
        """Waits until nobody else works on the episode, and takes it; False: somebody still does at the deadline."""
        try:
            async with asyncio.timeout(self.identity.host.spec.step_deadline):
                await self._exclusive.acquire()
        except TimeoutError:
            return False
        return True

    def _let_go(self) -> None:
        """Leaves the episode to the next, or to its end where that came while it could not be had."""
        self._exclusive.release()
        if self._unclosed:
            self._unclosed = False
            self._runtime.spawn(self._close())

    def depart(self, departure: Departure) -> None:
        """Ends the session, for the reason given, and frees its environment."""
        self.counts.departed[departure] += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s: %s",
                departure.value,
                self.identity.describe(self.episode.noise),
                extra={**self._event(), "departure": departure.value},
            )
        self.release()

    def release(self) -> None:
        """Frees the environment, once nobody works on it any more. What the session was stays known."""
        if type(self.episode.environment).close is Environment.close and not self._busy:
            self.episode.close()
        else:
            self._runtime.spawn(self._close())

    async def _close(self) -> None:
        if not await self._take_in_time():
            self._unclosed = True
            return
        spec = self.identity.host.spec
        release = self._let_go
        try:
            await self._runtime.threads(spec).run(
                self.episode.close, spec.step_deadline, late=release, account=self.identity.caller.account
            )
        except Abandoned:
            release = _keep
            raise
        except Overrun as overrun:
            release = _keep if overrun.goes_on else release
            log.warning(
                "close ran past its deadline of %g s: %s",
                spec.step_deadline,
                self.identity.describe(self.episode.noise),
                extra=self._event(),
            )
        except ENVIRONMENT_ERRORS as error:
            log.exception(
                "close failed: %s",
                self.identity.describe(self.episode.noise),
                exc_info=self.identity.logged(error),
                extra=self._event(),
            )
        finally:
            release()


Fingerprint = bytes | int
"""Stands for the actions of a turn where only their equality matters: themselves, or a hash of long ones."""
SHORT_ACTIONS: Final = 128
"""Bytes of actions that are kept as they are."""


def fingerprint_of(encoded_actions: bytes) -> Fingerprint:
    if len(encoded_actions) <= SHORT_ACTIONS:
        return encoded_actions
    return int.from_bytes(hashlib.sha256(encoded_actions).digest())


def list_legal(episode: Episode, identity: Identity) -> pb.LegalActions | None:
    """Legal actions now; None, and a line in the log, where the environment fails to list them.

    Raises:
        ProcessKilled: its process was, which is found out by whoever asks next.
    """
    try:
        return messages.legal_actions(episode.legal_actions())
    except ProcessKilled:
        raise
    except ENVIRONMENT_ERRORS as error:
        log.exception(
            "legal actions failed: %s",
            identity.describe(episode.noise),
            exc_info=identity.logged(error),
            extra=identity.event(episode.noise, episode.turns_played),
        )
        return None


def _keep() -> None:
    """In place of a lock's release: whoever is late will release it."""


def _ask_oracle(step_index: int, episode: Episode) -> pb.Advice | None:
    """What the oracle would do now; None where there is none."""
    environment, left = episode.environment, episode.left
    actions = environment.oracle(left)
    if actions is None:
        return None
    return pb.Advice(
        step_index=step_index,
        actions=actions,
        explanation=environment.explain(left),
        ceiling=environment.ceiling(left),
        floor=environment.floor(left),
    )
