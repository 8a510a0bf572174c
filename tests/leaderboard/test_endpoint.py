"""Agents behind OpenAI-compatible servers: servers that misbehave, agents that cheat, and what is kept of them."""

import dataclasses
import email.utils
import json
import logging
import time
from collections.abc import Sequence

import pytest
from chat_server import Answer, ChatServer, drips, refuses, response, says
from sample_states import shown
from typer.testing import CliRunner

from turngym_client import Limits, connect
from turngym_leaderboard import record as records
from turngym_leaderboard.agents import AgentUnavailable, Fault, Reply, Seat, View
from turngym_leaderboard.agents.chat_completions import EndpointSettings, backoff, completions_url, read_key
from turngym_leaderboard.agents.endpoint import EndpointAgent, split_reasoning
from turngym_leaderboard.cli import app
from turngym_leaderboard.protocol import REFERENCE, Decoding, Protocol, select_instances
from turngym_leaderboard.runner import play

KEY = "sk-ThisIsTheKey0123"
UP = "<think>why not</think><answer>Up</answer>"


def seat(number: int = 0) -> Seat:
    return Seat("sokoban", "Push.", "||", 5, 1000 + number)


def view(number: int, turn: int = 0, observation: str = "a board") -> View:
    return View(seat=number, turn=turn, transition=shown(f"{observation} {number}"))


def agent(server: ChatServer, **settings: object) -> EndpointAgent:
    told = {"model": "m", "tries": 3, "timeout": 5, "patience": 30, **settings}
    return EndpointAgent(server.url, EndpointSettings.model_validate(told), name="mine")


def turns(player: EndpointAgent, seats: int = 1, turn: int = 0) -> list[Reply | Fault]:
    """One turn of so many new conversations."""
    player.start([seat(number) for number in range(seats)], Decoding())
    return list(player.act([view(number, turn) for number in range(seats)]))


def one(answer: Answer, **settings: object) -> Reply | Fault:
    """What a second conversation comes to, after a first that was answered."""
    with ChatServer(lambda asked: says(UP) if asked.number == 0 else answer(asked)) as server:
        player = agent(server, **settings)
        turns(player)
        return turns(player)[0]


def test_what_is_asked_and_what_is_answered(monkeypatch):
    monkeypatch.setenv("A_KEY", KEY + "\n")
    usage = {"prompt_tokens": 120, "completion_tokens": 30, "completion_tokens_details": {"reasoning_tokens": 20}}
    with ChatServer(lambda asked: says(UP, usage=usage)) as server:
        player = agent(server, key_env="A_KEY", max_tokens=99, price_in=2.0, price_out=10.0)
        player.start([seat()], Decoding(temperature=0.7))
        first = player.act([view(0)])
        second = player.act([view(0, 1, "another board")])
        player.start([seat()], Decoding(greedy=True))
        player.act([view(0)])
        other = EndpointAgent(server.url, EndpointSettings(model="m"), name="other")
        turns(other)
    reply = Reply(UP, "why not", ("Up",), tokens=30, tokens_in=120, cost=(120 * 2 + 30 * 10) / 1e6)
    assert first == second == [reply]
    asked = server.asked
    assert asked[0].path == "/v1/chat/completions"
    assert asked[0].headers["authorization"] == f"bearer {KEY}".lower()
    system = asked[0].body["messages"][0]
    assert system["role"] == "system"
    assert system["content"].startswith("Push.\n\nThink first, then answer, in this form: <think>")
    assert system["content"].endswith("with at most 5 actions, separated by ||.")
    assert {k: asked[0].body[k] for k in ("model", "max_tokens", "temperature", "stream")} == {
        "model": "m",
        "max_tokens": 99,
        "temperature": 0.7,
        "stream": False,
    }
    # The second turn reads all that was said before.
    assert asked[1].body["messages"] == [
        *asked[0].body["messages"],
        {"role": "assistant", "content": UP},
        {"role": "user", "content": "another board 0"},
    ]
    assert asked[2].body["temperature"] == 0
    # Another seed each turn, the same for the same turn again, and another for an agent of another name.
    seeds = [each.body["seed"] for each in asked]
    assert seeds[0] == seeds[2]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert "authorization" not in asked[3].headers


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (says("<answer>Up || Left</answer>", reasoning_content="hm"), ("hm", ("Up", "Left"), "")),
        (says("<answer>Up</answer>", reasoning="an <answer>"), ("an <answer>", ("Up",), "")),
        (says("<think>own</think>\n<think>asked</think><answer>Up</answer>"), ("own\n\nasked", ("Up",), "")),
        (says("its tag was in the prompt</think><answer>Up</answer>"), ("its tag was in the prompt", ("Up",), "")),
        (says(None, reasoning_content="only thought"), ("only thought", ("",), "empty")),
        (says(""), ("", ("",), "empty")),
        (says("<think>hm</think>"), ("hm", ("",), "empty")),
        (says("Up"), ("", ("",), "unreadable")),
        # Who answers twice is not given the better of the two.
        (says("<answer>Up</answer><answer>Down</answer>"), ("", ("",), "unreadable")),
        (says("<think>a</think><answer>Up</answer> or <answer>Down</answer>"), ("a", ("",), "unreadable")),
        (says(None, refusal="I will not push."), ("", ("",), "refused")),
        (says("<answer>Up</answer>", finish="content_filter"), ("", ("",), "refused")),
        (says("<answer>Up</answer>", finish="length"), ("", ("",), "cut off")),
        (says("<answer>Up</answer>", usage={"prompt_tokens": 1, "completion_tokens": 65}), ("", ("",), "cut off")),
        (says([{"type": "text", "text": "<answer>"}, {"type": "text", "text": "Up</answer>"}]), ("", ("Up",), "")),
        # Ten actions where five are run.
        (says(f"<answer>{'||'.join(['Up'] * 10)}</answer>"), ("", ("Up",) * 5, "")),
    ],
)
def test_an_answer_counts_as_it_is_written(answer, expected):
    reply = one(lambda asked: answer, max_tokens=64)
    assert isinstance(reply, Reply)
    assert (reply.reasoning, reply.actions, reply.failure.partition(":")[0]) == expected
    assert reply.valid_format == (not reply.failure)
    assert reply.cut_off == reply.failure.startswith("cut off")


