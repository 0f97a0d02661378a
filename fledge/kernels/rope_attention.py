"""Rotary embedding, the new keys' way into the paged cache, and attention of a chain of new tokens, in one kernel.

Shapes: B sequences, T new tokens each (one after the other in `qkv`), H query heads, K key/value heads, E head size.

    one sequence:   | start settled keys, in the cache | count new ones, stored here | T - count: neither stored nor seen |

Token t lies at position start + t and sees the settled keys and the new ones up to itself. count 0: an empty row, output 0.
A program takes a sequence, a key/value head and a share of the settled keys; the first also takes the new ones. The program
that finishes last joins the shares, always in the same order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fledge.kernels.decode_attention import BLOCK, ENOUGH_PROGRAMS, MAX_ROWS, choose_splits
from fledge.kernels.paged_attention import attention_reference
from fledge.kernels.rope_cache import rope_cache_reference
from fledge.kernels.triton_support import jit, let_next_start, next_power_of_2, overlap, tl, use_triton, wait_for_inputs

Norms = tuple[Tensor, Tensor, float]  # weights for queries and keys, epsilon


def rope_attention(
    qkv_NX: Tensor,
    table_2PE: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table_BP: Tensor,
    page_size: int,
    *,
    norms: Norms | None = None,
    window: int | None = None,
) -> Tensor:
    """The attention's output [N, H * E], N = B * T. `table_2PE`: `Rotary.table`. `qkv_NX` may be overwritten."""
    run = rope_attention_triton if use_triton(qkv_NX) else rope_attention_reference
    arguments = (qkv_NX, table_2PE, starts_B, counts_B, keys_KSE, values_KSE, page_table_BP, page_size)
    return run(*arguments, norms=norms, window=window)


