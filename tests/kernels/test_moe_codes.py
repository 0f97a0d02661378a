"""Quantised experts compiled for sm_90: the order of sums, and that no product still reads overwritten registers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fledge.kernels import moe
from fledge.kernels.quantization import QuantizedLinear, QuantizedWeight, stacked_weights
from fledge.kernels.triton_support import MEASURED_SHARED_MEMORY
from tests.kernels.support import compiled, compiles
from tests.kernels.test_codes import FORMATS, products, some_weight


def experts(format: str, outputs: int, size: int) -> torch.Tensor | QuantizedWeight:
    if format == "bf16":
        return torch.zeros(16, outputs, size, dtype=torch.bfloat16)
    stacked = stacked_weights([QuantizedLinear(some_weight(format, outputs, size)) for _ in range(16)])
    assert stacked is not None
    return stacked


def compiled_products(monkeypatch: pytest.MonkeyPatch, format: str, num_rows: int) -> list[Any]:
    """Compiles both products for 16 of Qwen3-30B-A3B's experts."""
    size, inner = 2048, 768
    x = torch.zeros(num_rows, size, dtype=torch.bfloat16)
    weights, chosen = torch.zeros(num_rows, 8), torch.zeros(num_rows, 8, dtype=torch.int32)
    gate_up, down = experts(format, 2 * inner, size), experts(format, size, inner)
    call = lambda: moe.experts_triton(gate_up, down, x, weights, chosen, x)  # noqa: E731
    return compiled(monkeypatch, moe, "_expert_linear", call, others=("_group", "_combine"))


@compiles
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("format", ["bf16", *FORMATS])
def test_what_is_compiled(format: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `linear.tiles`, steps are 16 neighbours (kWidth 2) and complete before their weights' registers are overwritten. A
    layer's two kernels fit the card with few rows per expert and with many."""
    gate_up, down = compiled_products(monkeypatch, format, num_rows)
    for kernel in (gate_up, down):
        assert kernel.metadata.shared <= MEASURED_SHARED_MEMORY
        text = kernel.asm["ptx"]
        waits_first = text.index("griddepcontrol.wait") < text.index("ld.global")
        assert waits_first == (kernel is gate_up), "the kernel before down does not write the groups"
        if format == "bf16":
            assert (text.index("griddepcontrol.wait") < text.index("prefetch.global")) == (kernel is gate_up)
        if format == "bf16":
            continue
        text = kernel.asm["ttgir"]
        found = products(text)
        assert found
        assert {width for _, width in found} == {"2"}
        assert set(re.findall(r"pendings = (\d+)", text)) <= {"0"}
