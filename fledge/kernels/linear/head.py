"""The final norm, the head and the choice of a token. For few greedy rows logits never leave the chip."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.linear.dispatch import case_of, choose_kernel, linear, tile_options
from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.tiles import tiled_head
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.rms_norm import rms_norm
from fledge.kernels.sample import PartialArgmax, SamplingState, choose
from fledge.kernels.triton_support import use_triton

FUSED_ROWS = 64  # up to which the best of each block of the vocabulary is chosen where its logits are made


def head_choice(
    x_ND: Tensor,
    norm: NormLike,
    weight_VD: Tensor | QuantizedWeight,
    draws: SamplingState | None = None,
    num_new: int = 1,
    ahead: int = 0,
    ids_V: Tensor | None = None,
) -> PartialArgmax:
    """`x_ND`: before the final norm. The rest is as in `sample.choose`."""
    if not use_triton(x_ND):
        hidden = F.rms_norm(x_ND, norm.weight.shape, norm.weight, norm.eps)
        return choose(linear(hidden, weight_VD), draws, num_new, ahead, ids_V)
    hidden = rms_norm(x_ND, norm.weight, norm.eps)
    if draws is None and len(x_ND) <= FUSED_ROWS:
        case = case_of(hidden, weight_VD)
        if case.order.slices == 1:  # a vocabulary of 3,840 or more
            kernel, config = choose_kernel(case)
            options = tile_options(config) if kernel == "tiles" else {}
            return tiled_head(hidden, weight_VD, case.order, ids_V, **options)
    return choose(linear(hidden, weight_VD), draws, num_new, ahead, ids_V)
