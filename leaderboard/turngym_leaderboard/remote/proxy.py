"""What a remote agent may ask, and what follows from it: episodes are dealt, turns are answered and played.

Whoever calls has made sure that the submission is the caller's. What is kept of an episode is what the runner keeps
(`turngym_leaderboard.runner`), with the same faults: the agent's and a recurring one of the environment are failures,
the server's are not.
"""

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from turngym.sealed import SealKey
from turngym_client import Client, EnvironmentFailed, Episode, EpisodeRequest, Transition, TurngymError, parse_answer
from turngym_leaderboard.agents import Reply
from turngym_leaderboard.playing import CannotPlay, ServersGone, check_board
from turngym_leaderboard.protocol import Seal, request
from turngym_leaderboard.record import Trajectory
from turngym_leaderboard.remote.seats import seats
from turngym_leaderboard.remote.sessions import AWAY, NOT_SERVED, Sessions, Step
from turngym_leaderboard.runner import TRIES, Blame, Ending, Place, episode_record, turn_record
from turngym_leaderboard.sealing import seal_of
from turngym_leaderboard.store import Store, Taken, WrongState, boards, remote, submissions
from turngym_leaderboard.store.values import (
    Board,
    Environment,
    Owner,
    RemoteAnswer,
    RemoteEpisode,
    RemoteOutcome,
    RemoteStart,
    Submission,
    Visibility,
)

_LOCKS: Final = 64
_ABANDONED: Final = "deadline: it was never asked for"
_FAILED: Final = "the environment failed in this turn, each time that it was played"
_LOST: Final = "the board's servers failed in this episode; it counts neither as a success nor as a failure"
_log: Final = logging.getLogger(__name__)


class ServersAway(Exception):
    """No environment server can play this now: nothing is lost, the same may be asked again."""


@dataclass(frozen=True, slots=True)
class Times:
    """What an agent is given.

    Attributes:
        turn: for an answer. idle: without asking for anything, after which what was not dealt counts as failed.
        unseen: after which a board that was not seen to be playable counts as having been away.
    """

    turn: timedelta = timedelta(minutes=10)
    idle: timedelta = timedelta(hours=24)
    unseen: timedelta = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class _Table:
    """Where an episode is played."""

    submission: Submission
    environment: Environment
    place: Place
    request: EpisodeRequest


