"""Stores new keys and values in the paged cache by slot: with rotary embedding of queries and keys (`rope_cache`), or unchanged
(`store_kv`, for latent attention, which rotates its heads elsewhere).

`qkv_NX` holds a token's heads one after the other: H query heads, K key heads, K value heads. Queries and keys are rotated in
place, so that a prompt can attend over its own rows; keys and values are copied to the token's slot. Slot -1: not stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.attention.exact import head_scale
from fledge.kernels.triton_support import by_device, jit, next_power_of_2, tl

Norms = tuple[Tensor, Tensor, float]  # weights for queries and keys, epsilon


def rotate(x_NHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads. The sine includes the rotation's sign (`Rotary.table`), so a roll by half a head is enough."""
    half = x_NHE.shape[-1] // 2
    return torch.addcmul(x_NHE * cos, x_NHE.roll(half, -1), sin).to(x_NHE.dtype)


def store_kv_reference(k_NKE: Tensor, v_NKE: Tensor, slots_N: Tensor, keys_KSE: Tensor, values_KSE: Tensor) -> None:
    """Stores keys and values in the slots `slots_N`; -1: not stored."""
    stored = slots_N >= 0
    slots = slots_N[stored].long()
    keys_KSE[:, slots] = k_NKE[stored].transpose(0, 1).to(keys_KSE.dtype)
    values_KSE[:, slots] = v_NKE[stored].transpose(0, 1).to(values_KSE.dtype)


def rope_cache_reference(
    qkv_NX: Tensor,
    table_2PE: Tensor,
    positions_N: Tensor,
    slots_N: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    norms: Norms | None = None,
) -> None:
    """Norms and rotates queries and keys, stores keys and values. `table_2PE`: `Rotary.table` (cosines; signed sines)."""
    num_kv_heads, _, head_dim = keys_KSE.shape
    heads = qkv_NX.view(qkv_NX.shape[0], -1, head_dim)
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if norms is not None:
        q_weight, k_weight, eps = norms
        qk[:, :-num_kv_heads] = F.rms_norm(qk[:, :-num_kv_heads], q_weight.shape, q_weight, eps)
        qk[:, -num_kv_heads:] = F.rms_norm(qk[:, -num_kv_heads:], k_weight.shape, k_weight, eps)
    qk.copy_(rotate(qk, *table_2PE[:, positions_N].unsqueeze(-2)))
    store_kv_reference(qk[:, -num_kv_heads:], v, slots_N, keys_KSE, values_KSE)


