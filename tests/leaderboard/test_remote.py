"""Agents that play through a board's service: over real connections, against a real environment server."""

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess
from service_in_thread import serving
from small_boards import SECRET, dealt_board, definition, everything, play_out
from sqlalchemy import event, update

from turngym.sealed import read_seal_key
from turngym_client import connect
from turngym_leaderboard.agents import Reply
from turngym_leaderboard.agents.scripted import RandomAgent
from turngym_leaderboard.board_record import board_records
from turngym_leaderboard.client import BoardClient, BoardError
from turngym_leaderboard.dealing import deal_board
from turngym_leaderboard.endpoints import RegisteredEndpoint
from turngym_leaderboard.protocol import Selection
from turngym_leaderboard.remote.keeper import kept
from turngym_leaderboard.remote.proxy import Proxy, Times
from turngym_leaderboard.runner import play
from turngym_leaderboard.service.messages import NewFile, NewSubmission
from turngym_leaderboard.store import WrongState, boards, open_store, owners, remote, submissions, values
from turngym_leaderboard.store.models import EnvironmentRow, RemoteEpisodeRow, SubmissionRow
from turngym_leaderboard.store.values import Kind, Role, State, Visibility
from turngym_leaderboard.verify import verify

LAKE = {"id": "frozen_lake", "instances": 6, "attempts": 2, "showcase": 1}
SEALED = {"sealed": True, "batch": 4, "environments": [LAKE]}
EPISODES = 7


@pytest.fixture(scope="module")
def client(server):
    with connect(server, patience=3.0, failover=0.5) as connected:
        yield connected


@pytest.fixture
def board(store, client):
    return dealt_board(store, client, **SEALED)


@contextmanager
def offered(store, client, *, seal_key=None):
    """A service that plays remote agents, and somebody's connection to it."""
    proxy = Proxy(store, client, seal_key=seal_key, times=Times(turn=timedelta(seconds=60)))
    token = token_of(store, "ann")
    with kept(proxy, every=0.1), serving(store, proxy=proxy) as address, BoardClient(address, token, patience=5) as ann:
        yield ann


def token_of(store, name):
    known = [each for each in owners.every(store) if each.name == name]
    return owners.add_token(store, known[0] if known else owners.create(store, name), Role.SUBMIT)


def lasting(dealt):
    """An episode of those dealt, and an action that it outlasts wherever the ice leads, since its noise is sealed."""
    around = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
    ways = list(around)
    for episode in dealt:
        rows = episode.observation.split("\n")
        y, x = next((y, row.index("P")) for y, row in enumerate(rows) if "P" in row)

        def ends(way, rows=rows, y=y, x=x):
            down, right = around[way]
            below, beside = min(max(y + down, 0), len(rows) - 1), min(max(x + right, 0), len(rows) - 1)
            return rows[below][beside] in "OG"

        for place, action in enumerate(ways):
            if not any(ends(ways[(place + turned) % 4]) for turned in (-1, 0, 1)):
                return episode, [action]
    raise AssertionError("every action may end every episode")


def towards_the_goal(lake):
    """Two steps, whatever lies between."""
    rows = lake.split("\n")
    at, goal = (next((y, row.index(mark)) for y, row in enumerate(rows) if mark in row) for mark in "PG")
    down, right = goal[0] - at[0], goal[1] - at[1]
    return [*(["Down"] * down or ["Up"] * -down), *(["Right"] * right or ["Left"] * -right)][:2]


def walk(episodes):
    return [towards_the_goal(episode.observation) for episode in episodes]


class Walker(RandomAgent):
    """The same, as an agent that a worker plays."""

    def act(self, views):
        paths = [towards_the_goal(view.transition.observation) for view in views]
        return [Reply(text="||".join(path), reasoning="", actions=tuple(path)) for path in paths]


def episodes_of(store, board, name="mine"):
    """(showcase, record, trajectory) of a submission."""
    return [(showcase, record, trajectory) for _, showcase, record, trajectory in everything(store, board)[name][1]]


def wait_until(true, within=30):
    ends = time.monotonic() + within
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_what_is_played_through_the_service_is_what_a_worker_would_have_played(store, board, client):
    with offered(store, client) as ann:
        mine = ann.begin_remote(board.slug, name="mine", visibility=Visibility.PUBLIC)
        assert (mine.kind, mine.state, mine.total) == (Kind.REMOTE, State.RUNNING, EPISODES)
        told = []
        played = ann.play_remote(mine.id, walk, at_once=3, progress=told.append)
        assert (played.state, played.episodes) == (State.QUEUED, EPISODES)
        assert told[0] == EPISODES
        assert told == sorted(told, reverse=True)
        play_out(store, client)
        assert ann.status(mine.id).state is State.SCORED
        [result] = ann.results(mine.id)
        assert result.statistics.episodes == 6
        [row] = [row for row in ann.rows(board.slug) if row.submission.id == mine.id]
        assert row.submission.kind is Kind.REMOTE
    [environment] = board.environments
    protocol = environment.definition.protocol(SECRET, version=environment.version)
    deal = boards.deal(store, environment.id)
    shown = Selection(deal.showcase, 0, "", 0, "{}", deal.scored.limits)
    alone = [
        *play(client, protocol, deal.scored, Walker(), only={(each.draw, 0) for each in deal.scored.instances}),
        *play(client, protocol, shown, Walker(), only=set_of(deal)),
    ]
    found = episodes_of(store, board)
    by_place = {(record.draw, record.attempt): (record, trajectory.turns) for _, record, trajectory in found}
    assert by_place == {(each.record.draw, each.record.attempt): (each.record, each.turns) for each in alone}
    assert {record.success for _, record, _ in found} == {True, False}
    [written] = board_records(store, board, submissions.find(store, mine.id))
    assert verify(client, written.record, trajectories=list(written.trajectories())) == []


