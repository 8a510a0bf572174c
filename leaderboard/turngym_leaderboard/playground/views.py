"""A game as its page shows it. Pure functions; knows nothing of HTML."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from turngym_client import Advice, EndReason, Limits
from turngym_leaderboard.pages.episodes import symbols_of
from turngym_leaderboard.pages.grids import Shown, shown
from turngym_leaderboard.pages.views import EpisodeView, TurnView, Verdict, verdict
from turngym_leaderboard.playground.games import Game, Sent

MOST_BUTTONS: Final = 24
"""With more legal actions than these, or long ones, the action is written."""
_LONGEST_ON_A_BUTTON: Final = 40
_MOST_SUGGESTED: Final = 200

_ENDS: Final[Mapping[EndReason, str]] = {
    EndReason.NONE: "",
    EndReason.ENVIRONMENT: "ended by the environment",
    EndReason.MAX_TURNS: "all turns are used up",
    EndReason.MAX_ACTIONS: "all actions are used up",
    EndReason.WALL_CLOCK: "out of time",
}

_ARROWS: Final[Mapping[str, str]] = {
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
}
_SYMBOLS: Final[Mapping[str, str]] = {"ArrowUp": "↑", "ArrowDown": "↓", "ArrowLeft": "←", "ArrowRight": "→"}


@dataclass(frozen=True, slots=True)
class ActionButton:
    """One legal action.

    Attributes:
        choice: its place among the legal actions.
        key: that presses it, as browsers name it; "": none does. hint: the key for people.
    """

    choice: int
    action: str
    key: str
    hint: str


@dataclass(frozen=True, slots=True)
class GameView:
    """One game at one moment.

    Attributes:
        step: turns played.
        state: what the player reads.
        used: actions run so far.
        most: actions that this turn may have; None: as many as one likes.
        buttons: empty: the action is written, with these suggestions.
        last: the turn before; None: there is none.
        sent: a turn that no server has answered for yet; then nothing else can be played.
        can_keep: there is a file to keep it in; kept: it is there.
    """

    id: str
    environment: str
    version: str
    instructions: str
    separator: str
    limits: Limits
    step: int
    used: int
    total: float
    most: int | None
    state: Shown
    buttons: tuple[ActionButton, ...]
    suggestions: tuple[str, ...]
    last: TurnView | None
    advice: Advice | None
    advised: bool
    has_oracle: bool
    sent: Sent | None
    over: bool
    verdict: Verdict
    ended: str
    failure: str
    facts: tuple[tuple[str, str], ...]
    history: tuple[TurnView, ...]
    can_keep: bool
    kept: bool


def game_view(game: Game, *, can_keep: bool) -> GameView:
    """What a game's page shows."""
    episode, state = game.episode, game.episode.state
    turns = turn_views(game)
    legal = state.legal_actions or ()
    buttons = _buttons(legal) if state.legal_actions_complete else ()
    return GameView(
        id=game.id,
        environment=episode.environment_id,
        version=episode.version,
        instructions=episode.instructions,
        separator=episode.action_separator,
        limits=episode.limits,
        step=len(turns),
        used=sum(turn.executed for turn in turns),
        total=game.total,
        most=game.actions_left,
        state=shown(state.observation, episode.environment_id, symbols_of(episode.options_json)),
        buttons=buttons,
        suggestions=() if buttons else legal[:_MOST_SUGGESTED],
        last=turns[-1] if turns else None,
        advice=game.advice,
        advised=game.advised,
        has_oracle=game.has_oracle,
        sent=game.sent,
        over=game.over,
        verdict=verdict(state.success),
        ended=_ended(game),
        failure=game.failure,
        facts=_facts(game),
        history=turns,
        can_keep=can_keep,
        kept=game.kept,
    )


def turn_views(game: Game) -> tuple[TurnView, ...]:
    """The turns played, as the viewer shows them."""
    views: list[TurnView] = []
    total = 0.0
    for turn in game.turns:
        total += turn.reward
        faults = () if turn.valid_action else ("held an invalid action",)
        views.append(
            TurnView(
                observation=turn.observation,
                reasoning=turn.reasoning,
                actions=turn.actions,
                written="",
                executed=turn.actions_executed,
                reward=turn.reward,
                total=total,
                faults=faults,
            )
        )
    return tuple(views)


def episode_view(game: Game) -> EpisodeView:
    """The game as an episode of the viewer."""
    episode = game.episode
    return EpisodeView(
        key=game.id,
        title="Your episode",
        agent="you, with the oracle's advice" if any(turn.advised for turn in game.turns) else "you",
        environment=episode.environment_id,
        symbols=symbols_of(episode.options_json),
        verdict=verdict(episode.state.success),
        ended=_ended(game),
        facts=_facts(game),
        turns=turn_views(game),
        last=episode.state.observation,
    )


def _buttons(legal: tuple[str, ...]) -> tuple[ActionButton, ...]:
    """A button for each action, with an arrow or a digit for a key; none where there are too many."""
    if len(legal) > MOST_BUTTONS or any(len(action) > _LONGEST_ON_A_BUTTON or "\n" in action for action in legal):
        return ()
    return tuple(_button(at, action) for at, action in enumerate(legal))


def _button(at: int, action: str) -> ActionButton:
    key = _ARROWS.get(action.strip().casefold(), str(at + 1) if at < 9 else "")
    return ActionButton(at, action, key, _SYMBOLS.get(key, key))


def _ended(game: Game) -> str:
    if game.left:
        return "closed, because nobody looked at it for long"
    return "the environment failed" if game.failure else _ENDS[game.episode.state.end_reason]


def _facts(game: Game) -> tuple[tuple[str, str], ...]:
    episode = game.episode
    return (
        ("level seed", str(episode.level_seed)),
        ("noise seed", str(episode.noise[0].noise_seed)),
        ("split", episode.split.value),
        ("options", episode.options_json),
        ("instance id", episode.instance_id),
        ("world", episode.world_id),
        ("digest", episode.state.digest.hex()),
    )
