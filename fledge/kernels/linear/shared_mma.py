"""The linear layer for up to 64 rows on any card's tensor cores, by way of shared memory: a program has all inputs at once,
split over its warps.

Its rows of the weight lie in registers before its inputs are there. A row's inputs come as two parts, whose sizes are powers of
two, so that little of them is padding. Where there is one, `register_mma` is faster: it does without shared memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.linear.reference import NormLike
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

MAX_INPUTS = 2048  # up to which a program's part of the weight and 16 rows of inputs fit the registers
TILE = 16  # rows of the tensor cores' smallest product


def shared_mma(
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
    tiles, warps = -(-num_rows // TILE), shared_mma_warps(size)
    columns = shared_mma_columns(tiles, outputs, gated, linear_programs(x_MK.device))
    _whole_linear[(tiles, -(-outputs // columns))](
        x_MK,
        weight_OK,
        bias_O if bias_O is not None else x_MK,
        norm.weight if norm is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        num_rows,
        norm.eps if norm is not None else 0.0,
        ROWS=TILE,
        COLUMNS=columns,
        **two_parts(size, 16 * warps),
        SIZE=size,
        OUTPUTS=outputs,
        HAS_BIAS=bias_O is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual_MO is not None,
        GATED=gated,
        HOLD=before_attention,
        **overlap(x_MK),
        SPLITS=warps,
        num_warps=warps,
    )
    return out


def two_parts(size: int, smallest: int) -> dict[str, int]:
    """Of a row: their sizes are powers of two. 576 = 512 + 64."""
    large = max(next_power_of_2(size + 1) // 2, smallest)
    return {"PART1": large, "PART2": max(next_power_of_2(size - large), smallest) if size > large else 0}


def shared_mma_warps(size: int) -> int:
    return 4 if size <= 1024 else 8


def shared_mma_columns(tiles: int, outputs: int, gated: bool, enough_programs: int) -> int:
    columns = 16 if gated else 32
    while columns > 8 and tiles * (outputs // columns) < enough_programs:
        columns //= 2
    return columns


@jit
def silu_times(gate, up, dtype: tl.constexpr):
    # Rounded between the two products, as the unfused network does.
    wide = gate.to(dtype).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


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
