"""The playground in a real browser: by keyboard alone, on a phone, in the dark, scriptless, and under attack."""

import pytest
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
from playing import solution
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

pytestmark = needs_chromium()

ARROWS = {"Up": Keys.ARROW_UP, "Down": Keys.ARROW_DOWN, "Left": Keys.ARROW_LEFT, "Right": Keys.ARROW_RIGHT}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture
def page(driver, ground):
    """Opens a page at the desk, in light; afterwards nothing may have gone wrong or been fetched from elsewhere."""

    def opened(path=""):
        driver.get(ground.address + path)
        return driver

    resize(driver, *DESK)
    paint(driver, dark=False)
    driver.get_log("browser")
    driver.get_log("performance")
    yield opened
    # That a turn was refused is told in a page of its own, and by the browser too.
    assert [said for said in complaints(driver) if "409 (Conflict)" not in said] == []
    assert {url for url in requested(driver) if not url.startswith((ground.address, "data:"))} == set()
    assert driver.execute_script("return window.taken") is None


def press(driver, *keys):
    ActionChains(driver).send_keys(*keys).perform()


def text(driver, selector):
    return " ".join(element.text for element in driver.find_elements(By.CSS_SELECTOR, selector))


def score(driver):
    """What stands in the game's heading: turn, actions, return."""
    return [element.text for element in driver.find_elements(By.CSS_SELECTOR, ".score dd")]


def wait(driver, for_what):
    """Until it holds. The page may change while it is looked at."""
    WebDriverWait(driver, 30, ignored_exceptions=[StaleElementReferenceException]).until(lambda _: for_what())


def begin(driver, environment, **filled):
    """From the first page to an episode, by keyboard alone."""
    driver.find_element(By.LINK_TEXT, environment).send_keys(Keys.ENTER)
    for name, value in filled.items():
        driver.find_element(By.NAME, name).send_keys(value)
    if not filled:
        wait(driver, lambda: driver.switch_to.active_element.text == "Begin an episode")
    with another_page(driver):
        press(driver, Keys.ENTER)
    assert driver.find_elements(By.CLASS_NAME, "game")


def test_an_episode_by_keyboard_alone(page, ground, played_server):
    driver = page()
    begin(driver, "sokoban", level_seed="21")
    played = 0
    for step, turn in enumerate(solution(played_server, 21)):
        press(driver, ARROWS["Up"], Keys.BACKSPACE, *(ARROWS[action] for action in turn))
        assert text(driver, ".queued li").split() == list(turn)
        press(driver, Keys.ENTER)
        played += len(turn)
        wait(driver, lambda played=played: score(driver)[1] == f"{played} of 10")
        assert score(driver)[0].startswith(str(min(step + 2, len(solution(played_server, 21)))))
    assert "solved" in text(driver, ".status")
    press(driver, "k")
    wait(driver, lambda: "Kept in" in text(driver, ".said"))
    [line] = [line for line in ground.lines() if line["level_seed"] == "21"]
    assert line["player"] == "person"
    before = driver.current_url
    press(driver, "s")
    wait(driver, lambda: driver.current_url != before)
    assert score(driver) == ["1 of 5", "0 of 10", "0"]


def test_a_turn_holds_no_more_actions_than_it_may(page):
    driver = page()
    begin(driver, "sokoban")
    press(driver, *[Keys.ARROW_UP] * 7)
    assert text(driver, ".queued li").split() == ["Up"] * 5
    assert not driver.find_element(By.CSS_SELECTOR, ".choices button").is_enabled()


def test_reasoning_is_written_and_stays_while_the_oracle_is_asked(page):
    driver = page()
    begin(driver, "sokoban", level_seed="22")
    press(driver, Keys.ARROW_UP)
    driver.find_element(By.ID, "reasoning").send_keys("or is it")
    press(driver, Keys.ESCAPE, "o")
    wait(driver, lambda: driver.find_elements(By.CLASS_NAME, "advice"))
    assert driver.find_element(By.ID, "reasoning").get_attribute("value") == "or is it"
    assert text(driver, ".queued li") == "Up"
    driver.find_element(By.ID, "reasoning").send_keys(" <answer>")
    press(driver, Keys.ENTER)
    wait(driver, lambda: "cannot be an agent" in text(driver, ".status"))
    assert driver.find_element(By.ID, "reasoning").get_attribute("value") == "or is it <answer>"
    driver.find_element(By.CSS_SELECTOR, "#reasoning").clear()
    driver.find_element(By.CSS_SELECTOR, "[value=advice]").send_keys(Keys.ENTER)
    wait(driver, lambda: driver.find_elements(By.CLASS_NAME, "outcome"))
    assert score(driver)[0] == "2 of 5" or "solved" in text(driver, ".status")
    assert "The oracle was asked on this level" in text(driver, ".said") or "solved" in text(driver, ".status")


