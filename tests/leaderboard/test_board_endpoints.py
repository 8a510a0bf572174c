"""Endpoints on a board: registered in a file, submitted by name, played by the worker that has their keys."""

import itertools
import threading

import pytest
from chat_server import ChatServer, refuses, says
from service_in_thread import serving
from small_boards import dealt_board, everything, play_out
from typer.testing import CliRunner

from turngym_client import connect
from turngym_leaderboard import playing
from turngym_leaderboard.cli import app
from turngym_leaderboard.client import BoardClient, BoardError
from turngym_leaderboard.endpoints import EndpointsError, load_endpoints
from turngym_leaderboard.store import open_store, owners, submissions, work
from turngym_leaderboard.store.values import Kind, Role, State, Visibility

KEY = "sk-ThisIsTheKey0123"
RIGHT = "<think>why not</think><answer>Right</answer>"
USAGE = {"prompt_tokens": 1_000, "completion_tokens": 100}
LAKE = {"id": "frozen_lake", "instances": 3, "attempts": 2, "showcase": 1}
SMALL = {"batch": 4, "environments": [LAKE], "max_response_tokens": 64}
EPISODES = 7


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


def registered(folder, url, further=""):
    (folder / "small.key").write_text(KEY + "\n")
    file = folder / "endpoints.toml"
    file.write_text(
        f'[small]\nurl = "{url}"\nmodel = "small-1"\nkey_file = "small.key"\nowners = ["ann"]\ntries = 1\n'
        f"price_in = 2.0\nprice_out = 10.0\n{further}\n"
    )
    return file


def token_of(store, name, role=Role.SUBMIT):
    return owners.add_token(store, owners.create(store, name), role)


def test_an_endpoint_is_submitted_by_name_and_shown_with_its_costs(store, client, tmp_path, monkeypatch):
    board = dealt_board(store, client, **SMALL)
    with ChatServer(lambda asked: says(RIGHT, usage=USAGE)) as chat:
        endpoints = load_endpoints(registered(tmp_path, chat.url))
        with serving(store, endpoints=endpoints) as address, BoardClient(address, token_of(store, "ann")) as ann:
            [offered] = ann.endpoints()
            assert (offered.name, offered.url, offered.model) == ("small", None, "small-1")
            monkeypatch.setenv("TURNGYM_BOARD_TOKEN", ann._http.headers["authorization"].split()[1])
            done = CliRunner().invoke(
                app, ["submit", "endpoint:small", "--name", "mine", "--public", "--board", address]
            )
            assert done.exit_code == 0, done.output
            assert "mine (" in done.output
            [mine] = ann.submissions()
            assert (mine.kind, mine.state, mine.total) == (Kind.ENDPOINT, State.QUEUED, EPISODES)
            assert play_out(store, client).unplayable == set()
            assert ann.status(mine.id).state is State.QUEUED  # This worker has no endpoints.
            assert not chat.asked
            play_out(store, client, endpoints=endpoints)
            told = ann.status(mine.id)
            assert (told.state, told.episodes) == (State.SCORED, EPISODES)
            assert told.description == {
                "kind": "endpoint",
                "endpoint": "small",
                "url": "endpoint:small",
                "model": "small-1",
                "context": "all turns",
                "instructions": "environment",
                "max_response_tokens": "64",
                "price": "$2 read, $10 written, for a million tokens",
            }
            [result] = ann.results(mine.id)
            turns = result.statistics.spent.turns
            assert result.statistics.spent.cost == pytest.approx(turns * (1_000 * 2.0 + 100 * 10.0) / 1e6)
            assert {asked.body["max_tokens"] for asked in chat.asked} == {64}
            assert {asked.headers["authorization"] for asked in chat.asked} == {f"Bearer {KEY}".lower()}
        assert KEY not in repr(everything(store, board)) + repr(submissions.of_board(store, board))


