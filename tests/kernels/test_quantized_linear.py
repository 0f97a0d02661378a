"""Linear layers on 8- and 4-bit weights, with norm, gate and residual fused in."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fledge.kernels.linear.quantized_gemv import dequantize_triton, quantized_gemv
from fledge.kernels.linear.reference import Norm, linear_reference
from fledge.kernels.linear.tiled import QUICK, tiled_linear
from fledge.kernels.quantization import dequantize, quantize
from tests.kernels.support import device_of_kernels, runs_triton
from tests.kernels.test_linear_dispatch import plain

FORMATS = {"int8": (8, False), "int4": (4, False), "int4 with offsets": (4, True)}
RUN = {"reference": linear_reference, "gemv": quantized_gemv, "tiled": tiled_linear}
RUN["quick"] = partial(tiled_linear, tile=QUICK)
KERNELS = ["reference", *(pytest.param(name, marks=runs_triton) for name in ("gemv", "tiled", "quick"))]


def quantized(outputs: int, size: int, format: str, device: str, group: int = 32):
    bits, offsets = FORMATS[format]
    return quantize(torch.randn(outputs, size, device=device) / size**0.5, bits, group, offsets=offsets)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("size", "outputs", "rows"), [(96, 40, 1), (64, 30, 3), (576, 24, 6), (160, 16, 17)])
@pytest.mark.parametrize("surroundings", ["nothing", "norm", "norm and gate", "residual", "all with bias"])
def test_quantized_linear(kernel, format, size, outputs, rows, surroundings):
    device = "cpu" if kernel == "reference" else device_of_kernels()
    gated = surroundings in ("norm and gate", "all with bias")
    x = torch.randn(rows, size, device=device)
    weight = quantized(outputs * (2 if gated else 1), size, format, device)
    bias = torch.randn(len(weight.codes), device=device) if surroundings == "all with bias" else None
    norm = Norm(torch.randn(size, device=device), 1e-5) if surroundings not in ("nothing", "residual") else None
    residual = torch.randn(rows, outputs, device=device) if surroundings in ("residual", "all with bias") else None
    found = RUN[kernel](x, weight, bias, norm=norm, gated=gated, residual_MO=residual)
    torch.testing.assert_close(found, plain(x, dequantize(weight), bias, norm, gated, residual), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_wider_groups(kernel):
    device = device_of_kernels()
    x, weight = torch.randn(2, 192, device=device), quantized(20, 192, "int4 with offsets", device, group=64)
    torch.testing.assert_close(RUN[kernel](x, weight), x @ dequantize(weight).t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_become_the_weights_that_are_defined(format, dtype):
    weight = quantized(21, 288, format, device_of_kernels())
    torch.testing.assert_close(dequantize_triton(weight, dtype), dequantize(weight, dtype), atol=0, rtol=0)


test_codes_become_the_weights_that_are_defined.pytestmark += runs_triton
