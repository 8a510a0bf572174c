"""A board's pages in a real browser: served and as files, on a phone, in the dark, without script."""

import re
import threading
import time
from contextlib import contextmanager
from urllib.parse import urldefrag, urljoin

import pytest
import uvicorn
from browser import (
    DESK,
    PHONE,
    another_page,
    chromium,
    complaints,
    contrast,
    fits,
    needs_chromium,
    paint,
    requested,
    resize,
)
from fastapi import FastAPI
from sample_boards import INSTANCES, SHOWCASE, definition, new_board, owner, play, submit
from sample_episodes import HOSTILE
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from service_in_thread import GENEROUS
from typer.testing import CliRunner

from turngym_leaderboard.cli import app as cli
from turngym_leaderboard.pages.from_store import BoardSource
from turngym_leaderboard.pages.routes import pages_router
from turngym_leaderboard.service.app import create_app
from turngym_leaderboard.store import open_store, owners, submissions
from turngym_leaderboard.store.values import Kind, Role

NAME = "<b>hostile</b>\u202e'\""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with open_store(tmp_path_factory.mktemp("data")) as opened:
        yield opened


@pytest.fixture(scope="module")
def board(store):
    made = new_board(store, definition(environments=("sokoban", "frozen_lake")))
    alice = owner(store, "alice")
    for wins in (5, 22):
        play(store, made, {"sokoban": range(wins), "frozen_lake": range(wins)}, tokens=None)
    for name, wins, text in (("plain", 9, "go right"), (NAME, 16, HOSTILE)):
        submit(store, made, alice, name)
        play(store, made, {"sokoban": range(wins), "frozen_lake": range(wins)}, text=text, tokens=wins * 10)
    return made


@pytest.fixture(scope="module")
def ids(store, board):
    return {each.name: each.public_id for each in submissions.of_board(store, board)}


@pytest.fixture(scope="module")
def address(store, board):
    with served(create_app(store, rates=GENEROUS)) as found:
        yield found


