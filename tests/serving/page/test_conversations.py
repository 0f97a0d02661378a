"""Conversations on the page: storing, renaming, deleting, editing, regenerating, stopping; and the messages that are sent."""

from __future__ import annotations

import json

import pytest

from tests.serving.page.conftest import Page
from tests.serving.page.scripted import ScriptedServer

pytestmark = pytest.mark.browser

STORED = "return Object.keys(localStorage).filter(key => key.startsWith('fledge.conversation.')).length"


def titles(page: Page) -> list[str]:
    return page.run("return [...document.querySelectorAll('#list .open')].map(one => one.textContent)")


def sent(scripted: ScriptedServer) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in scripted.bodies[-1]["messages"]]


def test_conversations_are_stored_renamed_and_deleted(page: Page, scripted: ScriptedServer) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(scripted.url)
    scripted.text = "Some **bold** answer with words enough to be tinted."
    page.say("first   question with  spaces")
    page.answers(1)
    page.click("#new")
    assert not page.all(".turn")
    assert page.one("#empty").is_displayed()
    page.say("second question")
    page.answers(1)
    assert titles(page) == ["second question", "first question with spaces"]

    page.open(scripted.url)
    assert page.text(".turn.user .text") == "second question"
    assert page.all(".assistant strong")
    assert page.all(".assistant mark"), "the tint is not stored"
    assert "tokens/s" in page.text(".assistant .note")
    page.click("#list li:nth-child(2) .open")
    page.wait(lambda: page.text(".turn.user .text").startswith("first"))
    assert page.all("#list li:nth-child(2) .open[aria-current]")

    page.one("#list li:nth-child(2) .open").send_keys(Keys.F2)
    page.keys("renamed" + Keys.ENTER)
    assert titles(page) == ["second question", "renamed"]
    page.one("#list li:nth-child(2) .open").send_keys(Keys.F2)
    page.keys("not this" + Keys.ESCAPE)
    assert titles(page) == ["second question", "renamed"]
    assert page.focused() == "open"

    page.keys(Keys.DELETE)
    assert titles(page) == ["second question"]
    assert not page.all(".turn"), "a deleted conversation is still shown"
    assert page.run(STORED) == 1
    page.click("#undo")
    assert titles(page) == ["second question", "renamed"]
    assert page.run(STORED) == 2
    page.click("#list li:nth-child(2) .open")
    page.say("one more")
    page.answers(2)
    assert titles(page) == ["renamed", "second question"]  # the newest first
    assert len(sent(scripted)) == 3


def test_storage_is_bounded_and_invalid_entries_are_ignored(page: Page, scripted: ScriptedServer) -> None:
    page.open(scripted.url)
    scripted.text = "ok"
    fill = """
    for (let at = 0; at < 60; at++) localStorage.setItem("fledge.conversation.c" + at, JSON.stringify(
        {id: "c" + at, title: "number " + at, updated: at, messages: [{role: "user", content: "x".repeat(arguments[0])}]}));
    localStorage.setItem("fledge.conversation.bad", "{");
    localStorage.setItem("fledge.conversation.worse", JSON.stringify({id: "worse", title: {}, updated: 1, messages: [{}]}));
    localStorage.setItem("fledge.conversation.other", JSON.stringify({id: "c1", title: "x", updated: 1, messages: []}));
    """
    page.run(fill, 10)
    page.open(scripted.url)
    assert len(titles(page)) == 60
    assert titles(page)[0] == "number 59"
    page.click("#new")
    page.say("newest")
    page.answers(1)
    assert page.run(STORED) == 50
    assert titles(page)[:2] == ["newest", "number 59"]
    page.run(fill, 60_000)  # 3.6 million characters
    page.open(scripted.url)
    page.click("#new")
    page.say("short again")
    page.answers(1)
    total = page.run("return Object.values({...localStorage}).join('').length")
    assert total < 2_010_000
    assert titles(page)[0] == "short again"
    page.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }")
    page.say("with a full storage")
    page.answers(2)
    assert page.text("#kept").startswith("Not kept")


def test_edit_regenerate_and_stop(page: Page, scripted: ScriptedServer) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(scripted.url)
    page.set(system="Be brief.", temperature=0.5, top_k=3, seed=7)
    scripted.text = "First answer."
    page.say("question one")
    page.answers(1)
    body = scripted.bodies[-1]
    assert sent(scripted) == [("system", "Be brief."), ("user", "question one")]
    assert (body["temperature"], body["top_p"], body["top_k"], body["seed"], body["max_tokens"]) == (0.5, 1, 3, 7, 512)
    assert body["speculate"] is True
    page.set(system="", top_k="", seed="")
    page.say("question two")
    page.answers(2)
    assert "top_k" not in scripted.bodies[-1]
    assert "seed" not in scripted.bodies[-1]
    assert sent(scripted) == [("user", "question one"), ("assistant", "First answer."), ("user", "question two")]

    assert "cut" not in page.text(".is-last .note")
    scripted.text, scripted.finish_reason = "Another answer.", "length"
    page.click(".is-last .regenerate")
    page.wait(lambda: "Another" in page.text(".is-last .text"))
    assert len(page.answers(2)) == 2
    assert page.text(".is-last .note").endswith("cut off at the token limit")
    assert sent(scripted) == [("user", "question one"), ("assistant", "First answer."), ("user", "question two")]

    page.click(".turn.user .edit")
    page.one(".edit-box").send_keys(" no" + Keys.ESCAPE)
    assert [one.text for one in page.all(".turn.user .text")] == ["question one", "question two"]
    page.one("#prompt").send_keys(Keys.ARROW_UP)  # in the empty box: edits the last question
    page.one(".edit-box").send_keys(", edited" + Keys.ENTER)
    page.answers(2)
    assert sent(scripted)[-1] == ("user", "question two, edited")
    page.click(".turn.user .edit")
    page.one(".edit-box").send_keys(", edited" + Keys.ENTER)
    page.wait(lambda: len(page.answers(1)) == 1)
    assert sent(scripted) == [("user", "question one, edited")]

    scripted.text, scripted.pause_at = "word " * 100, 200
    page.say("a long one")
    page.wait(lambda: page.streamed() > 150)
    assert page.one("#stop").is_displayed()
    assert not page.one("#send").is_displayed()
    page.click("#stop")
    stopped = page.answers(2)[1]
    assert stopped.find_element("css selector", ".note").text == "stopped"
    page.wait(lambda: scripted.num_aborted == 1)  # the server saw the disconnect
    kept = json.loads(page.run("return Object.entries(localStorage).find(one => one[0].startsWith('fledge.conv'))[1]"))
    assert len(kept["messages"][-1]["content"]) > 150

    page.say("and another")
    page.wait(lambda: page.streamed() > 150)
    page.click("#new")  # stops the stream; its text stays in its conversation
    page.wait(lambda: scripted.num_aborted == 2)
    assert not page.all(".turn")
    page.click("#list li:nth-child(1) .open")
    page.wait(lambda: len(page.answers(3)) == 3)


