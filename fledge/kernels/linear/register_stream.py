"""The linear layer for few rows of a large quantised weight, whose codes stream through shared memory.

A kernel's weights do not depend on the kernel before it. So the first steps of a ring in shared memory are requested while that
one still runs, where `tiles` requests its weights after it.

Each warp has 16 outputs (32 of a gated weight) of one slice. While copies of the next steps are under way, a thread reads from
shared memory just what its part of the product needs, four neighbouring codes of each group of 16, and makes weights of them in
its registers. `tiles` takes weights through shared memory in the activations' type: without that detour the inner loop of FP8
weights has 4.6 instructions a weight (4.0 if gated) instead of 5.9 on sm_90, and such a loop is bound by them as much as by
memory. Products are mma.sync's, in the order of `summation`.

Plain weights gain nothing: on an H200 `tiles` was faster for every measured shape, up to twice as fast.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fledge.kernels.gluon_support import async_copy, gl, jit, mma_v2
from fledge.kernels.linear.mma_fragments import (
    Shape,
    finished_sums,
    let_next_start,
    load_rows,
    output_places,
    wait_for_inputs,
)
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tile_codes import ASSEMBLY, INT4_ZERO, INT8_ZERO, kind_of_offsets
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import overlap

COLUMNS, ROWS = 16, 8  # of a program
RING_BYTES = 16 << 10  # of shared memory for the codes


def step_of(order: Summation) -> int:
    """Inputs."""
    return 128 if order.slice_inputs % 128 == 0 else 64


def serves(inputs: int, order: Summation, group_size: int) -> bool:
    """Whether each step lies within the weight, and has whole groups or lies in one."""
    return inputs % step_of(order) == 0 and math.gcd(group_size, step_of(order)) >= 32


@lru_cache
def layouts(slices: int, gated: bool, bits: int, step: int) -> dict[str, Any]:
    """How codes [slices * products, units] and rows [slices, step, rows] are spread over threads, for reading and for copying.

    Four threads share the 16 inputs of a group; a thread has four of them, of each of the step's groups.
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
        reg_bases=[[0, k, 0] for k in (1, 2, *groups)],
        lane_bases=[[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[warp, 0, 0] for warp in warps],
        block_bases=[],
        shape=[slices, step, ROWS],
    )
    across = num_bytes // 16  # threads along a line
    lines, at_once = 128 // num_bytes, 16 if bits == 8 else 8  # lines that fill all banks; units in 16 bytes
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
    """As `dispatch.linear`, without a norm."""
    (num_rows, size), codes, bits, group = x_MK.shape, weight.codes, weight.bits, weight.group_size
    outputs = codes.shape[0] // (2 if gated else 1)
    assert x_MK.is_contiguous()
    assert codes.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    assert serves(size, order, group)
    step = step_of(order)
    slices = (order.slices, order.slice_inputs, step)
    shape = Shape(ROWS, COLUMNS, gated, *slices, size, outputs, bits, group, kind_of_offsets(weight))
    step_bytes = order.slices * shape.products * step * bits // 8
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    _register_stream[(-(-num_rows // ROWS), -(-outputs // COLUMNS))](
        x_MK,
        codes if bits == 8 else codes.view(torch.int16),  # a unit: what a thread has of a group
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
        **layouts(order.slices, gated, bits, step),
        num_warps=order.slices,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    return out


def _four_nibbles(offsets: bool) -> str:
    """Assembly: the four nibbles of 16 bits, times a scale plus what is added, to bfloat16; see `tile_codes`."""
    parts = [
        f"prmt.b32 f{i}, {'high' if i % 2 else 'low'}, 0x43000000, 0x7{i // 2}44; "
        + (f"sub.rn.f32 f{i}, f{i}, 0f43000000; " if offsets else "")
        + f"fma.rn.f32 f{i}, f{i}, $5, $6;"
        for i in range(4)
    ]
    split = "cvt.u32.u16 u, $4; and.b32 low, u, 0x0F0F; shr.u32 high, u, 4; and.b32 high, high, 0x0F0F;"
    rounded = "cvt.rn.bf16x2.f32 low, f1, f0; cvt.rn.bf16x2.f32 high, f3, f2; mov.b32 {$0, $1}, low; mov.b32 {$2, $3}, high;"
    return f"{{ .reg .b32 f0, f1, f2, f3, u, low, high; {split} {' '.join(parts)} {rounded} }}"


FOUR_NIBBLES = {offsets: _four_nibbles(offsets) for offsets in (False, True)}
if gl is not None:
    _INT8, _FP8 = gl.constexpr(ASSEMBLY["int8"]), gl.constexpr(ASSEMBLY["fp8"])
    _FOUR, _FOUR_OFFSETS = gl.constexpr(FOUR_NIBBLES[False]), gl.constexpr(FOUR_NIBBLES[True])
    _INT8_ZERO, _INT4_ZERO = gl.constexpr(INT8_ZERO), gl.constexpr(INT4_ZERO)


@jit
def load_scales(scales_ptr, first_column, number, SHAPE: gl.constexpr, layout: gl.constexpr):
    """[slices * products, parts of a step]"""
    PRODUCTS: gl.constexpr = SHAPE.products
    line = gl.arange(0, SHAPE.slices * PRODUCTS, layout=gl.SliceLayout(1, layout))[:, None]
    part = gl.arange(0, SHAPE.step // SHAPE.part, layout=gl.SliceLayout(0, layout))[None, :]
    column = first_column + line % PRODUCTS % SHAPE.columns
    k = (line // PRODUCTS * SHAPE.steps + number) * SHAPE.step + part * SHAPE.part
    row = (column + line % PRODUCTS // SHAPE.columns * SHAPE.outputs).to(gl.int64) * (SHAPE.size // SHAPE.group)
    inside = (column < SHAPE.outputs) & (k < SHAPE.size) & (number < SHAPE.steps)
    return gl.load(scales_ptr + row + k // SHAPE.group, mask=inside, other=0.0)


@jit
def weights_of(codes, scale, offset, SHAPE: gl.constexpr):
    """[lines, step] in bfloat16 of codes [lines, parts, bytes] and scales [lines, parts]."""
    LINES: gl.constexpr = codes.shape[0]
    scale, offset = scale.to(gl.float32), offset.to(gl.float32)
    if codes.dtype == gl.float8e4nv:
        kinds: gl.constexpr = "=r,=r,r,r,r,r,r"
        w = gl.inline_asm_elementwise(_FP8, kinds, [codes, scale[:, :, None]], dtype=gl.bfloat16, is_pure=True, pack=4)
    elif SHAPE.bits == 8:
        kinds: gl.constexpr = "=r,=r,r,r,r,r,r,r,r,r,r"
        zero = scale * _INT8_ZERO
        operands = [codes, scale[:, :, None], zero[:, :, None]]
        w = gl.inline_asm_elementwise(_INT8, kinds, operands, dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        kinds: gl.constexpr = "=h,=h,=h,=h,h,r,r"
        nibbles: gl.constexpr = _FOUR_OFFSETS if SHAPE.offsets == 1 else _FOUR
        if SHAPE.offsets == 1:
            added = offset
        else:
            added = offset + scale * -128.0 if SHAPE.offsets else scale * _INT4_ZERO
        operands = [codes, scale[:, :, None], added[:, :, None]]
        w = gl.inline_asm_elementwise(
            nibbles, kinds, operands, dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
        w = gl.join(gl.join(w[0], w[2]), gl.join(w[1], w[3]))
    return gl.reshape(w, [LINES, SHAPE.step])


@jit
def _copy_codes(ring, codes_ptr, first_column, number, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Starts the copy of a step's codes into the ring."""
    PACKED: gl.constexpr = 1 if SHAPE.bits == 8 else 4  # codes a unit
    STEP: gl.constexpr = SHAPE.step // PACKED
    SIZE: gl.constexpr = SHAPE.size // PACKED
    PRODUCTS: gl.constexpr = SHAPE.products
    line = gl.arange(0, SHAPE.slices * PRODUCTS, layout=gl.SliceLayout(1, layout))[:, None]
    unit = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :]
    column = first_column + line % PRODUCTS % SHAPE.columns
    place = (line // PRODUCTS * SHAPE.steps + number) * STEP + unit
    row = (column + line % PRODUCTS // SHAPE.columns * SHAPE.outputs).to(gl.int64) * SIZE
    mask = (column < SHAPE.outputs) & (place < SIZE) & (number < SHAPE.steps)
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
    LINES: gl.constexpr = SLICES * PRODUCTS
    UNITS: gl.constexpr = STEP if SHAPE.bits == 8 else STEP // 4  # of codes
    PARTS: gl.constexpr = STEP // SHAPE.part
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    first_row, first_column = gl.program_id(0) * ROWS, gl.program_id(1) * SHAPE.columns

    ring = gl.allocate_shared_memory(codes_ptr.dtype.element_ty, [STAGES, LINES, UNITS], SHARED_LAYOUT)
    for i in gl.static_range(STAGES - 1):
        _copy_codes(ring, codes_ptr, first_column, i, SHAPE, COPY_LAYOUT)
    whole = gl.zeros([LINES, UNITS], gl.int8, layout=CODES_LAYOUT)
    grouped: gl.constexpr = gl.reshape(whole, [LINES, PARTS, UNITS // PARTS]).type.layout
    by_part: gl.constexpr = gl.SliceLayout(2, grouped)
    scale = load_scales(scales_ptr, first_column, 0, SHAPE, by_part)
    offset = scale
    if SHAPE.offsets:
        offset = load_scales(offsets_ptr, first_column, 0, SHAPE, by_part)
    if PDL:
        wait_for_inputs()
    x = load_rows(x_ptr, first_row, num_rows, 0, SHAPE, X_LAYOUT)
    total = gl.zeros([SLICES, PRODUCTS, ROWS], gl.float32, layout=mma)
    for i in range(SHAPE.steps):
        async_copy.wait_group(STAGES - 2)
        w = ring.index(i % STAGES).load(CODES_LAYOUT)
        _copy_codes(ring, codes_ptr, first_column, i + STAGES - 1, SHAPE, COPY_LAYOUT)
        # What comes from the cache is read a step ahead.
        x_now, scale_now, offset_now = x, scale, offset
        x = load_rows(x_ptr, first_row, num_rows, i + 1, SHAPE, X_LAYOUT)
        if SHAPE.group != SHAPE.size:
            scale = load_scales(scales_ptr, first_column, i + 1, SHAPE, by_part)
            offset = scale
            if SHAPE.offsets:
                offset = load_scales(offsets_ptr, first_column, i + 1, SHAPE, by_part)
        w = weights_of(gl.reshape(w, [LINES, PARTS, UNITS // PARTS]), scale_now, offset_now, SHAPE)
        # A group's four inputs of a thread are two pairs of an operand. Each thread keeps what it has: nothing moves.
        w = gl.permute(gl.reshape(w, [SLICES, PRODUCTS, STEP // 16, 4, 2, 2]), (0, 1, 2, 4, 3, 5))
        r = gl.permute(gl.reshape(x_now, [SLICES, STEP // 16, 4, 2, 2, ROWS]), (0, 1, 3, 2, 4, 5))
        w = gl.convert_layout(gl.reshape(w, [SLICES, PRODUCTS, STEP]), left)
        total = mma_v2(w, gl.convert_layout(gl.reshape(r, [SLICES, STEP, ROWS]), right), total)
    async_copy.wait_group(0)
    # Not before: kernels that wait beside this one take its bandwidth.
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
