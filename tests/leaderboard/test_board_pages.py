"""A board's pages over a real database: what they tell, to whom, and what hostile names and texts come to."""

import re
import shutil
import sqlite3
from datetime import UTC, datetime, timedelta

import pytest
import small_boards
from fastapi import FastAPI
from sample_boards import INSTANCES, SECRET, SHOWCASE, definition, new_board, owner, play, submit
from sample_episodes import HOSTILE
from sqlalchemy import update
from starlette.testclient import TestClient
from typer.testing import CliRunner

from turngym_leaderboard.cli import app as cli
from turngym_leaderboard.pages import board_pages
from turngym_leaderboard.pages.export import export
from turngym_leaderboard.pages.from_store import BoardSource
from turngym_leaderboard.pages.routes import pages_router
from turngym_leaderboard.pages.views import EpisodeFilter
from turngym_leaderboard.store import NotFound, boards, open_store, submissions, work
from turngym_leaderboard.store.models import SubmissionRow
from turngym_leaderboard.store.values import Kind, State, Visibility
from turngym_leaderboard.visibility import EVERYBODY, Viewer

GRIDS = ("sokoban", "frozen_lake")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A board of two grids with both scripted rows, a weak and a strong agent; the weak one has unresolved episodes."""
    data = tmp_path_factory.mktemp("prepared")
    with open_store(data) as store:
        board = new_board(store, definition(environments=GRIDS))
        alice = owner(store, "alice")
        play(store, board, {label: range(5) for label in GRIDS}, tokens=None)
        play(store, board, {label: range(22) for label in GRIDS}, tokens=None)
        submit(store, board, alice, "weak")
        play(store, board, {"sokoban": range(6), "frozen_lake": range(7)}, unresolved=[20])
        submit(store, board, alice, "strong")
        play(store, board, {"sokoban": range(20), "frozen_lake": range(19)}, tokens=10)
    return data


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def grids(prepared, tmp_path, store):
    """The prepared board in a store of the test's own."""
    shutil.copyfile(prepared / "board.sqlite", tmp_path / "copy.sqlite")
    with sqlite3.connect(tmp_path / "copy.sqlite") as copy, sqlite3.connect(tmp_path / "data" / "board.sqlite") as own:
        copy.backup(own)
    copy.close()
    own.close()
    return boards.find(store, "grids-2026")


def browse(store):
    app = FastAPI()
    app.include_router(pages_router(BoardSource(store)))
    return TestClient(app, follow_redirects=True)


def ids(store, board):
    return {each.name: each.public_id for each in submissions.of_board(store, board)}


def test_a_board_shows_its_rows_between_random_and_oracle(store, grids) -> None:
    view = BoardSource(store).board(grids.slug)
    assert [row.name for row in view.rows] == ["oracle", "strong", "weak", "random"]
    assert [row.ranks for row in view.rows] == [None, None, None, None]
    strong = view.rows[1]
    # (20/24 − 0.2) / 0.7 and (19/24 − 0.2) / 0.7.
    assert strong.score is not None
    assert strong.score.value == pytest.approx(((20 / 24 - 0.2) + (19 / 24 - 0.2)) / 1.4)
    assert [success.value for success in strong.successes if success] == [20 / 24, 19 / 24]
    # 2 turns of 10 tokens in 48 episodes, 39 of them solved.
    assert view.price_unit == "tokens"
    assert strong.price == pytest.approx(48 * 20 / 39)
    assert [column.floor for column in view.columns] == pytest.approx([0.2, 0.2])
    assert view.rows[2].notes == ("2 of 48 episodes are not resolved, so it is not ranked",)


def test_ranks_are_those_of_who_is_ranked(store) -> None:
    board = new_board(store, definition())
    for wins in (5, 22):
        play(store, board, {"sokoban": range(wins)})
    for name, wins in (("low", 2), ("high", 23), ("level", 22)):
        submit(store, board, owner(store, name), name)
        play(store, board, {"sokoban": range(wins)})
    source = BoardSource(store)
    view = source.board(board.slug)
    assert {row.name: row.ranks for row in view.rows if row.kind != "scripted"} == {
        "high": (1, 2),
        "level": (1, 2),
        "low": (3, 3),
    }
    assert view.detectable is not None
    made = ids(store, board)
    assert source.submission(board.slug, made["low"]).ranks == (3, 3)
    submit(store, board, owner(store, "next"), "next")
    play(store, board, {"sokoban": range(1)})
    assert {row.name: row.ranks for row in source.board(board.slug).rows}["low"] == (3, 4)


