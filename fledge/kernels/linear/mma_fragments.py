"""Parts of the linears in Gluon: loads in tensor-core fragments, what follows the sums, and programmatic dependent launch."""

from __future__ import annotations

from typing import NamedTuple

from fledge.kernels.gluon_support import gl, jit


class Shape(NamedTuple):
    """Of a program, and of the weight that it multiplies by: a constant of its kernel."""

    rows: int
    columns: int  # outputs; of each half of a gated weight
    gated: bool
    slices: int
    slice_inputs: int
    step: int  # inputs of each slice that are multiplied at once
    size: int  # inputs
    outputs: int  # of the weight; of each half of a gated one
    bits: int = 16
    group: int = 1  # inputs that share a scale
    part: int = 1  # inputs whose products are added up before they are scaled
    has_offsets: bool = False

    @property
    def products(self) -> int:
        """Both halves of a gated weight are outputs of one product."""
        return 2 * self.columns if self.gated else self.columns

    @property
    def steps(self) -> int:
        """Of a slice, which they fill."""
        return self.slice_inputs // self.step

    @property
    def scales_slices(self) -> bool:
        """All inputs share a scale, which a slice's sum is multiplied by."""
        return self.part == self.slice_inputs

    @property
    def parts(self) -> int:
        """Of a step."""
        return 1 if self.scales_slices else self.step // self.part

    @property
    def is_whole(self) -> bool:
        """Slices are all full, and so are programs."""
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
    """A step's inputs of each slice [slices, step, rows]."""
    STEP: gl.constexpr = SHAPE.step
    SIZE: gl.constexpr = SHAPE.size
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    place = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    row = first_row + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    k = (piece * SHAPE.steps + number) * STEP + place
    return gl.load(x_ptr + row * SIZE + k, mask=(row < num_rows) & (k < SIZE) & (number < SHAPE.steps), other=0.0)


@jit
def load_norm(norm_ptr, chunk, SHAPE: gl.constexpr, layout: gl.constexpr):
    """[slices, 64, 1]"""
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    k = (piece * SHAPE.steps + chunk) * 64 + place
    return gl.load(norm_ptr + k, mask=(k < SHAPE.size), other=0.0)


@jit
def load_weights(weight_ptr, first_column, chunk, SHAPE: gl.constexpr, layout: gl.constexpr):
    """A chunk [slices, products, 64] of each slice."""
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    product = gl.arange(0, SHAPE.products, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    column = first_column + product % SHAPE.columns
    line = (column + product // SHAPE.columns * SHAPE.outputs).to(gl.int64) * SHAPE.size
    k = (piece * SHAPE.steps + chunk) * 64 + place
    return gl.load(weight_ptr + line + k, mask=(column < SHAPE.outputs) & (k < SHAPE.size), other=0.0)


@jit
def grouped_left(w, left: gl.constexpr):
    """Loaded weights as the first operand of a product whose steps are the groups of 16 neighbouring inputs.

    The tensor cores' operands have the inputs of two steps interleaved. Each thread keeps what it has: nothing moves.
    """
    A: gl.constexpr = w.shape[0]
    B: gl.constexpr = w.shape[1]
    w = gl.permute(gl.reshape(w, [A, B, 2, 2, 4, 2, 2]), (0, 1, 2, 5, 4, 3, 6))
    return gl.convert_layout(gl.reshape(w, [A, B, 64]), left)


@jit
def grouped_right(x, right: gl.constexpr):
    """Loaded rows as the second operand; see `grouped_left`."""
    A: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[2]
    x = gl.permute(gl.reshape(x, [A, 2, 2, 4, 2, 2, R]), (0, 1, 4, 3, 2, 5, 6))
    return gl.convert_layout(gl.reshape(x, [A, 64, R]), right)


@jit
def add_squares(square, x):
    """Adds an input's squares to [slices, 64, rows] sums. One function for all kernels: the order of this sum counts."""
    wide = x.to(gl.float32)
    return gl.fma(wide, wide, square)


@jit
def row_scales(square, eps, SHAPE: gl.constexpr, rows: gl.constexpr):
    """The norm's scale by row, from `add_squares` of all chunks; slices are added in order."""
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
    # Rounded between the two products, as the unfused network does.
    gate = gate.to(dtype).to(gl.float32)
    return (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)


@jit
def output_places(first_row, first_column, num_rows, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Of a program's results [columns, rows]: their columns, places in memory, and which of them are there."""
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
    """[columns, rows] from the slices' sums in shared memory, with the norm's scale, bias and gate."""
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
    """Adds the slices' sums of a program's outputs, from `first` on, one after the other."""
    SLICES: gl.constexpr = SHAPE.slices
    total = shares.slice(first, SHAPE.columns).load(layout)
    for i in gl.static_range(1, SLICES):
        total = total + shares.slice(i * SHAPE.products + first, SHAPE.columns).load(layout)
    return total