def test_who_may_submit_an_endpoint_is_in_the_file(tmp_path, client):
    with open_store(tmp_path / "data") as store:
        board = dealt_board(store, client, **SMALL)
        endpoints = load_endpoints(registered(tmp_path, "http://127.0.0.1:1/v1"))
        ann, bob, root = token_of(store, "ann"), token_of(store, "bob"), token_of(store, "root", Role.ADMIN)
        with serving(store, endpoints=endpoints) as address:
            with BoardClient(address, bob) as theirs:
                assert theirs.endpoints() == []
                for name in ("small", "other"):
                    with pytest.raises(
                        BoardError, match=f"there is no endpoint '{name}' that you may submit"
                    ) as refused:
                        theirs.submit_endpoint(name, board.slug, name="x")
                    assert refused.value.status == 404
            for token in (ann, root):
                with BoardClient(address, token) as theirs:
                    [offered] = theirs.endpoints()
                    assert offered.url == ("http://127.0.0.1:1/v1" if token == root else None)
                    made = theirs.submit_endpoint("small", board.slug, name="x", visibility=Visibility.PRIVATE)
                    assert made.state is State.QUEUED
            with BoardClient(address, ann) as theirs:
                theirs.submit_endpoint("small", board.slug, name="y")
                with pytest.raises(BoardError, match="2 submissions of an owner are scored in a season"):
                    theirs.submit_endpoint("small", board.slug, name="z")
        with serving(store) as address, BoardClient(address, ann) as theirs:
            assert theirs.endpoints() == []


def submitted_endpoint(store, board, owner, name, registered_as="small"):
    told = {"kind": "endpoint", "endpoint": registered_as}
    made = submissions.create(store, board, owner, name=name, kind=Kind.ENDPOINT, description=told)
    submissions.set_state(store, made.public_id, State.VALIDATED)
    return submissions.set_state(store, made.public_id, State.QUEUED)


def test_what_an_interrupted_worker_had_played_is_not_asked_for_again(tmp_path, client, monkeypatch):
    class Cut(BaseException):
        pass

    commit, left = work.commit, [4]

    def cut_off(*arguments, **keywords):
        told = commit(*arguments, **keywords)
        left[0] -= told.new
        if left[0] <= 0:
            left[0] = EPISODES
            raise Cut
        return told

    with open_store(tmp_path / "data") as store, ChatServer(lambda asked: says(RIGHT)) as chat:
        board = dealt_board(store, client, **SMALL)
        play_out(store, client)
        endpoints = load_endpoints(registered(tmp_path, chat.url))
        submitted_endpoint(store, board, owners.create(store, "ann"), "mine")
        with monkeypatch.context() as patch:
            patch.setattr(playing.work, "commit", cut_off)
            with pytest.raises(Cut):
                play_out(store, client, endpoints=endpoints, lease_seconds=0.01)
        before = turns_by_episode(store, board)
        assert 0 < len(before) < EPISODES
        asked = len(chat.asked)
        play_out(store, client, endpoints=endpoints)
        after = turns_by_episode(store, board)
        assert len(after) == EPISODES
        assert len(chat.asked) - asked == sum(turns for key, turns in after.items() if key not in before)


def turns_by_episode(store, board):
    kept = everything(store, board)["mine"][1]
    return {(record.draw, record.attempt): len(trajectory.turns) for _, _, record, trajectory in kept}


