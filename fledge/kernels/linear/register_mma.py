"""The linear layer for a handful of rows, on tensor cores that are fed straight from memory.

Triton's own products take their operands through shared memory; for few rows that detour costs more than the product. Here
(in Gluon, Triton's language with explicit layouts) each thread loads from memory just what its part of the product needs:
eight neighbouring inputs at a time, of weights and of rows alike, so that the order in which they are multiplied does not
matter. Each warp takes every WARPS-th chunk of the inputs; their sums meet in shared memory, behind the kernel's only barrier.

Weights in 8 or 4 bits (`kernels.quantization`) go the same way: see `register_codes.py`.

The norm's scale is applied to the sums, so that the product does not wait for it: what is rounded is input times norm weight,
where the unfused network rounds the same times the scale.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.gluon_support import gl, gluon, jit, mma_v2
from fledge.kernels.linear.register_codes import CODES, read_codes, weights_of
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import is_hopper_or_newer, multiprocessors, overlap

TILE = 16  # rows of a product
CHUNK = 64  # inputs that one warp's threads hold side by side, eight each, twice
MOST_CHUNKS = 4  # of a warp: all of them lie in its registers at once


class Form(NamedTuple):
    """Of a program. A row's result depends on the number of warps alone, which share the inputs."""

    rows: int = TILE
    columns: int = 16  # outputs: 8 make more programs, and yet each takes longer
    warps: int = 4

    def programs(self, num_rows: int, outputs: int) -> tuple[int, int]:
        return -(-num_rows // self.rows), -(-outputs // self.columns)


# Codes are work for the threads, so more of them share it: a step's linears of one row take 273 µs instead of 303.
OF_CODES = Form(columns=8, warps=8)


def supports_registers(size: int, dtype: torch.dtype, device: torch.device, group_size: int | None = None) -> bool:
    """bfloat16 alone: input times norm weight, unscaled, may leave float16's range. `group_size`: of a quantised weight."""
    if gluon is None or device.type != "cuda" or dtype != torch.bfloat16:
        return False
    if group_size is not None and group_size % CODES:
        return False
    return size % 8 == 0 and size <= CHUNK * MOST_CHUNKS * 8 and is_hopper_or_newer(device)


def num_warps(size: int) -> int:
    return 4 if size <= CHUNK * MOST_CHUNKS * 4 else 8


def choose_form(num_rows: int, size: int, outputs: int, gated: bool, num_multiprocessors: int) -> Form:
    """Small programs, unless larger ones all run at once where small ones would take turns.

    Registers let two programs of four warps share a multiprocessor if they are large or gated, three otherwise. On an H200
    (`kernel-forms-h200.json`) that is worth 55 of 443 µs with 64 rows and 51 of 608 with 128; anywhere else larger ones lose.
    """
    small, warps = Form(warps=num_warps(size)), num_warps(size)
    large = Form(rows=2 * TILE, warps=warps) if gated else Form(columns=32, warps=warps)
    take_turns = math.prod(small.programs(num_rows, outputs)) > (2 if gated else 3) * num_multiprocessors
    fits = warps == 4 and math.prod(large.programs(num_rows, outputs)) <= 2 * num_multiprocessors
    return large if take_turns and fits else small


def weight_arguments(weight: Tensor | QuantizedWeight) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int | bool]]:
    """What the kernels read of a weight, and how."""
    if isinstance(weight, Tensor):
        assert weight.is_contiguous()
        return (weight, weight, weight), {"BITS": 16, "GROUP": 1, "HAS_OFFSETS": False}
    has_offsets = weight.offsets is not None
    parts = (weight.codes, weight.scales, weight.offsets if has_offsets else weight.scales)
    assert all(part.is_contiguous() for part in parts)
    return parts, {"BITS": weight.bits, "GROUP": weight.group_size, "HAS_OFFSETS": has_offsets}


