"""The benchmark scripts: they import, and the GPU scripts run on a tiny model on a CPU, without graphs."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_decoder, tiny_drafter

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_imports(name: str) -> None:
    module = importlib.import_module(name)
    assert Path(module.__file__).parent == FOLDER


@pytest.fixture
def bench():
    gpu = importlib.import_module("gpu")
    args = Namespace(
        concurrency=[2], depths=[2, 3], tokens=4, rounds=1, max_model_len=512, honour_stops=False,
        option_users=[2], option_requests=1, option_depth=3, option_parts="cycles,speculative,plain", option_names="", queued=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 100, (length,), generator=generator).tolist() for length in (5, 9, 17)]
    return gpu.Bench(args, tiny_decoder(), tiny_drafter(), prompts, device="cpu", capture=False)


def test_plain_and_speculative_speeds(bench) -> None:
    gpu = sys.modules["gpu"]
    found = gpu.spec(bench)
    assert bench.results["plain"]["2"]["tokens_per_s_per_user"] > 0
    assert found["2, chosen"]["usual_depth"] in (0, 1, 2, 3)
    assert found["2, depth 3"]["speed_up"] > 0
    assert found["2, depth 3"]["step_us"] > 0


def test_options(bench) -> None:
    gpu, options = sys.modules["gpu"], importlib.import_module("gpu_options")
    found = json.loads(json.dumps(gpu.options(bench)))
    assert list(found["depth 3, 2 users"]) == [*options.option_table(128, 4), options.MIXED]
    for way in ("plain", "depth 3"):
        assert all(run["ratio"] > 0 for run in found[f"{way}, 2 users"].values())
    assert len(found["cycles"]) == 7
    assert all(run["replay_us"] > 0 and run["as_run_us"] > 0 for run in found["cycles"].values())
    page = importlib.import_module("gpu_report").options({"options": found})
    assert "| depth 3, 2 users | JSON-like mask |" in page
    assert "| tree of 12, width 4, depth 5, 2 rows |" in page


def test_the_mask_bans_its_tokens_alone() -> None:
    options = importlib.import_module("gpu_options")
    mask = options.BannedTokens([3, 127], 128)
    words = torch.full((4,), -1, dtype=torch.int32)
    mask.fill([], words)
    banned = [token for token in range(128) if not words[token // 32].item() >> token % 32 & 1]
    assert banned == [3, 127]
    assert mask([], torch.zeros(128)).isinf().nonzero().flatten().tolist() == [3, 127]


def test_mixed_options_are_sixteen_different_ones() -> None:
    settings = importlib.import_module("gpu_options").mixed_settings(128, 64)
    assert len(settings) == 16
    assert len({str(sorted(one.items(), key=str)) for one in settings}) == 16
