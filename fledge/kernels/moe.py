"""Mixture of experts: routing, and products grouped by expert. One CUDA graph serves any routing.

    route     softmax of the router's scores, the highest K of each row                   one program per row
    group     pairs (row, choice) sorted by expert                                        one program
    gate_up   silu(gate) * up of every pair                                               programs by (outputs, expert)
    down      down projection of every pair, in fp32                                      programs by (outputs, expert)
    combine   residual + the weighted sum of a row's pairs, in the order of its choices   programs by (row, columns)

A row's result does not depend on the routing of other rows: weights are the dot's first operand and rows the second, so other
rows only change other columns. Inputs are summed in one order; a row's pairs are added in the row's own order.

Quantised experts are a `QuantizedWeight` with an additional first dimension, [E, O, …]. Their codes are multiplied and the sums
are scaled (`linear.codes`).

Shapes: N rows, D hidden size, I an expert's inner size, E experts, K experts per row, P = N K pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.linear.codes import Codes, add_product, scaled, units_of
from fledge.kernels.linear.slice_sums import silu_times
from fledge.kernels.linear.tiles import weight_parts
from fledge.kernels.quantization import GROUP_SIZE, QuantizedWeight
from fledge.kernels.triton_support import (
    by_device,
    constant,
    jit,
    let_next_start,
    next_power_of_2,
    overlap,
    prefetch,
    tl,
    wait_for_inputs,
)

TILE_OUTPUTS, TILE_INPUTS = 64, 64
PREFETCHED = constant(256)  # inputs of each line
FEW_ROWS, MANY_ROWS = 16, 64  # rows of an expert that are computed at a time
MAX_SORTED = 4096  # most pairs that one program sorts; torch sorts more


def route_reference(scores_NE: Tensor, num_chosen: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights [N, K] in fp32 and the indices [N, K] of each row's experts."""
    chosen = scores_NE.float().softmax(-1).topk(num_chosen, -1)
    weights = chosen.values / chosen.values.sum(-1, keepdim=True) if normalise else chosen.values
    # Rounded as in transformers.
    return weights.to(scores_NE.dtype).float(), chosen.indices


def experts_reference(
    experts: Sequence[Callable[[Tensor], Tensor]], x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, residual_ND: Tensor
) -> Tensor:
    """Returns residual + Σ_k weight_k expert_k(x), summed in fp32 in the order of the experts' indices for every row."""
    total = torch.zeros(x_ND.shape, dtype=torch.float32, device=x_ND.device)
    for expert in experts_NK.unique().tolist():
        rows, place = torch.where(experts_NK == expert)
        total.index_add_(0, rows, experts[expert](x_ND[rows]).float() * weights_NK[rows, place, None])
    return residual_ND + total.to(x_ND.dtype)


def route_triton(scores_NE: Tensor, num_chosen: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = scores_NE.shape
    assert scores_NE.stride(1) == 1
    weights = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=scores_NE.device)
    experts = torch.empty(num_rows, num_chosen, dtype=torch.int32, device=scores_NE.device)
    if num_rows:
        _route[(num_rows,)](
            scores_NE,
            weights,
            experts,
            scores_NE.stride(0),
            EXPERTS=num_experts,
            CHOSEN=num_chosen,
            EXPERTS_BLOCK=next_power_of_2(num_experts),
            CHOSEN_BLOCK=next_power_of_2(num_chosen),
            NORMALISE=normalise,
            num_warps=1,
            **overlap(scores_NE),
        )
    return weights, experts


route = by_device(route_triton, route_reference)


