"""Accessibility of the page: axe-core in every view, light and dark themes, keyboard only, phone width, reduced motion."""

from __future__ import annotations

import pytest

from tests.serving.page.conftest import Page
from tests.serving.page.scripted import ScriptedServer

pytestmark = pytest.mark.browser

# Every Markdown construct, so that each is checked. The headings are in no good order, as in models' answers.
EVERYTHING = """#### Four first

A **bold** and *slanted* ~~struck~~ text with `code`, a [link](https://example.com/with-a-long-path) and https://example.com/bare.

# One

```python
def fib(n: int) -> list[int]:  # a comment that makes this line longer than a telephone is wide, so that it must scroll
    \"\"\"The first n.\"\"\"
    return [1, 1, 2][:n]
```

| left | right | | a column with many words in it | another one of that kind |
|:-----|------:|-|--------------------------------|--------------------------|
| a | 1 | | some words that take their room | and_some_that_cannot_be_broken_anywhere |

- one
  1. two
     - three
- [x] task
- [ ] open

> A quote, and `code` in it.

---

averyveryverylongwordthatdoesnotfitonatelephoneandmustbebrokensomewhereoritwouldpushthepagewideaveryveryverylongword
"""
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_no_violation_in_any_view(page: Page, scripted: ScriptedServer, size: str, theme: str) -> None:
    page.size(*SIZES[size])
    page.media(prefers_color_scheme=theme, prefers_reduced_motion="reduce")  # animations end at once, so colours are final
    looked: list[str] = []

    def check(view: str) -> None:
        assert page.axe() == [], view
        wide = page.run("return document.documentElement.scrollWidth")
        assert wide <= SIZES[size][0], f"{view}: {wide} px"
        looked.append(view)

    scripted.metrics = 'fledge:learn_generation{model_name="m"} 0\n'
    page.open(scripted.url)
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (int(background.split("(")[1].split(",")[0]) < 60) == (theme == "dark")
    check("empty")
    scripted.text, scripted.pause_at = "<think>Let me see, `x`.</think>\n\n" + EVERYTHING, 700
    page.say("A question")
    page.wait(lambda: page.streamed() > 100)
    check("streaming")
    scripted.pause_at = None
    page.answers(1)
    page.run("document.querySelector('.thought').open = true")
    check("answered")
    page.run("document.getElementById('compare').click()")
    page.wait(lambda: page.all(".verdict"))
    check("race")
    page.set(top_p=7)
    page.say("refused")
    page.answers(2)
    page.errors()  # clears the console, which has the refused request
    check("error")
    page.run("document.querySelector('.turn.user .edit').click()")
    check("editing")
    if size == "phone":
        page.click("#show-panel")
    check("figures")
    page.click("#tab-settings")
    check("settings")
    if size == "phone":
        page.click("#show-conversations")
    check("list")
    page.click("#list .rename")
    check("renaming")
    page.run("document.querySelector('#list input').blur()")
    page.click("#list .remove")
    check("deleted")
    page.run("document.getElementById('help').showModal()")
    check("shortcuts")
    print(f"{size} {theme}: no violation in {', '.join(looked)}")


def test_everything_works_with_the_keyboard_alone(page: Page, scripted: ScriptedServer) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(scripted.url)
    assert page.focused() == "prompt"
    scripted.text = "word " * 40
    page.keys("one" + Keys.ENTER)
    page.answers(1)
    page.keys(Keys.SHIFT, Keys.ENTER)
    assert page.run("return document.getElementById('prompt').value") == "\n"
    page.keys(Keys.ALT, "r")
    page.wait(lambda: page.all(".verdict"))
    page.keys(Keys.ALT, "s")
    assert not page.one("#speculate").is_selected()
    page.keys(Keys.ALT, "t")
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.keys(Keys.ALT, "p")
    assert not page.one("#panel").is_displayed()
    page.keys(Keys.ALT, "p")
    assert page.one("#panel").is_displayed()
    page.keys(Keys.ALT, "c")
    assert not page.one("#conversations").is_displayed()
    page.keys(Keys.ALT, "c")
    page.keys(Keys.ALT, "n")
    assert not page.all(".turn")
    page.run("document.activeElement.blur()")
    page.keys("?")
    assert page.one("#help").is_displayed()
    page.keys(Keys.ESCAPE)
    assert not page.one("#help").is_displayed()
    page.run("document.activeElement.blur()")
    page.keys("/")
    assert page.focused() == "prompt"
    page.keys("?/")  # in the text box they are characters, not shortcuts
    assert page.run("return document.getElementById('prompt').value").endswith("?/")

    page.click("#list .open")
    page.run("document.querySelector('.skip').focus()")
    page.keys(Keys.TAB)
    page.keys(Keys.SHIFT, Keys.TAB)  # browsers show the focus only after a key was used
    order: list[str] = []
    for _ in range(60):
        if order:
            page.keys(Keys.TAB)
        order.append(page.focused())
        outline = page.run(
            "const e = document.activeElement, shown = e.id === 'prompt' ? e.parentElement : e;"
            "return getComputedStyle(shown).outlineStyle"
        )
        assert outline != "none", f"no visible focus on {order[-1]}"
        if order[-1] == "compare":
            break
    expected = ["skip", "show-conversations", "theme", "show-help", "show-panel", "new", "open", "talk", "prompt", "send"]
    expected += ["speculate", "tab-figures", "compare"]
    assert [one for one in order if one in expected] == expected
    page.one("#tab-figures").send_keys(Keys.ARROW_RIGHT)
    assert page.focused() == "tab-settings"
    assert page.one("#settings").is_displayed()
    assert not page.one("#figures").is_displayed()