def set_of(deal):
    return {(instance.draw, 0) for instance in deal.showcase}


def test_an_agent_is_told_what_it_reads_and_nothing_else(tmp_path, client):
    with open_store(tmp_path) as store, offered(store, client) as ann:
        board = dealt_board(store, client, **SEALED)
        mine = ann.begin_remote(board.slug, name="mine")
        raw = httpx.Client(base_url=ann._http.base_url, headers=ann._http.headers)
        with raw:
            dealt = raw.post(f"/api/v1/submissions/{mine.id}/play", json={"episodes": 4})
            [first, *_] = dealt.json()["episodes"]
            assert sorted(dealt.json()) == ["episodes", "left"]
            assert sorted(first) == [
                "action_separator",
                "due",
                "environment",
                "form",
                "id",
                "instructions",
                "max_actions_per_turn",
                "observation",
                "turn",
                "turns",
            ]
            lone = b'{"turn": 0, "text": "\\ud800"}'
            told = {"Content-Type": "application/json"}
            refused = raw.post(f"/api/v1/submissions/{mine.id}/play/{first['id']}", content=lone, headers=told)
            assert refused.status_code == 422
            text = "<think>why not</think><answer>Down||Right</answer>"
            step = raw.post(f"/api/v1/submissions/{mine.id}/play/{first['id']}", json={"turn": 0, "text": text})
            assert sorted(step.json()) == ["done", "due", "fault", "observation", "turn"]
            read = raw.get(f"/api/v1/submissions/{mine.id}/play/{first['id']}").json()
            assert read["turns"] == [{"observation": first["observation"], "text": text}]
            assert (read["turn"], read["observation"]) == (1, step.json()["observation"])
            assert "<answer>action || action</answer> with at most 5 actions" in read["form"]
        deal = boards.deal(store, board.environments[0].id)
        hidden = [
            str(number)
            for instance in deal.scored.instances + deal.showcase
            for number in (instance.level_seed, instance.instance_id, instance.world_id)
        ]
        everything_told = dealt.text + step.text + str(read)
        assert not [secret for secret in hidden if secret in everything_told]
        with pytest.raises(BoardError, match=f"the answer to turn 1 of episode {first['id']} cannot be sent: text"):
            ann.answer(mine.id, first["id"], 1, "x" * 70_000)


def test_the_agent_of_the_readme_plays(tmp_path, client):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"<!-- test: remote -->\n```python\n(.*?)```", readme, re.DOTALL)
    with open_store(tmp_path) as store, offered(store, client) as ann:
        board = dealt_board(store, client, **SEALED)
        code = code.replace("http://127.0.0.1:8000", ann._url).replace("lakes-2026-winter", board.slug)
        exec(code, {"token": token_of(store, "ann")})
        [mine] = ann.submissions()
        assert (mine.name, mine.state, mine.episodes) == ("mine", State.QUEUED, EPISODES)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (lambda seen: [["Down"], ["Down"]], "the agent gave 2 answers to 3 episodes"),
        (lambda seen: "Down", "the agent gave a str to 3 episodes"),
        (lambda seen: None, "the agent gave None to 3 episodes"),
        (lambda seen: [["Down"], ["Down"], None], "the answer to turn 0 of episode LAST is None; expected a text"),
        (lambda seen: [["Down"], ["Down"], {"Down"}], "the answer to turn 0 of episode LAST is a set; expected a text"),
        (lambda seen: [["Down"], ["Down"], [1]], "the answer to turn 0 of episode LAST cannot be sent: actions.0"),
        (lambda seen: [["Down"], ["Down"], []], "the answer to turn 0 of episode LAST cannot be sent: actions"),
        (lambda seen: [["Down"], ["Down"], b"Down"], "the answer to turn 0 of episode LAST is a bytes"),
    ],
)
def test_of_answers_that_are_none_nothing_is_sent(begun, answers, told):
    ann, mine = begun
    with pytest.raises(BoardError) as refused:
        ann.play_remote(mine.id, answers, at_once=3)
    going = ann.ask(mine.id, 3).episodes
    assert told.replace("LAST", going[-1].id) in str(refused.value)
    assert [each.turn for each in going] == [0, 0, 0]


