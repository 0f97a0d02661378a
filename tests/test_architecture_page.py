"""docs/architecture.md: the paths it names exist, and its lists of files stay short."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PATH = re.compile(r"\b(?:fledge|tests|docs|benchmarks)/[\w./-]*\w/?")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's first table, without its header."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_path_exists():
    paths = set(PATH.findall(TEXT))
    assert len(paths) > 40
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_token_path_lists_at_most_twelve_files():
    for device in ("GPU", "CPU"):
        steps = re.findall(r"^\d+\. `([^`]+)`", section(f"The way of a token on a {device}"), re.MULTILINE)
        assert 8 < len(steps) <= 12
        assert all((ROOT / step).is_file() for step in steps)


def test_each_change_lists_at_most_three_files():
    changes = rows("Where would I change X")
    assert len(changes) > 8
    for change, files in changes:
        assert 1 <= len(PATH.findall(files)) <= 3, change


def test_loop_shown_equals_engine_step():
    """The code shown on the page equals the lines of `Engine.step`."""
    shown = re.search(r"```python\n(.*?)```", section("The loop"), re.DOTALL)
    assert shown is not None
    lines = [line.split("#")[0].strip() for line in shown.group(1).splitlines()]
    source = [line.split("#")[0].strip() for line in (ROOT / "fledge" / "engine" / "engine.py").read_text().splitlines()]
    assert any(source[start : start + len(lines)] == lines for start in range(len(source)))
