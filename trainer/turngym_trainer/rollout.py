"""Plays planned episodes against the server with a policy.

Episodes are played in parts of fixed membership. A part decodes when all its replies are in, while other parts' steps
run at the server; what is sampled depends on the plan alone, never on which reply came first. Knows nothing of rewards,
filters or updates.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from turngym_client import Client, CloseReason, Episode, EpisodeRequest, Transition, TurngymError, parse_answer
from turngym_trainer.cache import Memory
from turngym_trainer.context import Context, Conversation, system_message
from turngym_trainer.distributed import ALONE, Group
from turngym_trainer.generate import Response, Uniforms, generate
from turngym_trainer.policy import ChatFormat, Policy
from turngym_trainer.trajectory import Trajectory, TurnRecord


@dataclass(frozen=True, slots=True)
class Planned:
    """An episode to play: where it starts (both seeds set), and its place in the iteration.

    `environment` is what its trajectory calls the environment; empty: its id.
    """

    request: EpisodeRequest
    group: int
    member: int
    environment: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """An episode that infrastructure took: no result of the policy's, and never scored."""

    planned: Planned
    error: TurngymError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are sampled. `greedy` ignores uniforms and temperature."""

    max_tokens: int
    temperature: float = 1.0
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a plan came to.

    Attributes:
        trajectories: finished episodes, in the plan's order.
        lost: the others, in the plan's order.
        waiting_seconds: time spent waiting for environments with nothing to decode.
    """

    trajectories: tuple[Trajectory, ...]
    lost: tuple[Lost, ...]
    waiting_seconds: float


@dataclass(slots=True)
class _Play:
    """An episode in progress."""

    planned: Planned
    episode: Episode
    conversation: Conversation
    turns: list[TurnRecord] = field(default_factory=list[TurnRecord])
    response: Response | None = None
    outgrown: bool = False

    @property
    def over(self) -> bool:
        return self.outgrown or self.episode.done


def collect(
    policy: Policy,
    client: Client,
    plan: Sequence[Planned],
    *,
    context: Context,
    sampling: Sampling,
    uniforms: Uniforms,
    parts: int = 1,
    keep_cache: bool = True,
    group: Group = ALONE,
) -> Rollout:
    """Plays every planned episode to its end.

    Args:
        policy: answers; its weights do not change meanwhile.
        client: connected to the server.
        plan: in order; consecutive episodes form a part.
        context: what the policy reads. An episode whose context outgrows the model ends there, truncated.
        sampling: how it answers.
        uniforms: the draws of an answer, by (group, member, turn from 0, count).
        parts: number of parts, at least 1.
        keep_cache: where the policy reads the full history, run only what is new in a turn. The keys and values of
            each part (`cache` says what they cost) are then held until its last episode is over; else of one part at a
            time. With fewer turns of context every prompt is run whole.
        group: the processes of the run; each plays its share of the plan, in so many parts, and gets what all played.

    Raises:
        TurngymError: what concerns the whole run and not an episode (an unknown environment, a bad option).
    """
    keeps = keep_cache and context.turns == 0
    player = _Player(policy, client, context, sampling, uniforms, keeps=keeps)
    own = plan[group.share(np.ones(len(plan), np.int64))]
    played = group.exchange(player.play([list(part) for part in _split(own, parts)]))
    return Rollout(
        trajectories=tuple(trajectory for share in played for trajectory in share.trajectories),
        lost=tuple(lost for share in played for lost in share.lost),
        waiting_seconds=max(share.waiting_seconds for share in played),
    )


