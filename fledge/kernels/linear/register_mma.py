"""The linear layer for few rows and a narrow weight, on tensor cores that are fed straight from memory.

Triton's own products take their operands through shared memory; for few rows that detour costs more than the product. Here
(in Gluon, Triton's language with explicit layouts) each thread loads from memory just what its part of the product needs: four
neighbouring inputs at a time, of weights and of rows alike, so that four threads hold the 16 inputs of a group of `summation`.
Each of four warps has a slice of 16 outputs, which it loads while the kernel before this one still runs. The slices' sums meet
in shared memory, behind the kernel's only barrier.

Weights in 8 or 4 bits and FP8 (`kernels.quantization`) go the same way: see `register_codes.py`.

The norm's scale is applied to the sums, so that the product does not wait for it: what is rounded is input
times norm weight, where the unfused network rounds the same times the scale.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fledge.kernels.gluon_support import gl, jit, mma_v2
from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.register_codes import read_codes, weights_of
from fledge.kernels.linear.summation import CHUNK, Summation
from fledge.kernels.linear.tiles import weight_parts
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import overlap

NORM_ROWS = 8  # of a program of `norm_parts`


SLICES, COLUMNS = 4, 16  # of a program


def program_rows(num_rows: int) -> int:
    """8 where a second reading of the weight costs less than more work a program: up to 16 rows."""
    return 8 if num_rows <= 16 else 16


@lru_cache
def layouts(rows: int, gated: bool, wide: bool = False) -> dict[str, Any]:
    """How loaded weights [slices, products, 64] and rows [slices, 64, rows] are spread over threads.

    Four threads (lanes 1, 2) share 16 inputs; a thread has four of them, of each of the chunk's four groups. `wide`: of weights
    it loads eight neighbours, half as often, and then exchanges half of them with another thread.
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
    weight_OK: Tensor | QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    before_attention: bool = False,
    rows: int | None = None,
    wide: bool = False,
) -> Tensor:
    """As `dispatch.linear`, where `order.scales_sums`. `rows`: of a program. `wide`: see `layouts`; of plain weights alone."""
    num_rows, size = x_MK.shape
    assert x_MK.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    assert order.scales_sums
    assert order.slices == SLICES
    codes, scales, offsets, bits, group = weight_parts(weight_OK)
    assert codes.is_contiguous()
    outputs = codes.shape[0] // (2 if gated else 1)
    rows = rows or program_rows(num_rows)
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    _register_mma[(-(-num_rows // rows), -(-outputs // COLUMNS))](
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
        ROWS=rows,
        COLUMNS=COLUMNS,
        SLICES=SLICES,
        CHUNKS=order.slice_inputs // CHUNK,
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
        **layouts(rows, gated, wide and bits == 16),
        num_warps=SLICES,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    return out


def norm_parts(x_MK: Tensor, norm: NormLike, order: Summation) -> tuple[Tensor, Tensor]:
    """Input times norm weight, rounded, and the scale of each row's sums, with the bits that `register_mma` has."""
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
        ROWS=NORM_ROWS,
        SLICES=SLICES,
        CHUNKS=order.slice_inputs // CHUNK,
        SIZE=size,
        X_LAYOUT=layouts(NORM_ROWS, False)["X_LAYOUT"],
        num_warps=SLICES,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    return product, scale


@jit
def _let_next_start():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def _wait_for_inputs():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def _times(x, y):
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2)


@jit
def _place(piece, number, inside, SLICE: gl.constexpr, STEP: gl.constexpr):
    """Of an input: which slice, which step of it, where in the step."""
    if SLICE % STEP == 0:
        place = (piece * (SLICE // STEP) + number) * STEP + inside  # compiles to fewer instructions
    else:
        place = piece * SLICE + number * STEP + inside
    return place


@jit
def _load_rows(
    x_ptr,
    first_row,
    num_rows,
    number,
    SLICES: gl.constexpr,
    SLICE: gl.constexpr,
    STEP: gl.constexpr,
    STEPS: gl.constexpr,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    layout: gl.constexpr,
):
    """A step's inputs of each slice [SLICES, STEP, ROWS]. Where an element is a pair of inputs, sizes count pairs."""
    piece = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    place = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    k = _place(piece, number, place, SLICE, STEP)
    mask = (row < num_rows) & (k < SIZE) & (number < STEPS)
    if SLICE % STEP:
        mask = mask & (number * STEP + place < SLICE)
    return gl.load(x_ptr + row * SIZE + k, mask=mask, other=0.0)


@jit
def _load_norm(norm_ptr, chunk, SLICES: gl.constexpr, CHUNKS: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """[SLICES, 64, 1]"""
    piece = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    k = (piece * CHUNKS + chunk) * 64 + place
    return gl.load(norm_ptr + k, mask=(k < SIZE), other=0.0)


@jit
def _load_weights(
    weight_ptr,
    first_column,
    chunk,
    SLICES: gl.constexpr,
    CHUNKS: gl.constexpr,
    SIZE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    PRODUCTS: gl.constexpr,
    layout: gl.constexpr,
):
    """A chunk [SLICES, PRODUCTS, 64] of each slice."""
    piece = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    product = gl.arange(0, PRODUCTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    column = first_column + product % COLUMNS
    line = (column + product // COLUMNS * OUTPUTS).to(gl.int64) * SIZE
    k = (piece * CHUNKS + chunk) * 64 + place
    return gl.load(weight_ptr + line + k, mask=(column < OUTPUTS) & (k < SIZE), other=0.0)


@jit
def _grouped_left(w, left: gl.constexpr):
    """Loaded weights as the first operand of a product whose steps are the groups of 16 neighbouring inputs.

    The tensor cores' operands have the inputs of two steps interleaved. Each thread keeps what it has: nothing moves.
    """
    A: gl.constexpr = w.shape[0]
    B: gl.constexpr = w.shape[1]
    w = gl.permute(gl.reshape(w, [A, B, 2, 2, 4, 2, 2]), (0, 1, 2, 5, 4, 3, 6))
    return gl.convert_layout(gl.reshape(w, [A, B, 64]), left)


@jit
def _grouped_right(x, right: gl.constexpr):
    """Loaded rows as the second operand; see `_grouped_left`."""
    A: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[2]
    x = gl.permute(gl.reshape(x, [A, 2, 2, 4, 2, 2, R]), (0, 1, 4, 3, 2, 5, 6))
    return gl.convert_layout(gl.reshape(x, [A, 64, R]), right)


@jit
def _squares(square, x):
    """Adds an input's squares to [SLICES, 64, ROWS] sums. One function for all kernels: the order of this sum counts."""
    wide = x.to(gl.float32)
    return gl.fma(wide, wide, square)


@jit
def _row_scales(square, eps, SLICES: gl.constexpr, SIZE: gl.constexpr, rows: gl.constexpr):
    """The norm's scale by row, from `_squares` of all chunks; slices are added in order."""
    ROWS: gl.constexpr = square.shape[2]
    shares = gl.allocate_shared_memory(gl.float32, [SLICES * ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    shares.store(gl.reshape(gl.sum(square, axis=1), [SLICES * ROWS]))
    total = shares.slice(0, ROWS).load(rows)
    for i in gl.static_range(1, SLICES):
        total = total + shares.slice(i * ROWS, ROWS).load(rows)
    return norm_scale(total, eps, SIZE)


@jit
def norm_scale(square, eps, SIZE: gl.constexpr):
    return 1.0 / gl.sqrt(square / SIZE + eps)


@jit
def silu_times(gate, up, dtype: gl.constexpr):
    # Rounded between the two products, as the unfused network does.
    gate = gate.to(dtype).to(gl.float32)
    return (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)


@jit
def _register_mma(
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
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SLICES: gl.constexpr,
    CHUNKS: gl.constexpr,
    SIZE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_OFFSETS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    HOLD: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
):
    # Both halves of a gated weight are outputs of one product.
    PRODUCTS: gl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=4)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if PDL and not HOLD:
        _let_next_start()

    first_row, first_column = gl.program_id(0) * ROWS, gl.program_id(1) * COLUMNS
    ws = ()
    for i in gl.static_range(CHUNKS):
        if BITS == 16:
            ahead = _load_weights(weight_ptr, first_column, i, SLICES, CHUNKS, SIZE, OUTPUTS, COLUMNS, PRODUCTS, W_LAYOUT)
        else:
            ahead = read_codes(
                weight_ptr,
                scales_ptr,
                offsets_ptr,
                first_column,
                i,
                SLICES,
                CHUNKS,
                SIZE,
                OUTPUTS,
                COLUMNS,
                PRODUCTS,
                BITS,
                GROUP,
                HAS_OFFSETS,
                W_LAYOUT,
            )
        ws = ws + (ahead,)  # noqa: RUF005
    norms = ()
    if HAS_NORM:
        for i in gl.static_range(CHUNKS):
            norms = norms + (_load_norm(norm_ptr, i, SLICES, CHUNKS, SIZE, X_LAYOUT),)  # noqa: RUF005
    if PDL:
        _wait_for_inputs()
        if HOLD:
            _let_next_start()
    xs = ()
    for i in gl.static_range(CHUNKS):
        xs = xs + (_load_rows(x_ptr, first_row, num_rows, i, SLICES, CHUNKS * 64, 64, CHUNKS, SIZE, ROWS, X_LAYOUT),)  # noqa: RUF005

    total = gl.zeros([SLICES, PRODUCTS, ROWS], gl.float32, layout=mma)
    answer: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, SLICES], [0, 1])
    column, place, inside = _output_places(first_row, first_column, num_rows, ROWS, COLUMNS, OUTPUTS, answer)
    residual = gl.zeros([COLUMNS, ROWS], dtype, layout=answer)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + place, mask=inside, other=0.0)

    square = gl.zeros([SLICES, 64, ROWS], gl.float32, layout=X_LAYOUT)
    for i in gl.static_range(CHUNKS):
        x = xs[i]
        if HAS_NORM:
            square = _squares(square, x)
            x = _times(x, norms[i])
        if BITS == 16:
            w = ws[i]
        else:
            w = weights_of(ws[i], SLICES, PRODUCTS, BITS, HAS_OFFSETS, W_LAYOUT, x_ptr.dtype.element_ty)
        total = mma_v2(_grouped_left(w, left), _grouped_right(x, right), total)
    scale = gl.full([1, ROWS], 1.0, gl.float32, layout=answer)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    shares = gl.allocate_shared_memory(gl.float32, [SLICES * PRODUCTS, ROWS], flat)
    shares.store(gl.reshape(total, [SLICES * PRODUCTS, ROWS]))
    if HAS_NORM:
        scale = _row_scales(square, eps, SLICES, SIZE, gl.SliceLayout(0, answer))[None, :]
    out = _finished_sums(
        shares, scale, bias_ptr, column, SLICES, COLUMNS, PRODUCTS, OUTPUTS, HAS_NORM, HAS_BIAS, GATED, dtype, answer
    )
    if HAS_RESIDUAL:
        out = residual.to(gl.float32) + out.to(dtype).to(gl.float32)
    gl.store(out_ptr + place, out.to(dtype), mask=inside)


@jit
def _output_places(
    first_row,
    first_column,
    num_rows,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    layout: gl.constexpr,
):
    """Of a program's results [COLUMNS, ROWS]: their columns, places in memory, and which of them are there."""
    column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, layout))[:, None]
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    inside = (row < num_rows) & (column < OUTPUTS)
    return column, row * OUTPUTS + column, inside


@jit
def _finished_sums(
    shares,
    scale,
    bias_ptr,
    column,
    SLICES: gl.constexpr,
    COLUMNS: gl.constexpr,
    PRODUCTS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    dtype: gl.constexpr,
    layout: gl.constexpr,
):
    """[COLUMNS, ROWS] from the slices' sums in shared memory, with the norm's scale, bias and gate."""
    out = _sum_of_slices(shares, 0, SLICES, COLUMNS, PRODUCTS, layout)
    if HAS_NORM:
        out = out * scale
    if HAS_BIAS:
        out += gl.load(bias_ptr + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
    if GATED:
        up = _sum_of_slices(shares, COLUMNS, SLICES, COLUMNS, PRODUCTS, layout)
        if HAS_NORM:
            up = up * scale
        if HAS_BIAS:
            up += gl.load(bias_ptr + OUTPUTS + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
        out = silu_times(out, up, dtype)
    return out


@jit
def _sum_of_slices(shares, first, SLICES: gl.constexpr, COLUMNS: gl.constexpr, PRODUCTS: gl.constexpr, layout: gl.constexpr):
    """Adds the slices' sums of COLUMNS outputs, from `first` on, one after the other."""
    total = shares.slice(first, COLUMNS).load(layout)
    for i in gl.static_range(1, SLICES):
        total = total + shares.slice(i * PRODUCTS + first, COLUMNS).load(layout)
    return total


@jit
def _norm_parts(
    x_ptr,
    norm_ptr,
    product_ptr,
    scale_ptr,
    num_rows,
    eps,
    ROWS: gl.constexpr,
    SLICES: gl.constexpr,
    CHUNKS: gl.constexpr,
    SIZE: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
):
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [SLICES], [0])
    if PDL:
        _let_next_start()
        _wait_for_inputs()
    first_row = gl.program_id(0) * ROWS
    square = gl.zeros([SLICES, 64, ROWS], gl.float32, layout=X_LAYOUT)
    piece = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, X_LAYOUT)))[:, None, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, X_LAYOUT)))[None, :, None]
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, X_LAYOUT)))[None, None, :]
    for i in gl.static_range(CHUNKS):
        x = _load_rows(x_ptr, first_row, num_rows, i, SLICES, CHUNKS * 64, 64, CHUNKS, SIZE, ROWS, X_LAYOUT)
        square = _squares(square, x)
        product = _times(x, _load_norm(norm_ptr, i, SLICES, CHUNKS, SIZE, X_LAYOUT))
        k = (piece * CHUNKS + i) * 64 + place
        gl.store(product_ptr + row * SIZE + k, product, mask=(row < num_rows) & (k < SIZE))
    scale = _row_scales(square, eps, SLICES, SIZE, flat)
    rows = first_row + gl.arange(0, ROWS, layout=flat)
    gl.store(scale_ptr + rows, scale, mask=rows < num_rows)
