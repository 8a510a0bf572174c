"""The playground's pages as a browser asks for them, from a process of its own, before a real server."""

import re
import sys

import httpx
import pytest
from hostile_text import HOSTILE
from playing import game_of, post, solve

from turngym_client import connect
from turngym_leaderboard import cli
from turngym_leaderboard.pages.trajectory_file import TrajectoryFile


def test_an_episode_is_played_and_kept_and_seen_again(ground, played_server):
    page = ground.begin("sokoban", level_seed="7")
    assert page.status_code == 200
    assert "Sokoban: push every box onto a target." in page.text
    page = solve(ground, page, played_server, 7)
    assert "solved" in page.text
    for _ in range(2):
        page = post(ground, page, "keep")
        assert "Kept in" in page.text
    [line] = [line for line in ground.lines() if line["level_seed"] == "7"]
    assert line["player"] == "person"
    assert line["success"] is True
    assert {turn["reasoning"] for turn in line["turns"]} == {"I see"}
    turns = ground.http.get(f"{ground.origin}{game_of(page)}/turns")
    assert "I see" in turns.text
    with connect(played_server) as client:
        episode = client.reset("sokoban", level_seed=7, noise_seed=int(line["noise_seed"]))
        for turn in line["turns"]:
            episode.step(turn["actions"])
        assert episode.state.digest.hex() == line["digest"]

    file = TrajectoryFile(ground.kept)
    file.refresh()
    [row] = [row for row in file.rows if "7" in row.instance.split()]
    assert (row.agent, row.verdict, row.environment) == ("person", "solved", "sokoban")
    shown = file.episode(row.number)
    assert [turn.actions for turn in shown.turns] == [tuple(turn["actions"]) for turn in line["turns"]]
    assert ("level seed", "7") in shown.facts


def test_the_same_level_again_or_another(ground):
    page = ground.begin("sokoban", level_seed="7", **{"option.symbols": "latin"})
    same = post(ground, page, "again", level="same")
    other = post(ground, page, "again", level="other")
    boards = [re.search(r'aria-label="(Board of [^"]+)"', each.text)[1] for each in (page, same, other)]
    assert boards[0] == boards[1] != boards[2]
    assert all("W wall" in each.text for each in (page, same, other))
    assert len({game_of(each) for each in (page, same, other)}) == 3


def test_the_form_has_the_schemas_fields_and_keeps_what_was_filled_in(ground):
    form = ground.http.get(f"{ground.address}environments/sokoban").text
    assert re.search(r'name="option.max_solution" value="10"', form)
    assert "held out" not in form
    for filled, message in (
        ({"option.boxes": "9"}, "no room for 9 boxes"),
        ({"option.boxes": "many"}, "boxes: &#39;many&#39; is not a whole number"),
        ({"level_seed": "-1"}, "level seed: &#39;-1&#39; is no whole number"),
        ({"level_seed": str(2**64)}, "level_seed"),
        ({"split": "held_out"}, "held_out"),
        ({"split": "other"}, "other"),
        ({"max_turns": "9" * 12}, "max_turns"),
    ):
        page = ground.begin("sokoban", **{"option.width": "7", **filled})
        assert page.status_code == 422, filled
        assert message in page.text
        assert re.search(r'name="option.width" value="7"', page.text)


def test_a_turn_of_another_moment_changes_nothing(ground):
    page = ground.begin("sokoban", level_seed="7")
    page = post(ground, page, "turn", step="0", choice="0")
    assert page.status_code == 200
    for step in ("0", "2", "x", ""):
        stale = post(ground, page, "turn", step=step, choice="0", reasoning="mine")
        assert stale.status_code == 409
        assert "has been played meanwhile" in stale.text
        assert ">mine</textarea>" in stale.text
    assert post(ground, page, "turn", step="1", choice="99").status_code == 409
    assert post(ground, page, "turn", step="1", use="advice").status_code == 409
    assert post(ground, page, "keep").status_code == 409


def test_the_oracle_is_asked_followed_and_told_of(ground):
    page = ground.begin("sokoban", level_seed="8")
    step = 0
    while 'id="turn"' in page.text:
        page = post(ground, page, "advice", step=str(step))
        assert "The best player would succeed" in page.text
        page = post(ground, page, "turn", step=str(step), use="advice")
        step += 1
    post(ground, page, "keep")
    [line] = [line for line in ground.lines() if line["level_seed"] == "8"]
    assert line["player"] == "person and oracle"
    assert all(turn["advised"] and turn["reasoning"] for turn in line["turns"])


