"""The linear layer for few rows and a narrow weight: tensor-core operands are loaded from memory straight into registers.

Triton's own products take their operands through shared memory; for few rows that detour costs more than the product. Here
(in Gluon, Triton's language with explicit layouts) each thread loads from memory exactly what its part of the product needs:
four neighbouring inputs at a time, of weights and of rows alike, so that four threads hold the 16 inputs of a group of
`summation`. Each of four warps has one slice of 16 outputs and loads its weights while the previous kernel still runs. The
slices' sums are added through shared memory, after the kernel's only barrier.

The norm's scale is applied to the sums, so that the product does not wait for it. So input * norm weight is rounded, where
the unfused network rounds input * norm weight * scale.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fledge.kernels.gluon_support import gl, jit, mma_v2
from fledge.kernels.linear.mma_fragments import (
    Shape,
    add_squares,
    finished_sums,
    grouped_left,
    grouped_right,
    let_next_start,
    load_norm,
    load_rows,
    load_weights,
    output_places,
    row_scales,
    times,
    wait_for_inputs,
)
from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.summation import CHUNK, Summation
from fledge.kernels.triton_support import overlap

NORM_ROWS = 8  # rows per program of `norm_parts`


SLICES, COLUMNS = 4, 16  # slices and outputs per program


def program_rows(num_rows: int) -> int:
    """Rows per program: 8 for up to 16 rows, where reading the weight twice costs less than more work per program, else 16."""
    return 8 if num_rows <= 16 else 16


@lru_cache
def layouts(rows: int, gated: bool, wide: bool = False) -> dict[str, Any]:
    """Returns the layouts that distribute loaded weights [slices, products, 64] and rows [slices, 64, rows] over threads.

    Four threads (lane bits 1 and 2) share 16 inputs; a thread has four of them in each of the chunk's four groups. `wide`: it
    loads eight neighbouring weights at a time, half as often, and then exchanges half of them with another thread.
    """
    own, others = ((4, 32), (8, 16)) if wide else ((16, 32), (4, 8))
    more_columns = [[0, COLUMNS, 0]] if gated else []
    weight = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], *([0, 0, bit] for bit in own), [0, 8, 0], *more_columns],
        lane_bases=[*([0, 0, bit] for bit in others), [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[SLICES, COLUMNS * (2 if gated else 1), 64],
    )
    x = gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0], [0, 16, 0], [0, 32, 0], *([[0, 0, 8]] if rows == 16 else [])],
        lane_bases=[[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[SLICES, 64, rows],
    )
    return {"W_LAYOUT": weight, "X_LAYOUT": x}


def register_mma(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    pdl_barrier: bool = False,
    rows: int | None = None,
    wide: bool = False,
) -> Tensor:
    """Computes `dispatch.linear` where `order.scales_sums`. `rows`: rows per program. `wide`: see `layouts`."""
    num_rows, size = x_MK.shape
    assert x_MK.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    assert order.scales_sums
    assert order.slices == SLICES
    assert weight_OK.is_contiguous()
    outputs = len(weight_OK) // (2 if gated else 1)
    rows = rows or program_rows(num_rows)
    shape = Shape(rows, COLUMNS, gated, SLICES, order.slice_inputs, CHUNK, size, outputs)
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    _register_mma[(-(-num_rows // rows), -(-outputs // COLUMNS))](
        x_MK,
        weight_OK,
        bias_O if bias_O is not None else x_MK,
        norm.weight if norm is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        num_rows,
        norm.eps if norm is not None else 0.0,
        SHAPE=shape,
        HAS_BIAS=bias_O is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual_MO is not None,
        PDL_BARRIER=pdl_barrier,
        **layouts(rows, gated, wide),
        num_warps=SLICES,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    return out


def norm_parts(x_MK: Tensor, norm: NormLike, order: Summation) -> tuple[Tensor, Tensor]:
    """Returns input * norm weight, rounded, and the scale of each row's sums, with the same bits as in `register_mma`."""
    num_rows, size = x_MK.shape
    product = torch.empty_like(x_MK)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x_MK.device)
    _norm_parts[(-(-num_rows // NORM_ROWS),)](
        x_MK,
        norm.weight,
        product,
        scale,
        num_rows,
        norm.eps,
        SHAPE=Shape(NORM_ROWS, COLUMNS, False, SLICES, order.slice_inputs, CHUNK, size, size),
        X_LAYOUT=layouts(NORM_ROWS, False)["X_LAYOUT"],
        num_warps=SLICES,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    return product, scale


@jit
def _register_mma(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    SHAPE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    PDL_BARRIER: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
):
    SLICES: gl.constexpr = SHAPE.slices
    CHUNKS: gl.constexpr = SHAPE.steps
    PRODUCTS: gl.constexpr = SHAPE.products
    COLUMNS: gl.constexpr = SHAPE.columns
    ROWS: gl.constexpr = SHAPE.rows
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=4)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if PDL and not PDL_BARRIER:
        let_next_start()

    first_row, first_column = gl.program_id(0) * ROWS, gl.program_id(1) * COLUMNS
    ws = ()
    for i in gl.static_range(CHUNKS):
        ws = ws + (load_weights(weight_ptr, first_column, i, SHAPE, W_LAYOUT),)  # noqa: RUF005
    norms = ()
    if HAS_NORM:
        for i in gl.static_range(CHUNKS):
            norms = norms + (load_norm(norm_ptr, i, SHAPE, X_LAYOUT),)  # noqa: RUF005
    if PDL:
        wait_for_inputs()
        if PDL_BARRIER:
            let_next_start()
    xs = ()
    for i in gl.static_range(CHUNKS):
        xs = xs + (load_rows(x_ptr, first_row, num_rows, i, SHAPE, X_LAYOUT),)  # noqa: RUF005

    total = gl.zeros([SLICES, PRODUCTS, ROWS], gl.float32, layout=mma)
    answer: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, SLICES], [0, 1])
    column, place, inside = output_places(first_row, first_column, num_rows, SHAPE, answer)
    residual = gl.zeros([COLUMNS, ROWS], dtype, layout=answer)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + place, mask=inside, other=0.0)

    square = gl.zeros([SLICES, 64, ROWS], gl.float32, layout=X_LAYOUT)
    for i in gl.static_range(CHUNKS):
        x = xs[i]
        if HAS_NORM:
            square = add_squares(square, x)
            x = times(x, norms[i])
        total = mma_v2(grouped_left(ws[i], left), grouped_right(x, right), total)
    scale = gl.full([1, ROWS], 1.0, gl.float32, layout=answer)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    shares = gl.allocate_shared_memory(gl.float32, [SLICES * PRODUCTS, ROWS], flat)
    shares.store(gl.reshape(total, [SLICES * PRODUCTS, ROWS]))
    if HAS_NORM:
        scale = row_scales(square, eps, SHAPE, gl.SliceLayout(0, answer))[None, :]
    out = finished_sums(shares, scale, bias_ptr, column, SHAPE, HAS_NORM, HAS_BIAS, dtype, answer)
    if HAS_RESIDUAL:
        out = residual.to(gl.float32) + out.to(dtype).to(gl.float32)
    gl.store(out_ptr + place, out.to(dtype), mask=inside)


