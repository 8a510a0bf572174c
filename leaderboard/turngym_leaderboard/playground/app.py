"""The playground's pages: choose an environment, play, keep.

Every page is whole without a script: what a person does is a form, and its answer the page as it then stands. The
script adds keys, turns of several actions, and pages that change in place. Knows nothing of how an episode is played.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from turngym_client import EnvironmentInfo, EpisodeRequest, Limits, ServerUnavailable, Split, TurngymError, aconnect
from turngym_leaderboard.pages import assets
from turngym_leaderboard.pages.forms import BadForm, read_form
from turngym_leaderboard.pages.render import Links, render
from turngym_leaderboard.pages.viewer import shown_episodes
from turngym_leaderboard.playground.games import Game, Games, NoSuchGame, NotNow
from turngym_leaderboard.playground.kept import CannotKeep, KeptFile
from turngym_leaderboard.playground.option_fields import BadOption, option_fields, read_options
from turngym_leaderboard.playground.views import episode_view, game_view

PATIENCE: Final = 20.0
"""Seconds that a page waits for a server that is away."""
_LOOKS_EVERY: Final = 15.0
"""Seconds between looks for games that nobody plays."""
_SPLITS: Final[Mapping[Split, str]] = {
    Split.TRAIN: "train",
    Split.VALIDATION: "validation",
    Split.HELD_OUT: "held out (never to be learnt from)",
    Split.ALL: "all worlds",
}
_LIMITS: Final = ("max_turns", "max_actions", "max_actions_per_turn")
_AGAIN: Final = ("same", "other")


class Playground:
    """What the routes share. `games` is there while the application runs."""

    games: Games

    def __init__(self, servers: Sequence[str], keep: KeptFile | None, secret: str, idle_seconds: float) -> None:
        self.links = Links(root=f"/{secret}/")
        self._servers = servers
        self._keep = keep
        self._idle_seconds = idle_seconds

    @contextlib.asynccontextmanager
    async def running(self, _app: FastAPI) -> AsyncGenerator[None]:
        """Holds the connection to the servers, and closes what is left of games."""
        async with aconnect(self._servers, patience=PATIENCE) as client:
            self.games = Games(client, self._keep, self._idle_seconds)
            looking = asyncio.create_task(self._look())
            yield
            looking.cancel()
            await self.games.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOKS_EVERY, self._idle_seconds / 2))
            await self.games.close_left(time.monotonic())

    def page(self, template: str, values: Mapping[str, object], status: int = 200) -> HTMLResponse:
        """A page, by its template and what that is told."""
        return HTMLResponse(render(template, self.links, values), status)

    def address(self, *parts: str) -> str:
        """Of a page."""
        return self.links.root + "/".join(parts)

    def game_page(
        self, game: Game, notice: str = "", *, reasoning: str = "", written: str = "", status: int = 200
    ) -> HTMLResponse:
        """A game as it stands. `reasoning`, `written`: what the player had filled in, where it could not be taken."""
        view = game_view(game, can_keep=self.games.keep is not None)
        keep = self.games.keep
        values: dict[str, object] = {
            "game": view,
            "notice": notice,
            "reasoning": reasoning,
            "written": written,
            "file": str(keep.path) if keep else "",
            "here": self.address("games", game.id),
        }
        return self.page("play_game.html", values, status)

    def problem(self, title: str, told: str, status: int) -> HTMLResponse:
        """A page that says what is wrong."""
        return self.page("problem.html", {"title": title, "told": told}, status)


def playground(servers: Sequence[str], keep: KeptFile | None, secret: str, idle_seconds: float) -> FastAPI:
    """The application. `Gate` has to stand before it."""
    ground = Playground(servers, keep, secret, idle_seconds)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=ground.running)
    app.include_router(assets.router, prefix=f"/{secret}")

    @app.exception_handler(NoSuchGame)
    def no_such_game(_request: Request, _error: NoSuchGame) -> HTMLResponse:
        told = "The playground was started again since, or has forgotten it. Begin another one."
        return ground.problem("There is no such episode", told, 404)

    @app.exception_handler(TurngymError)
    def no_answer(_request: Request, error: TurngymError) -> HTMLResponse:
        return ground.problem("The server did not do it", str(error), 502)

    @app.exception_handler(BadForm)
    def bad_form(_request: Request, error: BadForm) -> HTMLResponse:
        return ground.problem("This cannot be read", str(error), 400)

    @app.exception_handler(404)
    def not_found(_request: Request, _error: Exception) -> HTMLResponse:
        return ground.problem("There is no such page", "The address leads nowhere.", 404)

    @app.get(f"/{secret}/")
    async def environments() -> HTMLResponse:
        return ground.page("play_environments.html", {"environments": await ground.games.client.environments()})

    @app.get(f"/{secret}/environments/{{id}}")
    async def environment(id: str) -> HTMLResponse:
        return await settings_page(ground, id, {})

    @app.post(f"/{secret}/environments/{{id}}")
    async def begin(id: str, request: Request) -> Response:
        filled = dict(await read_form(request))
        info = await ground.games.client.environment(id)
        try:
            game = await ground.games.start(requested(info, filled))
        except (BadOption, TurngymError) as error:
            return await settings_page(ground, id, filled, str(error), 422)
        return RedirectResponse(ground.address("games", game.id), 303)

    @app.get(f"/{secret}/games/{{id}}")
    async def game(id: str) -> HTMLResponse:
        return ground.game_page(ground.games.find(id))

    @app.get(f"/{secret}/games/{{id}}/turns")
    async def turns(id: str) -> HTMLResponse:
        found = ground.games.find(id)
        values: dict[str, object] = {
            **shown_episodes([episode_view(found)]),
            "crumbs": [("Playground", ground.links.home()), ("the game", ground.address("games", id))],
            "beside": [],
            "neighbours": [],
            "choose": "",
            "said_before": [],
        }
        return ground.page("episode.html", values)

    @app.post(f"/{secret}/games/{{id}}/turn")
    async def turn(id: str, request: Request) -> Response:
        found = ground.games.find(id)
        form = await read_form(request)
        reasoning, written = form.get("reasoning", ""), form.get("written", "")
        try:
            actions, said = chosen(found, form.getlist("choice"), written, form.get("use", ""))
            reasoning = reasoning if reasoning.strip() else said
            await ground.games.play(found, whole(form.get("step", "")), actions, reasoning)
        except (NotNow, TurngymError, ValueError) as error:
            return ground.game_page(found, told(error), reasoning=reasoning, written=written, status=409)
        return RedirectResponse(ground.address("games", id), 303)

    @app.post(f"/{secret}/games/{{id}}/advice")
    async def advice(id: str, request: Request) -> Response:
        found = ground.games.find(id)
        form = await read_form(request)
        try:
            await ground.games.ask(found, whole(form.get("step", "")))
        except (NotNow, TurngymError) as error:
            return ground.game_page(found, told(error), status=409)
        return RedirectResponse(ground.address("games", id), 303)

    @app.post(f"/{secret}/games/{{id}}/keep")
    async def keep_(id: str) -> Response:
        found = ground.games.find(id)
        try:
            ground.games.keep_episode(found)
        except (NotNow, CannotKeep) as error:
            return ground.game_page(found, str(error), status=409)
        return RedirectResponse(ground.address("games", id), 303)

    @app.post(f"/{secret}/games/{{id}}/again")
    async def again(id: str, request: Request) -> Response:
        found = ground.games.find(id)
        level = (await read_form(request)).get("level", "")
        if level not in _AGAIN:
            raise BadForm(f"level is {level!r}; expected {' or '.join(_AGAIN)}")
        wanted = found.request
        seed = found.episode.level_seed if level == "same" else None
        try:
            started = await ground.games.start(
                EpisodeRequest(
                    environment_id=wanted.environment_id,
                    options=wanted.options,
                    limits=wanted.limits,
                    split=wanted.split,
                    level_seed=seed,
                )
            )
        except TurngymError as error:
            return ground.game_page(found, str(error), status=409)
        return RedirectResponse(ground.address("games", started.id), 303)

    @app.post(f"/{secret}/games/{{id}}/seen")
    async def seen(id: str) -> Response:
        await ground.games.hold(ground.games.find(id))
        return Response(status_code=204)

    return app


async def settings_page(
    ground: Playground, id: str, filled: Mapping[str, str], fault: str = "", status: int = 200
) -> HTMLResponse:
    """The form that begins an episode, with what was filled in before."""
    info = await ground.games.client.environment(id)
    splits = [(split.value, words) for split, words in _SPLITS.items() if split in info.splits and served(info, split)]
    values: dict[str, object] = {
        "info": info,
        "fields": option_fields(info.options_schema),
        "splits": splits,
        "limits": [
            (name, name.replace("_", " "), getattr(info.limits, name), getattr(info.caps, name)) for name in _LIMITS
        ],
        "filled": filled,
        "fault": fault,
        "here": ground.address("environments", quote(id, safe="")),
    }
    return ground.page("play_settings.html", values, status)


def served(info: EnvironmentInfo, split: Split) -> bool:
    """Whether the server starts episodes of a split, for this token."""
    return info.splits[split].served


def requested(info: EnvironmentInfo, filled: Mapping[str, str]) -> EpisodeRequest:
    """The episode that a form asks for.

    Raises:
        BadOption: a field cannot be read.
    """
    options = {name.removeprefix("option."): value for name, value in filled.items() if name.startswith("option.")}
    limits = {name: count(name, filled.get(name, "")) or 0 for name in _LIMITS}
    split = filled.get("split", "")
    try:
        return EpisodeRequest(
            environment_id=info.id,
            options=read_options(option_fields(info.options_schema), options),
            limits=Limits(**limits),
            split=Split(split),
            level_seed=count("level seed", filled.get("level_seed", "")),
            noise_seed=count("noise seed", filled.get("noise_seed", "")),
        )
    except BadOption:
        raise
    except (TypeError, ValueError) as error:
        raise BadOption(str(error)) from error


def count(name: str, text: str) -> int | None:
    """A whole number of a form; None where it was left empty.

    Raises:
        BadOption: it is none.
    """
    text = text.strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise BadOption(f"{name}: {text!r} is no whole number from 0 on")
    return int(text)


def chosen(game: Game, choices: Sequence[str], written: str, use: str) -> tuple[tuple[str, ...], str]:
    """The actions that a form names, and the reasoning that comes with them.

    They are named by their places among the legal ones, in writing, or as those of the oracle or of a turn sent before.

    Raises:
        NotNow: it names none that there is.
    """
    if use == "advice":
        if game.advice is None or not game.advice.actions:
            raise NotNow("There is no advice to follow: ask the oracle again.")
        return game.advice.actions, game.advice.explanation
    if use == "sent":
        if game.sent is None:
            raise NotNow("That turn has been answered for meanwhile.")
        return game.sent.actions, game.sent.reasoning
    if choices:
        legal = game.episode.state.legal_actions or ()
        places = [int(place) for place in choices if place.isascii() and place.isdigit() and len(place) < 10]
        if len(places) < len(choices) or any(place >= len(legal) for place in places):
            raise NotNow("That is no longer among the actions. Here is how things stand.")
        return tuple(legal[place] for place in places), ""
    separator = game.episode.action_separator
    parts = written.split(separator) if separator else [written]
    return tuple(part.strip() for part in parts if part.strip()), ""


def told(error: Exception) -> str:
    """What a player is told of it."""
    if isinstance(error, ServerUnavailable):
        return f"No server answers. The episode is safe, and goes on from here once one does. ({error})"
    return str(error)


def whole(text: str) -> int:
    """The number of turns that a form was made after; −1, which is never right, where it does not say."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
