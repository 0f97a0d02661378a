"""Linear layers as tiles of outputs x rows on tensor cores, in the order of `summation`, for any number of rows.

    few rows    a program computes all slices of its outputs, one per warp (or in sequence); no second kernel is needed
    some rows   each slice of a tile is a program of its own; `slice_sums` adds their fp32 sums
    many rows   a program computes the slices one after the other

Weights are the first operand of a product, rows the second. The codes of a quantised weight (`kernels.quantization`) are
converted to the activations' type (`codes`), and the sums of each step are scaled.

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.linear.codes import Codes, add_product, scaled, units_of
from fledge.kernels.linear.slice_sums import finish, finished, in_order, silu_times
from fledge.kernels.linear.summation import Summation, inputs_of_a_sum
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.sample import PartialArgmax
from fledge.kernels.triton_support import (
    INT_MAX,
    jit,
    let_next_start,
    next_power_of_2,
    overlap,
    prefetch,
    shared_memory,
    tl,
    wait_for_inputs,
)

MANY_ROWS = 512  # from so many rows on, a program computes the slices of a tile one after the other


class Tile(NamedTuple):
    """The launch configuration of a program. It changes the speed, never the result."""

    outputs: int
    rows: int
    inputs: int  # per step
    warps: int
    stages: int


# Tiles by the largest number of rows. Measured on an H200 with the shapes of 135M to 8B (`benchmarks/gpu_linears.py`).
ONE_SLICE = {16: Tile(64, 16, 128, 4, 5), 32: Tile(64, 32, 128, 4, 5), 64: Tile(64, 64, 128, 4, 4)}
WIDE_64 = Tile(128, 64, 64, 4, 4)  # 33 to 64 rows and 8,192 or more outputs: 66 instead of 72 µs for 28,672 x 4,096
BESIDE = {2: Tile(16, 16, 128, 2, 5), 4: Tile(16, 16, 64, 4, 8)}  # few rows, by the number of slices: one slice per warp
APART = {32: Tile(64, 32, 64, 4, 6), 128: Tile(64, 64, 64, 4, 6)}  # each slice is a program
SMALL = Tile(64, 64, 64, 4, 4)  # short slices, one after the other
LARGE = Tile(128, 128, 64, 8, 4)
# Tiles of quantised weights. A step is unpacked, stored, loaded and multiplied in sequence, so several programs must share a
# multiprocessor, with few stages each. Up to 16,384 outputs there are enough programs only if each slice is one.
QUANTISED = {16: Tile(64, 16, 64, 4, 4), 32: Tile(64, 32, 64, 4, 4), 128: Tile(64, 64, 64, 4, 4)}
QUANTISED_SPLIT = 16384
# Most rows for which a program prefetches its first weights into the L2 cache before it waits for the previous kernel. Each
# linear of 1.5B and 8B takes 4 to 9 µs more than reading its bytes, and memory is idle between two kernels.
PREFETCH_ROWS = 64


def choose_tile(num_rows: int, outputs: int, order: Summation, bits: int, shared_bytes: int) -> tuple[Tile, bool]:
    """Returns the tile and whether each slice is a program. `shared_bytes`: the most shared memory of a program."""
    tile, split = _measured_tile(num_rows, outputs, order, bits)
    # Shared memory holds one step less than there are stages with mma.sync. With wgmma it holds all, at most 128 KB, on cards
    # with 227 KB. On cards with 99 KB four slices side by side, 112 KB, do not fit.
    step_bytes = 2 * tile.inputs * (tile.outputs + tile.rows) * slices_beside(tile, split, order, bits)
    while tile.stages > 2 and (tile.stages - 1) * step_bytes > shared_bytes:
        tile = tile._replace(stages=tile.stages // 2)
    return tile, split


def slices_beside(tile: Tile, split: bool, order: Summation, bits: int) -> int:
    """Returns how many slices a program computes side by side."""
    return 1 if split or bits < 16 or tile.rows > 16 else order.slices


def _measured_tile(num_rows: int, outputs: int, order: Summation, bits: int) -> tuple[Tile, bool]:
    if bits < 16:
        tile = next((tile for most, tile in QUANTISED.items() if num_rows <= most), LARGE)
        return tile, order.slices > 1 and outputs <= QUANTISED_SPLIT and tile is not LARGE
    if order.slices == 1:
        if 32 < num_rows <= 64 and outputs >= 8192:
            return WIDE_64, False
        return next((tile for most, tile in ONE_SLICE.items() if num_rows <= most), LARGE), False
    if num_rows <= 16:
        return BESIDE[order.slices], False
    if num_rows >= MANY_ROWS:
        return LARGE, False
    if order.slice_inputs <= 256 and num_rows > 32 and (num_rows > 128 or outputs > 2048):
        return SMALL, False
    return next((tile for most, tile in APART.items() if num_rows <= most), LARGE), True


def tiled_linear(
    x_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    scale_M: Tensor | None = None,
    pdl_barrier: bool = False,
    tile: Tile | None = None,
    split: bool = False,
) -> Tensor:
    """Computes a linear layer. `scale_M`: a factor for each row's sums. `tile` and `split` replace `choose_tile`'s result."""
    codes, _, _, bits, _ = weight_parts(weight)
    out = torch.empty((len(x_MK), len(codes) // (2 if gated else 1)), dtype=x_MK.dtype, device=x_MK.device)
    if len(x_MK):
        if tile is None:
            tile, split = choose_tile(len(x_MK), len(codes), order, bits, shared_memory(x_MK.device))
        extras = {"bias_O": bias_O, "residual_MO": residual_MO, "scale_M": scale_M, "pdl_barrier": pdl_barrier}
        _launch(x_MK, weight, out, order, tile, split, gated=gated, **extras)
    return out


def tiled_head(
    x_ND: Tensor,
    weight_VD: Tensor | QuantizedWeight,
    order: Summation,
    ids_V: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> PartialArgmax:
    """Returns the best token of each block of the vocabulary, for few rows. `x_ND`: after the norm. Logits are not stored."""
    assert order.slices == 1
    vocab_size = len(weight_parts(weight_VD)[0])
    tile = tile or choose_tile(len(x_ND), vocab_size, order, 16, shared_memory(x_ND.device))[0]
    num_blocks = -(-vocab_size // tile.outputs)
    best = torch.empty((len(x_ND), num_blocks), dtype=torch.float32, device=x_ND.device)
    ids = torch.empty((len(x_ND), num_blocks), dtype=torch.int32, device=x_ND.device)
    _launch(x_ND, weight_VD, best, order, tile, False, best_ids=ids, token_ids=ids_V)
    return PartialArgmax(best, ids)


def weight_parts(weight: Tensor | QuantizedWeight) -> tuple[Tensor, Tensor | None, Tensor | None, int, int]:
    """Returns codes, scales, offsets, bits and group size. A plain weight is its own codes, of 16 bits."""
    if isinstance(weight, QuantizedWeight):
        return weight.codes, weight.scales, weight.offsets, weight.bits, weight.group_size
    return weight, None, None, 16, 1


def _launch(
    x_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    out: Tensor,
    order: Summation,
    tile: Tile,
    split: bool,
    *,
    gated: bool = False,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    scale_M: Tensor | None = None,
    best_ids: Tensor | None = None,
    token_ids: Tensor | None = None,
    pdl_barrier: bool = False,
) -> None:
    codes, scales, offsets, bits, group = weight_parts(weight)
    (num_rows, size), outputs = x_MK.shape, codes.shape[0] // (2 if gated else 1)
    assert x_MK.is_contiguous()
    assert codes.is_contiguous()
    assert residual_MO is None or residual_MO.is_contiguous()
    step = tile.inputs
    while order.slice_inputs % step:
        step //= 2
    shape = Codes(size, bits, step=step)
    if isinstance(weight, QuantizedWeight):
        part = inputs_of_a_sum(order, weight)
        scales_slices = part == order.slice_inputs
        shape = Codes(size, bits, group, offsets is not None, scales_slices, step if scales_slices else part)
    # Slices run side by side in one program, one after the other in it, or in a program each.
    beside = slices_beside(tile, split, order, bits)
    after = 1 if split else order.slices // beside
    columns = tile.outputs // (2 if gated else 1)
    grid = (-(-num_rows // tile.rows), -(-outputs // columns), order.slices if split else 1)
    is_prefetched = bits == 16 and num_rows <= PREFETCH_ROWS
    target = torch.empty((order.slices, num_rows, codes.shape[0]), dtype=torch.float32, device=x_MK.device) if split else out
    _tiles[grid](
        x_MK,
        units_of(codes, bits),
        scales if scales is not None else x_MK,
        offsets if offsets is not None else x_MK,
        bias_O if bias_O is not None else x_MK,
        residual_MO if residual_MO is not None else x_MK,
        scale_M if scale_M is not None else x_MK,
        target,
        best_ids if best_ids is not None else x_MK,
        token_ids if token_ids is not None else x_MK,
        num_rows,
        CODES=shape,
        OUTPUTS=outputs,
        SLICE=order.slice_inputs,
        BESIDE=beside,
        AFTER=after,
        SPLIT=split,
        PREFETCH=next_power_of_2(tile.stages) * step if is_prefetched else 0,
        HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_MO is not None,
        HAS_SCALE=scale_M is not None,
        IS_HEAD=best_ids is not None,
        HAS_IDS=token_ids is not None,
        GATED=gated,
        ROWS=tile.rows,
        COLUMNS=columns,
        dtype=_DTYPES[x_MK.dtype],
        num_warps=tile.warps,
        num_stages=tile.stages * 2 // x_MK.element_size(),  # fp32 values take twice the shared memory
        enable_fp_fusion=False,
        **overlap(x_MK),
    )
    if split:
        extras = {"residual_MO": residual_MO, "scale_M": scale_M, "pdl_barrier": pdl_barrier}
        finish(target, out.dtype, bias_O, gated=gated, out=out, **extras)


_DTYPES = {} if tl is None else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@jit
def _tiles(
    x_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    residual_ptr,
    scale_ptr,
    out_ptr,
    best_ids_ptr,
    token_ids_ptr,
    num_rows,
    CODES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SLICE: tl.constexpr,
    BESIDE: tl.constexpr,
    AFTER: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_HEAD: tl.constexpr,
    HAS_IDS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    dtype: tl.constexpr,
    PDL: tl.constexpr,
):
    SIZE: tl.constexpr = CODES.size
    BITS: tl.constexpr = CODES.bits
    STEP: tl.constexpr = CODES.step
    LINES: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    line = tl.arange(0, LINES)
    column_l = tl.program_id(1) * COLUMNS + line % COLUMNS
    inside = column_l < OUTPUTS
    line = (column_l + line // COLUMNS * OUTPUTS).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = row < num_rows
    row64 = row.to(tl.int64)
    first = tl.program_id(2) * SLICE if SPLIT else 0
    if PDL and PREFETCH:
        for i in tl.static_range(BESIDE):
            prefetch(weight_ptr + tl.where(inside, line, 0) * SIZE, first + i * SLICE, SIZE, PREFETCH)
    wait_for_inputs(PDL)
    if BESIDE == 1:
        total = tl.zeros([LINES, ROWS], tl.float32)
        acc = total
        END: tl.constexpr = SLICE * AFTER
        for start in range(0, END, STEP):
            k = first + start + tl.arange(0, STEP)
            x = tl.load(x_ptr + row64[:, None] * SIZE + k[None, :], mask=row_inside[:, None] & (k < SIZE)[None, :], other=0.0)
            if BITS == 16:
                mask = inside[:, None] & (k < SIZE)[None, :]
                w = tl.load(weight_ptr + line[:, None] * SIZE + k[None, :], mask=mask, other=0.0)
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            else:
                weight = (weight_ptr, scales_ptr, offsets_ptr, line, inside, first + start)
                acc = add_product(acc, tl.trans(x), *weight, LINES, CODES, dtype)
            if AFTER > 1 and (start + STEP) % SLICE == 0:
                if CODES.scales_slices:
                    acc = scaled(acc, scales_ptr, line, inside, 0, tl.zeros([LINES, ROWS], tl.float32), CODES)
                total += acc
                acc = tl.zeros([LINES, ROWS], tl.float32)
        if AFTER == 1:
            total = acc
            if CODES.scales_slices:
                total = scaled(acc, scales_ptr, line, inside, 0, tl.zeros([LINES, ROWS], tl.float32), CODES)
    else:
        slices = tl.zeros([BESIDE, LINES, ROWS], tl.float32)
        begin = tl.arange(0, BESIDE)[:, None, None] * SLICE
        for start in range(0, SLICE, STEP):
            k = begin + start + tl.arange(0, STEP)[None, None, :]
            mask_x = row_inside[None, :, None] & (k < SIZE)
            x = tl.load(x_ptr + row64[None, :, None] * SIZE + k, mask=mask_x, other=0.0)
            w = tl.load(weight_ptr + line[None, :, None] * SIZE + k, mask=inside[None, :, None] & (k < SIZE), other=0.0)
            slices = tl.dot(w, tl.permute(x, (0, 2, 1)), slices, input_precision="ieee")
        total = in_order(slices, BESIDE)

    # Not earlier: the next kernel would take memory bandwidth from this one. A layer of 8B, one row: 115 instead of 124 µs.
    let_next_start(PDL)
    if SPLIT:
        WEIGHT_ROWS: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
        place = (tl.program_id(2) * num_rows + row64)[None, :] * WEIGHT_ROWS + line[:, None]
        tl.store(out_ptr + place, total, mask=inside[:, None] & row_inside[None, :])
    else:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        kept = (column < OUTPUTS)[:, None] & row_inside[None, :]
        if GATED:
            total, up = tl.split(tl.permute(tl.reshape(total, (2, COLUMNS, ROWS)), (1, 2, 0)))
        rows, columns = row64[None, :], column[:, None]
        total = finished(total, bias_ptr, scale_ptr, rows, columns, kept, OUTPUTS, HAS_BIAS, HAS_SCALE, False)
        if GATED:
            up = finished(up, bias_ptr, scale_ptr, rows, columns, kept, OUTPUTS, HAS_BIAS, HAS_SCALE, True)
            total = silu_times(total, up, dtype)
        if IS_HEAD:
            token = column
            if HAS_IDS:
                token = tl.load(token_ids_ptr + column, mask=column < OUTPUTS, other=INT_MAX).to(tl.int32)
            # Rounded to the network's type, as stored logits are, so that the same logits tie.
            logits = tl.where((column < OUTPUTS)[:, None], total.to(dtype).to(tl.float32), float("-inf"))
            top = tl.max(logits, axis=0)
            least = tl.min(tl.where(logits == top[None, :], token[:, None], INT_MAX), axis=0)
            place = row64 * tl.num_programs(1) + tl.program_id(1)
            tl.store(out_ptr + place, top, mask=row_inside)
            tl.store(best_ids_ptr + place, least, mask=row_inside)
        else:
            place = rows * OUTPUTS + columns
            if HAS_RESIDUAL:
                total = tl.load(residual_ptr + place, mask=kept, other=0.0).to(tl.float32) + total.to(dtype).to(tl.float32)
            tl.store(out_ptr + place, total.to(dtype), mask=kept)
