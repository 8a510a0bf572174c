"""The service as its callers and attackers meet it: over real connections, on SQLite and PostgreSQL."""

import errno
import hashlib
import re
import secrets
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from service_in_thread import GENEROUS, serving
from small_boards import SECRET, deal, definition, episode, submitted

from turngym_leaderboard.intake import IntakeLimits
from turngym_leaderboard.service import uploads
from turngym_leaderboard.service.bounds import MAX_BODY_BYTES
from turngym_leaderboard.service.exposure import check_exposure
from turngym_leaderboard.service.rate_limits import MAX_BUCKETS, RateLimiter, network_of
from turngym_leaderboard.store import boards, open_store, owners, submissions, work
from turngym_leaderboard.store.values import Kind, Role, State, Visibility

SLUG = "lakes-one"
CONTENT = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 64,
}


@pytest.fixture
def board(store):
    return boards.create(store, definition(submissions_per_owner=20), SECRET, [deal()])


@pytest.fixture
def tokens(store, board):
    """Of Ann and Bob, who submit, and of an admin."""
    people = {name: owners.create(store, name) for name in ("ann", "bob", "root")}
    return {
        name: owners.add_token(store, owner, Role.ADMIN if name == "root" else Role.SUBMIT)
        for name, owner in people.items()
    }


@pytest.fixture
def address(store, board):
    with serving(store) as address:
        yield address


@pytest.fixture
def calling(address, tokens):
    """Opens a caller by name; None: without token."""
    opened = []

    def caller(name):
        headers = {"Authorization": f"Bearer {tokens[name]}"} if name else {}
        opened.append(httpx.Client(base_url=f"{address}/api/v1", headers=headers, timeout=30, verify=False))
        return opened[-1]

    yield caller
    for client in opened:
        client.close()


def announcement(content=None, **changes):
    files = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in (content or CONTENT).items()
    ]
    return {"name": "mine", "files": files} | changes


def begin(client, key=None, slug=SLUG, **changes):
    return client.post(
        f"/boards/{slug}/submissions",
        json=announcement(**changes),
        headers={"Idempotency-Key": key or secrets.token_hex(16)},
    )


def send(client, id, name, data, offset=0):
    return client.patch(f"/submissions/{id}/files/{name}", content=data, headers={"Upload-Offset": str(offset)})


def detail(response):
    assert response.headers["content-type"] == "application/json"
    [(key, told)] = response.json().items()
    assert key == "detail"
    return told


def test_files_arrive_part_by_part_and_lie_there_as_they_were_sent(calling, store):
    ann = calling("ann")
    begun = begin(ann)
    assert (begun.status_code, begun.json()["state"], begun.json()["visibility"]) == (201, "uploaded", "private")
    mine = begun.json()["id"]
    for name, data in CONTENT.items():
        half = len(data) // 2
        assert send(ann, mine, name, data[:half]).json()["received"] == half
        assert send(ann, mine, name, data[half:], half).json()["received"] == len(data)
    folder = store.data / "submissions" / mine
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == CONTENT
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.iterdir())
    assert {file["received"] == file["size"] for file in ann.get(f"/submissions/{mine}/files").json()} == {True}
    again = send(ann, mine, "config.json", b"", len(CONTENT["config.json"]))
    assert again.json()["received"] == len(CONTENT["config.json"])


