"""The study's page from the figures of a run: every table is there, and its verdicts follow the figures."""

from __future__ import annotations

import copy
import json
import re

import pytest

from fledge.bench.provenance import write_json
from fledge.drift.ablation import ratio_over
from fledge.drift.claims import HOLDS, NOT, checks, claims, suite_of
from fledge.drift.study import study, with_depths, write_study


@pytest.fixture(scope="module")
def stored(figures, tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "drift-tiny.json"
    write_json(path, figures)
    return path


def test_depths_survive_json(figures, stored):
    read = with_depths(json.loads(stored.read_text()))
    suite, again = suite_of(figures, "templates"), suite_of(read, "templates")
    assert again["conditions"][1]["drafters"] == suite["conditions"][1]["drafters"]
    assert again["overall_against_first"] == suite["overall_against_first"]
    assert read["probes"] == figures["probes"]


def test_the_page_has_every_part(stored, tmp_path):
    page = write_study(json.loads(stored.read_text()), stored, tmp_path / "docs/study.md", tmp_path / "docs/images")
    text = page.read_text()
    for title in ("claimed", "must show", "draft step", "one by one", "Templates", "Context length", "Temperature", "In words"):
        assert re.search(f"^##.*{title}", text, re.MULTILINE), title
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert len(pictures) == 6
    assert all((page.parent / picture).exists() for picture in pictures)
    widths = [line.count(" | ") for line in text.splitlines() if line.startswith("|")]
    assert min(widths) >= 2


def test_verdicts_follow_the_figures(figures):
    one = copy.deepcopy(figures)
    for name, ratio, sink, own in (("three", 3.6, -0.05, 0.02), ("three-one", 1.0, 0.0, 0.001)):
        one["probes"][name] |= {"rms_ratio": ratio, "sink_share_slope": sink, "own_share_slope": own}
    found = {claim.what: claim.verdict for claim in claims(one, "three", "three-one")}
    assert [verdict for what, verdict in found.items() if "fed-back" in what or "attention" in what] == [HOLDS] * 3
    swapped = {claim.what: claim.verdict for claim in claims(one, "three-one", "three")}
    assert [verdict for what, verdict in swapped.items() if "fed-back" in what or "attention" in what] == [NOT] * 3


def test_checks_name_the_worst_condition(figures):
    one = copy.deepcopy(figures)
    suite = suite_of(one, "templates")
    suite["conditions"][5]["drafters"]["three"]["retention"][5] = 0.4
    check = next(check for check in checks(one, "three") if "templates" in check.what)
    assert check.what.endswith(suite["conditions"][5]["name"])
    assert not check.passed
    assert check.value.startswith("40%")


def test_drafters_are_compared_text_by_text(figures):
    ratio = ratio_over(figures, "templates", "three-one", "three")
    expected = suite_of(figures, "templates")["overall_against_first"]["three-one"][5]
    assert ratio._asdict() == pytest.approx(expected)
    assert ratio_over(figures, "templates", "three", "three") == (1, 0)


def test_without_the_four_corners_there_is_no_ablation(figures):
    fewer = {**figures, "drafters": figures["drafters"][:2]}
    assert "one by one" not in study(fewer, "x.json", "images")