def test_drawers_on_a_phone(page: Page, scripted: ScriptedServer) -> None:
    from selenium.webdriver.common.keys import Keys

    page.size(390, 844)
    page.open(scripted.url)
    assert page.run("return document.getElementById('main').getBoundingClientRect().width") == 390
    for name in ("panel", "conversations"):
        assert not page.one(f"#{name}").is_displayed()
        page.click(f"#show-{name}")
        page.wait(page.one(f"#{name}").is_displayed)  # it slides in
        assert page.run("return document.getElementById(arguments[0]).contains(document.activeElement)", name)
        assert page.run("return document.getElementById('main').inert")
        assert page.run("return document.getElementById(arguments[0]).getAttribute('aria-expanded')", f"show-{name}") == "true"
        page.keys(Keys.ESCAPE)
        assert not page.one(f"#{name}").is_displayed()
        assert page.focused() == f"show-{name}"
    page.click("#show-panel")
    page.click("#show-conversations")  # only one drawer is open at a time
    assert not page.one("#panel").is_displayed()
    scripted.text = "short"
    page.click("#new")
    assert not page.one("#conversations").is_displayed()
    page.say("a question")
    page.answers(1)
    page.click("#show-panel")
    page.click("#compare")  # closes the drawer, so that the race is visible
    page.wait(lambda: page.all(".verdict"))
    assert not page.one("#panel").is_displayed()
    assert page.run("return document.getElementById('prompt').getBoundingClientRect().bottom") <= 844
    page.size(1280, 800)
    page.wait(lambda: page.one("#panel").is_displayed() and page.one("#conversations").is_displayed())


def test_the_theme_follows_the_system_until_it_is_chosen(page: Page, scripted: ScriptedServer) -> None:
    theme = "return document.documentElement.dataset.theme"
    page.media(prefers_color_scheme="dark")
    page.open(scripted.url)
    assert page.run(theme) == "dark"
    page.media(prefers_color_scheme="light")
    page.wait(lambda: page.run(theme) == "light")
    page.click("#theme")
    assert page.run(theme) == "dark"
    page.open(scripted.url)
    assert page.run(theme) == "dark"
    assert page.one("#theme").get_attribute("aria-pressed") == "true"


def test_reduced_motion_stops_animations_and_the_replay(page: Page, scripted: ScriptedServer) -> None:
    moving = """
    const moves = style => style.animationName !== "none" || parseFloat(style.transitionDuration) > 0;
    return [...document.querySelectorAll("*")].filter(one =>
        [null, "::before", "::after"].some(part => moves(getComputedStyle(one, part)))).length"""
    scripted.text, scripted.pause_at = "word " * 20, 40
    for preference, expected in (("no-preference", True), ("reduce", False)):
        page.media(prefers_reduced_motion=preference)
        page.open(scripted.url)
        page.run("document.getElementById('new').click()")
        page.say("go")
        page.wait(lambda: page.all(".is-streaming .markdown p"))
        assert bool(page.run(moving)) is expected
        page.click("#stop")
        page.answers(1)
    scripted.pause_at = None
    page.run("""
    window.clocks = new Set();
    new MutationObserver(() => document.querySelectorAll(".clock").forEach(clock => clocks.add(clock.textContent)))
        .observe(document.body, {subtree: true, childList: true, characterData: true})""")
    page.click("#compare")
    page.wait(lambda: page.all(".verdict"))
    clocks = page.run("return [...clocks]")
    assert "measuring" in clocks
    assert "replay" not in clocks


def test_settings_are_stored_and_can_be_reset(page: Page, scripted: ScriptedServer) -> None:
    page.open(scripted.url)
    page.click("#tab-settings")
    for name, value in {"system": "Be brief.", "max_tokens": "99", "seed": "5"}.items():
        page.one(f"#{name}").clear()
        page.one(f"#{name}").send_keys(value)
    page.click("#tint")
    page.open(scripted.url)
    values = "return ['system', 'max_tokens', 'seed'].map(id => document.getElementById(id).value)"
    assert page.run(values) == ["Be brief.", "99", "5"]
    assert page.run("return document.body.classList.contains('no-tint')")
    page.click("#tab-settings")
    page.click("#defaults")
    assert page.run(values) == ["", "512", ""]
    assert not page.run("return document.body.classList.contains('no-tint')")


def test_code_can_be_copied(page: Page, scripted: ScriptedServer) -> None:
    page.open(scripted.url)
    permission = {"origin": scripted.url, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", permission)
    scripted.text = "Here:\n\n```python\nif a < b:\n    print('x')\n```\n"
    page.say("code")
    page.answers(1)
    for name, expected in {"fontFamily": "monospace", "fontVariantLigatures": "none", "whiteSpace": "pre"}.items():
        style = page.run("return getComputedStyle(document.querySelector('.code code'))[arguments[0]]", name)
        assert expected in style, name  # a monospace font without ligatures: -> stays two characters
    read = (
        "const done = arguments[arguments.length - 1]; navigator.clipboard.readText().then(done, error => done(String(error)))"
    )
    page.click(".code-head button")
    page.wait(
        lambda: page.text("#status") == "Copied" or page.run("return document.getElementById('status').textContent") == "Copied"
    )
    assert page.driver.execute_async_script(read) == "if a < b:\n    print('x')"
    page.click(".assistant > .actions button")
    page.wait(lambda: page.driver.execute_async_script(read) == scripted.text)