@pytest.fixture(scope="module")
def begun(client, tmp_path_factory):
    """Somebody's connection, and a submission begun through it."""
    with open_store(tmp_path_factory.mktemp("begun")) as store, offered(store, client) as ann:
        yield ann, ann.begin_remote(dealt_board(store, client, **SEALED).slug, name="mine")


def test_the_http_of_the_readme_plays(tmp_path, client):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [told] = re.findall(r"<!-- test: remote http -->\n```console\n(.*?)```", readme, re.DOTALL)
    setting, key, *calls = [line.removeprefix("$ ") for line in told.splitlines()]
    with open_store(tmp_path) as store, offered(store, client) as ann:
        board = dealt_board(store, client, **SEALED)
        (tmp_path / "alice.token").write_text(token_of(store, "ann") + "\n")
        names = {"http://127.0.0.1:8000": ann._url, "lakes-2026-winter": board.slug}

        def call(line):
            for name, now in names.items():
                line = line.replace(name, now)
            script = f"{setting.replace('http://127.0.0.1:8000', ann._url)}\n{key}\n{line}"
            ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
            return json.loads(ran.stdout)

        begin, ask, answer = calls
        names["ID"] = call(begin)["id"]
        dealt = call(ask)
        assert (len(dealt["episodes"]), dealt["left"]) == (board.definition.batch, EPISODES)
        names["EPISODE"] = dealt["episodes"][0]["id"]
        assert call(answer)["turn"] == 1
        path, body = f"/api/v1/boards/{board.slug}/remote", {"name": "mine"}
        for headers, says in (
            ({}, "it is missing; expected 22 to 64"),
            ({"Idempotency-Key": "1"}, "it cannot be used"),
        ):
            refused = ann._http.post(path, json=body, headers=headers)
            assert (refused.status_code, says in refused.text) == (422, True)
        refused = ann._http.post(path, json={"nmae": "mine"}, headers={"Idempotency-Key": "k" * 22})
        assert "body.nmae: there is no such key" in refused.text


def test_the_order_of_dealing_tells_nothing_of_the_draws(tmp_path, client):
    """Neither attempts of one instance stand together, nor is the showcase first or last, over some submissions."""
    with open_store(tmp_path) as store, offered(store, client) as ann:
        board = dealt_board(store, client, **SEALED)
        orders = []
        for k in range(3):
            with store.writing() as session:
                session.connection().exec_driver_sql("UPDATE submissions SET queued = NULL WHERE kind = 'remote'")
            mine = ann.begin_remote(board.slug, name=f"mine {k}")
            with store.reading() as session:
                rows = session.connection().exec_driver_sql(
                    "SELECT draw, attempt FROM remote_episodes JOIN submissions s ON s.id = submission_id "
                    f"WHERE s.public_id = '{mine.id}' ORDER BY place"
                )
                orders.append([tuple(row) for row in rows])
    assert len({frozenset(order) for order in orders}) == 1
    assert len({tuple(order) for order in orders}) == 3


def test_dropping_asking_twice_and_running_out_of_time_gain_nothing(tmp_path, client):
    """An agent that leaves its losing episodes comes to no better score than one that loses them."""
    numbers = {}
    many = SEALED | {"environments": [LAKE | {"instances": 15}]}
    for name, play_all in (("honest", honest), ("sly", sly)):
        with open_store(tmp_path / name) as store, offered(store, client) as ann:
            board = dealt_board(store, client, **many)
            mine = ann.begin_remote(board.slug, name="mine")
            play_all(ann, mine.id, store)
            assert ann.status(mine.id).state is State.QUEUED
            play_out(store, client)
            assert ann.status(mine.id).state is State.SCORED
            found = [record for _, record, _ in episodes_of(store, board)]
            assert len({(record.draw, record.attempt) for record in found}) == len(found) == 16
            numbers[name] = ann.results(mine.id)[0].statistics
            with pytest.raises(BoardError, match="1 remote agents of an owner are scored in a season") as refused:
                ann.begin_remote(board.slug, name="again")
            assert refused.value.status == 403
    left = [record for record in found if record.outcome == "agent_fault"]
    assert {record.fault for record in left} == {"deadline: turn 2 was not answered within 60 s"}
    assert not any(record.success for record in left)
    assert numbers["sly"].agent_faults > 0
    assert numbers["honest"].success.rate > 0
    assert numbers["sly"].success.rate <= numbers["honest"].success.rate


def honest(ann, id, store):
    ann.play_remote(id, walk, at_once=4)


