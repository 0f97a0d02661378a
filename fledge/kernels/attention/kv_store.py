"""New keys and values, as they are, into the paged cache by slot: for heads that are rotated elsewhere (latent attention)."""

from __future__ import annotations

from torch import Tensor

from fledge.kernels.triton_support import by_device, jit, next_power_of_2, tl


def store_kv_reference(k_NKE: Tensor, v_NKE: Tensor, slots_N: Tensor, keys_KSE: Tensor, values_KSE: Tensor) -> None:
    """`slots_N`: -1 is stored nowhere."""
    stored = slots_N >= 0
    slots = slots_N[stored].long()
    keys_KSE[:, slots] = k_NKE[stored].transpose(0, 1).to(keys_KSE.dtype)
    values_KSE[:, slots] = v_NKE[stored].transpose(0, 1).to(values_KSE.dtype)


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
