"""Markdown on the page: what is rendered, what stays text, and hostile text wherever the page shows a model's output."""

from __future__ import annotations

import time

import pytest

from tests.serving.page.conftest import Page
from tests.serving.page.scripted import ScriptedServer

pytestmark = pytest.mark.browser

# Renders `text` in the page without a server, in pieces of `step` characters, and returns the element's HTML and the time.
DRAW = """
const [text, step, isFinished] = arguments, done = arguments[arguments.length - 1];
import("/page/answer_text.js").then(({ AnswerText }) => {
    const place = document.createElement("div"), begun = performance.now();
    document.getElementById("talk").append(place);
    const view = new AnswerText(place);
    for (let at = 0; at < text.length; at += step) {
        view.push(text.slice(at, at + step), false);
        if (step < text.length) view.draw(true);
    }
    if (isFinished) view.finish(); else view.draw(true);
    done([place.querySelector(":scope > .markdown").innerHTML, performance.now() - begun]);
    place.remove();
});
"""


def draw(page: Page, text: str, step: int | None = None, finished: bool = True) -> str:
    return page.driver.execute_async_script(DRAW, text, step or max(len(text), 1), finished)[0]


@pytest.fixture
def drawn(page: Page, scripted: ScriptedServer) -> Page:
    page.open(scripted.url)
    return page


# Markdown and its HTML, without the dir="auto" that paragraphs and headings have.
PLAIN = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "a **b *c* d** __e__ _f_ ~~g~~": "<p>a <strong>b <em>c</em> d</strong> <strong>e</strong> <em>f</em> <del>g</del></p>",
    "***both***": "<p><strong><em>both</em></strong></p>",
    "2 * 3 * 4, snake_case_name, a ** b": "<p>2 * 3 * 4, snake_case_name, a ** b</p>",
    r"\*not\* \# \\": "<p>*not* # \\</p>",
    "`a < b` and `` `tick` ``": "<p><code>a &lt; b</code> and <code>`tick`</code></p>",
    "&lt;b&gt; &amp;amp;": "<p>&lt;b&gt; &amp;amp;</p>",
    "# One\n### Three ###\nTwo\n---": '<h3 class="level-1">One</h3><h3 class="level-3">Three</h3><h3 class="level-2">Two</h3>',
    "a\n\n***\n\nb": "<p>a</p><hr><p>b</p>",
    "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "- a\n- b\n  - c\n\n    d\n- e": "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p><p>d</p></li></ul></li>"
    "<li><p>e</p></li></ul>",
    "3. a\n4. b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
    "The year\n2020. was long": "<p>The year<br>2020. was long</p>",
}


def test_markdown_is_rendered_as_html(drawn: Page) -> None:
    for source, expected in PLAIN.items():
        assert draw(drawn, source).replace(' dir="auto"', "") == expected, source


@pytest.mark.parametrize("step", [1, 3])
def test_a_streamed_text_renders_like_the_whole_text(drawn: Page, step: int) -> None:
    table = "| a | b |\n|--:|---|\n| 1 | `x|y` \\| z |\n"
    whole = "\n\n".join(
        [*PLAIN, "```python\nx = 1\n```", table, "- [x] done\n- [ ] open", "    indented\n    code", "[a](http://b.c)"]
    )
    assert draw(drawn, whole, step) == draw(drawn, whole)


def test_code_and_tables(drawn: Page) -> None:
    code = draw(drawn, 'text\n```python\ndef f(x):  # why\n\n    return "a" + 1\n```\nafter')
    assert '<span class="keyword">def</span> f(x):  <span class="comment"># why</span>\n\n    <span' in code
    assert '<span class="string">"a"</span> + <span class="number">1</span></code></pre>' in code
    assert code.endswith('<p dir="auto">after</p>')
    table = draw(drawn, "| a | b |\n|--:|:-:|\n| 1 | 2 |\n| 3 |\n\nend")
    assert '<th class="right" scope="col">a</th><th class="centre" scope="col">b</th>' in table
    assert '<tr><td class="right">3</td><td class="centre"></td></tr>' in table
    tasks = draw(drawn, "- [x] a\n- [ ] b")
    assert 'aria-label="done">☑ </span>a' in tasks
    assert 'aria-label="open">☐ </span>b' in tasks