def experts_triton(
    gate_up_EOD: Tensor | QuantizedWeight,
    down_EDI: Tensor | QuantizedWeight,
    x_ND: Tensor,
    weights_NK: Tensor,
    experts_NK: Tensor,
    residual_ND: Tensor,
) -> Tensor:
    """Computes `experts_reference`, but adds a row's experts in the order of its choices. `gate_up_EOD`: [E, 2I, D]."""
    (num_rows, size), (num_experts, both) = x_ND.shape, weight_parts(gate_up_EOD)[0].shape[:2]
    inner = both // 2
    per_row = experts_NK.shape[1]
    pairs = num_rows * per_row
    out = torch.empty_like(residual_ND)
    if not pairs:
        return out
    assert all(x.is_contiguous() for x in (x_ND, weights_NK, experts_NK, residual_ND))
    groups = group_pairs(experts_NK.flatten(), num_experts)
    gated = x_ND.new_empty(pairs, inner)
    added = torch.empty(pairs, size, dtype=torch.float32, device=x_ND.device)
    block_rows = FEW_ROWS if pairs <= 8 * num_experts else MANY_ROWS
    slots = min(pairs, num_experts)
    for weight, x, y, is_gated in ((gate_up_EOD, x_ND, gated, True), (down_EDI, gated, added, False)):
        outputs = y.shape[1]
        codes, scales, offsets, shape = _operands(weight, x.shape[1])
        _expert_linear[(-(-outputs // TILE_OUTPUTS), slots)](
            x,
            codes,
            scales,
            offsets,
            y,
            *groups,
            CODES=shape,
            OUTPUTS=outputs,
            PER_ROW=per_row if is_gated else 1,
            GATED=is_gated,
            BLOCK_O=TILE_OUTPUTS,
            BLOCK_R=block_rows,
            num_warps=4,
            num_stages=4,
            **overlap(x_ND),
        )
    block = min(next_power_of_2(size), 1024)
    _combine[(num_rows, -(-size // block))](
        added,
        weights_NK,
        residual_ND,
        out,
        SIZE=size,
        PER_ROW=per_row,
        BLOCK=block,
        num_warps=max(block // 256, 1),
        **overlap(x_ND),
    )
    return out


def _operands(weight: Tensor | QuantizedWeight, inputs: int) -> tuple[Tensor, Tensor, Tensor, Codes]:
    """Returns codes, scales and offsets (any tensor if there are none) and the constant that says how to read them."""
    codes, scales, offsets, bits, group = weight_parts(weight)
    assert bits == 16 or group % GROUP_SIZE == 0
    scales_slices = scales is not None and group == inputs and offsets is None
    step = TILE_INPUTS if bits == 16 or scales_slices else math.gcd(group, TILE_INPUTS)
    shape = Codes(inputs, bits, group, offsets is not None, scales_slices, step)
    scales = codes if scales is None else scales
    offsets = scales if offsets is None else offsets
    assert all(part.is_contiguous() for part in (codes, scales, offsets))
    return units_of(codes, bits), scales, offsets, shape


class Groups(NamedTuple):
    """Pairs sorted by expert. Slot s < `num_slots` has the pairs order[starts[s] … starts[s] + counts[s])."""

    order_P: Tensor
    experts_S: Tensor
    starts_S: Tensor
    counts_S: Tensor
    num_slots: Tensor  # [1]


def group_pairs(experts_P: Tensor, num_experts: int) -> Groups:
    if len(experts_P) > MAX_SORTED:
        return group_pairs_reference(experts_P, num_experts)
    pairs, device = len(experts_P), experts_P.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    table = torch.empty(3, num_experts, dtype=torch.int32, device=device)
    num_slots = torch.empty(1, dtype=torch.int32, device=device)
    _group[(1,)](
        experts_P,
        order,
        *table,
        num_slots,
        PAIRS=pairs,
        EXPERTS=num_experts,
        PAIRS_BLOCK=max(next_power_of_2(pairs), 16),
        EXPERTS_BLOCK=next_power_of_2(num_experts + 1),
        num_warps=4,
        **overlap(experts_P),
    )
    return Groups(order, *table, num_slots)


def group_pairs_reference(experts_P: Tensor, num_experts: int) -> Groups:
    """Groups pairs with torch. Every expert has a slot, also without pairs, so that the host need not read a count."""
    order = experts_P.argsort(stable=True).int()
    numbers = torch.arange(num_experts, device=experts_P.device, dtype=torch.int32)
    counts = (experts_P[:, None] == numbers).sum(0).int()
    num_slots = torch.full((1,), num_experts, dtype=torch.int32, device=experts_P.device)
    return Groups(order, numbers, (counts.cumsum(0) - counts).int(), counts, num_slots)


@jit
def _route(
    scores_ptr,
    weights_ptr,
    experts_ptr,
    stride,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_BLOCK)
    place = tl.arange(0, CHOSEN_BLOCK)
    scores = tl.load(scores_ptr + row * stride + expert, mask=expert < EXPERTS, other=float("-inf"))
    wide = scores.to(tl.float32)
    shares = tl.exp(wide - tl.max(wide, axis=0))
    shares = shares / tl.sum(shares, axis=0)
    shares = tl.where(expert < EXPERTS, shares, -1.0)
    weights = tl.zeros([CHOSEN_BLOCK], tl.float32)
    chosen = tl.zeros([CHOSEN_BLOCK], tl.int32)
    for number in range(CHOSEN):
        best = tl.argmax(shares, axis=0)
        weights = tl.where(place == number, tl.max(shares, axis=0), weights)
        chosen = tl.where(place == number, best, chosen)
        shares = tl.where(expert == best, -1.0, shares)
    if NORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    weights = weights.to(scores.dtype).to(tl.float32)
    tl.store(weights_ptr + row * CHOSEN + place, weights, mask=place < CHOSEN)
    tl.store(experts_ptr + row * CHOSEN + place, chosen, mask=place < CHOSEN)


@jit
def _group(
    experts_ptr,
    order_ptr,
    slot_experts_ptr,
    starts_ptr,
    counts_ptr,
    num_slots_ptr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    pair = tl.arange(0, PAIRS_BLOCK)
    expert = tl.load(experts_ptr + pair, mask=pair < PAIRS, other=EXPERTS).to(tl.int32)
    ordered = tl.sort(expert * PAIRS_BLOCK + pair)
    tl.store(order_ptr + pair, ordered % PAIRS_BLOCK, mask=pair < PAIRS)
    number = tl.arange(0, EXPERTS_BLOCK)
    counts = tl.where(number < EXPERTS, tl.histogram(expert, EXPERTS_BLOCK), 0)
    is_used = (counts > 0).to(tl.int32)
    slot = tl.cumsum(is_used, axis=0) - 1
    used = counts > 0
    tl.store(slot_experts_ptr + slot, number, mask=used)
    tl.store(starts_ptr + slot, tl.cumsum(counts, axis=0) - counts, mask=used)
    tl.store(counts_ptr + slot, counts, mask=used)
    tl.store(num_slots_ptr, tl.sum(is_used, axis=0))


@jit
def _expert_linear(
    x_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    order_ptr,
    slot_experts_ptr,
    starts_ptr,
    counts_ptr,
    num_slots_ptr,
    CODES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    INPUTS: tl.constexpr = CODES.size
    BLOCK_I: tl.constexpr = CODES.step
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # The kernel before gate_up groups the pairs. It was complete before gate_up ran, so down reads the groups while that ends.
    if GATED:
        wait_for_inputs(PDL)
    slot = tl.program_id(1)
    if slot >= tl.load(num_slots_ptr):
        return
    expert = tl.load(slot_experts_ptr + slot).to(tl.int64)
    start = tl.load(starts_ptr + slot)
    count = tl.load(counts_ptr + slot)
    output = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = output < OUTPUTS
    step = tl.arange(0, BLOCK_I)
    # The outputs of all experts are consecutive lines of one weight.
    line = expert * (OUTPUTS * 2 if GATED else OUTPUTS) + output
    if CODES.bits == 16:  # the loop below first loads the order of the pairs, then weights
        last = expert * (OUTPUTS * 2 if GATED else OUTPUTS) + OUTPUTS - 1
        for i in tl.static_range(2 if GATED else 1):
            prefetch(weight_ptr + (tl.minimum(line, last) + i * OUTPUTS) * INPUTS, 0, INPUTS, PREFETCHED)
    weights_ptr = weight_ptr + line[:, None] * INPUTS + step[None, :]
    if not GATED:
        wait_for_inputs(PDL)
    for first in range(0, count, BLOCK_R):
        place = first + tl.arange(0, BLOCK_R)
        is_row = place < count
        pair = tl.load(order_ptr + start + place, mask=is_row, other=0).to(tl.int64)
        rows_ptr = x_ptr + (pair // PER_ROW)[None, :] * INPUTS + step[:, None]
        sums = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
        ups = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
        for k in range(0, INPUTS, BLOCK_I):
            is_input = k + step < INPUTS
            x = tl.load(rows_ptr + k, mask=is_input[:, None] & is_row[None, :], other=0.0)
            mask = is_output[:, None] & is_input[None, :]
            if CODES.bits < 16:
                parts = (weight_ptr, scales_ptr, offsets_ptr)
                sums = add_product(sums, x, *parts, line, is_output, k, BLOCK_O, CODES, dtype)
                if GATED:
                    ups = add_product(ups, x, *parts, line + OUTPUTS, is_output, k, BLOCK_O, CODES, dtype)
            else:
                weight = tl.load(weights_ptr + k, mask=mask, other=0.0)
                sums = tl.dot(weight, x, sums, input_precision="ieee")
                if GATED:
                    up = tl.load(weights_ptr + OUTPUTS * INPUTS + k, mask=mask, other=0.0)
                    ups = tl.dot(up, x, ups, input_precision="ieee")
        if CODES.scales_slices:
            none = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
            sums = scaled(sums, scales_ptr, line, is_output, 0, none, CODES)
            if GATED:
                ups = scaled(ups, scales_ptr, line + OUTPUTS, is_output, 0, none, CODES)
        to = out_ptr + pair[None, :] * OUTPUTS + output[:, None]
        if GATED:
            sums = silu_times(sums, ups, dtype)
        tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])
    # Not earlier: the next kernel would take memory bandwidth from this one while it waits.
    let_next_start(PDL)


@jit
def _combine(
    added_ptr,
    weights_ptr,
    residual_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(PER_ROW):
        part = tl.load(added_ptr + (row * PER_ROW + k) * SIZE + column, mask=inside, other=0.0)
        total += tl.load(weights_ptr + row * PER_ROW + k) * part
    residual = tl.load(residual_ptr + row * SIZE + column, mask=inside, other=0.0)
    rounded = total.to(residual.dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, (residual.to(tl.float32) + rounded).to(residual.dtype), mask=inside)
