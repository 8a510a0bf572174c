"""Kept episodes to learn from: files of JSON lines, one episode a line, that people or policies have played.

A line is one of a training run's trajectories.jsonl, or of the same form with the environment's version, options,
action separator and split in it, as `leaderboard play --keep FILE` writes them. What a run's lines leave out is read
from what lies beside them (run.json, config.toml). Keys that are not needed here are left alone.

A line of another environment, version, options, separator or split is an error: the file is for something else. In a
mixture each line is learnt in its own environment. An episode that is merely no good example is left out and counted.
An evaluation's trajectories are no demonstrations: their worlds are held out. What a file says of itself is believed.
Knows nothing of servers or optimisers.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from turngym_client import EnvironmentInfo, Split, parse_answer
from turngym_client.types import cut
from turngym_trainer.config import Config
from turngym_trainer.context import Context, Conversation, demonstration, system_message
from turngym_trainer.evaluate import context_of
from turngym_trainer.generate import Response
from turngym_trainer.mixture import environments
from turngym_trainer.policy import ANSWER_END, Policy
from turngym_trainer.recorded import RecordError, read_run
from turngym_trainer.trajectory import Row

NOT_SOLVED: Final = "not solved"
UNPARSED: Final = "with an answer that could not be parsed"
OVER_LIMITS: Final = "over the limits of the environment"
TOO_LONG: Final = "with an answer over rollout.max_response_tokens"
UNREADABLE: Final = "longer than the policy can read"
NOTHING: Final = "with nothing to learn in them"
"""Why an episode is left out."""


class DemonstrationError(ValueError):
    """A file of demonstrations that cannot be learnt from. Names file and line, and says what to do."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class KeptTurn(_Part):
    """One turn: what was read, thought and sent.

    Attributes:
        advised: the oracle had been asked, in this turn or an earlier one.
    """

    observation: str
    reasoning: str = ""
    actions: tuple[str, ...]
    valid_format: bool = True
    valid_action: bool = True
    advised: bool = False