def test_what_the_operator_hides_has_no_row_and_widens_no_rank(store) -> None:
    board = new_board(store, definition())
    for wins in (5, 22):
        play(store, board, {"sokoban": range(wins)})
    for name, wins in (("low", 2), ("high", 23), ("spam", 2)):
        submit(store, board, owner(store, name), name)
        play(store, board, {"sokoban": range(wins)})
    made = ids(store, board)

    def seen(viewer=EVERYBODY):
        rows = BoardSource(store, viewer).board(board.slug).rows
        return {row.name: row.ranks for row in rows if row.kind != "scripted"}

    assert seen() == {"low": (2, 3), "high": (1, 1), "spam": (2, 3)}
    done = CliRunner().invoke(cli, ["board", "hide", str(store.data), made["spam"]])
    assert done.output == "spam is hidden\n"
    assert seen() == {"low": (2, 2), "high": (1, 1)}
    assert "spam" in seen(Viewer(admin=True))
    assert browse(store).get(f"/boards/{board.slug}/submissions/{made['spam']}").status_code == 404
    done = CliRunner().invoke(cli, ["board", "hide", str(store.data), made["spam"], "--undo"])
    assert done.output == "spam is public again\n"
    assert "spam" in seen()


def test_a_comparison_says_who_solved_what(store, grids) -> None:
    made = ids(store, grids)
    view = BoardSource(store).comparison(grids.slug, made["weak"], made["strong"])
    sokoban = view.environments[0]
    # Instance 20 is not resolved for the weak one.
    assert len(sokoban.instances) == INSTANCES - 1
    assert [sokoban.count(side) for side in ("one", "other", "both", "neither")] == [0, 14, 6, 3]
    assert sokoban.difference is not None
    assert sokoban.difference.value == pytest.approx(14 / 23)
    assert sokoban.p_value == pytest.approx(2 / 2**14)
    assert len(view.showcase) == SHOWCASE * 2
    page = browse(store).get(f"/boards/{grids.slug}/compare?one={made['weak']}&other={made['strong']}")
    assert page.url.path.endswith(f"/compare/{made['weak']}/{made['strong']}")
    assert "only strong: 14" in page.text
    assert "+60.9 points" in page.text


def test_a_comparison_whose_test_and_interval_disagree_says_which_decides(store) -> None:
    environments = [{"id": "sokoban", "instances": 6, "attempts": 2, "showcase": 1}]
    board = boards.create(store, small_boards.definition(environments=environments), SECRET, [small_boards.deal(6, 1)])
    made = []
    for name, solves in (("none", False), ("half", True)):
        submission = submissions.create(store, board, owner(store, name), name=name, kind=Kind.CHECKPOINT)
        made.append(submission.public_id)
        submissions.set_state(store, submission.public_id, State.VALIDATED)
        submissions.set_visibility(store, submission.public_id, Visibility.PUBLIC)
        submissions.set_state(store, submission.public_id, State.QUEUED)
        now = datetime.now(UTC)
        lease = work.claim(store, "test", (Kind.CHECKPOINT,), now=now, until=now + timedelta(minutes=1))
        [environment] = board.environments
        played = [
            small_boards.episode(instance, attempt, success=solves and attempt == 0)
            for instance in boards.deal(store, environment.id).scored.instances
            for attempt in range(2)
        ]
        work.commit(store, lease, environment, played, showcase=False, sealed=False, now=now)
        work.finish(store, lease, State.SCORED, results=(), now=now)
    page = browse(store).get(f"/boards/{board.slug}/compare/{made[0]}/{made[1]}").text
    assert "+50 points" in page
    assert "The interval holds 0, but the test finds a difference: the test decides" in page


def test_a_remote_agent_is_compared_by_the_attempts_that_it_was_dealt(store) -> None:
    board = new_board(store, definition(attempts=4))
    play(store, board, {"sokoban": range(5)}, tokens=None)
    play(store, board, {"sokoban": range(22)}, tokens=None)
    alice = owner(store, "alice")
    far = submit(store, board, alice, "far")
    with store.writing() as session:
        session.execute(update(SubmissionRow).where(SubmissionRow.id == far.id).values(kind=Kind.REMOTE))
    play(store, board, {"sokoban": range(2)}, attempts=1)
    near = submit(store, board, alice, "near")
    play(store, board, {"sokoban": range(20)})
    source = BoardSource(store)
    rows = {row.name: row for row in source.board(board.slug).rows}
    assert (rows["near"].ranks, rows["far"].ranks) == ((1, 1), (2, 2))
    assert rows["near"].notes == ()
    assert "it is dealt one attempt of each instance" in rows["far"].notes[0]
    view = source.comparison(board.slug, far.public_id, near.public_id)
    [seen] = view.environments
    assert (seen.attempts, len(seen.instances), seen.test) == (1, INSTANCES, "exact McNemar")
    assert seen.p_value == pytest.approx(2 / 2**18)
    assert seen.difference is not None
    assert seen.difference.value == pytest.approx(18 / 24)
    assert view.adjusted == pytest.approx(2 / 2**18)


