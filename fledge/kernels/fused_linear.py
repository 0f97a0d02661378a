"""A linear layer with what surrounds it: RMSNorm before, SwiGLU or the residual sum after.

    out = [residual +] [swiglu] ( [norm] x · weightᵀ + bias )

A decoding step is bound by launches, not by arithmetic: for few rows each such layer is one kernel; for many it is cuBLAS
between elementwise kernels. In each a program's rows of the weight lie in registers, loaded before its inputs are there:
    direct   multiplied by tensor cores that are fed from memory, 16 rows a program; see `direct_linear.py`
and, where that one does not run (it wants bfloat16, Gluon and a Hopper card),
    vector   products are summed, row by row
    whole    multiplied by tensor cores, 16 rows a program, by way of shared memory; each warp takes a share of the inputs

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

# Rows up to which each kernel is used; `benchmarks/gpu.py --stages linears` measures them.
VECTOR_ROWS = 2
WHOLE_ROWS = 64
DIRECT_FROM, DIRECT_ROWS, DIRECT_GATED_ROWS = 1, 128, 64
# Programs that fill an H200's 132 multiprocessors.
ENOUGH_PROGRAMS = 120
# Inputs up to which a program's part of the weight, and for `whole` 16 rows of inputs too, fit the registers.
VECTOR_INPUTS, WHOLE_INPUTS = 4096, 2048
TILE = 16  # rows of the tensor cores' smallest product


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
        tiles, warps = -(-num_rows // TILE), whole_warps(size)
        columns = whole_columns(tiles, outputs, gated)
        _whole_linear[(tiles, -(-outputs // columns))](
            *arguments,
            num_rows,
            eps,
            ROWS=TILE,
            COLUMNS=columns,
            **two_parts(size, 16 * warps),
            **flags,
            SPLITS=warps,
            num_warps=warps,
        )
    return out


def choose_kernel(num_rows: int, size: int, gated: bool = False, *, direct: bool = False) -> str | None:
    """None: cuBLAS."""
    if direct and num_rows >= DIRECT_FROM:
        return "direct" if num_rows <= (DIRECT_GATED_ROWS if gated else DIRECT_ROWS) else None
    if num_rows <= VECTOR_ROWS and size <= VECTOR_INPUTS:
        return "vector"
    return "whole" if num_rows <= WHOLE_ROWS and size <= WHOLE_INPUTS else None


def two_parts(size: int, smallest: int) -> dict[str, int]:
    """Of a row: their sizes are powers of two. 576 = 512 + 64."""
    large = max(next_power_of_2(size + 1) // 2, smallest)
    return {"PART1": large, "PART2": max(next_power_of_2(size - large), smallest) if size > large else 0}


def vector_columns(outputs: int, gated: bool) -> int:
    """Outputs a program: as many as leave enough programs."""
    columns = 4 if gated else 8
    while columns > 1 and outputs // columns < ENOUGH_PROGRAMS:
        columns //= 2
    return columns


def whole_warps(size: int) -> int:
    return 4 if size <= 1024 else 8


def whole_columns(tiles: int, outputs: int, gated: bool) -> int:
    columns = 16 if gated else 32
    while columns > 8 and tiles * (outputs // columns) < ENOUGH_PROGRAMS:
        columns //= 2
    return columns


@jit
def silu_times(gate, up, dtype: tl.constexpr):
    # Rounded between the two products, as the unfused network does.
    wide = gate.to(dtype).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


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


@jit
def whole_products(
    x_ptr,
    weight_ptr,
    norm_ptr,
    residual_ptr,
    row,
    column,
    row_inside,
    inside,
    eps,
    PART1: tl.constexpr,
    PART2: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    HOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The products of rows and columns, those of the weight's second half, and the residual, fp32. Waits for the inputs."""
    if not HOLD:
        let_next_start(PDL)
    split = tl.arange(0, SPLITS)[:, None, None]
    EACH1: tl.constexpr = PART1 // SPLITS
    k1 = split * EACH1 + tl.arange(0, EACH1)[None, None, :]
    w_mask1 = inside[None, :, None] & (k1 < SIZE)
    weights1 = weight_ptr + column[None, :, None].to(tl.int64) * SIZE + k1
    w1 = tl.load(weights1, mask=w_mask1, other=0.0)
    if GATED:
        up1 = tl.load(weights1 + OUTPUTS * SIZE, mask=w_mask1, other=0.0)
    if HAS_NORM:
        norm1 = tl.load(norm_ptr + k1, mask=k1 < SIZE, other=0.0)
    if PART2 > 0:
        EACH2: tl.constexpr = PART2 // SPLITS
        k2 = PART1 + split * EACH2 + tl.arange(0, EACH2)[None, None, :]
        w_mask2 = inside[None, :, None] & (k2 < SIZE)
        weights2 = weight_ptr + column[None, :, None].to(tl.int64) * SIZE + k2
        w2 = tl.load(weights2, mask=w_mask2, other=0.0)
        if GATED:
            up2 = tl.load(weights2 + OUTPUTS * SIZE, mask=w_mask2, other=0.0)
        if HAS_NORM:
            norm2 = tl.load(norm_ptr + k2, mask=k2 < SIZE, other=0.0)
    wait_for_inputs(PDL)
    if HOLD:
        let_next_start(PDL)
    x1 = tl.load(x_ptr + row[None, :, None] * SIZE + k1, mask=row_inside[None, :, None] & (k1 < SIZE), other=0.0)
    if PART2 > 0:
        x2 = tl.load(x_ptr + row[None, :, None] * SIZE + k2, mask=row_inside[None, :, None] & (k2 < SIZE), other=0.0)
    if HAS_RESIDUAL:
        mask = row_inside[:, None] & inside[None, :]
        residual = tl.load(residual_ptr + row[:, None] * OUTPUTS + column[None, :], mask=mask, other=0.0)
    w1, x1 = loaded(w1), loaded(x1)
    if PART2 > 0:
        w2, x2 = loaded(w2), loaded(x2)
    if GATED:
        up1 = loaded(up1)
        if PART2 > 0:
            up2 = loaded(up2)
    if HAS_NORM:
        wide1 = x1.to(tl.float32)
        square = tl.sum(tl.sum(wide1 * wide1, axis=2), axis=0)
        if PART2 > 0:
            wide2 = x2.to(tl.float32)
            square += tl.sum(tl.sum(wide2 * wide2, axis=2), axis=0)
        scale = (1.0 / tl.sqrt(square / SIZE + eps))[None, :, None]
        x1 = (wide1 * scale * loaded(norm1).to(tl.float32)).to(x1.dtype)
        if PART2 > 0:
            x2 = (wide2 * scale * loaded(norm2).to(tl.float32)).to(x2.dtype)
    total = tl.dot(x1, tl.permute(w1, (0, 2, 1)), input_precision="ieee")
    if PART2 > 0:
        total = tl.dot(x2, tl.permute(w2, (0, 2, 1)), total, input_precision="ieee")
    total = tl.sum(total, axis=0)
    up = total
    if GATED:
        up = tl.dot(x1, tl.permute(up1, (0, 2, 1)), input_precision="ieee")
        if PART2 > 0:
            up = tl.dot(x2, tl.permute(up2, (0, 2, 1)), up, input_precision="ieee")
        up = tl.sum(up, axis=0)
    added = total
    if HAS_RESIDUAL:
        added = loaded(residual).to(tl.float32)
    return total, up, added


@jit
def _whole_linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART1: tl.constexpr,
    PART2: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    HOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same columns start together: the second finds the weight in the cache of the device.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, inside = row < num_rows, column < OUTPUTS
    dtype = out_ptr.dtype.element_ty
    total, up, residual = whole_products(
        x_ptr,
        weight_ptr,
        norm_ptr,
        residual_ptr,
        row,
        column,
        row_inside,
        inside,
        eps,
        PART1,
        PART2,
        SIZE,
        OUTPUTS,
        HAS_NORM,
        HAS_RESIDUAL,
        GATED,
        SPLITS,
        HOLD,
        PDL,
    )
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + OUTPUTS + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = silu_times(total, up, dtype)
    place = row[:, None] * OUTPUTS + column[None, :]
    mask = row_inside[:, None] & inside[None, :]
    if HAS_RESIDUAL:
        total = residual + total.to(dtype).to(tl.float32)
    tl.store(out_ptr + place, total.to(dtype), mask=mask)
