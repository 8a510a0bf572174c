"""The viewer in a real browser: by mouse, by keyboard alone, on a phone, in the dark, and without its script."""

import re
import subprocess
import sys

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
from sample_episodes import BOARD, HOSTILE, LAKE, training_episode, training_turn, write_lines
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

pytestmark = needs_chromium()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """`leaderboard view` over two files, as a user starts it."""
    folder = tmp_path_factory.mktemp("view")
    hostile = training_turn(HOSTILE, reasoning=HOSTILE, actions=(HOSTILE,), valid_format=False, response=HOSTILE)
    one = write_lines(
        folder / "one/trajectories.jsonl",
        training_episode(1, turns=4),
        training_episode(2, turns=2, success=False),
        training_episode(3) | {"turns": [training_turn("Guess a number."), hostile], "environment": HOSTILE},
    )
    lake = [training_turn(LAKE), training_turn(BOARD, reasoning="x" * 3_000, actions=("y" * 300,))]
    other = write_lines(folder / "other/t.jsonl", training_episode(4, environment="lake") | {"turns": lake})
    command = [sys.executable, "-m", "turngym_leaderboard.cli", "view", str(one), str(other), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            found = next(filter(None, (re.search(r"view: (http://\S+/)", line) for line in running.stdout)))
            yield found[1]
        finally:
            running.terminate()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def scriptless(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("scriptless"), script=False) as running:
        yield running


@pytest.fixture
def page(driver, address):
    """Opens a page at the desk, in light; afterwards nothing may have gone wrong or been fetched from elsewhere."""

    def opened(path=""):
        driver.get(address + path)
        return driver

    resize(driver, *DESK)
    paint(driver, dark=False)
    driver.get_log("browser")
    driver.get_log("performance")
    yield opened
    assert complaints(driver) == []
    assert {url for url in requested(driver) if not url.startswith((address, "data:"))} == set()


def press(driver, *keys):
    ActionChains(driver).send_keys(*keys).perform()


def where(driver):
    return driver.find_element(By.CLASS_NAME, "where").text


def visible_frames(driver):
    return [frame.get_attribute("id") for frame in driver.find_elements(By.CLASS_NAME, "frame") if frame.is_displayed()]


def test_an_episode_is_walked_through_with_the_keyboard_alone(page) -> None:
    driver = page("episodes/a-1")
    assert visible_frames(driver) == ["turn-1"]
    assert where(driver) == "Turn 1 of 4"
    press(driver, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert visible_frames(driver) == ["turn-3"]
    press(driver, Keys.ARROW_LEFT)
    assert where(driver) == "Turn 2 of 4"
    press(driver, Keys.END)
    assert where(driver) == "End"
    press(driver, Keys.ARROW_RIGHT)
    assert where(driver) == "End"
    press(driver, Keys.HOME)
    assert where(driver) == "Turn 1 of 4"
    assert driver.current_url.endswith("#turn-1")


def test_space_plays_to_the_end_and_pauses(page) -> None:
    driver = page("episodes/a-1")
    driver.find_element(By.CSS_SELECTOR, ".pace option[value='250']").click()
    driver.find_element(By.TAG_NAME, "h1").click()
    press(driver, " ")
    assert driver.find_element(By.CLASS_NAME, "play").get_attribute("aria-label") == "Pause"
    press(driver, " ")
    assert driver.find_element(By.CLASS_NAME, "play").get_attribute("aria-label") == "Play"
    press(driver, " ")
    WebDriverWait(driver, 20).until(lambda _: where(driver) == "End")
    assert driver.find_element(By.CLASS_NAME, "play").get_attribute("aria-label") == "Play"
    press(driver, " ")
    assert where(driver) == "Turn 1 of 4"


def test_keys_are_told_and_the_dialogue_closes(page) -> None:
    driver = page("episodes/a-1")
    dialogue = driver.find_element(By.TAG_NAME, "dialog")
    press(driver, "?")
    assert dialogue.is_displayed()
    press(driver, Keys.ARROW_RIGHT)
    assert where(driver) == "Turn 1 of 4"
    press(driver, Keys.ESCAPE)
    assert not dialogue.is_displayed()


def test_the_way_from_the_list_to_a_pair_needs_no_mouse(page) -> None:
    driver = page()
    boxes = driver.find_elements(By.CSS_SELECTOR, "input[name=e]")
    for box in boxes[:2]:
        box.send_keys(" ")
    button = next(each for each in driver.find_elements(By.TAG_NAME, "button") if "side by side" in each.text)
    button.send_keys(Keys.ENTER)
    WebDriverWait(driver, 20).until(lambda _: driver.current_url.endswith("/episodes/a-1/a-2"))
    assert len(driver.find_elements(By.CSS_SELECTOR, ".frame.current .board")) == 2
    press(driver, Keys.END)
    assert "over before" in driver.find_element(By.CSS_SELECTOR, ".frame.current").text


def test_n_and_p_lead_to_the_neighbours(page) -> None:
    driver = page("episodes/a-1")
    press(driver, "n")
    WebDriverWait(driver, 20).until(lambda _: driver.current_url.endswith("/episodes/a-2"))
    press(driver, "p")
    WebDriverWait(driver, 20).until(lambda _: driver.current_url.endswith("/episodes/a-1"))


def test_tab_reaches_every_control_in_order_and_shows_where_it_is(page) -> None:
    driver = page("episodes/a-1")
    reached = []
    for _ in range(14):
        press(driver, Keys.TAB)
        element = driver.switch_to.active_element
        reached.append(element.get_attribute("aria-label") or element.text or element.get_attribute("class"))
        outlined = driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", element)
        assert outlined != "none", reached[-1]
    order = ["First turn", "Turn before", "Play", "Next turn", "End", "Turn"]
    start = reached.index("First turn")
    assert reached[start : start + 6] == order


def test_a_turn_has_an_address(page) -> None:
    driver = page("episodes/a-1#turn-3")
    assert where(driver) == "Turn 3 of 4"


def test_hostile_text_runs_nothing_and_stays_in_its_place(page) -> None:
    for path in ("episodes/a-3", "", "episodes/a-3/a-1"):
        driver = page(path)
        assert driver.title != "owned"
        assert not driver.find_elements(By.CSS_SELECTOR, "main img, main script, main [onload]")
        assert fits(driver)
    driver = page("episodes/a-3#turn-2")
    assert "<script>document.title='owned'</script>" in driver.find_element(By.CSS_SELECTOR, ".frame.current").text


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("path", ["", "?list=b", "?least=x", "episodes/a-1", "episodes/a-1#turn-5", "episodes/a-3/b-1"])
def test_pages_fit_a_phone_and_can_be_read(page, path, dark) -> None:
    driver = page(path)
    resize(driver, *PHONE)
    paint(driver, dark=dark)
    assert fits(driver)
    ratio, what = contrast(driver)
    assert ratio >= 4.5, what


def test_without_script_all_turns_are_there_as_text(scriptless, address) -> None:
    scriptless.get(address + "episodes/a-1")
    assert visible_frames(scriptless) == ["turn-1", "turn-2", "turn-3", "turn-4", "turn-5"]
    assert not scriptless.find_element(By.CLASS_NAME, "controls").is_displayed()
    text = scriptless.find_element(By.TAG_NAME, "main").text
    assert text.count("push right") == 4
    assert "Return −0.4 after 4 turns" in text


def test_without_script_lists_filter_and_pairs_open(scriptless, address) -> None:
    scriptless.get(address)
    scriptless.find_element(By.CSS_SELECTOR, "select[name=verdict] option[value=failed]").click()
    with another_page(scriptless):
        next(each for each in scriptless.find_elements(By.TAG_NAME, "button") if each.text == "Filter").click()
    assert len(scriptless.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1
    scriptless.get(address + "episodes/a-2")
    with another_page(scriptless):
        scriptless.find_element(By.CSS_SELECTOR, "input[name=e]:not([type=hidden])").send_keys("b-1", Keys.ENTER)
    assert scriptless.current_url.endswith("/episodes/a-2/b-1")
