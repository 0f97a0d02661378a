"""The linear layer for few rows of a large weight: it streams through shared memory, from before its inputs are there.

A kernel's weights do not depend on the kernel before it. So the first steps of a ring in shared memory are requested while that
one still runs, where `tiles` requests its weights after it.

Each warp has 16 outputs (32 of a gated weight) of one slice. While copies of the next steps are under way, a thread reads from
shared memory just what its part of the product needs, four neighbours of each group of 16. Of a quantised weight these are
codes, of which it makes weights in its registers (`stream_codes`). `tiles` takes weights through shared memory in the
activations' type: without that detour the inner loop of FP8 weights has 4.6 instructions a weight (4.0 if gated) instead of 5.9
on sm_90, and such a loop is bound by them as much as by memory. Products are mma.sync's, in the order of `summation`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.kernels.gluon_support import async_copy, gl, jit, mma_v2
from fledge.kernels.linear.mma_fragments import (
    Shape,
    finished_sums,
    input_place,
    let_next_start,
    load_rows,
    output_places,
    wait_for_inputs,
)
from fledge.kernels.linear.stream_codes import load_scales, weights_of
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tile_codes import kind_of_offsets
from fledge.kernels.linear.tiles import weight_parts
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import overlap

COLUMNS, ROWS = 16, 8  # of a program
AFTER_LOOP, AT_ONCE, AFTER_WAITING = range(3)  # when the next kernel may start: START below


class LaunchConfig(NamedTuple):
    """Of a program; nothing of it changes a result."""

    rows: int = ROWS  # or 16: then so many rows read the weight once
    ring: int = 16  # KB of shared memory for the weight
    early: int = 0  # whether the next kernel may start at once, and request its own weight


def step_of(order: Summation) -> int:
    return 128 if order.slice_inputs % 128 == 0 else 64


def steps_of(config: LaunchConfig, order: Summation, gated: bool, bits: int) -> tuple[int, int]:
    """Inputs of a step, and how many steps the ring has. The last step of a plain weight's slice may be shorter."""
    lines = order.slices * COLUMNS * (2 if gated else 1)
    step, ring = step_of(order), config.ring << 10
    if bits < 16:
        return step, min(max(ring // (lines * step * bits // 8), 4), 8)
    step = 128 if ring >= 4 * lines * 256 else 64
    return step, max(ring // (lines * step * 2), 4)


def serves(inputs: int, order: Summation, group_size: int) -> bool:
    """Of a quantised weight: whether each step lies within it, and has whole groups or lies in one."""
    return inputs % step_of(order) == 0 and math.gcd(group_size, step_of(order)) >= 32


@lru_cache
def layouts(slices: int, gated: bool, bits: int, step: int, rows: int = ROWS) -> dict[str, Any]:
    """How codes [slices * products, units] and rows [slices, step, rows] are spread over threads, for reading and for copying.

    Four threads share the 16 inputs of a group; a thread has four of them, of each of the step's groups. For a plain weight a
    unit of the rows is a pair of inputs.
    """
    products, unit, num_bytes = COLUMNS * (2 if gated else 1), 1 if bits >= 8 else 4, step * bits // 8
    groups = [16 << i for i in range((step // 16).bit_length() - 1)]
    more = [[8, 0], *([[COLUMNS, 0]] if gated else [])]
    warps = [1 << i for i in range(slices.bit_length() - 1)]
    codes = gl.DistributedLinearLayout(
        reg_bases=[*([0, k] for k in (1, 2) if bits >= 8), *([0, k // unit] for k in groups), *more],
        lane_bases=[[0, 4 // unit], [0, 8 // unit], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[warp * products, 0] for warp in warps],
        block_bases=[],
        shape=[slices * products, step // unit],
    )
    pair = 2 if bits == 16 else 1
    own = [k // pair for k in (1, 2, *groups) if k >= pair]
    x = gl.DistributedLinearLayout(
        reg_bases=[*([0, k, 0] for k in own), *([[0, 0, 8]] if rows == 16 else [])],
        lane_bases=[[0, 4 // pair, 0], [0, 8 // pair, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[[warp, 0, 0] for warp in warps],
        block_bases=[],
        shape=[slices, step // pair, rows],
    )
    across = num_bytes // 16  # threads along a line
    copies = gl.BlockedLayout([1, 16 if bits == 8 else 8], [32 // across, across], [slices, 1], [1, 0])
    if bits == 16:
        # Half a warp reads 32 bytes of four lines at once: the same 32 bytes of neighbouring lines lie in other banks.
        shared = gl.SwizzledSharedLayout(16, 1, 4, [1, 0])
    else:
        lines = 128 // num_bytes  # that fill all banks
        shared = gl.SwizzledSharedLayout(16 if bits == 8 else 8, lines, min(across, 8), [1, 0])
    return {"CODES_LAYOUT": codes, "X_LAYOUT": x, "COPY_LAYOUT": copies, "SHARED_LAYOUT": shared}


def register_stream(
    x_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    pdl_barrier: bool = False,
    config: LaunchConfig | None = None,
) -> Tensor:
    """As `dispatch.linear`, without a norm."""
    (num_rows, size), config = x_MK.shape, config or LaunchConfig()
    codes, scales, offsets, bits, group = weight_parts(weight)
    outputs = codes.shape[0] // (2 if gated else 1)
    assert x_MK.is_contiguous()
    assert codes.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    if isinstance(weight, QuantizedWeight):
        assert serves(size, order, group)
    else:
        assert not order.scales_sums, "other kernels serve plain weights whose sums a norm scales"
        assert codes.dtype == x_MK.dtype == torch.bfloat16
    step, stages = steps_of(config, order, gated, bits)
    start = AFTER_LOOP if not config.early else AFTER_WAITING if pdl_barrier else AT_ONCE
    slices = (order.slices, order.slice_inputs, step)
    shape = Shape(config.rows, COLUMNS, gated, *slices, size, outputs, bits, group, kind_of_offsets(weight))
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    _register_stream[(-(-num_rows // config.rows), -(-outputs // COLUMNS))](
        x_MK if bits < 16 else x_MK.view(torch.int32),
        codes if bits >= 8 else codes.view(torch.int16),  # a unit: what a thread has of a group
        scales if scales is not None else x_MK,
        offsets if offsets is not None else scales if scales is not None else x_MK,
        bias_O if bias_O is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        num_rows,
        SHAPE=shape,
        STAGES=stages,
        HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_MO is not None,
        START=start,
        **layouts(order.slices, gated, bits, step, config.rows),
        num_warps=order.slices,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    return out


@jit
def _both(pair):
    """The two numbers in 32 bits. Single ones that a loop carries have a register each, and are packed again every time."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )


@jit
def _copy_codes(ring, codes_ptr, first_column, number, SHAPE: gl.constexpr, layout: gl.constexpr):
    """Starts the copy of a step's codes (a plain weight's numbers) into the ring. Inputs past the slice become zeros."""
    PACKED: gl.constexpr = 1 if SHAPE.bits >= 8 else 4  # codes a unit
    SLICE: gl.constexpr = SHAPE.slice_inputs // PACKED
    STEP: gl.constexpr = SHAPE.step // PACKED
    SIZE: gl.constexpr = SHAPE.size // PACKED
    PRODUCTS: gl.constexpr = SHAPE.products
    line = gl.arange(0, SHAPE.slices * PRODUCTS, layout=gl.SliceLayout(1, layout))[:, None]
    unit = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :]
    column = first_column + line % PRODUCTS % SHAPE.columns
    place = input_place(line // PRODUCTS, number, unit, SLICE, STEP)
    row = (column + line % PRODUCTS // SHAPE.columns * SHAPE.outputs).to(gl.int64) * SIZE
    mask = (column < SHAPE.outputs) & (place < SIZE) & (number < SHAPE.steps)
    if SLICE % STEP:
        mask = mask & (number * STEP + unit < SLICE)
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
    START: gl.constexpr,
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
    BITS: gl.constexpr = SHAPE.bits
    PAIR: gl.constexpr = 2 if BITS == 16 else 1  # inputs a unit of the rows
    LINES: gl.constexpr = SLICES * PRODUCTS
    UNITS: gl.constexpr = STEP if BITS >= 8 else STEP // 4  # of codes
    PARTS: gl.constexpr = STEP // SHAPE.part
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    first_row, first_column = gl.program_id(0) * ROWS, gl.program_id(1) * SHAPE.columns

    ring = gl.allocate_shared_memory(codes_ptr.dtype.element_ty, [STAGES, LINES, UNITS], SHARED_LAYOUT)
    for i in gl.static_range(STAGES - 1):
        _copy_codes(ring, codes_ptr, first_column, i, SHAPE, COPY_LAYOUT)
    if BITS < 16:
        whole = gl.zeros([LINES, UNITS], gl.int8, layout=CODES_LAYOUT)
        grouped: gl.constexpr = gl.reshape(whole, [LINES, PARTS, UNITS // PARTS]).type.layout
        by_part: gl.constexpr = gl.SliceLayout(2, grouped)
        scale = load_scales(scales_ptr, first_column, 0, SHAPE, by_part)
        offset = scale
        if SHAPE.offsets:
            offset = load_scales(offsets_ptr, first_column, 0, SHAPE, by_part)
    if PDL and START == 1:
        let_next_start()
    if PDL:
        wait_for_inputs()
        if START == 2:
            let_next_start()
    x = load_rows(x_ptr, first_row, num_rows, 0, SHAPE, PAIR, X_LAYOUT)
    total = gl.zeros([SLICES, PRODUCTS, ROWS], gl.float32, layout=mma)
    for i in range(SHAPE.steps):
        async_copy.wait_group(STAGES - 2)
        w = ring.index(i % STAGES).load(CODES_LAYOUT)
        _copy_codes(ring, codes_ptr, first_column, i + STAGES - 1, SHAPE, COPY_LAYOUT)
        # What comes from the cache is read a step ahead.
        x_now = x
        x = load_rows(x_ptr, first_row, num_rows, i + 1, SHAPE, PAIR, X_LAYOUT)
        if BITS < 16:
            codes = gl.reshape(w, [LINES, PARTS, UNITS // PARTS])
            scale_now, offset_now = scale, offset
            if SHAPE.group != SHAPE.size:
                scale = load_scales(scales_ptr, first_column, i + 1, SHAPE, by_part)
                offset = scale
                if SHAPE.offsets:
                    offset = load_scales(offsets_ptr, first_column, i + 1, SHAPE, by_part)
            w = weights_of(codes, scale_now, offset_now, SHAPE)
        # A group's four inputs of a thread are two pairs of an operand. Each thread keeps what it has: nothing moves.
        w = gl.permute(gl.reshape(w, [SLICES, PRODUCTS, STEP // 16, 4, 2, 2]), (0, 1, 2, 4, 3, 5))
        if BITS < 16:
            r = gl.permute(gl.reshape(x_now, [SLICES, STEP // 16, 4, 2, 2, ROWS]), (0, 1, 3, 2, 4, 5))
        else:
            first, second = _both(x_now)
            r = gl.permute(gl.reshape(gl.join(first, second), [SLICES, STEP // 16, 4, 2, ROWS, 2]), (0, 1, 3, 2, 5, 4))
        w = gl.convert_layout(gl.reshape(w, [SLICES, PRODUCTS, STEP]), left)
        total = mma_v2(w, gl.convert_layout(gl.reshape(r, [SLICES, STEP, ROWS]), right), total)
    async_copy.wait_group(0)
    # Not before: kernels that wait beside this one take its bandwidth.
    if PDL and START == 0:
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
