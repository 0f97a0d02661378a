"""The final norm, the head and the greedy choice in one kernel, for few rows: logits never leave the chip.

Each program gives the best of its block of the vocabulary; see `sample.Choice`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.fused_linear import TILE, WHOLE_INPUTS, Norm, two_parts, whole_products
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.sample import Choice, Draws, choose
from fledge.kernels.triton_support import jit, overlap, tl, use_triton

BLOCK = 64  # of the vocabulary, a program: what fits its registers while the inputs are not there yet
WARPS = 4


def head_choice(
    x_ND: Tensor,
    norm: Norm,
    weight_VD: Tensor,
    draws: Draws | None = None,
    num_new: int = 1,
    ahead: int = 0,
    ids_V: Tensor | None = None,
) -> Choice:
    """`x_ND`: before the final norm. The rest is as in `sample.choose`."""
    if draws is None and use_triton(x_ND) and x_ND.shape[0] <= TILE and x_ND.shape[1] <= WHOLE_INPUTS:
        return head_choice_triton(x_ND, norm, weight_VD, ids_V)
    if use_triton(x_ND):
        hidden = add_rms_norm(x_ND, None, norm.weight, norm.eps)
    else:
        hidden = F.rms_norm(x_ND, norm.weight.shape, norm.weight, norm.eps)
    return choose(F.linear(hidden, weight_VD), draws, num_new, ahead, ids_V)


def head_choice_triton(x_ND: Tensor, norm: Norm, weight_VD: Tensor, ids_V: Tensor | None = None) -> Choice:
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
    # Rounded like the logits of a network in this type, so that ties are the same ones.
    logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
    logits = tl.where(inside[None, :], logits, float("-inf"))
    top = tl.max(logits, axis=1)
    first = tl.min(tl.where(logits == top[:, None], ids[None, :], 2147483647), axis=1)
    place = row * BLOCKS + tl.program_id(1)
    tl.store(best_ptr + place, top, mask=row_inside)
    tl.store(ids_ptr + place, first, mask=row_inside)
