"""`leaderboard play` as a user starts it, and a browser's requests to it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from turngym_client import connect


class Ground:
    """A playground that runs. `address`: what it printed; `kept`: its file."""

    def __init__(self, address: str, kept: Path) -> None:
        self.address = address
        self.kept = kept
        self.origin = address[: address.index("/", 8)]
        self.http = httpx.Client(follow_redirects=True, headers={"Origin": self.origin}, timeout=60)

    def begin(self, environment: str, **filled: object) -> httpx.Response:
        """The page of a new episode."""
        return self.http.post(f"{self.address}environments/{environment}", data={"split": "train", **filled})

    def lines(self) -> list[dict]:
        """What has been kept."""
        return [json.loads(line) for line in self.kept.read_text(encoding="utf-8").splitlines()]


@contextmanager
def playing(server: str, kept: Path, *options: str) -> Iterator[Ground]:
    """Runs a playground before a server."""
    command = [sys.executable, "-m", "turngym_leaderboard.cli", "play", "--server", server, "--keep", str(kept)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "--no-open", *options], stdout=subprocess.PIPE, text=True, env=environment
    ) as running:
        try:
            assert running.stdout is not None
            found = re.search(r"play: (http://\S+/)", line := running.stdout.readline())
            assert found, f"the playground did not start; its first line was {line!r}"
            ground = Ground(found[1], kept)
            with ground.http:
                yield ground
        finally:
            running.terminate()


def game_of(page: httpx.Response) -> str:
    """Path of the game that a page shows."""
    found = re.search(r'data-here="([^"]+)"', page.text)
    assert found, page.text
    return found[1]


def post(ground: Ground, page: httpx.Response, what: str, **fields: object) -> httpx.Response:
    """The page that a form of a game's page leads to."""
    return ground.http.post(f"{ground.origin}{game_of(page)}/{what}", data=fields)


def solution(server: str, level: int) -> tuple[tuple[str, ...], ...]:
    """Turns that solve a level of Sokoban. The oracle is asked elsewhere: who plays them has asked nobody."""
    with connect(server) as client:
        episode = client.reset("sokoban", level_seed=level)
        while not episode.done:
            episode.step(episode.advise().actions)
        return episode.turns


def solve(ground: Ground, page: httpx.Response, server: str, level: int) -> httpx.Response:
    """Plays a level of Sokoban to its end."""
    names = ["Up", "Down", "Left", "Right"]
    for step, turn in enumerate(solution(server, level)):
        choices = [str(names.index(action)) for action in turn]
        page = post(ground, page, "turn", step=str(step), choice=choices, reasoning="I see")
    return page