def test_what_came_of_a_broken_upload_is_kept_and_goes_on(calling, address, tokens, store):
    ann = calling("ann")
    data = CONTENT["model.safetensors"] * 200
    mine = begin(ann, content=CONTENT | {"model.safetensors": data}).json()["id"]
    host, port = address.removeprefix("http://").split(":")
    path = store.data / "submissions" / mine / "model.safetensors"
    with socket.create_connection((host, int(port))) as broken:
        head = (
            f"PATCH /api/v1/submissions/{mine}/files/model.safetensors HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {tokens['ann']}\r\nUpload-Offset: 0\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        broken.sendall(head.encode() + data[: 2 << 20])
        wait_until(lambda: path.exists() and path.stat().st_size >= 1 << 20)
    wait_until(lambda: received_of(ann, mine, "model.safetensors"))
    received = received_of(ann, mine, "model.safetensors")
    assert 1 << 20 <= received <= 2 << 20
    assert send(ann, mine, "model.safetensors", data[received:], received).json()["received"] == len(data)
    assert path.read_bytes() == data


def wait_until(true):
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def received_of(client, id, name):
    files = client.get(f"/submissions/{id}/files")
    assert files.status_code == 200, files.text
    return next(file["received"] for file in files.json() if file["name"] == name)


def test_a_part_that_does_not_fit_is_refused_with_what_to_do(calling):
    ann = calling("ann")
    mine = begin(ann).json()["id"]
    data = CONTENT["model.safetensors"]
    refused = send(ann, mine, "model.safetensors", data, 7)
    assert (refused.status_code, detail(refused)) == (
        409,
        "model.safetensors goes on at byte 0, not at 7; send the rest of it from there",
    )
    refused = send(ann, mine, "model.safetensors", data + b"x")
    assert refused.status_code == 413
    assert "was announced with 16384 bytes; more came" in detail(refused)
    start = received_of(ann, mine, "model.safetensors")
    refused = send(ann, mine, "model.safetensors", bytes(len(data) - start), start)
    assert refused.status_code == 422
    assert "another SHA-256 than was announced; send it again from byte 0" in detail(refused)
    assert received_of(ann, mine, "model.safetensors") == 0
    assert send(ann, mine, "generation_config.json", b"{}").status_code == 404
    assert send(ann, mine, "..%2F..%2Fboard.sqlite", b"{}").status_code == 404
    assert ann.post(f"/submissions/{mine}/withdraw").json()["state"] == "failed"
    assert send(ann, mine, "model.safetensors", data).status_code == 409


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"content": CONTENT | {"evil.py": b"import os"}}, "may hold no code"),
        ({"content": CONTENT | {"../../board.sqlite": b"x"}}, "leads out of the checkpoint's folder"),
        ({"content": CONTENT | {"pytorch_model.bin": b"x"}}, "pickled or other weights"),
        ({"content": {"config.json": b"{}"}}, "tokenizer.json and tokenizer_config.json missing"),
        ({"name": "<b>\u202eevil"}, "expected one line of printable characters"),
        ({"name": "a\nb"}, "expected one line of printable characters"),
        ({"name": ""}, "at least 1 character"),
        ({"name": "alice\u3164"}, "expected characters that can be seen; U+3164 (HANGUL FILLER) cannot"),
        ({"name": "Oracle"}, "'Oracle' is what a row of the board's own is called; give it another name"),
        ({"files": announcement()["files"] * 2}, "a file is announced twice"),
        ({"evil": 1}, "body.evil: there is no such key"),
        ({"visibility": "admins"}, "'private' or 'public'"),
    ],
)
def test_what_cannot_be_a_checkpoint_is_not_even_begun(calling, store, board, change, told):
    refused = begin(calling("ann"), **change)
    assert refused.status_code == 422
    assert told in detail(refused)
    assert [each.kind for each in submissions.of_board(store, board)] == [Kind.SCRIPTED] * 2


def test_sizes_are_bounded_before_anything_is_sent(store, board, tokens):
    with (
        serving(store, intake=IntakeLimits(max_bytes=1000)) as address,
        httpx.Client(
            base_url=f"{address}/api/v1", headers={"Authorization": f"Bearer {tokens['ann']}"}, verify=False
        ) as ann,
    ):
        refused = begin(ann)
        assert "model.safetensors has 16384 bytes; at most 1000 are allowed" in detail(refused)


def test_a_disk_without_room_is_told(calling, monkeypatch):
    """Files that are still to come take room too."""
    free, size = 10 << 20, sum(map(len, CONTENT.values()))
    monkeypatch.setattr(uploads, "room", lambda store: free)
    ann, bob = calling("ann"), calling("bob")
    assert begin(ann).status_code == 201
    mine = begin(ann).json()["id"]
    free = 3 * size - 1
    refused = begin(bob)
    assert (refused.status_code, detail(refused)) == (507, "the board has no room for these files; tell its operator")
    send(ann, mine, "config.json", CONTENT["config.json"])
    assert begin(bob).status_code == 201


