"""The viewer over HTTP: lists, filters, episodes, pairs, refusals, and text that means harm."""

import re

import pytest
from sample_episodes import HOSTILE, LAKE, training_episode, training_turn, write_lines
from starlette.testclient import TestClient

from turngym_leaderboard.pages.trajectory_file import TrajectoryFile
from turngym_leaderboard.pages.viewer import viewer


def browse(*paths):
    files = [TrajectoryFile(path, key) for path, key in zip(paths, "ab", strict=False)]
    return TestClient(viewer(files), base_url="http://127.0.0.1", follow_redirects=True)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    episodes = [
        training_episode(n, turns=1 + n % 4, success=[True, False, None][n % 3], seed=n // 2) for n in range(250)
    ]
    lake = training_episode(9, environment="frozen_lake", seed=3) | {"turns": [training_turn(LAKE)]}
    return browse(
        write_lines(folder / "one/trajectories.jsonl", *episodes), write_lines(folder / "other/t.jsonl", lake)
    )


def numbers(page):
    return [int(found) for found in re.findall(r'aria-label="Choose episode (\d+)"', page.text)]


def test_a_list_has_pages(client) -> None:
    first = client.get("/")
    assert numbers(first) == list(range(1, 101))
    assert "250 episodes: 84 solved, 83 failed, 83 unknown" in first.text
    assert "page 1 of 3" in first.text
    assert numbers(client.get("/?page=3")) == list(range(201, 251))
    assert numbers(client.get("/?page=99")) == list(range(201, 251))


@pytest.mark.parametrize(
    ("query", "lets"),
    [
        ("verdict=solved", lambda n: n % 3 == 0),
        ("verdict=unknown&least=4", lambda n: n % 3 == 2 and n % 4 == 3),
        ("most=2&agent=iteration+8", lambda n: n == 8),
        ("least=2&most=2", lambda n: n % 4 == 1),
        ("environment=sokoban&verdict=failed&most=1", lambda n: n % 3 == 1 and n % 4 == 0),
        ("environment=nowhere", lambda n: False),
    ],
)
def test_a_list_is_filtered(client, query, lets) -> None:
    wanted = [n + 1 for n in range(250) if lets(n)]
    page = client.get(f"/?{query}")
    assert numbers(page) == wanted[:100]
    assert f"{len(wanted)} of 250 episodes" in page.text


def test_pages_keep_the_filter(client) -> None:
    following = re.search(r'rel="next" href="([^"]+)"', client.get("/?least=2&list=a").text)
    assert following
    address = following[1].replace("&amp;", "&")
    assert numbers(client.get(f"/{address}"))[:2] == [135, 136]


def test_what_a_filter_cannot_mean_is_told(client) -> None:
    page = client.get("/?least=some&verdict=maybe&most=" + "9" * 5_000)
    assert page.status_code == 200
    assert page.text.count('role="note"') == 3
    assert "turns from &#39;some&#39;: expected a whole number" in page.text
    assert len(numbers(page)) == 100


def test_an_episode_is_shown_turn_by_turn(client) -> None:
    page = client.get("/episodes/a-4")
    assert page.text.count('class="frame') == 5
    assert page.text.count('class="board"') == 5
    assert "Turn 4 <span" in page.text
    assert "push right" in page.text
    assert "iteration 3" in page.text


def test_two_episodes_are_shown_side_by_side_also_of_two_files(client) -> None:
    page = client.get("/beside?e=a-4&e=b-1")
    assert page.url.path == "/episodes/a-4/b-1"
    assert page.text.count('class="frame') == 5
    assert page.text.count("This episode was over before.") == 3
    assert 'class="ice"' in page.text
    assert client.get("/beside?e=a-4&e=7").url.path == "/episodes/a-4/a-7"


def test_others_of_the_same_level_are_offered(client) -> None:
    assert 'href="/episodes/a-3/a-4"' in client.get("/episodes/a-3").text
    assert 'href="/episodes/a-3/a-5"' not in client.get("/episodes/a-3").text


@pytest.mark.parametrize(
    "path",
    [
        "/beside",
        "/beside?e=a-1",
        "/episodes/a-1?page=x",
        "/beside?e=a-1&e=a-2&e=a-3",
        "/beside?e=a-1&e=c-2",
        "/beside?e=a-1&e=x",
        "/episodes/a-0",
        "/episodes/a-251",
        "/episodes/a-9999999999999",
        "/episodes/a-%F0%9F%98%80",
        "/episodes/a-1/b-2",
        "/episodes/..%2f..%2fetc%2fpasswd",
        "/static/../viewer.py",
        "/static/%2e%2e/viewer.py",
        "/?list=z",
        "/nowhere",
    ],
)
def test_what_is_not_there_is_told_in_a_page(client, path) -> None:
    page = client.get(path)
    assert page.status_code == 404
    if not path.startswith("/static"):
        assert "Back to the start" in page.text
    assert "root:" not in page.text


def test_only_names_of_the_loopback_are_answered(client) -> None:
    assert client.get("/", headers={"host": "rebound.example"}).status_code == 400


def test_nothing_can_be_changed_through_it(client) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/").status_code == 405


@pytest.mark.parametrize("path", ["/", "/episodes/a-1", "/episodes/a-1/a-2", "/nowhere", "/beside?e=a-1"])
def test_every_page_forbids_what_it_does_not_need(client, path) -> None:
    page = client.get(path)
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    # Nothing within a page runs or is fetched from elsewhere.
    assert not re.search(r"""<script(?! src="/static/)|\son\w+=|style=|(?:src|href|action)="(?!/|\?|\#)""", page.text)


@pytest.mark.parametrize("text", [HOSTILE, "</script>", "\u2028\u2029\ud800", "<!--", "]]>", "&#x3c;script&#x3e;"])
def test_hostile_text_is_shown_and_does_nothing(tmp_path, text) -> None:
    turn = training_turn(
        text, response=text, reasoning=text, actions=(text, text * 3), valid_format=False, actions_executed=1
    )
    episode = training_episode() | {
        "environment": text,
        "digest": text,
        "turns": [turn],
        "last_observation": text,
    }
    line = write_lines(tmp_path / "<b>'\"&x" / "t.jsonl", episode)
    # A JSON file may name half of a pair of surrogates by its escape.
    line.write_bytes(line.read_bytes().replace("\ud800".encode(errors="surrogatepass"), b"\\ud800"))
    client = browse(line)
    for path in ("/", "/episodes/a-1", "/episodes/a-1/a-1", f"/?agent={'%3Cscript%3E'}"):
        page = client.get(path).text
        assert "<script>document" not in page
        assert "<img" not in page
        assert "<b>" not in page
        assert not re.search(r"[\x00\x1b\u202e\u2028\ud800]", page)
        assert "49" not in page or "{{ 7 * 7 }}" in page


def test_lines_of_a_megabyte_are_cut_on_the_page(tmp_path) -> None:
    turn = training_turn("o" * 1_000_000, reasoning="r" * 1_000_000, actions=("a" * 1_000_000,) * 3)
    client = browse(write_lines(tmp_path / "t.jsonl", training_episode() | {"turns": [turn] * 3}))
    page = client.get("/episodes/a-1")
    assert len(page.content) < 400_000
    assert "… (980,000 more characters)" in page.text


def test_a_long_episode_has_pages(tmp_path) -> None:
    client = browse(write_lines(tmp_path / "t.jsonl", training_episode(turns=250)))
    assert client.get("/episodes/a-1").text.count('class="frame') == 100
    last = client.get("/episodes/a-1?page=3")
    assert last.text.count('class="frame') == 51
    assert 'data-name="End"' in last.text
    assert 'href="?page=2"' in last.text


def test_what_is_added_to_a_file_is_there_at_the_next_look(tmp_path) -> None:
    path = write_lines(tmp_path / "t.jsonl", training_episode(1), training_episode(2), cut=3)
    client = browse(path)
    page = client.get("/")
    assert numbers(page) == [1]
    assert "The last line is not whole" in page.text
    write_lines(path, training_episode(1), training_episode(2))
    assert numbers(client.get("/")) == [1, 2]


def test_agents_that_are_too_many_to_choose_from_are_typed(tmp_path) -> None:
    episodes = [training_episode(n, turns=0) for n in range(1_001)]
    client = browse(write_lines(tmp_path / "t.jsonl", *episodes))
    page = client.get("/?agent=iteration+700")
    assert numbers(page) == [701]
    assert '<input name="agent" size="14" placeholder="iteration 700" value="iteration 700">' in page.text
    assert "<th>Agent</th>" in page.text


def test_a_list_without_episodes_says_why(tmp_path) -> None:
    assert "There is no episode in it yet." in browse(write_lines(tmp_path / "t.jsonl")).get("/").text
