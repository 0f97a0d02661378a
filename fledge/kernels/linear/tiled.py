"""A linear layer for any number of rows, whose rows do not depend on their number: for `--deterministic`, and for weights that
are quantised.

    out = [residual +] [swiglu] ( [norm] x · weightᵀ + bias )

A program takes a tile of rows and outputs and goes through the inputs from the first to the last, with the same instruction
(mma.m16n8k16 on tensor cores, fused multiply-adds in fp32) and one sum an output, never split. So the tile's shape, which
follows the number of rows, changes nothing in any row's result. Hopper's own instruction takes 64 rows at least: tiles have
fewer, so that the compiler does not choose it for some of them.

A quantised weight (`kernels.quantization`) is turned into the activations' type on its way, group by group.

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.shared_mma import silu_times
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import jit, let_next_start, overlap, tl, wait_for_inputs


class Tile(NamedTuple):
    rows: int
    outputs: int
    inputs: int  # a step
    warps: int
    stages: int


# The first two must give the same bits. The third has more of a weight under way at once, for where nothing depends on it.
FEW, MANY, QUICK = Tile(16, 16, 64, 2, 5), Tile(32, 128, 64, 4, 3), Tile(16, 16, 256, 2, 4)
FEW_ROWS = 64  # up to which the small tiles are used


def tiled_linear(
    x_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    tile: Tile | None = None,
    before_attention: bool = False,
) -> Tensor:
    """`norm`: each program works it out anew, so it pays for few rows; its sum depends on the tile."""
    codes, scales, offsets, bits, group = parts_of(weight)
    num_rows, size = x_MK.shape
    outputs = codes.shape[0] // (2 if gated else 1)
    assert x_MK.is_contiguous()
    assert codes.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    if not num_rows:
        return out
    tile = tile or (FEW if num_rows <= FEW_ROWS else MANY)
    assert bits == 16 or (tile.inputs % group == 0 and size % group == 0), "a step reads whole groups"
    columns = max(tile.outputs // 2, 16) if gated else tile.outputs
    _tiled_linear[(-(-num_rows // tile.rows), -(-outputs // columns))](
        x_MK,
        codes,
        scales if scales is not None else x_MK,
        offsets if offsets is not None else x_MK,
        bias_O if bias_O is not None else x_MK,
        norm.weight if norm is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        num_rows,
        norm.eps if norm is not None else 0.0,
        SIZE=size,
        OUTPUTS=outputs,
        BITS=bits,
        GROUP=group,
        HAS_OFFSETS=offsets is not None,
        HAS_BIAS=bias_O is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual_MO is not None,
        GATED=gated,
        HOLD=before_attention,
        ROWS=tile.rows,
        COLUMNS=columns,
        STEP=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(x_MK),
    )
    return out


def parts_of(weight: Tensor | QuantizedWeight) -> tuple[Tensor, Tensor | None, Tensor | None, int, int]:
    """Codes, scales, offsets, bits, group size. A plain weight is its own codes, of 16 bits."""
    if isinstance(weight, QuantizedWeight):
        return weight.codes, weight.scales, weight.offsets, weight.bits, weight.group_size
    return weight, None, None, 16, 1


@jit
def scaled(codes, scale, offset, BITS: tl.constexpr, HAS_OFFSETS: tl.constexpr, dtype: tl.constexpr):
    """Whole numbers as weights, rounded to the activations' type: every kernel multiplies by the same."""
    value = codes.to(tl.float32)
    if BITS == 4 and not HAS_OFFSETS:
        value -= 8.0
    value *= scale  # exact: at most 8 bits times 11
    if HAS_OFFSETS:
        value += offset
    return value.to(dtype)


