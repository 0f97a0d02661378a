"""The final norm, the head and the greedy choice in one kernel, for few rows: logits never leave the chip.

Each program gives the best of its block of the vocabulary; see `sample.Choice`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.linear.dispatch import HEAD_TABLE, case_of, choose_kernel, linear
from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.register_head import register_head
from fledge.kernels.linear.shared_mma import TILE, two_parts, whole_products
from fledge.kernels.linear.tiled import QUICK, parts_of, tiled_weights
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.sample import Choice, Draws, choose
from fledge.kernels.triton_support import jit, let_next_start, overlap, tl, use_triton, wait_for_inputs

BLOCK = 64  # of the vocabulary, a program: what fits its registers while the inputs are not there yet
WARPS = 4


def head_choice(
    x_ND: Tensor,
    norm: NormLike,
    weight_VD: Tensor | QuantizedWeight,
    draws: Draws | None = None,
    num_new: int = 1,
    ahead: int = 0,
    ids_V: Tensor | None = None,
) -> Choice:
    """`x_ND`: before the final norm. The rest is as in `sample.choose`."""
    if draws is None and use_triton(x_ND):
        kernel = choose_kernel(case_of(x_ND, weight_VD), HEAD_TABLE)
        if kernel != "logits":
            return FEW_ROWS[kernel](x_ND, norm, weight_VD, ids_V)
    if isinstance(weight_VD, QuantizedWeight):
        return choose(linear(x_ND, weight_VD, norm=norm), draws, num_new, ahead, ids_V)
    if use_triton(x_ND):
        hidden = add_rms_norm(x_ND, None, norm.weight, norm.eps)
    else:
        hidden = F.rms_norm(x_ND, norm.weight.shape, norm.weight, norm.eps)
    return choose(F.linear(hidden, weight_VD), draws, num_new, ahead, ids_V)


def head_choice_triton(x_ND: Tensor, norm: NormLike, weight_VD: Tensor, ids_V: Tensor | None = None) -> Choice:
    (num_rows, size), vocab_size = x_ND.shape, weight_VD.shape[0]
    assert x_ND.is_contiguous()
    assert weight_VD.is_contiguous()
    num_blocks = -(-vocab_size // BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=x_ND.device)
    ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=x_ND.device)
    _head_choice[(-(-num_rows // TILE), num_blocks)](
        x_ND,
        norm.weight,
        weight_VD,
        ids_V if ids_V is not None else ids,
        best,
        ids,
        num_rows,
        norm.eps,
        **two_parts(size, 16 * WARPS),
        SIZE=size,
        VOCAB=vocab_size,
        BLOCKS=num_blocks,
        ROWS=TILE,
        COLUMNS=BLOCK,
        SPLITS=WARPS,
        HAS_IDS=ids_V is not None,
        num_warps=WARPS,
        **overlap(x_ND),
    )
    return Choice(best, ids)


def quantized_head_choice_triton(x_ND: Tensor, norm: NormLike, weight: QuantizedWeight, ids_V: Tensor | None = None) -> Choice:
    (num_rows, size), vocab_size = x_ND.shape, weight.scales.shape[0]
    codes, scales, offsets, bits, group = parts_of(weight)
    hidden = add_rms_norm(x_ND, None, norm.weight, norm.eps)
    num_blocks = -(-vocab_size // BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=x_ND.device)
    ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=x_ND.device)
    _quantized_head_choice[(-(-num_rows // TILE), num_blocks)](
        hidden,
        codes,
        scales,
        offsets if offsets is not None else scales,
        ids_V if ids_V is not None else ids,
        best,
        ids,
        num_rows,
        SIZE=size,
        VOCAB=vocab_size,
        BLOCKS=num_blocks,
        BITS=bits,
        GROUP=group,
        HAS_OFFSETS=offsets is not None,
        HAS_IDS=ids_V is not None,
        ROWS=TILE,
        COLUMNS=BLOCK,
        STEP=QUICK.inputs // 2,
        num_warps=WARPS,
        num_stages=QUICK.stages,
        **overlap(x_ND),
    )
    return Choice(best, ids)


# By their names in `dispatch.HEAD_TABLE`.
FEW_ROWS: dict[str, Callable[..., Choice]] = {
    "register_head": register_head,
    "shared_head": head_choice_triton,
    "tiled_head": quantized_head_choice_triton,
}


@jit
def _keep_best(logits, ids, row, row_inside, inside, best_ptr, ids_ptr, BLOCKS: tl.constexpr, dtype: tl.constexpr):
    # Rounded like the logits of a network in this type, so that ties are the same ones.
    logits = logits.to(dtype).to(tl.float32)
    logits = tl.where(inside[None, :], logits, float("-inf"))
    top = tl.max(logits, axis=1)
    first = tl.min(tl.where(logits == top[:, None], ids[None, :], 2147483647), axis=1)
    place = row * BLOCKS + tl.program_id(1)
    tl.store(best_ptr + place, top, mask=row_inside)
    tl.store(ids_ptr + place, first, mask=row_inside)


@jit
def _quantized_head_choice(
    x_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    target_ids_ptr,
    best_ptr,
    ids_ptr,
    num_rows,
    SIZE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, inside = row < num_rows, column < VOCAB
    ids = column
    if HAS_IDS:
        ids = tl.load(target_ids_ptr + column, mask=inside, other=2147483647).to(tl.int32)
    dtype = x_ptr.dtype.element_ty
    places = column.to(tl.int64)
    logits = tl.zeros([ROWS, COLUMNS], tl.float32)
    wait_for_inputs(PDL)
    for start in range(0, SIZE, STEP):
        k = start + tl.arange(0, STEP)
        x = tl.load(x_ptr + row[:, None] * SIZE + k[None, :], mask=row_inside[:, None] & (k < SIZE)[None, :], other=0.0)
        w = tiled_weights(
            weight_ptr, scales_ptr, offsets_ptr, places, inside, start, SIZE, BITS, GROUP, HAS_OFFSETS, COLUMNS, STEP, dtype
        )
        logits = tl.dot(x, tl.trans(w), logits, input_precision="ieee")
    _keep_best(logits, ids, row, row_inside, inside, best_ptr, ids_ptr, BLOCKS, dtype)


@jit
def _head_choice(
    x_ptr,
    norm_ptr,
    weight_ptr,
    target_ids_ptr,
    best_ptr,
    ids_ptr,
    num_rows,
    eps,
    PART1: tl.constexpr,
    PART2: tl.constexpr,
    SIZE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, inside = row < num_rows, column < VOCAB
    ids = column
    if HAS_IDS:
        ids = tl.load(target_ids_ptr + column, mask=inside, other=2147483647).to(tl.int32)
    logits, _, _ = whole_products(
        x_ptr,
        weight_ptr,
        norm_ptr,
        x_ptr,
        row,
        column,
        row_inside,
        inside,
        eps,
        PART1,
        PART2,
        SIZE,
        VOCAB,
        True,  # the norm
        False,  # no residual
        False,  # no gate
        SPLITS,
        False,  # the next kernel is not held
        PDL,
    )
    _keep_best(logits, ids, row, row_inside, inside, best_ptr, ids_ptr, BLOCKS, x_ptr.dtype.element_ty)
