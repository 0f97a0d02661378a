"""Screenshots of a real conversation with SmolLM2, for the documents: docs/images/page-{1280,390}-{light,dark}.png."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.page.conftest import Page
from tests.serving.processes import ServerProcess

pytestmark = [pytest.mark.browser, pytest.mark.real]

IMAGES = Path(__file__).parents[3] / "docs" / "images"
SIZES = {1280: 1030, 390: 844}
MAX_BYTES = 150_000
QUESTIONS = [
    "Explain how bees make honey, as a numbered list.",
    "What is Python? Answer with a heading, a list and a short code example.",
    "Write a Python function that reverses a string, with an example.",
]


@pytest.fixture(scope="module")
def url(smollm2_folder: Path) -> Iterator[str]:
    with ServerProcess(["smollm2-135m", "--served-model-name", "smollm2-135m"], timeout=300) as server:
        yield server.url


def save(page: Page, name: str) -> None:
    """Saves a screenshot with a palette of 256 colours: a third of the bytes, and no visible difference."""
    from PIL import Image

    picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    picture = picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    picture.save(IMAGES / name, optimize=True)
    assert (IMAGES / name).stat().st_size < MAX_BYTES


def test_pictures_of_a_real_conversation(page: Page, url: str) -> None:
    page.size(1280, SIZES[1280])
    page.open(url)
    page.set(max_tokens=250)
    for question in QUESTIONS:
        page.click("#new")
        page.say(question)
        page.answers(1)
    assert page.all(".assistant .code .keyword"), "the answer has no code"
    assert page.all(".assistant mark")
    page.click("#compare")  # so that the figures with and without speculation are shown
    page.wait(lambda: page.all(".verdict"))
    assert page.text(".verdict").startswith("Identical")
    for width, height in SIZES.items():
        page.size(width, height)
        for theme in ("light", "dark"):
            page.media(prefers_color_scheme=theme, prefers_reduced_motion="reduce")
            page.run("document.getElementById('talk').scrollTop = 0; document.activeElement.blur()")
            page.wait(lambda expected=theme: page.run("return document.documentElement.dataset.theme") == expected)
            time.sleep(0.3)
            assert page.run("return document.documentElement.scrollWidth") <= width
            save(page, f"page-{width}-{theme}.png")
