"""The linear layer for many rows on cuBLAS, where it sums in the order of `summation`.

cuBLAS splits K for some shapes and not for others. So it is used for a shape only after a trial on random inputs gave the bits
of `tiles`; of a weight with several slices it computes one slice after the other, in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.gate import apply_gate
from fledge.kernels.linear.slice_sums import finish
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tiles import tiled_linear

_trials: dict[tuple, bool] = {}


def cublas_is_exact(rows: int, weight_OK: Tensor, order: Summation, bias_O: Tensor | None) -> bool:
    """Whether cuBLAS gives the bits of `tiles` for this shape. Tried once, not while a graph is captured."""
    key = (rows, *weight_OK.shape, order.slices, weight_OK.dtype, weight_OK.device, bias_O is not None)
    if key not in _trials:
        if torch.cuda.is_current_stream_capturing():
            return False
        generator = torch.Generator(weight_OK.device).manual_seed(rows)
        x_MK = torch.randn((rows, weight_OK.shape[1]), generator=generator, device=weight_OK.device).to(weight_OK.dtype)
        wanted = tiled_linear(x_MK, weight_OK, bias_O, order=order)
        _trials[key] = torch.equal(cublas_linear(x_MK, weight_OK, bias_O, order=order), wanted)
    return _trials[key]


def cublas_linear(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    gated: bool = False,
    residual_MO: Tensor | None = None,
) -> Tensor:
    if order.slices > 1:
        parts = zip(x_MK.split(order.slice_inputs, 1), weight_OK.split(order.slice_inputs, 1), strict=True)
        total: Tensor | None = None
        for x, weight in parts:
            if total is None:
                total = torch.mm(x, weight.t(), out_dtype=torch.float32)
            else:
                total = torch.addmm(total, x, weight.t(), out_dtype=torch.float32)
        assert total is not None
        return finish(total[None], x_MK.dtype, bias_O, gated=gated, residual_MO=residual_MO)
    out = F.linear(x_MK, weight_OK, bias_O)
    if gated:
        out = apply_gate(out)
    return out if residual_MO is None else out.add_(residual_MO)
