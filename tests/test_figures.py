"""Measured figures come from `benchmarks/results/`: generated blocks are up to date, and no figure is written by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figure_blocks, figures

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in figures.pages()}

NUMBER = r"[−+-]?\d[\d,]*(?:\.\d+)?"
UNITS = (
    r"tokens?/s|tokens (?:a|per) second|requests/s|×|x\b|times (?:as|faster|slower|longer|more|less)"
    r"|µs|microseconds?|ms|milliseconds?|[KMG]i?B|bytes|%|percent|points|s|seconds?|minutes?|hours?"
)
MEASURED = re.compile(
    rf"(?:(?P<number>{NUMBER})(?:\s*(?:–|-|to|and|or|/|→|±)\s*{NUMBER})*\s*(?:{UNITS})(?![\w/])"
    rf"|acceptance (?:length )?(?:of |is |was )?(?P<length>\d\.\d+)|(?P<share>\d+) of (?P<of>\d+)\b)"
)

# Numbers with a unit that we did not measure. Every entry states its kind: `setting` (a default or a limit in the code),
# `published` (figures of others, with their source on the page) or `sum` (arithmetic that the page shows).
STATED: dict[str, dict[str, str]] = {
    "docs/learn.md": {"28 bytes": "sum"},
}
# Pages generated in full from result files; a test below checks that they are up to date.
WRITTEN = {"docs/drift-study.md"}
# Notes on runs: every figure must be a value in one of the result files that the page names.
NOTES = {"docs/drift-lab.md"}


def prose(text: str) -> str:
    """The page without generated blocks, code, comments, link addresses and pictures."""
    text = figures.BLOCK.sub(" ", text)
    text = re.sub(r"^(```|~~~).*?^\1", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", " ` ", text)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def measured(text: str) -> list[str]:
    return [" ".join(match.group(0).split()) for match in MEASURED.finditer(prose(text))]


def values(page: str) -> set[float]:
    """All numbers in the result files that a page names, including those inside their strings."""
    found: set[float] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(str(key))
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, str):
            found.update(float(number.replace(",", "").replace("−", "-")) for number in re.findall(NUMBER, value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.add(float(value))

    for name in set(re.findall(r"[\w.-]+\.json", PAGES[page])):
        if (path := figure_blocks.RESULTS / name).exists():
            walk(json.loads(path.read_text(encoding="utf-8")))
    return found


def is_value(written: str, known: set[float]) -> bool:
    """Whether the written number is one of the values, rounded; also as a percentage, in thousands or in millions."""
    number = float(written.replace(",", "").replace("−", "-"))
    digits = len(written.split(".")[1]) if "." in written else 0
    half = 0.5 * 10**-digits
    if not digits and number >= 1000 and number % 1000 == 0:
        half = 500
    return any(abs(value * scale - number) <= half * 1.001 for value in known for scale in (1, 100, 1e-3, 1e-6))


def test_make_figures_changes_nothing():
    assert [str(path.relative_to(ROOT)) for path in figures.stale()] == []


def test_edited_figure_is_restored():
    """Shows that the test above can fail: a changed figure differs from the generated page."""
    text = PAGES["README.md"]
    edited = re.sub(r"(figures:results -->.*?)345", r"\g<1>999", text, flags=re.DOTALL)
    changed = edited if edited != text else text.replace("| llama.cpp", "| llama.cpp 1")
    assert changed != text
    assert figures.filled(changed) == figures.filled(text) == text


def test_drift_study_page_equals_generated_page():
    from benchmarks import drift_page as study
    from benchmarks.drift_study import TRAINED_ALIKE, ablation_of

    def read(name: str) -> dict[str, Any]:
        stored = json.loads((figure_blocks.RESULTS / name).read_text(encoding="utf-8"))
        return study.with_todays_names(study.with_depths(stored))

    apart = replace(ablation_of(figure_blocks.RESULTS / "drift-ablation-h200.json"), figures=read("drift-ablation-h200.json"))
    page = study.study(read("drift-h200.json"), "drift-h200.json", "images", TRAINED_ALIKE, apart)
    assert page == PAGES["docs/drift-study.md"]


def test_unknown_blocks_are_refused():
    with pytest.raises(AssertionError, match="no figures called"):
        figures.filled("<!-- figures:nonsense -->\n<!-- /figures -->")


def test_every_result_file_is_read_by_a_block_or_named_on_a_page():
    text = "".join(PAGES.values()) + "".join(path.read_text() for path in (ROOT / "benchmarks").glob("figure_*.py"))
    names = [path.name for path in figure_blocks.RESULTS.glob("*.json")]
    assert [name for name in names if name not in text and "-vs-llamacpp-" not in name] == []


@pytest.mark.parametrize("page", sorted(set(PAGES) - WRITTEN - NOTES))
def test_no_measured_figure_outside_a_block(page: str):
    allowed = STATED.get(page, {})
    found = measured(PAGES[page])
    assert [figure for figure in found if figure not in allowed] == []
    assert [figure for figure in allowed if figure not in found] == [], "stated figures that are no longer on the page"
    assert set(allowed.values()) <= {"setting", "published", "sum"}


@pytest.mark.parametrize("page", sorted(NOTES & set(PAGES)))
def test_figures_of_notes_are_values_of_result_files(page: str):
    known, allowed = values(page), STATED.get(page, {})
    for match in MEASURED.finditer(prose(PAGES[page])):
        text = " ".join(match.group(0).split())
        if text not in allowed:
            numbers = re.findall(NUMBER, text)
            assert all(is_value(number.lstrip("-+"), known) for number in numbers), text


@pytest.mark.parametrize(
    ("text", "figure"),
    [
        ("it gives 242 tokens/s here", "242 tokens/s"),
        ("is 1.43× as fast", "1.43×"),
        ("takes 383 µs a step", "383 µs"),
        ("an acceptance length of 3.70 there", "acceptance length of 3.70"),
        ("with 396 MB of memory", "396 MB"),
        ("kept 81 % of it", "81 %"),
        ("in 80 of 80 answers", "80 of 80"),
        ("ready in 2.0 s.", "2.0 s"),
        ("2 to 3 times as fast", "2 to 3 times as"),
    ],
)
def test_figure_in_prose_is_found(text: str, figure: str):
    assert measured(text) == [figure]


@pytest.mark.parametrize(
    "text", ["EAGLE 3.1", "`25 ms`", "vLLM 0.32", "layers 2, 15 and 27", "SmolLM2-135M", "a depth of 5", "Python 3.11"]
)
def test_a_name_is_no_figure(text: str):
    assert measured(text) == []


def test_readme_is_one_screen():
    text = PAGES["README.md"]
    words = len(re.sub(r"<!--.*?-->", "", text).split())
    lines = text.splitlines()
    assert words < 700
    assert any(line.startswith("make demo") for line in lines[:15])
