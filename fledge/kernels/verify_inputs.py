"""The target's inputs in a captured step: the embedded pending token and draft of each sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.sample import PartialArgmax, pick, picked
from fledge.kernels.triton_support import by_device, jit, let_next_start, next_power_of_2, overlap, tl, wait_for_inputs


class VerifyInputs(NamedTuple):
    x_ND: Tensor
    starts_B: Tensor  # int32: position of the first row
    counts_B: Tensor  # int32: rows of the sequence; 0: an empty one


def verify_inputs_reference(
    batch: int,
    depth: int,
    token_R: Tensor,
    drafts_RD: Tensor,
    length_R: Tensor,
    active_R: Tensor,
    embedding_VD: Tensor,
    last_draft: PartialArgmax | None = None,
) -> VerifyInputs:
    """Embeds pending tokens and drafts. `last_draft`: the choice of the last drafted token, which is stored in `drafts_RD`."""
    if last_draft is not None:
        drafts_RD[:batch, depth - 1] = picked(last_draft, len(embedding_VD))
    tokens = torch.cat([token_R[:batch, None], drafts_RD[:batch, :depth]], 1)
    return VerifyInputs(embedding_VD[tokens.flatten()], length_R[:batch] - 1, active_R[:batch] * (depth + 1))


def verify_inputs_triton(
    batch: int,
    depth: int,
    token_R: Tensor,
    drafts_RD: Tensor,
    length_R: Tensor,
    active_R: Tensor,
    embedding_VD: Tensor,
    last_draft: PartialArgmax | None = None,
) -> VerifyInputs:
    (vocab_size, size), device = embedding_VD.shape, embedding_VD.device
    x = torch.empty((batch * (depth + 1), size), dtype=embedding_VD.dtype, device=device)
    starts, counts = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2))
    num_blocks = last_draft.ids_NC.shape[1] if last_draft is not None else 1
    _verify_inputs[(batch, depth + 1)](
        token_R,
        drafts_RD,
        length_R,
        active_R,
        embedding_VD,
        last_draft.best_NC if last_draft is not None else x,
        last_draft.ids_NC if last_draft is not None else starts,
        x,
        starts,
        counts,
        DEPTH=depth,
        DRAFT=drafts_RD.shape[1],
        SIZE=size,
        SIZE_BLOCK=next_power_of_2(size),
        VOCAB=vocab_size,
        BLOCKS=num_blocks,
        PADDED=next_power_of_2(num_blocks),
        HAS_CHOICE=last_draft is not None,
        num_warps=4,
        **overlap(x),
    )
    return VerifyInputs(x, starts, counts)


verify_inputs = by_device(verify_inputs_triton, verify_inputs_reference)


@jit
def _verify_inputs(
    token_ptr,
    drafts_ptr,
    length_ptr,
    active_ptr,
    embedding_ptr,
    best_ptr,
    ids_ptr,
    x_ptr,
    starts_ptr,
    counts_ptr,
    DEPTH: tl.constexpr,
    DRAFT: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    column = tl.arange(0, SIZE_BLOCK)
    wait_for_inputs(PDL)
    token = tl.load(token_ptr + sequence)
    if place == 0:
        tl.store(starts_ptr + sequence, tl.load(length_ptr + sequence) - 1)
        tl.store(counts_ptr + sequence, tl.load(active_ptr + sequence) * (DEPTH + 1))
    elif HAS_CHOICE and place == DEPTH:
        token = pick(best_ptr, ids_ptr, sequence, VOCAB, BLOCKS, PADDED).to(tl.int64)
        tl.store(drafts_ptr + sequence * DRAFT + DEPTH - 1, token)
    else:
        token = tl.load(drafts_ptr + sequence * DRAFT + place - 1)
    x = tl.load(embedding_ptr + token * SIZE + column, mask=column < SIZE, other=0.0)
    tl.store(x_ptr + (sequence * (DEPTH + 1) + place) * SIZE + column, x, mask=column < SIZE)
