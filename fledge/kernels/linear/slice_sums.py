"""Finishes a linear after its products: adds the fp32 sums of slices in order and applies scale, bias, gate and residual."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.triton_support import jit, let_next_start, overlap, tl, wait_for_inputs

BLOCK = 512  # outputs per program


def finish(
    parts_SMO: Tensor,
    dtype: torch.dtype,
    bias_O: Tensor | None = None,
    *,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    scale_M: Tensor | None = None,
    pdl_barrier: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Adds the fp32 sums of slices in order and applies scale, bias, gate and residual."""
    slices, num_rows, lines = parts_SMO.shape
    outputs = lines // (2 if gated else 1)
    if out is None:
        out = torch.empty((num_rows, outputs), dtype=dtype, device=parts_SMO.device)
    _finish[(num_rows, -(-outputs // BLOCK))](
        parts_SMO,
        bias_O if bias_O is not None else out,
        residual_MO if residual_MO is not None else out,
        scale_M if scale_M is not None else parts_SMO,
        out,
        OUTPUTS=outputs,
        SLICES=slices,
        HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_MO is not None,
        HAS_SCALE=scale_M is not None,
        GATED=gated,
        PDL_BARRIER=pdl_barrier,
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
        **overlap(out),
    )
    return out


@jit
def silu_times(gate, up, dtype: tl.constexpr):
    # The SiLU is rounded before the product with `up`, as in the unfused network.
    wide = gate.to(dtype).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@jit
def in_order(total, BESIDE: tl.constexpr):
    """Sums over the first axis in order."""
    if BESIDE == 1:
        out = tl.reshape(total, (total.shape[1], total.shape[2]))
    elif BESIDE == 2:
        first, second = tl.split(tl.permute(total, (1, 2, 0)))
        out = first + second
    else:
        pairs = tl.reshape(tl.permute(total, (1, 2, 0)), (total.shape[1], total.shape[2], 2, 2))
        even, odd = tl.split(pairs)
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        out = ((first + second) + third) + fourth
    return out


@jit
def finished(
    total,
    bias_ptr,
    scale_ptr,
    row,
    column,
    mask,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_UP: tl.constexpr,
):
    """Applies scale and bias to a linear's sums. `IS_UP`: whether they are of the second half of a gated weight."""
    if HAS_SCALE:
        total = total * tl.load(scale_ptr + row, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + (OUTPUTS if IS_UP else 0) + column, mask=mask, other=0.0).to(tl.float32)
    return total


@jit
def _finish(
    parts_ptr,
    bias_ptr,
    residual_ptr,
    scale_ptr,
    out_ptr,
    OUTPUTS: tl.constexpr,
    SLICES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    GATED: tl.constexpr,
    PDL_BARRIER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if not PDL_BARRIER:
        let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < OUTPUTS
    dtype = out_ptr.dtype.element_ty
    WEIGHT_ROWS: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    wait_for_inputs(PDL)
    if PDL_BARRIER:
        let_next_start(PDL)
    part = parts_ptr + row * WEIGHT_ROWS + column
    stride = tl.num_programs(0).to(tl.int64) * WEIGHT_ROWS
    total = tl.load(part, mask=inside, other=0.0)
    for i in tl.static_range(1, SLICES):
        total += tl.load(part + i * stride, mask=inside, other=0.0)
    total = finished(total, bias_ptr, scale_ptr, row + 0 * column, column, inside, OUTPUTS, HAS_BIAS, HAS_SCALE, False)
    if GATED:
        up = tl.load(part + OUTPUTS, mask=inside, other=0.0)
        for i in tl.static_range(1, SLICES):
            up += tl.load(part + OUTPUTS + i * stride, mask=inside, other=0.0)
        up = finished(up, bias_ptr, scale_ptr, row + 0 * column, column, inside, OUTPUTS, HAS_BIAS, HAS_SCALE, True)
        total = silu_times(total, up, dtype)
    place = row * OUTPUTS + column
    if HAS_RESIDUAL:
        total = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32) + total.to(dtype).to(tl.float32)
    tl.store(out_ptr + place, total.to(dtype), mask=inside)