def test_a_disk_that_is_full_while_a_file_arrives_is_told_and_the_rest_may_be_sent_again(calling, monkeypatch):
    ann = calling("ann")
    mine = begin(ann).json()["id"]

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as now:
        now.setattr(uploads.os, "fsync", full)
        refused = send(ann, mine, "config.json", CONTENT["config.json"])
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "the board's disk is full, which its operator has to mend" in detail(refused)
    assert send(ann, mine, "config.json", CONTENT["config.json"]).status_code == 200


def test_a_size_that_no_disk_has_is_not_told_again(calling):
    refused = begin(calling("ann"), files=[announcement()["files"][0] | {"size": 10**4_000}])
    assert refused.status_code == 422
    assert len(detail(refused)) < 200


def test_the_same_key_begins_one_submission_however_often_and_at_once(calling, store, board):
    ann, bob = calling("ann"), calling("bob")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: begin(ann, key="k" * 22), range(8)))
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert begin(ann, key="k" * 22).status_code == 200
    assert len(submissions.of_board(store, board)) == 3
    other = begin(ann, key="k" * 22, name="another")
    assert (other.status_code, detail(other)) == (409, "this key began another submission; take a new one")
    assert begin(bob, key="k" * 22).json()["id"] != answers[0].json()["id"]


def test_few_submissions_may_be_open_at_once(calling):
    ann = calling("ann")
    begun = [begin(ann) for _ in range(uploads.MAX_OPEN)]
    refused = begin(ann)
    assert refused.status_code == 409
    assert "4 of your submissions are still sent or examined" in detail(refused)
    assert ann.post(f"/submissions/{begun[0].json()['id']}/withdraw").status_code == 200
    assert begin(ann).status_code == 201


def test_those_begun_at_the_same_time_are_not_more_than_may_be_open(calling, store, board):
    barrier = threading.Barrier(8)

    def begin_one(client):
        barrier.wait()
        return begin(client).status_code

    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(begin_one, [calling("ann") for _ in range(8)]))
    assert sorted(codes) == [201] * uploads.MAX_OPEN + [409] * (8 - uploads.MAX_OPEN)
    assert len(submissions.of_board(store, board)) == 2 + uploads.MAX_OPEN


def test_no_more_are_begun_than_a_season_has(calling, store):
    boards.create(store, definition(name="short", submissions_per_owner=1), SECRET, [deal()])
    submitted(store, boards.find(store, "short-one"), owners.find(store, "ann"))
    refused = begin(calling("ann"), slug="short-one")
    assert (refused.status_code, detail(refused)) == (
        403,
        "1 submissions of an owner are scored in a season of short-one; none is left",
    )


def test_a_failed_submission_is_listed_to_whoever_may_change_it(calling, address):
    ann, bob = calling("ann"), calling("bob")
    mine = begin(ann, visibility="public").json()["id"]

    def listed(client):
        return mine in [row["submission"]["id"] for row in client.get(f"/boards/{SLUG}/submissions").json()]

    assert listed(bob)
    assert mine in httpx.get(f"{address}/boards/{SLUG}", verify=False).text
    ann.post(f"/submissions/{mine}/withdraw")
    assert (listed(ann), listed(calling("root")), listed(bob)) == (True, True, False)
    assert mine not in httpx.get(f"{address}/boards/{SLUG}", verify=False).text
    assert bob.get(f"/submissions/{mine}").json()["reason"] == "withdrawn"