class KeptEpisode(_Part):
    """One line. The fields with None are told beside the file, where the line does not."""

    environment: str
    version: str | None = None
    options_json: str | None = None
    action_separator: str | None = None
    split: str | None = None
    success: bool | None
    turns: tuple[KeptTurn, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """What was played. `separator`: None: not told, since it is the version's."""

    environment: str
    version: str
    options_json: str
    split: str
    separator: str | None = None


@dataclass(frozen=True, slots=True)
class FileReport:
    """What became of a file's episodes.

    Attributes:
        sha256: of the file as it was read.
        left_out: episodes by the reason.
    """

    file: str
    sha256: str
    episodes: int
    learnt: int
    left_out: Mapping[str, int]

    def told(self) -> str:
        """In a sentence."""
        out = "".join(f"; {count} left out: {reason}" for reason, count in self.left_out.items())
        return f"{self.file}: {self.learnt} of {self.episodes} episodes are learnt{out}"


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Rows whose action tokens are what was shown, in the order of files and lines."""

    rows: tuple[Row, ...]
    files: tuple[FileReport, ...]


def learn_from_files(policy: Policy, config: Config, infos: Sequence[EnvironmentInfo]) -> Demonstrations:
    """Reads `warm_start.demonstrations`.

    Args:
        infos: the environments to be learnt, in the settings' order, under their options and limits.

    Raises:
        DemonstrationError: a file cannot be read or does not fit, or all of its episodes are left out.
    """
    subjects = [_Subject(policy, alone, info) for alone, info in zip(environments(config).values(), infos, strict=True)]
    rows: list[Row] = []
    reports: list[FileReport] = []
    for name in config.warm_start.demonstrations:
        file = Path(name)
        reader = _Reader(subjects, file)
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    rows += reader.read(number, line)
        except OSError as error:
            raise DemonstrationError(f"{file} cannot be read: {error.strerror}") from error
        reports.append(reader.report())
    return Demonstrations(tuple(rows), tuple(reports))


def answer(
    policy: Policy, context: Context, reasoning: str, actions: Sequence[str], separator: str, *, explain: bool
) -> Response:
    """`demonstration`, the reasoning left out unless `explain`.

    Raises:
        DemonstrationError: the settings leave no room for it.
    """
    try:
        return demonstration(policy, context, reasoning if explain else "", actions, separator)
    except ValueError as error:
        raise DemonstrationError(
            f"{error}; set rollout.prefill=<think>, or warm_start.explain=false where it ends the reasoning"
        ) from error


def learnt_rows(conversation: Conversation, unlearnt: Collection[int]) -> list[Row]:
    """The token records of a conversation in which the answers of some turns are no actions."""
    rows: list[Row] = []
    for row in conversation.rows():
        learnt = row.is_action & ~np.isin(row.turn, list(unlearnt))
        if learnt.any():
            rows.append(Row(row.ids, learnt, np.where(learnt, row.turn, -1), row.logprobs))
    return rows


class _Reader:
    """Reads one file, line by line."""

    def __init__(self, subjects: Sequence["_Subject"], file: Path) -> None:
        self._subjects = subjects
        self._file = file
        self._beside: Mapping[str, Origin] | None = None
        self._sha256 = hashlib.sha256()
        self._episodes = self._learnt = 0
        self._left_out: Counter[str] = Counter()

    def read(self, number: int, line: bytes) -> list[Row]:
        """The rows of a line's episode; none where it is left out."""
        self._sha256.update(line)
        where = f"{self._file}: line {number}"
        episode = _parsed(line, where)
        rows = self._subject(self._origin(episode, where), where).rows(episode, where)
        self._episodes += 1
        if isinstance(rows, str):
            self._left_out[rows] += 1
            return []
        self._learnt += 1
        return rows

    def report(self) -> FileReport:
        """What became of the file. Raises DemonstrationError where nothing of it is learnt."""
        report = FileReport(
            str(self._file), self._sha256.hexdigest(), self._episodes, self._learnt, dict(self._left_out)
        )
        if not self._learnt:
            why = report.told() if self._episodes else f"{self._file} holds no episode"
            raise DemonstrationError(f"{why}; leave it out of warm_start.demonstrations")
        return report

    def _origin(self, episode: KeptEpisode, where: str) -> Origin:
        told = (episode.version, episode.options_json, episode.action_separator, episode.split)
        version, options_json, separator, split = told
        if version is not None and options_json is not None and separator is not None and split is not None:
            return Origin(episode.environment, version, options_json, split, separator)
        if any(each is not None for each in told):
            raise DemonstrationError(
                f"{where}: an episode says all of version, options_json, action_separator and split, or none of them"
            )
        if self._beside is None:
            self._beside = _of_run(self._file.parent, where)
        if (origin := self._beside.get(episode.environment)) is None:
            raise DemonstrationError(
                f"{where}: the run beside it played in {', '.join(self._beside)}, not in {episode.environment!r}; the "
                "file is not the run's own"
            )
        return origin

    def _subject(self, origin: Origin, where: str) -> "_Subject":
        """What the episode teaches. Raises DemonstrationError where it goes with no environment to be learnt."""
        same = [subject for subject in self._subjects if subject.info.id == origin.environment]
        if not same:
            ids = ", ".join(subject.info.id for subject in self._subjects)
            raise DemonstrationError(
                f"{where}: an episode of {origin.environment}, but the settings are for {ids}; give the warm start a "
                "file without such lines"
            )
        # A mixture may hold an environment twice, with other options.
        faults = [subject.misfit(origin, where) for subject in same]
        for subject, fault in zip(same, faults, strict=True):
            if not fault:
                return subject
        raise DemonstrationError(f"{where}: {faults[0]}")


class _Subject:
    """One environment to be learnt."""

    def __init__(self, policy: Policy, config: Config, info: EnvironmentInfo) -> None:
        self.info = info
        self._policy = policy
        self._settings = config.warm_start
        self._most_tokens = config.rollout.max_response_tokens
        self._split = config.environment.split
        self._context = context_of(config)
        system = system_message(
            self._context.instructions, info.instructions, info.action_separator, info.limits.max_actions_per_turn
        )
        self._chat = policy.chat_format(system)

    def misfit(self, origin: Origin, where: str) -> str:
        """Why an episode of this environment's id cannot be learnt in it; "" where it can."""
        info = self.info
        if origin.version != info.version:
            return (
                f"played in version {origin.version} of {info.id}, but the server has {info.version}, which may show "
                "and do other things; keep new episodes"
            )
        if differing := _differing(origin.options_json, info.options_json, where):
            return f"played with {differing}; set environment.options.* to what was played, or keep new episodes"
        if origin.separator not in (None, info.action_separator):
            return (
                f"its actions are separated by {origin.separator!r}, but those of {info.id} by "
                f"{info.action_separator!r}; keep new episodes"
            )
        # Split all holds the worlds of train; every other split holds worlds that training must not meet.
        if origin.split not in (self._split, Split.TRAIN.value):
            return (
                f"played on split {origin.split}, and environment.split is {self._split}: its worlds may be those that "
                "the policy is to be judged on; play on split train"
            )
        return ""

    def rows(self, episode: KeptEpisode, where: str) -> list[Row] | str:
        """The episode's rows, or why it is left out."""
        limits = self.info.limits
        counts = [len(turn.actions) for turn in episode.turns]
        if self._settings.only_solved and episode.success is not True:
            return NOT_SOLVED
        if not all(turn.valid_format for turn in episode.turns):
            return UNPARSED
        if (
            len(counts) > limits.max_turns > 0
            or sum(counts) > limits.max_actions > 0
            or max(counts, default=0) > limits.max_actions_per_turn > 0
        ):
            return OVER_LIMITS
        conversation = Conversation(self._policy, self._chat, self._context)
        for at, turn in enumerate(episode.turns, 1):
            self._check_answer(turn, f"{where}, turn {at}")
            conversation.show(turn.observation)
            written = self._answer(turn, where)
            if len(written.ids) > self._most_tokens:
                return TOO_LONG
            conversation.answer(written)
        unlearnt = [
            at
            for at, turn in enumerate(episode.turns)
            if not turn.valid_action or (turn.advised and not self._settings.learn_advised)
        ]
        rows = learnt_rows(conversation, unlearnt)
        if any(len(row.ids) > self._policy.max_positions for row in rows):
            return UNREADABLE
        return rows or NOTHING

    def _answer(self, turn: KeptTurn, where: str) -> Response:
        # A file is not to end a message where its text says so.
        reasoning, actions = self._policy.plain(turn.reasoning), [self._policy.plain(action) for action in turn.actions]
        separator = self.info.action_separator
        try:
            return answer(self._policy, self._context, reasoning, actions, separator, explain=self._settings.explain)
        except DemonstrationError as error:
            raise DemonstrationError(f"{where}: {error}") from error

    def _check_answer(self, turn: KeptTurn, where: str) -> None:
        """Raises DemonstrationError where the answer would not be read as what was played."""
        separator = self.info.action_separator
        text = f"<think>{turn.reasoning}</think><answer>{f' {separator} '.join(turn.actions)}{ANSWER_END}"
        if parse_answer(text, separator).actions != tuple(action.strip() for action in turn.actions):
            raise DemonstrationError(
                f"{where}: cannot be written as one answer whose actions are separated by {separator!r}, got actions "
                f"{cut(str(list(turn.actions)))} and reasoning {cut(repr(turn.reasoning))}; remove the line"
            )


def _parsed(line: bytes, where: str) -> KeptEpisode:
    if not line.endswith(b"\n"):
        raise DemonstrationError(f"{where}: is not whole: it has no line end; remove it, or end it where it is whole")
    try:
        return KeptEpisode.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise DemonstrationError(
            f"{where}: is no kept episode: {f'{at}: ' if at else ''}{first['msg']}; expected a line that `leaderboard "
            "play --keep` or a training run has written"
        ) from error


def _of_run(folder: Path, where: str) -> Mapping[str, Origin]:
    """What the training run in a folder played, by the name that its lines use."""
    try:
        run = read_run(folder)
    except RecordError as error:
        raise DemonstrationError(
            f"{where}: does not say which version and options were played, and no run beside it does: {error}"
        ) from error
    if run.facts is None:
        raise DemonstrationError(f"{where}: does not say which version and options were played, nor does {folder}")
    played = zip(environments(run.config).items(), (run.facts.environment, *run.facts.others), strict=True)
    return {
        name: Origin(about.id, about.version, about.options_json, alone.environment.split)
        for (name, alone), about in played
    }


def _differing(played: str, expected: str, where: str) -> str:
    """Which options differ, in words; "" where none does."""
    try:
        one, other = json.loads(played), json.loads(expected)
    except ValueError as error:
        raise DemonstrationError(f"{where}: options_json {cut(repr(played))} is no JSON: {error}") from error
    if not isinstance(one, dict):
        raise DemonstrationError(f"{where}: options_json {cut(repr(played))} is no object")
    options, wanted = cast("dict[str, object]", one), cast("dict[str, object]", other)
    return ", ".join(
        f"{key}={json.dumps(options.get(key))} where the settings have {json.dumps(wanted.get(key))}"
        for key in sorted({*options, *wanted})
        if options.get(key) != wanted.get(key)
    )