def test_a_race_reports_whether_the_answers_are_identical(page: Page, scripted: ScriptedServer) -> None:
    page.open(scripted.url)
    scripted.text, scripted.delay = "The same words each time, whatever drafts them.", 0.1
    page.say("race")
    page.answers(1)
    page.click(".is-last .race-here")
    page.wait(lambda: page.text(".lane.off .clock") == "measuring")
    page.wait(lambda: page.text(".lane.on .clock") == "measuring")
    assert page.text(".lane.off .clock") == ""  # the lanes run one after the other
    page.wait(lambda: [page.text(f".lane.{side} .clock") for side in ("off", "on")] == ["replay", "replay"])
    page.wait(lambda: page.all(".verdict.same"))
    assert "character for character" in page.text(".verdict")
    assert [body["speculate"] for body in scripted.bodies] == [True, False, True]
    assert [len(body["messages"]) for body in scripted.bodies] == [1, 1, 1]  # the question, without its answer
    assert "× the speed" in page.text(".lane.on .clock")
    assert page.all("#speed-chart polyline.off")

    scripted.plain_text = "Other words."
    page.wait(lambda: not page.all("body.is-busy"))
    page.click("#compare")
    page.wait(lambda: len(page.all(".verdict")) == 2)
    assert page.all(".verdict")[1].text == "The answers differ."
    page.set(temperature=1)
    page.wait(lambda: not page.all("body.is-busy"))
    page.click("#compare")
    page.wait(lambda: len(page.all(".verdict")) == 3)
    assert "because they were sampled" in page.all(".verdict")[2].text

    scripted.text, scripted.plain_text, scripted.pause_at = "word " * 50, None, 20
    page.wait(lambda: not page.all("body.is-busy"))
    page.click("#compare")
    page.wait(lambda: page.all(".race:last-child .lane.off p"))
    page.click("#stop")
    page.wait(lambda: page.text(".race:last-child > .note") == "stopped")

    scripted.pause_at, scripted.text = None, "word " * 14
    page.wait(lambda: not page.all("body.is-busy"))
    page.click("#compare")
    page.wait(lambda: page.text(".race:last-child .lane.on .clock") == "replay")
    page.click("#stop")  # ends only the replay: both lanes are already measured
    page.wait(lambda: page.all(".race:last-child .verdict.same"))
    lanes = page.run("return [...document.querySelectorAll('.race:last-child .lane .markdown')].map(one => one.textContent)")
    assert lanes == [scripted.text.strip()] * 2


def test_without_a_drafter_the_race_is_disabled(page: Page, scripted: ScriptedServer) -> None:
    scripted.drafter, scripted.text = None, "plain"
    page.open(scripted.url)
    assert not page.one("#speculate").is_enabled()
    assert page.text("#gain") == "No drafter is loaded."
    page.say("hello")
    page.answers(1)
    assert scripted.bodies[-1]["speculate"] is False
    assert not page.one("#compare").is_enabled()


def test_the_learning_curve_shows_swaps(page: Page, scripted: ScriptedServer) -> None:
    labels = '{engine="0",model_name="m"}'
    figures = {"fledge:learn_generation": 1, "fledge:learn_steps_total": 16, "fledge:learn_samples": 9}
    page.open(scripted.url)
    assert not page.one("#learning").is_displayed()  # no learning metrics: the server runs without --learn
    assert "/learning" not in scripted.paths
    scripted.metrics = "".join(f"{name}{labels} {value}.0\n" for name, value in figures.items())
    scripted.learning = {"points": [[32, 2.0], [64, 3.0]], "swaps": [40]}  # recorded before the page was opened
    page.open(scripted.url)
    page.wait(lambda: "now 3.00" in page.one("#curve").get_attribute("aria-label"))
    assert len(page.all("#curve .swap")) == 1
    scripted.learning = {"points": [[32, 2.0], [64, 3.0], [70, 4.0]], "swaps": [40, 71]}
    page.wait(lambda: "now 4.00" in page.one("#curve").get_attribute("aria-label"))
    assert "swapped in 2 times" in page.one("#curve").get_attribute("aria-label")
    assert len(page.all("#curve .swap")) == 1  # the swap at 71 is drawn with the next point
    assert page.text("#learnt") == "generation 1, 16 training steps, 9 texts kept"
