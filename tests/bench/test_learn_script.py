"""benchmarks/learn.py on a toy target, and its generated prompt stream."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_stream_has_no_repeats_and_is_reproducible():
    stream = importlib.import_module("learn_stream")
    kinds = sorted(stream.KINDS)
    first = list(itertools.islice(stream.prompts(kinds, seed=1), 2000))
    assert len(set(first)) == 2000
    assert first == list(itertools.islice(stream.prompts(kinds, seed=1), 2000))
    german = list(itertools.islice(stream.prompts(["german"], seed=2), 500))
    assert not {"{", "}"} & set("".join(german))


FEW = [
    *("--toy", "--device", "cpu", "--tokens", "24", "--depth", "3", "--users", "4", "--held-out", "6", "--marks", "12", "24"),
    *(
        "--cost-users",
        "2",
        "--cost-seconds",
        "1",
        "--rounds",
        "1",
        "--offline-epochs",
        "1",
        "--day0-every",
        "12",
        "--rate",
        "200",
    ),
]


@pytest.mark.parametrize("what", ["stream", "day0", "cost", "probe", "all"])
def test_on_a_toy(tmp_path, what):
    learn = importlib.import_module("learn")
    output = tmp_path / "learn.json"
    written, write = [], learn.write_json
    learn.write_json = lambda path, content: written.append(list(content)) or write(path, content)
    try:
        learn.main([what, *FEW, "--output", str(output)])
    finally:
        learn.write_json = write
    found = json.loads(output.read_text())
    assert found["provenance"]["commit"]
    if what == "all":
        assert [names[2:] for names in written] == [
            ["stream_data", "stream_made", "day0", "cost"][: number + 1] for number in range(4)
        ]
        assert len(list(tmp_path.glob("*.png"))) == 2
        found |= found["stream_made"] | found["day0"] | found["cost"] | {"at": found["stream_made"]["at"]}
    if what in ("stream", "all"):
        assert list(found["at"]) == ["0", "12", "24"]
        assert found["at"]["24"]["stream"] >= 1
        assert found["gain"]["error"] >= 0
        assert found["offline"]["old_ratio"]["value"] > 0.5
    if what in ("day0", "all"):
        assert found["aim"] == 1.5
        assert found["reached"] is None or found["reached"]["requests"] <= 24
    if what in ("cost", "all"):
        assert found["2"]["with"]["tokens_per_s"] > 0
        assert found["2"]["without"]["p99_ms"] > 0
        assert found["announced_bytes"] > 0
        # Time served by the engine without learning is not counted.
        assert found["stats"]["serving_seconds"] < 1.5
    if what == "probe":
        assert found["german"] >= 1


def test_a_stream_stops_at_its_deadline(tmp_path):
    learn = importlib.import_module("learn")
    found = learn.main(["stream", *FEW, "--max-seconds", "0", "--output", str(tmp_path / "learn.json")])
    assert found["stopped_at_deadline"]
    assert list(found["at"]) == ["0"]


def test_the_documented_folder_is_read(tmp_path):
    learn = importlib.import_module("learn")
    with gzip.open(tmp_path / "prompts.jsonl.gz", "wt") as file:
        file.write('{"id": "a/1", "turns": ["one", "two"]}\n{"id": "b/2", "turns": ["three"]}\n')
    assert learn.read_prompts(tmp_path) == ["one", "three"]
