"""The order in which a linear's products are summed: fixed by the weight's shape, never by the number of rows.

The inputs are cut into slices. Within a slice, groups of 16 neighbouring inputs are added one after the other to one fp32 sum;
the sums of the slices are added in order. Every kernel of this folder follows that, so a row's result has the same bits alone,
in a batch, in a verification and in a prefill. On an H200 the tensor cores' instructions (mma.sync, wgmma, any tile, also
within cuBLAS where it does not split K) give the same bits for the same groups; the order within a group does not matter.

Slices run at the same time, so narrow weights, which have few outputs to share out, have more of them; so have long ones:

    outputs      inputs                  slices
    >= 3840      up to 8192              1       enough outputs for every multiprocessor; cuBLAS can serve many rows
    >= 3840      16384, more             2, 4    a slice is at most 8,192 inputs (10 µs of dependent instructions)
    fewer        any                     4

A norm before a linear scales its inputs and rounds them. For narrow weights of up to 1,536 inputs (1,024 if gated) the scale is
applied to the sums instead, so that products do not wait for it: 2 x 0.35 µs a layer.

Quantised weights have their own slices. A program of few rows has a warp for each slice, which unpacks codes as well as
multiplies, so it takes more warps to keep the memory busy; no library has to sum in the same order.

    outputs      inputs         slices
    >= 32000     up to 8192     1       a head: the token is chosen where its logits are made
    >= 8192      any            4       (and gated weights)
    fewer        below 4096     4
    fewer        4096, more     8

Tensor cores multiply the codes themselves, which bfloat16 holds exactly. Scales are applied to sums: of all inputs of a slice
if they share a scale, else of those that do, 128 or 64 at most (`inputs_of_a_sum`). Such a sum starts at zero; then
total = fma(sum, scale, total), and with offsets total = fma(sum of the inputs, offset, total).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fledge.kernels.gluon_support import gluon
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import is_hopper_or_newer

CHUNK = 64  # inputs; slices begin at a multiple
NARROW = 3840  # outputs, below which a weight is narrow
LONGEST_SLICE = 8192
REGISTER_INPUTS, GATED_REGISTER_INPUTS = 1536, 1024  # of a narrow weight whose slices fit the registers of `register_mma`
HEAD, BROAD, LONG = 32000, 8192, 4096  # outputs of a quantised head; outputs and inputs that decide on 4 or 8 slices


class Summation(NamedTuple):
    slices: int
    scales_sums: bool  # a norm scales the sums, not the inputs
    slice_inputs: int  # of a slice; the last ones may be shorter or empty

    @property
    def step(self) -> int:
        """Inputs that kernels for quantised weights read at once."""
        return 128 if self.slice_inputs % 128 == 0 else 64


def summation(
    inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False, quantised: bool = False
) -> Summation:
    """`outputs`: of the weight, both halves of a gated one."""
    longest = min(1 << ((inputs - 1) // LONGEST_SLICE).bit_length(), 4)
    if quantised:
        is_head = outputs >= HEAD and not gated
        slices = longest if is_head else 4 if gated or outputs >= BROAD or inputs < LONG else 8
        return Summation(slices, False, _slice_inputs(inputs, slices))
    is_narrow = outputs < NARROW
    fits = inputs <= (GATED_REGISTER_INPUTS if gated else REGISTER_INPUTS)
    slices = 4 if is_narrow else longest
    return Summation(slices, is_narrow and fits and supports_registers(inputs, dtype, device), _slice_inputs(inputs, slices))


def _slice_inputs(inputs: int, slices: int) -> int:
    return -(-inputs // (CHUNK * slices)) * CHUNK


def inputs_of_a_sum(order: Summation, weight: QuantizedWeight) -> int:
    """Inputs of a quantised weight whose products are added up before they are scaled."""
    if weight.scales.shape[-1] == 1 and weight.offsets is None:
        return order.slice_inputs
    return math.gcd(weight.group_size, order.step)


def supports_registers(inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """bfloat16 alone: input times norm weight, unscaled, may leave float16's range."""
    if gluon is None or device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return inputs % 8 == 0 and is_hopper_or_newer(device)
