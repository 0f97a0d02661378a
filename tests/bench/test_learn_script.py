"""benchmarks/learn.py on a toy target, and the self-made stream."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_stream_does_not_repeat_and_comes_again_by_its_seed():
    stream = importlib.import_module("learn_stream")
    kinds = sorted(stream.KINDS)
    first = list(itertools.islice(stream.prompts(kinds, seed=1), 2000))
    assert len(set(first)) == 2000
    assert first == list(itertools.islice(stream.prompts(kinds, seed=1), 2000))
    german = list(itertools.islice(stream.prompts(["german"], seed=2), 500))
    assert not {"{", "}"} & set("".join(german))


def test_cost_on_a_toy(tmp_path):
    learn = importlib.import_module("learn")
    output = tmp_path / "cost.json"
    few = ["--cost-users", "2", "--cost-seconds", "1", "--rounds", "1", "--tokens", "24", "--depth", "3", "--users", "4"]
    learn.main(["cost", "--toy", "--device", "cpu", *few, "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["2"]["with"]["tokens_per_s"] > 0
    assert found["2"]["without"]["p99_ms"] > 0
    assert found["announced_bytes"] > 0
    assert found["provenance"]["commit"]
