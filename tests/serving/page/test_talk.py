"""The page on a real server with a tiny model: answers, figures, the race, stopping and errors."""

from __future__ import annotations

import os

import pytest

from tests.serving.page.conftest import Page
from tests.serving.processes import ServerProcess

pytestmark = pytest.mark.browser

ESCAPE_AT_FIRST_TEXT = """
const watch = new MutationObserver(() => {
    const answers = document.querySelectorAll(".turn.assistant");
    if (answers.length < 2 || !answers[1].querySelector(".markdown > *")) return;
    watch.disconnect();
    document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
});
watch.observe(document.body, {subtree: true, childList: true});
"""


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a running server (FLEDGE_PAGE_URL), or of the tiny one."""
    running = os.environ.get("FLEDGE_PAGE_URL")
    if running:
        return running
    server: ServerProcess = request.getfixturevalue("tiny_server")
    return server.url


def test_an_answer_is_tinted_measured_and_compared(page: Page, url: str) -> None:
    page.open(url)
    page.set(max_tokens=120)
    page.say("the cat sat on the mat and the cat sat on the mat")
    (answer,) = page.answers(1)
    assert "tokens/s" in answer.find_element("css selector", ".note").text
    marks = page.all(".assistant .markdown mark")
    assert marks, "no accepted draft token is tinted"
    tint = "return getComputedStyle(arguments[0]).backgroundColor"
    assert page.run(tint, marks[0]) not in ("rgba(0, 0, 0, 0)", "transparent")
    assert page.wait(lambda: float(page.text("#rate")) > 0)
    assert float(page.text("#length")) >= 1
    assert page.text("#tokens") == "120"
    assert page.all("#plot rect"), "no acceptance by position"
    assert page.all("#acceptance-chart polyline.on"), "no acceptance over time"
    assert "tok/s" in page.text("#speed-on")
    assert page.text("#speed-off") == "–"

    page.click("#compare")
    page.wait(lambda: page.all(".verdict"))
    assert page.text(".verdict").startswith("Identical")
    lanes = page.run("return [...document.querySelectorAll('.lane .markdown')].map(one => one.textContent)")
    assert lanes[0] == lanes[1] != ""
    assert "tok/s" in page.text("#speed-off")
    assert "×" in page.text("#gain")
    assert not page.all(".lane.off mark"), "text without speculation is tinted"
    assert page.all(".lane.on mark")

    page.run("document.getElementById('tint').click()")
    assert page.run(tint, page.one(".lane.on mark")) == "rgba(0, 0, 0, 0)"


def test_speculation_switch_escape_key_and_errors(page: Page, url: str) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(url)
    page.set(max_tokens=12)
    page.one("#speculate").send_keys(Keys.SPACE)
    page.say("hello")
    page.answers(1)
    assert not page.all(".assistant mark")
    assert "tok/s" in page.text("#speed-off")
    assert page.text("#speed-on") == "–"
    page.set(max_tokens=400)
    page.run(ESCAPE_AT_FIRST_TEXT)  # a key sent by the test would come too late
    page.say("go on")
    assert page.answers(2)[1].find_element("css selector", ".note").text == "stopped"
    page.set(top_p=7, max_tokens=12)
    page.say("wrong")
    note = page.answers(3)[2].find_element("css selector", ".note.error")
    assert "top_p" in note.text
    assert any("400" in message for message in page.errors())  # the refused request, and only that
    page.set(top_p=1)
    page.click(".is-last .regenerate")
    page.wait(lambda: not page.all(".note.error") and page.answers(3))
    assert "tokens" in page.answers(3)[2].find_element("css selector", ".note").text
