"""A real Chromium for tests of pages, each with a profile of its own; tests skip where there is none."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import staleness_of
from selenium.webdriver.support.wait import WebDriverWait

PHONE = (390, 844)
DESK = (1200, 900)


def needs_chromium() -> pytest.MarkDecorator:
    """Marks tests that are left out where there is no Chromium with its driver."""
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    return pytest.mark.skipif(
        bool(missing), reason=f"no {' and no '.join(missing)} on the path: apt-get install chromium chromium-driver"
    )


@contextmanager
def chromium(folder: Path, *, size: tuple[int, int] = DESK, dark: bool = False, script: bool = True) -> Generator:
    """A browser. `folder`: for its profile. `script`: pages may run theirs."""
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        f"--user-data-dir={folder / 'profile'}",
    ):
        options.add_argument(argument)
    if not script:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        width, height = size
        resize(driver, width, height)
        paint(driver, dark=dark)
        yield driver
    finally:
        driver.quit()


@contextmanager
def another_page(driver: webdriver.Chrome) -> Generator[None]:
    """Ends once what the block did has led to another page. Without scripts the driver may not wait for it."""
    before = driver.find_element(By.TAG_NAME, "html")
    yield
    WebDriverWait(driver, 30).until(staleness_of(before))
    WebDriverWait(driver, 30).until(lambda _: driver.execute_script("return document.readyState") == "complete")


def resize(driver: webdriver.Chrome, width: int, height: int) -> None:
    """The page's size in CSS pixels: a window cannot be as narrow as a phone."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def paint(driver: webdriver.Chrome, *, dark: bool) -> None:
    """Whether the reader prefers dark pages."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def complaints(driver: webdriver.Chrome) -> list[str]:
    """What the browser has complained of since this was last asked: what failed, and what a policy forbade."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requested(driver: webdriver.Chrome) -> list[str]:
    """The addresses that pages requested since this was last asked; the browser's own pages load parts of it."""
    messages = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    urls = (told["params"]["request"]["url"] for told in messages if told["method"] == "Network.requestWillBeSent")
    return [url for url in urls if not url.startswith("chrome://")]


def fits(driver: webdriver.Chrome) -> bool:
    """Whether the page is no wider than the screen."""
    return driver.execute_script("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def contrast(driver: webdriver.Chrome) -> tuple[float, str]:
    """The least contrast of visible text with what lies behind it, and that text (WCAG 2.2, 1.4.3)."""
    ratio, what = driver.execute_script(_CONTRAST)
    return ratio, what


_CONTRAST = r"""
const channels = (colour) => colour.match(/[\d.]+/g).map(Number);
const linear = (c) => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
const luminance = (colour) => {
  const [r, g, b] = channels(colour).map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (channels(colour)[3] !== 0) return colour;
  }
  throw Error("nothing lies behind");
};
let worst = [99, ""];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  const ink = luminance(element.closest("svg") ? style.fill : style.color);
  const ground = luminance(behind(element));
  const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
  if (ratio < worst[0]) worst = [ratio, `${element.tagName}: ${walker.currentNode.data}`];
}
return worst;
"""