def _split(plan: Sequence[Planned], parts: int) -> list[Sequence[Planned]]:
    """At most `parts` runs of the plan whose sizes differ by at most one."""
    bounds = [len(plan) * part // parts for part in range(parts + 1)]
    return [plan[start:end] for start, end in pairwise(bounds) if end > start]


class _Player:
    def __init__(
        self,
        policy: Policy,
        client: Client,
        context: Context,
        sampling: Sampling,
        uniforms: Uniforms,
        *,
        keeps: bool,
    ) -> None:
        self._policy = policy
        self._client = client
        self._context = context
        self._sampling = sampling
        self._uniforms = uniforms
        self._keeps = keeps
        self._chats: dict[str, ChatFormat] = {}

    def play(self, parts: list[list[Planned]]) -> Rollout:
        finished: dict[tuple[int, int], _Play] = {}
        lost: dict[tuple[int, int], Lost] = {}
        waited = 0.0
        # One thread: calls keep their order, and only waiting is taken off this one.
        with ThreadPoolExecutor(1) as calls:
            queue: deque[tuple[Future[tuple[list[_Play], list[Lost]]], Memory | None]] = deque(
                (calls.submit(self._begin, part), Memory() if self._keeps else None) for part in parts
            )
            while queue:
                began = time.perf_counter()
                replies, memory = queue.popleft()
                playing, gone = replies.result()
                waited += time.perf_counter() - began
                lost.update(((one.planned.group, one.planned.member), one) for one in gone)
                self._answer(playing, memory)
                over = [play for play in playing if play.over]
                finished.update(((play.planned.group, play.planned.member), play) for play in over)
                if going := [play for play in playing if not play.over]:
                    queue.append((calls.submit(self._step, going), memory))
                # A session that ended counts against the server's limit until it is closed.
                for outgrown, reason in ((False, CloseReason.FINISHED), (True, CloseReason.ABANDONED)):
                    if done := [play.episode for play in over if play.outgrown is outgrown]:
                        calls.submit(self._client.close_many, done, reason)
        order = [(planned.group, planned.member) for part in parts for planned in part]
        return Rollout(
            trajectories=tuple(
                _trajectory(finished[key], self._policy.max_positions) for key in order if key in finished
            ),
            lost=tuple(lost[key] for key in order if key in lost),
            waiting_seconds=waited,
        )

    def _begin(self, part: list[Planned]) -> tuple[list[_Play], list[Lost]]:
        outcomes = self._client.reset_many([planned.request for planned in part], return_exceptions=True)
        playing: list[_Play] = []
        lost: list[Lost] = []
        for planned, outcome in zip(part, outcomes, strict=True):
            if isinstance(outcome, TurngymError):
                lost.append(Lost(planned, outcome))
            else:
                playing.append(_Play(planned, outcome, Conversation(self._policy, self._chat(outcome), self._context)))
        return playing, lost

    def _chat(self, episode: Episode) -> ChatFormat:
        system = _system(episode, self._context)
        if system not in self._chats:
            self._chats[system] = self._policy.chat_format(system)
        return self._chats[system]

    def _answer(self, playing: list[_Play], memory: Memory | None) -> None:
        """Shows each running episode its observation and samples its answer."""
        running = [play for play in playing if not play.over]
        for play in running:
            play.conversation.show(play.episode.state.observation)
        prompts = [play.conversation.prompt() for play in running]
        room = self._policy.max_positions - self._sampling.max_tokens
        for play, prompt in zip(running, prompts, strict=True):
            play.outgrown = len(prompt) > room
        fitting = [(play, prompt) for play, prompt in zip(running, prompts, strict=True) if not play.outgrown]
        draws = None
        if not self._sampling.greedy and fitting:
            draws = np.stack([self._draws(play) for play, _ in fitting])
        responses = generate(
            self._policy,
            [prompt for _, prompt in fitting],
            draws,
            max_new_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature,
            memory=memory,
            names=[(play.planned.group, play.planned.member) for play, _ in fitting],
        )
        for (play, _), response in zip(fitting, responses, strict=True):
            play.conversation.answer(response)
            play.response = response

    def _draws(self, play: _Play) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return self._uniforms(play.planned.group, play.planned.member, len(play.turns), self._sampling.max_tokens)

    def _step(self, playing: list[_Play]) -> tuple[list[_Play], list[Lost]]:
        """Sends each episode's answer and notes what came of it."""
        texts: list[str] = []
        steps: list[tuple[Episode, tuple[str, ...]]] = []
        for play in playing:
            assert play.response is not None
            text = self._context.prefill + self._policy.decode(play.response.ids)
            texts.append(text)
            steps.append((play.episode, self._parse(play, text)[1]))
        shown = [play.episode.state.observation for play in playing]
        outcomes = self._client.step_many(steps, return_exceptions=True)
        going: list[_Play] = []
        lost: list[Lost] = []
        for play, text, prompt, outcome in zip(playing, texts, shown, outcomes, strict=True):
            if isinstance(outcome, TurngymError):
                lost.append(Lost(play.planned, outcome))
                self._client.close_many([play.episode], CloseReason.ERROR)
            else:
                play.turns.append(self._record(play, prompt, text, outcome))
                going.append(play)
        return going, lost

    def _parse(self, play: _Play, text: str) -> tuple[str, tuple[str, ...], bool]:
        """Reasoning, actions, and whether the format is valid. An answer that was cut off is none."""
        assert play.response is not None
        parsed = parse_answer(
            text if play.response.complete else "",
            separator=play.episode.action_separator,
            max_actions=play.episode.limits.max_actions_per_turn or None,
        )
        return parsed.reasoning, parsed.actions, parsed.valid_format

    def _record(self, play: _Play, prompt: str, text: str, outcome: Transition) -> TurnRecord:
        reasoning, actions, valid_format = self._parse(play, text)
        return TurnRecord(
            prompt=prompt,
            response=text,
            reasoning=reasoning,
            actions=actions,
            reward=outcome.reward,
            valid_format=valid_format,
            valid_action=outcome.action_valid,
            actions_executed=outcome.actions_executed,
            reasoning_tokens=len(self._policy.encode(reasoning)) if reasoning else 0,
            observation=outcome.observation,
        )


def first_prompt(policy: Policy, client: Client, request: EpisodeRequest, context: Context) -> NDArray[np.int64]:
    """Tokens that the policy would read in an episode's first turn.

    Raises:
        TurngymError: the episode cannot be started.
    """
    [episode] = client.reset_many([request])
    conversation = Conversation(policy, policy.chat_format(_system(episode, context)), context)
    conversation.show(episode.state.observation)
    client.close_many([episode], CloseReason.ABANDONED)
    return conversation.prompt()


def _system(episode: Episode, context: Context) -> str:
    return system_message(
        context.instructions, episode.instructions, episode.action_separator, episode.limits.max_actions_per_turn
    )


def _last_prompt(play: _Play, max_positions: int) -> NDArray[np.int64] | None:
    """See `Trajectory.last_prompt`."""
    if play.episode.state.truncated:
        play.conversation.show(play.episode.state.observation)
    elif not play.outgrown:  # What an outgrown episode would have read next has been shown already.
        return None
    prompt = play.conversation.prompt()
    return prompt if len(prompt) <= max_positions else None


def _trajectory(play: _Play, max_positions: int) -> Trajectory:
    episode = play.episode
    assert episode.level_seed is not None  # Planned episodes are not sealed.
    return Trajectory(
        environment=play.planned.environment or episode.environment_id,
        group=play.planned.group,
        member=play.planned.member,
        level_seed=episode.level_seed,
        noise_seed=episode.noise[0].noise_seed,
        world_id=episode.world_id,
        success=episode.state.success,
        terminated=episode.state.terminated,
        truncated=episode.state.truncated or play.outgrown,
        outgrown=play.outgrown,
        digest=episode.state.digest.hex(),
        rows=play.conversation.rows(),
        turns=tuple(play.turns),
        last_prompt=_last_prompt(play, max_positions),
    )
