"""The page in a real browser: `make test-browser`. FLEDGE_SCREENSHOT=file.png keeps a picture."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.serving.processes import ServerProcess

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that runs already (FLEDGE_PAGE_URL), or the tiny one."""
    running = os.environ.get("FLEDGE_PAGE_URL")
    if running:
        yield running
    else:
        server: ServerProcess = request.getfixturevalue("tiny_server")
        yield server.url


@pytest.fixture
def browser() -> Iterator:
    from selenium import webdriver

    assert shutil.which("chromium"), "chromium is missing: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,860"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    problems = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    driver.quit()
    assert problems == []


def wait(browser, condition, seconds: float = 180):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, poll_frequency=0.1).until(condition)


def text(browser, element: str) -> str:
    return browser.find_element("id", element).text


def say(browser, words: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.find_element("id", "prompt").send_keys(words + Keys.ENTER)


def answered(browser, count: int):
    """The notes under the answers, once there are `count` of them."""
    return wait(browser, lambda b: len(found := b.find_elements("css selector", ".assistant > .note")) >= count and found)


def test_a_message_is_answered_with_tinted_text_and_figures(browser, url: str) -> None:
    browser.get(url)
    wait(browser, lambda b: "drafter" in text(b, "served"))
    browser.execute_script(
        "document.getElementById('max_tokens').value = arguments[0]", os.environ.get("FLEDGE_PAGE_TOKENS", "120")
    )
    say(browser, os.environ.get("FLEDGE_PAGE_PROMPT", "the cat sat on the mat and the cat sat on the mat"))
    notes = answered(browser, 1)
    assert "tokens/s" in notes[0].text
    assert browser.find_elements("css selector", ".assistant .text > *"), "no text came"
    marks = browser.find_elements("css selector", ".assistant .text mark")
    assert marks, "no accepted draft token is tinted"
    colour = browser.execute_script("return getComputedStyle(arguments[0]).backgroundColor", marks[0])
    assert colour not in ("rgba(0, 0, 0, 0)", "transparent")
    assert float(text(browser, "rate")) > 0
    assert float(text(browser, "length")) >= 1
    assert browser.find_elements("css selector", "#plot rect"), "no acceptance by position"
    assert "tok/s" in text(browser, "speed-on")
    assert text(browser, "speed-off") == "–"

    browser.find_element("id", "compare").click()
    wait(browser, lambda b: b.find_elements("css selector", ".verdict"))
    assert browser.find_element("css selector", ".verdict").text == "The answers are the same."
    assert "tok/s" in text(browser, "speed-off")
    assert "×" in text(browser, "gain")
    assert not browser.find_elements("css selector", ".pair .off mark"), "plain text is tinted"
    if os.environ.get("FLEDGE_SCREENSHOT"):
        browser.save_screenshot(os.environ["FLEDGE_SCREENSHOT"])


ESCAPE_AT_THE_FIRST_WORDS = """
const watch = new MutationObserver(() => {
    const answers = document.querySelectorAll(".assistant");
    if (answers.length < 2 || !answers[1].querySelector(".text > *")) return;
    watch.disconnect();
    document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
});
watch.observe(document.body, {subtree: true, childList: true});
"""


def test_the_switch_escape_and_errors(browser, url: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.get(url)
    wait(browser, lambda b: "drafter" in text(b, "served"))
    browser.execute_script("document.getElementById('max_tokens').value = 12")
    browser.find_element("id", "speculate").send_keys(Keys.SPACE)
    say(browser, "hello")
    answered(browser, 1)
    assert not browser.find_elements("css selector", ".assistant mark")
    assert "tok/s" in text(browser, "speed-off")
    assert text(browser, "speed-on") == "–"
    browser.execute_script("document.getElementById('max_tokens').value = 400")
    browser.execute_script(ESCAPE_AT_THE_FIRST_WORDS)  # a key from here would come too late
    say(browser, "go on")
    assert answered(browser, 2)[1].text == "stopped"
    browser.find_element("id", "reset").click()
    browser.execute_script("document.getElementById('temperature').value = 5")
    browser.execute_script("document.getElementById('top_p').value = 7")
    say(browser, "wrong")
    assert "top_p" in answered(browser, 1)[0].text
    browser.get_log("browser")  # the refused request is logged as such


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_overflows(browser, url: str, width: int) -> None:
    browser.get(url)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": width < 500}
    )
    wait(browser, lambda b: "drafter" in text(b, "served"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    box = browser.find_element("id", "prompt").rect
    assert box["width"] > 150
    assert box["y"] + box["height"] <= 740
    outside = browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert all(name.startswith((url, "data:")) for name in outside)
