"""Episodes as they are kept, by an evaluation or by a training run, turned into what a page shows.

Pure functions. Knows nothing of files and databases.
"""

import json
import math
from collections.abc import Sequence
from typing import Final, Self, cast

from pydantic import BaseModel, Field, model_validator

from turngym_leaderboard.pages.views import EpisodeRow, EpisodeView, TurnView, verdict
from turngym_leaderboard.record import EpisodeRecord, Trajectory, TurnRecord


class TrainingTurn(BaseModel):
    """A turn as the trainer writes it; other keys are left alone."""

    observation: str
    response: str = ""
    reasoning: str = ""
    actions: tuple[str, ...] = ()
    actions_executed: int = 0
    reward: float = 0.0
    valid_format: bool = True
    valid_action: bool = True
    process: float | None = None


class TrainingEpisode(BaseModel):
    """A line of a training run's trajectories.jsonl, or one that a person has kept; other keys are left alone.

    Attributes:
        iteration: None: a person has played it.
        player: of a kept one.
        options_json: of a kept one; "": it is told beside the file.
        reward: the episode's, with the trainer's shaping; the turns' are the environment's.
        kept: by the trainer's filter.
        last_observation: None in files of releases that did not keep it.
    """

    iteration: int | None = None
    player: str = ""
    options_json: str = ""
    environment: str
    group: int = 0
    member: int = 0
    level_seed: int
    noise_seed: int = 0
    success: bool | None = None
    terminated: bool = False
    truncated: bool = False
    outgrown: bool = False
    digest: str = ""
    reward: float = 0.0
    kept: bool | None = None
    last_observation: str | None = None
    turns: tuple[TrainingTurn, ...] = Field(default=())

    @model_validator(mode="after")
    def _says_who_played(self) -> Self:
        if self.iteration is None and not self.player:
            raise ValueError("neither iteration nor player is told")
        return self


_ENDINGS: Final = {
    "agent_fault": "ended by a fault of the agent",
    "environment_fault": "ended by a fault of the environment",
    "unresolved": "not resolved: a fault of the server",
}


def evaluated_row(
    number: int, key: str, trajectory: Trajectory, episode: EpisodeRecord | None, environment: str
) -> EpisodeRow:
    """The row of an evaluation's episode; without its record neither verdict nor level are known."""
    return EpisodeRow(
        number=number,
        key=key,
        agent=trajectory.agent,
        environment=environment,
        label=f"instance {trajectory.draw}, attempt {trajectory.attempt + 1}",
        instance=_instance(environment, episode.level_seed) if episode else f"draw {trajectory.draw}",
        verdict=verdict(episode.success if episode else None),
        turns=len(trajectory.turns),
        total=_finite(sum(turn.reward for turn in trajectory.turns)),
        faults=evaluated_faults(episode),
    )


def evaluated_faults(episode: EpisodeRecord | None) -> str:
    """What went wrong in an episode, in a few words; "" where nothing did."""
    if episode is None:
        return ""
    said = [word] if (word := ending(episode.outcome)) else []
    counted = (
        (episode.unparsed_turns, "could not be parsed"),
        (episode.invalid_turns, "with an invalid action"),
        (episode.cut_off_turns, "cut off"),
    )
    said += [f"{count} {'turn' if count == 1 else 'turns'} {what}" for count, what in counted if count]
    return ", ".join(said)


def ending(outcome: str) -> str:
    """How an episode ended that was not played to its end; "" for one that was."""
    return _ENDINGS.get(outcome, "")


def evaluated_view(
    key: str,
    title: str,
    trajectory: Trajectory,
    episode: EpisodeRecord | None,
    *,
    environment: str = "",
    options_json: str = "{}",
) -> EpisodeView:
    """An evaluation's episode.

    Args:
        episode: what its record says of it; None: there is no record, so it is not known how it ended.
        options_json: the environment's options, resolved.
    """
    facts = [("instance", str(trajectory.draw)), ("attempt", str(trajectory.attempt + 1))]
    ended = ""
    if episode is not None:
        ended = ending(episode.outcome) or _end(episode.end_reason, truncated=episode.truncated)
        facts += [("instance id", episode.instance_id), ("world", episode.world_id)]
        facts += [("level seed", str(episode.level_seed)), ("noise seed", str(episode.noise_seed))]
        facts += [("fault", episode.fault)] if episode.fault else []
        facts += [("digest", episode.digest)] if episode.digest else []
    return EpisodeView(
        key=key,
        title=title,
        agent=trajectory.agent,
        environment=environment,
        symbols=symbols_of(options_json),
        verdict=verdict(episode.success if episode else None),
        ended=ended,
        facts=tuple(facts),
        turns=_turns(trajectory.turns),
        last=trajectory.last_observation,
    )


