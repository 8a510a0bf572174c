"""One episode: an environment's instance, its limits, its noise, and the digest of all that happened.

Turns of several actions, limits and digests are decided here. Knows nothing of sessions, retries, threads or the
network; `Session` makes each turn happen once.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from turngym_server.environment import ActionResult, Environment, Left, Limits, Start
from turngym_server.rng import NOISE_STREAM, Rng
from turngym_server.sessions.digest import encode_actions, noise_digest, turn_digest

MAX_ACTION_BYTES: Final = 64 * 1024
"""A longer action, in UTF-8, is invalid."""
MAX_OBSERVATION_BYTES: Final = 256 * 1024
"""An environment that returns a longer observation has failed."""
MAX_LEGAL_ACTIONS: Final = 1_000


class EndReason(enum.IntEnum):
    """Why an episode ended. Numbers are those of the contract, and part of the digest."""

    NONE = 0
    ENVIRONMENT = 1
    MAX_TURNS = 2
    MAX_ACTIONS = 3
    WALL_CLOCK = 4


class EnvironmentFault(Exception):
    """An environment broke its contract: it returned what it may not, such as a reward that is no number."""


_NOTHING_PLAYED: Final = ActionResult("", 0.0)


@dataclass(frozen=True, slots=True)
class NoiseSegment:
    """From turn `from_step` on, noise is drawn from `noise_seed`."""

    from_step: int
    noise_seed: int


@dataclass(slots=True)
class Turn:
    """What one turn did, or where the episode stands after a reset. See `Transition` in environment.proto."""

    observation: str
    digest: bytes
    action_rewards: Sequence[float] = ()
    reward: float = 0.0
    terminated: bool = False
    success: bool | None = None
    end_reason: EndReason = EndReason.NONE
    action_valid: bool = True
    reward_components: Mapping[str, float] | None = None
    metrics: Mapping[str, float] | None = None

    @property
    def truncated(self) -> bool:
        return self.end_reason > EndReason.ENVIRONMENT


@dataclass(frozen=True, slots=True)
class LegalActions:
    """Legal actions now, at most 1,000; `more` where there are others or the set is open."""

    actions: Sequence[str]
    more: bool


class Episode:
    """An episode that goes on until a turn's `end_reason` says otherwise. Not safe to use from two threads at once.

    Args:
        environment: has been reset.
        limits: resolved.
        noise: its first segment, from step 1.
        digest: after the reset.
        started: when wall-clock seconds are counted from.
    """

    __slots__ = ("actions_run", "digest", "end_reason", "environment", "limits", "noise", "started", "turns_played")

    def __init__(
        self, environment: Environment[Any], *, limits: Limits, noise: NoiseSegment, digest: bytes, started: float
    ) -> None:
        self.environment = environment
        self.limits = limits
        self.noise: tuple[NoiseSegment, ...] = (noise,)
        self.digest = digest
        self.started = started
        self.turns_played = 0
        self.actions_run = 0
        self.end_reason = EndReason.NONE

    @property
    def ended(self) -> bool:
        return self.end_reason is not EndReason.NONE

    @property
    def left(self) -> Left:
        return Left(
            turns=self.limits.max_turns - self.turns_played,
            actions=self.limits.max_actions - self.actions_run,
            actions_per_turn=self.limits.max_actions_per_turn,
        )

    def play(self, actions: Sequence[str], now: float, encoded_actions: bytes | None = None) -> Turn:
        """Plays one turn: actions in order until the end, the first invalid one, or a limit.

        Args:
            actions: at least one.
            now: on the clock that `started` was read from. Past `limits.wall_seconds` this turn ends the episode.
            encoded_actions: `encode_actions(actions)`, where the caller has it already.

        Raises:
            Exception: whatever the environment raises, or EnvironmentFault. The episode is of no use after that.
        """
        limits = self.limits
        runnable = min(len(actions), limits.max_actions_per_turn, limits.max_actions - self.actions_run)
        assert not self.ended
        assert runnable > 0
        noise_seed = self.noise[-1].noise_seed
        step = self.environment.step
        reward = 0.0
        rewards: list[float] = []
        components: dict[str, float] | None = None
        result = _NOTHING_PLAYED
        try:
            for action in actions[:runnable]:
                result = step(playable(action), Rng(noise_seed, NOISE_STREAM + self.actions_run))
                self.actions_run += 1
                reward += _finite(result.reward, "reward")
                rewards.append(result.reward)
                if result.reward_components:
                    components = _added(components, result.reward_components)
                if result.terminated or not result.valid:
                    break
        except AttributeError:  # Asked only now, as every step comes this way.
            check_returned(self.environment, "step", result, ActionResult)
            raise
        self.turns_played += 1
        self.end_reason = end_reason = self._end_reason(result.terminated, now)
        success = result.success if end_reason else None
        self.digest = turn_digest(
            self.digest,
            step_index=self.turns_played,
            encoded_actions=encode_actions(actions) if encoded_actions is None else encoded_actions,
            observation=checked_observation(result.observation),
            reward=reward,
            terminated=result.terminated,
            truncated=end_reason > EndReason.ENVIRONMENT,
            success=success,
            action_valid=result.valid,
            end_reason=end_reason,
        )
        return Turn(
            observation=result.observation,
            digest=self.digest,
            action_rewards=rewards,
            reward=reward,
            terminated=result.terminated,
            success=success,
            end_reason=end_reason,
            action_valid=result.valid,
            reward_components=components,
            metrics=finite_metrics(result.metrics),
        )

    def change_noise(self, noise_seed: int) -> None:
        """Draws noise from another seed from the next turn on."""
        from_step = self.turns_played + 1
        self.noise = (*self.noise, NoiseSegment(from_step, noise_seed))
        self.digest = noise_digest(self.digest, from_step, noise_seed)

    def fork(self) -> "Episode":
        """An independent copy as it stands, with the same noise."""
        copy = Episode(
            self.environment.fork(),
            limits=self.limits,
            noise=self.noise[0],
            digest=self.digest,
            started=self.started,
        )
        copy.noise = self.noise
        copy.turns_played = self.turns_played
        copy.actions_run = self.actions_run
        copy.end_reason = self.end_reason
        return copy

    def close(self) -> None:
        """Frees what the environment holds, and the environment; the episode is of no use after that."""
        try:
            self.environment.close()
        finally:
            del self.environment

    def legal_actions(self) -> LegalActions:
        """Legal actions now; none after the end, where environments are no longer asked."""
        if self.ended:
            return LegalActions((), more=False)
        actions = self.environment.legal_actions()
        if actions is None:
            return LegalActions((), more=True)
        return LegalActions(actions[:MAX_LEGAL_ACTIONS], more=len(actions) > MAX_LEGAL_ACTIONS)

    def _end_reason(self, terminated: bool, now: float) -> EndReason:
        """The first that applies, so that what does not depend on the machine's speed comes first."""
        limits = self.limits
        if terminated:
            return EndReason.ENVIRONMENT
        if self.turns_played >= limits.max_turns:
            return EndReason.MAX_TURNS
        if self.actions_run >= limits.max_actions:
            return EndReason.MAX_ACTIONS
        if limits.wall_seconds is not None and now - self.started >= limits.wall_seconds:
            return EndReason.WALL_CLOCK
        return EndReason.NONE


