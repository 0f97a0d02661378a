"""The linear layer of a plain weight with TMA and wgmma: for many rows in several slices, and for few rows.

A program computes tiles of rows x outputs one after the other. TMA copies steps of 64 inputs to shared memory, several steps
ahead of the product, also across slices and tiles, so the pipeline does not drain in between. Products run while the program
waits for the next step. The sums of a tile's slices are kept, until the last one is complete, in one of three places:

    REGISTERS   in registers beside the sum of the current slice: tiles up to 128 x 128
    PROGRAMS    in memory; each slice of a tile is a work item of its own, and `slice_sums.finish` adds the fp32 sums
    MEMORY      in memory; the program reads them back at the end of the tile: tiles up to 128 x 256

For few rows, reading the weights takes most of the time. Their first steps are requested before the previous kernel has ended
(PDL). With `early` the next kernel may request its weights while this one still multiplies, so that memory is never idle.

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.kernels.gluon_support import TensorDescriptor, gl, gluon, hopper, jit
from fledge.kernels.linear.mma_fragments import let_next_start, wait_for_inputs
from fledge.kernels.linear.slice_sums import finish
from fledge.kernels.linear.stored_tile import load_residual, places, store_finished
from fledge.kernels.linear.summation import CHUNK, Summation
from fledge.kernels.triton_support import multiprocessors, overlap

REGISTERS, PROGRAMS, MEMORY = range(3)
AFTER_LOOP, AT_ONCE, AFTER_WAITING = range(3)  # values of START: when the next kernel may start
GROUP = 8  # tiles of rows that are computed at about the same time, so that what they read stays in the L2 cache


class LaunchConfig(NamedTuple):
    """The launch configuration of a program. It changes the speed, never the result."""

    rows: int
    outputs: int  # of the weight: both halves of a gated one
    warps: int  # four, or eight in two groups that share the rows
    stages: int
    sums: int  # REGISTERS, PROGRAMS or MEMORY
    beside: int = 1  # programs per multiprocessor
    early: int = 0  # whether the next kernel may start at once and request its weights


def serves(x_MK: Tensor, weight_OK: Tensor) -> bool:
    """Whether TMA can read the operands: their rows must begin at multiples of 16 bytes."""
    aligned = x_MK.data_ptr() % 16 == 0 and weight_OK.data_ptr() % 16 == 0 and x_MK.shape[1] % 8 == 0
    return aligned and len(x_MK) > 0 and x_MK.dtype == weight_OK.dtype == torch.bfloat16


@lru_cache
def supports_wgmma(device: torch.device) -> bool:
    """Whether the device has wgmma: only Hopper does."""
    return gluon is not None and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache
def layouts(config: LaunchConfig, gated: bool) -> dict[str, Any]:
    """Returns layouts of the sums, a quarter of them, the stored results, and a step's rows and weights in shared memory."""
    columns = config.outputs // (4 if config.sums == MEMORY else 2 if gated else 1)  # columns that are stored at once
    lanes = min(columns // 8, 32)  # lanes that store a row, 16 bytes each
    return {
        "SUMS": gl.NVMMADistributedLayout([3, 0], [config.warps, 1], [16, config.outputs, 16]),
        "QUARTER": gl.NVMMADistributedLayout([3, 0], [config.warps, 1], [16, config.outputs // 4, 16]),
        "STORED": gl.BlockedLayout([1, 8], [32 // lanes, lanes], [config.warps, 1], [1, 0]),
        "STAGED": gl.NVMMASharedLayout(128, 16, 2),
    }


def tma_tiles(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    config: LaunchConfig,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    scale_M: Tensor | None = None,
    pdl_barrier: bool = False,
) -> Tensor:
    """Computes `tiles.tiled_linear`."""
    (num_rows, size), lines = x_MK.shape, len(weight_OK)
    assert x_MK.is_contiguous()
    assert weight_OK.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    assert order.slice_inputs % CHUNK == 0
    halves = 2 if gated else 1
    outputs, columns, slices = lines // halves, config.outputs // halves, -(-size // order.slice_inputs)
    sums = config.sums if slices > 1 else REGISTERS
    assert sums != MEMORY or not gated
    out = torch.empty((num_rows, outputs), dtype=x_MK.dtype, device=x_MK.device)
    parts = out
    if sums != REGISTERS:
        count = slices if sums == PROGRAMS else slices - 1
        parts = torch.empty((count, num_rows, lines), dtype=torch.float32, device=x_MK.device)
    work = -(-num_rows // config.rows) * -(-outputs // columns) * (slices if sums == PROGRAMS else 1)
    shapes = layouts(config, gated)
    _tma_tiles[(min(work, config.beside * multiprocessors(x_MK.device)),)](
        TensorDescriptor.from_tensor(x_MK, [config.rows, CHUNK], shapes["STAGED"]),
        TensorDescriptor.from_tensor(weight_OK, [columns, CHUNK], shapes["STAGED"]),
        bias_O if bias_O is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        scale_M if scale_M is not None else x_MK,
        out,
        parts,
        num_rows,
        SIZE=size,
        OUTPUTS=outputs,
        SLICES=slices,
        SLICE_STEPS=order.slice_inputs // CHUNK,
        SUMS_IN=sums,
        START=AFTER_LOOP if not config.early else AFTER_WAITING if pdl_barrier else AT_ONCE,
        HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_MO is not None,
        HAS_SCALE=scale_M is not None,
        GATED=gated,
        ROWS=config.rows,
        COLUMNS=columns,
        STAGES=config.stages,
        GROUP=GROUP,
        **shapes,
        num_warps=config.warps,
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    if sums == PROGRAMS:
        extras = {"gated": gated, "residual_MO": residual_MO, "scale_M": scale_M, "pdl_barrier": pdl_barrier}
        finish(parts, out.dtype, bias_O, out=out, **extras)
    return out


@jit
def _begin(work, num_rows, SHAPE: gl.constexpr):
    """Returns a work item's first row, first output, slice (if an item is one slice), first step, and last step + 1."""
    ROWS: gl.constexpr = SHAPE[0]
    COLUMNS: gl.constexpr = SHAPE[1]
    GROUP: gl.constexpr = SHAPE[2]
    STEPS: gl.constexpr = SHAPE[3]
    WORK_STEPS: gl.constexpr = SHAPE[4]
    ACROSS: gl.constexpr = (SHAPE[5] + COLUMNS - 1) // COLUMNS
    down = (num_rows + ROWS - 1) // ROWS
    piece, tile = work // (down * ACROSS), work % (down * ACROSS)
    first, within = tile // (GROUP * ACROSS) * GROUP, tile % (GROUP * ACROSS)
    height = gl.minimum(down - first, GROUP)
    row, column = (first + within % height) * ROWS, within // height * COLUMNS
    return row, column, piece, piece * WORK_STEPS, gl.minimum((piece + 1) * WORK_STEPS, STEPS)


@jit
def _after(ahead, num_rows, SHAPE: gl.constexpr):
    """Returns the step to copy after this one: of the same work item, or of the program's next one."""
    work, row, column, step, end = ahead
    step += 1
    if step == end:
        work += gl.num_programs(0)
        row, column, _, step, end = _begin(work, num_rows, SHAPE)
    return work, row, column, step, end


@jit
def _copy_rows(x_desc, xs, arrived, ahead, there):
    hopper.tma.async_copy_global_to_shared(x_desc, [ahead[1], ahead[3] * 64], arrived, xs, pred=there)


@jit
def _copy_weights(w_desc, ws, arrived, ahead, there, SHAPE: gl.constexpr):
    """Starts copying a step's weights, both halves of a gated one. The barrier then expects the bytes of weights and rows."""
    COLUMNS: gl.constexpr = SHAPE[1]
    LINES: gl.constexpr = ws.shape[0]
    hopper.mbarrier.expect(arrived, 128 * (SHAPE[0] + LINES), pred=there)
    if LINES == COLUMNS:
        hopper.tma.async_copy_global_to_shared(w_desc, [ahead[2], ahead[3] * 64], arrived, ws, pred=there)
    else:
        for i in gl.static_range(2):
            half = ws.slice(i * COLUMNS, COLUMNS)
            place = [i * SHAPE[5] + ahead[2], ahead[3] * 64]
            hopper.tma.async_copy_global_to_shared(w_desc, place, arrived, half, pred=there)


@jit
def _multiply(buffers, slot, phase, acc, use_acc):
    """Starts the product of a step when its inputs have arrived."""
    hopper.mbarrier.wait(buffers[2].index(slot), phase)
    weights = buffers[1].index(slot).permute([1, 0])
    return hopper.warpgroup_mma(buffers[0].index(slot), weights, acc, use_acc=use_acc, is_async=True)


@jit
def _turn(x_desc, w_desc, buffers, ahead, turns, num_rows, all_work, SHAPE: gl.constexpr, STAGES: gl.constexpr):
    """Starts copying the next step into the slot of the last completed product, and advances to the next product's slot."""
    slot, phase, free = turns
    there = ahead[0] < all_work
    _copy_weights(w_desc, buffers[1].index(free), buffers[2].index(free), ahead, there, SHAPE)
    _copy_rows(x_desc, buffers[0].index(free), buffers[2].index(free), ahead, there)
    free = slot
    slot += 1
    if slot == STAGES:
        slot, phase = 0, phase ^ 1
    return _after(ahead, num_rows, SHAPE), (slot, phase, free)


@jit
def _tma_tiles(
    x_desc,
    w_desc,
    bias_ptr,
    residual_ptr,
    scale_ptr,
    out_ptr,
    parts_ptr,
    num_rows,
    SIZE: gl.constexpr,
    OUTPUTS: gl.constexpr,
    SLICES: gl.constexpr,
    SLICE_STEPS: gl.constexpr,
    SUMS_IN: gl.constexpr,
    START: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    GATED: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    SUMS: gl.constexpr,
    QUARTER: gl.constexpr,
    STORED: gl.constexpr,
    STAGED: gl.constexpr,
    PDL: gl.constexpr,
):
    APART: gl.constexpr = SUMS_IN == 1
    IN_MEMORY: gl.constexpr = SUMS_IN == 2
    LINES: gl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    STEPS: gl.constexpr = (SIZE + 63) // 64
    ACROSS: gl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    SHAPE: gl.constexpr = (ROWS, COLUMNS, GROUP, STEPS, SLICE_STEPS if APART else STEPS, OUTPUTS)
    dtype: gl.constexpr = out_ptr.dtype.element_ty

    xs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, 64], STAGED)
    ws = gl.allocate_shared_memory(dtype, [STAGES, LINES, 64], STAGED)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(arrived.index(i), count=1)
    hopper.fence_async_shared()
    programs = gl.num_programs(0)
    all_work = (num_rows + ROWS - 1) // ROWS * ACROSS * (SLICES if APART else 1)
    stride = num_rows.to(gl.int64) * (2 * OUTPUTS if GATED else OUTPUTS)  # between the sums of slices

    # The first steps. Weights do not depend on the previous kernel, so their copies start before the wait.
    row, column, _, step, end = _begin(gl.program_id(0), num_rows, SHAPE)
    begin = (gl.program_id(0), row, column, step, end)
    ahead = begin
    for i in gl.static_range(STAGES - 1):
        _copy_weights(w_desc, ws.index(i), arrived.index(i), ahead, ahead[0] < all_work, SHAPE)
        ahead = _after(ahead, num_rows, SHAPE)
    if PDL:
        if START == 1:
            let_next_start()
        wait_for_inputs()
        if START == 2:
            let_next_start()
    ahead = begin
    for i in gl.static_range(STAGES - 1):
        _copy_rows(x_desc, xs.index(i), arrived.index(i), ahead, ahead[0] < all_work)
        ahead = _after(ahead, num_rows, SHAPE)

    buffers = (xs, ws, arrived)
    turns = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(STAGES - 1))  # slot of the product, its phase, free slot
    for work in range(gl.program_id(0), all_work, programs):
        own_row, own_column, piece, own_step, own_end = _begin(work, num_rows, SHAPE)
        zeros = gl.zeros([ROWS, LINES], gl.float32, layout=SUMS)
        acc, total, residual = zeros, zeros, 0
        for s in gl.static_range(1 if APART else SLICES):
            # Waits for all products but the newest: a slot is then free for the next step. The previous slice's sum is
            # complete once the first product of this slice, in other registers, has started.
            done = acc
            acc = _multiply(buffers, turns[0], turns[1], zeros, False)
            if s == 0 or IN_MEMORY:
                acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            else:
                acc, done = hopper.warpgroup_mma_wait(1, deps=[acc, done])
                total = done if s == 1 else total + done
            ahead, turns = _turn(x_desc, w_desc, buffers, ahead, turns, num_rows, all_work, SHAPE, STAGES)
            if HAS_RESIDUAL and SUMS_IN == 0 and s == SLICES - 1:  # arrives with the sums; earlier, no registers are free
                residual = load_residual(residual_ptr, own_row, own_column, num_rows, OUTPUTS, ROWS, COLUMNS, STORED)
            steps = own_end - own_step if APART else gl.minimum(STEPS - s * SLICE_STEPS, SLICE_STEPS)
            for _k in range(1, steps):
                acc = _multiply(buffers, turns[0], turns[1], acc, True)
                acc = hopper.warpgroup_mma_wait(1, deps=[acc])
                ahead, turns = _turn(x_desc, w_desc, buffers, ahead, turns, num_rows, all_work, SHAPE, STAGES)
            if IN_MEMORY and s < SLICES - 1:
                acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                place, inside = places(own_row, own_column, num_rows, OUTPUTS, ROWS, COLUMNS, LINES, SUMS)
                gl.store(parts_ptr + s * stride + place, acc, mask=inside)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        total = acc if APART or SLICES == 1 else total + acc
        if PDL and START == 0 and work + programs >= all_work:
            let_next_start()
        extras = (bias_ptr, scale_ptr, out_ptr, own_row, num_rows)
        if APART:
            place, inside = places(own_row, own_column, num_rows, OUTPUTS, ROWS, COLUMNS, LINES, SUMS)
            gl.store(parts_ptr + piece * stride + place, total, mask=inside)
        elif IN_MEMORY:
            gl.static_assert(not GATED)
            low, high = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))
            for i in gl.static_range(4):  # a quarter at a time: more does not fit the registers
                half = low if i < 2 else high
                both = gl.split(gl.permute(gl.reshape(half, [ROWS, 2, COLUMNS // 4]), (0, 2, 1)))
                quarter = gl.convert_layout(both[i % 2], QUARTER)
                column = own_column + i * (COLUMNS // 4)
                place, inside = places(own_row, column, num_rows, OUTPUTS, ROWS, COLUMNS // 4, COLUMNS // 4, QUARTER)
                total = gl.load(parts_ptr + place, mask=inside, other=0.0)
                for j in gl.static_range(1, SLICES - 1):
                    total += gl.load(parts_ptr + j * stride + place, mask=inside, other=0.0)
                total += quarter
                if HAS_RESIDUAL:
                    residual = load_residual(residual_ptr, own_row, column, num_rows, OUTPUTS, ROWS, COLUMNS // 4, STORED)
                store_finished(
                    total, residual, column, *extras, OUTPUTS, HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, GATED, QUARTER, STORED
                )
        else:
            store_finished(
                total, residual, own_column, *extras, OUTPUTS, HAS_BIAS, HAS_RESIDUAL, HAS_SCALE, GATED, SUMS, STORED
            )