def sly(ann, id, store):
    """Leaves every episode that has not ended after two turns, asks again and again, and would take answers back."""
    seen = set()
    while (dealt := ann.ask(id, 4)).left:
        assert [each.id for each in ann.ask(id, 4).episodes] == [each.id for each in dealt.episodes]
        dropped = []
        for episode in dealt.episodes:
            assert episode.id not in seen
            seen.add(episode.id)
            observation = episode.observation
            for turn in range(2):
                step = ann.answer(id, episode.id, turn, towards_the_goal(observation))
                observation = step.observation
                with pytest.raises(BoardError, match="was answered already, otherwise"):
                    ann.answer(id, episode.id, turn, 3 * ["Left"])
                if step.done:
                    break
            else:
                dropped.append(episode)
        run_out_of_time(store)
        for episode in dropped:
            with pytest.raises(BoardError, match="the episode is over: deadline: turn 2 was not answered"):
                ann.answer(id, episode.id, 2, ["Left"])
    assert len(seen) == 16


def test_who_has_seen_the_levels_submits_nothing_further(tmp_path, client):
    content = b"{}"
    announced = values.SubmissionFile(
        name="config.json", size=2, sha256=hashlib.sha256(content).hexdigest(), received=0
    )
    endpoints = {"small": RegisteredEndpoint(url="https://api.example.com/v1", model="small-1", owners=("ann", "bob"))}
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, submissions_per_owner=9, **SEALED)
        proxy = Proxy(store, client)
        with (
            serving(store, proxy=proxy, endpoints=endpoints) as address,
            BoardClient(address, token_of(store, "ann")) as ann,
            BoardClient(address, token_of(store, "bob")) as bob,
        ):
            [owner] = [each for each in owners.every(store) if each.name == "ann"]
            made = {
                name: submissions.create(store, board, owner, name=name, kind=Kind.CHECKPOINT, files=[announced])
                for name in ("whole", "partly")
            }
            before = ann.submit_endpoint("small", board.slug, name="before")
            mine = ann.begin_remote(board.slug, name="mine")

            def send(name):
                url = f"/api/v1/submissions/{made[name].public_id}/files/config.json"
                return ann._http.patch(url, content=content, headers={"Upload-Offset": "0"})

            assert send("whole").status_code == 200
            assert len(ann.ask(mine.id, 1_000).episodes) == board.definition.batch < EPISODES
            ann.withdraw(mine.id)
            refused = send("partly")
            assert (refused.status_code, "so that you know its levels" in refused.text) == (403, True)
            assert submissions.files(store, made["partly"].public_id)[0].received == 0
            names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
            checkpoint = NewSubmission(
                name="after", files=tuple(NewFile(name=name, size=2, sha256=announced.sha256) for name in names)
            )
            for submit in (
                lambda: ann.submit_endpoint("small", board.slug, name="after"),
                lambda: ann._begin(f"/boards/{board.slug}/submissions", checkpoint),
            ):
                with pytest.raises(BoardError, match=f"your remote agent {mine.id} was dealt episodes") as told:
                    submit()
                assert told.value.status == 403
            assert bob.submit_endpoint("small", board.slug, name="another").state is State.QUEUED
            assert ann.status(before.id).state is State.QUEUED
            submissions.set_state(store, made["whole"].public_id, State.VALIDATED)
            assert submissions.set_state(store, made["whole"].public_id, State.QUEUED).state is State.QUEUED


def run_out_of_time(store, now=datetime(2000, 1, 1, tzinfo=UTC)):
    """Of every turn that is waited for."""
    with store.writing() as session:
        waited_for = RemoteEpisodeRow.due.is_not(None)
        session.execute(update(RemoteEpisodeRow).where(waited_for).values(due=now))


def test_an_agent_that_asks_for_nothing_more_has_failed_in_the_rest(tmp_path, client):
    with open_store(tmp_path) as store, offered(store, client) as ann:
        board = dealt_board(store, client, **SEALED)
        mine = ann.begin_remote(board.slug, name="mine")
        with store.writing() as session:
            remotes = SubmissionRow.kind == Kind.REMOTE
            session.execute(update(SubmissionRow).where(remotes).values(changed=datetime(2000, 1, 1, tzinfo=UTC)))
        wait_until(lambda: ann.status(mine.id).state is State.QUEUED)
        play_out(store, client)
        assert ann.results(mine.id)[0].statistics.success.rate == 0.0
        found = [record for _, record, _ in episodes_of(store, board)]
        assert {(record.outcome, record.fault) for record in found} == {
            ("agent_fault", "deadline: it was never asked for")
        }
        assert all(record.digest for record in found)


def test_a_board_whose_servers_are_away_holds_up_no_other(tmp_path, client):
    with open_store(tmp_path) as store, offered(store, client) as ann:
        changed, other = (dealt_board(store, client, name, **SEALED) for name in ("changed", "other"))
        mine = {board.slug: ann.begin_remote(board.slug, name="mine") for board in (changed, other)}
        with store.writing() as session:
            of_it = EnvironmentRow.board_id == changed.id
            session.execute(update(EnvironmentRow).where(of_it).values(version="0"))
        with (
            BoardClient(ann._url, token_of(store, "ann"), patience=0) as hasty,
            pytest.raises(BoardError, match="no environment server can play this now"),
        ):
            hasty.ask(mine[changed.slug].id)
        with store.writing() as session:
            remotes = SubmissionRow.kind == Kind.REMOTE
            session.execute(update(SubmissionRow).where(remotes).values(changed=datetime(2000, 1, 1, tzinfo=UTC)))
        wait_until(lambda: ann.status(mine[other.slug].id).state is State.QUEUED)
        assert ann.status(mine[changed.slug].id).state is State.RUNNING


