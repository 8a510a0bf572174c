"""Pages for those who show a token: what they then see, and what nobody else can make of it."""

from datetime import UTC, datetime

import httpx
import pytest
from sample_episodes import HOSTILE
from service_in_thread import serving
from small_boards import SECRET, deal, definition

from turngym_leaderboard.store import boards, open_store, owners, submissions
from turngym_leaderboard.store.values import Kind, Role, Visibility


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def mine(store):
    """A private submission of Ann's."""
    board = boards.create(store, definition(), SECRET, [deal()])
    ann = owners.create(store, "ann")
    return submissions.create(store, board, ann, name="secret plan", kind=Kind.CHECKPOINT)


@pytest.fixture
def browser(store, mine):
    """Opens browsers of the service's."""
    opened = []
    with serving(store) as address:

        def browse():
            opened.append(httpx.Client(base_url=address, follow_redirects=True, verify=False, timeout=30))
            return opened[-1]

        yield browse
        for each in opened:
            each.close()


def token_of(store, name, role=Role.SUBMIT):
    known = {each.name: each for each in owners.every(store)}
    return owners.add_token(store, known.get(name) or owners.create(store, name), role)


def logged_in(browser, token):
    page = browser()
    assert page.post("/account", data={"token": f" {token}\n"}).status_code == 200
    return page


PAGE = "/boards/lakes-one/submissions/"


def test_a_private_submission_is_there_for_its_owner_and_admins_alone(browser, store, mine):
    nobody = browser()
    assert nobody.get(PAGE + mine.public_id).status_code == 404
    assert "secret plan" not in nobody.get("/boards/lakes-one").text
    assert ">Log in<" in nobody.get("/").text
    for name, role, seen in (("ann", Role.SUBMIT, True), ("root", Role.ADMIN, True), ("bob", Role.SUBMIT, False)):
        page = logged_in(browser, token_of(store, name, role))
        assert page.get(PAGE + mine.public_id).status_code == (200 if seen else 404)
        board = page.get("/boards/lakes-one").text
        assert ("secret plan" in board) is (" · private" in board) is seen
        assert f"<bdi>{name}</bdi></a>" in board
        own = page.get("/account").text
        assert ("secret plan" in own) is (name == "ann")
        assert page.get("/boards/lakes-one").headers["cache-control"] == "no-store"
    assert nobody.get(PAGE + mine.public_id).status_code == 404
    submissions.set_visibility(store, mine.public_id, Visibility.PUBLIC)
    assert " · private" not in nobody.get(PAGE + mine.public_id).text


def test_who_logs_out_or_whose_token_is_revoked_sees_nothing_more(browser, store, mine):
    page = logged_in(browser, token_of(store, "ann"))
    assert page.get(PAGE + mine.public_id).status_code == 200
    assert ">Log in<" in page.post("/account/logout").text
    assert not page.cookies
    assert page.get(PAGE + mine.public_id).status_code == 404
    token = token_of(store, "ann")
    page = logged_in(browser, token)
    owners.revoke(store, owners.token(store, token, now=datetime.now(UTC)).id)
    assert page.get(PAGE + mine.public_id).status_code == 404


def test_a_token_that_is_none_is_refused_in_the_page(browser, store):
    page = browser()
    for sent, status, told in (
        ({"data": {"token": "tgb_wrong"}}, 401, "the token is unknown, expired or revoked"),
        ({"data": {}}, 422, "a form of the type"),
        ({"json": {"token": "x"}}, 422, "a form of the type &#39;application/json&#39; came"),
    ):
        refused = page.post("/account", **sent)
        assert (refused.status_code, told in refused.text) == (status, True), refused.text
        assert not page.cookies


def test_the_cookie_is_the_browsers_alone_and_opens_no_call_of_the_api(browser, store, mine):
    page = browser()
    page.follow_redirects = False
    answer = page.post("/account", data={"token": token_of(store, "ann")})
    assert answer.status_code == 303
    told = answer.headers["set-cookie"].lower()
    assert "httponly" in told
    assert "samesite=lax" in told
    for method, path in (("GET", ""), ("PATCH", ""), ("POST", "/withdraw")):
        refused = page.request(method, f"/api/v1/submissions/{mine.public_id}{path}", json={"visibility": "public"})
        assert refused.status_code in (401, 404)
    assert page.get("/api/v1/submissions").status_code == 401
    assert submissions.find(store, mine.public_id).visibility is Visibility.PRIVATE


def test_forms_of_other_sites_are_refused(browser, store):
    page = browser()
    token = token_of(store, "ann")
    for path in ("/account", "/account/logout"):
        refused = page.post(path, data={"token": token}, headers={"Origin": "https://elsewhere.example"})
        assert refused.status_code == 403
        assert "a page of another site sent this" in refused.text
    assert not page.cookies
    here = {"Origin": str(page.base_url).rstrip("/")}
    assert page.post("/account", data={"token": token}, headers=here).status_code == 200
    assert page.cookies


def test_hostile_names_do_nothing_on_ones_own_page(browser, store):
    board = boards.find(store, "lakes-one")
    submissions.create(store, board, owners.find(store, "ann"), name=HOSTILE, kind=Kind.REMOTE)
    own = logged_in(browser, token_of(store, "ann")).get("/account").text
    assert HOSTILE not in own
    assert "<script" not in own
