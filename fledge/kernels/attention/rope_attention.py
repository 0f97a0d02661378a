"""Rotary embedding, storing of new keys and values in the paged cache, and attention of a chain of new tokens, in one kernel.

Shapes: B sequences, T new tokens each (one after the other in `qkv`), H query heads, K key/value heads, E head size.

    one sequence:   | start settled keys, in the cache | count new ones, stored here | T - count: neither stored nor seen |
                    |  blocks of keys           | tail                      |

Token t is at position start + t and sees the settled keys and the new ones up to itself. count 0: an empty row, output 0.
Sums follow the order of `exact`. The tail begins at the last multiple of 16 up to `start`: one tile holds its keys from the
cache and those from this pass. A program processes a sequence, a key/value head and every G-th split of the keys. Short
contexts have one split. With several programs the one that finishes last adds up the splits.

Everything except `qkv_NX` is read while earlier kernels still run (PDL). So one of these earlier kernels must have started only
after that data was complete: see `pdl_barrier` of `linear.dispatch`. (Library kernels never let the next kernel start early.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fledge.kernels.attention.exact import (
    GROUP_KEYS,
    SPLIT,
    add_split,
    attend_block,
    best_of,
    cache_block,
    finite,
    normalised,
    page_numbers,
    rotated,
    score_shift,
    shifted_scores,
    weighted,
)
from fledge.kernels.attention.launch_config import (
    MOST_KEYS,
    MOST_PART_BYTES,
    SOME,
    STREAMED_KEYS,
    LaunchConfig,
    arrival_counts,
    choose_config,
    choose_programs,
)
from fledge.kernels.attention.paged import chain_slots
from fledge.kernels.attention.prefill_attention import prefill_attention_reference
from fledge.kernels.attention.rope_cache import Norms, rope_cache_reference
from fledge.kernels.triton_support import (
    attention_programs,
    by_device,
    jit,
    let_next_start,
    load_fence,
    next_power_of_2,
    overlap,
    tl,
    wait_for_inputs,
)

# Most query rows per program. More rows are split over programs, whose fewer registers leave room for adjacent kernels.
MAX_ROWS = 32


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
    arrivals: Tensor | None = None,
) -> Tensor:
    """The attention output [N, H * E], N = B * T. `table_2PE`: `Rotary.table`. `qkv_NX` may be overwritten.

    `arrivals`: see `arrival_counts`; used only by the Triton kernel.
    """
    (num_kv_heads, _, head_dim), batch = keys_KSE.shape, len(starts_B)
    num_new = len(qkv_NX) // batch
    positions_N, slots_N = chain_slots(num_new, starts_B, counts_B, page_table_BP, page_size)
    rope_cache_reference(qkv_NX, table_2PE, positions_N, slots_N, keys_KSE, values_KSE, norms)
    offsets = torch.arange(batch + 1) * num_new
    q_NHE = qkv_NX.view(len(qkv_NX), -1, head_dim)[:, : -2 * num_kv_heads]
    out = prefill_attention_reference(
        q_NHE, keys_KSE, values_KSE, page_table_BP, offsets, starts_B, page_size, counts_B=counts_B, window=window
    )
    return out.flatten(1)


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
    arrivals: Tensor | None = None,
    programs: int | None = None,
    streamed: bool | None = None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """The same by a Triton kernel. `programs`: how many share the splits of a sequence and head; None: chosen here. `streamed`:
    all keys are loaded in small blocks, none prefetched; None: if there are more programs than run at once. `config`: None:
    chosen by the number of programs and the most keys. None of these changes a bit of the result."""
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
    lanes = max(next_power_of_2(head_dim), 16)
    kv_bucket = page_table_BP.shape[1] * page_size
    max_keys = kv_bucket if window is None else min(kv_bucket, window + num_new)
    device = qkv_NX.device
    config = config or choose_config(num_programs, max_keys, device)
    first = min(max(config.first_bytes // (lanes * qkv_NX.element_size()), 64), config.first_bytes // 128, SPLIT)
    enough = attention_programs(device)
    streamed = num_programs > enough if streamed is None else streamed
    first, block = (STREAMED_KEYS, STREAMED_KEYS) if streamed else (first, min(first // 2, MOST_KEYS))
    # A window may begin in the middle of a split, which can make one split more.
    splits = -(-max_keys // SPLIT) + (window is not None and max_keys < kv_bucket)
    part_bytes = len(qkv_NX) * num_heads * head_dim * 4
    programs = programs or choose_programs(num_programs, splits, enough, MOST_PART_BYTES // part_bytes)
    out = torch.empty((len(qkv_NX), num_heads * head_dim), dtype=qkv_NX.dtype, device=device)
    parts = bests = totals = out
    if programs > 1:
        parts = torch.empty((splits, len(qkv_NX), num_heads, head_dim), dtype=torch.float32, device=device)
        bests, totals = torch.empty((2, splits, len(qkv_NX), num_heads), dtype=torch.float32, device=device)
        arrivals = arrival_counts(device) if arrivals is None else arrivals
        assert num_programs <= len(arrivals)
    else:
        arrivals = out
    q_weight, k_weight, eps = norms if norms is not None else (qkv_NX, qkv_NX, 0.0)
    _rope_attention[(batch, num_kv_heads * row_blocks, programs)](
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
        bests,
        totals,
        arrivals,
        eps,
        head_dim**-0.5 * math.log2(math.e),
        table_2PE.stride(0),
        table_2PE.shape[1] - 1,
        keys_KSE.stride(0),
        page_table_BP.stride(0),
        len(qkv_NX),
        programs,
        NEW=num_new,
        TAIL=max(next_power_of_2(num_new + GROUP_KEYS - 1), GROUP_KEYS),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        SIZE=head_dim,
        LANES=lanes,
        ROWS=rows,
        ROW_BLOCKS=row_blocks,
        PAGE=page_size,
        FIRST=first,
        BLOCK_KEYS=block,
        MANY_SPLITS=splits > 1,
        SPLITS_APART=programs > 1,
        SPLITS_EACH=splits > programs,
        PER_SPLIT=SPLIT,
        GROUP_KEYS=GROUP_KEYS,
        SHIFT=score_shift(qkv_NX.dtype),
        WINDOW=window or 0,
        HAS_NORMS=norms is not None,
        num_warps=4 if streamed else config.warps,
        num_stages=3,
        maxnreg=SOME.registers if streamed else config.registers,
        enable_fp_fusion=False,
        **overlap(qkv_NX),
    )
    return out


rope_attention = by_device(rope_attention_triton, rope_attention_reference)


@jit
def _block_scores(q, k, block, last, position, scale_log2, SHIFT: tl.constexpr, WINDOW: tl.constexpr):
    key = block + tl.arange(0, k.shape[0])
    seen = (key < last)[None, :]
    if WINDOW > 0:
        seen = seen & (key[None, :] > (position - WINDOW)[:, None])
    return tl.where(seen, shifted_scores(q, k, scale_log2, SHIFT), float("-inf"))


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
    bests_ptr,
    totals_ptr,
    arrivals_ptr,
    eps,
    scale_log2,
    table_stride,
    last_position,
    kv_head_stride,
    pages_stride,
    num_tokens,
    programs,
    NEW: tl.constexpr,
    TAIL: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MANY_SPLITS: tl.constexpr,
    SPLITS_APART: tl.constexpr,
    SPLITS_EACH: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    GROUP_KEYS: tl.constexpr,
    SHIFT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // ROW_BLOCKS
    row_block = tl.program_id(1) % ROW_BLOCKS
    program = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dtype = qkv_ptr.dtype.element_ty
    cache_type = keys_ptr.dtype.element_ty
    row = row_block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    lane = tl.arange(0, LANES)
    other_lane = (lane + SIZE // 2) % SIZE
    row_inside, lane_inside = row < NEW * GROUP, lane < SIZE
    q_mask = row_inside[:, None] & lane_inside[None, :]
    out_row = (sequence * NEW + token) * HEADS + head
    out_place = out_row[:, None] * SIZE + lane[None, :]

    # Loaded before the queries are ready: the sequence's length, its settled keys and values, the rotary angles. ".cg" bypasses
    # the multiprocessor's L1 cache, which may hold outdated values from before other kernels.
    start = tl.load(starts_ptr + sequence, cache_modifier=".cg").to(tl.int32)
    count = tl.load(counts_ptr + sequence, cache_modifier=".cg").to(tl.int32)
    begin, first_split = 0, 0
    if WINDOW > 0:
        begin = tl.maximum(start + 1 - WINDOW, 0) // BLOCK_KEYS * BLOCK_KEYS
        first_split = begin // PER_SPLIT
    num_splits = (start + count + PER_SPLIT - 1) // PER_SPLIT
    if (count == 0) | (first_split + program >= num_splits):
        if program == 0:
            wait_for_inputs(PDL)  # needed here too: a kernel must not complete before the previous one
            tl.store(out_ptr + out_place, tl.zeros([ROWS, LANES], dtype), mask=q_mask)
        return
    split = first_split + program
    tail_begin = start // GROUP_KEYS * GROUP_KEYS
    first = tl.maximum(split * PER_SPLIT, begin)
    last = tl.minimum((split + 1) * PER_SPLIT, tail_begin)
    keys_base = keys_ptr + kv_head.to(tl.int64) * kv_head_stride
    values_base = values_ptr + kv_head.to(tl.int64) * kv_head_stride
    pages = page_table_ptr + sequence * pages_stride
    key = first + tl.arange(0, FIRST)
    key_inside = key < last
    page = tl.load(pages + key // PAGE, mask=key_inside, other=0, cache_modifier=".cg").to(tl.int64)
    offsets = (page * PAGE + key % PAGE)[:, None] * SIZE + lane[None, :]
    kv_mask = key_inside[:, None] & lane_inside[None, :]
    first_k = tl.load(keys_base + offsets, mask=kv_mask, other=0.0, cache_modifier=".cg")
    first_v = tl.load(values_base + offsets, mask=kv_mask, other=0.0, cache_modifier=".cg")
    angle = table_ptr + tl.minimum(start + token, last_position)[:, None].to(tl.int64) * SIZE + lane[None, :]
    q_cos = tl.load(angle, mask=q_mask, other=0.0)
    q_sin = tl.load(angle + table_stride, mask=q_mask, other=0.0)
    tail_key = tail_begin + tl.arange(0, TAIL)
    is_new = (tail_key >= start) & (tail_key < start + count)
    new_mask = is_new[:, None] & lane_inside[None, :]
    old_mask = (tail_key < start)[:, None] & lane_inside[None, :]
    tail_page = tl.load(pages + tail_key // PAGE, mask=tail_key < start + count, other=0, cache_modifier=".cg").to(tl.int64)
    tail_offsets = (tail_page * PAGE + tail_key % PAGE)[:, None] * SIZE + lane[None, :]
    tail_k = tl.load(keys_base + tail_offsets, mask=old_mask, other=0.0, cache_modifier=".cg")
    tail_v = tl.load(values_base + tail_offsets, mask=old_mask, other=0.0, cache_modifier=".cg")
    angle = table_ptr + tail_key[:, None].to(tl.int64) * SIZE + lane[None, :]
    k_cos = tl.load(angle, mask=new_mask, other=0.0)
    k_sin = tl.load(angle + table_stride, mask=new_mask, other=0.0)
    q_weight, other_q_weight, k_weight, other_k_weight = 0.0, 0.0, 0.0, 0.0
    if HAS_NORMS:
        q_weight = tl.load(q_weight_ptr + lane, mask=lane_inside, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + lane, mask=lane_inside, other=0.0).to(tl.float32)
        other_q_weight = tl.load(q_weight_ptr + other_lane).to(tl.float32)
        other_k_weight = tl.load(k_weight_ptr + other_lane).to(tl.float32)
    q_cos, q_sin, k_cos, k_sin = load_fence(q_cos), load_fence(q_sin), load_fence(k_cos), load_fence(k_sin)

    wait_for_inputs(PDL)
    TOKEN: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    q_heads = qkv_ptr + (sequence * NEW + token)[:, None] * TOKEN + head[:, None] * SIZE
    k_heads = qkv_ptr + (sequence * NEW + tail_key - start)[:, None] * TOKEN + (HEADS + kv_head) * SIZE
    q = tl.load(q_heads + lane[None, :], mask=q_mask, other=0.0)
    other_q = tl.load(q_heads + other_lane[None, :], mask=q_mask, other=0.0)
    new_k = tl.load(k_heads + lane[None, :], mask=new_mask, other=0.0)
    other_k = tl.load(k_heads + other_lane[None, :], mask=new_mask, other=0.0)
    new_v = tl.load(k_heads + KV_HEADS * SIZE + lane[None, :], mask=new_mask, other=0.0)
    first_k, first_v, tail_k, tail_v = load_fence(first_k), load_fence(first_v), load_fence(tail_k), load_fence(tail_v)
    q, other_q, new_k = load_fence(q), load_fence(other_q), load_fence(new_k)
    other_k, new_v = load_fence(other_k), load_fence(new_v)
    q = rotated(q, other_q, q_cos, q_sin, q_weight, other_q_weight, eps, SIZE, HAS_NORMS, dtype)
    new_k = rotated(new_k, other_k, k_cos, k_sin, k_weight, other_k_weight, eps, SIZE, HAS_NORMS, dtype)
    q, new_k, new_v = load_fence(q), load_fence(new_k).to(cache_type), new_v.to(cache_type)
    store = new_mask & (program == 0) & (row_block == 0)
    tl.store(keys_base + tail_offsets, new_k, mask=store)
    tl.store(values_base + tail_offsets, new_v, mask=store)
    tail_k = tl.where(new_mask, new_k, tail_k).to(dtype)
    tail_v = tl.where(new_mask, new_v, tail_v).to(dtype)

    position = start + token
    tail_seen = (tail_key < start + count)[None, :] & (tail_key[None, :] <= position[:, None])
    if WINDOW > 0:
        tail_seen = tail_seen & (tail_key[None, :] > (position - WINDOW)[:, None])
    tail_scores = tl.where(tail_seen, shifted_scores(q, tail_k, scale_log2, SHIFT), float("-inf"))
    here = tail_scores
    if MANY_SPLITS:
        here = tl.where((tail_key // PER_SPLIT == split)[None, :], tail_scores, float("-inf"))
    scores = _block_scores(q, first_k.to(dtype), first, last, position, scale_log2, SHIFT, WINDOW)
    # The tail's keys are added last, but their maximum is included from the start, which saves a rescaling.
    best = tl.maximum(best_of(here), best_of(scores))
    weights = tl.exp2(scores - finite(best)[:, None]).to(dtype)
    nothing = tl.zeros([ROWS, LANES], tl.float32)
    total, out = weighted(weights, first_v.to(dtype), nothing, nothing)
    if FIRST < PER_SPLIT:
        numbers = page_numbers(pages, first, last, PAGE, PER_SPLIT)
        for block in range(first + FIRST, last, BLOCK_KEYS):
            k, v = cache_block(
                keys_base, values_base, pages, numbers, block, last, True, BLOCK_KEYS, SIZE, LANES, PAGE, PER_SPLIT
            )
            block_scores = _block_scores(q, k.to(dtype), block, last, position, scale_log2, SHIFT, WINDOW)
            best, total, out = attend_block(block_scores, v.to(dtype), best, total, out)
    total, out = weighted(tl.exp2(here - finite(best)[:, None]).to(dtype), tail_v, total, out)

    if MANY_SPLITS:
        apart = num_splits - first_split > 1
        if SPLITS_APART:  # noqa: SIM102 (a branch of the compiler's around one of the kernel's)
            if apart:
                part_row = out_row + program * num_tokens * HEADS
                _store_part(parts_ptr, bests_ptr, totals_ptr, part_row, best, total, out, row_inside, SIZE)
        if SPLITS_EACH:
            for other_split in range(split + programs, num_splits, programs):
                first = other_split * PER_SPLIT
                last = tl.minimum(first + PER_SPLIT, tail_begin)
                here = tl.where((tail_key // PER_SPLIT == other_split)[None, :], tail_scores, float("-inf"))
                next_best = best_of(here)
                next_total, next_out = nothing, nothing
                numbers = page_numbers(pages, first, last, PAGE, PER_SPLIT)
                for block in range(first, last, BLOCK_KEYS):
                    k, v = cache_block(
                        keys_base, values_base, pages, numbers, block, last, True, BLOCK_KEYS, SIZE, LANES, PAGE, PER_SPLIT
                    )
                    block_scores = _block_scores(q, k.to(dtype), block, last, position, scale_log2, SHIFT, WINDOW)
                    next_best, next_total, next_out = attend_block(block_scores, v.to(dtype), next_best, next_total, next_out)
                tail_weights = tl.exp2(here - finite(next_best)[:, None]).to(dtype)
                next_total, next_out = weighted(tail_weights, tail_v, next_total, next_out)
                if SPLITS_APART:
                    part_row = out_row + (other_split - first_split) * num_tokens * HEADS
                    _store_part(parts_ptr, bests_ptr, totals_ptr, part_row, next_best, next_total, next_out, row_inside, SIZE)
                else:
                    best, total, out = add_split(best, total, out, next_best, next_total, next_out)
        if SPLITS_APART:  # noqa: SIM102 (a branch of the compiler's around one of the kernel's)
            if apart:
                # All threads must have written their parts before the program is counted as finished.
                tl.debug_barrier()
                arrivals = arrivals_ptr + tl.program_id(0) * (KV_HEADS * ROW_BLOCKS) + tl.program_id(1)
                if tl.atomic_add(arrivals, 1, sem="acq_rel") < tl.minimum(num_splits - first_split, programs) - 1:
                    return
                tl.store(arrivals, 0)
                best = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS, LANES], tl.float32)
                out = tl.zeros([ROWS, LANES], tl.float32)
                for part in range(0, num_splits - first_split):
                    part_row = out_row + part * num_tokens * HEADS
                    next_best = tl.load(bests_ptr + part_row, mask=row_inside, other=float("-inf"), cache_modifier=".cg")
                    next_total = tl.load(totals_ptr + part_row, mask=row_inside, other=0.0, cache_modifier=".cg")
                    place = part_row[:, None] * SIZE + lane[None, :]
                    next_out = tl.load(parts_ptr + place, mask=q_mask, other=0.0, cache_modifier=".cg")
                    best, total, out = add_split(best, total, out, next_best, next_total[:, None], next_out)
    tl.store(out_ptr + out_place, normalised(total, out).to(dtype), mask=q_mask)


@jit
def _store_part(parts_ptr, bests_ptr, totals_ptr, part_row, best, total, out, row_inside, SIZE: tl.constexpr):
    """Stores the result of a split before normalisation."""
    lane = tl.arange(0, out.shape[1])[None, :]
    tl.store(bests_ptr + part_row, best, mask=row_inside)
    tl.store(totals_ptr + part_row[:, None] + 0 * lane, total, mask=row_inside[:, None] & (lane == 0))
    tl.store(parts_ptr + part_row[:, None] * SIZE + lane, out, mask=row_inside[:, None] & (lane < SIZE))