@pytest.mark.parametrize("path", ["/", f"/boards/{SLUG}", "/api/v1/boards", "/health", "/static/style.css", "/nothing"])
def test_head_is_get_without_its_body(address, path):
    got = httpx.get(f"{address}{path}", verify=False)
    asked = httpx.head(f"{address}{path}", verify=False)
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    assert asked.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize(
    "path",
    [
        "/boards/a%00b",
        "/boards/x/submissions/%00",
        "/episodes/%00.1",
        f"/api/v1/boards/{SLUG}%00/submissions",
        "/?e=%00",
    ],
)
def test_a_nul_is_refused_by_every_database_alike(address, path):
    assert httpx.get(f"{address}{path}", verify=False).status_code == 422


@pytest.mark.parametrize(("path", "status"), [("/boards/a%00b", 422), ("/?e=%00", 422), ("/nothing", 404)])
def test_a_refusal_is_a_page_for_a_browser_and_json_for_others(address, path, status):
    browser = httpx.get(f"{address}{path}", headers={"Accept": "text/html,*/*;q=0.8"}, verify=False)
    assert (browser.status_code, browser.headers["content-type"]) == (status, "text/html; charset=utf-8")
    assert "Back to the start" in browser.text
    other = httpx.get(f"{address}{path}", verify=False)
    assert (other.status_code, list(other.json())) == (status, ["detail"])
    called = httpx.get(f"{address}/api/v1{path}", headers={"Accept": "text/html,*/*;q=0.8"}, verify=False)
    assert called.headers["content-type"] == "application/json"


def test_what_no_worker_can_play_says_why_it_waits(calling, store, board):
    ann = calling("ann")
    mine = begin(ann).json()["id"]
    boards.note_waiting(store, board.id, "the server is another one", now=datetime.now(UTC))
    assert ann.get(f"/submissions/{mine}").json()["reason"] == ""
    submissions.set_state(store, mine, State.VALIDATED)
    submissions.set_state(store, mine, State.QUEUED)
    assert ann.get(f"/submissions/{mine}").json()["reason"] == "waits: the server is another one"


def test_private_submissions_are_not_there_for_others(calling, store):
    ann, bob, nobody, root = (calling(name) for name in ("ann", "bob", None, "root"))
    mine = begin(ann).json()["id"]
    calls = [
        ("GET", f"/submissions/{mine}"),
        ("PATCH", f"/submissions/{mine}"),
        ("POST", f"/submissions/{mine}/withdraw"),
        ("GET", f"/submissions/{mine}/files"),
        ("PATCH", f"/submissions/{mine}/files/config.json"),
        ("GET", f"/submissions/{mine}/results"),
        ("GET", f"/submissions/{mine}/episodes"),
        ("GET", f"/submissions/{mine}/episodes/1"),
    ]
    for stranger in (bob, nobody):
        for method, path in calls:
            bodies = {"headers": {"Upload-Offset": "0"}} if "config" in path else {"json": {"visibility": "public"}}
            told = [stranger.request(method, each, **bodies) for each in (path, path.replace(mine, "0" * 16))]
            assert [answer.status_code for answer in told] == [404, 404], path
            assert detail(told[0]).replace(mine, "0" * 16) == detail(told[1])
        listed = stranger.get(f"/boards/{SLUG}/submissions").json()
        assert [row["submission"]["name"] for row in listed] == ["random", "oracle"]
    assert bob.get("/submissions").json() == []
    assert [each["id"] for each in ann.get("/submissions").json()] == [mine]
    for allowed in (ann, root):
        assert allowed.get(f"/submissions/{mine}").json()["name"] == "mine"


def test_public_submissions_are_seen_by_all_and_changed_by_their_owner(calling, store):
    ann, bob, nobody = (calling(name) for name in ("ann", "bob", None))
    mine = begin(ann).json()["id"]
    assert ann.patch(f"/submissions/{mine}", json={"visibility": "public"}).json()["visibility"] == "public"
    for stranger in (bob, nobody):
        assert stranger.get(f"/submissions/{mine}").json()["name"] == "mine"
        for method, path, body in (
            ("PATCH", f"/submissions/{mine}", {"json": {"visibility": "private"}}),
            ("POST", f"/submissions/{mine}/withdraw", {}),
            ("GET", f"/submissions/{mine}/files", {}),
            ("PATCH", f"/submissions/{mine}/files/config.json", {"content": b"x", "headers": {"Upload-Offset": "0"}}),
        ):
            assert stranger.request(method, path, **body).status_code == 403
    assert received_of(ann, mine, "config.json") == 0
    scripted = next(r for r in nobody.get(f"/boards/{SLUG}/submissions").json())["submission"]
    assert (scripted["owner"], scripted["kind"]) == (None, "scripted")
    assert ann.post(f"/submissions/{scripted['id']}/withdraw").status_code == 403


def test_an_owner_cannot_show_what_the_operator_hides(calling, store):
    ann = calling("ann")
    mine = begin(ann, visibility="public").json()["id"]
    submissions.set_hidden(store, mine, True)
    assert calling("bob").get(f"/submissions/{mine}").status_code == 404
    assert ann.get(f"/submissions/{mine}").json()["visibility"] == "private"
    refused = ann.patch(f"/submissions/{mine}", json={"visibility": "public"})
    assert (refused.status_code, detail(refused)) == (
        403,
        f"submission {mine} is hidden by the board's operator; ask there",
    )


def test_tokens_decide(address, tokens, store, calling):
    def get(value, path="/submissions"):
        return httpx.get(f"{address}/api/v1{path}", headers={"Authorization": value} if value else {}, verify=False)

    assert get(f"Bearer {tokens['ann']}").status_code == 200
    for wrong in (None, "Bearer tgb_wrong", f"Bearer {tokens['ann']}x", "Bearer", f"Basic {tokens['ann']}"):
        refused = get(wrong)
        assert (refused.status_code, refused.headers["www-authenticate"][:6]) == (401, "Bearer"), wrong
        assert tokens["ann"] not in refused.text
    # Also where no token is needed: who shows one wants to know that it is none.
    assert get("Bearer tgb_wrong", f"/boards/{SLUG}/submissions").status_code == 401
    found = owners.token(store, tokens["ann"], now=datetime.now(UTC))
    owners.revoke(store, found.id)
    assert get(f"Bearer {tokens['ann']}").status_code == 401
    expired = owners.add_token(store, found.owner, Role.SUBMIT, expires=datetime.now(UTC) - timedelta(seconds=1))
    assert get(f"Bearer {expired}").status_code == 401


def test_episodes_of_a_sealed_board_are_the_showcase_for_all_but_admins(store, board, tokens):
    sealed = boards.create(store, definition(name="sealed", sealed=True), SECRET, [deal()])
    owner = owners.find(store, "ann")
    mine = submissions.create(store, sealed, owner, name="mine", kind=Kind.CHECKPOINT, visibility=Visibility.PUBLIC)
    submissions.set_state(store, mine.public_id, State.VALIDATED)
    submissions.set_state(store, mine.public_id, State.QUEUED)
    now = datetime.now(UTC)
    lease = work.claim(store, "here", [Kind.CHECKPOINT], now=now, until=now + timedelta(seconds=60))
    dealt = deal()
    for instances, showcase in ((dealt.scored.instances, False), (dealt.showcase, True)):
        played = [episode(instance) for instance in instances]
        work.commit(store, lease, sealed.environments[0], played, showcase=showcase, sealed=False, now=now)
    with serving(store) as address:

        def get(name, path=""):
            headers = {"Authorization": f"Bearer {tokens[name]}"} if name else {}
            return httpx.get(
                f"{address}/api/v1/submissions/{mine.public_id}/episodes{path}", headers=headers, verify=False
            )

        every = get("root").json()
        assert every["total"] == 3
        hidden, shown = ([e for e in every["episodes"] if e["showcase"] is side] for side in (False, True))
        for name in (None, "ann", "bob"):
            assert get(name).json() == {"total": 1, "offset": 0, "episodes": shown}
            assert get(name, "?showcase=false").json()["total"] == 0
            assert get(name, f"/{hidden[0]['id']}").status_code == 404
            whole = get(name, f"/{shown[0]['id']}").json()
            assert whole["trajectory"]["turns"][0]["text"] == "<answer>Up</answer>"
            assert whole["record"]["level_seed"] == str(dealt.showcase[0].level_seed)
        assert get("root", f"/{hidden[0]['id']}").status_code == 200
        assert get("root", "?showcase=false&draw=2&success=true&limit=1").json()["total"] == 1
        assert get("root", "?environment=other").json()["total"] == 0
        assert get("root", "?limit=0").status_code == 422


