"""Attention of prompts and parts of prompts over the paged cache, in which their own keys and values are stored already.

Shapes: N new tokens of B sequences, one sequence after the other; H query heads, K key/value heads, E head size, P pages.

    tokens   | sequence 0 | sequence 1 | … | unused |        offsets_C = B + 1 running sums of their lengths, from 0
                                                               the i-th token of sequence b is at position starts[b] + i

Sums follow the order of `exact`. A program processes a block of tokens of one sequence, with the query heads of one key/value
head, over all their keys. Lengths are read on the device, so that a captured launch works for any lengths.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fledge.kernels.attention.exact import (
    SPLIT,
    add_split,
    attend_block,
    cache_block,
    normalised,
    page_numbers,
    score_shift,
    shifted_scores,
)
from fledge.kernels.triton_support import by_device, jit, multiprocessors, next_power_of_2, tl

BLOCK = 64  # keys per step


def prefill_attention_reference(
    q_NHE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table_BP: Tensor,
    offsets_C: Tensor,
    starts_B: Tensor,
    page_size: int,
    *,
    counts_B: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The attention output [N, H, E]. A token at a negative position, or of no sequence, sees no key: its output is 0.

    Computed token by token, as products of one shape have a fixed order of sums. `counts_B` (only in the reference): how many
    of a sequence's tokens have keys; with 0 the sequence's output is 0.
    """
    num_kv_heads, _, size = keys_KSE.shape
    out = torch.zeros(q_NHE.shape, dtype=q_NHE.dtype, device=q_NHE.device)
    offsets = offsets_C.tolist()
    for b, start in enumerate(starts_B.tolist()):
        first_row, num_tokens = offsets[b], offsets[b + 1] - offsets[b]
        count = num_tokens if counts_B is None else int(counts_B[b])
        table = page_table_BP[b].long()
        for token in range(max(-start, 0), num_tokens if count else 0):
            position = start + token
            first_key = max(position + 1 - window, 0) if window else 0
            key = torch.arange(first_key, min(position + 1, start + count), device=q_NHE.device)
            slot = table[key // page_size] * page_size + key % page_size
            q = q_NHE[first_row + token].reshape(num_kv_heads, -1, size).clone()
            scores = torch.bmm(q, keys_KSE[:, slot].to(q.dtype).transpose(1, 2)) * size**-0.5
            out[first_row + token] = torch.bmm(scores.softmax(-1), values_KSE[:, slot].to(q.dtype)).view(-1, size)
    return out


def prefill_attention_triton(
    q_NHE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table_BP: Tensor,
    offsets_C: Tensor,
    starts_B: Tensor,
    page_size: int,
    *,
    window: int | None = None,
    rows: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """The same by a Triton kernel. `rows`: per program; `stages`: of its load pipeline. None: chosen here. Neither changes a
    bit of the result."""
    (num_kv_heads, _, size), batch = keys_KSE.shape, len(starts_B)
    num_tokens, num_heads, _ = q_NHE.shape
    assert q_NHE.stride()[1:] == (size, 1)
    assert keys_KSE.stride() == values_KSE.stride() == (keys_KSE.stride(0), size, 1)
    assert page_table_BP.stride(-1) == 1
    out = torch.empty((num_tokens, num_heads, size), dtype=q_NHE.dtype, device=q_NHE.device)
    if not num_tokens:
        return out
    group, lanes = num_heads // num_kv_heads, max(next_power_of_2(size), 16)
    rows = rows or choose_rows(num_tokens, num_kv_heads, group, lanes, q_NHE)
    # Each sequence's last block may be short; the unused tokens count as one more sequence.
    blocks = num_tokens // (rows // group) + batch + 1
    _prefill_attention[(blocks, num_kv_heads)](
        q_NHE,
        keys_KSE,
        values_KSE,
        page_table_BP,
        offsets_C,
        starts_B,
        out,
        size**-0.5 * math.log2(math.e),
        q_NHE.stride(0),
        keys_KSE.stride(0),
        page_table_BP.stride(0),
        num_tokens,
        batch,
        SEQUENCES=max(next_power_of_2(batch + 1), 16),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        SIZE=size,
        LANES=lanes,
        ROWS=rows,
        PAGE=page_size,
        BLOCK_KEYS=BLOCK,
        PER_SPLIT=SPLIT,
        SHIFT=score_shift(q_NHE.dtype),
        WINDOW=window or 0,
        num_warps=8 if rows * lanes > 64 * 64 else 4,
        num_stages=stages or (3 if lanes <= 128 else 2),
        enable_fp_fusion=False,
    )
    return out


prefill_attention = by_device(prefill_attention_triton, prefill_attention_reference)


def choose_rows(num_tokens: int, num_kv_heads: int, group: int, lanes: int, q: Tensor) -> int:
    """Rows (heads times tokens) per program: 128 if that fills the device. fp32 uses no tensor cores, so the fewest rows."""
    least = max(next_power_of_2(group), 16)
    if q.element_size() == 4:
        return least
    most = 128 if lanes <= 128 else 64
    programs = -(-num_tokens * group // most) * num_kv_heads
    return max(most if programs >= multiprocessors(q.device) else 64, least)


@jit
def _prefill_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    offsets_ptr,
    starts_ptr,
    out_ptr,
    scale_log2,
    q_token_stride,
    kv_head_stride,
    pages_stride,
    num_tokens,
    num_sequences,
    SEQUENCES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    SHIFT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    # Finds the sequence of this program's block. The last sequence consists of the unused tokens.
    index = tl.arange(0, SEQUENCES)
    begins = tl.load(offsets_ptr + index, mask=index <= num_sequences, other=num_tokens).to(tl.int32)
    ends = tl.load(offsets_ptr + index + 1, mask=index < num_sequences, other=num_tokens).to(tl.int32)
    blocks = (ends - begins + TOKENS - 1) // TOKENS
    before = tl.cumsum(blocks, axis=0) <= tl.program_id(0)
    sequence = tl.sum(before.to(tl.int32), axis=0)
    if sequence > num_sequences:
        return
    here = index == sequence
    first_row = tl.sum(tl.where(here, begins, 0), axis=0)
    count = tl.sum(tl.where(here, ends, 0), axis=0) - first_row
    # A sequence's last tokens see the most keys, so their blocks are started first.
    block_number = tl.sum(tl.where(before | here, blocks, 0), axis=0) - 1 - tl.program_id(0)
    first_token = block_number * TOKENS
    is_real = sequence < num_sequences
    start = tl.load(starts_ptr + sequence, mask=is_real, other=0).to(tl.int32)

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    lane = tl.arange(0, LANES)
    row_inside, lane_inside = (row < TOKENS * GROUP) & (token < count), lane < SIZE
    q_mask = row_inside[:, None] & lane_inside[None, :]
    token_row = (first_row + token).to(tl.int64)
    q_place = token_row * q_token_stride + head * SIZE
    q = tl.load(q_ptr + q_place[:, None] + lane[None, :], mask=q_mask, other=0.0)
    dtype = q_ptr.dtype.element_ty
    position = start + token
    end = tl.where(is_real, start + tl.minimum(first_token + TOKENS, count), 0)
    begin = 0
    # All rows see the keys before this one, so they need no mask.
    all_seen = tl.minimum(start + first_token + 1, end) // BLOCK_KEYS * BLOCK_KEYS
    if WINDOW > 0:
        begin = tl.maximum(start + first_token + 1 - WINDOW, 0) // BLOCK_KEYS * BLOCK_KEYS
        all_seen = 0
    keys_base = keys_ptr + kv_head.to(tl.int64) * kv_head_stride
    values_base = values_ptr + kv_head.to(tl.int64) * kv_head_stride
    pages = page_table_ptr + sequence.to(tl.int64) * pages_stride

    all_best = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS, 8], tl.float32)
    all_out = tl.zeros([ROWS, LANES], tl.float32)
    for split in range(begin // PER_SPLIT, (end + PER_SPLIT - 1) // PER_SPLIT):
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS, 8], tl.float32)
        out = tl.zeros([ROWS, LANES], tl.float32)
        first, last = tl.maximum(split * PER_SPLIT, begin), tl.minimum((split + 1) * PER_SPLIT, end)
        middle = tl.minimum(tl.maximum(all_seen, first), last)
        numbers = page_numbers(pages, first, last, PAGE, PER_SPLIT)
        for block in range(first, middle, BLOCK_KEYS):
            k, v = cache_block(
                keys_base, values_base, pages, numbers, block, last, False, BLOCK_KEYS, SIZE, LANES, PAGE, PER_SPLIT
            )
            scores = shifted_scores(q, k.to(dtype), scale_log2, SHIFT)
            best, total, out = attend_block(scores, v.to(dtype), best, total, out)
        for block in range(middle, last, BLOCK_KEYS):
            k, v = cache_block(
                keys_base, values_base, pages, numbers, block, last, True, BLOCK_KEYS, SIZE, LANES, PAGE, PER_SPLIT
            )
            key = block + tl.arange(0, BLOCK_KEYS)
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > (position - WINDOW)[:, None])
            scores = tl.where(seen, shifted_scores(q, k.to(dtype), scale_log2, SHIFT), float("-inf"))
            best, total, out = attend_block(scores, v.to(dtype), best, total, out)
        all_best, all_total, all_out = add_split(all_best, all_total, all_out, best, total, out)

    result = normalised(tl.max(all_total, axis=1)[:, None], all_out)
    out_row = token_row * HEADS + head
    tl.store(out_ptr + out_row[:, None] * SIZE + lane[None, :], result.to(dtype), mask=q_mask)
