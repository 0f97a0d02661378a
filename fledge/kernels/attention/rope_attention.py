"""Rotary embedding, the new keys' way into the paged cache, and attention of a chain of new tokens, in one kernel.

Shapes: B sequences, T new tokens each (one after the other in `qkv`), H query heads, K key/value heads, E head size.

    one sequence:   | start settled keys, in the cache | count new ones, stored here | T - count: neither stored nor seen |

Token t lies at position start + t and sees the settled keys and the new ones up to itself. count 0: an empty row, output 0.
A program takes a sequence, a key/value head and a share of the settled keys; the first also takes the new ones. Short contexts
are one share. The program that finishes last joins several shares, always in the same order.

Everything but `qkv_NX` is read while kernels before this one still run. Of these, one must have been started only after what
this one reads was complete: see `before_attention` of `linear.dispatch`. (Kernels of libraries never let anything start
early.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.attention.paged import attention_reference
from fledge.kernels.attention.rope_cache import rope_cache_reference
from fledge.kernels.triton_support import (
    attention_programs,
    jit,
    let_next_start,
    loaded,
    multiprocessors,
    next_power_of_2,
    overlap,
    shared_memory,
    tl,
    use_triton,
    wait_for_inputs,
)

Norms = tuple[Tensor, Tensor, float]  # weights for queries and keys, epsilon

# Query rows a program: more rows are more programs, whose registers leave room for the kernels around them.
MAX_ROWS = 32


class Form(NamedTuple):
    """Of a program."""

    # Of the keys, and of the values, that it has loaded before the queries are there: for 32768 256 keys of SmolLM2.
    first_bytes: int
    warps: int
    registers: int


# Few programs (`few_programs`) may fill a multiprocessor each; others leave room for a second one or for the kernels around
# them. Keys beyond the first come one block after the other: with 300 of them a step of four rows took 465 µs in the second
# form and 385 in the first, with 150 403 and 384. Below 256 one row (365 and 384) and drafts lose a little; beyond all win.
FEW, SOME = Form(65536, 8, 255), Form(32768, 8, 128)
# Beyond so many keys the second form is faster: there are shares enough for two programs a multiprocessor. (Of 8,192 keys the
# first takes three quarters of the second's time, of 32,768 a tenth more, of 131,072 a third more.)
FEW_KEYS = 16384
FEW_SHARED_MEMORY = 184 * 1024  # bytes that one in the first form may want; cards from Hopper's data centres have them
# Settled keys below which joining shares costs more than it saves.
SMALLEST_SHARE = 512
MAX_SHARES = 64
STREAMED_KEYS = 64
MOST_KEYS = 128  # of the blocks after the first


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
    arrivals: Tensor | None = None,
) -> Tensor:
    """The attention's output [N, H * E], N = B * T. `table_2PE`: `Rotary.table`. `qkv_NX` may be overwritten.

    `arrivals`: see `arrival_counts`.
    """
    arguments = (qkv_NX, table_2PE, starts_B, counts_B, keys_KSE, values_KSE, page_table_BP, page_size)
    if use_triton(qkv_NX):
        return rope_attention_triton(*arguments, norms=norms, window=window, arrivals=arrivals)
    return rope_attention_reference(*arguments, norms=norms, window=window)


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
    arrivals: Tensor | None = None,
    smallest_share: int = SMALLEST_SHARE,
    streamed: bool | None = None,
    form: Form | None = None,
) -> Tensor:
    """`streamed`: keys come in small blocks all the way; None: where there are more programs than run at once, which wait for
    each other anyhow. `form`: None chooses by their number and the most keys."""
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
    reach = page_table_BP.shape[1] * page_size
    form = form or choose_form(num_programs, reach if window is None else min(reach, window), qkv_NX.device)
    first = min(max(form.first_bytes // (lanes * qkv_NX.element_size()), 64), form.first_bytes // 128)
    enough = attention_programs(qkv_NX.device)
    streamed = num_programs > enough if streamed is None else streamed
    first, block = (STREAMED_KEYS, STREAMED_KEYS) if streamed else (first, min(first // 2, MOST_KEYS))
    shares = choose_shares(num_programs, reach if window is None else min(reach, window + first), enough, smallest_share)
    device = qkv_NX.device
    out = torch.empty((len(qkv_NX), num_heads * head_dim), dtype=qkv_NX.dtype, device=device)
    parts = lse = out
    if shares > 1:
        parts = torch.empty((shares, len(qkv_NX), num_heads, head_dim), dtype=torch.float32, device=device)
        lse = torch.empty((shares, len(qkv_NX), num_heads), dtype=torch.float32, device=device)
        arrivals = arrival_counts(device) if arrivals is None else arrivals
        assert num_programs <= len(arrivals)
    else:
        arrivals = out
    q_weight, k_weight, eps = norms if norms is not None else (qkv_NX, qkv_NX, 0.0)
    _rope_attention[(batch, num_kv_heads * row_blocks, shares)](
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
        SIZE=head_dim,
        LANES=lanes,
        ROWS=rows,
        ROW_BLOCKS=row_blocks,
        PAGE=page_size,
        FIRST=first,
        BLOCK_KEYS=block,
        SHARES=shares,
        SMALLEST_SHARE=max(smallest_share, first),
        WINDOW=window or 0,
        HAS_NORMS=norms is not None,
        num_warps=4 if streamed else form.warps,
        num_stages=3,
        maxnreg=SOME.registers if streamed else form.registers,
        **overlap(qkv_NX),
    )
    return out


def few_programs(device: torch.device) -> int:
    """48 on an H200."""
    return multiprocessors(device) * 4 // 11


def choose_form(num_programs: int, max_keys: int, device: torch.device) -> Form:
    if device.type != "cuda" or num_programs > few_programs(device) or max_keys > FEW_KEYS:  # the interpreter need not hurry
        return SOME
    return FEW if shared_memory(device) >= FEW_SHARED_MEMORY else SOME


def choose_shares(num_programs: int, max_keys: int, enough_programs: int, smallest_share: int = SMALLEST_SHARE) -> int:
    """Most shares of the keys, a power of two: enough programs to fill the device, none with too few keys."""
    wanted = min(enough_programs // max(num_programs, 1), -(-max_keys // smallest_share), MAX_SHARES)
    return 1 << max(wanted, 1).bit_length() - 1


def arrival_counts(device: torch.device) -> Tensor:
    """How many shares of each program's keys are done; every launch leaves zeros. Keys are split only below so many programs.

    Launches that may run at once (two engines, two streams) need one each.
    """
    return torch.zeros(attention_programs(device), dtype=torch.int32, device=device)


@jit
def _rotated(x, weight_ptr, lane, cos, sin, eps, SIZE: tl.constexpr, HAS_NORMS: tl.constexpr, dtype: tl.constexpr):
    """Heads, normed if asked for. The sign of the rotation is in the table's sines."""
    x = x.to(tl.float32)
    if HAS_NORMS:
        scale = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / SIZE + eps))[:, None]
        weight = tl.load(weight_ptr + lane, mask=lane < SIZE, other=0.0).to(tl.float32)
        x = (x * scale * weight[None, :]).to(dtype).to(tl.float32)
    HALF: tl.constexpr = SIZE // 2
    partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
    other = tl.gather(x, tl.broadcast_to(partner[None, :], x.shape), axis=1)
    return loaded((x * cos + other * sin).to(dtype))  # else the above is done once per warp, in several times the registers


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
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SHARES: tl.constexpr,
    SMALLEST_SHARE: tl.constexpr,
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
    dtype = qkv_ptr.dtype.element_ty
    row = row_block * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    lane = tl.arange(0, LANES)
    row_inside, lane_inside = row < NEW * GROUP, lane < SIZE
    q_mask = row_inside[:, None] & lane_inside[None, :]
    out_row = (sequence * NEW + token) * HEADS + head
    out_place = out_row[:, None] * SIZE + lane[None, :]

    # Known before the queries are: where the sequence stands, its settled keys and values, the angles.
    # Past the multiprocessor's own cache, which other kernels' old values may lie in.
    start = tl.load(starts_ptr + sequence, cache_modifier=".cg").to(tl.int32)
    count = tl.load(counts_ptr + sequence, cache_modifier=".cg").to(tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + 1 - WINDOW, 0) // BLOCK_KEYS * BLOCK_KEYS
    share, num_shares = start, 1
    if SHARES > 1:
        share = (start - begin + SHARES - 1) // SHARES
        share = tl.maximum((share + BLOCK_KEYS - 1) // BLOCK_KEYS * BLOCK_KEYS, SMALLEST_SHARE)
        num_shares = tl.maximum((start - begin + share - 1) // share, 1)
    if (count == 0) | (split >= num_shares):
        if split == 0:
            wait_for_inputs(PDL)  # here too: a kernel is complete only after the one before it
            tl.store(out_ptr + out_place, tl.zeros([ROWS, LANES], dtype), mask=q_mask)
        return
    first = begin + split * share
    last = tl.minimum(first + share, start)
    keys_base = keys_ptr + kv_head.to(tl.int64) * kv_head_stride
    values_base = values_ptr + kv_head.to(tl.int64) * kv_head_stride
    pages = page_table_ptr + sequence * pages_stride
    key = first + tl.arange(0, FIRST)
    key_inside = key < last
    page = tl.load(pages + key // PAGE, mask=key_inside, other=0, cache_modifier=".cg").to(tl.int64)
    offsets = (page * PAGE + key % PAGE)[:, None] * SIZE + lane[None, :]
    kv_mask = key_inside[:, None] & lane_inside[None, :]
    old_k = tl.load(keys_base + offsets, mask=kv_mask, other=0.0, cache_modifier=".cg")
    old_v = tl.load(values_base + offsets, mask=kv_mask, other=0.0, cache_modifier=".cg")
    angle = table_ptr + tl.minimum(start + token, last_position)[:, None].to(tl.int64) * SIZE + lane[None, :]
    q_cos = tl.load(angle, mask=q_mask, other=0.0)
    q_sin = tl.load(angle + table_stride, mask=q_mask, other=0.0)
    new = tl.arange(0, NEW_BLOCK)
    valid = new < count
    new_mask = valid[:, None] & lane_inside[None, :]
    place = start + new
    angle = table_ptr + place[:, None].to(tl.int64) * SIZE + lane[None, :]
    k_cos = tl.load(angle, mask=new_mask, other=0.0)
    k_sin = tl.load(angle + table_stride, mask=new_mask, other=0.0)
    new_page = tl.load(pages + place // PAGE, mask=valid, other=0, cache_modifier=".cg").to(tl.int64)
    new_offsets = (new_page * PAGE + place % PAGE)[:, None] * SIZE + lane[None, :]
    q_cos, q_sin, k_cos, k_sin = loaded(q_cos), loaded(q_sin), loaded(k_cos), loaded(k_sin)

    wait_for_inputs(PDL)
    TOKEN: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    q_heads = qkv_ptr + (sequence * NEW + token)[:, None] * TOKEN + head[:, None] * SIZE + lane[None, :]
    k_heads = qkv_ptr + (sequence * NEW + new)[:, None] * TOKEN + (HEADS + kv_head) * SIZE + lane[None, :]
    q = tl.load(q_heads, mask=q_mask, other=0.0)
    new_k = tl.load(k_heads, mask=new_mask, other=0.0)
    new_v = tl.load(k_heads + KV_HEADS * SIZE, mask=new_mask, other=0.0)
    old_k, old_v, q, new_k, new_v = loaded(old_k), loaded(old_v), loaded(q), loaded(new_k), loaded(new_v)
    q = _rotated(q, q_weight_ptr, lane, q_cos, q_sin, eps, SIZE, HAS_NORMS, dtype)
    new_k = _rotated(new_k, k_weight_ptr, lane, k_cos, k_sin, eps, SIZE, HAS_NORMS, dtype)
    store = new_mask & (split == 0) & (row_block == 0)
    tl.store(keys_base + new_offsets, new_k.to(keys_ptr.dtype.element_ty), mask=store)
    tl.store(values_base + new_offsets, new_v.to(values_ptr.dtype.element_ty), mask=store)

    new_scores = tl.dot(q, tl.trans(new_k), input_precision="ieee") * scale_log2
    seen = row_inside[:, None] & valid[None, :] & (new[None, :] <= token[:, None]) & (split == 0)
    if WINDOW > 0:
        seen = seen & (new[None, :] > token[:, None] - WINDOW)
    new_scores = tl.where(seen, new_scores, float("-inf"))
    scores = tl.dot(q, tl.trans(old_k.to(dtype)), input_precision="ieee") * scale_log2
    seen = row_inside[:, None] & key_inside[None, :]
    if WINDOW > 0:
        seen = seen & (key[None, :] > (start + token - WINDOW)[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    best = tl.maximum(tl.max(new_scores, axis=1), tl.max(scores, axis=1))
    # A row that has seen no key yet has no finite maximum to subtract.
    safe_best = tl.where(best == float("-inf"), 0.0, best)
    new_weights = tl.exp2(new_scores - safe_best[:, None])
    weights = tl.exp2(scores - safe_best[:, None])
    total = tl.sum(new_weights, axis=1) + tl.sum(weights, axis=1)
    out = tl.dot(new_weights.to(dtype), new_v, input_precision="ieee")
    out = tl.dot(weights.to(dtype), old_v.to(dtype), out, input_precision="ieee")

    for block in range(first + FIRST, last, BLOCK_KEYS):
        later = block + tl.arange(0, BLOCK_KEYS)
        later_inside = later < last
        if PAGE % BLOCK_KEYS == 0:
            # Blocks start at multiples of their size, so a block lies in one page.
            slot = tl.load(pages + block // PAGE).to(tl.int64) * PAGE + block % PAGE + tl.arange(0, BLOCK_KEYS)
        else:
            slot = tl.load(pages + later // PAGE, mask=later_inside, other=0).to(tl.int64) * PAGE + later % PAGE
        later_offsets = slot[:, None] * SIZE + lane[None, :]
        later_mask = later_inside[:, None] & lane_inside[None, :]
        later_k = tl.load(keys_base + later_offsets, mask=later_mask, other=0.0).to(dtype)
        later_v = tl.load(values_base + later_offsets, mask=later_mask, other=0.0).to(dtype)
        later_scores = tl.dot(q, tl.trans(later_k), input_precision="ieee") * scale_log2
        later_seen = row_inside[:, None] & later_inside[None, :]
        if WINDOW > 0:
            later_seen = later_seen & (later[None, :] > (start + token - WINDOW)[:, None])
        later_scores = tl.where(later_seen, later_scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(later_scores, axis=1))
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        later_weights = tl.exp2(later_scores - safe_best[:, None])
        shrink = tl.exp2(best - safe_best)
        total = total * shrink + tl.sum(later_weights, axis=1)
        out = tl.dot(later_weights.to(dtype), later_v, out * shrink[:, None], input_precision="ieee")
        best = new_best

    safe_total = tl.where(total == 0.0, 1.0, total)
    out = out / safe_total[:, None]
    if num_shares > 1:
        part_row = split * num_tokens * HEADS + out_row
        tl.store(parts_ptr + part_row[:, None] * SIZE + lane[None, :], out, mask=q_mask)
        tl.store(lse_ptr + part_row, best + tl.log2(safe_total), mask=row_inside)
        # All threads' parts are written before the program counts as arrived.
        tl.debug_barrier()
        arrivals = arrivals_ptr + tl.program_id(0) * (KV_HEADS * ROW_BLOCKS) + tl.program_id(1)
        if tl.atomic_add(arrivals, 1, sem="acq_rel") < num_shares - 1:
            return
        tl.store(arrivals, 0)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, LANES], tl.float32)
        for other in range(0, num_shares):
            part_row = other * num_tokens * HEADS + out_row
            part_place = part_row[:, None] * SIZE + lane[None, :]
            lse = tl.load(lse_ptr + part_row, mask=row_inside, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(parts_ptr + part_place, mask=q_mask, other=0.0, cache_modifier=".cg")
            new_best = tl.maximum(best, lse)
            safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
            weight, shrink = tl.exp2(lse - safe_best), tl.exp2(best - safe_best)
            out = out * shrink[:, None] + part * weight[:, None]
            total = total * shrink + weight
            best = new_best
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + out_place, out.to(dtype), mask=q_mask)
