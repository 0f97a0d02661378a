"""The order in which a linear's products are summed: fixed by the weight's shape, never by the number of rows.

The inputs are cut into slices. Within a slice, groups of 16 neighbouring inputs are added one after the other to one fp32 sum;
the sums of the slices are added in order. Every kernel of this folder uses this order, so a row's result has the same bits
alone, in a batch, in a verification and in a prefill. On an H200 the tensor cores' instructions (mma.sync, wgmma, any tile,
also in cuBLAS where it does not split K) give the same bits for the same groups; the order within a group does not matter.

Slices run in parallel. Narrow weights have few outputs to distribute, so they have more slices; so do weights with many inputs:

    outputs      inputs                  slices
    >= 3840      up to 8192              1       enough outputs for every multiprocessor; cuBLAS can serve many rows
    >= 3840      16384, more             2, 4    a slice is at most 8,192 inputs (10 µs of dependent instructions)
    fewer        any                     4

A norm before a linear scales its inputs and rounds them. For narrow weights of up to 1,536 inputs (1,024 if gated) the scale is
applied to the sums instead, so that products do not wait for it. This saves 2 x 0.35 µs per layer.

Quantised weights have other slices. In a program of few rows each slice is one warp, which unpacks codes as well as
multiplying, so more warps are needed to keep the memory busy. And no library has to sum in the same order.

    outputs      inputs         slices
    >= 32000     up to 8192     1       a head: the kernel that computes the logits also chooses the token
    >= 8192      any            4       (and gated weights)
    fewer        below 4096     4
    fewer        4096, more     8

Tensor cores multiply the codes themselves, which bfloat16 represents exactly. Scales are applied to sums: over a whole slice
if all inputs share a scale, else over the inputs that share one, at most 128 or 64 (`inputs_of_a_sum`). Each sum starts at
zero; then total = fma(sum, scale, total), and with offsets total = fma(sum of the inputs, offset, total).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fledge.kernels.gluon_support import gluon
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import is_hopper_or_newer

CHUNK = 64  # inputs; slices start at multiples of it
NARROW = 3840  # outputs, below which a weight is narrow
LONGEST_SLICE = 8192
REGISTER_INPUTS, GATED_REGISTER_INPUTS = 1536, 1024  # of a narrow weight whose slices fit the registers of `register_mma`
HEAD, BROAD, LONG = 32000, 8192, 4096  # outputs of a quantised head; outputs and inputs that decide between 4 and 8 slices


class Summation(NamedTuple):
    slices: int
    scales_sums: bool  # a norm scales the sums, not the inputs
    slice_inputs: int  # inputs per slice; the last slices may be shorter or empty

    @property
    def step(self) -> int:
        """Inputs per step in kernels for quantised weights."""
        return 128 if self.slice_inputs % 128 == 0 else 64


def summation(
    inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False, quantised: bool = False
) -> Summation:
    """Returns the order for a weight. `outputs`: those of the weight, both halves of a gated one."""
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
    """Returns how many inputs of a quantised weight are summed before the sum is scaled."""
    if weight.scales.shape[-1] == 1 and weight.offsets is None:
        return order.slice_inputs
    return math.gcd(weight.group_size, order.step)


def supports_registers(inputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether register kernels can run. Only in bfloat16: input * norm weight, unscaled, may exceed float16's range."""
    if gluon is None or device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return inputs % 8 == 0 and is_hopper_or_newer(device)
