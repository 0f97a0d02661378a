"""Codes of quantised weights: their conversion, and (in compiled kernels) that no tile changes the order of sums."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fledge.kernels.linear import tiles
from fledge.kernels.linear.codes import ASSEMBLY
from fledge.kernels.linear.summation import Summation, summation
from fledge.kernels.linear.tiles import tiled_linear
from fledge.kernels.quantization import QuantizedWeight, kept_fp8, quantize
from tests.kernels.ptx import as_bfloat16, run_assembly
from tests.kernels.support import compiled, compiles, fp8_weight

FORMATS = ["int8", "int4 with offsets", "fp8", "fp8 in blocks"]


@pytest.mark.parametrize("format", ASSEMBLY)
def test_codes_become_bfloat16(format: str) -> None:
    """All bytes, four at a time, or every 37th word of four nibbles are converted exactly."""
    is_nibbles = "int4" in format
    for first in range(0, 1 << 16, 37) if is_nibbles else range(0, 256, 4):
        source = first if is_nibbles else sum(first + i << 8 * i for i in range(4))
        registers = run_assembly(ASSEMBLY[format], 4 if is_nibbles else 2, source)
        codes = torch.tensor([first >> 4 * i & 15 if is_nibbles else first + i for i in range(4)], dtype=torch.uint8)
        if is_nibbles:
            found = torch.tensor([int(half) for half in registers]).to(torch.int16).view(torch.bfloat16)
            wanted = codes.float() - (0 if "offsets" in format else 8)
        else:
            found = as_bfloat16(registers)
            wanted = codes.view(torch.float8_e4m3fn if format == "fp8" else torch.int8).float()
        assert torch.equal(found[~wanted.isnan()].float(), wanted[~wanted.isnan()]), first
        assert found[wanted.isnan()].isnan().all()


def some_weight(format: str, outputs: int, size: int) -> QuantizedWeight:
    weight = torch.zeros(outputs, size)
    if format.startswith("fp8"):
        return kept_fp8(fp8_weight(weight, (128, 128) if "blocks" in format else None))
    return quantize(weight, 8 if format == "int8" else 4, offsets="offsets" in format)


def compiled_tiles(
    monkeypatch: pytest.MonkeyPatch, rows: int, weight: torch.Tensor | QuantizedWeight, order: Summation, **options: Any
) -> Any:
    """Compiles `tiles` for a linear. `options`: `gated`, and those of `support.compiled`."""
    size = weight.shape[1] if isinstance(weight, torch.Tensor) else weight.scales.shape[1] * weight.group_size
    x, gated = torch.zeros(rows, size).bfloat16(), options.pop("gated", False)
    call = lambda: tiled_linear(x, weight, order=order, gated=gated)  # noqa: E731
    (kernel,) = compiled(monkeypatch, tiles, "_tiles", call, others=("finish",), **options)
    return kernel


def products(text: str) -> list[tuple[str, str]]:
    """Returns the version of the tensor-core instruction and the weights' `kWidth` of each product."""
    layouts = dict(re.findall(r"^(#mma\d*) = #ttg.nvidia_mma<\{versionMajor = (\d)", text, re.MULTILINE))
    pattern = r"(?:tt\.dot|warp_group_dot) [^\n]*? : tensor<[^\n]*?parent = (#mma\d*), kWidth = (\d)"
    return [(layouts[parent], width) for parent, width in re.findall(pattern, text)]


# Slices as programs of their own, slices one after the other, and a single slice.
CASES = [(4096, 4096, False), (4096, 28672, True), (640, 960, False), (1024, 32000, False)]


@compiles
@pytest.mark.parametrize("rows", [1, 33, 129, 512])
@pytest.mark.parametrize(("size", "outputs", "gated"), CASES)
@pytest.mark.parametrize("format", FORMATS)
def test_no_tile_changes_the_order(format, size, outputs, gated, rows, monkeypatch):
    """Steps are 16 neighbours (kWidth 2) and complete before their weights' registers are overwritten (nothing pending)."""
    order = summation(size, outputs, torch.bfloat16, torch.device("cuda"), gated=gated, quantised=True)
    text = compiled_tiles(monkeypatch, rows, some_weight(format, outputs, size), order, gated=gated).asm["ttgir"]
    found = products(text)
    assert found
    assert {width for _, width in found} == {"2"}
    assert set(re.findall(r"pendings = (\d+)", text)) <= {"0"}


@compiles
@pytest.mark.parametrize("format", ["int8", "int4", "int4 with offsets"])
def test_codes_are_read_on_ampere(format, monkeypatch):
    order = Summation(4, False, 1024)
    kernel = compiled_tiles(monkeypatch, 16, some_weight(format, 4096, 4096), order, capability=80)
    assert {version for version, _ in products(kernel.asm["ttgir"])} == {"2"}


@compiles
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 512])
@pytest.mark.parametrize(("size", "slices"), [(4096, 1), (4096, 2), (1536, 4)])
def test_tiles_fit_a_card_with_99_kb(size, slices, rows, monkeypatch):
    """Ada and workstation Blackwell cards have 99 KB: a program that needs more shared memory fails at launch."""
    order = Summation(slices, False, size // slices)
    weight, small = torch.zeros(2048, size).bfloat16(), 99 << 10
    monkeypatch.setattr(tiles, "shared_memory", lambda device: small)
    kernel = compiled_tiles(monkeypatch, rows, weight, order, capability=89)
    assert kernel.metadata.shared <= small


@compiles
@pytest.mark.parametrize(
    ("size", "outputs", "slices", "rows"), [(4096, 4096, 1, 1), (14336, 4096, 2, 16), (4096, 28672, 1, 64)]
)
def test_first_weights_are_requested_before_the_wait(size, outputs, slices, rows, monkeypatch):
    """Only for few rows of a plain weight: a prefill has other work, and quantised weights are small."""
    order = Summation(slices, False, size // slices)
    text = compiled_tiles(monkeypatch, rows, torch.zeros(outputs, size).bfloat16(), order).asm["ptx"]
    assert text.index("prefetch.global.L2") < text.index("griddepcontrol.wait") < text.index("cp.async")
    many = compiled_tiles(monkeypatch, 65, torch.zeros(outputs, size).bfloat16(), order).asm["ptx"]
    assert "prefetch" not in many
