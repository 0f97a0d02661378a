"""Quantised weights in `tiles`: what they become, and that no tile changes the order of sums, by what is compiled."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from fledge.kernels.linear import tiles
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tile_codes import ASSEMBLY, INT4_ZERO, INT8_ZERO
from fledge.kernels.linear.tiles import tiled_linear
from fledge.kernels.quantization import QuantizedWeight, kept_fp8, quantize
from tests.kernels.ptx import as_bfloat16, run_assembly
from tests.kernels.support import compiled, compiles, fp8_weight

FORMATS = ["int8", "int4 with offsets", "fp8 in blocks"]


def word(codes: list[int]) -> int:
    return sum(code << 8 * i for i, code in enumerate(codes))


def bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


@pytest.mark.parametrize("format", ASSEMBLY)
def test_codes_become_rounded_weights(format: str) -> None:
    """All bytes, four at a time, with scales of 11 bits (FP8: of 24): as the definition in fp32 says, to the bit."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    for first in range(0, 256, 4):
        codes = [first + i for i in range(4)]
        scale = torch.randn((), generator=generator) * 10.0 ** torch.randint(-4, 2, (), generator=generator)
        scale = float(scale if format == "fp8" else scale.half())
        offset = float(torch.randn((), generator=generator).half())
        extra = {"int8": INT8_ZERO * scale, "int4": INT4_ZERO * scale, "int4 with offsets": offset}
        operands = [word(codes), *[bits(scale)] * 4, *([bits(extra[format])] * 4 if format != "fp8" else [])]
        found = as_bfloat16(run_assembly(ASSEMBLY[format], 4 if "int4" in format else 2, *operands))
        if format == "fp8":
            whole = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        elif format == "int8":
            whole = torch.tensor(codes, dtype=torch.uint8).view(torch.int8).float()
        else:
            whole = torch.tensor([code & 15 for code in codes] + [code >> 4 for code in codes]).float()
            whole = whole if "offsets" in format else whole - 8
        wanted = whole * torch.tensor(scale) + (offset if "offsets" in format else 0)
        assert torch.equal(found[~wanted.isnan()], wanted.bfloat16()[~wanted.isnan()]), codes
        assert found[wanted.isnan()].isnan().all()


def some_weight(format: str, outputs: int, size: int) -> QuantizedWeight:
    weight = torch.zeros(outputs, size)
    if format.startswith("fp8"):
        return kept_fp8(fp8_weight(weight, (128, 128) if "blocks" in format else None))
    return quantize(weight, 8 if format == "int8" else 4, offsets="offsets" in format)


def compiled_tiles(
    monkeypatch: pytest.MonkeyPatch, rows: int, weight: torch.Tensor | QuantizedWeight, order: Summation, **options: Any
) -> Any:
    """`options`: `gated`, and those of `support.compiled`."""
    size = weight.shape[1] if isinstance(weight, torch.Tensor) else weight.scales.shape[1] * weight.group_size
    x, gated = torch.zeros(rows, size).bfloat16(), options.pop("gated", False)
    call = lambda: tiled_linear(x, weight, order=order, gated=gated)  # noqa: E731
    (kernel,) = compiled(monkeypatch, tiles, "_tiles", call, others=("finish",), **options)
    return kernel


def products(text: str) -> list[tuple[str, str]]:
    """The version of the tensor cores' instructions, and `kWidth` of the weights, of each product."""
    layouts = dict(re.findall(r"^(#mma\d*) = #ttg.nvidia_mma<\{versionMajor = (\d)", text, re.MULTILINE))
    pattern = r"(?:tt\.dot|warp_group_dot) [^\n]*? : tensor<[^\n]*?parent = (#mma\d*), kWidth = (\d)"
    return [(layouts[parent], width) for parent, width in re.findall(pattern, text)]


# One of each kind of tile: one slice, two as programs of their own, four after each other.
CASES = [(4096, 4096, False), (4096, 8192, True), (14336, 4096, False), (640, 960, False)]


@compiles
@pytest.mark.parametrize("rows", [1, 33, 129, 512])
@pytest.mark.parametrize(("size", "outputs", "gated"), CASES)
@pytest.mark.parametrize("format", FORMATS)
def test_no_tile_changes_the_order(format, size, outputs, gated, rows, monkeypatch):
    """Steps of 16 neighbours (kWidth 2), each complete before its weights' registers are written again (nothing pending)."""
    slices = 4 if outputs < 3840 else 2 if size > 8192 else 1
    order = Summation(slices, False, -(-size // (64 * slices)) * 64)
    text = compiled_tiles(monkeypatch, rows, some_weight(format, outputs, size), order, gated=gated).asm["ttgir"]
    found = products(text)
    assert found
    assert {width for _, width in found} == {"2"}
    assert set(re.findall(r"pendings = (\d+)", text)) <= {"0"}


@compiles
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 512])
@pytest.mark.parametrize(("size", "slices"), [(4096, 1), (4096, 2), (1536, 4)])
def test_tiles_fit_a_card_with_99_kb(size, slices, rows, monkeypatch):
    """Ada and workstation Blackwell: a program that asks for more shared memory is refused at launch."""
    order = Summation(slices, False, size // slices)
    weight, small = torch.zeros(2048, size).bfloat16(), 99 << 10
    monkeypatch.setattr(tiles, "shared_memory", lambda device: small)
    kernel = compiled_tiles(monkeypatch, rows, weight, order, capability=89)
    assert kernel.metadata.shared <= small
