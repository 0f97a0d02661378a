"""Linear layers with norm, gate and residual fused in."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.fused_linear import Norm, choose_kernel, fused_linear_reference, fused_linear_triton, wide_linear
from tests.kernels.support import device_of_kernels, runs_triton

TRITON = ("vector", "whole")
KERNELS = ["reference", "wide", *(pytest.param(name, marks=runs_triton) for name in TRITON)]


def plain(x, weight, bias, norm, gated, residual):
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    out = x @ weight.t() + (bias if bias is not None else 0)
    if gated:
        gate, up = out.chunk(2, -1)
        out = gate / (1 + (-gate).exp()) * up
    return out + residual if residual is not None else out


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("size", "outputs", "rows"), [(72, 40, 1), (64, 30, 2), (576, 24, 6), (200, 16, 19)])
@pytest.mark.parametrize("surroundings", ["nothing", "norm", "norm and gate", "residual", "all with bias"])
def test_fused_linear(kernel, size, outputs, rows, surroundings):
    device = device_of_kernels() if kernel in TRITON else "cpu"
    gated = surroundings in ("norm and gate", "all with bias")
    x = torch.randn(rows, size, device=device)
    weight = torch.randn(outputs * (2 if gated else 1), size, device=device) / size**0.5
    bias = torch.randn(len(weight), device=device) if surroundings == "all with bias" else None
    norm = Norm(torch.randn(size, device=device), 1e-5) if surroundings not in ("nothing", "residual") else None
    residual = torch.randn(rows, outputs, device=device) if surroundings in ("residual", "all with bias") else None
    before = None if residual is None else residual.clone()
    run = {"reference": fused_linear_reference, "wide": wide_linear}.get(kernel, fused_linear_triton)
    options = {"kernel": kernel} if kernel in TRITON else {}
    found = run(x, weight, bias, norm=norm, gated=gated, residual_MO=residual, **options)
    torch.testing.assert_close(found, plain(x, weight, bias, norm, gated, residual), atol=1e-4, rtol=1e-4)
    assert residual is None or torch.equal(residual, before)


def test_in_place_the_residual_takes_the_sum():
    x, weight, residual = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    wanted = residual + x @ weight.t()
    assert wide_linear(x, weight, residual_MO=residual, in_place=True) is residual
    torch.testing.assert_close(residual, wanted)


def test_kernels_by_size():
    assert [choose_kernel(rows, 576) for rows in (1, 2, 3, 64, 65)] == ["vector", "vector", "whole", "whole", None]
    assert [choose_kernel(rows, 4096) for rows in (1, 3)] == ["vector", None]
    assert choose_kernel(1, 8192) is None
    assert [choose_kernel(rows, 576, direct=True) for rows in (1, 128, 129)] == ["direct", "direct", None]
    assert [choose_kernel(rows, 576, gated=True, direct=True) for rows in (64, 65)] == ["direct", None]
