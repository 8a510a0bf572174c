"""The client against a real service, also one that drops what it was asked or what it answers."""

import hashlib
import json

import pytest
from service_in_thread import serving
from small_boards import SECRET, deal, definition
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turngym_leaderboard import client as clients
from turngym_leaderboard.client import BoardClient, BoardError
from turngym_leaderboard.intake import Refused
from turngym_leaderboard.lifecycle import Role, State, Visibility
from turngym_leaderboard.store import boards, owners, submissions

SLUG = "lakes-one"


class Unreliable:
    """Every other request of a kind has its answer lost, or is told 503 before anybody heard it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._seen: dict[tuple[str, str], int] = {}
        self.lost = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        count = self._seen[key] = self._seen.get(key := (scope["method"], scope["path"]), 0) + 1
        if count % 3 == 1:
            # The app does what it was asked, and nobody hears of it.
            self.lost += 1
            await self._app(scope, receive, lambda message: _nothing())
            await send({"type": "http.response.start", "status": 502, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"<html>bad gateway</html>"})
        elif count % 3 == 2:
            self.lost += 1
            await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, send)


async def _nothing() -> None:
    pass


class Curious:
    """Asks for a file that nobody announced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.sent: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "PATCH":
            self.sent.append(scope["path"])
        if scope["method"] != "GET" or not scope["path"].endswith("/files"):
            await self._app(scope, receive, send)
            return
        told: list[bytes] = []

        async def keep(message: Message) -> None:
            told.append(message.get("body", b""))

        await self._app(scope, receive, keep)
        body = b"".join(told).replace(b'"config.json"', b'"../id_rsa"')
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoint"
    (folder / "training").mkdir(parents=True)
    for name, data in {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "model.safetensors": bytes(range(256)) * 4000,
        "training/state.json": b"{}",
        "training/actor_optimiser.safetensors": b"not sent",
        "README.md": b"not sent",
    }.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def token(store):
    boards.create(store, definition(), SECRET, [deal()])
    return owners.add_token(store, owners.create(store, "ann"), Role.SUBMIT)


def test_a_checkpoint_arrives_whole_with_what_a_board_takes(store, token, folder, monkeypatch):
    monkeypatch.setattr(clients, "_PART_BYTES", 300_000)
    told = []
    with serving(store) as address, BoardClient(address, token) as board:
        begun = []
        submission = board.submit(
            folder, SLUG, name="mine", progress=lambda *each: told.append(each), begun=begun.append
        )
        assert (begun[0].id, submission.state, submission.visibility) == (submission.id, "uploaded", "private")
        assert {file.name for file in board.files(submission.id)} == {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "training/state.json",
        }
        assert told[0] == (0, 1_024_008)
        assert told[-1] == (1_024_008, 1_024_008)
        assert [each for each, _ in told] == sorted(each for each, _ in told)
        assert board.boards()[0].slug == SLUG
        assert board.board(SLUG).environments[0].instances == 2
        assert board.submissions() == [submission.model_copy(update={"examined_after": None})]  # Read by itself alone.
        assert board.results(submission.id) == []
        assert list(board.episodes(submission.id)) == []
        assert {row.submission.name for row in board.rows(SLUG)} == {"mine", "random", "oracle"}
        assert board.set_visibility(submission.id, Visibility.PUBLIC).visibility == "public"
        assert board.withdraw(submission.id).state is State.FAILED
    with BoardClient(address, token, patience=0.1) as board, pytest.raises(BoardError, match="does not answer"):
        board.boards()


def test_whatever_gets_lost_a_submission_is_begun_once_and_arrives_whole(store, token, folder, monkeypatch):
    monkeypatch.setattr(clients, "_PART_BYTES", 400_000)
    monkeypatch.setattr(clients, "_FIRST_WAIT", 0.01)
    between = []

    def unreliable(app):
        between.append(Unreliable(app))
        return between[0]

    with serving(store, wrap=unreliable) as address, BoardClient(address, token) as board:
        submission = board.submit(folder, SLUG, name="mine")
    assert between[0].lost > 10
    [own] = submissions.of_owner(store, owners.find(store, "ann"))
    assert own.public_id == submission.id
    for file in submissions.files(store, own.public_id):
        arrived = (store.data / "submissions" / own.public_id / file.name).read_bytes()
        assert (len(arrived), hashlib.sha256(arrived).hexdigest()) == (file.received, file.sha256)
        assert arrived == (folder / file.name).read_bytes()


