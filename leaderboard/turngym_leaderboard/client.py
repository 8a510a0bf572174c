"""A client of a board's service: submit a checkpoint, follow it, read results and episodes.

    with BoardClient("https://board.example", token) as board:
        submission = board.submit(Path("runs/rl/checkpoints/iteration-000100"), "grids-2026-winter", name="mine")
        while not (submission := board.status(submission.id)).done:
            time.sleep(5)
        print(board.results(submission.id))

An agent of one's own plays a board without leaving its machine:

    def agent(episodes: Sequence[RemoteEpisode]) -> Sequence[str | Sequence[str]]:
        return [ask_my_model(episode.instructions, episode.turns, episode.observation) for episode in episodes]

    submission = board.begin_remote("grids-2026-winter", name="mine")
    board.play_remote(submission.id, agent, at_once=16)

Whatever may be repeated is: a request that was not answered, 429, 502, 503 and 504 are tried again for `patience`
seconds, after Retry-After or 0.2 to 10 s (doubled each time, with jitter). A submission has a key of its own, so that
repeating its beginning begins nothing new, and a part of a file goes on from what the service has. Other refusals are
raised at once. Needs httpx, and neither torch nor any environment.
"""

import hashlib
import random
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar, cast

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

import turngym
from turngym_leaderboard.intake import IntakeLimits, Refused
from turngym_leaderboard.intake.folder import check_sizes
from turngym_leaderboard.intake.names import files_to_send
from turngym_leaderboard.lifecycle import Visibility
from turngym_leaderboard.service import messages
from turngym_leaderboard.service.messages import (
    Ask,
    Board,
    Change,
    Dealt,
    Endpoint,
    Episode,
    EpisodeLine,
    EpisodeList,
    Exchange,
    File,
    NewEndpoint,
    NewFile,
    NewRemote,
    NewSubmission,
    RemoteEpisode,
    Result,
    Row,
    Step,
    Submission,
    Turn,
)

Progress = Callable[[int, int], None]
"""Called with the bytes that have arrived, and those of all files."""

RemoteAgent = Callable[[Sequence[RemoteEpisode]], Sequence[str | Sequence[str]]]
"""Answers a turn of each of these episodes, in their order: with a text in the form of `RemoteEpisode.form`, or with
its actions. All that was read and answered in an episode comes with it, so an agent need not remember anything.
"""

_PREFIX: Final = "/api/v1"
_PATIENCE: Final = 60.0
_FIRST_WAIT: Final = 0.2
_LONGEST_WAIT: Final = 10.0
_TIMEOUT: Final = httpx.Timeout(30.0, read=60.0)
_HASHING_TIMEOUT: Final = httpx.Timeout(30.0, read=900.0)
"""Of a part of a file: the service reads the whole file once more after its last part."""
_STRAGGLERS: Final = 2.0
"""Seconds for which an agent that plays several episodes is kept waiting for those whose answers are late."""
_PART_BYTES: Final = 64 << 20
"""Of a file in one request."""
_CHUNK_BYTES: Final = 1 << 18
_RETRIED: Final = (429, 502, 503, 504)
_jitter: Final = random.SystemRandom()

T = TypeVar("T", bound=BaseModel)


