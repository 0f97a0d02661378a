"""Stores the hidden states of a verification pass in device buffers by row and position, for learning."""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.triton_support import by_device, jit, next_power_of_2, tl


def store_states_reference(
    states_ND: Tensor, buffer_SD: Tensor, slot_R: Tensor, starts_B: Tensor, active_B: Tensor, num_slots: int, limit: int
) -> None:
    """Stores the states of B rows of T verified tokens (N = B * T), each row's first at position `starts`. Slot s begins at
    place s * limit of the buffer.

    Nothing is stored for rows that are inactive or have no slot (`slot_R` >= `num_slots`), or from position `limit` on.
    """
    width = len(states_ND) // len(starts_B)
    positions_BT = starts_B[:, None].long() + torch.arange(width, device=starts_B.device)
    slots_BT = slot_R[: len(starts_B), None].expand(-1, width)
    is_kept = ((active_B[:, None] > 0) & (slots_BT < num_slots) & (positions_BT < limit)).flatten()
    places = (slots_BT * limit + positions_BT).flatten()[is_kept]
    buffer_SD[places] = states_ND[is_kept].to(buffer_SD.dtype)


def store_states_triton(
    states_ND: Tensor, buffer_SD: Tensor, slot_R: Tensor, starts_B: Tensor, active_B: Tensor, num_slots: int, limit: int
) -> None:
    num_tokens, size = states_ND.shape
    assert states_ND.stride(1) == 1
    assert buffer_SD.is_contiguous()
    _store_states[(num_tokens,)](
        states_ND,
        buffer_SD,
        slot_R,
        starts_B,
        active_B,
        states_ND.stride(0),
        num_slots,
        limit,
        WIDTH=num_tokens // len(starts_B),
        SIZE=size,
        LANES=next_power_of_2(size),
        num_warps=4,
    )


store_states = by_device(store_states_triton, store_states_reference)


@jit
def _store_states(
    states_ptr,
    buffer_ptr,
    slot_ptr,
    starts_ptr,
    active_ptr,
    states_stride,
    num_slots,
    limit,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = token // WIDTH
    slot = tl.load(slot_ptr + row).to(tl.int64)
    position = tl.load(starts_ptr + row).to(tl.int64) + token % WIDTH
    is_kept = (tl.load(active_ptr + row) > 0) & (slot < num_slots) & (position < limit)
    lane = tl.arange(0, LANES)
    mask = (lane < SIZE) & is_kept
    states = tl.load(states_ptr + token * states_stride + lane, mask=mask, other=0.0)
    place = (slot * limit + position) * SIZE + lane
    tl.store(buffer_ptr + place, states.to(buffer_ptr.dtype.element_ty), mask=mask)
