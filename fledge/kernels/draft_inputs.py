"""The drafter's inputs and its state between captured steps.

`draft_inputs`: a token and the state it is paired with, [input_layernorm(embedding) ; hidden_norm(state)].
`fuse_inputs`: the tapped target states, concatenated, each with its own norm.
`keep_last`: stores the last valid row of each sequence as its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.linear.reference import NormLike
from fledge.kernels.sample import PartialArgmax, pick, picked
from fledge.kernels.triton_support import (
    by_device,
    jit,
    let_next_start,
    next_power_of_2,
    overlap,
    tl,
    use_triton,
    wait_for_inputs,
)

MAX_TAPS = 4  # most states that the kernel takes; with more the reference runs


class DraftInputs(NamedTuple):
    x_N2D: Tensor
    residual_ND: Tensor
    starts_B: Tensor | None  # only in captured passes, where the host does not know them
    counts_B: Tensor | None


def draft_inputs_reference(
    h_ND: Tensor,
    tokens: Tensor | PartialArgmax,
    embedding_VD: Tensor,
    embedding_norm: NormLike,
    hidden_norm: NormLike,
    output_norm: NormLike | None,
    *,
    norm_before_residual: bool,
    step: int = 0,
    drafts_RD: Tensor | None = None,
    length_R: Tensor | None = None,
    active_R: Tensor | None = None,
) -> DraftInputs:
    """The first layer's inputs. For a sync (`step` 0): `tokens` [N] with the fused target states. To draft the token after
    `step` drafted ones: `tokens` is the choice of the last of these, which is stored in `drafts_RD`; `output_norm` is applied
    to the fed-back state."""
    starts = counts = None
    if step:
        batch = len(h_ND)
        tokens = drafts_RD[:batch, step - 1] = picked(tokens, len(embedding_VD))
        starts, counts = length_R[:batch] - 2 + step, active_R[:batch]
    if output_norm is not None:
        h_ND = _normed_reference(h_ND, output_norm)
    embedded = _normed_reference(embedding_VD[tokens].to(h_ND.dtype), embedding_norm)
    hidden = _normed_reference(h_ND, hidden_norm)
    return DraftInputs(torch.cat([embedded, hidden], -1), hidden if norm_before_residual else h_ND, starts, counts)


def _normed_reference(x: Tensor, norm: NormLike) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def draft_inputs_triton(
    h_ND: Tensor,
    tokens: Tensor | PartialArgmax,
    embedding_VD: Tensor,
    embedding_norm: NormLike,
    hidden_norm: NormLike,
    output_norm: NormLike | None,
    *,
    norm_before_residual: bool,
    step: int = 0,
    drafts_RD: Tensor | None = None,
    length_R: Tensor | None = None,
    active_R: Tensor | None = None,
) -> DraftInputs:
    (num_rows, size), device = h_ND.shape, h_ND.device
    assert h_ND.is_contiguous()
    assert embedding_VD.shape[1] == size
    x = torch.empty((num_rows, 2 * size), dtype=h_ND.dtype, device=device)
    residual = torch.empty((num_rows, size), dtype=h_ND.dtype, device=device)
    starts = counts = None
    num_blocks = 1
    if step:
        starts, counts = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
        num_blocks = tokens.ids_NC.shape[1]
    _draft_inputs[(num_rows,)](
        h_ND,
        x if step else tokens,
        tokens.best_NC if step else x,
        tokens.ids_NC if step else x,
        embedding_VD,
        embedding_norm.weight,
        hidden_norm.weight,
        output_norm.weight if output_norm is not None else x,
        drafts_RD if step else x,
        length_R if step else x,
        active_R if step else x,
        x,
        residual,
        starts if step else x,
        counts if step else x,
        hidden_norm.eps,
        step,
        DRAFTING=step > 0,
        DRAFT=drafts_RD.shape[1] if step else 0,
        SIZE=size,
        SIZE_BLOCK=next_power_of_2(size),
        VOCAB=embedding_VD.shape[0],
        BLOCKS=num_blocks,
        PADDED=next_power_of_2(num_blocks),
        NORM_OUTPUT=output_norm is not None,
        NORM_BEFORE_RESIDUAL=norm_before_residual,
        num_warps=4,
        **overlap(x),
    )
    return DraftInputs(x, residual, starts, counts)


draft_inputs = by_device(draft_inputs_triton, draft_inputs_reference)


def fuse_inputs(taps: Sequence[Tensor], whole: NormLike | None, each: Sequence[NormLike] | None) -> Tensor:
    """Concatenates and norms the tapped states. `whole`: a norm over all of them together; `each`: one norm per state."""
    if whole is None and each is not None and use_triton(taps[0]) and len(taps) <= MAX_TAPS:
        return fuse_inputs_triton(taps, each)
    return fuse_inputs_reference(taps, whole, each)


def fuse_inputs_reference(taps: Sequence[Tensor], whole: NormLike | None, each: Sequence[NormLike] | None) -> Tensor:
    x = torch.cat(tuple(taps), -1)
    if whole is not None:
        x = _normed_reference(x, whole)
    if each is not None:
        x = torch.cat([_normed_reference(part, norm) for part, norm in zip(x.chunk(len(each), -1), each, strict=True)], -1)
    return x


def fuse_inputs_triton(taps: Sequence[Tensor], each: Sequence[NormLike]) -> Tensor:
    (num_rows, size), count = taps[0].shape, len(taps)
    assert all(tap.is_contiguous() for tap in taps)
    x = torch.empty((num_rows, count * size), dtype=taps[0].dtype, device=taps[0].device)
    if num_rows:
        padding = [0] * (MAX_TAPS - count)
        _fuse_inputs[(num_rows, count)](
            *taps,
            *(taps[index] for index in padding),
            *(norm.weight for norm in each),
            *(each[index].weight for index in padding),
            x,
            each[0].eps,
            COUNT=count,
            SIZE=size,
            SIZE_BLOCK=next_power_of_2(size),
            num_warps=2,
            **overlap(x),
        )
    return x


def keep_last_reference(x_ND: Tensor, counts_B: Tensor, state_RD: Tensor) -> None:
    """Stores row `counts - 1` of each sequence as its state; a sequence without rows keeps its old state."""
    batch = len(counts_B)
    last = x_ND.view(batch, -1, x_ND.shape[1])[torch.arange(batch), counts_B.long().clamp(min=1) - 1]
    state_RD[:batch] = torch.where(counts_B[:, None] > 0, last, state_RD[:batch])


def keep_last_triton(x_ND: Tensor, counts_B: Tensor, state_RD: Tensor) -> None:
    batch, size = len(counts_B), x_ND.shape[1]
    num_new, block = len(x_ND) // batch, next_power_of_2(size)
    _keep_last[(batch,)](x_ND, counts_B, state_RD, NEW=num_new, SIZE=size, SIZE_BLOCK=block, num_warps=2, **overlap(x_ND))


keep_last = by_device(keep_last_triton, keep_last_reference)


@jit
def _rms_normed(x, weight_ptr, column, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return (x / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight).to(dtype)


@jit
def _draft_inputs(
    h_ptr,
    tokens_ptr,
    best_ptr,
    ids_ptr,
    embedding_ptr,
    embedding_norm_ptr,
    hidden_norm_ptr,
    output_norm_ptr,
    drafts_ptr,
    length_ptr,
    active_ptr,
    x_ptr,
    residual_ptr,
    starts_ptr,
    counts_ptr,
    eps,
    step,
    DRAFTING: tl.constexpr,
    DRAFT: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    NORM_OUTPUT: tl.constexpr,
    NORM_BEFORE_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_BLOCK)
    inside = column < SIZE
    dtype = x_ptr.dtype.element_ty
    wait_for_inputs(PDL)
    if DRAFTING:
        token = pick(best_ptr, ids_ptr, row, VOCAB, BLOCKS, PADDED).to(tl.int64)
        tl.store(drafts_ptr + row * DRAFT + step - 1, token)
        tl.store(starts_ptr + row, tl.load(length_ptr + row) - 2 + step)
        tl.store(counts_ptr + row, tl.load(active_ptr + row))
    else:
        token = tl.load(tokens_ptr + row)
    h = tl.load(h_ptr + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    embedded = tl.load(embedding_ptr + token * SIZE + column, mask=inside, other=0.0).to(dtype).to(tl.float32)
    if NORM_OUTPUT:
        h = _rms_normed(h, output_norm_ptr, column, eps, SIZE, dtype).to(tl.float32)
    hidden = _rms_normed(h, hidden_norm_ptr, column, eps, SIZE, dtype)
    tl.store(x_ptr + row * 2 * SIZE + column, _rms_normed(embedded, embedding_norm_ptr, column, eps, SIZE, dtype), mask=inside)
    tl.store(x_ptr + row * 2 * SIZE + SIZE + column, hidden, mask=inside)
    residual = hidden if NORM_BEFORE_RESIDUAL else h.to(dtype)
    tl.store(residual_ptr + row * SIZE + column, residual, mask=inside)


@jit
def _fuse_inputs(
    tap0_ptr,
    tap1_ptr,
    tap2_ptr,
    tap3_ptr,
    norm0_ptr,
    norm1_ptr,
    norm2_ptr,
    norm3_ptr,
    x_ptr,
    eps,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    tap = tl.program_id(1)
    column = tl.arange(0, SIZE_BLOCK)
    inside = column < SIZE
    tap_ptr, norm_ptr = tap0_ptr, norm0_ptr
    if tap == 1:
        tap_ptr, norm_ptr = tap1_ptr, norm1_ptr
    if tap == 2:
        tap_ptr, norm_ptr = tap2_ptr, norm2_ptr
    if tap == 3:
        tap_ptr, norm_ptr = tap3_ptr, norm3_ptr
    wait_for_inputs(PDL)
    x = tl.load(tap_ptr + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    normed = _rms_normed(x, norm_ptr, column, eps, SIZE, x_ptr.dtype.element_ty)
    tl.store(x_ptr + (row * COUNT + tap) * SIZE + column, normed, mask=inside)


@jit
def _keep_last(
    x_ptr, counts_ptr, state_ptr, NEW: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_BLOCK)
    wait_for_inputs(PDL)
    count = tl.load(counts_ptr + row)
    mask = (column < SIZE) & (count > 0)
    x = tl.load(x_ptr + (row * NEW + count - 1) * SIZE + column, mask=mask, other=0.0)
    tl.store(state_ptr + row * SIZE + column, x, mask=mask)
