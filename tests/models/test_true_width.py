"""One layer at a real model's width equals transformers, in fp32 and bf16, as measured by `benchmarks/parity.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.parity import WIDTHS, engine_row, network_differences, reference
from fledge.families import FAMILIES

DIFFERING = ["Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "Mixtral-8x7B", "Gemma-3-4B", "Phi-4-mini"]
DIFFERING += ["Gemma-2B", "SmolLM3-3B", "GLM-4-9B-0414"]  # models whose layers differ from Llama's


def test_the_benchmark_has_all_families() -> None:
    assert {f"{family}ForCausalLM" for family, _ in WIDTHS.values()} == FAMILIES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIFFERING)
@torch.no_grad()
def test_one_layer_equals_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = network_differences(name, tmp_path, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert found.logits < tolerance
    assert found.states < tolerance


@torch.no_grad()
def test_the_engine_equals_transformers(tmp_path: Path) -> None:
    row = engine_row(tmp_path, reference("Gemma-3-4B", tmp_path, torch.float32), "cpu")
    assert row["logprobs"] < 0.02
    assert row["EAGLE"] == row["latent attention"] == row["answers"]