class Proxy:
    """Plays remote agents' turns on environment servers. May be shared by threads, and with other services' proxies.

    A turn's time is over only once its board was seen to be playable at its end, and all the time before: `look` has to
    be called more often than `Times.unseen`. After a time without that, be it that servers were away, the database
    failed or this process stood still, all turns of the board have their whole time anew.
    """

    def __init__(
        self, store: Store, client: Client, *, seal_key: SealKey | None = None, times: Times | None = None
    ) -> None:
        self.times = times or Times()
        self._store = store
        self._client = client
        self._seal_key = seal_key
        self._sessions = Sessions(client)
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._looking = threading.Lock()
        self._seen: dict[int, datetime] = {}
        self._away: set[int] = set()
        self._arriving: dict[str, list[datetime]] = {}

    def open(self, board: Board, owner: Owner, *, name: str, visibility: Visibility, public_id: str) -> Submission:
        """Begins a submission; asked for again, gives the one that there is.

        Raises:
            WrongState: the board takes none, or its season is over.
            LimitReached: the owner has none left in the season.
            ServersAway: nothing could be played of it now, so nothing was begun.
        """
        if not board.definition.sealed:
            raise WrongState(
                f"{board.slug} is an open board: everybody can read how others, also the oracle, played the same "
                "levels, so it takes no remote agents"
            )
        try:
            self._look(board)
        except ServersAway as error:
            _log.error("no remote submission can be begun: %s", error.__cause__)
            raise
        told = {
            "kind": "remote",
            "played_by": "its owner's own program, which the board knows nothing of",
            "attempts": "1 of each instance",
            "turn_seconds": f"{self.times.turn.total_seconds():g}",
        }
        deals = {each.id: boards.deal(self._store, each.id) for each in board.environments}
        try:
            return remote.begin(
                self._store,
                board,
                owner,
                name=name,
                visibility=visibility,
                description=told,
                public_id=public_id,
                seats=seats(board, deals, boards.secret(self._store, board), public_id),
                now=_now(),
            )
        except Taken:
            return submissions.find(self._store, public_id)

    def deal(self, submission: Submission, board: Board, most: int) -> list[RemoteEpisode]:
        """The episodes that go on, and further ones up to `most` together, at most the board's batch.

        Raises:
            WrongState: the submission is not played now.
            ServersAway: not all could be started or played on; those that were dealt stay so.
        """
        self._expire(only=submission)
        dealt = remote.deal(self._store, submission.public_id, min(most, board.definition.batch), now=_now())
        begun = self._start(submission, board, [each for each in dealt if each.start is None])
        now = [begun.get(each.id, each) for each in dealt]
        return [each for each in (self._caught_up(submission, board, each) for each in now) if each.ended is None]

    def find(self, submission: Submission, public_id: str) -> RemoteEpisode:
        """An episode that has been dealt, where it stands. Raises NotFound."""
        return remote.find(self._store, submission, public_id)

    def keep(
        self,
        submission: Submission,
        public_id: str,
        turn: int,
        written: str | tuple[str, ...],
        *,
        arrived: datetime,
    ) -> RemoteEpisode:
        """Keeps an answer that came in time, and waits for no server. One that came late is left to `answer`.

        Args:
            written: the agent's text, in the form that agents are told; or its actions.
            arrived: when the answer was there, however long ago.

        Raises:
            NotFound: there is no such episode.
            WrongState: it is over, it is at another turn, this one was answered otherwise, or its submission was ended.
        """
        with self._arrives(public_id, arrived):
            episode = remote.find(self._store, submission, public_id)
            answer = _answer(episode, written)
            if _is_over(episode, arrived) and turn == len(episode.turns):
                return episode
            return remote.answer(self._store, episode, turn, answer, now=arrived)

    def answer(
        self,
        submission: Submission,
        board: Board,
        kept: RemoteEpisode,
        turn: int,
        written: str | tuple[str, ...],
        *,
        arrived: datetime,
    ) -> RemoteEpisode:
        """Plays a turn, once: the same answer given again changes nothing.

        Args:
            kept: what `keep` gave for this answer; the others are what it was given.

        Raises:
            WrongState: as `keep` does, or its time ran out, or its submission was ended while it was played.
            ServersAway: the answer is kept, and will be played.
        """
        if turn < len(kept.played):
            return kept  # No environment server is asked, nor waited for.
        if turn == len(kept.turns):
            self._settle(submission, board, kept)
            kept = remote.answer(self._store, kept, turn, _answer(kept, written), now=arrived)
        told = self._caught_up(submission, board, kept)
        if told.pending:
            raise remote.not_played(self._store, submission)  # It was ended while the turn was played.
        return told

    def look(self) -> None:
        """Sees which boards can be played now, so that time runs on them."""
        for number in remote.played_boards(self._store):
            try:
                self._look(boards.of_id(self._store, number))
                self._away.discard(number)
            except ServersAway as error:
                if number not in self._away:
                    _log.warning("remote agents' turns have to wait: %s", error.__cause__)
                self._away.add(number)

    def stumbled(self) -> None:
        """Notes that the database failed, so that whoever was refused for that has the whole time anew."""
        with self._looking:
            self._seen.clear()

    def sweep(self) -> None:
        """Looks after what nobody asks for: answers that wait for a server, turns and submissions that are overdue.

        Raises:
            ServersAway: what is on the board whose servers are away has to wait.
        """
        now = _now()
        self._expire()
        self._sessions.forget_all_but(remote.going_on(self._store))
        away: dict[int, ServersAway] = {}
        for episode in remote.pending(self._store, now):
            submission, board = self._of(episode)
            # One board's servers may be away, and each try takes its time.
            if board.id not in away:
                try:
                    self._caught_up(submission, board, episode)
                except ServersAway as error:
                    away[board.id] = error
        for submission in remote.idle(self._store, now - self.times.idle):
            seen = self._seen.get(submission.board_id)
            if seen is not None and _now() - seen <= self.times.unseen and submission.board_id not in away:
                try:
                    self._abandon(submission)
                except ServersAway as error:
                    away[submission.board_id] = error
        for error in away.values():
            raise error

    def _look(self, board: Board) -> None:
        """Raises ServersAway where nothing of a board could be played now."""
        try:
            check_board(self._client, board)
        except (CannotPlay, ServersGone) as error:
            with self._looking:
                self._seen.pop(board.id, None)
            raise ServersAway(f"the environment servers do not play {board.slug} now; try again later") from error
        with self._looking:
            now, seen = _now(), self._seen.get(board.id)
            if seen is None or now - seen > self.times.unseen:
                remote.renew(self._store, board.id, now + self.times.turn, now=now)
            self._seen[board.id] = now

    @contextmanager
    def _arrives(self, public_id: str, arrived: datetime) -> Generator[None]:
        """Within the block no answer that came then to this episode is too late for the others of this proxy."""
        with self._looking:
            self._arriving.setdefault(public_id, []).append(arrived)
        try:
            yield
        finally:
            with self._looking:
                self._arriving[public_id].remove(arrived)
                if not self._arriving[public_id]:
                    del self._arriving[public_id]

    def _abandon(self, submission: Submission) -> None:
        """Ends all episodes of a submission that are left."""
        board = boards.of_id(self._store, submission.board_id)
        while dealt := self.deal(submission, board, board.definition.batch):
            for episode in dealt:
                with self._alone(episode.public_id):
                    found = remote.find(self._store, submission, episode.public_id)
                    self._end(submission, board, found, "agent", _ABANDONED, told=_ABANDONED)

    def _of(self, episode: RemoteEpisode) -> tuple[Submission, Board]:
        submission = submissions.of_id(self._store, episode.submission_id)
        return submission, boards.of_id(self._store, submission.board_id)

    def _alone(self, public_id: str) -> threading.Lock:
        return self._locks[hash(public_id) % _LOCKS]

    def _start(self, submission: Submission, board: Board, waiting: list[RemoteEpisode]) -> dict[int, RemoteEpisode]:
        """Episodes that have begun now, or ended since no server could begin them, by number."""
        found: dict[int, RemoteEpisode] = {}
        faults: dict[int, TurngymError] = {}
        tables = {each.id: self._table(submission, board, each) for each in waiting}
        for _ in range(TRIES):
            left = {each.public_id: each for each in waiting if each.id not in found}
            if not left:
                break
            wanted = {name: tables[each.id].request for name, each in left.items()}
            for name, outcome in self._sessions.start(wanted).items():
                episode = left[name]
                if isinstance(outcome, Episode):
                    begun = _begun(outcome, tables[episode.id].request)
                    found[episode.id] = now = remote.start(self._store, episode, begun, due=_now() + self.times.turn)
                    if now.start != begun:
                        self._sessions.forget(name)  # Somebody else was first, and sealed the seeds otherwise.
                else:
                    self._check_served(outcome)
                    faults[episode.id] = outcome
        for episode in waiting:
            if episode.id not in found:
                fault = faults[episode.id]
                found[episode.id] = self._end(
                    submission, board, episode, "server", f"{type(fault).__name__}: {fault}", told=_LOST
                )
        return found

    def _caught_up(self, submission: Submission, board: Board, episode: RemoteEpisode) -> RemoteEpisode:
        """The episode after its last answer has been played. Raises ServersAway."""
        if not episode.pending:
            return episode
        with self._alone(episode.public_id):
            found = remote.find(self._store, submission, episode.public_id)
            return self._play(submission, board, found) if found.pending else found

    def _play(self, submission: Submission, board: Board, episode: RemoteEpisode) -> RemoteEpisode:
        """Plays the pending turn. Raises ServersAway."""
        table = self._table(submission, board, episode)
        begun, answer = episode.start, episode.turns[-1].answer
        assert begun is not None
        played = [Step(turn.answer.actions, turn.outcome.digest) for turn in episode.turns if turn.outcome is not None]
        blame: Blame = "server"
        fault = ""
        for _ in range(TRIES):
            try:
                outcome = self._sessions.step(episode.public_id, table.request, begun.digest, played, answer.actions)
            except TurngymError as error:
                self._check_served(error)
                blame = "environment" if isinstance(error, EnvironmentFailed) else "server"
                fault = f"{type(error).__name__}: {error}"
                continue
            if outcome.done and outcome.success is None:
                blame, fault = "server", "the environment did not say whether it succeeded"
                continue
            return self._keep(submission, board, episode, answer, outcome)
        return self._end(submission, board, episode, blame, fault, told=_FAILED if blame == "environment" else _LOST)

    def _keep(
        self, submission: Submission, board: Board, episode: RemoteEpisode, answer: RemoteAnswer, found: Transition
    ) -> RemoteEpisode:
        """Keeps what came of a turn, and of the episode where it was the last one."""
        outcome = _outcome(_observation(episode), answer, found)
        if not outcome.done:
            return remote.outcome(self._store, episode, outcome, due=_now() + self.times.turn)
        return self._end(submission, board, episode, "", "", last=outcome)

    def _end(
        self,
        submission: Submission,
        board: Board,
        episode: RemoteEpisode,
        blame: Blame,
        fault: str,
        *,
        last: RemoteOutcome | None = None,
        told: str = "",
    ) -> RemoteEpisode:
        played = (*episode.played, last) if last is not None else episode.played
        turns = tuple(outcome.record for outcome in played)
        state, begun = played[-1] if played else None, episode.start
        ending = Ending(
            blame=blame,
            fault=fault,
            success=state.success if state else None,
            truncated=state.truncated if state else False,
            end_reason=state.end_reason if state else "",
            digest=state.digest if state else begun.digest if begun else "",
        )
        place = self._table(submission, board, episode).place
        trajectory = Trajectory(
            agent=submission.name,
            draw=episode.draw,
            attempt=episode.attempt,
            turns=turns,
            last_observation=state.observation if state else begun.observation if begun else "",
        )
        ended = remote.end(
            self._store, episode, episode_record(place, turns, ending), trajectory, last=last, told=told, now=_now()
        )
        self._sessions.forget(episode.public_id)
        return ended

    def _expire(self, only: Submission | None = None) -> None:
        """Ends the episodes whose time is over, all or one submission's, so that others can be dealt in their place."""
        for episode in remote.overdue(self._store, _now()):
            if only is None or episode.submission_id == only.id:
                submission, board = self._of(episode)
                self._expire_one(submission, board, episode)

    def _settle(self, submission: Submission, board: Board, episode: RemoteEpisode) -> None:
        """Ends an episode that was answered late, or gives its turn more time where no server could have played it."""
        if not self._seen_after(board, episode):
            try:
                self._look(board)
            except ServersAway:
                remote.renew(self._store, board.id, _now() + self.times.turn, now=_now())
        self._expire_one(submission, board, remote.find(self._store, submission, episode.public_id))

    def _expire_one(self, submission: Submission, board: Board, episode: RemoteEpisode) -> None:
        if not self._seen_after(board, episode):
            return
        with self._looking:
            arriving = tuple(self._arriving.get(episode.public_id, ()))
        if all(_is_over(episode, arrived) for arrived in arriving):
            seconds = self.times.turn.total_seconds()
            fault = f"deadline: turn {len(episode.played)} was not answered within {seconds:g} s"
            self._end(submission, board, episode, "agent", fault, told=fault)

    def _seen_after(self, board: Board, episode: RemoteEpisode) -> bool:
        """Whether the time of an episode's turn was over when its board was last seen to be playable."""
        seen = self._seen.get(board.id)
        return seen is not None and _is_over(episode, seen)

    def _table(self, submission: Submission, board: Board, episode: RemoteEpisode) -> _Table:
        [environment] = [each for each in board.environments if each.id == episode.environment_id]
        protocol = environment.definition.protocol(boards.secret(self._store, board), version=environment.version)
        place = Place.of(protocol, boards.instance(self._store, episode.environment_id, episode.draw), episode.attempt)
        seal = seal_of(self._seal_key, environment)
        if episode.start is not None:
            # A digest depends on what was sealed, and sealing the same seeds again would give other bytes.
            sealed = bytes.fromhex(episode.start.sealed_seed)
            seal = _as_before(sealed) if sealed else None
        wanted = request(protocol, level_seed=place.instance.level_seed, noise_seed=place.noise_seed, seal=seal)
        return _Table(submission, environment, place, wanted)

    def _check_served(self, error: TurngymError) -> None:
        """Raises ServersAway for what is neither the agent's nor the episode's."""
        if isinstance(error, NOT_SERVED):
            _log.error("the servers do not serve what the board was dealt from: %s", error)
        if isinstance(error, (*AWAY, *NOT_SERVED)):
            raise ServersAway("no environment server can play this now; what you sent is kept, ask again") from error