@pytest.fixture(scope="module")
def site(store, board, tmp_path_factory):
    """The board as `leaderboard export` writes it."""
    folder = tmp_path_factory.mktemp("export") / "site"
    done = CliRunner().invoke(cli, ["export", str(store.data), str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


@contextmanager
def served(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def pages(board, ids, store):
    """Every kind of page."""
    home = f"/boards/{board.slug}"
    source = BoardSource(store)
    keys = [source.submission(board.slug, ids[name]).showcase[0].key for name in ("plain", NAME)]
    return [
        "/",
        home,
        f"{home}/submissions/{ids[NAME]}",
        f"{home}/submissions/{ids[NAME]}/episodes",
        f"{home}/compare/{ids['plain']}/{ids[NAME]}",
        f"/episodes/{keys[1]}",
        f"/episodes/{keys[0]}/{keys[1]}",
        "/boards/none",
        "/account",
    ]


@needs_chromium()
def test_one_logs_in_by_keyboard_and_finds_what_is_ones_own(driver, address, board, store) -> None:
    ann = owners.create(store, "ann <b>")
    submissions.create(store, board, ann, name="secret plan", kind=Kind.REMOTE)
    token = owners.add_token(store, ann, Role.SUBMIT)
    driver.get(address + "/account")
    driver.find_element(By.ID, "token").send_keys(token, Keys.ENTER)
    WebDriverWait(driver, 20).until(lambda _: "secret plan" in driver.page_source)
    assert contrast(driver)[0] >= 4.5
    assert fits(driver)
    assert driver.find_element(By.CSS_SELECTOR, ".account").text == "ann <b>"
    assert driver.execute_script("return document.cookie") == ""
    driver.find_element(By.CSS_SELECTOR, "form button").click()
    WebDriverWait(driver, 20).until(lambda _: ">Log in<" in driver.page_source)


@needs_chromium()
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_every_page_fits_can_be_read_and_loads_nothing_from_elsewhere(driver, address, board, ids, store, size) -> None:
    resize(driver, *size)
    for dark in (False, True):
        paint(driver, dark=dark)
        for path in pages(board, ids, store):
            driver.get_log("performance")
            driver.get(address + path)
            ratio, what = contrast(driver)
            assert ratio >= 4.5, (path, dark, what)
            assert fits(driver), (path, dark)
            assert "owned" not in driver.title
            assert not driver.find_elements(By.CSS_SELECTOR, "main img, main script, main b, main [onload]"), path
            assert all(url.startswith((address, "data:")) for url in requested(driver)), path
            assert [said for said in complaints(driver) if "/boards/none" not in said] == [], path


@needs_chromium()
def test_a_board_is_read_and_compared_without_script(tmp_path, address, board, ids) -> None:
    with chromium(tmp_path, script=False) as driver:
        driver.get(f"{address}/boards/{board.slug}")
        rows = driver.find_elements(By.CSS_SELECTOR, ".ranking tbody tr")
        assert [row.find_element(By.TAG_NAME, "a").text for row in rows][:1] == ["oracle"]
        assert len(driver.find_elements(By.CSS_SELECTOR, ".ranking .strip .reach")) == 4
        driver.find_element(By.CSS_SELECTOR, f"#one option[value='{ids['plain']}']").click()
        driver.find_element(By.CSS_SELECTOR, f"#other option[value='{ids['random']}']").click()
        with another_page(driver):
            next(each for each in driver.find_elements(By.TAG_NAME, "button") if each.text == "Compare").click()
        assert driver.current_url.endswith(f"/{ids['plain']}/{ids['random']}")
        assert "only plain: 4" in driver.find_element(By.TAG_NAME, "main").text


@needs_chromium()
def test_the_way_from_the_boards_to_an_episode_needs_no_mouse(driver, address, ids) -> None:
    resize(driver, *DESK)
    driver.get(address)

    def follow(text):
        for _ in range(60):
            ActionChains(driver).send_keys(Keys.TAB).perform()
            if driver.switch_to.active_element.text.startswith(text):
                break
        before = driver.current_url
        driver.switch_to.active_element.send_keys(Keys.ENTER)
        WebDriverWait(driver, 20).until(lambda _: driver.current_url != before)

    for text in ("Board of grids", "plain", "sokoban, instance"):
        follow(text)
    ActionChains(driver).send_keys(Keys.END).perform()
    assert driver.find_element(By.CLASS_NAME, "where").text == "End"


@needs_chromium()
def test_progress_moves_by_itself(driver, tmp_path) -> None:
    app = FastAPI()
    with open_store(tmp_path) as store:
        made = new_board(store, definition())
        app.include_router(pages_router(BoardSource(store)))
        with served(app) as address:
            driver.get(f"{address}/boards/{made.slug}")
            assert "There is no result yet." in driver.find_element(By.TAG_NAME, "main").text
            play(store, made, {"sokoban": range(4)})
            WebDriverWait(driver, 30).until(lambda _: driver.find_elements(By.CSS_SELECTOR, ".ranking tbody tr"))
            assert f"0 of {INSTANCES + SHOWCASE}" in driver.find_element(By.TAG_NAME, "main").text


@needs_chromium()
def test_an_exported_site_works_from_its_folder(driver, site, board, ids) -> None:
    resize(driver, *DESK)
    driver.get_log("browser")
    driver.get_log("performance")
    driver.get((site / "index.html").as_uri())
    for text in (f"Board of {board.definition.name}", "plain", "sokoban, instance"):
        next(each for each in driver.find_elements(By.TAG_NAME, "a") if each.text.startswith(text)).click()
    with another_page(driver):
        driver.find_element(By.CSS_SELECTOR, ".others a").click()
    ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()
    assert driver.find_element(By.CLASS_NAME, "where").text == "Turn 2 of 2"
    assert len(driver.find_elements(By.CSS_SELECTOR, ".frame.current .board")) == 2
    assert complaints(driver) == []
    assert all(url.startswith(("file:", "data:")) for url in requested(driver))


def test_every_link_of_an_exported_site_leads_to_one_of_its_files(site) -> None:
    files = list(site.rglob("*.html"))
    known = {str(file) for file in site.rglob("*")}
    # Home, board, 4 submissions, 4·3 comparisons; 6 showcase episodes of each, alone and beside 3 others.
    assert len(files) == 2 + 4 + 12 + 4 * 6 * (1 + 3)
    for file in files:
        text = file.read_text(encoding="utf-8")
        links = re.findall(r'(?:href|src)="([^"]*)"', text)
        assert len(links) >= 4
        for link in links:
            assert not re.match(r"[a-z]+:|/", link), (file, link)
            target = urldefrag(urljoin(file.as_uri(), link))[0].removeprefix("file://")
            assert target in known, (file, link)
        assert "<form action" not in text
        assert "<b>hostile" not in text


def test_an_export_replaces_an_export_and_nothing_else(tmp_path) -> None:
    with open_store(tmp_path / "data") as store:
        new_board(store, definition("first"))
        done = CliRunner().invoke(cli, ["export", str(store.data), str(tmp_path / "site")])
        assert "boards: 1, submissions: 2, episodes: 0, pages: 4" in done.output
        (tmp_path / "site" / "stale.html").touch()
        new_board(store, definition("second"))
        CliRunner().invoke(cli, ["export", str(store.data), str(tmp_path / "site")])
        assert not (tmp_path / "site" / "stale.html").exists()
        assert (tmp_path / "site" / "boards" / "second-2026.html").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    done = CliRunner().invoke(cli, ["export", str(tmp_path / "data"), str(other)])
    assert done.exit_code == 2
    assert "holds something that no export made" in " ".join(done.stderr.split())
    done = CliRunner().invoke(cli, ["export", str(other), str(tmp_path / "site")])
    assert done.exit_code == 2
    assert "holds no board.sqlite" in " ".join(done.stderr.split())
    assert {file.name for file in other.iterdir()} == {"thesis.tex"}
