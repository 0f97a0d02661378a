"""The linear layer for few rows of a quantised weight, whose codes stream through shared memory.

A kernel's weights do not depend on the previous kernel. So the first steps of a ring buffer in shared memory are requested
while that kernel still runs.

Each warp has 16 outputs (32 of a gated weight) of one slice. While the next steps are being copied, a thread reads from shared
memory exactly what its part of the product needs: four neighbouring codes of each group of 16. It converts them to bfloat16 in
registers (`codes`). Each part of a step that shares a scale is a product of mma.sync; its sums are scaled and added in the
order of `summation`.

Instructions of the inner loop per weight on sm_90 with 8 rows, for 16 outputs and for a gated weight's 32: FP8 3.0 and 2.6,
int4 3.1 and 2.6 (with offsets 3.3 and 2.8), int8 in groups of 32 3.6 and 3.1; with 16 rows a tenth more. Scaling and rounding
the weights one by one took 4.1 to 5.3, and these formats were then no faster than bfloat16 on an H200.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fledge.kernels.gluon_support import async_copy, gl, jit, mma_v2
from fledge.kernels.linear.codes import ASSEMBLY, units_of
from fledge.kernels.linear.mma_fragments import Shape, finished_sums, let_next_start, output_places, wait_for_inputs
from fledge.kernels.linear.summation import Summation, inputs_of_a_sum
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import overlap

COLUMNS, ROWS = 16, (8, 16)  # per program
RING_BYTES = 16 << 10  # shared memory for the codes


def serves(inputs: int, order: Summation, group_size: int) -> bool:
    """Whether the kernel supports the shape: steps lie within the weight, and their parts consist of whole groups of 16."""
    return inputs % order.step == 0 and math.gcd(group_size, order.step) >= 32


@lru_cache
def layouts(slices: int, gated: bool, bits: int, step: int, rows: int) -> dict[str, Any]:
    """Returns the layouts that distribute codes [slices * products, units] and rows [slices, step, rows] over threads,
    for reading and for copying.

    Four threads share the 16 inputs of a group; a thread has four of them in each of the step's groups.
    """
    products, unit, num_bytes = COLUMNS * (2 if gated else 1), 1 if bits == 8 else 4, step * bits // 8
    groups = [16 << i for i in range((step // 16).bit_length() - 1)]
    more = [[8, 0], *([[COLUMNS, 0]] if gated else [])]
    warps = [1 << i for i in range(slices.bit_length() - 1)]
    codes = gl.DistributedLinearLayout(
        reg_bases=[*([0, k] for k in (1, 2) if bits == 8), *([0, k // unit] for k in groups), *more],
        lane_bases=[[0, 4 // unit], [0, 8 // unit], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[warp * products, 0] for warp in warps],
        block_bases=[],
        shape=[slices * products, step // unit],
    )
    x = gl.DistributedLinearLayout(
        reg_bases=[[0, k, 0] for k in (1, 2, *groups)] + [[0, 0, row] for row in (8,) if row < rows],
        lane_bases=[[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[warp, 0, 0] for warp in warps],
        block_bases=[],
        shape=[slices, step, rows],
    )
    across = num_bytes // 16  # threads per line, for copying
    lines, at_once = 128 // num_bytes, 16 if bits == 8 else 8  # lines that span all banks; units per 16 bytes
    return {
        "CODES_LAYOUT": codes,
        "X_LAYOUT": x,
        "COPY_LAYOUT": gl.BlockedLayout([1, at_once], [32 // across, across], [slices, 1], [1, 0]),
        "SHARED_LAYOUT": gl.SwizzledSharedLayout(at_once, lines, min(across, 8), [1, 0]),
    }


def register_stream(
    x_MK: Tensor,
    weight: QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    gated: bool = False,
    residual_MO: Tensor | None = None,
) -> Tensor:
    """Computes `dispatch.linear` for a quantised weight, without a norm."""
    (num_rows, size), codes, bits, group = x_MK.shape, weight.codes, weight.bits, weight.group_size
    outputs = codes.shape[0] // (2 if gated else 1)
    assert x_MK.is_contiguous()
    assert codes.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    assert serves(size, order, group)
    rows = next((rows for rows in ROWS if num_rows <= rows), ROWS[-1])
    part = inputs_of_a_sum(order, weight)
    slices = (order.slices, order.slice_inputs, order.step)
    shape = Shape(rows, COLUMNS, gated, *slices, size, outputs, bits, group, part, weight.offsets is not None)
    step_bytes = order.slices * shape.products * order.step * bits // 8
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    _register_stream[(-(-num_rows // rows), -(-outputs // COLUMNS))](
        x_MK,
        units_of(codes, bits),
        weight.scales,
        weight.offsets if weight.offsets is not None else weight.scales,
        bias_O if bias_O is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        num_rows,
        SHAPE=shape,
        STAGES=min(max(RING_BYTES // step_bytes, 4), 8),
        HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_MO is not None,
        **layouts(order.slices, gated, bits, order.step, rows),
        num_warps=order.slices,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    return out


if gl is not None:
    _INT8, _INT4, _INT4_OFFSETS, _FP8 = map(gl.constexpr, ASSEMBLY.values())


@jit
def weights_of(codes, SHAPE: gl.constexpr):
    """Converts codes [lines, units] to bfloat16 [lines, step]. No data moves between threads."""
    LINES: gl.constexpr = codes.shape[0]
    if codes.dtype == gl.float8e4nv:
        return gl.inline_asm_elementwise(_FP8, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4)
    elif SHAPE.bits == 8:
        return gl.inline_asm_elementwise(_INT8, "=r,=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        nibbles: gl.constexpr = _INT4_OFFSETS if SHAPE.has_offsets else _INT4
        four: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
        w = gl.inline_asm_elementwise(nibbles, "=h,=h,=h,=h,h", [codes], dtype=four, is_pure=True, pack=1)
        return gl.reshape(gl.join(gl.join(w[0], w[2]), gl.join(w[1], w[3])), [LINES, SHAPE.step])


@jit
def load_inputs(x_ptr, first_row, num_rows, number, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Loads a step's inputs of each slice: [slices, step, rows]. Beyond the last row or step it loads the last one, unused."""
    STEP: gl.constexpr = SHAPE.step
    SIZE: gl.constexpr = SHAPE.size
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    place = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    row = gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = gl.minimum(first_row + row, num_rows - 1)
    k = (piece * SHAPE.steps + gl.minimum(number, SHAPE.steps - 1)) * STEP + place
    if SHAPE.is_whole:
        return gl.load(x_ptr + row * SIZE + k)
    else:
        return gl.load(x_ptr + row * SIZE + k, mask=k < SIZE, other=0.0)


