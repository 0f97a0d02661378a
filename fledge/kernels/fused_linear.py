"""A linear layer with what surrounds it: RMSNorm before, SwiGLU or the residual sum after.

    out = [residual +] [swiglu] ( [norm] x · weightᵀ + bias )

A decoding step is bound by launches, not by arithmetic: for few rows each such layer is one kernel; for many it is cuBLAS
between elementwise kernels. In each a program's rows of the weight lie in registers, loaded before its inputs are there:
    direct   multiplied by tensor cores that are fed from memory, 16 rows a program; see `direct_linear.py`
and, where that one does not run (it wants bfloat16, Gluon and a Hopper card),
    vector   products are summed, row by row
    whole    multiplied by tensor cores, 16 rows a program, by way of shared memory; see `whole_linear.py`

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.direct_linear import can_be_direct, direct_linear
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.swiglu import swiglu, swiglu_reference
from fledge.kernels.triton_support import jit, let_next_start, loaded, next_power_of_2, overlap, tl, use_triton, wait_for_inputs
from fledge.kernels.whole_linear import ENOUGH_PROGRAMS, WHOLE_INPUTS, launch_whole, silu_times

# Rows up to which each kernel is used; `benchmarks/gpu.py --stages linears` measures them.
VECTOR_ROWS = 2
WHOLE_ROWS = 64
DIRECT_FROM, DIRECT_ROWS, DIRECT_GATED_ROWS = 1, 128, 64
VECTOR_INPUTS = 4096  # up to which a program's part of the weight fits the registers


class Norm(NamedTuple):
    weight: Tensor
    eps: float


def fused_linear(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    in_place: bool = False,
    before_attention: bool = False,
) -> Tensor:
    """`in_place`: the residual may be overwritten; what is returned counts.

    `before_attention`: all kernels from the next one on may read, at once, whatever was complete before this one waits.
    """
    options = {"norm": norm, "gated": gated, "residual_MO": residual_MO}
    if not use_triton(x_MK):
        return fused_linear_reference(x_MK, weight_OK, bias_O, **options)
    kernel = choose_kernel(*x_MK.shape, gated, direct=can_be_direct(x_MK, x_MK.shape[1]))
    if kernel is None:
        return wide_linear(x_MK, weight_OK, bias_O, **options, in_place=in_place)
    return fused_linear_triton(x_MK, weight_OK, bias_O, **options, kernel=kernel, before_attention=before_attention)


def fused_linear_reference(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
) -> Tensor:
    if norm is not None:
        x_MK = F.rms_norm(x_MK, norm.weight.shape, norm.weight, norm.eps)
    out = F.linear(x_MK, weight_OK, bias_O)
    if gated:
        out = swiglu_reference(out)
    return out if residual_MO is None else residual_MO + out


def wide_linear(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """For many rows: the product is cuBLAS's, with the residual in its own sum where there is no bias."""
    if norm is not None:
        x_MK = add_rms_norm(x_MK, None, norm.weight, norm.eps)
    if residual_MO is not None and bias_O is None and not gated:
        add = residual_MO.addmm_ if in_place else residual_MO.addmm  # not in place it begins with a copy
        return add(x_MK, weight_OK.t())
    out = F.linear(x_MK, weight_OK, bias_O)
    if gated:
        out = swiglu(out)
    return out if residual_MO is None else residual_MO + out


def fused_linear_triton(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    kernel: str,
    before_attention: bool = False,
) -> Tensor:
    """`kernel`: direct, vector or whole."""
    num_rows, size = x_MK.shape
    outputs = weight_OK.shape[0] // (2 if gated else 1)
    assert x_MK.is_contiguous()
    assert weight_OK.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    if kernel == "direct" and num_rows:
        options = {"norm": norm, "gated": gated, "residual_MO": residual_MO}
        return direct_linear(x_MK, weight_OK, bias_O, **options, before_attention=before_attention)
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    if not num_rows:
        return out
    arguments = (
        x_MK,
        weight_OK,
        bias_O if bias_O is not None else x_MK,
        norm.weight if norm is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
    )
    flags = {
        "SIZE": size,
        "OUTPUTS": outputs,
        "HAS_BIAS": bias_O is not None,
        "HAS_NORM": norm is not None,
        "HAS_RESIDUAL": residual_MO is not None,
        "GATED": gated,
        "HOLD": before_attention,
        **overlap(x_MK),
    }
    eps = norm.eps if norm is not None else 0.0
    if kernel == "vector":
        columns = vector_columns(outputs, gated)
        warps = 4 if size <= 2048 else 8
        inputs = next_power_of_2(size)
        _vector_linear[(-(-outputs // columns),)](
            *arguments, eps, ROWS=num_rows, COLUMNS=columns, INPUTS=inputs, **flags, num_warps=warps
        )
    else:
        launch_whole(arguments, num_rows, eps, flags)
    return out


def choose_kernel(num_rows: int, size: int, gated: bool = False, *, direct: bool = False) -> str | None:
    """None: cuBLAS."""
    if direct and num_rows >= DIRECT_FROM:
        return "direct" if num_rows <= (DIRECT_GATED_ROWS if gated else DIRECT_ROWS) else None
    if num_rows <= VECTOR_ROWS and size <= VECTOR_INPUTS:
        return "vector"
    return "whole" if num_rows <= WHOLE_ROWS and size <= WHOLE_INPUTS else None


def vector_columns(outputs: int, gated: bool) -> int:
    """Outputs a program: as many as leave enough programs."""
    columns = 4 if gated else 8
    while columns > 1 and outputs // columns < ENOUGH_PROGRAMS:
        columns //= 2
    return columns


@jit
def _vector_linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    HOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    if not HOLD:
        let_next_start(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < OUTPUTS
    k = tl.arange(0, INPUTS)
    dtype = out_ptr.dtype.element_ty
    weights = weight_ptr + column[:, None].to(tl.int64) * SIZE + k[None, :]
    mask = inside[:, None] & (k < SIZE)[None, :]
    w = tl.load(weights, mask=mask, other=0.0)
    if GATED:
        w_up = tl.load(weights + OUTPUTS * SIZE, mask=mask, other=0.0)
    if HAS_NORM:
        norm = tl.load(norm_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + OUTPUTS + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if HOLD:
        let_next_start(PDL)
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * SIZE + k, mask=k < SIZE, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * OUTPUTS + column, mask=inside, other=0.0)
        x = loaded(x).to(tl.float32)
        if HAS_NORM:
            x = (x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)) * norm).to(dtype).to(tl.float32)
        total = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
        if HAS_BIAS:
            total += bias
        if GATED:
            up = tl.sum(w_up.to(tl.float32) * x[None, :], axis=1)
            if HAS_BIAS:
                up += up_bias
            total = silu_times(total, up, dtype)
        if HAS_RESIDUAL:
            total = residual.to(tl.float32) + total.to(dtype).to(tl.float32)
        tl.store(out_ptr + row * OUTPUTS + column, total.to(dtype), mask=inside)