def _is_over(episode: RemoteEpisode, now: datetime) -> bool:
    """Whether the time for an episode's turn is over then."""
    return episode.ended is None and episode.due is not None and episode.due <= now


def _as_before(sealed: bytes) -> Seal:
    return lambda level_seed, noise_seed: sealed


def _begun(episode: Episode, asked: EpisodeRequest) -> RemoteStart:
    return RemoteStart(
        instructions=episode.instructions,
        action_separator=episode.action_separator,
        max_actions_per_turn=episode.limits.max_actions_per_turn,
        observation=episode.state.observation,
        digest=episode.state.digest.hex(),
        sealed_seed=(asked.sealed_seed or b"").hex(),
    )


def _observation(episode: RemoteEpisode) -> str:
    """What the agent was shown last."""
    assert episode.start is not None
    return episode.played[-1].observation if episode.played else episode.start.observation


def _answer(episode: RemoteEpisode, written: str | tuple[str, ...]) -> RemoteAnswer:
    """An answer in an episode. Raises WrongState."""
    if episode.start is None:
        raise WrongState("the episode has not begun; ask for the next ones first")
    return _read(written, episode.start.action_separator, episode.start.max_actions_per_turn)


def _read(written: str | tuple[str, ...], separator: str, most: int) -> RemoteAnswer:
    """An answer as it is played."""
    if not isinstance(written, str):
        actions = written[: most or None]
        return RemoteAnswer(text=separator.join(actions), reasoning="", actions=actions, valid_format=True)
    parsed = parse_answer(written, separator, max_actions=most or None)
    return RemoteAnswer(
        text=written,
        reasoning=parsed.reasoning,
        actions=parsed.actions,
        valid_format=parsed.valid_format,
        failure="" if parsed.valid_format else "unreadable: the answer is not in the form",
    )


def _outcome(observation: str, answer: RemoteAnswer, found: Transition) -> RemoteOutcome:
    reply = Reply(
        text=answer.text,
        reasoning=answer.reasoning,
        actions=answer.actions,
        valid_format=answer.valid_format,
        failure=answer.failure,
    )
    return RemoteOutcome(
        record=turn_record(observation, reply, found),
        observation=found.observation,
        digest=found.digest.hex(),
        done=found.done,
        success=found.success,
        truncated=found.truncated,
        end_reason=found.end_reason.value,
    )


def _now() -> datetime:
    return datetime.now(UTC)