def test_incomplete_constructs_are_rendered_while_streaming(drawn: Page) -> None:
    assert "<strong>bold</strong>" in draw(drawn, "some **bold", finished=False)
    assert "<code>co</code>" in draw(drawn, "some `co", finished=False)
    assert draw(drawn, "see [the site](https://exa", finished=False) == '<p dir="auto">see the site</p>'
    assert "<pre" in draw(drawn, "```py\nx = ", finished=False)
    assert draw(drawn, "some **bold") == '<p dir="auto">some **bold</p>'  # once finished, an unclosed construct is plain text


LINKS = {
    "[a](https://example.com/x_(y) 'title')": "https://example.com/x_(y)",
    "[a](mailto:one@example.com)": "mailto:one@example.com",
    "see https://example.com/path?q=1.": "https://example.com/path?q=1",
    "<https://example.com>": "https://example.com/",
    "![picture](https://example.com/p.png)": "https://example.com/p.png",
}
NO_LINKS = [
    "[a](javascript:alert(1))",
    "[a](JaVaScRiPt:alert(1))",
    "[a](java\tscript:alert(1))",
    "[a](&#106;avascript:alert(1))",
    "[a](\x01javascript:alert(1))",
    "[a](vbscript:x)",
    "[a](data:text/html,<script>alert(1)</script>)",
    "[a](file:///etc/passwd)",
    "[a](blob:x/y)",
    "[a](//evil.example)",
    "[a](/v1/models)",
    "![a](data:image/svg+xml,<svg onload=alert(1)>)",
    "<javascript:alert(1)>",
    "[a]: javascript:alert(1)\n\n[a]",
]


def test_only_links_with_allowed_schemes_are_rendered(drawn: Page) -> None:
    drawn.run("window.place = document.createElement('div'); document.body.append(place)")
    read = """
    const done = arguments[arguments.length - 1];
    import("/page/answer_text.js").then(({ AnswerText }) => {
        place.replaceChildren();
        const view = new AnswerText(place);
        view.push(arguments[0], true);
        view.finish();
        const found = [...place.querySelectorAll("a, img, iframe, [src], [style]")];
        done(found.map(one => [one.tagName, one.href, one.target, one.rel]));
    });"""
    for source, address in LINKS.items():
        expected = [["A", address, "_blank", "noopener noreferrer nofollow"]]
        assert drawn.driver.execute_async_script(read, source) == expected, source
    for source in NO_LINKS:
        assert drawn.driver.execute_async_script(read, source) == [], source


HOSTILE = [
    "<script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 2'>",
    "<svg onload='window.owned = 3'>",
    "<iframe srcdoc='<script>parent.owned = 4</script>'>",
    "[click](javascript:window.owned=5)",
    "```<img src=x onerror=window.owned=6>\n</code></pre><script>window.owned = 7</script>\n```",
    '```python" onmouseover="window.owned=8\nx\n```',
    "| <img src=x onerror=window.owned=9> | b |\n|---|---|\n| <script>window.owned=10</script> | c |",
    "# <a href='javascript:window.owned=11'>x</a>",
    "- <details open ontoggle=window.owned=12>",
    "<style>* { display: none }</style><link rel=stylesheet href=https://evil.example/x.css>",
    "</div></article></main><h1>Not the page</h1>",
    "<base href='https://evil.example/'><meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<form action=https://evil.example><input name=x></form>",
    "![x](https://evil.example/track.png)",
    "<think><img src=x onerror=window.owned=13></think><script>window.owned=14</script>",
]


