"""Finishes a tile of rows x outputs after its products (`tma_tiles`): applies scale, bias, gate and residual, and stores it."""

from __future__ import annotations

from fledge.kernels.gluon_support import gl, jit
from fledge.kernels.linear.mma_fragments import silu_times


@jit
def places(
    first_row,
    first_column,
    num_rows,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    LINES: gl.constexpr,
    layout: gl.constexpr,
):
    """Returns a tile's offsets in memory [ROWS, LINES] and mask. Lines from COLUMNS on are a gated weight's second half."""
    WIDTH: gl.constexpr = OUTPUTS * (LINES // COLUMNS)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    line = gl.arange(0, LINES, layout=gl.SliceLayout(0, layout))
    column = first_column + line % COLUMNS
    inside = (row < num_rows)[:, None] & (column < OUTPUTS)[None, :]
    return row.to(gl.int64)[:, None] * WIDTH + (column + line // COLUMNS * OUTPUTS)[None, :], inside


@jit
def load_residual(
    residual_ptr,
    first_row,
    first_column,
    num_rows,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STORED: gl.constexpr,
):
    place, inside = places(first_row, first_column, num_rows, OUTPUTS, ROWS, COLUMNS, COLUMNS, STORED)
    return gl.load(residual_ptr + place, mask=inside, other=0.0)


@jit
def store_finished(
    total,
    residual,
    first_column,
    bias_ptr,
    scale_ptr,
    out_ptr,
    first_row,
    num_rows,
    OUTPUTS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    GATED: gl.constexpr,
    SUMS: gl.constexpr,
    STORED: gl.constexpr,
):
    """Applies scale, bias, gate and residual to a tile's sums [ROWS, LINES] and stores it. `residual`: from `load_residual`."""
    ROWS: gl.constexpr = total.shape[0]
    LINES: gl.constexpr = total.shape[1]
    COLUMNS: gl.constexpr = LINES // 2 if GATED else LINES
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if HAS_SCALE:
        row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        total *= gl.load(scale_ptr + row, mask=row < num_rows, other=0.0)[:, None]
    if HAS_BIAS:
        line = gl.arange(0, LINES, layout=gl.SliceLayout(0, SUMS))
        column = first_column + line % COLUMNS
        bias = gl.load(bias_ptr + column + line // COLUMNS * OUTPUTS, mask=column < OUTPUTS, other=0.0)
        total += bias.to(gl.float32)[None, :]
    if GATED:
        total, up = gl.split(gl.permute(gl.reshape(total, [ROWS, 2, COLUMNS]), (0, 2, 1)))
        total = silu_times(total, up, dtype)
    # Rounded, then moved between threads so that each stores 16 neighbouring bytes.
    out = gl.convert_layout(total.to(dtype), STORED)
    place, inside = places(first_row, first_column, num_rows, OUTPUTS, ROWS, COLUMNS, COLUMNS, STORED)
    if HAS_RESIDUAL:
        out = (residual.to(gl.float32) + out.to(gl.float32)).to(dtype)
    gl.store(out_ptr + place, out, mask=inside)