@jit
def load_scales(scales_ptr, first_column, number, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Loads a step's scales: [slices, products] for each of its parts."""
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    product = gl.arange(0, SHAPE.products, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    column = first_column + product % SHAPE.columns
    row = (column + product // SHAPE.columns * SHAPE.outputs) * (SHAPE.size // SHAPE.group)
    first = (piece * SHAPE.steps + gl.minimum(number, SHAPE.steps - 1)) * SHAPE.step
    PARTS: gl.constexpr = SHAPE.parts
    scales = ()
    for i in gl.static_range(PARTS):
        k = first + i * SHAPE.part
        if SHAPE.is_whole:
            scale = gl.load(scales_ptr + row + k // SHAPE.group)
        else:
            inside = (column < SHAPE.outputs) & (k < SHAPE.size)
            scale = gl.load(scales_ptr + row + k // SHAPE.group, mask=inside, other=0.0)
        scales = scales + (scale,)  # noqa: RUF005
    return scales


@jit
def add_scaled(total, sums, scales, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Returns total + sums * scale, added one part after the other and rounded once per part."""
    if SHAPE.parts == 1:
        total = fma(sums, scales[0], total)
    elif SHAPE.parts == 2:
        first, second = halves(sums, layout)
        total = fma(second, scales[1], fma(first, scales[0], total))
    else:
        early, late = halves(sums, layout)
        first, second = halves(early, layout)
        third, fourth = halves(late, layout)
        total = fma(second, scales[1], fma(first, scales[0], total))
        total = fma(fourth, scales[3], fma(third, scales[2], total))
    return total


@jit
def fma(sums, scale, total):
    return gl.fma(sums, scale.to(gl.float32)[:, :, None], total)


@jit
def halves(x, layout: gl.constexpr):
    """Splits a tensor in two along the first dimension."""
    two = gl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]])
    first, second = gl.split(gl.permute(two, (1, 2, 3, 0)))
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@jit
def _copy_codes(ring, codes_ptr, first_column, number, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Starts the copy of a step's codes into the ring."""
    PACKED: gl.constexpr = 1 if SHAPE.bits == 8 else 4  # codes per unit
    STEP: gl.constexpr = SHAPE.step // PACKED
    SIZE: gl.constexpr = SHAPE.size // PACKED
    PRODUCTS: gl.constexpr = SHAPE.products
    line = gl.arange(0, SHAPE.slices * PRODUCTS, layout=gl.SliceLayout(1, layout))[:, None]
    unit = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :]
    column = first_column + line % PRODUCTS % SHAPE.columns
    place = (line // PRODUCTS * SHAPE.steps + number) * STEP + unit
    row = (column + line % PRODUCTS // SHAPE.columns * SHAPE.outputs).to(gl.int64) * SIZE
    mask = (line >= 0) & (number < SHAPE.steps)
    if not SHAPE.is_whole:
        mask = mask & (column < SHAPE.outputs) & (place < SIZE)
    async_copy.async_copy_global_to_shared(ring.index(number % ring.shape[0]), codes_ptr + row + place, mask=mask)
    async_copy.commit_group()


@jit
def _register_stream(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    CODES_LAYOUT: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    COPY_LAYOUT: gl.constexpr,
    SHARED_LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
):
    SLICES: gl.constexpr = SHAPE.slices
    PRODUCTS: gl.constexpr = SHAPE.products
    ROWS: gl.constexpr = SHAPE.rows
    STEP: gl.constexpr = SHAPE.step
    PARTS: gl.constexpr = SHAPE.parts
    PART: gl.constexpr = STEP // PARTS
    LINES: gl.constexpr = SLICES * PRODUCTS
    UNITS: gl.constexpr = STEP if SHAPE.bits == 8 else STEP // 4  # per step and line
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    first_row, first_column = gl.program_id(0) * ROWS, gl.program_id(1) * SHAPE.columns

    ring = gl.allocate_shared_memory(codes_ptr.dtype.element_ty, [STAGES, LINES, UNITS], SHARED_LAYOUT)
    for i in gl.static_range(STAGES - 1):
        _copy_codes(ring, codes_ptr, first_column, i, SHAPE, COPY_LAYOUT)
    scale = load_scales(scales_ptr, first_column, 0, SHAPE, mma)
    offset = scale
    if SHAPE.has_offsets:
        offset = load_scales(offsets_ptr, first_column, 0, SHAPE, mma)
    if PDL:
        wait_for_inputs()
    x = load_inputs(x_ptr, first_row, num_rows, 0, SHAPE, X_LAYOUT)
    # Two steps per iteration: the inputs that a step loads ahead need not be moved between registers afterwards.
    TOGETHER: gl.constexpr = 2 if SHAPE.steps % 2 == 0 else 1
    none = gl.zeros([PARTS * SLICES, PRODUCTS, ROWS], gl.float32, layout=mma)
    total = gl.zeros([SLICES, PRODUCTS, ROWS], gl.float32, layout=mma)
    for first in range(0, SHAPE.steps, TOGETHER):
        for j in gl.static_range(TOGETHER):
            number = first + j
            async_copy.wait_group(STAGES - 2)
            codes = ring.index(number % STAGES).load(CODES_LAYOUT)
            _copy_codes(ring, codes_ptr, first_column, number + STAGES - 1, SHAPE, COPY_LAYOUT)
            # Inputs and scales, which come from the cache, are loaded one step ahead.
            x_now, scale_now, offset_now = x, scale, offset
            x = load_inputs(x_ptr, first_row, num_rows, number + 1, SHAPE, X_LAYOUT)
            if not SHAPE.scales_slices:
                scale = load_scales(scales_ptr, first_column, number + 1, SHAPE, mma)
                offset = scale
                if SHAPE.has_offsets:
                    offset = load_scales(offsets_ptr, first_column, number + 1, SHAPE, mma)
            w = weights_of(codes, SHAPE)
            # A thread's four inputs of a group are two pairs of an operand. Parts are independent products.
            w = gl.permute(gl.reshape(w, [SLICES, PRODUCTS, PARTS, PART // 16, 4, 2, 2]), (2, 0, 1, 3, 5, 4, 6))
            r = gl.permute(gl.reshape(x_now, [SLICES, PARTS, PART // 16, 4, 2, 2, ROWS]), (1, 0, 2, 4, 3, 5, 6))
            w = gl.convert_layout(gl.reshape(w, [PARTS * SLICES, PRODUCTS, PART]), left)
            r = gl.convert_layout(gl.reshape(r, [PARTS * SLICES, PART, ROWS]), right)
            if SHAPE.scales_slices:
                total = mma_v2(w, r, total)
            else:
                total = add_scaled(total, mma_v2(w, r, none), scale_now, SHAPE, mma)
                if SHAPE.has_offsets:
                    ones = gl.full([PARTS * SLICES, PRODUCTS, PART], 1.0, dtype, layout=left)
                    total = add_scaled(total, mma_v2(ones, r, none), offset_now, SHAPE, mma)
    if SHAPE.scales_slices:
        total = fma(total, scale[0], none)
    async_copy.wait_group(0)
    # Not earlier: the next kernel would take memory bandwidth from this one while it waits.
    if PDL:
        let_next_start()

    answer: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, SLICES], [0, 1])
    column, place, inside = output_places(first_row, first_column, num_rows, SHAPE, answer)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    shares = gl.allocate_shared_memory(gl.float32, [LINES, ROWS], flat)
    shares.store(gl.reshape(total, [LINES, ROWS]))
    out = finished_sums(shares, 1.0, bias_ptr, column, SHAPE, False, HAS_BIAS, dtype, answer)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + place, mask=inside, other=0.0)
        out = residual.to(gl.float32) + out.to(dtype).to(gl.float32)
    gl.store(out_ptr + place, out.to(dtype), mask=inside)