def register_mma(
    x_MK: Tensor,
    weight_OK: Tensor | QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    norm=None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    before_attention: bool = False,
    form: Form | None = None,
) -> Tensor:
    """As `dispatch.linear`; `form` is for measuring."""
    num_rows, size = x_MK.shape
    assert x_MK.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    parts, kind = weight_arguments(weight_OK)
    outputs = parts[0].shape[0] // (2 if gated else 1)
    if form is None:
        has_codes = kind["BITS"] < 16
        form = OF_CODES if has_codes else choose_form(num_rows, size, outputs, gated, multiprocessors(x_MK.device))
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    _direct_linear[form.programs(num_rows, outputs)](
        x_MK,
        *parts,
        bias_O if bias_O is not None else x_MK,
        norm.weight if norm is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        num_rows,
        norm.eps if norm is not None else 0.0,
        ROWS=form.rows,
        COLUMNS=form.columns,
        CHUNKS=-(-size // (CHUNK * form.warps)),
        SIZE=size,
        OUTPUTS=outputs,
        **kind,
        HAS_BIAS=bias_O is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual_MO is not None,
        GATED=gated,
        HOLD=before_attention,
        WARPS=form.warps,
        num_warps=form.warps,
        **overlap(x_MK),
    )
    return out


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
def direct_products(
    x_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    norm_ptr,
    residual_ptr,
    num_rows,
    eps,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNKS: gl.constexpr,
    SIZE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_OFFSETS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    GATED: gl.constexpr,
    HOLD: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """All up to the barrier: the warps' shares of the products, in shared memory; the norm's scale by row; the residual."""
    EACH: gl.constexpr = 64
    # Both halves of a gated weight are columns of one product.
    PRODUCTS: gl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=8)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=8)
    last: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 32 // COLUMNS, COLUMNS], [1, WARPS, 1], [2, 1, 0])
    answer: gl.constexpr = gl.SliceLayout(0, last)
    if PDL == 1 and not HOLD:
        _let_next_start()

    first_row, first_column = gl.program_id(0) * ROWS, gl.program_id(1) * COLUMNS
    warp_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, right)))[:, None, None]
    input_w = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(2, right)))[None, :, None]
    product = gl.arange(0, PRODUCTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, right)))[None, None, :]
    column_w = first_column + product % COLUMNS
    weights = weight_ptr + (column_w + product // COLUMNS * OUTPUTS).to(gl.int64) * SIZE
    ws = ()
    if BITS == 16:
        for i in gl.static_range(CHUNKS):
            k = (i * WARPS + warp_w) * EACH + input_w
            ws = ws + (gl.load(weights + k, mask=(column_w < OUTPUTS) & (k < SIZE), other=0.0),)  # noqa: RUF005
    else:
        ws = read_codes(
            weight_ptr,
            scales_ptr,
            offsets_ptr,
            first_column,
            mma,
            COLUMNS,
            PRODUCTS,
            CHUNKS,
            SIZE,
            OUTPUTS,
            BITS,
            GROUP,
            HAS_OFFSETS,
            WARPS,
        )
    norms = ()
    if HAS_NORM:
        warp_n = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, left)))[:, None]
        input_n = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, :]
        for i in gl.static_range(CHUNKS):
            k = (i * WARPS + warp_n) * EACH + input_n
            norms = norms + (gl.load(norm_ptr + k, mask=k < SIZE, other=0.0),)  # noqa: RUF005
    if BITS < 16:
        codes = ws
        ws = ()
        for i in gl.static_range(CHUNKS):
            w = weights_of(codes[i], mma, PRODUCTS, BITS, HAS_OFFSETS, WARPS, x_ptr.dtype.element_ty)
            ws = ws + (w,)  # noqa: RUF005
    if PDL:
        _wait_for_inputs()
        if HOLD or PDL == 2:
            _let_next_start()

    warp_x = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, left)))[:, None, None]
    row_x = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, left)))[None, :, None]
    input_x = gl.arange(0, EACH, layout=gl.SliceLayout(0, gl.SliceLayout(1, left)))[None, None, :]
    xs = ()
    for i in gl.static_range(CHUNKS):
        k = (i * WARPS + warp_x) * EACH + input_x
        xs = xs + (gl.load(x_ptr + row_x * SIZE + k, mask=(row_x < num_rows) & (k < SIZE), other=0.0),)  # noqa: RUF005
    residual = gl.zeros([ROWS, COLUMNS], x_ptr.dtype.element_ty, layout=answer)
    if HAS_RESIDUAL:
        row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, answer))[:, None]
        column = first_column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, answer))[None, :]
        residual = gl.load(residual_ptr + row * OUTPUTS + column, mask=(row < num_rows) & (column < OUTPUTS), other=0.0)

    total = gl.zeros([WARPS, ROWS, PRODUCTS], gl.float32, layout=mma)
    for i in gl.static_range(CHUNKS):
        x = xs[i]
        if HAS_NORM:
            x = _times(x, norms[i][:, None, :])
        total = mma_v2(x, ws[i], total)
    shares = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, PRODUCTS], gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0]))
    if HAS_NORM:
        square = gl.zeros([WARPS, ROWS, EACH], gl.float32, layout=left)
        for i in gl.static_range(CHUNKS):
            wide = xs[i].to(gl.float32)
            square += wide * wide
        squares = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
        squares.store(gl.sum(square, axis=2))
    shares.store(total)
    scale = gl.full([ROWS, 1], 1.0, gl.float32, layout=answer)
    if HAS_NORM:
        mean = gl.sum(squares.load(gl.SliceLayout(2, last)), axis=0) / SIZE
        scale = gl.convert_layout(1.0 / gl.sqrt(mean + eps), gl.SliceLayout(1, answer))[:, None]
    return shares, scale, residual


@jit
def _direct_linear(
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
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    # The last sum: one thread has an output's shares of all warps.
    last: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 32 // COLUMNS, COLUMNS], [1, WARPS, 1], [2, 1, 0])
    answer: gl.constexpr = gl.SliceLayout(0, last)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    shares, scale, residual = direct_products(
        x_ptr,
        weight_ptr,
        scales_ptr,
        offsets_ptr,
        norm_ptr,
        residual_ptr,
        num_rows,
        eps,
        ROWS,
        COLUMNS,
        CHUNKS,
        SIZE,
        OUTPUTS,
        BITS,
        GROUP,
        HAS_OFFSETS,
        HAS_NORM,
        HAS_RESIDUAL,
        GATED,
        HOLD,
        PDL,
        WARPS,
    )
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, answer))[:, None]
    column = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, answer))[None, :]
    inside = (row < num_rows) & (column < OUTPUTS)
    if GATED:
        out = gl.sum(shares.slice(0, COLUMNS, dim=2).load(last), axis=0)
        up = gl.sum(shares.slice(COLUMNS, COLUMNS, dim=2).load(last), axis=0)
        if HAS_NORM:
            out, up = out * scale, up * scale
        if HAS_BIAS:
            out += gl.load(bias_ptr + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
            up += gl.load(bias_ptr + OUTPUTS + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
        # Rounded between the two products, as the unfused network does.
        gate = out.to(dtype).to(gl.float32)
        out = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
    else:
        out = gl.sum(shares.load(last), axis=0)
        if HAS_NORM:
            out = out * scale
        if HAS_BIAS:
            out += gl.load(bias_ptr + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
    if HAS_RESIDUAL:
        out = residual.to(gl.float32) + out.to(dtype).to(gl.float32)
    gl.store(out_ptr + row * OUTPUTS + column, out.to(dtype), mask=inside)
