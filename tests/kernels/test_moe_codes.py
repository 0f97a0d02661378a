"""Quantised experts as they are compiled for sm_90: the order of sums, and registers that no product still reads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fledge.kernels import moe
from fledge.kernels.quantization import QuantizedLinear, QuantizedWeight, stacked_weights
from fledge.kernels.triton_support import MEASURED_SHARED_MEMORY, triton
from tests.kernels.test_tile_codes import FORMATS, compiles, products, some_weight

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
TYPES |= {torch.int8: "i8", torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv"}


def experts(format: str, outputs: int, size: int) -> torch.Tensor | QuantizedWeight:
    if format == "bf16":
        return torch.zeros(16, outputs, size, dtype=torch.bfloat16)
    stacked = stacked_weights([QuantizedLinear(some_weight(format, outputs, size)) for _ in range(16)])
    assert stacked is not None
    return stacked


def compiled(monkeypatch: pytest.MonkeyPatch, format: str, num_rows: int) -> list[Any]:
    """Both products of 16 of Qwen3-30B-A3B's experts."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, launches = moe._expert_linear, []

    class Recorder:
        def __init__(self, keep: bool = False) -> None:
            self.keep = keep

        def __getitem__(self, grid):
            return lambda *args, **options: launches.append((args, options)) if self.keep else None

    size, inner = 2048, 768
    x = torch.zeros(num_rows, size, dtype=torch.bfloat16)
    weights, chosen = torch.zeros(num_rows, 8), torch.zeros(num_rows, 8, dtype=torch.int32)
    with monkeypatch.context() as patch:
        patch.setattr(moe, "_expert_linear", Recorder(keep=True))
        patch.setattr(moe, "_group", Recorder())
        patch.setattr(moe, "_combine", Recorder())
        moe.experts_triton(experts(format, 2 * inner, size), experts(format, size, inner), x, weights, chosen, x)
    made = []
    for args, options in launches:
        names = kernel.arg_names
        types = {name: f"*{TYPES[arg.dtype]}" for name, arg in zip(names, args, strict=False)}
        constants = {name: value for name, value in options.items() if name in names}
        places = {(names.index(name),): value for name, value in constants.items()}
        divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in types}
        source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=places, attrs=divisible)
        how = {name: options[name] for name in ("num_warps", "num_stages")}
        made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=how))
    return made


@compiles
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("format", ["bf16", *FORMATS])
def test_what_is_compiled(format: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `linear.tiles`: steps of 16 neighbours (kWidth 2), each complete before its weights' registers are written again.
    Two kernels of a layer, by few rows an expert and by many, fit the card."""
    for kernel in compiled(monkeypatch, format, num_rows):
        assert kernel.metadata.shared <= MEASURED_SHARED_MEMORY
        if format == "bf16":
            continue
        text = kernel.asm["ttgir"]
        found = products(text)
        assert found
        assert {width for _, width in found} == {"2"}
        assert set(re.findall(r"pendings = (\d+)", text)) <= {"0"}
