"""Linear layers with norm, gate and residual fused in."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.linear import dispatch
from fledge.kernels.linear.cublas import cublas_linear
from fledge.kernels.linear.dispatch import HEAD_TABLE, Case, Shape, choose_kernel, run_kernel, table
from fledge.kernels.linear.reference import Norm, linear_reference
from tests.kernels.support import device_of_kernels, runs_triton

TRITON = ("gemv", "shared_mma")
KERNELS = ["reference", "cublas", *(pytest.param(name, marks=runs_triton) for name in TRITON)]


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
    run = {"reference": linear_reference, "cublas": cublas_linear}.get(kernel) or run_kernel(kernel, weight)
    found = run(x, weight, bias, norm=norm, gated=gated, residual_MO=residual)
    torch.testing.assert_close(found, plain(x, weight, bias, norm, gated, residual), atol=1e-4, rtol=1e-4)
    assert residual is None or torch.equal(residual, before)


def test_in_place_the_residual_takes_the_sum():
    x, weight, residual = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    wanted = residual + x @ weight.t()
    assert cublas_linear(x, weight, residual_MO=residual, in_place=True) is residual
    torch.testing.assert_close(residual, wanted)


def kernels(rows, inputs, format="plain", gated=False, group_size=None):
    card = torch.device("cuda", 0)
    return [choose_kernel(Case(count, inputs, format, torch.bfloat16, card, gated, group_size)) for count in rows]


def test_kernels_by_size(monkeypatch):
    """On a card before Hopper, and on one that multiplies from registers."""
    monkeypatch.setattr(dispatch, "supports_registers", lambda *_: False)
    assert kernels((0, 1, 2, 3, 64, 65), 576) == ["gemv", "gemv", "gemv", "shared_mma", "shared_mma", "cublas"]
    assert kernels((1, 3), 4096) == ["gemv", "cublas"]
    assert kernels((1,), 8192) == ["cublas"]
    assert kernels((2, 3, 64, 65), 576, "int4", group_size=32) == ["gemv", "tiled", "tiled", "dequantize_cublas"]
    assert kernels((1,), 8192, "int8", group_size=32) == ["tiled"]
    monkeypatch.setattr(dispatch, "supports_registers", lambda *_: True)
    assert kernels((0, 1, 128, 129), 576) == ["gemv", "register_mma", "register_mma", "cublas"]
    assert kernels((64, 65), 576, gated=True) == ["register_mma", "cublas"]
    assert kernels((64, 65, 129), 576, "int8", True, 32) == ["register_mma", "dequantize_cublas", "dequantize_cublas"]


def test_heads_by_size(monkeypatch):
    """Heads of few rows keep the best of their blocks; wide ones and many rows write logits."""

    def heads(rows, inputs, format="plain", group_size=None):
        card = torch.device("cuda", 0)
        cases = [Case(count, inputs, format, torch.bfloat16, card, group_size=group_size) for count in rows]
        return [choose_kernel(case, HEAD_TABLE) for case in cases]

    monkeypatch.setattr(dispatch, "supports_registers", lambda *_: False)
    assert heads((1, 16, 17), 576) == ["shared_head", "shared_head", "logits"]
    assert heads((1,), 4096) == ["logits"]
    assert heads((16, 17), 4096, "int8", 32) == ["tiled_head", "logits"]
    monkeypatch.setattr(dispatch, "supports_registers", lambda *_: True)
    assert heads((1, 16, 17), 576, "int4", 32) == ["register_head", "register_head", "logits"]


def test_the_table_for_people(monkeypatch):
    monkeypatch.setattr(dispatch, "supports_registers", lambda *_: False)
    shapes = [Shape("qkv", 576, 960), Shape("gate_up", 576, 3072, "int8", True, 32), Shape("head", 576, 5000, is_head=True)]
    assert table(torch.device("cuda", 0), shapes, rows=(1, 256)) == [
        {"linear": "qkv", "K": 576, "N": 960, "format": "plain", "1 rows": "gemv", "256 rows": "cublas"},
        {"linear": "gate_up", "K": 576, "N": 3072, "format": "int8", "1 rows": "gemv", "256 rows": "dequantize_cublas"},
        {"linear": "head", "K": 576, "N": 5000, "format": "plain", "1 rows": "shared_head", "256 rows": "logits"},
    ]
    assert table(torch.device("cpu"), shapes[:1], rows=(1,))[0]["1 rows"] in ("native", "torch")
