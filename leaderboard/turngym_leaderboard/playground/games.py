"""Episodes that people play: what is on the table, whose turn it is, and what has been said.

An episode outlives its server, since its client plays it again on the next one; one that nobody looks at any more is
closed after a while. Knows nothing of HTTP or HTML.
"""

import asyncio
import contextlib
import datetime
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from turngym_client import (
    Advice,
    AsyncClient,
    CloseReason,
    EnvironmentFailed,
    EpisodeLost,
    EpisodeRequest,
    NoOracle,
    ServerBusy,
    ServerUnavailable,
    Transition,
    TurngymError,
    parse_answer,
)
from turngym_client.aio import AsyncEpisode
from turngym_leaderboard.playground.kept import KeptEpisode, KeptFile, KeptTurn
from turngym_leaderboard.record import LimitsRecord

MOST_GAMES: Final = 500
"""That are remembered; those whose episode is over are forgotten first."""


class NotNow(Exception):
    """What was asked for cannot be done as things stand. Says why, to the player."""


class NoSuchGame(Exception):
    """No game of this id is remembered."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A turn on its way: whether it has been played is not known."""

    actions: tuple[str, ...]
    reasoning: str


@dataclass(slots=True)
class Game:
    """One episode and the person before it.

    Attributes:
        request: asks for such an episode again.
        turns: played so far.
        reply: what the last turn did; None: none was played.
        advice: the oracle's, for the state as it stands; None: it was not asked in this turn.
        advised: it was asked on this level, in this turn, an earlier one or another game.
        sent: a turn that no server has answered for yet. It may be sent again, and nothing else.
        failure: why the episode cannot go on; "": it can, or has ended by itself.
        left: nobody looked at it for so long that it was closed.
        seen: when somebody last did, on the monotonic clock.
    """

    id: str
    episode: AsyncEpisode
    request: EpisodeRequest
    seen: float
    turns: list[KeptTurn] = field(default_factory=list[KeptTurn])
    reply: Transition | None = None
    advice: Advice | None = None
    advised: bool = False
    has_oracle: bool = True
    sent: Sent | None = None
    failure: str = ""
    left: bool = False
    kept: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def over(self) -> bool:
        """No turn can be played any more."""
        return self.episode.done or bool(self.failure) or self.left

    @property
    def level(self) -> tuple[str, str]:
        """Environment and world: the same for games of one level, however it is shown."""
        return self.episode.environment_id, self.episode.world_id

    @property
    def total(self) -> float:
        """Sum of the rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def actions_left(self) -> int | None:
        """That this turn may have; None: as many as one likes."""
        limits = self.episode.limits
        used = sum(turn.actions_executed for turn in self.turns)
        bounds = [limits.max_actions_per_turn] if limits.max_actions_per_turn else []
        bounds += [limits.max_actions - used] if limits.max_actions else []
        return 1 if not self.episode.action_separator else max(1, min(bounds)) if bounds else None


class Games:
    """All games of a playground.

    Args:
        keep: where episodes are kept; None: nowhere.
        idle_seconds: after which a game that nobody looks at is closed.
    """

    def __init__(self, client: AsyncClient, keep: KeptFile | None, idle_seconds: float) -> None:
        self.client = client
        self.keep = keep
        self._idle_seconds = idle_seconds
        self._games: dict[str, Game] = {}
        self._without_oracle: set[str] = set()
        self._advised: set[tuple[str, str]] = set()

    async def start(self, request: EpisodeRequest) -> Game:
        """Begins an episode. Raises TurngymError."""
        episode = await self.client.reset(
            request.environment_id,
            options=request.options,
            limits=request.limits,
            split=request.split,
            level_seed=request.level_seed,
            noise_seed=request.noise_seed,
            want_legal_actions=True,
        )
        game = Game(secrets.token_urlsafe(12), episode, request, time.monotonic())
        game.has_oracle = request.environment_id not in self._without_oracle
        game.advised = game.level in self._advised
        await self._make_room()
        self._games[game.id] = game
        return game

    def find(self, id: str) -> Game:
        """The game of an id, which has been seen by that. Raises NoSuchGame."""
        if (game := self._games.get(id)) is None:
            raise NoSuchGame
        game.seen = time.monotonic()
        return game

    async def play(self, game: Game, step: int, actions: Sequence[str], reasoning: str) -> None:
        """Plays a turn.

        Args:
            step: turns that had been played when the player chose.

        Raises:
            NotNow: this is no turn that could be played now.
            TurngymError: it was not played, or nobody can say; then `game.sent` holds it.
        """
        async with game.lock:
            _check_turn(game, step)
            turn = Sent(tuple(actions), reasoning.strip())
            _check_sendable(game, turn)
            observation = game.episode.state.observation
            game.sent = turn
            try:
                reply = await game.episode.step(turn.actions, want_legal_actions=True)
            except (ServerUnavailable, ServerBusy):
                raise
            except (EnvironmentFailed, EpisodeLost) as error:
                game.sent, game.failure = None, str(error)
                return
            except (TurngymError, ValueError):
                game.sent = None
                raise
            game.turns.append(
                KeptTurn(
                    observation=observation,
                    reasoning=turn.reasoning,
                    actions=turn.actions,
                    actions_executed=reply.actions_executed,
                    reward=reply.reward,
                    valid_action=reply.action_valid,
                    advised=game.advised,
                )
            )
            game.sent, game.advice, game.reply = None, None, reply
            if reply.done:
                await game.episode.close()

    async def ask(self, game: Game, step: int) -> None:
        """Asks the oracle, which is not forgotten: from now on whatever is played on this level was advised.

        Raises:
            NotNow: the state has changed since, or the environment has no oracle.
            TurngymError: no server answers.
        """
        async with game.lock:
            _check_turn(game, step)
            if game.sent is not None:
                raise NotNow("A turn is on its way: send it again first.")
            try:
                game.advice = await game.episode.advise()
            except NoOracle:
                self._without_oracle.add(game.episode.environment_id)
                game.has_oracle = False
                raise NotNow("This environment has no oracle.") from None
            self._advised.add(game.level)
            for each in self._games.values():
                each.advised = each.advised or each.level == game.level

    def keep_episode(self, game: Game) -> None:
        """Appends the episode to the file, once.

        Raises:
            NotNow: it has not ended, or there is no file.
            CannotKeep: it could not be written.
        """
        if self.keep is None:
            raise NotNow("Nothing is kept: the playground was started without --keep FILE.")
        if not game.episode.done:
            raise NotNow("Only an episode that has ended can be kept.")
        if not game.kept:
            self.keep.append(kept_episode(game))
            game.kept = True

    async def hold(self, game: Game) -> None:
        """Somebody is looking: renews the session's lease, as far as a server can be reached."""
        if game.over or game.lock.locked() or game.sent is not None:
            return
        async with game.lock:
            try:
                await game.episode.keep_alive()
            except (EnvironmentFailed, EpisodeLost) as error:
                game.failure = str(error)
            except TurngymError:
                return  # The next turn says what is wrong, if it still is.

    async def close_left(self, now: float) -> None:
        """Closes the games that nobody has looked at for long. `now`: on the monotonic clock."""
        left = [game for game in self._games.values() if not game.over and now - game.seen > self._idle_seconds]
        for game in left:
            if not game.lock.locked():
                await _leave(game)

    async def close(self) -> None:
        """Closes every game."""
        for game in self._games.values():
            if not game.over:
                await _leave(game)

    async def _make_room(self) -> None:
        while len(self._games) >= MOST_GAMES:
            game = min(self._games.values(), key=lambda game: (not game.over, game.seen))
            if not game.over:
                await _leave(game)
            self._games.pop(game.id, None)


