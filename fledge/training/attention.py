"""Attention over packed documents, with its log-sum-exp: FlexAttention on CUDA, plain maths elsewhere.

Shapes: B packed rows of T tokens (N = B·T), H query heads, K key/value heads, E head size.
A document is a run of neighbouring tokens; `start_BT` holds, for every token, the column of its document's first token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from fledge.models.layers import Attend

BLOCK = 128  # tokens per FlexAttention block; the last one of a row may be shorter

Mask = BlockMask | Tensor  # blocks for FlexAttention; else [B, 1, T, T], True where attention is allowed

# Uncompiled FlexAttention materialises all scores; when a caller compiles around it, this is inlined.
_compiled_flex_attention = torch.compile(flex_attention, dynamic=False)


def document_starts(document_BT: Tensor) -> Tensor:
    """For every token, the column of its document's first token (int32)."""
    columns = torch.arange(document_BT.shape[1], device=document_BT.device, dtype=torch.int32)
    is_first = torch.ones_like(document_BT, dtype=torch.bool)
    is_first[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return torch.where(is_first, columns, 0).cummax(1).values.int()


def packed_mask(start_BT: Tensor, window: int | None = None, ahead: int = 0, *, flex: bool) -> Mask:
    """Causal within each document.

    `window` and `ahead`: a query that stands `ahead` positions after its row (a later draft step) sees the keys less than
    `window` positions before it, as when serving.
    """
    length = start_BT.shape[1]
    if window is not None and window >= length + ahead:
        window = None

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = (kv <= q) & (kv >= start_BT[b, q])
        return allowed if window is None else allowed & (q + ahead - kv < window)

    if not flex:
        column = torch.arange(length, device=start_BT.device)
        rows = torch.arange(len(start_BT), device=start_BT.device)[:, None, None]
        return visible(rows, rows, column[:, None], column[None, :])[:, None]

    # Which blocks are needed follows from each block's first and last document start: no T×T mask is ever made.
    block = torch.arange(-(-length // BLOCK), device=start_BT.device)
    q_block, kv_block = block[:, None], block[None, :]
    last = (block * BLOCK + BLOCK - 1).clamp_max(length - 1)  # of each block
    first_start, last_start = start_BT[:, ::BLOCK, None], start_BT[:, last, None]
    needed = (kv_block <= q_block) & (kv_block * BLOCK + BLOCK - 1 >= first_start)
    full = (kv_block < q_block) & (kv_block * BLOCK >= last_start)
    if window is not None:
        nearest = q_block * BLOCK + ahead - (kv_block * BLOCK + BLOCK - 1)
        furthest = q_block * BLOCK + BLOCK - 1 + ahead - kv_block * BLOCK
        needed &= nearest < window
        full &= furthest < window
    return BlockMask.from_kv_blocks(
        *_listed(needed & ~full),
        *_listed(needed & full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _listed(blocks_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each query block has and, first in each list, which."""
    chosen = blocks_BQK[:, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


def attention_with_lse(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, mask: Mask, length: int) -> tuple[Tensor, Tensor]:
    """Output [N, H, E] and the log-sum-exp of the scores [N, H] (at least fp32)."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_NHE, k_NKE, v_NKE))
    if isinstance(mask, BlockMask):
        attention: Callable[..., Any] = (
            flex_attention if torch.compiler.is_compiling() or not q.is_cuda else _compiled_flex_attention
        )
        out, aux = attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        lse = aux.lse
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        lse = scores.logsumexp(-1)
        out = ((scores - lse[..., None]).exp() @ v.to(wide)).to(q.dtype)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def packed_attend(masks: dict[int | None, Mask], length: int) -> Attend:
    """The decoder's attention over packed rows; one mask per window that its layers have."""

    def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
        mask = masks[window]
        if isinstance(mask, BlockMask):
            return attention_with_lse(q_NHE, k_NKE, v_NKE, mask, length)[0]
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_NHE, k_NKE, v_NKE))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend
