"""Attention of a few new tokens per sequence over the paged cache: decoding (T = 1), verifying a draft chain or tree (T ≤ 64).

Shapes: B sequences, T new tokens each, H query heads, K key/value heads, E head size, S cache slots, P pages per sequence.

    one sequence:   |<------------- kv_len ------------->|     kv_len counts the new tokens, which are in the cache already
                    | settled          | tail            |
                                          |<----- T ---->|     without a mask: token t sees keys 0 … kv_len - T + t
    tail_bits [B, T] int64: bit j of a token says whether it sees the j-th of the last `tail` keys (a draft tree; tail ≤ 64)

A program processes one sequence and one key/value head; the rows of its tile are the group's query heads times T (at least 16,
the tensor core's smallest). For small batches the keys are split over several programs; a second kernel joins their results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fledge.kernels.attention.paged import attention_reference
from fledge.kernels.triton_support import attention_programs, by_device, jit, next_power_of_2, tl

MAX_TAIL = 64
BLOCK = 64  # keys per step
MAX_ROWS = 64  # query rows per program
MAX_SPLITS = 64


def choose_splits(num_programs: int, max_kv_len: int, enough_programs: int) -> int:
    """The number of KV splits, a power of two: enough programs to fill the device, each with at least a block of keys."""
    wanted = min(enough_programs // max(num_programs, 1), -(-max_kv_len // BLOCK), MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


def decode_attention_reference(
    q_BTHE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table_BP: Tensor,
    kv_lens_B: Tensor,
    page_size: int,
    *,
    tail_bits_BT: Tensor | None = None,
    tail: int = 0,
    positions_BT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The attention output [B, T, H, E]. `positions_BT`: needed only with a window. kv_len 0: an empty row, its output is 0."""
    out = torch.zeros_like(q_BTHE)
    num_new = q_BTHE.shape[1]
    for row, kv_len in enumerate(kv_lens_B.tolist()):
        if not kv_len:
            continue
        key = torch.arange(kv_len, device=q_BTHE.device)
        slots = page_table_BP[row].long()[key // page_size] * page_size + key % page_size
        if tail_bits_BT is None:
            last_seen = torch.arange(kv_len - num_new, kv_len, device=key.device)
            seen = key[None, :] <= last_seen[:, None]
        else:
            place = key - (kv_len - tail)
            bits = tail_bits_BT[row][:, None] >> place.clamp(min=0)[None, :]
            seen = (place < 0)[None, :] | (bits & 1).bool()
        if window is not None:
            seen = seen & (key[None, :] > positions_BT[row][:, None] - window)
        mask = torch.zeros(seen.shape, dtype=q_BTHE.dtype, device=key.device).masked_fill_(~seen, -torch.inf)
        out[row] = attention_reference(q_BTHE[row], keys_KSE[:, slots], values_KSE[:, slots], mask)
    return out


def decode_attention_triton(
    q_BTHE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table_BP: Tensor,
    kv_lens_B: Tensor,
    page_size: int,
    *,
    tail_bits_BT: Tensor | None = None,
    tail: int = 0,
    positions_BT: Tensor | None = None,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """The same by a Triton kernel. `splits`: None: chosen by batch size and the longest context the page table can hold."""
    (batch, num_new, num_heads, head_dim), num_kv_heads = q_BTHE.shape, keys_KSE.shape[0]
    assert keys_KSE.stride() == values_KSE.stride() == (keys_KSE.stride(0), head_dim, 1)
    assert q_BTHE.stride()[2:] == (head_dim, 1)
    assert page_table_BP.stride(1) == 1
    assert tail_bits_BT is None or (num_new <= tail <= MAX_TAIL and tail_bits_BT.is_contiguous())
    assert window is None or positions_BT is not None, "a window needs the new tokens' positions"
    group = num_heads // num_kv_heads
    rows = min(max(next_power_of_2(num_new * group), 16), MAX_ROWS)
    row_blocks = -(-num_new * group // rows)
    if splits is None:
        enough = attention_programs(q_BTHE.device)
        splits = choose_splits(batch * num_kv_heads * row_blocks, page_table_BP.shape[1] * page_size, enough)
    out = torch.empty(q_BTHE.shape, dtype=q_BTHE.dtype, device=q_BTHE.device)
    if splits == 1:
        parts, lse = out, kv_lens_B  # `lse` is not written in this case
    else:
        parts = torch.empty((batch, splits, num_new, num_heads, head_dim), dtype=torch.float32, device=out.device)
        lse = torch.empty((batch, splits, num_new, num_heads), dtype=torch.float32, device=out.device)
    _decode_attention[(batch, num_kv_heads * row_blocks, splits)](
        q_BTHE,
        keys_KSE,
        values_KSE,
        page_table_BP,
        kv_lens_B,
        tail_bits_BT if tail_bits_BT is not None else kv_lens_B,
        positions_BT if window is not None else kv_lens_B,
        parts,
        lse,
        head_dim**-0.5 * math.log2(math.e),
        q_BTHE.stride(0),
        q_BTHE.stride(1),
        keys_KSE.stride(0),
        page_table_BP.stride(0),
        NEW=num_new,
        HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=max(next_power_of_2(head_dim), 16),
        ROWS=rows,
        ROW_BLOCKS=row_blocks,
        PAGE=page_size,
        BLOCK_KEYS=BLOCK,
        SPLITS=splits,
        TAIL=tail if tail_bits_BT is not None else 0,
        WINDOW=window or 0,
        num_warps=4,
        num_stages=3 if head_dim <= 128 else 2,  # with head size 256, three stages leave no shared memory for queries
    )
    if splits > 1:
        _join_splits[(batch * num_new, num_heads)](
            parts,
            lse,
            out,
            NEW=num_new,
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=next_power_of_2(head_dim),
            SPLITS=splits,
            num_warps=2,
        )
    return out


decode_attention = by_device(decode_attention_triton, decode_attention_reference)


@jit
def _decode_attention(
    q_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    kv_lens_ptr,
    tail_bits_ptr,
    positions_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    q_batch_stride,
    q_token_stride,
    kv_head_stride,
    table_stride,
    NEW: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    TAIL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // ROW_BLOCKS
    row_block = tl.program_id(1) % ROW_BLOCKS
    split = tl.program_id(2)

    row = row_block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_inside = row < NEW * GROUP
    lane = tl.arange(0, HEAD_BLOCK)
    lane_inside = lane < HEAD_DIM
    q_offsets = token[:, None] * q_token_stride + head[:, None] * HEAD_DIM + lane[None, :]
    q_mask = row_inside[:, None] & lane_inside[None, :]
    q = tl.load(q_ptr + sequence * q_batch_stride + q_offsets, mask=q_mask, other=0.0)

    kv_len = tl.load(kv_lens_ptr + sequence).to(tl.int32)
    begin = 0
    if WINDOW > 0:
        # No new token sees keys before this one.
        SEEN_KEYS: tl.constexpr = WINDOW + (TAIL if TAIL > NEW else NEW)
        begin = tl.maximum(kv_len - SEEN_KEYS, 0) // BLOCK_KEYS * BLOCK_KEYS
        position = tl.load(positions_ptr + sequence * NEW + token, mask=row_inside, other=0).to(tl.int32)
    if TAIL > 0:
        bits = tl.load(tail_bits_ptr + sequence * NEW + token, mask=row_inside, other=0)
    share = (kv_len - begin + SPLITS - 1) // SPLITS
    share = (share + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS
    first = begin + split * share
    last = tl.minimum(first + share, kv_len)

    keys_base = keys_ptr + kv_head.to(tl.int64) * kv_head_stride
    values_base = values_ptr + kv_head.to(tl.int64) * kv_head_stride
    table = page_table_ptr + sequence * table_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
    for start in range(first, last, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        key_inside = key < last
        if PAGE % BLOCK_KEYS == 0:
            # Blocks start at multiples of their size, so a block is within one page.
            page = tl.load(table + start // PAGE).to(tl.int64)
            slot = page * PAGE + start % PAGE + tl.arange(0, BLOCK_KEYS)
        else:
            page = tl.load(table + key // PAGE, mask=key_inside, other=0).to(tl.int64)
            slot = page * PAGE + key % PAGE
        kv_offsets = slot[:, None] * HEAD_DIM + lane[None, :]
        kv_mask = key_inside[:, None] & lane_inside[None, :]
        k = tl.load(keys_base + kv_offsets, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee") * scale_log2
        seen = row_inside[:, None] & key_inside[None, :]
        if TAIL > 0:
            place = key - (kv_len - TAIL)
            shift = tl.maximum(place, 0).to(tl.int64)
            in_view = ((bits[:, None] >> shift[None, :]) & 1) != 0
            seen = seen & ((place < 0)[None, :] | in_view)
        elif NEW > 1:
            seen = seen & (key[None, :] <= (kv_len - NEW + token)[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > (position - WINDOW)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen no key yet has no finite maximum to subtract.
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe_best[:, None])
        shrink = tl.exp2(best - safe_best)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(values_base + kv_offsets, mask=kv_mask, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        best = new_best

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_row = ((sequence * SPLITS + split) * NEW + token) * HEADS + head
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM + lane[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_mask)
    if SPLITS > 1:
        tl.store(lse_ptr + out_row, best + tl.log2(total), mask=row_inside)


@jit
def _join_splits(
    parts_ptr,
    lse_ptr,
    out_ptr,
    NEW: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    sequence = (tl.program_id(0) // NEW).to(tl.int64)
    token = tl.program_id(0) % NEW
    head = tl.program_id(1)
    lane = tl.arange(0, HEAD_BLOCK)
    rows = ((sequence * SPLITS + tl.arange(0, SPLITS)) * NEW + token) * HEADS + head
    lse = tl.load(lse_ptr + rows)
    best = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, axis=0)
    parts = tl.load(parts_ptr + rows[:, None] * HEAD_DIM + lane[None, :], mask=lane[None, :] < HEAD_DIM, other=0.0)
    joined = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    out_row = (sequence * NEW + token) * HEADS + head
    tl.store(out_ptr + out_row * HEAD_DIM + lane, joined.to(out_ptr.dtype.element_ty), mask=lane < HEAD_DIM)