@pytest.mark.parametrize(
    ("text", "finish", "whole"),
    [
        ("<answer>Up", "stop", True),
        ("<think>a</think><answer>Up", "stop", True),
        ("<answer>Up</answer>", "stop", True),
        ("<answer>Up", "length", False),
        ("Up", "stop", False),
    ],
)
def test_what_a_server_stopped_at_is_put_back(text, finish, whole):
    with ChatServer(lambda asked: says(text, finish=finish)) as server:
        [reply] = turns(agent(server, stop_at_answer=True))
        assert server.asked[0].body["stop"] == ["</answer>"]
        [without] = turns(agent(server))
        assert "stop" not in server.asked[1].body
    assert isinstance(reply, Reply)
    assert (reply.valid_format, reply.actions) == (whole, ("Up",) if whole else ("",))
    assert isinstance(without, Reply)
    assert without.valid_format == (text.endswith("</answer>") and finish == "stop")


@pytest.mark.parametrize("usage", [None, [], "many", {"prompt_tokens": -1}, {"prompt_tokens": 10**30}, {"other": 1}])
def test_usage_that_is_none_costs_no_answer(usage):
    reply = one(lambda asked: says(UP, usage=usage), price_in=1.0, price_out=1.0)
    assert isinstance(reply, Reply)
    assert (reply.actions, reply.tokens_in, reply.cost) == (("Up",), None, None)


