"""The linear layer for one or two rows on weights in 8 or 4 bits (`kernels.quantization`), and such a weight written out.

All kernels multiply by the same weights: code * scale (+ offset), rounded to the activations' type.

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.shared_mma import silu_times
from fledge.kernels.linear.tiled import scaled, tiled_weights
from fledge.kernels.quantization import QuantizedWeight
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


def dequantize_triton(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    outputs, size = weight.scales.shape[0], weight.scales.shape[1] * weight.group_size
    out = torch.empty((outputs, size), dtype=dtype, device=weight.codes.device)
    step = max(256, weight.group_size)
    _dequantize[(-(-outputs // 16), -(-size // step))](
        weight.codes,
        weight.scales,
        weight.offsets if weight.offsets is not None else weight.scales,
        out,
        SIZE=size,
        OUTPUTS=outputs,
        BITS=weight.bits,
        GROUP=weight.group_size,
        HAS_OFFSETS=weight.offsets is not None,
        COLUMNS=16,
        STEP=step,
        num_warps=4,
    )
    return out


def quantized_gemv(
    x_MK: Tensor,
    weight: QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    before_attention: bool = False,
) -> Tensor:
    (num_rows, size), codes = x_MK.shape, weight.codes
    outputs = codes.shape[0] // (2 if gated else 1)
    assert x_MK.is_contiguous()
    assert codes.is_contiguous()
    assert weight.scales.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    columns = quantized_columns(outputs, gated, size, linear_programs(x_MK.device))
    _quantized_vector[(-(-outputs // columns),)](
        x_MK,
        codes,
        weight.scales,
        weight.offsets if weight.offsets is not None else weight.scales,
        bias_O if bias_O is not None else x_MK,
        norm.weight if norm is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        norm.eps if norm is not None else 0.0,
        ROWS=num_rows,
        COLUMNS=columns,
        GROUPS=next_power_of_2(size // weight.group_size),
        GROUP=weight.group_size,
        BITS=weight.bits,
        SIZE=size,
        OUTPUTS=outputs,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=bias_O is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual_MO is not None,
        GATED=gated,
        HOLD=before_attention,
        num_warps=4 if size <= 2048 else 8,
        **overlap(x_MK),
    )
    return out


def quantized_columns(outputs: int, gated: bool, size: int, enough_programs: int) -> int:
    """Outputs a program: as many as leave enough programs and fit the registers when turned into weights."""
    columns = 4 if gated else 8
    while columns > 1 and (outputs // columns < enough_programs or columns * size > 8192):
        columns //= 2
    return columns


@jit
def _read_codes(weight_ptr, scales_ptr, offsets_ptr, column, groups, byte, mask, group_mask, SIZE, GROUP, PACKED, HAS_OFFSETS):
    codes = tl.load(weight_ptr + column[:, None, None] * (SIZE // PACKED) + byte[None, :, :], mask=mask, other=0)
    places = column[:, None] * (SIZE // GROUP) + groups[None, :]
    scale = tl.load(scales_ptr + places, mask=group_mask, other=0.0).to(tl.float32)[:, :, None]
    offset = scale
    if HAS_OFFSETS:
        offset = tl.load(offsets_ptr + places, mask=group_mask, other=0.0).to(tl.float32)[:, :, None]
    return codes, scale, offset


@jit
def _products(codes, scale, offset, x_even, x_odd, BITS: tl.constexpr, HAS_OFFSETS: tl.constexpr, dtype: tl.constexpr):
    """Sums [COLUMNS] of weights times inputs; 4 bits: the even inputs' codes are the low nibbles."""
    if BITS == 8:
        products = scaled(codes, scale, offset, BITS, HAS_OFFSETS, dtype).to(tl.float32) * x_even[None, :, :]
    else:
        products = scaled(codes & 15, scale, offset, BITS, HAS_OFFSETS, dtype).to(tl.float32) * x_even[None, :, :]
        products += scaled(codes >> 4, scale, offset, BITS, HAS_OFFSETS, dtype).to(tl.float32) * x_odd[None, :, :]
    return tl.sum(tl.sum(products, axis=2), axis=1)


@jit
def _quantized_vector(
    x_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    HOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    if not HOLD:
        let_next_start(PDL)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < OUTPUTS
    PACKED: tl.constexpr = 8 // BITS  # codes a byte
    BYTES: tl.constexpr = GROUP // PACKED
    groups = tl.arange(0, GROUPS)
    byte = groups[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    k = byte * PACKED  # the input of a byte's first code
    k_inside = (groups < SIZE // GROUP)[:, None] & (k < SIZE)
    mask = inside[:, None, None] & k_inside[None, :, :]
    group_mask = inside[:, None] & (groups < SIZE // GROUP)[None, :]
    dtype = out_ptr.dtype.element_ty
    codes, scale, offset = _read_codes(
        weight_ptr, scales_ptr, offsets_ptr, column, groups, byte, mask, group_mask, SIZE, GROUP, PACKED, HAS_OFFSETS
    )
    if GATED:
        up_codes, up_scale, up_offset = _read_codes(
            weight_ptr,
            scales_ptr,
            offsets_ptr,
            OUTPUTS + column,
            groups,
            byte,
            mask,
            group_mask,
            SIZE,
            GROUP,
            PACKED,
            HAS_OFFSETS,
        )
    if HAS_NORM:
        norm_even = tl.load(norm_ptr + k, mask=k_inside, other=0.0).to(tl.float32)
        if BITS == 4:
            norm_odd = tl.load(norm_ptr + k + 1, mask=k_inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + OUTPUTS + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if HOLD:
        let_next_start(PDL)
    for row in tl.static_range(ROWS):
        x_even = tl.load(x_ptr + row * SIZE + k, mask=k_inside, other=0.0)
        x_odd = x_even
        if BITS == 4:
            x_odd = tl.load(x_ptr + row * SIZE + k + 1, mask=k_inside, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + row * OUTPUTS + column, mask=inside, other=0.0)
        x_even, x_odd = loaded(x_even).to(tl.float32), loaded(x_odd).to(tl.float32)
        if HAS_NORM:
            square = x_even * x_even
            if BITS == 4:
                square += x_odd * x_odd
            shrink = 1.0 / tl.sqrt(tl.sum(tl.sum(square, axis=1), axis=0) / SIZE + eps)
            x_even = (x_even * shrink * norm_even).to(dtype).to(tl.float32)
            if BITS == 4:
                x_odd = (x_odd * shrink * norm_odd).to(dtype).to(tl.float32)
        total = _products(codes, scale, offset, x_even, x_odd, BITS, HAS_OFFSETS, dtype)
        if HAS_BIAS:
            total += bias
        if GATED:
            up = _products(up_codes, up_scale, up_offset, x_even, x_odd, BITS, HAS_OFFSETS, dtype)
            if HAS_BIAS:
                up += up_bias
            total = silu_times(total, up, dtype)
        if HAS_RESIDUAL:
            total = residual.to(tl.float32) + total.to(dtype).to(tl.float32)
        tl.store(out_ptr + row * OUTPUTS + column, total.to(dtype), mask=inside)


@jit
def _dequantize(
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.program_id(1) * STEP
    k = start + tl.arange(0, STEP)
    inside = column < OUTPUTS
    dtype = out_ptr.dtype.element_ty
    w = tiled_weights(
        weight_ptr, scales_ptr, offsets_ptr, column, inside, start, SIZE, BITS, GROUP, HAS_OFFSETS, COLUMNS, STEP, dtype
    )
    tl.store(out_ptr + column[:, None] * SIZE + k[None, :], w, mask=inside[:, None] & (k < SIZE)[None, :])
