"""Fixtures of the browser tests: Chromium, and `Page` with the actions that tests perform. Run with `make test-browser`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.page.scripted import ScriptedServer

ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1280,860",
)  # fmt: skip
SLOW = 180  # timeout in seconds, enough for a busy machine


class Page:
    """The page in a browser. Every console error fails the test, and so does every request that leaves the server."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.run: Callable[..., Any] = driver.execute_script

    def open(self, url: str) -> None:
        self.url = url
        self.driver.get(url)
        self.wait(lambda: "connecting" not in self.text("#served"))

    def size(self, width: int, height: int = 800) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def media(self, **features: str) -> None:
        """Emulates media features, such as prefers_color_scheme="dark"."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": named})

    def wait(self, condition: Callable[[], Any], seconds: float = SLOW) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if found := condition():
                    return found
            except (StaleElementReferenceException, IndexError):
                pass
            time.sleep(0.05)
        raise AssertionError(f"the condition did not become true within {seconds} s")

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def keys(self, *keys: str) -> None:
        """Sends keys to the focused element. All but the last argument are modifiers and are held down."""
        from selenium.webdriver.common.action_chains import ActionChains

        self.driver.switch_to.active_element  # noqa: B018 (raises if nothing has the focus)
        chain, *last = ActionChains(self.driver), keys[-1]
        for key in keys[:-1]:
            chain.key_down(key)
        chain.send_keys(*last)
        for key in reversed(keys[:-1]):
            chain.key_up(key)
        chain.perform()

    def focused(self) -> str:
        return self.run("const e = document.activeElement; return e.id || e.className || e.tagName")

    def set(self, **fields: object) -> None:
        for name, value in fields.items():
            self.run("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))

    def say(self, words: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.one("#prompt").send_keys(words + Keys.ENTER)

    def answers(self, count: int) -> list[Any]:
        """Waits until there are `count` finished answers and nothing streams, and returns them."""
        self.wait(lambda: len(self.all(".turn.assistant .actions")) >= count and not self.all("body.is-busy"))
        return self.all(".turn.assistant")

    def streamed(self) -> int:
        """The number of characters shown of the answer that is being streamed."""
        return self.run("return document.querySelector('.is-streaming .text')?.textContent.length ?? 0")

    def axe(self) -> list[str]:
        """Runs axe-core and returns all violations of its rules as text."""
        import selenium_axe_python

        script = Path(selenium_axe_python.__file__).parent / "axe-core" / "axe.min.js"
        if not self.run("return window.axe !== undefined"):
            self.run(script.read_text(encoding="utf-8"))
        result = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document, {resultTypes: ['violations']}).then(done, error => done({error: String(error)}))"
        )
        assert "error" not in result, result["error"]
        assert len(result["passes"]) > 10  # the rules were really applied
        return [
            f"{violation['id']}: {found['target']} {found.get('failureSummary', '')}"
            for violation in result["violations"]
            for found in violation["nodes"]
        ]

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requests(self) -> list[str]:
        return self.run("return performance.getEntriesByType('resource').map(one => one.name)")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    assert shutil.which("chromium"), "chromium is missing: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    made.set_script_timeout(SLOW)
    yield made
    made.quit()


@pytest.fixture
def page(driver: Any) -> Iterator[Page]:
    page = Page(driver)
    yield page
    problems, outside = page.errors(), [name for name in page.requests() if not name.startswith(page.url)]
    page.run("localStorage.clear()")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.media()
    driver.get("about:blank")
    assert problems == []
    assert outside == []


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server
