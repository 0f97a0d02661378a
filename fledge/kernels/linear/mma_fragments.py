"""Shared parts of the Gluon linears: loading tensor-core fragments, finishing sums, and programmatic dependent launch."""

from __future__ import annotations

from typing import NamedTuple

from fledge.kernels.gluon_support import gl, jit


class Shape(NamedTuple):
    """The shape of a program and of the weight that it multiplies by. A compile-time constant of the kernel."""

    rows: int  # per program
    columns: int  # outputs per program; of each half of a gated weight
    gated: bool
    slices: int
    slice_inputs: int
    step: int  # inputs of each slice that are multiplied at once
    size: int  # inputs of the weight
    outputs: int  # of the weight; of each half of a gated one
    bits: int = 16
    group: int = 1  # inputs that share a scale
    part: int = 1  # inputs whose products are summed before the sum is scaled
    has_offsets: bool = False

    @property
    def products(self) -> int:
        """Outputs of one product; those of both halves of a gated weight."""
        return 2 * self.columns if self.gated else self.columns

    @property
    def steps(self) -> int:
        """Steps per slice; a slice is a whole number of steps."""
        return self.slice_inputs // self.step

    @property
    def scales_slices(self) -> bool:
        """Whether all inputs share a scale, which is applied to the sum of a slice."""
        return self.part == self.slice_inputs

    @property
    def parts(self) -> int:
        """Parts per step, each with a sum that is scaled separately."""
        return 1 if self.scales_slices else self.step // self.part

    @property
    def is_whole(self) -> bool:
        """Whether all slices and all programs are full, so that loads need no masks."""
        return self.slices * self.slice_inputs == self.size and self.outputs % self.columns == 0


@jit
def let_next_start():
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def wait_for_inputs():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def times(x, y):
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=2)


@jit
def load_rows(x_ptr, first_row, num_rows, number, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Loads a step's inputs of each slice: [slices, step, rows]."""
    STEP: gl.constexpr = SHAPE.step
    SIZE: gl.constexpr = SHAPE.size
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    place = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    row = first_row + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    k = (piece * SHAPE.steps + number) * STEP + place
    return gl.load(x_ptr + row * SIZE + k, mask=(row < num_rows) & (k < SIZE) & (number < SHAPE.steps), other=0.0)


@jit
def load_norm(norm_ptr, chunk, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Loads a chunk of each slice's norm weight: [slices, 64, 1]."""
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    k = (piece * SHAPE.steps + chunk) * 64 + place
    return gl.load(norm_ptr + k, mask=(k < SHAPE.size), other=0.0)


@jit
def load_weights(weight_ptr, first_column, chunk, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Loads a chunk of each slice's weights: [slices, products, 64]."""
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    product = gl.arange(0, SHAPE.products, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    column = first_column + product % SHAPE.columns
    line = (column + product // SHAPE.columns * SHAPE.outputs).to(gl.int64) * SHAPE.size
    k = (piece * SHAPE.steps + chunk) * 64 + place
    return gl.load(weight_ptr + line + k, mask=(column < SHAPE.outputs) & (k < SHAPE.size), other=0.0)


@jit
def grouped_left(w, left: gl.constexpr):
    """Returns loaded weights as the first operand of a product whose steps are the groups of 16 neighbouring inputs.

    The tensor cores' operand layout interleaves the inputs of two steps. No data moves between threads.
    """
    A: gl.constexpr = w.shape[0]
    B: gl.constexpr = w.shape[1]
    w = gl.permute(gl.reshape(w, [A, B, 2, 2, 4, 2, 2]), (0, 1, 2, 5, 4, 3, 6))
    return gl.convert_layout(gl.reshape(w, [A, B, 64]), left)


@jit
def grouped_right(x, right: gl.constexpr):
    """Returns loaded rows as the second operand; see `grouped_left`."""
    A: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[2]
    x = gl.permute(gl.reshape(x, [A, 2, 2, 4, 2, 2, R]), (0, 1, 4, 3, 2, 5, 6))
    return gl.convert_layout(gl.reshape(x, [A, 64, R]), right)


@jit
def add_squares(square, x):
    """Adds the squares of inputs to sums [slices, 64, rows]. Shared by all kernels, so that they add in the same order."""
    wide = x.to(gl.float32)
    return gl.fma(wide, wide, square)


@jit
def row_scales(square, eps, SHAPE: gl.constexpr, rows: gl.constexpr):
    """Returns the norm's scale of each row from the sums of `add_squares` over all chunks; slices are added in order."""
    SLICES: gl.constexpr = SHAPE.slices
    ROWS: gl.constexpr = square.shape[2]
    shares = gl.allocate_shared_memory(gl.float32, [SLICES * ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    shares.store(gl.reshape(gl.sum(square, axis=1), [SLICES * ROWS]))
    total = shares.slice(0, ROWS).load(rows)
    for i in gl.static_range(1, SLICES):
        total = total + shares.slice(i * ROWS, ROWS).load(rows)
    return norm_scale(total, eps, SHAPE.size)


@jit
def norm_scale(square, eps, SIZE: gl.constexpr):
    return 1.0 / gl.sqrt(square / SIZE + eps)


@jit
def silu_times(gate, up, dtype: gl.constexpr):
    # The SiLU is rounded before the product with `up`, as in the unfused network.
    gate = gate.to(dtype).to(gl.float32)
    return (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)


@jit
def output_places(first_row, first_column, num_rows, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Returns a program's output columns and, for its results [columns, rows], their offsets in memory and the mask."""
    column = first_column + gl.arange(0, SHAPE.columns, layout=gl.SliceLayout(1, layout))[:, None]
    row = first_row + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, layout))[None, :]
    inside = (row < num_rows) & (column < SHAPE.outputs)
    return column, row * SHAPE.outputs + column, inside


@jit
def finished_sums(
    shares,
    scale,
    bias_ptr,
    column,
    SHAPE: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    dtype: gl.constexpr,
    layout: gl.constexpr,
):
    """Adds the slices' sums in shared memory and applies the norm's scale, bias and gate: [columns, rows]."""
    OUTPUTS: gl.constexpr = SHAPE.outputs
    out = sum_of_slices(shares, 0, SHAPE, layout)
    if HAS_NORM:
        out = out * scale
    if HAS_BIAS:
        out += gl.load(bias_ptr + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
    if SHAPE.gated:
        up = sum_of_slices(shares, SHAPE.columns, SHAPE, layout)
        if HAS_NORM:
            up = up * scale
        if HAS_BIAS:
            up += gl.load(bias_ptr + OUTPUTS + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
        out = silu_times(out, up, dtype)
    return out


@jit
def sum_of_slices(shares, first, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Adds the slices' sums of a program's outputs, from `first` on, in order."""
    SLICES: gl.constexpr = SHAPE.slices
    total = shares.slice(first, SHAPE.columns).load(layout)
    for i in gl.static_range(1, SLICES):
        total = total + shares.slice(i * SHAPE.products + first, SHAPE.columns).load(layout)
    return total