@jit
def tiled_weights(
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    column,
    inside,
    start,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    dtype: tl.constexpr,
):
    """[COLUMNS, STEP] of a weight, from input `start` on."""
    if BITS == 16:
        k = start + tl.arange(0, STEP)
        mask = inside[:, None] & (k < SIZE)[None, :]
        w = tl.load(weight_ptr + column[:, None] * SIZE + k[None, :], mask=mask, other=0.0).to(dtype)
    else:
        PACKED: tl.constexpr = 8 // BITS  # codes a byte
        group = tl.arange(0, STEP // GROUP)
        groups = start // GROUP + group
        byte = start // PACKED + (group * (GROUP // PACKED))[:, None] + tl.arange(0, GROUP // PACKED)[None, :]
        group_inside = inside[:, None] & (groups < SIZE // GROUP)[None, :]
        mask = inside[:, None, None] & (byte < SIZE // PACKED)[None, :, :]
        codes = tl.load(weight_ptr + column[:, None, None] * (SIZE // PACKED) + byte[None, :, :], mask=mask, other=0)
        places = column[:, None] * (SIZE // GROUP) + groups[None, :]
        scale = tl.load(scales_ptr + places, mask=group_inside, other=0.0).to(tl.float32)[:, :, None]
        offset = scale
        if HAS_OFFSETS:
            offset = tl.load(offsets_ptr + places, mask=group_inside, other=0.0).to(tl.float32)[:, :, None]
        if BITS == 8:
            w = scaled(codes, scale, offset, BITS, HAS_OFFSETS, dtype)
        else:
            even = scaled(codes & 15, scale, offset, BITS, HAS_OFFSETS, dtype)
            odd = scaled(codes >> 4, scale, offset, BITS, HAS_OFFSETS, dtype)
            w = tl.join(even, odd)
        w = tl.reshape(w, (COLUMNS, STEP))
    return w


@jit
def _tiled_linear(
    x_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    HOLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    if not HOLD:
        let_next_start(PDL)
    # Programs of the same columns start together: the later ones find the weight in the cache of the device.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, inside = row < num_rows, column < OUTPUTS
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = total
    wait_for_inputs(PDL)
    if HOLD:
        let_next_start(PDL)
    if HAS_NORM:
        squares = tl.zeros([ROWS, STEP], tl.float32)
        for start in range(0, SIZE, STEP):
            k = start + tl.arange(0, STEP)
            mask = row_inside[:, None] & (k < SIZE)[None, :]
            x = tl.load(x_ptr + row[:, None] * SIZE + k[None, :], mask=mask, other=0.0).to(tl.float32)
            squares += x * x
        scale = (1.0 / tl.sqrt(tl.sum(squares, axis=1) / SIZE + eps))[:, None]
    for start in range(0, SIZE, STEP):
        k = start + tl.arange(0, STEP)
        x = tl.load(x_ptr + row[:, None] * SIZE + k[None, :], mask=row_inside[:, None] & (k < SIZE)[None, :], other=0.0)
        if HAS_NORM:
            norm = tl.load(norm_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * scale * norm[None, :]).to(dtype)
        w = tiled_weights(
            weight_ptr, scales_ptr, offsets_ptr, column, inside, start, SIZE, BITS, GROUP, HAS_OFFSETS, COLUMNS, STEP, dtype
        )
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
        if GATED:
            w_up = tiled_weights(
                weight_ptr,
                scales_ptr,
                offsets_ptr,
                OUTPUTS + column,
                inside,
                start,
                SIZE,
                BITS,
                GROUP,
                HAS_OFFSETS,
                COLUMNS,
                STEP,
                dtype,
            )
            up = tl.dot(x, tl.trans(w_up), up, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + OUTPUTS + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = silu_times(total, up, dtype)
    place = row[:, None] * OUTPUTS + column[None, :]
    mask = row_inside[:, None] & inside[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + place, mask=mask, other=0.0)
        total = residual.to(tl.float32) + total.to(dtype).to(tl.float32)
    tl.store(out_ptr + place, total.to(dtype), mask=mask)