def rope_attention_reference(
    qkv_NX: Tensor,
    table_2PE: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table_BP: Tensor,
    page_size: int,
    *,
    norms: Norms | None = None,
    window: int | None = None,
) -> Tensor:
    (num_kv_heads, _, head_dim), batch = keys_KSE.shape, len(starts_B)
    num_new = len(qkv_NX) // batch
    place = torch.arange(num_new, device=starts_B.device)
    stored = place < counts_B[:, None]
    position = torch.where(stored, starts_B[:, None] + place, 0).long()
    page = page_table_BP.long().gather(1, position // page_size)
    slots = torch.where(stored, page * page_size + position % page_size, -1)
    rope_cache_reference(qkv_NX, table_2PE, position.flatten(), slots.flatten(), keys_KSE, values_KSE, norms)
    q_BTHE = qkv_NX.view(batch, num_new, -1, head_dim)[:, :, : -2 * num_kv_heads]
    out = torch.zeros_like(q_BTHE)
    for row, (start, count) in enumerate(zip(starts_B.tolist(), counts_B.tolist(), strict=True)):
        if not count:
            continue
        key = torch.arange(start + count, device=qkv_NX.device)
        query = torch.arange(start, start + num_new, device=qkv_NX.device)[:, None]
        seen = (key <= query) if window is None else (key <= query) & (key > query - window)
        mask = torch.zeros(seen.shape, dtype=qkv_NX.dtype, device=key.device).masked_fill_(~seen, -torch.inf)
        slot = page_table_BP[row].long()[key // page_size] * page_size + key % page_size
        out[row] = attention_reference(q_BTHE[row], keys_KSE[:, slot], values_KSE[:, slot], mask)
    return out.flatten(2).flatten(0, 1)


def rope_attention_triton(
    qkv_NX: Tensor,
    table_2PE: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table_BP: Tensor,
    page_size: int,
    *,
    norms: Norms | None = None,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    (num_kv_heads, _, head_dim), batch = keys_KSE.shape, len(starts_B)
    num_new = len(qkv_NX) // batch
    num_heads = qkv_NX.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv_NX.is_contiguous()
    assert table_2PE.is_contiguous()
    assert keys_KSE.stride() == values_KSE.stride() == (keys_KSE.stride(0), head_dim, 1)
    assert page_table_BP.stride(1) == 1
    group = num_heads // num_kv_heads
    rows = min(max(next_power_of_2(num_new * group), 16), MAX_ROWS)
    row_blocks = -(-num_new * group // rows)
    num_programs = batch * num_kv_heads * row_blocks
    if splits is None:
        reach = page_table_BP.shape[1] * page_size
        splits = choose_splits(num_programs, reach if window is None else min(reach, window + BLOCK))
    device = qkv_NX.device
    out = torch.empty((len(qkv_NX), num_heads * head_dim), dtype=qkv_NX.dtype, device=device)
    parts = lse = arrivals = out
    if splits > 1:
        parts = torch.empty((splits, len(qkv_NX), num_heads, head_dim), dtype=torch.float32, device=device)
        lse = torch.empty((splits, len(qkv_NX), num_heads), dtype=torch.float32, device=device)
        arrivals = _arrival_counts(device, num_programs)
    q_weight, k_weight, eps = norms if norms is not None else (qkv_NX, qkv_NX, 0.0)
    _rope_attention[(batch, num_kv_heads * row_blocks, splits)](
        qkv_NX,
        table_2PE,
        starts_B,
        counts_B,
        keys_KSE,
        values_KSE,
        page_table_BP,
        q_weight,
        k_weight,
        out,
        parts,
        lse,
        arrivals,
        eps,
        head_dim**-0.5 * math.log2(math.e),
        table_2PE.stride(0),
        table_2PE.shape[1] - 1,
        keys_KSE.stride(0),
        page_table_BP.stride(0),
        len(qkv_NX),
        NEW=num_new,
        NEW_BLOCK=max(next_power_of_2(num_new), 16),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HALF_BLOCK=max(next_power_of_2(head_dim // 2), 16),
        ROWS=rows,
        ROW_BLOCKS=row_blocks,
        PAGE=page_size,
        BLOCK_KEYS=BLOCK,
        SPLITS=splits,
        WINDOW=window or 0,
        HAS_NORMS=norms is not None,
        num_warps=4,
        num_stages=3,
        **overlap(qkv_NX),
    )
    return out


_ARRIVALS: dict[torch.device, Tensor] = {}


def _arrival_counts(device: torch.device, num_programs: int) -> Tensor:
    """How many shares of each are done; left at 0 by every kernel. Splitting stops at ENOUGH_PROGRAMS, which bounds it."""
    assert num_programs <= ENOUGH_PROGRAMS
    if device not in _ARRIVALS:
        _ARRIVALS[device] = torch.zeros(ENOUGH_PROGRAMS, dtype=torch.int32, device=device)
    return _ARRIVALS[device]


@jit
def _normed(low, high, weight_ptr, lane, eps, HALF: tl.constexpr, dtype: tl.constexpr):
    scale = 1.0 / tl.sqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)
    weight_low = tl.load(weight_ptr + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    weight_high = tl.load(weight_ptr + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    low = (low * scale[:, None] * weight_low[None, :]).to(dtype).to(tl.float32)
    high = (high * scale[:, None] * weight_high[None, :]).to(dtype).to(tl.float32)
    return low, high


@jit
def _rotated(low, high, table_ptr, table_stride, position, lane, mask, HALF: tl.constexpr, dtype: tl.constexpr):
    place = table_ptr + position[:, None].to(tl.int64) * (2 * HALF) + lane[None, :]
    cos = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    # The second half of the table's sines carries no sign.
    sin = tl.load(place + table_stride + HALF, mask=mask, other=0.0).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@jit
def _rope_attention(
    qkv_ptr,
    table_ptr,
    starts_ptr,
    counts_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    arrivals_ptr,
    eps,
    scale_log2,
    table_stride,
    last_position,
    kv_head_stride,
    pages_stride,
    num_tokens,
    NEW: tl.constexpr,
    NEW_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // ROW_BLOCKS
    row_block = tl.program_id(1) % ROW_BLOCKS
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SIZE: tl.constexpr = 2 * HALF
    dtype = qkv_ptr.dtype.element_ty
    row = row_block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    lane = tl.arange(0, HALF_BLOCK)
    row_inside, lane_inside = row < NEW * GROUP, lane < HALF
    q_mask = row_inside[:, None] & lane_inside[None, :]
    out_row = (sequence * NEW + token) * HEADS + head
    out_place = out_row[:, None] * SIZE + lane[None, :]
    heads_stride = (HEADS + 2 * KV_HEADS) * SIZE

    wait_for_inputs(PDL)
    start = tl.load(starts_ptr + sequence).to(tl.int32)
    count = tl.load(counts_ptr + sequence).to(tl.int32)
    if count == 0:
        if split == 0:
            zeros = tl.zeros([ROWS, HALF_BLOCK], dtype)
            tl.store(out_ptr + out_place, zeros, mask=q_mask)
            tl.store(out_ptr + out_place + HALF, zeros, mask=q_mask)
        return
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + 1 - WINDOW, 0) // BLOCK_KEYS * BLOCK_KEYS
    share = (start - begin + SPLITS - 1) // SPLITS
    share = tl.maximum((share + BLOCK_KEYS - 1) // BLOCK_KEYS, 1) * BLOCK_KEYS
    num_shares = tl.maximum((start - begin + share - 1) // share, 1)
    if split >= num_shares:
        return

    q_ptr = qkv_ptr + (sequence * NEW + token)[:, None] * heads_stride + head[:, None] * SIZE + lane[None, :]
    q_low = tl.load(q_ptr, mask=q_mask, other=0.0).to(tl.float32)
    q_high = tl.load(q_ptr + HALF, mask=q_mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        q_low, q_high = _normed(q_low, q_high, q_weight_ptr, lane, eps, HALF, dtype)
    position = tl.minimum(start + token, last_position)
    q_low, q_high = _rotated(q_low, q_high, table_ptr, table_stride, position, lane, q_mask, HALF, dtype)

    keys_base = keys_ptr + kv_head.to(tl.int64) * kv_head_stride
    values_base = values_ptr + kv_head.to(tl.int64) * kv_head_stride
    pages = page_table_ptr + sequence * pages_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    low = tl.zeros([ROWS, HALF_BLOCK], tl.float32)
    high = tl.zeros([ROWS, HALF_BLOCK], tl.float32)

    if split == 0:
        new = tl.arange(0, NEW_BLOCK)
        valid = new < count
        new_mask = valid[:, None] & lane_inside[None, :]
        k_ptr = qkv_ptr + (sequence * NEW + new)[:, None] * heads_stride + (HEADS + kv_head) * SIZE + lane[None, :]
        k_low = tl.load(k_ptr, mask=new_mask, other=0.0).to(tl.float32)
        k_high = tl.load(k_ptr + HALF, mask=new_mask, other=0.0).to(tl.float32)
        if HAS_NORMS:
            k_low, k_high = _normed(k_low, k_high, k_weight_ptr, lane, eps, HALF, dtype)
        place = start + new
        k_low, k_high = _rotated(k_low, k_high, table_ptr, table_stride, place, lane, new_mask, HALF, dtype)
        v_ptr = k_ptr + KV_HEADS * SIZE
        v_low = tl.load(v_ptr, mask=new_mask, other=0.0)
        v_high = tl.load(v_ptr + HALF, mask=new_mask, other=0.0)
        if row_block == 0:
            page = tl.load(pages + place // PAGE, mask=valid, other=0).to(tl.int64)
            offsets = (page * PAGE + place % PAGE)[:, None] * SIZE + lane[None, :]
            cache_type = keys_ptr.dtype.element_ty
            tl.store(keys_base + offsets, k_low.to(cache_type), mask=new_mask)
            tl.store(keys_base + offsets + HALF, k_high.to(cache_type), mask=new_mask)
            tl.store(values_base + offsets, v_low.to(cache_type), mask=new_mask)
            tl.store(values_base + offsets + HALF, v_high.to(cache_type), mask=new_mask)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee") * scale_log2
        seen = row_inside[:, None] & valid[None, :] & (new[None, :] <= token[:, None])
        if WINDOW > 0:
            seen = seen & (new[None, :] > token[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        best = tl.max(scores, axis=1)
        weights = tl.exp2(scores - tl.where(best == float("-inf"), 0.0, best)[:, None])
        total = tl.sum(weights, axis=1)
        low = tl.dot(weights.to(dtype), v_low, input_precision="ieee")
        high = tl.dot(weights.to(dtype), v_high, input_precision="ieee")

    first = begin + split * share
    last = tl.minimum(first + share, start)
    for block in range(first, last, BLOCK_KEYS):
        key = block + tl.arange(0, BLOCK_KEYS)
        key_inside = key < last
        if PAGE % BLOCK_KEYS == 0:
            # Blocks start at multiples of their size, so a block lies in one page.
            page = tl.load(pages + block // PAGE).to(tl.int64)
            slot = page * PAGE + block % PAGE + tl.arange(0, BLOCK_KEYS)
        else:
            page = tl.load(pages + key // PAGE, mask=key_inside, other=0).to(tl.int64)
            slot = page * PAGE + key % PAGE
        offsets = slot[:, None] * SIZE + lane[None, :]
        kv_mask = key_inside[:, None] & lane_inside[None, :]
        old_low = tl.load(keys_base + offsets, mask=kv_mask, other=0.0).to(dtype)
        old_high = tl.load(keys_base + offsets + HALF, mask=kv_mask, other=0.0).to(dtype)
        scores = tl.dot(q_low, tl.trans(old_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(old_high), scores, input_precision="ieee") * scale_log2
        seen = row_inside[:, None] & key_inside[None, :]
        if WINDOW > 0:
            seen = seen & (key[None, :] > (start + token - WINDOW)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen no key yet has no finite maximum to subtract.
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe_best[:, None])
        shrink = tl.exp2(best - safe_best)
        total = total * shrink + tl.sum(weights, axis=1)
        old_low = tl.load(values_base + offsets, mask=kv_mask, other=0.0).to(dtype)
        old_high = tl.load(values_base + offsets + HALF, mask=kv_mask, other=0.0).to(dtype)
        low = tl.dot(weights.to(dtype), old_low, low * shrink[:, None], input_precision="ieee")
        high = tl.dot(weights.to(dtype), old_high, high * shrink[:, None], input_precision="ieee")
        best = new_best

    safe_total = tl.where(total == 0.0, 1.0, total)
    low = low / safe_total[:, None]
    high = high / safe_total[:, None]
    if num_shares > 1:
        part_row = split * num_tokens * HEADS + out_row
        part_place = part_row[:, None] * SIZE + lane[None, :]
        tl.store(parts_ptr + part_place, low, mask=q_mask)
        tl.store(parts_ptr + part_place + HALF, high, mask=q_mask)
        tl.store(lse_ptr + part_row, best + tl.log2(safe_total), mask=row_inside)
        # All threads' parts are written before the program counts as arrived.
        tl.debug_barrier()
        arrivals = arrivals_ptr + tl.program_id(0) * (KV_HEADS * ROW_BLOCKS) + tl.program_id(1)
        if tl.atomic_add(arrivals, 1, sem="acq_rel") < num_shares - 1:
            return
        tl.store(arrivals, 0)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        low = tl.zeros([ROWS, HALF_BLOCK], tl.float32)
        high = tl.zeros([ROWS, HALF_BLOCK], tl.float32)
        for other in range(0, num_shares):
            part_row = other * num_tokens * HEADS + out_row
            part_place = part_row[:, None] * SIZE + lane[None, :]
            lse = tl.load(lse_ptr + part_row, mask=row_inside, other=float("-inf"), cache_modifier=".cg")
            new_best = tl.maximum(best, lse)
            safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
            weight, shrink = tl.exp2(lse - safe_best), tl.exp2(best - safe_best)
            part_low = tl.load(parts_ptr + part_place, mask=q_mask, other=0.0, cache_modifier=".cg")
            part_high = tl.load(parts_ptr + part_place + HALF, mask=q_mask, other=0.0, cache_modifier=".cg")
            low = low * shrink[:, None] + part_low * weight[:, None]
            high = high * shrink[:, None] + part_high * weight[:, None]
            total = total * shrink + weight
            best = new_best
        safe_total = tl.where(total == 0.0, 1.0, total)
        low = low / safe_total[:, None]
        high = high / safe_total[:, None]
    tl.store(out_ptr + out_place, low.to(dtype), mask=q_mask)
    tl.store(out_ptr + out_place + HALF, high.to(dtype), mask=q_mask)