def kept_episode(game: Game) -> KeptEpisode:
    """An episode that has ended, as it is kept."""
    episode, state = game.episode, game.episode.state
    assert episode.level_seed is not None, "a person plays no sealed seeds"
    return KeptEpisode(
        player="person and oracle" if any(turn.advised for turn in game.turns) else "person",
        environment=episode.environment_id,
        version=episode.version,
        options_json=episode.options_json,
        limits=LimitsRecord.of(episode.limits),
        split=episode.split.value,
        split_epoch=episode.split_epoch,
        action_separator=episode.action_separator,
        level_seed=episode.level_seed,
        noise_seed=episode.noise[0].noise_seed,
        instance_id=episode.instance_id,
        world_id=episode.world_id,
        success=state.success,
        terminated=state.terminated,
        truncated=state.truncated,
        end_reason=state.end_reason.value,
        digest=state.digest.hex(),
        environment_return=game.total,
        turns=tuple(game.turns),
        last_observation=state.observation,
        kept_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _check_turn(game: Game, step: int) -> None:
    if game.left:
        raise NotNow("This episode was closed because nobody looked at it for long.")
    if game.over:
        raise NotNow("This episode is over.")
    if step != len(game.turns):
        raise NotNow("This turn has been played meanwhile, perhaps in another tab. Here is how things stand.")


def _check_sendable(game: Game, turn: Sent) -> None:
    """Raises NotNow where a turn could not be kept as an agent's answer, or would not be run whole."""
    if game.sent not in (None, turn):
        raise NotNow("The turn before may have been played: send it again to learn what came of it.")
    separator = game.episode.action_separator
    if not turn.actions:
        raise NotNow("Choose an action first.")
    if game.actions_left is not None and len(turn.actions) > game.actions_left:
        raise NotNow(f"{len(turn.actions)} actions are too many: this turn may have {game.actions_left}.")
    answer = f"<think>{turn.reasoning}</think><answer>{f' {separator} '.join(turn.actions)}</answer>"
    if parse_answer(answer, separator).actions != turn.actions:
        raise NotNow(
            "This cannot be an agent's answer: leave out <think>, </think>, <answer> and </answer>"
            + (f", and {separator} within an action." if separator else ".")
        )


async def _leave(game: Game) -> None:
    game.left = True
    with contextlib.suppress(TurngymError):
        await game.episode.close(CloseReason.ABANDONED)
