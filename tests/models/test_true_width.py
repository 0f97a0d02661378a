"""One layer at the width of a real model against transformers, in fp32 and bf16, as `benchmarks/parity.py` measures it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.parity import WIDTHS, engine_row, network_differences, reference
from fledge.families import FAMILIES

SET_APART = ["Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "Mixtral-8x7B", "Gemma-3-4B", "Phi-4-mini"]
SET_APART += ["Gemma-2B", "SmolLM3-3B", "GLM-4-9B-0414"]  # layers differ from Llama's


def test_the_benchmark_has_all_families() -> None:
    assert {f"{family}ForCausalLM" for family, _ in WIDTHS.values()} == FAMILIES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SET_APART)
@torch.no_grad()
def test_one_layer(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = network_differences(name, tmp_path, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert found.logits < tolerance
    assert found.states < tolerance


@torch.no_grad()
def test_the_engine(tmp_path: Path) -> None:
    row = engine_row(tmp_path, reference("Gemma-3-4B", tmp_path, torch.float32), "cpu")
    assert row["logprobs"] < 0.02
    assert row["EAGLE"] == row["latent attention"] == row["answers"]