def rope_cache_triton(
    qkv_NX: Tensor,
    table_2PE: Tensor,
    positions_N: Tensor,
    slots_N: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    norms: Norms | None = None,
) -> None:
    num_kv_heads, _, head_dim = keys_KSE.shape
    num_heads = qkv_NX.shape[1] // head_dim
    assert qkv_NX.is_contiguous()
    assert table_2PE.is_contiguous()
    assert keys_KSE.stride() == values_KSE.stride() == (keys_KSE.stride(0), head_dim, 1)
    q_weight, k_weight, eps = norms if norms is not None else (qkv_NX, qkv_NX, 0.0)
    if qkv_NX.shape[0]:
        _rope_cache[(qkv_NX.shape[0],)](
            qkv_NX,
            table_2PE,
            positions_N,
            slots_N,
            keys_KSE,
            values_KSE,
            q_weight,
            k_weight,
            eps,
            table_2PE.stride(0),
            keys_KSE.stride(0),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            HEADS_BLOCK=next_power_of_2(num_heads),
            HALF_BLOCK=next_power_of_2(head_dim // 2),
            HAS_NORMS=norms is not None,
            num_warps=2 if num_heads * head_dim <= 2048 else 8,
            enable_fp_fusion=False,
        )


rope_cache = by_device(rope_cache_triton, rope_cache_reference)


def store_kv_triton(k_NKE: Tensor, v_NKE: Tensor, slots_N: Tensor, keys_KSE: Tensor, values_KSE: Tensor) -> None:
    num_tokens, num_kv_heads, head_dim = k_NKE.shape
    assert v_NKE.shape == k_NKE.shape
    assert k_NKE.stride(2) == v_NKE.stride(2) == 1
    assert keys_KSE.stride() == values_KSE.stride() == (keys_KSE.stride(0), head_dim, 1)
    if num_tokens:
        _store_kv[(num_tokens, num_kv_heads)](
            k_NKE,
            v_NKE,
            slots_N,
            keys_KSE,
            values_KSE,
            k_NKE.stride(0),
            k_NKE.stride(1),
            v_NKE.stride(0),
            v_NKE.stride(1),
            keys_KSE.stride(0),
            SIZE=head_dim,
            LANES=next_power_of_2(head_dim),
            num_warps=1,
        )


store_kv = by_device(store_kv_triton, store_kv_reference)


@jit
def _rope_cache(
    qkv_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    table_stride,
    kv_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    lane = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < HEADS) & (lane < HALF)
    first_value = HEADS - KV_HEADS
    first_key = HEADS - 2 * KV_HEADS
    rotated = head < first_value

    x_ptr = qkv_ptr + row * (HEADS * 2 * HALF) + head * (2 * HALF) + lane
    low = tl.load(x_ptr, mask=inside, other=0.0)
    high = tl.load(x_ptr + HALF, mask=inside, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum((low * low).to(tl.float64), axis=1) + tl.sum((high * high).to(tl.float64), axis=1)
        scale = head_scale(squares, eps, 2 * HALF)
        lanes_inside = lane < HALF
        q_low = tl.load(q_weight_ptr + lane, mask=lanes_inside, other=0.0).to(tl.float32)
        q_high = tl.load(q_weight_ptr + HALF + lane, mask=lanes_inside, other=0.0).to(tl.float32)
        k_low = tl.load(k_weight_ptr + lane, mask=lanes_inside, other=0.0).to(tl.float32)
        k_high = tl.load(k_weight_ptr + HALF + lane, mask=lanes_inside, other=0.0).to(tl.float32)
        is_query = head < first_key
        normed_low = (low * scale[:, None] * tl.where(is_query, q_low, k_low)).to(dtype).to(tl.float32)
        normed_high = (high * scale[:, None] * tl.where(is_query, q_high, k_high)).to(dtype).to(tl.float32)
        low = tl.where(rotated, normed_low, low)
        high = tl.where(rotated, normed_high, high)

    cos = tl.load(table_ptr + position * (2 * HALF) + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    # The second half of the table's sines has no sign.
    sin = tl.load(table_ptr + table_stride + position * (2 * HALF) + HALF + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    # The same arithmetic as `exact.rotated`, so that a key has the same bits whichever kernel wrote it.
    new_low = tl.where(rotated, tl.fma(high, -sin, low * cos), low).to(dtype)
    new_high = tl.where(rotated, tl.fma(low, sin, high * cos), high).to(dtype)
    tl.store(x_ptr, new_low, mask=inside & rotated)
    tl.store(x_ptr + HALF, new_high, mask=inside & rotated)

    stored = inside & (slot >= 0)
    cache_type = keys_ptr.dtype.element_ty
    is_key = stored & (head >= first_key) & rotated
    key_ptr = keys_ptr + (head - first_key).to(tl.int64) * kv_head_stride + slot * (2 * HALF) + lane
    tl.store(key_ptr, new_low.to(cache_type), mask=is_key)
    tl.store(key_ptr + HALF, new_high.to(cache_type), mask=is_key)
    is_value = stored & (head >= first_value)
    value_ptr = values_ptr + (head - first_value).to(tl.int64) * kv_head_stride + slot * (2 * HALF) + lane
    tl.store(value_ptr, new_low.to(cache_type), mask=is_value)
    tl.store(value_ptr + HALF, new_high.to(cache_type), mask=is_value)


@jit
def _store_kv(
    k_ptr,
    v_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    kv_head_stride,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = (lane < SIZE) & (slot >= 0)
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + lane, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + lane, mask=mask, other=0.0)
    place = head * kv_head_stride + slot * SIZE + lane
    tl.store(keys_ptr + place, k.to(keys_ptr.dtype.element_ty), mask=mask)
    tl.store(values_ptr + place, v.to(values_ptr.dtype.element_ty), mask=mask)
