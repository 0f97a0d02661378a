"""The page's files over HTTP: which are served, with which headers, and that they use no other host.

The page's behaviour is tested in a browser: tests/serving/page, `make test-browser`.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from fledge.serving import page_files

PROJECT = Path(__file__).parents[2]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in page_files.FOLDER.iterdir()}
SCRIPTS = sorted(name for name in TEXTS if name.endswith(".js"))


def test_files_are_served_with_a_strict_policy(in_process) -> None:
    async def main() -> None:
        async with in_process() as (client, _):
            assert (await client.get("/")).text == TEXTS["index.html"]
            for name, text in TEXTS.items():
                answer = await client.get(f"/page/{name}")
                assert (answer.status_code, answer.text) == (200, text)
                assert answer.headers["content-type"] == page_files.MEDIA_TYPES[Path(name).suffix]
                assert answer.headers["x-content-type-options"] == "nosniff"
                policy = answer.headers["content-security-policy"]
                assert "unsafe" not in policy
                assert "http" not in policy  # no other host
                assert policy.startswith("default-src 'none'; ")
                for part in (
                    "frame-ancestors 'none'",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "require-trusted-types-for 'script'",
                ):
                    assert part in policy
            for path in (
                "/page/",
                "/page/no.js",
                "/page/../app.py",
                "/page/%2e%2e%2fapp.py",
                "/page/__init__.py",
                "/page/..%5capp.py",
            ):
                assert (await client.get(path)).status_code == 404, path
            assert "/page/{name}" not in (await client.get("/openapi.json")).json()["paths"]

    asyncio.run(main())


def test_files_need_the_key_where_the_page_does(in_process) -> None:
    async def main() -> None:
        async with in_process("--api-key", "secret") as (client, _):
            assert (await client.get("/page/app.js")).status_code == 401
            refused = await client.get("/")
            # The browser asks the user for the key once and then sends it with every file.
            assert refused.headers["www-authenticate"].startswith("Basic")
            for path in ("/", "/page/app.js", "/page/layout.css"):
                assert (await client.get(path, auth=("anyone", "secret"))).status_code == 200

    asyncio.run(main())


def test_the_page_uses_no_other_host_and_no_inline_code() -> None:
    for name, text in TEXTS.items():
        addresses = set(re.findall(r"https?://[\w./]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, f"{name}: {addresses}"
    page = TEXTS["index.html"]
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|javascript:|@import|url\(", page)
    for css in (text for name, text in TEXTS.items() if name.endswith(".css")):
        assert "url(" not in css
        assert "@import" not in css


def test_all_references_exist_and_no_file_is_unused() -> None:
    named = set(re.findall(r'(?:href|src)="page/([\w.]+)"', TEXTS["index.html"]))
    for name in SCRIPTS:
        named |= set(re.findall(r'from "\./([\w.]+)"', TEXTS[name]))
    assert named | {"index.html"} == set(TEXTS)
    identifiers = set(re.findall(r'\bid="([\w-]+)"', TEXTS["index.html"]))
    asked = {found for name in SCRIPTS for found in re.findall(r'(?:\$|getElementById)\("([\w-]+)"\)', TEXTS[name])}
    icons = {"icon-" + found for name in SCRIPTS for found in re.findall(r'icon(?:Button)?\("([\w-]+)"', TEXTS[name])}
    assert (asked | icons) <= identifiers, (asked | icons) - identifiers
    assert set(re.findall(r'href="#([\w-]+)"', TEXTS["index.html"])) <= identifiers


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_parse_text_as_markup(name: str) -> None:
    """Trusted types prevent it in Chromium, but not all browsers support them."""
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|\beval\(|new Function|DOMParser|Fragment\(|srcdoc"
    assert not re.search(ways, TEXTS[name])
    assert len(TEXTS[name].splitlines()) < 320


def test_the_package_includes_the_files() -> None:
    data = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fledge"]
    for name in TEXTS:
        assert any(fnmatch(f"serving/page/{name}", pattern) for pattern in data), name