DEEP = b'{"choices":' + b"[" * 100_000
MALFORMED = [
    b"",
    b"Up",
    b"<html>",
    b"{}",
    b"null",
    DEEP,
    b'{"choices": []}',
    b'{"choices": [{}]}',
    b'{"choices": [{"message": {"content": 7}}]}',
    b'{"choices": [{"message": {"content": "\xff"}}]}',
    b'{"choices": [{"message": {"content": "\\ud800"}}]}',
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_completion_ends_that_episode_alone(body):
    def answer(asked):
        return response(body) if "board 1" in asked.said else says(UP)

    with ChatServer(answer) as server:
        first, second, third = turns(agent(server), 3)
    assert isinstance(second, Fault)
    assert second.reason.startswith("malformed: no chat completion: ")
    assert not second.truncated
    assert [type(first), type(third)] == [Reply, Reply]
    # Nothing is asked twice of a server that has answered.
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("hostile", "kind"),
    [
        (lambda asked: response(b"x" * 2_000_000), "too long"),
        (lambda asked: response(b"\x1f\x8b" + b"0" * 99, Content_Encoding="gzip"), "malformed"),
        (lambda asked: [], "connection"),
        (lambda asked: [b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"], "connection"),
        (lambda asked: [b"no HTTP at all\r\n\r\n"], "connection"),
        (lambda asked: [b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 300_000], "connection"),
        (lambda asked: drips(says(UP), 0.05), "timeout"),
        (lambda asked: refuses("500 Oops", message="broken"), "status 500"),
        (lambda asked: refuses("307 Elsewhere", Location="http://127.0.0.1:9/"), "status 307"),
        (lambda asked: refuses("400 Bad", message="bad temperature"), "status 400"),
        (lambda asked: refuses("429 Slow", Retry_After="9999"), "rate limit"),
    ],
)
def test_no_answer_ends_that_episode_alone(hostile, kind):
    def answer(asked):
        return hostile(asked) if "board 1" in asked.said else says(UP)

    with ChatServer(answer) as server:
        first, second, third = turns(agent(server, tries=2, timeout=1), 3)
    assert isinstance(second, Fault)
    assert second.reason.partition(":")[0] == kind
    assert [type(first), type(third)] == [Reply, Reply]


@pytest.mark.parametrize(
    "failing",
    [
        lambda asked: refuses("500 Oops"),
        lambda asked: refuses("429 Slow"),
        lambda asked: refuses("503 Busy", Retry_After="0"),
        lambda asked: [],
        lambda asked: [b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"],
    ],
)
def test_what_passes_is_tried_again(failing):
    reply = one(lambda asked: failing(asked) if asked.number == 1 else says(UP))
    assert isinstance(reply, Reply)
    assert reply.actions == ("Up",)


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_honoured_by_all_requests(date):
    """A date holds whole seconds, so that up to one of the three may have passed."""

    def answer(asked):
        if asked.number == 1:
            after = email.utils.formatdate(time.time() + 3, usegmt=True) if date else "1.5"
            return refuses("429 Slow", Retry_After=after)
        return says(UP)

    with ChatServer(answer) as server:
        player = agent(server, concurrency=1)
        turns(player)
        assert [type(reply) for reply in turns(player, 2)] == [Reply, Reply]
    refused, *others = server.asked[1:]
    assert min(each.at for each in others) - refused.at >= 1.4


def test_waits_grow_and_differ():
    with ChatServer(lambda asked: says(UP) if asked.number in (0, 4) else refuses("502 Bad")) as server:
        player = agent(server, tries=4)
        turns(player)
        assert isinstance(turns(player)[0], Reply)
    waits = [later.at - earlier.at for earlier, later in zip(server.asked[1:], server.asked[2:], strict=False)]
    assert [waits[0] >= 0.25, waits[1] >= 0.5, waits[2] >= 1] == [True] * 3
    for tries, longest in ((1, 0.5), (2, 1.0), (5, 8.0), (20, 60.0)):
        drawn = [backoff(tries, None) for _ in range(50)]
        assert longest / 2 <= min(drawn) < max(drawn) <= longest
        assert min(backoff(tries, 7.0) for _ in range(50)) >= 7


def test_patience_ends_an_answer_before_its_tries_do():
    began = time.monotonic()
    fault = one(lambda asked: drips(says(UP), 0.1), timeout=0.4, tries=50, patience=1.0)
    assert isinstance(fault, Fault)
    assert fault.reason.startswith("timeout: no answer within ")
    # Fifty tries of it would take longer.
    assert time.monotonic() - began < 15


def test_a_conversation_that_outgrows_the_model_is_truncated():
    messages = [
        ("400 Bad Request", "context_length_exceeded", "This model's maximum context length is 8 tokens."),
        ("400 Bad Request", "", "the request exceeds the available context size, try increasing it"),
        ("413 Too Large", "", "prompt is too long: 9 tokens > 8 maximum"),
    ]
    for status, code, message in messages:
        fault = one(lambda asked, told=(status, code, message): refuses(*told))
        assert isinstance(fault, Fault)
        assert fault.truncated
        assert fault.reason.startswith("context: status 4")
    # Of a model whose size is told, it is known after the first turn, and not asked for.
    with ChatServer(lambda asked: says(UP, usage={"prompt_tokens": 60, "completion_tokens": 9})) as server:
        player = agent(server, context_tokens=100, max_tokens=40)
        player.start([seat()], Decoding())
        assert isinstance(player.act([view(0)])[0], Reply)
        assert player.act([view(0, 1)]) == [
            Fault("context: 69 tokens so far and 40 for an answer are more than 100", truncated=True)
        ]
    assert len(server.asked) == 1


def test_requests_run_at_once_up_to_the_limit():
    def slow(asked):
        time.sleep(0.2)
        return says("<answer>Up</answer>", reasoning_content=asked.said)

    with ChatServer(slow) as server:
        player = agent(server, concurrency=4)
        turns(player)
        replies = turns(player, 12)
    assert server.at_once == 4
    # Each has its own answer, in the order of the seats.
    assert [reply.reasoning for reply in replies] == [f"a board {number}" for number in range(12)]


def test_limits_of_requests_and_tokens_a_minute():
    with ChatServer(lambda asked: says(UP)) as server:
        turns(agent(server, requests_per_minute=300), 6)
    # Five a second, less what the first took to arrive.
    assert server.asked[-1].at - server.asked[0].at >= 0.8
    # About 110 tokens are guessed and 500 were used, of 500 a second.
    usage = {"prompt_tokens": 450, "completion_tokens": 50}
    with ChatServer(lambda asked: says(UP, usage=usage)) as server:
        turns(agent(server, tokens_per_minute=30_000, max_tokens=50, concurrency=1), 3)
    assert server.asked[2].at - server.asked[0].at >= 1.5


@pytest.mark.parametrize(
    ("answer", "told", "requests"),
    [
        (refuses("401 Unauthorized", message=f"Incorrect API key provided: {KEY}"), "key: status 401: ", 1),
        (refuses("404 Not Found", message="The model `m` does not exist"), "address or model: status 404: ", 1),
        (refuses("429 Too Many", "insufficient_quota"), "quota: status 429: ", 1),
        (response("<html>a page</html>"), "malformed: ", 3),
        (refuses("400 Bad", message="unknown field: seed"), "status 400: ", 3),
    ],
)
def test_an_endpoint_that_serves_nothing_stops_the_evaluation(monkeypatch, answer, told, requests):
    monkeypatch.setenv("A_KEY", KEY)
    with ChatServer(lambda asked: answer) as server:
        with pytest.raises(AgentUnavailable, match="endpoint 'mine' answered none of its first requests to ") as caught:
            turns(agent(server, key_env="A_KEY"), 20)
        assert told in str(caught.value)
        assert KEY not in str(caught.value)
    assert len(server.asked) == requests


def test_no_server_at_all_is_told_at_once():
    with ChatServer(lambda asked: says(UP)) as server:
        gone = agent(server, tries=9)
    began = time.monotonic()
    with pytest.raises(AgentUnavailable, match="connection: "):
        turns(gone, 20)
    # The waits between nine tries take a minute and more.
    assert time.monotonic() - began < 20


def test_an_outage_fails_the_episodes_that_it_meets_and_no_other():
    down = False

    def answer(asked):
        return refuses("503 Down") if down else says(UP)

    with ChatServer(answer) as server:
        player = agent(server, tries=1, concurrency=4)
        assert {type(reply) for reply in turns(player, 4)} == {Reply}
        down = True
        faults = turns(player, 40)
        asked = len(server.asked)
        down = False
        assert {type(reply) for reply in turns(player, 4)} == {Reply}
    assert {fault.reason.partition(":")[0] for fault in faults} == {"status 503", "outage"}
    assert "8 requests in a row were not answered, the last: status 503: " in faults[-1].reason
    # Not all of the forty were sent after four answers.
    assert asked <= 4 + 8 + 3


def test_the_key_is_in_nothing_that_leaves(monkeypatch, tmp_path, caplog, capfd):
    """Whether the server sends it back as an answer, as reasoning, in an error, or in what is no JSON."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    answers = [
        says(f"<think>{KEY}</think><answer>{KEY}</answer>", reasoning_content=f"it is {KEY}"),
        says(None, refusal=f"no, {KEY}"),
        response(f"no JSON: {KEY}"),
        response(json.dumps({"choices": KEY})),
        refuses("400 Bad", message=f"Bearer {KEY}"),
        refuses("500 Bad", message=f"Bearer {KEY}"),
        refuses("429 Bad", message=f"Bearer {KEY}"),
        [b"HTTP/1.1 200 " + KEY.encode() + b"\r\nContent-Length: x\r\n\r\n"],
        [KEY.encode() + b"\r\n\r\n"],
    ]
    with ChatServer(lambda asked: answers[int(asked.said.rpartition(" ")[2])]) as server:
        player = agent(server, key_file=file, tries=1)
        told = turns(player, len(answers))
        assert all("authorization" in asked.headers for asked in server.asked)
    said = (
        repr(told)
        + repr(player.description)
        + repr(player.__dict__["_settings"])
        + caplog.text
        + str(capfd.readouterr())
    )
    assert "[key]" in said
    assert KEY not in said


def test_where_a_key_comes_from(monkeypatch, tmp_path):
    https = "https://api.example.com/v1/chat/completions"
    monkeypatch.setenv("A_KEY", f" {KEY}\n")
    assert read_key(EndpointSettings(model="m", key_env="A_KEY"), https) == KEY
    assert read_key(EndpointSettings(model="m"), https) == ""
    file = tmp_path / "key"
    for text, message in (
        ("", "holds no key"),
        ("a b", "cannot be a key"),
        ("a\nb", "cannot be a key"),
        ("é", "cannot"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_key(EndpointSettings(model="m", key_file=file), https)
    with pytest.raises(ValueError, match="cannot be read"):
        read_key(EndpointSettings(model="m", key_file=tmp_path / "none"), https)
    with pytest.raises(ValueError, match="NO_KEY holds no key"):
        read_key(EndpointSettings(model="m", key_env="NO_KEY"), https)
    with pytest.raises(ValueError, match="unencrypted"):
        read_key(EndpointSettings(model="m", key_env="A_KEY"), "http://api.example.com/v1")
    assert read_key(EndpointSettings(model="m", key_env="A_KEY", plain_http=True), "http://api.example.com/v1") == KEY
    assert read_key(EndpointSettings(model="m", key_env="A_KEY"), "http://127.0.0.1:8000/v1") == KEY


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1/chat/completions"),
        ("http://localhost:8000/", "http://localhost:8000/v1/chat/completions"),
        ("https://api.example.com/v1/", "https://api.example.com/v1/chat/completions"),
        ("https://api.example.com/openai/v2", "https://api.example.com/openai/v2/chat/completions"),
        ("https://api.example.com/v1/chat/completions", "https://api.example.com/v1/chat/completions"),
    ],
)
def test_addresses(url, expected):
    assert completions_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://a/v1",
        "http://",
        "https://me:secret@a/v1",
        "https://a/v1?key=x",
        "http://a:99999999",
    ],
)
def test_what_is_no_address(url):
    with pytest.raises(AgentUnavailable, match="endpoint 'mine': ") as caught:
        EndpointAgent(url, EndpointSettings(model="m"), name="mine")
    assert "secret" not in str(caught.value)


def test_reasoning_is_split_off():
    assert split_reasoning("<think>a</think>b") == ("a", "b")
    assert split_reasoning("b") == ("", "b")
    assert split_reasoning("<think>never closed") == ("", "<think>never closed")


SMALL = dataclasses.replace(REFERENCE, instances=12)


@pytest.fixture(scope="module")
def client(server):
    with connect(server) as connected:
        yield connected


def played(client, answer: Answer, protocol: Protocol = SMALL, **settings: object):
    """The episodes of an endpoint against the real environment server."""
    with ChatServer(answer) as server:
        player = agent(server, tries=2, timeout=1, **settings)
        return [each.record for each in play(client, protocol, select_instances(client, protocol), player)], server


def test_who_drops_losing_episodes_or_answers_twice_gains_nothing(client):
    """Four ways to treat an episode that is not won by its first turns; all of them score as an honest loss does."""
    protocol = dataclasses.replace(
        SMALL,
        environment="frozen_lake",
        limits=Limits(max_turns=6, max_actions=6, max_actions_per_turn=1),
        instances=24,
    )
    moves = ("Right", "Down")

    def honest(asked):
        return says(f"<answer>{moves[len(asked.body['messages']) // 2 % 2]}</answer>")

    def cheating(losing: Sequence[bytes] | Answer):
        def answer(asked):
            late = len(asked.body["messages"]) > 9
            return (losing(asked) if callable(losing) else losing) if late else honest(asked)

        return answer

    baseline, _ = played(client, honest, protocol)
    won_early = {e.draw for e in baseline if e.success and len(e.actions) <= 4}
    wins = {e.draw for e in baseline if e.success}
    assert wins
    ways = {
        "hangs up": [],
        "says nothing": refuses("503 Down"),
        "is malformed": response("{"),
        "claims that it was too much": refuses("400 Bad", "context_length_exceeded"),
        "answers twice": says("<answer>Right</answer><answer>Down</answer>"),
    }
    for way, losing in ways.items():
        episodes, _ = played(client, cheating(losing), protocol)
        assert [e.draw for e in episodes] == [e.draw for e in baseline], way
        # Each instance was dealt once, has a verdict, and none is won that honest play did not win.
        assert {e.success for e in episodes} <= {True, False}, way
        assert won_early == {e.draw for e in episodes if e.success}, way


def test_who_times_out_on_purpose_is_asked_the_same_again_and_fails(client):
    def stalls(asked):
        return drips(says(UP), 0.2) if len(asked.body["messages"]) > 2 else says(UP)

    protocol = dataclasses.replace(SMALL, instances=3)
    episodes, server = played(client, stalls, protocol)
    assert [(e.outcome, e.success, e.fault.partition(":")[0]) for e in episodes] == [
        ("agent_fault", False, "timeout")
    ] * 3
    late = [asked.body for asked in server.asked if len(asked.body["messages"]) > 2]
    # Two tries of each, and the second tells no more than the first.
    assert len(late) == 6
    assert len({json.dumps(body, sort_keys=True) for body in late}) == 3


def test_the_command_evaluates_an_endpoint_and_keeps_its_costs(server, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", KEY)

    def answer(asked):
        finish = "length" if len(asked.body["messages"]) == 2 else "stop"
        return says(UP, finish=finish, usage={"prompt_tokens": 1000, "completion_tokens": 10})

    with ChatServer(answer) as chat:
        arguments = ["evaluate", "--agent", f"gpt=endpoint:{chat.url}", "--env", "sokoban", "--server", server]
        settings = ("model=wrong", "gpt:model=m-1", "key_env=A_KEY", "price_in=1", "price_out=4", "max_tokens=32")
        arguments += ["--instances", "4", *(part for each in settings for part in ("--endpoint", each))]
        done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    [folder] = records.find(tmp_path)
    row = records.load(folder).row("gpt")
    assert (row.description["model"], row.description["kind"], row.decoding) == ("m-1", "endpoint", "T = 1")
    spent = row.statistics.spent
    assert spent.cost == pytest.approx(spent.turns * (1000 * 1 + 10 * 4) / 1e6)
    assert row.statistics.failures == {"cut off": 4}
    assert (
        f"gpt: reads all turns, instructions environment, writes at most 32 tokens a turn; model m-1 at {chat.url}"
        in (done.output)
    )
    assert "gpt: turns whose answer was at fault (cut off 4)" in done.output
    assert "tokens read an episode, $0.0" in done.output
    for file in folder.iterdir():
        assert KEY not in file.read_text()
    assert KEY not in done.output
    verified = CliRunner().invoke(app, ["verify", str(folder), "--server", server])
    assert verified.exit_code == 0, verified.output
    assert "not checked: gpt: who chose its actions" in verified.output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "Field required; name the model with --endpoint model=NAME"),
        (["model"], "expected [NAME:]KEY=VALUE"),
        (["modle=m"], "there is no modle; did you mean model?"),
        (["model=m", "tries=0"], "--endpoint tries of "),
        (["model=m", "price_in=1"], "price_in and price_out go together"),
        (["model=m", "key_env=A", "key_file=b"], "both name a key"),
        (["model=m", "key_env=NOT_SET"], "environment variable NOT_SET holds no key"),
        (["other:model=m"], "name the model with --endpoint model=NAME"),
        (["model=m"], "answered none of its first requests"),
    ],
)
def test_what_cannot_be_asked_is_one_line(server, tmp_path, settings, message):
    with ChatServer(lambda asked: refuses("404 Not Found")) as chat:
        arguments = ["evaluate", "--agent", f"endpoint:{chat.url}", "--env", "sokoban", "--server", server]
        arguments += ["--instances", "2", *(part for each in settings for part in ("--endpoint", each))]
        done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