def test_submissions_of_one_endpoint_are_played_one_after_the_other(store, database_url, client, server, tmp_path):
    """So its limits hold, however many slots there are; others go on meanwhile."""
    board = dealt_board(store, client, submissions_per_owner=9, **SMALL)
    play_out(store, client)
    with ChatServer(lambda asked: says(RIGHT)) as chat:
        file = registered(tmp_path, chat.url, 'concurrency = 1\n[large]\nmodel = "large"\nconcurrency = 1')
        file.write_text(file.read_text() + f'\nurl = "{chat.url}"\n')
        endpoints = load_endpoints(file)
        ann = owners.create(store, "ann")
        for k in range(3):
            submitted_endpoint(store, board, ann, f"small {k}")
        submitted_endpoint(store, board, ann, "large", "large")

        def slot():
            with open_store(store.data, database_url) as own, connect(server) as connected:
                play_out(own, connected, endpoints=endpoints)

        slots = [threading.Thread(target=slot) for _ in range(3)]
        for each in slots:
            each.start()
        for each in slots:
            each.join()
        assert chat.at_once <= 2
    rows = {row.name: row for row in submissions.of_board(store, board) if row.kind is Kind.ENDPOINT}
    assert {row.state for row in rows.values()} == {State.SCORED}
    times = sorted((row.started, row.finished) for name, row in rows.items() if name != "large")
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("registered_as", "harm", "told"),
    [
        ("gone", lambda folder: None, "no endpoint 'gone' is registered with the board's worker"),
        ("small", lambda folder: (folder / "small.key").unlink(), "the board's worker has no key for endpoint 'small'"),
        ("small", lambda folder: None, "answered none of its first requests"),
    ],
)
def test_an_endpoint_that_cannot_be_had_has_failed_with_the_reason(tmp_path, client, registered_as, harm, told):
    with (
        open_store(tmp_path / "data") as store,
        ChatServer(lambda asked: refuses("401 Unauthorized", message="127.0.0.1 refuses it")) as chat,
    ):
        board = dealt_board(store, client, **SMALL)
        endpoints = load_endpoints(registered(tmp_path, chat.url))
        harm(tmp_path)
        submission = submitted_endpoint(store, board, owners.create(store, "ann"), "mine", registered_as)
        play_out(store, client, endpoints=endpoints)
        failed = submissions.find(store, submission.public_id)
        assert failed.state is State.FAILED
        assert told in failed.reason
        assert not any(hidden in failed.reason for hidden in (KEY, str(tmp_path), chat.url, "127.0.0.1"))
        # Nothing was played, so it may be mended and tried as often as there is.
        assert submissions.left_in_season(store, board, submission.owner) == board.definition.submissions_per_owner


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "registers no endpoint; expected a table of each"),
        ("[small", "is no TOML"),
        ("model = 'm'", "model: Input should be a valid dictionary"),
        ("[small]\nmodel = 'm'", "small.url: Field required"),
        ("[small]\nmodel = 'm'\nurl = 'http://user:pass@host/v1'", "an address holds no user or password"),
        (
            "[small]\nmodel = 'm'\nurl = 'http://host/v1'\nprice = 1",
            "small.price: Extra inputs .*; did you mean price_in",
        ),
        ("[small]\nmodel = 'm'\nurl = 'http://host/v1'\nprice_in = 1.0", "price_in and price_out go together"),
        ("['a b']\nmodel = 'm'\nurl = 'http://host/v1'", "String should match pattern"),
    ],
)
def test_a_file_that_registers_nothing_says_why(tmp_path, text, told):
    file = tmp_path / "endpoints.toml"
    file.write_text(text)
    with pytest.raises(EndpointsError, match=told):
        load_endpoints(file)
    done = CliRunner().invoke(app, ["worker", str(tmp_path / "data"), "--server", "x:1", "--endpoints", str(file)])
    assert (done.exit_code, "Traceback" in done.output) == (2, False)


def test_a_worker_without_an_endpoints_key_does_not_start_and_forgotten_owners_are_told(tmp_path, caplog):
    file = registered(tmp_path, "http://127.0.0.1:1/v1", '[large]\nmodel = "large"\nurl = "http://127.0.0.1:1/v1"')
    (tmp_path / "small.key").unlink()
    for command in ("worker", "serve"):
        caplog.clear()
        arguments = [command, str(tmp_path / "data"), "--server", "127.0.0.1:1", "--endpoints", str(file)]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2
        assert "endpoint 'small' cannot be played: the key's file" in done.output
        assert [record.getMessage()[:31] for record in caplog.records] == ["endpoint 'large' has no owners,"]
