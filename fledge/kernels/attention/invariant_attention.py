"""Attention over the paged cache that gives a token the same numbers however it comes: in a prompt, in a piece of one, alone
or in a chain that is verified, whoever else is in the batch. For `--deterministic`.

    keys     | block | block | … | block | block | … |      blocks and shares of blocks are counted from position 0
             |<------- share 0 --------->|<- share 1 …

Within a share the softmax runs from block to block; the shares' results are joined from the first to the last. A program does
all shares of its rows, or, for few sequences, one of them, and a second kernel joins: the same sums either way. A key that a
row does not see adds exactly nothing. Query rows always lie in tiles of one size, since a tile's size decides in which order
the compiler adds.

Shapes: B sequences, N new tokens of all of them, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fledge.kernels.triton_support import attention_programs, jit, next_power_of_2, tl, use_triton

BLOCK = 64  # keys a step
SHARE = 1024


def invariant_attention(
    qkv_NX: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    page_size: int,
    *,
    longest: int,
    reach: int,
    first_rows_B: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """[N, H * E]. Keys and values of the new tokens are in the cache; their queries, rotated, are the first heads of `qkv_NX`.

    Sequence b has `counts[b]` new tokens from position `starts[b]` on; what lies at a negative one sees nothing. Its rows begin
    at `first_rows[b]`, or at b * longest, and its pages are `page_table[b]`; a flat table holds the slots of all rows of
    sequences that start at 0 (page size 1). `longest`: of the counts; `reach`: no key lies at or beyond it.
    """
    arguments = (qkv_NX, keys_KSE, values_KSE, page_table, starts_B, counts_B, page_size)
    options = {"longest": longest, "reach": reach, "first_rows_B": first_rows_B, "window": window}
    return (invariant_attention_triton if use_triton(qkv_NX) else invariant_attention_reference)(*arguments, **options)


def invariant_attention_reference(
    qkv_NX: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    page_size: int,
    *,
    longest: int,
    reach: int,
    first_rows_B: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Token by token: products of one shape have one order of sums."""
    num_kv_heads, _, size = keys_KSE.shape
    q_NHE = qkv_NX.view(len(qkv_NX), -1, size)[:, : -2 * num_kv_heads]
    out = torch.zeros_like(q_NHE, memory_format=torch.contiguous_format)
    first_rows = [b * longest for b in range(len(starts_B))] if first_rows_B is None else first_rows_B.tolist()
    for b, (first_row, start, count) in enumerate(zip(first_rows, starts_B.tolist(), counts_B.tolist(), strict=True)):
        table = page_table[first_row:] if page_table.dim() == 1 else page_table[b]
        for token in range(max(-start, 0), count):
            position = start + token
            key = torch.arange(max(position + 1 - window, 0) if window else 0, position + 1, device=qkv_NX.device)
            slot = table.long()[key // page_size] * page_size + key % page_size
            q = q_NHE[first_row + token].reshape(num_kv_heads, -1, size).clone()
            scores = torch.bmm(q, keys_KSE[:, slot].to(q.dtype).transpose(1, 2)) * size**-0.5
            out[first_row + token] = torch.bmm(scores.softmax(-1), values_KSE[:, slot].to(q.dtype)).view(-1, size)
    return out.flatten(1)


def invariant_attention_triton(
    qkv_NX: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    page_table: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    page_size: int,
    *,
    longest: int,
    reach: int,
    first_rows_B: Tensor | None = None,
    window: int | None = None,
    apart: bool | None = None,
) -> Tensor:
    """`apart`: whether shares are programs of their own; None: where there are few programs."""
    (num_kv_heads, _, size), batch = keys_KSE.shape, len(starts_B)
    num_tokens, num_heads = len(qkv_NX), qkv_NX.shape[1] // size - 2 * num_kv_heads
    flat = page_table.dim() == 1
    assert qkv_NX.is_contiguous()
    assert keys_KSE.stride() == values_KSE.stride() == (keys_KSE.stride(0), size, 1)
    assert page_table.stride(-1) == 1
    assert not flat or (first_rows_B is not None and page_size == 1)
    group = num_heads // num_kv_heads
    rows = 64 if qkv_NX.element_size() == 2 else max(next_power_of_2(group), 16)
    blocks = -(-longest // (rows // group))
    shares = -(-reach // SHARE)
    if apart is None:
        apart = batch * blocks * num_kv_heads < attention_programs(qkv_NX.device)
    apart = apart and shares > 1
    # Rows between sequences and after the last belong to no sequence, and stay 0.
    make = torch.zeros if first_rows_B is not None else torch.empty
    out = make((num_tokens, num_heads * size), dtype=qkv_NX.dtype, device=qkv_NX.device)
    if not num_tokens:
        return out
    parts, lse = out, starts_B  # the latter is not written
    if apart:
        parts = torch.empty((shares, num_tokens, num_heads, size), dtype=torch.float32, device=out.device)
        lse = torch.empty((shares, num_tokens, num_heads), dtype=torch.float32, device=out.device)
    first_rows = first_rows_B if first_rows_B is not None else starts_B
    shape = {
        "LONGEST": 0 if first_rows_B is not None else longest,
        "HEADS": num_heads,
        "SIZE": size,
        "PER_SHARE": SHARE,
        "WINDOW": window or 0,
    }
    _invariant_attention[(batch * blocks, num_kv_heads, shares if apart else 1)](
        qkv_NX,
        keys_KSE,
        values_KSE,
        page_table,
        first_rows,
        starts_B,
        counts_B,
        parts,
        lse,
        size**-0.5 * math.log2(math.e),
        keys_KSE.stride(0),
        0 if flat else page_table.stride(0),
        num_tokens,
        blocks,
        **shape,
        KV_HEADS=num_kv_heads,
        LANES=max(next_power_of_2(size), 16),
        ROWS=rows,
        PAGE=page_size,
        FLAT=flat,
        APART=apart,
        BLOCK_KEYS=BLOCK,
        num_warps=4,
        num_stages=3,
    )
    if apart:
        _join_shares[(batch, longest, num_heads)](
            parts, lse, first_rows, starts_B, counts_B, out, num_tokens, **shape, LANES=next_power_of_2(size), num_warps=1
        )
    return out


@jit
def _joined(out, total, best, part, lse):
    """The shares so far and the next one. Multiply-adds are spelt out: left to the compiler, two kernels might round apart."""
    new_best = tl.maximum(best, lse)
    # A row that has seen no key yet has no finite maximum to subtract.
    safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight, shrink = tl.exp2(lse - safe_best), tl.exp2(best - safe_best)
    out = tl.fma(part, weight[:, None], out * shrink[:, None])
    return out, tl.fma(total, shrink, weight), new_best


@jit
def _invariant_attention(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    page_table_ptr,
    first_rows_ptr,
    starts_ptr,
    counts_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    kv_head_stride,
    pages_stride,
    num_tokens,
    blocks,
    LONGEST: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PER_SHARE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    FLAT: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    first_token = (tl.program_id(0) % blocks) * TOKENS
    start = tl.load(starts_ptr + sequence).to(tl.int32)
    count = tl.load(counts_ptr + sequence).to(tl.int32)
    if LONGEST > 0:
        first_row, limit = sequence * LONGEST, LONGEST
    else:
        first_row, limit = tl.load(first_rows_ptr + sequence).to(tl.int64), count
    if first_token >= limit:
        return
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    lane = tl.arange(0, LANES)
    lane_inside = lane < SIZE
    row_inside = (row < TOKENS * GROUP) & (token < limit)
    # What lies in a row that is no token sees nothing.
    position = tl.where(token < count, start + token, -1)
    end = tl.where(first_token < count, start + tl.minimum(first_token + TOKENS, count), 0)
    first_share, last_share = 0, (end + PER_SHARE - 1) // PER_SHARE
    if APART:
        first_share = tl.program_id(2)
        if (first_share >= last_share) & (first_share > 0):
            return
        last_share = first_share + 1
    q_mask = row_inside[:, None] & lane_inside[None, :]
    q_row = (first_row + token) * (HEADS + 2 * KV_HEADS) + head
    q = tl.load(qkv_ptr + q_row[:, None] * SIZE + lane[None, :], mask=q_mask, other=0.0)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + first_token + 1 - WINDOW, 0) // BLOCK_KEYS * BLOCK_KEYS
    keys_base = keys_ptr + kv_head.to(tl.int64) * kv_head_stride
    values_base = values_ptr + kv_head.to(tl.int64) * kv_head_stride
    if FLAT:
        pages = page_table_ptr + first_row
    else:
        pages = page_table_ptr + sequence * pages_stride

    all_best = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, LANES], tl.float32)
    for share in range(first_share, last_share):
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        part = tl.zeros([ROWS, LANES], tl.float32)
        for block in range(tl.maximum(share * PER_SHARE, begin), tl.minimum((share + 1) * PER_SHARE, end), BLOCK_KEYS):
            key = block + tl.arange(0, BLOCK_KEYS)
            key_inside = key < end
            if PAGE % BLOCK_KEYS == 0:
                # Blocks start at multiples of their size, so a block lies in one page.
                slot = tl.load(pages + block // PAGE).to(tl.int64) * PAGE + block % PAGE + tl.arange(0, BLOCK_KEYS)
            else:
                slot = tl.load(pages + key // PAGE, mask=key_inside, other=0).to(tl.int64) * PAGE + key % PAGE
            offsets = slot[:, None] * SIZE + lane[None, :]
            mask = key_inside[:, None] & lane_inside[None, :]
            k = tl.load(keys_base + offsets, mask=mask, other=0.0).to(q.dtype)
            v = tl.load(values_base + offsets, mask=mask, other=0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > (position - WINDOW)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights = tl.exp2(scores - safe_best[:, None])
            shrink = tl.exp2(best - safe_best)
            total = tl.fma(total, shrink, tl.sum(weights, axis=1))
            part = tl.dot(weights.to(q.dtype), v, part * shrink[:, None], input_precision="ieee")
            best = new_best
        safe_total = tl.where(total == 0.0, 1.0, total)
        part = part / safe_total[:, None]
        out, all_total, all_best = _joined(out, all_total, all_best, part, best + tl.log2(safe_total))

    out_row = (first_row + token) * HEADS + head
    if APART:
        out_row += first_share.to(tl.int64) * num_tokens * HEADS
        tl.store(lse_ptr + out_row, all_best, mask=row_inside)
    else:
        out = out / tl.where(all_total == 0.0, 1.0, all_total)[:, None]
    tl.store(out_ptr + out_row[:, None] * SIZE + lane[None, :], out.to(out_ptr.dtype.element_ty), mask=q_mask)


@jit
def _join_shares(
    parts_ptr,
    lse_ptr,
    first_rows_ptr,
    starts_ptr,
    counts_ptr,
    out_ptr,
    num_tokens,
    LONGEST: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PER_SHARE: tl.constexpr,
    WINDOW: tl.constexpr,
    LANES: tl.constexpr,
):
    sequence, token, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts_ptr + sequence).to(tl.int32)
    if LONGEST > 0:
        first_row, limit = sequence * LONGEST, LONGEST
    else:
        first_row, limit = tl.load(first_rows_ptr + sequence).to(tl.int64), count
    if token >= limit:
        return
    position = tl.load(starts_ptr + sequence).to(tl.int32) + token
    lane = tl.arange(0, LANES)
    mask = (lane < SIZE)[None, :]
    row = (first_row + token) * HEADS + head
    out = tl.zeros([1, LANES], tl.float32)
    total = tl.zeros([1], tl.float32)
    best = tl.full([1], float("-inf"), tl.float32)
    last_share = tl.where(token < count, position // PER_SHARE + 1, 0)
    part_row = row + tl.arange(0, 1)
    for _ in range(0, last_share):
        lse = tl.load(lse_ptr + part_row)
        part = tl.load(parts_ptr + part_row[:, None] * SIZE + lane[None, :], mask=mask, other=0.0)
        out, total, best = _joined(out, total, best, part, lse)
        part_row += num_tokens * HEADS
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + row * SIZE + lane[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