def test_a_submission_that_no_worker_can_play_says_why(store, grids) -> None:
    submit(store, grids, owner(store, "carol"), "late")
    boards.note_waiting(store, grids.id, "the server is another one", now=datetime.now(UTC))
    client = browse(store)
    page = client.get(f"/boards/{grids.slug}").text
    assert page.count("waits: the server is another one") == 1
    late = ids(store, grids)["late"]
    assert "waits: the server is another one" in client.get(f"/boards/{grids.slug}/submissions/{late}").text


def test_a_submission_is_told_with_failures_and_showcase(store, grids) -> None:
    made = ids(store, grids)
    client = browse(store)
    page = client.get(f"/boards/{grids.slug}/submissions/{made['weak']}").text
    for expected in (
        "26.1 %",
        "no answer",
        "1 episode is not resolved. Success is 25.0 % if they all failed, 29.2 % if none did.",
        "some episodes could not be played",
        "sokoban, instance 24",
    ):
        assert expected in page, expected
    keys = re.findall(r'href="/episodes/([^"]+)"', page)
    assert len(keys) == SHOWCASE * 2
    shown = client.get(f"/episodes/{keys[0]}").text
    assert "10000000000000000024" in shown
    assert 'class="board"' in shown
    other = next(row for row in BoardSource(store).beside(keys[0]) if row.agent == "strong")
    assert f'href="/episodes/{keys[0]}/{other.key}"' in shown
    both = client.get(f"/beside?e={keys[0]}&e={other.key}")
    assert both.text.count('class="player-card') == 2


def test_scored_episodes_of_a_sealed_board_are_shown_when_the_season_is_over(store, grids) -> None:
    made = ids(store, grids)
    public, admin = BoardSource(store), BoardSource(store, Viewer(admin=True))
    scored = admin.episode_list(grids.slug, made["strong"], EpisodeFilter(), 1)
    assert (scored.total, scored.solved) == (2 * (INSTANCES + SHOWCASE), 39)
    key = next(row.key for row in scored.rows if "attempt 1" in row.label)
    listed = public.episode_list(grids.slug, made["strong"], EpisodeFilter(), 1)
    assert listed.total == 2 * SHOWCASE
    with pytest.raises(NotFound):
        public.episode(key)
    client = browse(store)
    assert client.get(f"/episodes/{key}").status_code == 404
    assert str(SECRET) not in client.get(f"/boards/{grids.slug}").text
    boards.close(store, grids.slug)
    assert client.get(f"/episodes/{key}").status_code == 200
    assert str(SECRET) in client.get(f"/boards/{grids.slug}").text
    assert public.episode_list(grids.slug, made["strong"], EpisodeFilter(), 1).total == scored.total


def test_a_private_submission_is_nowhere(store, grids) -> None:
    bob = owner(store, "bob")
    hidden = submit(store, grids, bob, "my secret plan", visibility=Visibility.PRIVATE)
    play(store, grids, {label: range(23) for label in GRIDS})
    made = ids(store, grids)
    key = BoardSource(store, Viewer(owner_id=bob.id)).submission(grids.slug, hidden.public_id).showcase[0].key
    client = browse(store)
    assert "secret plan" not in client.get("/").text + client.get(f"/boards/{grids.slug}").text
    public = BoardSource(store).submission(grids.slug, made["strong"])
    assert hidden.public_id not in {other for other, _ in public.others}
    assert all(row.agent != hidden.name for row in BoardSource(store).beside(public.showcase[0].key))
    missing = client.get(f"/boards/{grids.slug}/submissions/ffffffffffffffff")
    for path in (
        f"/boards/{grids.slug}/submissions/{hidden.public_id}",
        f"/boards/{grids.slug}/submissions/{hidden.public_id}/episodes",
        f"/boards/{grids.slug}/compare/{made['strong']}/{hidden.public_id}",
        f"/episodes/{key}",
        f"/episodes/{public.showcase[0].key}/{key}",
    ):
        page = client.get(path)
        assert page.status_code == missing.status_code == 404, path
        assert "plan" not in page.text


def test_a_submission_of_another_board_is_not_on_this_one(store, grids) -> None:
    other = new_board(store, definition("other"))
    assert browse(store).get(f"/boards/{other.slug}/submissions/{ids(store, grids)['weak']}").status_code == 404


def test_what_is_played_is_told_with_its_progress(store) -> None:
    board = new_board(store, definition())
    play(store, board, {}, until=9)
    failed = submit(store, board, owner(store, "alice"), "broken")
    submissions.set_state(store, failed.public_id, State.FAILED, reason="tensor lm_head holds NaN")
    client = browse(store)
    page = client.get(f"/boards/{board.slug}").text
    assert f'<progress max="{INSTANCES + SHOWCASE}" value="{9 + SHOWCASE}">' in page
    assert "There is no result yet." in page
    assert "live.js" in page
    assert failed.public_id not in page  # It would only be in the way of others; its own page tells.
    assert "tensor lm_head holds NaN" in client.get(f"/boards/{board.slug}/submissions/{failed.public_id}").text


