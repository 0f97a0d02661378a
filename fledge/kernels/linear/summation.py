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
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fledge.kernels.gluon_support import gluon
from fledge.kernels.triton_support import is_hopper_or_newer

CHUNK = 64  # inputs; slices begin at a multiple
NARROW = 3840  # outputs, below which a weight is narrow
LONGEST_SLICE = 8192
REGISTER_INPUTS, GATED_REGISTER_INPUTS = 1536, 1024  # of a narrow weight whose slices fit the registers of `register_mma`


class Summation(NamedTuple):
    slices: int
    scales_sums: bool  # a norm scales the sums, not the inputs
    slice_inputs: int  # of a slice; the last ones may be shorter or empty


def summation(
    inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, *, gated: bool = False, group_size: int = 1
) -> Summation:
    """`outputs`: of the weight, both halves of a gated one. `group_size`: of a quantised weight."""
    is_narrow = outputs < NARROW
    fits = inputs <= (GATED_REGISTER_INPUTS if gated else REGISTER_INPUTS)
    scales_sums = is_narrow and fits and supports_registers(inputs, dtype, device, group_size)
    slices = 4 if is_narrow else min(1 << ((inputs - 1) // LONGEST_SLICE).bit_length(), 4)
    return Summation(slices, scales_sums, -(-inputs // (CHUNK * slices)) * CHUNK)


def supports_registers(inputs: int, dtype: torch.dtype, device: torch.device, group_size: int = 1) -> bool:
    """bfloat16 alone: input times norm weight, unscaled, may leave float16's range. `group_size`: of a quantised weight."""
    if gluon is None or device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return inputs % 8 == 0 and (group_size == 1 or group_size % 32 == 0) and is_hopper_or_newer(device)