def test_calls_are_limited_by_address_by_owner_and_for_those_who_guess(store, tokens):
    with serving(store, rates=replace(GENEROUS, address_rate=0.001, address_burst=3)) as address:
        codes = [httpx.get(f"{address}/api/v1/boards", verify=False).status_code for _ in range(4)]
        assert codes == [200, 200, 200, 429]
        refused = httpx.get(f"{address}/no/such/page", verify=False)
        assert refused.status_code == 429
        assert 900 <= int(refused.headers["retry-after"]) <= 1000
        assert detail(refused) == f"too many requests; try again in {refused.headers['retry-after']} s"
    rates = replace(GENEROUS, owner_rate=0.001, owner_burst=2, guess_rate=0.001, guess_burst=3)
    with serving(store, rates=rates) as address:

        def get(name):
            headers = {"Authorization": f"Bearer {tokens.get(name, name)}"}
            return httpx.get(f"{address}/api/v1/submissions", headers=headers, verify=False).status_code

        assert [get("ann") for _ in range(3)] == [200, 200, 429]
        assert get("bob") == 200
        assert [get("tgb_guess") for _ in range(4)] == [401, 401, 401, 429]
        assert get("bob") == 200


@pytest.mark.parametrize(("proxy", "codes"), [("", [200, 200, 429, 429]), ("127.0.0.1", [200, 200, 429, 200])])
def test_whom_a_proxy_calls_for_is_believed_of_a_proxy_alone(store, proxy, codes):
    """The last address is the one that the proxy saw; those before it are the caller's own invention."""
    rates = replace(GENEROUS, address_rate=0.001, address_burst=2)
    with serving(store, rates=rates, forwarded_by=proxy) as address:

        def get(told):
            return httpx.get(f"{address}/health", headers={"X-Forwarded-For": told}, verify=False).status_code

        assert [get(f"198.51.100.{k}, 192.0.2.7") for k in range(3)] + [get("192.0.2.8")] == codes


def test_submissions_are_begun_so_often_an_hour(store, board, tokens):
    with (
        serving(store, rates=replace(GENEROUS, submissions_per_hour=1)) as address,
        httpx.Client(
            base_url=f"{address}/api/v1", headers={"Authorization": f"Bearer {tokens['ann']}"}, verify=False
        ) as ann,
    ):
        assert begin(ann, key="k" * 22).status_code == 201
        assert begin(ann, key="k" * 22).status_code == 200
        refused = begin(ann)
        assert refused.status_code == 429
        assert 3500 < int(refused.headers["retry-after"]) <= 3600


@pytest.mark.parametrize("announced", [True, False])
def test_large_bodies_are_refused(calling, announced):
    body = b"[" * (MAX_BODY_BYTES + 1)
    content = body if announced else iter([body[:1000], body[1000:]])
    key = {"Idempotency-Key": "k" * 22}
    refused = calling("ann").post(f"/boards/{SLUG}/submissions", content=content, headers=key)
    assert (refused.status_code, detail(refused)) == (413, "the request has more than 1048576 bytes")


def test_refusals_do_not_repeat_what_was_sent(calling, tokens):
    ann = calling("ann")
    refused = begin(ann, name={"password": tokens["ann"]}, visibility=tokens["ann"])
    assert refused.status_code == 422
    assert tokens["ann"] not in refused.text
    for path in ("/submissions/../../etc/passwd", "/submissions/%00", "/boards/" + "x" * 200, "/submissions/1' OR 1"):
        assert ann.get(path).status_code in (404, 422)