def test_a_turn_is_played_once_whoever_sends_it_how_often(store, board, client):
    with offered(store, client) as ann:
        mine = ann.begin_remote(board.slug, name="mine")
        dealt = ann.ask(mine.id, 4).episodes
        episode, action = lasting(dealt)
        other = next(each for each in dealt if each.id != episode.id)
        told = []

        def send():
            with BoardClient(str(ann._url), ann._http.headers["authorization"].split()[1]) as another:
                told.append(another.answer(mine.id, episode.id, 0, action))

        threads = [threading.Thread(target=send) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(told) == 6
        assert len({each.model_dump_json() for each in told}) == 1
        [again] = [each for each in ann.ask(mine.id).episodes if each.id == episode.id]
        assert (again.turn, again.observation) == (1, told[0].observation)
        for turn in (2, 5):
            with pytest.raises(BoardError, match=f"the episode is at turn 1, not at turn {turn}") as refused:
                ann.answer(mine.id, episode.id, turn, ["Down"])
            assert refused.value.status == 409
        second = ann.answer(mine.id, episode.id, 1, ["Down"])
        first = ann.answer(mine.id, episode.id, 0, action)
        assert (first.observation, first.done, second.turn) == (told[0].observation, told[0].done, 2)
        assert ann.withdraw(mine.id).state is State.FAILED
        for call in (lambda: ann.answer(mine.id, other.id, 0, ["Down"]), lambda: ann.ask(mine.id)):
            with pytest.raises(BoardError, match="is failed: withdrawn; it is not played now"):
                call()
        with pytest.raises(WrongState, match="was played by its owner"):
            submissions.set_state(store, mine.id, State.QUEUED)


def test_of_several_begun_at_once_those_too_many_leave_nothing_behind(store, board, client):
    with offered(store, client) as ann, ThreadPoolExecutor(6) as senders:

        def begin(k):
            body, key = {"name": "mine"}, {"Idempotency-Key": f"{k}" * 22}
            return ann._http.post(f"/api/v1/boards/{board.slug}/remote", json=body, headers=key).status_code

        assert sorted(senders.map(begin, range(6))) == [201, *5 * [403]]
        [mine] = ann.submissions()
        assert (mine.state, mine.total) == (State.RUNNING, EPISODES)


def test_only_its_owner_plays_a_submission_and_only_where_boards_take_it(tmp_path, client):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SEALED)
        opened = dealt_board(store, client, "open")
        none = dealt_board(store, client, "none", remote_submissions_per_owner=0, **SEALED)
        with offered(store, client) as ann:
            mine = ann.begin_remote(board.slug, name="mine")
            [episode] = ann.ask(mine.id).episodes
            with BoardClient(ann._url, token_of(store, "bob")) as bob:
                for call in (lambda: bob.ask(mine.id), lambda: bob.answer(mine.id, episode.id, 0, ["Up"])):
                    with pytest.raises(BoardError, match="there is no submission"):
                        call()
                ann.set_visibility(mine.id, Visibility.PUBLIC)
                with pytest.raises(BoardError, match="is not yours"):
                    bob.ask(mine.id)
                theirs = bob.begin_remote(board.slug, name="theirs")
                with pytest.raises(BoardError, match="was dealt no episode"):
                    bob.answer(theirs.id, episode.id, 0, ["Up"])
            allowed = {each.slug: each.remote_submissions_per_owner for each in ann.boards()}
            assert allowed == {board.slug: 1, opened.slug: 0, none.slug: 0}
            with BoardClient(ann._url) as nobody, pytest.raises(BoardError, match="this needs a token"):
                nobody.begin_remote(board.slug, name="x")
            with pytest.raises(BoardError, match="open-one is an open board: everybody can read how others"):
                ann.begin_remote(opened.slug, name="x")
            with pytest.raises(BoardError, match="0 remote agents of an owner"):
                ann.begin_remote(none.slug, name="x")
            assert len(ann.ask(mine.id, 1_000).episodes) == board.definition.batch
            for row in submissions.of_board(store, board):
                if row.kind is Kind.SCRIPTED:
                    submissions.set_state(store, row.public_id, State.FAILED)
            assert boards.close(store, board.slug).secret == str(SECRET)
            ended = ann.status(mine.id)
            assert ended.state is State.FAILED
            assert ended.reason.endswith("before its owner had played it to its end; 0 of 7 episodes were")
            with pytest.raises(BoardError, match="the season ended before its owner had played it"):
                ann.ask(mine.id)
        with (
            serving(store) as address,
            BoardClient(address, token_of(store, "ann")) as without,
            pytest.raises(BoardError, match="this service has no environment server"),
        ):
            without.ask(mine.id)