def check_returned(
    environment: Environment[Any], method: str, value: object, expected: type[ActionResult] | type[Start]
) -> None:
    """Raises EnvironmentFault where a method of an environment returned something else than it must."""
    if not isinstance(value, expected):
        came = "None" if value is None else type(value).__name__
        raise EnvironmentFault(
            f"{type(environment).__qualname__}.{method} returned {came}; expected "
            f"{expected.__module__}.{expected.__name__}"
        )


def playable(action: str) -> str:
    """The action as an environment gets it: "", which none accepts, in place of one that is too long or holds NUL."""
    if "\0" in action:
        return ""
    # A character takes at most four bytes, so short ones need no encoding to be measured.
    if len(action) > MAX_ACTION_BYTES // 4 and len(action.encode()) > MAX_ACTION_BYTES:
        return ""
    return action


def checked_observation(observation: str) -> str:
    """The observation, if it can be sent.

    Raises:
        EnvironmentFault: it is longer than 256 KiB.
    """
    if len(observation) > MAX_OBSERVATION_BYTES // 4 and (size := len(observation.encode())) > MAX_OBSERVATION_BYTES:
        raise EnvironmentFault(f"an observation of {size} bytes; at most {MAX_OBSERVATION_BYTES} can be sent")
    return observation


def checked_instructions(instructions: object) -> str:
    """What an environment's `instructions` returned, if it is a text that can be sent.

    Raises:
        EnvironmentFault: it is no text, holds a lone surrogate, or is longer than 256 KiB.
    """
    if not isinstance(instructions, str):
        raise EnvironmentFault(f"instructions returned {type(instructions).__name__}; expected str")
    try:
        size = len(instructions.encode())
    except UnicodeEncodeError as error:
        raise EnvironmentFault(
            f"instructions hold a lone surrogate at {error.start}; expected a text that UTF-8 can hold"
        ) from None
    if size > MAX_OBSERVATION_BYTES:
        raise EnvironmentFault(f"instructions of {size} bytes; at most {MAX_OBSERVATION_BYTES} can be sent")
    return instructions


def finite_metrics(metrics: Mapping[str, float]) -> Mapping[str, float] | None:
    """The metrics, if all are numbers."""
    for name, value in metrics.items():
        _finite(value, name)
    return metrics


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise EnvironmentFault(f"{name} {value}: expected a finite number")
    return value


def _added(total: dict[str, float] | None, components: Mapping[str, float]) -> dict[str, float]:
    if total is None:
        total = {}
    for name, value in components.items():
        total[name] = total.get(name, 0.0) + _finite(value, name)
    return total