@jit
def _norm_parts(
    x_ptr,
    norm_ptr,
    product_ptr,
    scale_ptr,
    num_rows,
    eps,
    SHAPE: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
):
    SLICES: gl.constexpr = SHAPE.slices
    CHUNKS: gl.constexpr = SHAPE.steps
    ROWS: gl.constexpr = SHAPE.rows
    SIZE: gl.constexpr = SHAPE.size
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [SLICES], [0])
    if PDL:
        let_next_start()
        wait_for_inputs()
    first_row = gl.program_id(0) * ROWS
    square = gl.zeros([SLICES, 64, ROWS], gl.float32, layout=X_LAYOUT)
    piece = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, X_LAYOUT)))[:, None, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, X_LAYOUT)))[None, :, None]
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, X_LAYOUT)))[None, None, :]
    for i in gl.static_range(CHUNKS):
        x = load_rows(x_ptr, first_row, num_rows, i, SHAPE, X_LAYOUT)
        square = add_squares(square, x)
        product = times(x, load_norm(norm_ptr, i, SHAPE, X_LAYOUT))
        k = (piece * CHUNKS + i) * 64 + place
        gl.store(product_ptr + row * SIZE + k, product, mask=(row < num_rows) & (k < SIZE))
    scale = row_scales(square, eps, SHAPE, flat)
    rows = first_row + gl.arange(0, ROWS, layout=flat)
    gl.store(scale_ptr + rows, scale, mask=rows < num_rows)