def test_environments_of_the_same_levels_are_dealt_once(tmp_path, client):
    greedy = {**LAKE, "label": "greedy", "greedy": True, "overall": False}
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SEALED | {"environments": [LAKE, greedy]})
        with offered(store, client) as ann:
            mine = ann.begin_remote(board.slug, name="mine")
            assert mine.total == EPISODES
            ann.play_remote(mine.id, walk, at_once=4)
            play_out(store, client)
            assert ann.status(mine.id).state is State.SCORED
            told = {result.environment: result.unavailable for result in ann.results(mine.id)}
            assert told["frozen_lake"] == ""
            assert told["greedy"] == "it plays the levels of frozen_lake, which a remote agent is dealt once"


def test_while_no_server_answers_no_time_runs_and_nothing_is_lost(tmp_path):
    with (
        ServerProcess("--env", "frozen_lake", "--splits", "held_out") as running,
        open_store(tmp_path) as store,
        connect(running.address) as patient,
        connect(running.address, deadline=2.0, patience=1.0, failover=0.2) as hasty,
        ExitStack() as stack,
    ):
        board = dealt_board(store, patient, **SEALED)
        with offered(store, hasty) as ann:
            impatient = stack.enter_context(BoardClient(ann._url, token_of(store, "ann"), patience=0))
            mine = ann.begin_remote(board.slug, name="mine")
            dealt = ann.ask(mine.id, 4).episodes
            episode, action = lasting(dealt)
            late = next(each for each in dealt if each.id != episode.id)
            first = ann.answer(mine.id, episode.id, 0, action)
            running.kill()
            with pytest.raises(BoardError, match="no environment server can play this now") as refused:
                impatient.answer(mine.id, episode.id, 1, ["Right"])
            assert refused.value.status == 503
            assert ann.answer(mine.id, episode.id, 0, action).observation == first.observation
            # The time of the others ends while no server could play them; one of them is answered then.
            run_out_of_time(store, now=datetime.now(UTC))
            with pytest.raises(BoardError, match="no environment server can play this now"):
                impatient.answer(mine.id, late.id, 0, ["Right"])
            run_out_of_time(store, now=datetime.now(UTC))
            running.start()
            step = ann.answer(mine.id, episode.id, 1, ["Right"])
            assert step.turn == 2
            ann.play_remote(mine.id, walk, at_once=4)
            found = [record for _, record, _ in episodes_of(store, board)]
            assert [(record.outcome, record.fault) for record in found] == EPISODES * [("played", "")]


SEVERAL = SEALED | {"batch": 24, "environments": [{"id": "frozen_lake", "instances": 23, "showcase": 1}]}
"""More at once than the service has players."""