def test_a_page_that_is_loaded_again_and_a_second_tab_show_the_same_episode(page):
    driver = page()
    begin(driver, "sokoban", level_seed="23")
    press(driver, Keys.ARROW_UP, Keys.ENTER)
    wait(driver, lambda: score(driver)[1] == "1 of 10")
    driver.refresh()
    assert score(driver)[1] == "1 of 10"
    first, address = driver.current_window_handle, driver.current_url
    driver.switch_to.new_window("tab")
    try:
        driver.get(address)
        press(driver, Keys.ARROW_UP, Keys.ENTER)
        wait(driver, lambda: score(driver)[1] == "2 of 10")
        driver.switch_to.window(first)
        press(driver, Keys.ARROW_UP, Keys.ENTER)
        wait(driver, lambda: "has been played meanwhile" in text(driver, ".status"))
        assert score(driver)[1] == "2 of 10"
    finally:
        for handle in driver.window_handles:
            if handle != first:
                driver.switch_to.window(handle)
                driver.close()
        driver.switch_to.window(first)


def test_actions_are_written_where_they_cannot_be_listed_and_hostile_texts_do_nothing(page):
    driver = page()
    begin(driver, "hostile")
    for step in range(3):
        field = driver.find_element(By.ID, "written")
        field.send_keys("<b>first</b>", Keys.SHIFT, Keys.ENTER, Keys.NULL, "second")
        press(driver, Keys.ENTER)
        wait(driver, lambda step=step: score(driver)[1] == f"{step + 1} of 3")
        assert "<b>first</b>\nsecond" in text(driver, ".outcome")
    assert "<script>" in text(driver, ".state")
    assert driver.find_elements(By.CSS_SELECTOR, "main img, main script, main b") == []
    with another_page(driver):
        driver.find_element(By.LINK_TEXT, "See it turn by turn").click()
    assert driver.find_elements(By.CSS_SELECTOR, "main img, main script, main b") == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [PHONE, DESK])
def test_every_page_fits_and_can_be_read(page, size, dark):
    driver = page()
    resize(driver, *size)
    paint(driver, dark=dark)

    def look():
        assert fits(driver)
        ratio, what = contrast(driver)
        assert ratio >= 4.5, what

    look()
    with another_page(driver):
        driver.find_element(By.LINK_TEXT, "sokoban").click()
    look()
    with another_page(driver):
        driver.find_element(By.CSS_SELECTOR, "button.primary").click()
    look()
    press(driver, Keys.ARROW_UP, "o")
    wait(driver, lambda: driver.find_elements(By.CLASS_NAME, "advice"))
    look()
    page("environments/hostile")
    look()
    with another_page(driver):
        driver.find_element(By.CSS_SELECTOR, "button.primary").click()
    look()


def test_without_its_script_every_button_is_a_turn(ground, tmp_path):
    with chromium(tmp_path, script=False) as driver:
        driver.get(f"{ground.address}environments/sokoban")
        with another_page(driver):
            driver.find_element(By.CSS_SELECTOR, "button.primary").click()
        with another_page(driver):
            driver.find_element(By.CSS_SELECTOR, ".choices button").click()
        assert score(driver)[:2] == ["2 of 5", "1 of 10"]
        driver.get(f"{ground.address}environments/hostile")
        with another_page(driver):
            driver.find_element(By.CSS_SELECTOR, "button.primary").click()
        driver.find_element(By.ID, "written").send_keys("go on")
        with another_page(driver):
            driver.find_element(By.CSS_SELECTOR, "button.primary").click()
        assert score(driver)[1] == "1 of 3"
        assert complaints(driver) == []


def test_another_sites_page_cannot_play(ground, driver, tmp_path):
    """It knows the address, secret and all, and still may not: what it sends says where it comes from."""
    before = ground.kept.read_text(encoding="utf-8")
    evil = tmp_path / "evil.html"
    address = f"{ground.address}environments/sokoban"
    evil.write_text(f'<form method="post" action="{address}"><input name="split" value="train"></form>', "utf-8")
    driver.get(evil.as_uri())
    driver.execute_script("document.forms[0].submit()")
    wait(driver, lambda: driver.current_url == address)
    assert "own pages" in driver.find_element(By.TAG_NAME, "body").text
    driver.get(evil.as_uri())
    reached = driver.execute_async_script(
        "const done = arguments[1]; fetch(arguments[0]).then((answer) => done(answer.type), () => done('refused'))",
        address,
    )
    assert reached == "refused"
    assert ground.kept.read_text(encoding="utf-8") == before
