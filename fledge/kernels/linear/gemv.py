"""The linear layer for one or two rows: a program sums products of its rows of the weight, row by row (GEMV).

The program's part of the weight lies in registers before its inputs are there. Where there is one, `register_mma` is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.shared_mma import silu_times
from fledge.kernels.triton_support import (
    jit,
    let_next_start,
    linear_programs,
    loaded,
    next_power_of_2,
    overlap,
    tl,
    wait_for_inputs,
)


def gemv(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    before_attention: bool = False,
) -> Tensor:
    """As `dispatch.linear`."""
    num_rows, size = x_MK.shape
    outputs = weight_OK.shape[0] // (2 if gated else 1)
    assert x_MK.is_contiguous()
    assert weight_OK.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    if not num_rows:
        return out
    columns = gemv_columns(outputs, gated, linear_programs(x_MK.device))
    _vector_linear[(-(-outputs // columns),)](
        x_MK,
        weight_OK,
        bias_O if bias_O is not None else x_MK,
        norm.weight if norm is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        norm.eps if norm is not None else 0.0,
        ROWS=num_rows,
        COLUMNS=columns,
        INPUTS=next_power_of_2(size),
        SIZE=size,
        OUTPUTS=outputs,
        HAS_BIAS=bias_O is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual_MO is not None,
        GATED=gated,
        HOLD=before_attention,
        **overlap(x_MK),
        num_warps=4 if size <= 2048 else 8,
    )
    return out


def gemv_columns(outputs: int, gated: bool, enough_programs: int) -> int:
    """Outputs a program: as many as leave enough programs."""
    columns = 4 if gated else 8
    while columns > 1 and outputs // columns < enough_programs:
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