@contextmanager
def halted(process):
    """Within the block a process stands still."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_an_answer_counts_from_when_it_arrives_however_many_wait_for_a_server(tmp_path):
    with (
        ServerProcess("--env", "frozen_lake", "--splits", "held_out") as running,
        open_store(tmp_path) as store,
        connect(running.address) as client,
    ):
        board = dealt_board(store, client, **SEVERAL)
        proxy = Proxy(store, client, times=Times(turn=timedelta(seconds=4)))
        names = ("ann", "bob")
        with (
            kept(proxy, every=0.1),
            serving(store, proxy=proxy) as address,
            BoardClient(address, token_of(store, "ann")) as ann,
            BoardClient(address, token_of(store, "bob")) as bob,
            ThreadPoolExecutor(32) as senders,
        ):
            mine = [each.begin_remote(board.slug, name=name).id for each, name in zip((ann, bob), names, strict=True)]
            dealt = [(ann, mine[0], each) for each in ann.ask(mine[0], 24).episodes]
            dealt += [(bob, mine[1], each) for each in bob.ask(mine[1], 4).episodes]
            with halted(running.process):
                sent = [
                    senders.submit(each.answer, number, episode.id, 0, ["Right"]) for each, number, episode in dealt
                ]
                time.sleep(8)
                assert not any(each.done() for each in sent)
            steps = [each.result() for each in sent]
            assert {(step.turn, step.fault) for step in steps} == {(1, "")}


class Slow:
    """Gives the first answer that comes back to whoever sent it after so many seconds."""

    def __init__(self, app, seconds):
        self.app, self.seconds, self.first = app, seconds, []

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send) if self.first else await self.app(scope, receive, self.later(scope, send))

    def later(self, scope, send):
        if not re.search("/play/[0-9a-f]+$", scope.get("path", "")):
            return send
        self.first.append(scope["path"])

        async def slowly(message):
            await asyncio.sleep(self.seconds)
            await send(message)

        return slowly


def test_what_is_played_at_once_goes_on_beside_an_answer_that_is_long_in_coming(tmp_path, client):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SEALED)
        proxy = Proxy(store, client, times=Times(turn=timedelta(seconds=4)))
        with (
            kept(proxy, every=0.1),
            serving(store, proxy=proxy, wrap=lambda app: Slow(app, 8)) as address,
            BoardClient(address, token_of(store, "ann")) as ann,
        ):
            mine = ann.begin_remote(board.slug, name="mine")
            ann.play_remote(mine.id, walk, at_once=4)
        found = [record for _, record, _ in episodes_of(store, board)]
        assert sum(record.outcome == "agent_fault" for record in found) <= 1  # The slow one's own next turn.


def test_whole_batches_outlast_a_server_that_is_away_for_longer_than_a_turn(tmp_path):
    with (
        ServerProcess("--env", "frozen_lake", "--splits", "held_out") as running,
        open_store(tmp_path) as store,
        connect(running.address, deadline=5.0, patience=2.0) as client,
    ):
        board = dealt_board(store, client, **SEVERAL)
        proxy = Proxy(store, client, times=Times(turn=timedelta(seconds=4)))
        with (
            kept(proxy, every=0.1),
            serving(store, proxy=proxy) as address,
            BoardClient(address, token_of(store, "ann")) as ann,
        ):
            mine = ann.begin_remote(board.slug, name="mine")
            asked = []

            def back():
                time.sleep(8)
                running.start()

            def agent(episodes):
                asked.append(len(episodes))
                if len(asked) == 2:
                    running.kill()
                    threading.Thread(target=back).start()
                return walk(episodes)

            assert ann.play_remote(mine.id, agent, at_once=20).state is State.QUEUED
        found = [record for _, record, _ in episodes_of(store, board)]
        assert {(record.outcome, record.fault) for record in found} == {("played", "")}


@pytest.mark.parametrize(
    ("stands_still", "fault"), [(False, "deadline: turn 0 was not answered within 60 s"), (True, "")]
)
def test_while_the_service_stands_still_no_time_runs(tmp_path, client, stands_still, fault):
    with open_store(tmp_path) as store:
        board = dealt_board(store, client, **SEALED)
        proxy = Proxy(store, client, times=Times(turn=timedelta(seconds=60), unseen=timedelta(seconds=1)))
        owner = owners.create(store, "ann")
        told = {"name": "mine", "visibility": Visibility.PRIVATE}
        mine = proxy.open(board, owner, public_id=submissions.new_public_id(), **told)
        [episode] = proxy.deal(mine, board, 1)
        run_out_of_time(store)
        if stands_still:
            time.sleep(1.2)
        proxy.look()
        proxy.sweep()
        assert remote.find(store, mine, episode.public_id).fault == fault


def test_what_the_database_fails_in_is_nobodys_failure(tmp_path, client, caplog):
    with (
        open_store(tmp_path) as store,
        serving(store, proxy=Proxy(store, client)) as address,
        BoardClient(address, token_of(store, "ann")) as ann,
        BoardClient(address, token_of(store, "ann"), patience=0) as hasty,
    ):
        board = dealt_board(store, client, **SEALED)
        mine = ann.begin_remote(board.slug, name="mine")
        episode, other = ann.ask(mine.id, 2).episodes
        pages = {"most": 1}

        def limit(connection, record, proxy):
            connection.execute(f"PRAGMA max_page_count = {pages['most']}").close()

        event.listen(store._writing, "checkout", limit)
        answer = "<answer>Right</answer>" + 60_000 * " "
        with pytest.raises(BoardError, match="the board's disk is full, which its operator has to mend") as refused:
            hasty.answer(mine.id, episode.id, 0, answer)
        assert refused.value.status == 503
        assert "disk is full" in caplog.text
        run_out_of_time(store)
        pages["most"] = 1 << 30
        assert [ann.answer(mine.id, each.id, 0, answer).turn for each in (episode, other)] == [1, 1]


FAULTY = {"id": "faulty", "split": "all", "instances": 3, "showcase": 0, "limits": {"max_turns": 0, "max_actions": 0}}
FAULTY["limits"]["max_actions_per_turn"] = 0


@pytest.fixture(scope="module")
def faulty():
    arguments = ("--env", "faulty:Faulty", "--splits", "all")
    with ServerProcess(*arguments, path=Path(__file__).parent) as running, connect(running.address) as connected:
        yield connected


@pytest.mark.parametrize(
    ("says", "outcome", "state", "told"),
    [
        ("win", "played", State.SCORED, ""),
        ("stumble", "played", State.SCORED, ""),
        ("crash", "environment_fault", State.SCORED, "the environment failed in this turn, each time"),
        ("shrug", "unresolved", State.INCOMPLETE, "counts neither as a success nor as a failure"),
        ("a \0 \u202e nul", "played", State.SCORED, ""),
    ],
)
def test_what_an_environment_does_is_told_as_for_every_agent(tmp_path, faulty, says, outcome, state, told):
    made = {"environments": [FAULTY], "batch": 4}
    with open_store(tmp_path) as store:
        # Nobody has counted its worlds, so that no sealed board would be dealt.
        deals = deal_board(faulty, definition(**made), SECRET)
        board = boards.create(store, definition(sealed=True, **made), SECRET, deals)
        with offered(store, faulty) as ann:
            mine = ann.begin_remote(board.slug, name="mine")
            [episode] = ann.ask(mine.id).episodes
            assert ann.answer(mine.id, episode.id, 0, ["wait"]).done is False
            step = ann.answer(mine.id, episode.id, 1, [says])
            assert told in step.fault
            assert step.done is (says != "a \0 \u202e nul")
            assert ann.answer(mine.id, episode.id, 1, [says]) == step
            ann.play_remote(mine.id, lambda episodes: [["wait"] if not e.turn else [says] for e in episodes], at_once=3)
            play_out(store, faulty)
            assert ann.status(mine.id).state is state
        found = [record for _, record, _ in episodes_of(store, board)]
        assert {record.outcome for record in found} == {outcome}
        assert {record.success for record in found} == {None if outcome == "unresolved" else says in ("win", "stumble")}


def test_an_answer_whose_submission_ends_while_it_is_played_is_refused(tmp_path, faulty):
    made = {"environments": [FAULTY], "batch": 4}
    with open_store(tmp_path) as store:
        deals = deal_board(faulty, definition(**made), SECRET)
        board = boards.create(store, definition(sealed=True, **made), SECRET, deals)
        with offered(store, faulty) as ann, BoardClient(ann._url, token_of(store, "ann")) as another:
            mine = ann.begin_remote(board.slug, name="mine")
            [episode] = ann.ask(mine.id).episodes

            def withdraw():
                wait_until(lambda: remote.find(store, submissions.find(store, mine.id), episode.id).turns)
                another.withdraw(mine.id)

            withdrawing = threading.Thread(target=withdraw)
            withdrawing.start()
            for _ in range(2):
                with pytest.raises(BoardError, match="is failed: withdrawn; it is not played now") as refused:
                    ann.answer(mine.id, episode.id, 0, ["linger"])
                assert refused.value.status == 409
            withdrawing.join()


def test_sealed_seeds_go_on_over_a_new_service_and_a_new_server(tmp_path):
    key = tmp_path / "board.key"
    subprocess.run([sys.executable, "-m", "turngym_server.access.new_seal_key", key], check=True)
    arguments = ("--env", "frozen_lake", "--splits", "held_out", "--seal-key", str(key))
    with (
        ServerProcess(*arguments) as running,
        open_store(tmp_path) as store,
        connect(running.address, deadline=2.0, patience=5.0, failover=0.2) as client,
    ):
        board = dealt_board(store, client, **SEALED)
        with offered(store, client, seal_key=read_seal_key(key)) as ann:
            mine = ann.begin_remote(board.slug, name="mine")
            [episode] = ann.ask(mine.id).episodes
            ann.answer(mine.id, episode.id, 0, ["Down"])
        running.kill()
        running.start()
        with offered(store, client, seal_key=read_seal_key(key)) as ann:
            ann.play_remote(mine.id, walk, at_once=4)
        found = [record for _, record, _ in episodes_of(store, board)]
        assert {record.outcome for record in found} == {"played"}
        with store.reading() as session:
            assert session.connection().exec_driver_sql("SELECT DISTINCT sealed FROM episodes").scalars().all() == [
                True
            ]


def test_a_service_that_is_killed_goes_on_at_the_same_turn(tmp_path, client, server):
    data = tmp_path / "data"
    with open_store(data) as store:
        board = dealt_board(store, client, **SEALED)
        token = token_of(store, "ann")

        @contextmanager
        def service():
            command = [sys.executable, "-m", "turngym_leaderboard.cli", "serve", data, "--no-worker", "--port", "0"]
            with subprocess.Popen([*command, "--server", server], stdout=subprocess.PIPE, text=True) as process:
                address = re.search(r"listening on (\S+)", process.stdout.readline())[1]
                try:
                    with BoardClient(address, token, patience=0) as ann:
                        yield ann, process
                finally:
                    process.kill()

        with service() as (ann, process):
            mine = ann.begin_remote(board.slug, name="mine")
            dealt = ann.ask(mine.id, 4).episodes
            one, action = lasting(dealt)
            other = next(each for each in dealt if each.id != one.id)
            step = ann.answer(mine.id, one.id, 0, action)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(BoardError, match="does not answer"):
                ann.answer(mine.id, one.id, 1, ["Right"])
        with service() as (ann, _):
            again = {each.id: each for each in ann.ask(mine.id, 4).episodes}
            assert again.keys() == {each.id for each in dealt}
            assert (again[one.id].turn, again[one.id].observation) == (1, step.observation)
            assert (again[other.id].turn, again[other.id].observation) == (0, other.observation)
            assert ann.play_remote(mine.id, walk, at_once=3).state is State.QUEUED
        found = [record for _, record, _ in episodes_of(store, board)]
        assert (len(found), {record.outcome for record in found}) == (EPISODES, {"played"})
