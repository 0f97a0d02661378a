"""The linear layer for many rows: cuBLAS between elementwise kernels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.linear.reference import NormLike
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.swiglu import swiglu


def cublas_linear(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """For many rows: the product is cuBLAS's, with the residual in its own sum where there is no bias."""
    if norm is not None:
        x_MK = add_rms_norm(x_MK, None, norm.weight, norm.eps)
    if residual_MO is not None and bias_O is None and not gated:
        add = residual_MO.addmm_ if in_place else residual_MO.addmm  # not in place it begins with a copy
        return add(x_MK, weight_OK.t())
    out = F.linear(x_MK, weight_OK, bias_O)
    if gated:
        out = swiglu(out)
    return out if residual_MO is None else residual_MO + out