def test_an_open_boards_episodes_are_listed_and_filtered(store) -> None:
    board = new_board(store, definition(environments=GRIDS, sealed=False, attempts=2))
    played = play(store, board, {"sokoban": range(10), "frozen_lake": ()})
    client = browse(store)
    path = f"/boards/{board.slug}/submissions/{played.public_id}/episodes"
    assert "102 episodes: 20 solved, 82 failed" in client.get(path).text
    assert "page 1 of 2" in client.get(path).text
    assert "20 of 102 episodes: 20 solved, 0 failed" in client.get(f"{path}?verdict=solved&environment=sokoban").text
    assert "No episode is like that" in client.get(f"{path}?verdict=solved&environment=frozen_lake").text


def test_agents_of_one_name_are_told_apart_where_they_are_chosen(store) -> None:
    board = new_board(store, definition())
    for _ in range(2):
        play(store, board, {"sokoban": range(5)})
    alice, bob, made = owner(store, "alice"), owner(store, "bob"), []
    for by, name in ((alice, "mine"), (bob, "Mine"), (bob, "mine"), (alice, "other")):
        made.append(submit(store, board, by, name).public_id)
        play(store, board, {"sokoban": range(5)})
    client = browse(store)
    page = client.get(f"/boards/{board.slug}").text
    told = dict(re.findall('<option value="([^"]+)"[^>]*>([^<]+)<', page))
    expected = [
        "mine (checkpoint, alice)",
        f"Mine (checkpoint, bob, {made[1]})",
        f"mine (checkpoint, bob, {made[2]})",
        "other",
    ]
    assert [told[each] for each in made] == expected
    beside = client.get(f"/boards/{board.slug}/submissions/{made[0]}").text
    assert re.findall("<bdi>(.ine [^<]+)</bdi>", beside) == expected[1:3]


def test_an_agent_is_not_compared_with_itself(store, grids) -> None:
    strong = ids(store, grids)["strong"]
    page = browse(store).get(f"/boards/{grids.slug}/compare?one={strong}&other={strong}")
    assert page.status_code == 404
    assert "a submission is compared with another one; choose two" in page.text


def test_hostile_names_and_texts_do_nothing(store) -> None:
    board = new_board(store, definition(title=HOSTILE[:70].translate({0: None}), about=HOSTILE.replace("\0", "")))
    name = "<script>alert(1)</script>\u202e'\"><b>"
    description = {"<i>policy": HOSTILE.replace("\0", "")}
    submit(store, board, owner(store, "alice"), name, description=description)
    for _ in range(3):
        played = play(store, board, {"sokoban": range(9)}, text=HOSTILE)
    client = browse(store)
    made = ids(store, board)
    key = BoardSource(store).submission(board.slug, made[name]).showcase[0].key
    for path in (
        "/",
        f"/boards/{board.slug}",
        f"/boards/{board.slug}/submissions/{made[name]}",
        f"/boards/{board.slug}/submissions/{made[name]}/episodes",
        f"/boards/{board.slug}/compare/{made[name]}/{made['random']}",
        f"/episodes/{key}",
    ):
        page = client.get(path)
        assert page.status_code == 200, path
        assert not re.search(r"<script(?! src=\"/static/)|<img|<b>|<i>|[\x00\x1b\u202e]", page.text), path
        assert "unsafe" not in page.headers["content-security-policy"]
    assert played.state is State.SCORED


@pytest.mark.parametrize(
    "path",
    [
        "/boards/none-2026",
        "/boards/x/submissions/y",
        "/boards/x/compare",
        "/boards/x/compare/a/b",
        "/episodes/abc.1",
        "/episodes/abc.x",
        "/episodes/%00.1",
        "/episodes/1." + "9" * 40,
        "/beside?e=1",
        "/static/nothing.css",
        "/static/..%2frender.py",
    ],
)
def test_what_is_not_there_is_a_404(store, path) -> None:
    assert browse(store).get(path).status_code == 404


def test_an_export_that_fails_leaves_nothing_and_the_earlier_one_as_it_was(store, tmp_path, monkeypatch) -> None:
    new_board(store, definition())
    export(BoardSource(store), tmp_path / "site")

    def fails(*_: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(board_pages, "board_page", fails)
    with pytest.raises(OSError, match="no space left"):
        export(BoardSource(store), tmp_path / "site")
    assert not (tmp_path / ".site.part").exists()
    assert (tmp_path / "site" / "index.html").is_file()


def test_an_empty_place_says_so(store) -> None:
    assert "There is no board yet" in browse(store).get("/").text