class BoardError(Exception):
    """The service refused, or does not answer. The message says why and what to do.

    Attributes:
        status: of HTTP; None where nothing was answered.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BoardClient:
    """A connection to a board's service. Not for several threads at once.

    Args:
        url: of the service, as in https://board.example.
        token: without one only what is public can be read.
        patience: seconds for which what may be repeated is tried again.

    Raises:
        BoardError: the address is none, or would carry the token over a network in the clear.
    """

    def __init__(self, url: str, token: str | None = None, *, patience: float = _PATIENCE) -> None:
        self._url = url.rstrip("/")
        _check_address(self._url, token)
        headers = {"User-Agent": f"turngym/{turngym.__version__}", "Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._patience = patience
        # No redirects: they would take the token along.
        self._http = httpx.Client(
            base_url=self._url,
            headers=headers,
            timeout=_TIMEOUT,
            # Of the answers that `play_remote` sends at once none waits for another's connection.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            follow_redirects=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def boards(self) -> list[Board]:
        """All boards, newest first."""
        return _many(Board, self._call("GET", "/boards"))

    def board(self, slug: str) -> Board:
        """One board."""
        return _one(Board, self._call("GET", f"/boards/{slug}"))

    def rows(self, slug: str) -> list[Row]:
        """The submissions of a board that may be seen, with their results."""
        return _many(Row, self._call("GET", f"/boards/{slug}/submissions"))

    def submissions(self) -> list[Submission]:
        """One's own, newest first."""
        return _many(Submission, self._call("GET", "/submissions"))

    def status(self, id: str) -> Submission:
        """Where a submission stands."""
        return _one(Submission, self._call("GET", f"/submissions/{id}"))

    def page(self, submission: Submission) -> str:
        """Address of a submission's page, which a browser shows once the submission is public."""
        return f"{self._url}/boards/{submission.board}/submissions/{submission.id}"

    def results(self, id: str) -> list[Result]:
        """What a submission came to, by environment."""
        return _many(Result, self._call("GET", f"/submissions/{id}/results"))

    def files(self, id: str) -> list[File]:
        """The files of one's own submission, and how much of each has arrived."""
        return _many(File, self._call("GET", f"/submissions/{id}/files"))

    def episodes(self, id: str, **wanted: str | bool | int) -> Iterator[EpisodeLine]:
        """A submission's episodes that may be seen. `wanted`: environment, outcome, success, showcase, draw."""
        offset = 0
        while True:
            page = _one(
                EpisodeList,
                self._call(
                    "GET",
                    f"/submissions/{id}/episodes",
                    params=httpx.QueryParams({**wanted, "offset": offset, "limit": messages.MAX_PAGE}),
                ),
            )
            yield from page.episodes
            offset += len(page.episodes)
            if not page.episodes or offset >= page.total:
                return

    def episode(self, id: str, number: int) -> Episode:
        """An episode turn by turn."""
        return _one(Episode, self._call("GET", f"/submissions/{id}/episodes/{number}"))

    def set_visibility(self, id: str, visibility: Visibility) -> Submission:
        """Shows one's own submission to everybody, or to oneself alone."""
        change = Change(visibility=visibility)
        return _one(Submission, self._call("PATCH", f"/submissions/{id}", json=change.model_dump(mode="json")))

    def withdraw(self, id: str) -> Submission:
        """Ends one's own submission before it is scored."""
        return _one(Submission, self._call("POST", f"/submissions/{id}/withdraw"))

    def submit(
        self,
        folder: Path,
        board: str,
        *,
        name: str,
        visibility: Visibility = Visibility.PRIVATE,
        progress: Progress = lambda arrived, total: None,
        begun: Callable[[Submission], None] = lambda submission: None,
    ) -> Submission:
        """Submits a checkpoint and sends its files; what a board does not take of the folder is left out.

        Args:
            name: what the board calls it.
            begun: called once the submission has its id, with which `resume` goes on after an interruption.

        Raises:
            Refused: the folder is no checkpoint that a board takes.
            BoardError: the service refused, or did not answer for `patience`.
            OSError: a file cannot be read.
        """
        files = announce(folder)
        with _named(name):
            wanted = NewSubmission(name=name, visibility=visibility, files=tuple(files))
        submission = self._begin(f"/boards/{board}/submissions", wanted)
        begun(submission)
        self._send(submission.id, folder, files, progress)
        return self.status(submission.id)

    def resume(self, id: str, folder: Path, *, progress: Progress = lambda arrived, total: None) -> Submission:
        """Sends what is missing of a submission's files, from the folder that it was begun with.

        Raises:
            BoardError: also where the folder's files are not those that were announced.
            OSError: a file cannot be read.
        """
        self._send(id, folder, announce(folder), progress)
        return self.status(id)

    def endpoints(self) -> list[Endpoint]:
        """Those that the board's operator has registered, and that one may submit."""
        return _many(Endpoint, self._call("GET", "/endpoints"))

    def submit_endpoint(
        self, endpoint: str, board: str, *, name: str, visibility: Visibility = Visibility.PRIVATE
    ) -> Submission:
        """Submits a registered endpoint; it is queued at once.

        Args:
            endpoint: what it is registered as.
            name: what the board calls it.
        """
        with _named(name):
            wanted = NewEndpoint(name=name, visibility=visibility, endpoint=endpoint)
        return self._begin(f"/boards/{board}/endpoints", wanted)

    def begin_remote(self, board: str, *, name: str, visibility: Visibility = Visibility.PRIVATE) -> Submission:
        """Begins a submission that an agent of one's own plays, by `play_remote` or by `ask` and `answer`.

        It counts against one's number in the season from now on; an interrupted one is found among `submissions`.

        Args:
            name: what the board calls it.
        """
        with _named(name):
            wanted = NewRemote(name=name, visibility=visibility)
        return self._begin(f"/boards/{board}/remote", wanted)

    def play_remote(
        self,
        id: str,
        agent: RemoteAgent,
        *,
        at_once: int = 1,
        progress: Callable[[int], None] = lambda left: None,
    ) -> Submission:
        """Plays a remote submission to its end, also one that was begun or interrupted elsewhere.

        Args:
            at_once: episodes that the agent is shown together; each has to be answered in the board's time. Where some
                are long in coming back the agent is shown the others meanwhile.
            progress: called with the number of episodes that have not ended.

        Raises:
            BoardError: the service refused, or the agent's answers are not one to each episode, each a text or a
                sequence of actions; of such answers none is sent.
        """
        while (dealt := self.ask(id, at_once)).left:
            progress(dealt.left)
            going = dealt.episodes
            with ThreadPoolExecutor(max(1, len(going))) as senders:
                waited: set[Future[RemoteEpisode | None]] = set()
                while going or waited:
                    turns = _turns(going, agent(going)) if going else []
                    waited |= {senders.submit(self._turn, id, *each) for each in zip(going, turns, strict=True)}
                    played = _played(waited)
                    waited -= played
                    going = tuple(episode for each in played if (episode := each.result()) is not None)
        return self.status(id)

    def ask(self, id: str, episodes: int = 1) -> Dealt:
        """The episodes of a remote submission that go on, and further ones until so many do."""
        wanted = Ask(episodes=episodes)
        return _one(Dealt, self._call("POST", f"/submissions/{id}/play", json=wanted.model_dump(mode="json")))

    def answer(self, id: str, episode: str, turn: int, written: str | Sequence[str]) -> Step:
        """Answers a turn with a text or with actions; the same answer once more gets the same.

        Raises:
            BoardError: with status 409 where the episode is over or at another turn.
        """
        return self._answer(id, episode, _turn(episode, turn, written))

    def _answer(self, id: str, episode: str, turn: Turn) -> Step:
        body = turn.model_dump(mode="json", exclude_none=True)
        return _one(Step, self._call("POST", f"/submissions/{id}/play/{episode}", json=body))

    def _turn(self, id: str, episode: RemoteEpisode, turn: Turn) -> RemoteEpisode | None:
        """The episode after this answer; None: it is over, or not where it was thought to be."""
        try:
            step = self._answer(id, episode.id, turn)
        except BoardError as refusal:
            if refusal.status == HTTPStatus.CONFLICT:
                return None
            raise
        if step.done:
            return None
        written = turn.written
        text = written if isinstance(written, str) else episode.action_separator.join(written)
        return episode.model_copy(
            update={
                "turns": (*episode.turns, Exchange(observation=episode.observation, text=text)),
                "turn": step.turn,
                "observation": step.observation,
                "due": step.due,
            }
        )

    def _begin(self, path: str, wanted: BaseModel) -> Submission:
        """Begins a submission, once however often it has to be asked for."""
        key = {"Idempotency-Key": secrets.token_urlsafe(24)}
        return _one(Submission, self._call("POST", path, json=wanted.model_dump(mode="json"), headers=key))

    def _send(self, id: str, folder: Path, announced: Sequence[NewFile], progress: Progress) -> None:
        """Sends the rest of every file, and none but those that were announced, whatever the service asks for."""
        files = self.files(id)
        here = {file.name: (file.size, file.sha256) for file in announced}
        if differing := sorted(file.name for file in files if here.get(file.name) != (file.size, file.sha256)):
            raise BoardError(f"{folder} is not what submission {id} was begun with: {', '.join(differing)} differ")
        total = sum(file.size for file in files)
        arrived = sum(file.received for file in files)
        progress(arrived, total)
        for file in files:
            arrived -= file.received
            while file.received < file.size:
                file = self._send_part(id, folder, file, lambda count, before=arrived: progress(before + count, total))
                progress(arrived + file.received, total)
            arrived += file.size

    def _send_part(self, id: str, folder: Path, file: File, progress: Callable[[int], None]) -> File:
        """Sends a part of a file, and tells where it stands then, after whatever interruptions."""
        patience = _Patience(self._patience)
        while True:
            try:
                response = self._http.patch(
                    f"{_PREFIX}/submissions/{id}/files/{file.name}",
                    content=_part(folder / file.name, file, progress),
                    headers={"Upload-Offset": str(file.received), "Content-Type": "application/octet-stream"},
                    timeout=_HASHING_TIMEOUT,
                )
                refusal = None if response.is_success else _refusal(response)
            except httpx.TransportError as error:
                response, refusal = None, self._silence(error)
            if response is not None and refusal is None:
                return file.model_copy(update={"received": _one(File, response).received})
            # 408 and 409: the service and this client see the file's length differently, as after a lost answer.
            if response is None or response.status_code in (*_RETRIED, 408, 409):
                assert refusal is not None
                patience.wait(refusal, response)
                received = next((each.received for each in self.files(id) if each.name == file.name), 0)
                now = file.model_copy(update={"received": received})
                if now.received == now.size:
                    return now
                if now.received > file.received:
                    patience = _Patience(self._patience)
                file = now
                continue
            assert refusal is not None
            raise refusal

    def _call(
        self,
        method: str,
        path: str,
        *,
        params: httpx.QueryParams | None = None,
        json: object = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """A call that may be repeated."""
        patience = _Patience(self._patience)
        while True:
            try:
                response = self._http.request(method, _PREFIX + path, params=params, json=json, headers=headers)
            except httpx.TransportError as error:
                patience.wait(self._silence(error), None)
                continue
            if response.is_success:
                return response
            if response.status_code not in _RETRIED:
                raise _refusal(response)
            patience.wait(_refusal(response), response)

    def _silence(self, error: httpx.TransportError) -> BoardError:
        return BoardError(f"{self._url} does not answer: {str(error) or type(error).__name__}")


def _played(sent: set[Future[RemoteEpisode | None]]) -> set[Future[RemoteEpisode | None]]:
    """Those of the answers that have come, all of them unless some are long in coming: the others' time runs on."""
    done, _ = wait(sent, timeout=_STRAGGLERS)
    return done or wait(sent, return_when=FIRST_COMPLETED).done


class _Patience:
    """Waits between tries, until there is no more time for another."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._next = _FIRST_WAIT

    def wait(self, refusal: BoardError, response: httpx.Response | None) -> None:
        """Raises the refusal where the wait would be too long."""
        told = response.headers.get("retry-after", "") if response is not None else ""
        seconds = float(told) if told.isdecimal() else self._next * _jitter.uniform(0.5, 1.0)
        if time.monotonic() + seconds > self._until:
            raise refusal
        self._next = min(_LONGEST_WAIT, self._next * 2)
        time.sleep(seconds)


def _turns(episodes: Sequence[RemoteEpisode], answers: object) -> list[Turn]:
    """What an agent answered to these episodes, all of it. Raises BoardError."""
    if isinstance(answers, (str, bytes)) or not isinstance(answers, Sequence):
        raise BoardError(
            f"the agent gave {_shown(answers)} to {len(episodes)} episodes; expected a sequence with an answer to each"
        )
    given = cast("Sequence[object]", answers)
    if len(given) != len(episodes):
        raise BoardError(f"the agent gave {len(given)} answers to {len(episodes)} episodes; expected one to each")
    return [_turn(episode.id, episode.turn, answer) for episode, answer in zip(episodes, given, strict=True)]


def _turn(episode: str, turn: int, written: object) -> Turn:
    """An answer as it is sent. Raises BoardError."""
    where = f"the answer to turn {turn} of episode {episode}"
    if isinstance(written, str):
        fields = {"text": written}
    elif isinstance(written, Sequence) and not isinstance(written, (bytes, bytearray)):
        fields = {"actions": tuple(cast("Sequence[object]", written))}
    else:
        raise BoardError(f"{where} is {_shown(written)}; expected a text, or a sequence of actions")
    try:
        return Turn.model_validate({"turn": turn, **fields}, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise BoardError(f"{where} cannot be sent: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _shown(value: object) -> str:
    """A value as an error tells it."""
    return "None" if value is None else f"a {type(value).__name__}"


@contextmanager
def _named(name: str) -> Generator[None]:
    """Tells of a name that no submission can have."""
    try:
        yield
    except ValidationError as error:
        raise BoardError(f"the name {name!r} cannot be used: {error.errors()[0]['msg']}") from error


def announce(folder: Path) -> list[NewFile]:
    """The files of a checkpoint's folder that a board takes, read once for their hashes.

    Raises:
        Refused: they are no checkpoint.
        OSError: a file cannot be read.
    """
    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder; expected a checkpoint such as runs/demo/checkpoints/…")
    taken, left = files_to_send(folder)
    sizes = {name: (folder / name).stat().st_size for name in taken}
    try:
        # How large a model may be is the board's to say.
        check_sizes(sizes, IntakeLimits(max_bytes=1 << 62))
    except Refused as error:
        beside = f" (there are also {', '.join(left[:4])})" if left else ""
        raise Refused(f"{folder}: {error}{beside}") from error
    return [NewFile(name=name, size=sizes[name], sha256=_sha256(folder / name)) for name in taken]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _part(path: Path, file: File, progress: Callable[[int], None]) -> Iterator[bytes]:
    """The bytes of a file from where the service has it, at most one part."""
    position = file.received
    with path.open("rb") as stream:
        stream.seek(position)
        while chunk := stream.read(min(_CHUNK_BYTES, file.received + _PART_BYTES - position)):
            yield chunk
            position += len(chunk)
            progress(position)


def _check_address(url: str, token: str | None) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BoardError(f"{url!r} is no address of a board: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
        raise BoardError(f"{url!r} is no address of a board; expected one such as https://board.example")
    if token and parsed.scheme == "http" and parsed.host not in ("localhost", "127.0.0.1", "::1"):
        raise BoardError(f"{url} would carry the token over the network in the clear; use https://{parsed.host}")


def _refusal(response: httpx.Response) -> BoardError:
    """A refusal of the service, or of what stands before it, in one line."""
    try:
        told = messages.Problem.model_validate_json(response.content).detail
    except ValidationError:
        told = f"it answered with status {response.status_code}, and not as a board does"
    return BoardError(told, response.status_code)


def _one(model: type[T], response: httpx.Response) -> T:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise _strange(response, error) from error


def _many(model: type[T], response: httpx.Response) -> list[T]:
    try:
        return [model.model_validate(each) for each in TypeAdapter(list[object]).validate_json(response.content)]
    except ValidationError as error:
        raise _strange(response, error) from error


def _strange(response: httpx.Response, error: ValidationError) -> BoardError:
    return BoardError(
        f"{response.request.url} answered what this turngym ({turngym.__version__}) cannot read, as another version of "
        f"the service may: {error.errors()[0]['msg']}",
        response.status_code,
    )
