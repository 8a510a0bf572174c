"""What a board is: which environments are played, how, and who may see what of it.

A board's definition is a TOML file; once a board has been made of it, it never changes. Knows nothing of databases,
servers or how episodes are played.

    name = "grids"
    title = "Grids"
    season = "2026-winter"

    [[environments]]
    id = "frozen_lake"
    instances = 512
    attempts = 4
    limits = { max_turns = 5, max_actions = 10, max_actions_per_turn = 5 }

    [[environments]]             # shown beside it: the most likely tokens instead of sampled ones
    id = "frozen_lake"
    label = "frozen_lake-greedy"
    greedy = true
    overall = false
"""

import tomllib
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, StringConstraints, ValidationError, ValidationInfo, field_validator, model_validator

from turngym_client import Limits, Split
from turngym_leaderboard.protocol import GRID_LIMITS, Decoding, Protocol
from turngym_leaderboard.record import Model

WORLDS_PER_INSTANCE: Final = 100
"""A sealed board needs so many times the worlds that it plays: else its worlds can be trained on one by one."""

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(?:[-_.][a-z0-9]+)*$", max_length=64)]
"""A name that can stand in an address."""
Line = Annotated[str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A text of one line."""


class BoardError(ValueError):
    """A definition that is none, or that no board can be made of. The message says what was expected."""


class LimitsDefinition(Model):
    """Of an episode; 0: the environment's own."""

    max_turns: int = Field(default=GRID_LIMITS.max_turns, ge=0)
    max_actions: int = Field(default=GRID_LIMITS.max_actions, ge=0)
    max_actions_per_turn: int = Field(default=GRID_LIMITS.max_actions_per_turn, ge=0)

    def limits(self) -> Limits:
        return Limits(**self.model_dump())


class EnvironmentDefinition(Model):
    """One column of a board.

    Attributes:
        id: of the environment on its server.
        label: what the board calls it, unique on it; default: its id.
        instances: distinct worlds that are scored.
        attempts: episodes that each submission plays on each of them; a remote agent plays one.
        showcase: further worlds that each submission plays once, which anybody may see and which are not scored.
        overall: it counts in the overall score; otherwise it is shown beside the others.
    """

    id: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    label: Slug = Field(default="", validate_default=True)
    options: dict[str, object] = Field(default_factory=dict[str, object])
    split: Split = Split.HELD_OUT
    instances: int = Field(default=512, ge=2, le=100_000)
    attempts: int = Field(default=1, ge=1, le=64)
    showcase: int = Field(default=8, ge=0, le=64)
    limits: LimitsDefinition = LimitsDefinition()
    temperature: float = 1.0
    greedy: bool = False
    overall: bool = True

    @field_validator("label", mode="before")
    @classmethod
    def _labelled(cls, label: object, told: ValidationInfo) -> object:
        return label or told.data.get("id")

    @field_validator("temperature")
    @classmethod
    def _samples(cls, temperature: float) -> float:
        return Decoding(temperature).temperature

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.temperature, self.greedy)

    @property
    def episodes(self) -> int:
        """How many each submission plays."""
        return self.instances * self.attempts + self.showcase

    def protocol(self, secret: int, *, version: str = "") -> Protocol:
        """The rules under which the scored instances are played.

        Args:
            secret: the board's; it stands in the place of a protocol's seed.
            version: of the environment that is demanded.
        """
        return Protocol(
            environment=self.id,
            version=version,
            options=self.options,
            split=self.split,
            instances=self.instances,
            limits=self.limits.limits(),
            attempts=self.attempts,
            decoding=self.decoding,
            seed=secret,
        )


class BoardDefinition(Model):
    """A board of one season.

    Attributes:
        about: what a visitor is told of it.
        sealed: scored episodes are seen by admins only until the season is closed. False: whoever may see a submission
            may see its episodes.
        submissions_per_owner: that are scored in the season.
        remote_submissions_per_owner: of those, agents that are played by their owner's own programs, who then has seen
            what the scored instances look like. Once one of them was dealt episodes, nothing further of that owner is
            taken, of whatever kind, nor the rest of uploads; what had arrived before stays. 0: none.
        batch: episodes of one submission that are held at once; it fixes which ones are played together.
        max_response_tokens: that a checkpoint may write in a turn, whatever it asks for itself.
    """

    name: Slug
    title: Line
    season: Slug
    about: Annotated[str, StringConstraints(max_length=2_000)] = ""
    sealed: bool = True
    submissions_per_owner: int = Field(default=10, ge=1)
    remote_submissions_per_owner: int = Field(default=1, ge=0)
    batch: int = Field(default=64, ge=1, le=1_024)
    max_response_tokens: int = Field(default=1_024, ge=1)
    environments: Annotated[tuple[EnvironmentDefinition, ...], Field(min_length=1, max_length=64)]

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        labels = [environment.label for environment in self.environments]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"two environments are called {twice[0]!r}; tell them apart by their labels")
        if not any(environment.overall for environment in self.environments):
            raise ValueError("no environment counts in the overall score; leave overall out of one")
        return self

    @property
    def slug(self) -> str:
        """What the board is called in addresses and commands."""
        return f"{self.name}-{self.season}"

    @property
    def episodes(self) -> int:
        """How many each submission plays."""
        return sum(environment.episodes for environment in self.environments)


def load_definition(file: Path) -> BoardDefinition:
    """Reads a definition.

    Raises:
        BoardError: the file holds none; says where and what.
        OSError: it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            told = tomllib.load(stream)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BoardError(f"{file} is no TOML: {error}") from error
    try:
        return BoardDefinition.model_validate(told)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise BoardError(f"{file} defines no board: {where}: {first['msg']}") from error