def test_hostile_answers_stay_text(page: Page, scripted: ScriptedServer) -> None:
    """Checked in the answer, in the race, in the conversation's title, and again after a reload from storage."""
    page.open(scripted.url)
    before = page.run("return document.querySelectorAll('script, style, link, iframe, form, base, meta, h1').length")
    scripted.piece = 11
    for attack in HOSTILE:
        scripted.text = attack + "\n\nthe end"
        page.run("document.getElementById('new').click()")
        page.run("document.getElementById('prompt').value = arguments[0]", attack)
        page.say("")
        page.answers(1)
    scripted.text = "\n\n".join(HOSTILE)
    page.run("document.getElementById('new').click()")
    page.say("all of them")
    page.answers(1)
    page.click("#compare")
    page.wait(lambda: page.all(".verdict"))
    for place in (".assistant .markdown", ".lane.off .markdown", ".lane.on .markdown"):
        shown = page.run("return document.querySelector(arguments[0]).textContent", place)
        assert "<script>window.owned = 1</script>" in shown
        assert "<img src=x onerror='window.owned = 2'>" in shown
    for reloaded in (False, True):
        if reloaded:
            page.open(scripted.url)
            assert len(page.all("#list li")) == len(HOSTILE) + 1
            page.click("#list li:nth-child(4) .open")
        time.sleep(0.3)  # time for an attack to load something
        assert page.run("return window.owned") is None
        assert (
            page.run("return document.querySelectorAll('script, style, link, iframe, form, base, meta, h1').length") == before
        )
        named = page.run("return [...document.querySelectorAll('*')].flatMap(one => one.getAttributeNames())")
        assert not [name for name in named if name.startswith("on")]
        assert page.run("return location.href") == scripted.url + "/"
    assert not [path for path in scripted.paths if path == "/x"]  # no src=x was fetched


def test_the_content_security_policy_blocks_markup_and_other_hosts(drawn: Page) -> None:
    """A second line of defence: if the page ever parsed text as markup, nothing in it would run or load."""
    with pytest.raises(Exception, match="TrustedHTML"):
        drawn.run("document.body.innerHTML = '<b>x</b>'")
    drawn.run("const s = document.createElement('img'); s.src = 'https://evil.example/x.png'; document.body.append(s)")
    drawn.wait(lambda: any("Content Security Policy" in message for message in drawn.errors()), 10)
    drawn.run("performance.clearResourceTimings()")  # a refused request is listed too


SLOW = [
    *("*", "*a ", "**a ", "_a_b", "*a _b ", "`", "`a ``b ", "[", "[a](", "![", "> ", "- ", "1. ", "- a\n", "  - a\n", "|", "~"),
    *(
        "http://:",
        "<http://",
        "&amp",
        "\\",
        "#",
        "a\n",
        "\n",
        "a",
        "x\n---\n",
        "\u202e",
        "</think>",
        "```\n",
        "\t",
        "a|b\n-|-\n",
    ),
]
SLOW_TEXTS = [piece * (30_000 // len(piece)) for piece in SLOW]
SLOW_TEXTS += ["# " + " " * 30_000 + "x", "```" + " " * 30_000 + "`", "|a" * 500 + "\n" + "|-" * 500]
SLOW_TEXTS += ["".join(" " * depth + "- a\n" for depth in range(0, 200, 2)), "```python\n" + "'\"`" * 10_000]


def test_hostile_long_texts_are_rendered_in_time(drawn: Page) -> None:
    """30,000 characters in less than 3 s on a shared core. Most take 0.1 s; quadratic work would take minutes."""
    for text in SLOW_TEXTS:
        seconds = drawn.driver.execute_async_script(DRAW, text, len(text), True)[1] / 1000
        print(f"{text[:8]!r}: {seconds:.2f} s")
        assert seconds < 3, text[:8]


def test_thoughts_are_collapsed_and_not_sent_back(page: Page, scripted: ScriptedServer) -> None:
    page.open(scripted.url)
    scripted.text = "<think>Let me **see**.\n\nYes.</think>\n\nThe answer."
    page.say("why?")
    page.answers(1)
    assert page.text(".assistant > .text > .markdown") == "The answer."
    assert page.run("return document.querySelector('.thought').open") is False
    assert page.run("return document.querySelector('.thought strong').textContent") == "see"
    page.say("and?")
    page.answers(2)
    assert [message["content"] for message in scripted.bodies[1]["messages"]] == ["why?", "The answer.", "and?"]
    scripted.text, scripted.reasoning = "Opened by the template.</think>Second.", True
    page.run("document.getElementById('new').click()")
    page.say("again")
    page.answers(1)
    assert page.text(".assistant > .text > .markdown") == "Second."