def test_a_failure_of_the_service_tells_a_number_and_no_more(store, board, caplog):
    with serving(store) as address:
        with store.writing() as session:
            session.connection().exec_driver_sql("DROP TABLE results")
        refused = httpx.get(f"{address}/api/v1/boards/{SLUG}/submissions", verify=False)
    assert refused.status_code == 500
    number = re.fullmatch(r"the service failed; its operator finds it as ([0-9a-f]{8}) in the log", detail(refused))
    assert f"failure {number[1]} in GET /api/v1/boards/{SLUG}/submissions" in caplog.text
    assert refused.headers["x-content-type-options"] == "nosniff"


def test_the_page_of_the_api_tells_every_call_and_loads_nothing_from_elsewhere(address):
    page = httpx.get(f"{address}/api/v1/docs", verify=False)
    document = httpx.get(f"{address}/api/v1/openapi.json", verify=False).json()
    assert len(document["paths"]) >= 10
    for path, calls in document["paths"].items():
        for method in calls:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page.text
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page.text)
    assert "<script" not in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_limiters_fill_up_again_and_stay_small():
    now = [0.0]
    limiter = RateLimiter(2.0, 3, clock=lambda: now[0])
    assert [limiter.wait("a") for _ in range(4)] == [0, 0, 0, 0.5]
    assert limiter.wait("b") == 0
    now[0] = 0.5
    assert (limiter.wait("a"), limiter.wait("a")) == (0, 0.5)
    for k in range(MAX_BUCKETS + 10):
        limiter.wait(str(k))
    assert len(limiter._buckets) == MAX_BUCKETS
    with pytest.raises(ValueError, match="expected over 0"):
        RateLimiter(0, 1)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_an_address_of_ipv6_counts_with_its_network(address, network):
    assert network_of(address) == network


def test_other_machines_are_served_by_tls_or_on_demand(tmp_path):
    nothing = {"tls_cert": None, "tls_key": None}
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, **nothing, insecure=False)
    check_exposure("0.0.0.0", **nothing, insecure=True)
    for host in ("0.0.0.0", "::", "192.0.2.7", "board.example"):
        with pytest.raises(ValueError, match=f"--host {host} is reached from other machines"):
            check_exposure(host, **nothing, insecure=False)
    with pytest.raises(ValueError, match="belong together"):
        check_exposure("0.0.0.0", tls_cert=tmp_path, tls_key=None, insecure=False)


def test_uploads_at_once_lose_nothing(calling, store):
    """Twenty files in small parts, while others read."""
    ann = calling("ann")
    mine = begin(ann).json()["id"]
    reading = threading.Event()

    def read():
        client = calling(None)
        while not reading.is_set():
            assert client.get(f"/boards/{SLUG}/submissions").status_code == 200

    def upload(name):
        client, data = calling("ann"), CONTENT[name]
        for start in range(0, len(data), 2048):
            assert send(client, mine, name, data[start : start + 2048], start).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        list(pool.map(upload, CONTENT))
        reading.set()
        for reader in readers:
            reader.result()
    folder = store.data / "submissions" / mine
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == CONTENT


def test_a_service_opened_again_goes_on(store, board, tokens, database_url):
    """What a service that was killed had noted is what another one begins with."""
    data = CONTENT["model.safetensors"]
    headers = {"Authorization": f"Bearer {tokens['ann']}"}
    with serving(store) as address, httpx.Client(base_url=f"{address}/api/v1", headers=headers, verify=False) as ann:
        mine = begin(ann).json()["id"]
        send(ann, mine, "model.safetensors", data[:100])
    # More had been written than was noted.
    with (store.data / "submissions" / mine / "model.safetensors").open("ab") as stream:
        stream.write(b"garbage")
    with (
        open_store(store.data, database_url) as again,
        serving(again) as address,
        httpx.Client(base_url=f"{address}/api/v1", headers=headers, verify=False) as ann,
    ):
        assert received_of(ann, mine, "model.safetensors") == 100
        assert send(ann, mine, "model.safetensors", data[100:], 100).status_code == 200
    assert (store.data / "submissions" / mine / "model.safetensors").read_bytes() == data
