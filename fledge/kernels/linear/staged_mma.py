"""The linear layer for 5 to 128 rows and a narrow, plain weight: weights in registers, rows in shared memory.

Like `register_mma`, and with the same bits: a warp has a slice of 16 or 32 outputs in registers, loaded while the previous
kernel still runs. But a program's 16, 32 or 64 rows are copied to shared memory without passing through registers. All copies
are requested at once, and 16 rows at a time are multiplied as they arrive. So the weight is read once for all rows of a
program, and the programs are few enough to run at the same time. `register_mma` has more than can run at once from about 300
programs on, and `tiles` computes the norm in a separate kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.kernels.gluon_support import async_copy, gl, jit, mma_v2
from fledge.kernels.linear.mma_fragments import (
    Shape,
    add_squares,
    grouped_left,
    grouped_right,
    let_next_start,
    load_norm,
    load_weights,
    norm_scale,
    output_places,
    silu_times,
    times,
    wait_for_inputs,
)
from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.register_mma import SLICES
from fledge.kernels.linear.summation import CHUNK, Summation
from fledge.kernels.triton_support import overlap

TILE = 16  # rows multiplied at once


class LaunchConfig(NamedTuple):
    """The launch configuration of a program. It changes the speed, never the result."""

    rows: int
    columns: int  # outputs; of each half of a gated weight
    groups: int = 1  # groups of four warps; the groups divide the outputs


# In order of size. Programs of four warps that run at once on a multiprocessor of an H200: two with 96 registers of weights per
# thread, three with 48.
CONFIGS = (LaunchConfig(32, 16), LaunchConfig(32, 32), LaunchConfig(64, 16), LaunchConfig(64, 32), LaunchConfig(64, 32, 2))
WEIGHT_REGISTERS = 96  # most per thread


def choose_config(
    num_rows: int, outputs: int, order: Summation, gated: bool, num_multiprocessors: int, shared_bytes: int
) -> LaunchConfig | None:
    """Returns the smallest programs that all run at once, or None. `outputs`: those of one half of a gated weight."""
    for config in CONFIGS:
        programs = -(-num_rows // config.rows) * -(-outputs // config.columns)
        if 0 < programs <= programs_at_once(config, order, gated, shared_bytes) * num_multiprocessors:
            return config
    return None


def programs_at_once(config: LaunchConfig, order: Summation, gated: bool, shared_bytes: int) -> int:
    """Returns how many programs run at once on a multiprocessor with `shared_bytes`; each takes 1 KB more for the system."""
    products = config.columns * (2 if gated else 1)
    registers = products // config.groups * order.slice_inputs // CHUNK
    if registers > WEIGHT_REGISTERS:
        return 0
    memory = config.rows * SLICES * (2 * order.slice_inputs + 4 * products + 4)
    by_registers = (2 if registers > 48 else 3) // config.groups
    return min(shared_bytes // (memory + 1024), by_registers)


@lru_cache
def layouts(products: int, groups: int) -> dict[str, Any]:
    """Returns layouts like those of `register_mma` for `groups` times four warps; neighbouring warps have the same slice."""
    other_group = [16] if groups == 2 else []
    more = [bit for bit in (16, 32) if bit < products and bit not in other_group]
    weight = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 0, 32], [0, 8, 0], *([0, bit, 0] for bit in more)],
        lane_bases=[[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[*([0, bit, 0] for bit in other_group), [1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[SLICES, products, 64],
    )
    x = gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0], [0, 16, 0], [0, 32, 0], [0, 0, 8]],
        lane_bases=[[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        warp_bases=[*([0, 0, 0] for _ in other_group), [1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[SLICES, 64, TILE],
    )
    return {"W_LAYOUT": weight, "X_LAYOUT": x}


def staged_mma(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    config: LaunchConfig,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    pdl_barrier: bool = False,
) -> Tensor:
    """Computes `dispatch.linear` where `order.scales_sums`."""
    num_rows, size = x_MK.shape
    assert x_MK.is_contiguous()
    assert weight_OK.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    assert order.scales_sums
    assert order.slices == SLICES
    outputs = weight_OK.shape[0] // (2 if gated else 1)
    shape = Shape(config.rows, config.columns, gated, SLICES, order.slice_inputs, CHUNK, size, outputs)
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    _staged_mma[(-(-num_rows // config.rows), -(-outputs // config.columns))](
        x_MK,
        weight_OK,
        bias_O if bias_O is not None else x_MK,
        norm.weight if norm is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        out,
        num_rows,
        norm.eps if norm is not None else 0.0,
        SHAPE=shape,
        GROUPS=config.groups,
        HAS_BIAS=bias_O is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual_MO is not None,
        PDL_BARRIER=pdl_barrier,
        **layouts(shape.products, config.groups),
        num_warps=SLICES * config.groups,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    return out


@jit
def _copy_rows(staged, x_ptr, first_row, num_rows, chunk, SHAPE: gl.constexpr, GROUPS: gl.constexpr):
    """Starts copying a chunk [slices, rows, 64] to shared memory, 16 bytes per thread."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [SHAPE.slices, GROUPS, 1], [2, 1, 0])
    piece = gl.arange(0, SHAPE.slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = first_row + gl.arange(0, staged.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    place = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    k = (piece * SHAPE.steps + chunk) * 64 + place
    async_copy.async_copy_global_to_shared(staged, x_ptr + row * SHAPE.size + k, mask=(row < num_rows) & (k < SHAPE.size))


@jit
def _in_order(parts, SHAPE: gl.constexpr, answer: gl.constexpr):
    """Adds the sums of four slices [slices * products, rows] in order; returns both halves of a gated weight separately."""
    gl.static_assert(SHAPE.slices == 4)
    HALVES: gl.constexpr = SHAPE.products // SHAPE.columns
    COLUMNS: gl.constexpr = SHAPE.columns
    ROWS: gl.constexpr = parts.shape[1]
    low, high = gl.split(gl.permute(gl.reshape(parts, [2, 2, HALVES, COLUMNS, ROWS]), (2, 3, 4, 1, 0)))
    first, second = gl.split(low)
    third, fourth = gl.split(high)
    total = ((first + second) + third) + fourth
    if HALVES == 1:
        out = gl.convert_layout(gl.reshape(total, [COLUMNS, ROWS]), answer)
        up = out
    else:
        out, up = gl.split(gl.permute(total, (1, 2, 0)))
        out, up = gl.convert_layout(out, answer), gl.convert_layout(up, answer)
    return out, up


@jit
def _staged_mma(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    eps,
    SHAPE: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    PDL_BARRIER: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    X_LAYOUT: gl.constexpr,
    PDL: gl.constexpr,
):
    TILE: gl.constexpr = 16
    TILES: gl.constexpr = SHAPE.rows // TILE
    SLICES: gl.constexpr = SHAPE.slices
    CHUNKS: gl.constexpr = SHAPE.steps
    PRODUCTS: gl.constexpr = SHAPE.products
    COLUMNS: gl.constexpr = SHAPE.columns
    OUTPUTS: gl.constexpr = SHAPE.outputs
    ROWS: gl.constexpr = SHAPE.rows
    WARPS: gl.constexpr = SLICES * GROUPS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[SLICES, GROUPS, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=4)
    answer: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, WARPS], [0, 1])
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
    # Avoids bank conflicts: the same 16 bytes of eight neighbouring rows are in different banks.
    rows_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[2, 1, 0])
    staged = ()  # separate buffers: the compiler puts a barrier between copies to the same one
    for _ in gl.static_range(TILES * CHUNKS):
        staged = staged + (gl.allocate_shared_memory(dtype, [SLICES, TILE, 64], rows_layout),)  # noqa: RUF005
    # The same here: outputs are contiguous, and the same four outputs of eight neighbouring rows are in different banks.
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, order=[0, 1])
    sums = gl.allocate_shared_memory(gl.float32, [SLICES * PRODUCTS, ROWS], sums_layout)
    squares = gl.allocate_shared_memory(gl.float32, [SLICES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    if PDL:
        wait_for_inputs()
        if PDL_BARRIER:
            let_next_start()
    for tile in gl.static_range(TILES):
        for i in gl.static_range(CHUNKS):
            target = staged[tile * CHUNKS + i]
            _copy_rows(target, x_ptr, first_row + tile * TILE, num_rows, i, SHAPE, GROUPS)
        async_copy.commit_group()
    column, place, inside = output_places(first_row, first_column, num_rows, SHAPE, answer)
    residual = gl.zeros([COLUMNS, ROWS], dtype, layout=answer)
    if HAS_RESIDUAL:
        residual = gl.load(residual_ptr + place, mask=inside, other=0.0)

    for tile in gl.static_range(TILES):
        async_copy.wait_group(TILES - 1 - tile)
        total = gl.zeros([SLICES, PRODUCTS, TILE], gl.float32, layout=mma)
        square = gl.zeros([SLICES, 64, TILE], gl.float32, layout=X_LAYOUT)
        for i in gl.static_range(CHUNKS):
            x = staged[tile * CHUNKS + i].permute([0, 2, 1]).load(X_LAYOUT)
            if HAS_NORM:
                square = add_squares(square, x)
                x = times(x, norms[i])
            total = mma_v2(grouped_left(ws[i], left), grouped_right(x, right), total)
        sums.slice(tile * TILE, TILE, dim=1).store(gl.reshape(total, [SLICES * PRODUCTS, TILE]))
        if HAS_NORM:
            squares.slice(tile * TILE, TILE, dim=1).store(gl.sum(square, axis=1))
    out, up = _in_order(sums.load(answer), SHAPE, answer)
    if HAS_NORM:
        total_square = squares.slice(0, 1).load(answer)
        for i in gl.static_range(1, SLICES):
            total_square = total_square + squares.slice(i, 1).load(answer)
        scale = norm_scale(total_square, eps, SHAPE.size)
        out, up = out * scale, up * scale
    if HAS_BIAS:
        out += gl.load(bias_ptr + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
    if SHAPE.gated:
        if HAS_BIAS:
            up += gl.load(bias_ptr + OUTPUTS + column, mask=column < OUTPUTS, other=0.0).to(gl.float32)
        out = silu_times(out, up, dtype)
    if HAS_RESIDUAL:
        out = residual.to(gl.float32) + out.to(dtype).to(gl.float32)
    gl.store(out_ptr + place, out.to(dtype), mask=inside)