def test_an_environment_without_an_oracle_says_so_and_offers_none(ground):
    page = ground.begin("hostile")
    assert "Ask the oracle" in page.text
    page = post(ground, page, "advice", step="0")
    assert "This environment has no oracle" in page.text
    assert "Ask the oracle" not in page.text
    assert "Ask the oracle" not in ground.begin("hostile").text


def test_hostile_texts_stay_texts(ground):
    page = ground.begin("hostile")
    for step in range(3):
        page = post(ground, page, "turn", step=str(step), written=HOSTILE, reasoning=HOSTILE.replace("\u202e", ""))
    post(ground, page, "keep")
    pages = [
        ground.http.get(ground.address),
        ground.http.get(f"{ground.address}environments/hostile"),
        page,
        ground.http.get(f"{ground.origin}{game_of(page)}/turns"),
    ]
    for each in pages:
        assert each.status_code == 200
        assert "&lt;script&gt;" in each.text
        assert "<img" not in each.text
        assert "{{ 7*7 }}" in each.text
        assert not re.search('<script>|onerror="|[\u202e\u2066]', each.text.replace("&#34;", ""))
        assert "default-src 'none'; script-src 'self'" in each.headers["content-security-policy"]
        assert "unsafe" not in each.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("GET", {"Host": "localhost:{port}"}, 200),
        ("GET", {"Host": "evil.example:{port}"}, 403),
        ("GET", {"Host": "127.0.0.1"}, 403),
        ("GET", {"Host": "127.0.0.1:{port}.evil.example"}, 403),
        ("POST", {"Origin": "{origin}"}, 422),
        ("POST", {}, 403),
        ("POST", {"Origin": "null"}, 403),
        ("POST", {"Origin": "https://evil.example"}, 403),
        ("POST", {"Origin": "http://127.0.0.1:1"}, 403),
        ("POST", {"Origin": "http://localhost:{port}"}, 403),
        ("DELETE", {}, 403),
    ],
)
def test_only_its_own_pages_drive_it(method, headers, status, ground):
    told = {
        name: value.format(port=ground.origin.rpartition(":")[2], origin=ground.origin)
        for name, value in headers.items()
    }
    address = f"{ground.address}environments/sokoban"
    with httpx.Client(timeout=60) as browser:
        data = {"split": "train", "level_seed": "x"} if method == "POST" else None
        answer = browser.request(method, address, headers=told, data=data)
    assert answer.status_code == status
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_without_the_secret_there_is_nothing(ground):
    with httpx.Client(headers={"Origin": ground.origin}, timeout=60) as browser:
        secret = ground.address.split("/")[3]
        for path in ("/", "/static/play.js", f"/{secret[:-1]}/", f"/{secret}x/", "/%C3%A9/", "//"):
            answer = browser.get(ground.origin + path)
            assert answer.status_code == 404, path
            assert secret not in answer.text
        assert browser.post(f"{ground.origin}/environments/sokoban", data={"split": "train"}).status_code == 404


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"split":"train"}', "application/json"),
        (b"split=train", "text/plain"),
        (b"split=%ff", "application/x-www-form-urlencoded"),
        (b"a=" + b"x" * (1 << 20), "application/x-www-form-urlencoded"),
        (b"&".join([b"a=1"] * 2_000), "application/x-www-form-urlencoded"),
    ],
)
def test_what_is_no_form_is_refused(content, kind, ground):
    address = f"{ground.address}environments/sokoban"
    answer = ground.http.post(address, content=content, headers={"Content-Type": kind})
    assert answer.status_code == 400


def test_what_is_not_there_is_told(ground):
    assert ground.http.get(f"{ground.address}games/none").status_code == 404
    assert ground.http.get(f"{ground.address}none").status_code == 404
    assert "There is no such page" in ground.http.get(f"{ground.address}none").text
    page = ground.http.get(f"{ground.address}environments/sokobam")
    assert page.status_code == 502
    assert "sokoban" in page.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "/none/kept.jsonl"], "/none/kept.jsonl cannot be written: No such file or directory"),
        (["--port", "{taken}"], "cannot be listened on"),
    ],
)
def test_what_cannot_be_started_is_one_line(arguments, message, played_server, ground, capsys, monkeypatch):
    given = [each.format(taken=ground.origin.rpartition(":")[2]) for each in arguments]
    monkeypatch.setattr(sys, "argv", ["leaderboard", "play", "--server", played_server, "--no-open", *given])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