def test_a_service_gets_nothing_but_what_was_announced(store, token, folder):
    (folder.parent / "id_rsa").write_text("{}")  # As large as what was announced.
    between = []

    def curious(app):
        between.append(Curious(app))
        return between[0]

    with serving(store, wrap=curious) as address, BoardClient(address, token) as board:
        with pytest.raises(BoardError, match=r"\.\./id_rsa differ"):
            board.submit(folder, SLUG, name="mine")
        [own] = submissions.of_owner(store, owners.find(store, "ann"))
        with pytest.raises(BoardError, match=r"\.\./id_rsa differ"):
            board.resume(own.public_id, folder)
    assert not between[0].sent


def test_an_upload_goes_on_from_another_process_with_the_same_folder_only(store, token, folder, monkeypatch):
    class Interruption(Exception):
        pass

    def interrupt(arrived, total):
        if arrived >= 400_000:
            raise Interruption

    monkeypatch.setattr(clients, "_PART_BYTES", 400_000)
    with serving(store) as address, BoardClient(address, token) as board:
        begun = []
        with pytest.raises(Interruption):
            board.submit(folder, SLUG, name="mine", progress=interrupt, begun=begun.append)
        [large] = [file for file in board.files(begun[0].id) if file.name == "model.safetensors"]
        assert large.received < large.size
        (folder / "config.json").write_text(json.dumps({"another": "model"}))
        with pytest.raises(BoardError, match=r"is not what submission .* was begun with: config.json differ"):
            board.resume(begun[0].id, folder)
        (folder / "config.json").write_bytes(b"{}")
        board.resume(begun[0].id, folder)
        assert all(file.received == file.size for file in board.files(begun[0].id))


def test_refusals_are_told_as_the_service_words_them(store, token, folder):
    with serving(store) as address:
        with BoardClient(address) as nobody, pytest.raises(BoardError, match="this needs a token") as refused:
            nobody.submit(folder, SLUG, name="mine")
        assert refused.value.status == 401
        with BoardClient(address, token) as board:
            with pytest.raises(BoardError, match="there is no board 'other'"):
                board.submit(folder, "other", name="mine")
            with pytest.raises(BoardError, match=r"the name .* cannot be used"):
                board.submit(folder, SLUG, name="a\nb")
            (folder / "tokenizer.json").unlink()
            with pytest.raises(Refused, match=r"tokenizer.json missing.*there are also README.md"):
                board.submit(folder, SLUG, name="mine")
            with pytest.raises(Refused, match="is not a folder"):
                board.submit(folder / "gone", SLUG, name="mine")
    with (
        serving(store, wrap=lambda app: _page) as address,
        BoardClient(address) as board,
        pytest.raises(BoardError, match=r"answered what this turngym .* cannot read"),
    ):
        board.boards()


async def _page(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"<html>a board</html>"})


@pytest.mark.parametrize("url", ["board.example", "ftp://board.example", "http://user:secret@localhost", "http://", ""])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(BoardError, match="is no address of a board"):
        BoardClient(url)


def test_a_token_is_not_sent_over_a_network_in_the_clear():
    with pytest.raises(BoardError, match=r"use https://board.example"):
        BoardClient("http://board.example", "tgb_secret")
    BoardClient("http://board.example").close()
    BoardClient("https://board.example", "tgb_secret").close()


def test_a_redirect_is_not_followed_with_the_token(store, token):
    async def elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 302, "headers": [(b"location", b"http://127.0.0.1:1/")]})
        await send({"type": "http.response.body", "body": b""})

    with (
        serving(store, wrap=lambda app: elsewhere) as address,
        BoardClient(address, token) as board,
        pytest.raises(BoardError, match="status 302"),
    ):
        board.boards()