def training_row(number: int, key: str, episode: TrainingEpisode) -> EpisodeRow:
    """The row of a training run's episode, whose agent is the policy of its iteration, or of a kept one."""
    unparsed = sum(not turn.valid_format for turn in episode.turns)
    return EpisodeRow(
        number=number,
        key=key,
        agent=player_name(episode),
        environment=episode.environment,
        label="" if episode.iteration is None else f"group {episode.group}, member {episode.member}",
        instance=_instance(episode.environment, episode.level_seed),
        verdict=verdict(episode.success),
        turns=len(episode.turns),
        total=_finite(sum(turn.reward for turn in episode.turns)),
        faults=f"{unparsed} {'turn' if unparsed == 1 else 'turns'} could not be parsed" if unparsed else "",
    )


def training_view(key: str, title: str, episode: TrainingEpisode, *, options_json: str = "{}") -> EpisodeView:
    """A training run's episode, or one that a person has kept."""
    turns: list[TurnView] = []
    total = 0.0
    for turn in episode.turns:
        total = _finite(total + turn.reward)
        faults = [
            said
            for fine, said in (
                (turn.valid_format, "could not be parsed"),
                (turn.valid_action, "held an invalid action"),
            )
            if not fine
        ]
        turns.append(
            TurnView(
                observation=turn.observation,
                reasoning=turn.reasoning,
                actions=turn.actions,
                written="" if turn.valid_format else turn.response,
                executed=turn.actions_executed,
                reward=_finite(turn.reward),
                total=total,
                faults=tuple(faults),
                process=turn.process,
            )
        )
    facts = [("level seed", str(episode.level_seed)), ("noise seed", str(episode.noise_seed))]
    if episode.iteration is not None:
        where = [("iteration", episode.iteration), ("group", episode.group), ("member", episode.member)]
        facts = [(what, str(number)) for what, number in where] + facts
        facts.append(("reward with shaping", f"{episode.reward:.4g}"))
    facts += [("kept by the filter", "yes" if episode.kept else "no")] if episode.kept is not None else []
    facts += [("digest", episode.digest)] if episode.digest else []
    return EpisodeView(
        key=key,
        title=title,
        agent=player_name(episode),
        environment=episode.environment,
        symbols=symbols_of(episode.options_json or options_json),
        verdict=verdict(episode.success),
        ended="out of room for another answer" if episode.outgrown else _ended(episode),
        facts=tuple(facts),
        turns=tuple(turns),
        last=episode.last_observation,
    )


def player_name(episode: TrainingEpisode) -> str:
    """Who played: a policy in training is called by the iteration whose episodes it plays."""
    return episode.player if episode.iteration is None else f"iteration {episode.iteration}"


def symbols_of(options_json: str) -> str:
    """The option `symbols` among an environment's resolved options; "" where there is none."""
    try:
        options: object = json.loads(options_json)
    except ValueError:
        return ""
    symbols = cast("dict[str, object]", options).get("symbols") if isinstance(options, dict) else None
    return symbols if isinstance(symbols, str) else ""


def _turns(turns: Sequence[TurnRecord]) -> tuple[TurnView, ...]:
    shown: list[TurnView] = []
    total = 0.0
    for turn in turns:
        total = _finite(total + turn.reward)
        faults = [
            said
            for fine, said in (
                (not turn.cut_off, "was cut off at its longest"),
                (turn.valid_format, "could not be parsed"),
                (turn.action_valid, "held an invalid action"),
            )
            if not fine
        ]
        shown.append(
            TurnView(
                observation=turn.observation,
                reasoning=turn.reasoning,
                actions=turn.actions,
                written=turn.text if not turn.valid_format or turn.cut_off else "",
                executed=turn.actions_executed,
                reward=_finite(turn.reward),
                total=total,
                faults=tuple(faults),
                tokens=turn.tokens,
            )
        )
    return tuple(shown)


def _ended(episode: TrainingEpisode) -> str:
    return "ended by the environment" if episode.terminated else _end("", truncated=episode.truncated)


def _end(reason: str, *, truncated: bool) -> str:
    if truncated:
        return f"cut off by a limit ({reason.replace('_', ' ')})" if reason else "cut off by a limit"
    return "ended by the environment"


def _instance(environment: str, level_seed: int) -> str:
    return f"{environment} {level_seed}"


def _finite(value: float) -> float:
    """JSON from elsewhere may hold what is no number."""
    return value if math.isfinite(value) else 0.0
