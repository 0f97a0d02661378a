"""Experts on a GPU: routing, grouping and products match their references, and rows do not depend on each other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fledge.kernels.formats.packed_int import IntWeight
from fledge.kernels.gate import apply_gate_reference, apply_gate_triton
from fledge.kernels.moe import (
    experts_reference,
    experts_triton,
    group_pairs,
    group_pairs_reference,
    route_reference,
    route_triton,
)
from fledge.kernels.quantization import (
    QuantizedLinear,
    QuantizedWeight,
    dequantize,
    kept_fp8,
    quantize,
    stacked_weights,
)
from tests.kernels.support import INTERPRETED, device_of_kernels, fp8_weight, runs_triton

pytestmark = runs_triton


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("num_experts", "chosen"), [(8, 2), (128, 8), (60, 4), (3, 1)])
def test_route(num_experts, chosen, normalise):
    scores = torch.randn(5, num_experts + 1, device=device_of_kernels())[:, :num_experts]  # rows with a larger stride
    weights, experts = route_triton(scores, chosen, normalise=normalise)
    wanted = route_reference(scores, chosen, normalise=normalise)
    assert torch.equal(experts.long(), wanted[1])
    torch.testing.assert_close(weights, wanted[0])


@pytest.mark.parametrize("num_pairs", [1, 16, 50])
def test_group(num_pairs):
    experts = torch.randint(0, 12, (num_pairs,), device=device_of_kernels(), dtype=torch.int32)
    found, wanted = group_pairs(experts, 12), group_pairs_reference(experts, 12)
    assert torch.equal(found.order_P, wanted.order_P)
    used = wanted.counts_S > 0
    count = int(found.num_slots)
    assert count == int(used.sum())
    for mine, theirs in zip(found[1:4], wanted[1:4], strict=True):
        assert torch.equal(mine[:count], theirs[used])


def parts(num_rows: int, size: int, inner: int, num_experts: int, chosen: int, dtype=torch.float32):
    device = device_of_kernels()
    gate_up = (torch.randn(num_experts, 2 * inner, size, device=device) / size**0.5).to(dtype)
    down = (torch.randn(num_experts, size, inner, device=device) / inner**0.5).to(dtype)
    x, residual = (torch.randn(num_rows, size, device=device).to(dtype) for _ in range(2))
    weights, experts = route_reference(torch.randn(num_rows, num_experts, device=device), chosen, normalise=True)
    return gate_up, down, x, weights, experts.int(), residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "size", "inner", "num_experts", "chosen"),
    [(1, 64, 32, 8, 2), (7, 96, 80, 8, 3), (40, 64, 48, 4, 2), (3, 128, 64, 6, 6)],
)
def test_experts(num_rows, size, inner, num_experts, chosen, dtype):
    gate_up, down, x, weights, experts, residual = parts(num_rows, size, inner, num_experts, chosen, dtype)
    found = experts_triton(gate_up, down, x, weights, experts, residual)
    functions = [
        lambda rows, e=e: F.linear(apply_gate_reference(F.linear(rows, gate_up[e])), down[e]) for e in range(num_experts)
    ]
    wanted = experts_reference(functions, x, weights, experts.long(), residual)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def quantised(weight_EOI: torch.Tensor, format: str) -> QuantizedWeight:
    linears = []
    for weight in weight_EOI:
        if format.startswith("fp8"):
            made = kept_fp8(fp8_weight(weight, (128, 128) if "blocks" in format else None))
        elif "awq" in format:  # zero points in groups of 128
            groups = weight.float().unflatten(1, (-1, 128))
            scales = ((groups.amax(-1) - groups.amin(-1)) / 15).half()
            zeros = (-groups.amin(-1) / scales.float()).round().clamp(0, 15)
            codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
            made = IntWeight(codes.flatten(1).to(torch.int16), zeros.to(torch.int16), scales, 4).exact()
        else:
            made = quantize(weight, 8 if format == "int8" else 4, offsets="offsets" in format)
        linears.append(QuantizedLinear(made))
    stacked = stacked_weights(linears)
    assert stacked is not None
    return stacked


def dequantised(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    flat = replace(
        weight,
        codes=weight.codes.flatten(0, 1),
        scales=weight.scales.flatten(0, 1),
        offsets=None if weight.offsets is None else weight.offsets.flatten(0, 1),
    )
    return dequantize(flat, dtype).unflatten(0, (len(weight.codes), -1)).contiguous()


FORMATS = ["int8", "int4", "int4 with offsets", "awq", "fp8", "fp8 in blocks"]


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_experts_are_those_dequantised_once(format, dtype, num_rows):
    """They are equal up to rounding: scales are applied to sums, not to weights."""
    gate_up, down, x, weights, experts, residual = parts(num_rows, 256, 128, 4, 2, dtype)
    packed = quantised(gate_up, format), quantised(down, format)
    found = experts_triton(*packed, x, weights, experts, residual)
    plain = [dequantised(weight, dtype) for weight in packed]
    wanted = experts_triton(*plain, x, weights, experts, residual)
    assert (plain[0] - gate_up).abs().max() > 0  # the weights were rounded
    torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-3)


@pytest.mark.parametrize("format", ["int4 with offsets", "fp8"])
def test_a_row_of_quantised_experts_does_not_depend_on_the_others(format):
    same = partial(torch.allclose, rtol=1e-5, atol=1e-5) if INTERPRETED else torch.equal
    gate_up, down, x, weights, experts, residual = parts(40, 256, 128, 4, 2)
    packed = quantised(gate_up, format), quantised(down, format)
    whole = experts_triton(*packed, x, weights, experts, residual)
    one = slice(17, 18)
    assert same(experts_triton(*packed, x[one], weights[one], experts[one], residual[one])[0], whole[17])


def test_a_row_does_not_depend_on_the_others():
    """A row has the same bits alone, among others, and if the others are routed elsewhere. The interpreter computes a tile's
    product with numpy, which sums tiles of other sizes in another order."""
    same = partial(torch.allclose, rtol=1e-5, atol=1e-5) if INTERPRETED else torch.equal
    gate_up, down, x, weights, experts, residual = parts(40, 64, 48, 4, 2)
    whole = experts_triton(gate_up, down, x, weights, experts, residual)
    for row in (0, 17, 39):
        one = slice(row, row + 1)
        alone = experts_triton(gate_up, down, x[one], weights[one], experts[one], residual[one])
        assert same(alone[0], whole[row])
    elsewhere = experts.clone()
    elsewhere[1:] = (elsewhere[1:] + 1) % 4
    assert same(experts_triton(gate_up, down, x, weights, elsewhere, residual)[0], whole[0])


@pytest.mark.parametrize(("num_rows", "size"), [(1, 32), (5, 1100)])
def test_geglu(num_rows, size):
    x = 3 * torch.randn(num_rows, 2 * size, device=device_of_kernels())
    torch.testing.assert_close(apply_gate_triton(x, gelu=True), apply_gate_reference(x, gelu=True), rtol=1e-5, atol=1e-5)
