"""The reference of all linear kernels: a linear layer with norm, bias, gate and residual in plain PyTorch.

    out = [residual +] [swiglu] ( [norm] x · weightᵀ + bias )

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.gate import apply_gate_reference
from fledge.kernels.quantization import QuantizedWeight, dequantize


class NormLike(Protocol):
    """The attributes of an RMSNorm that kernels read: those of a module of `models.layers`, or of a `Norm`."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


class NormModule(NormLike, Protocol):
    """An RMSNorm that can be called: `models.layers.RMSNorm`."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Norm(NamedTuple):
    """The weight and epsilon of an RMSNorm, without a module."""

    weight: Tensor
    eps: float


def linear_reference(
    x_MK: Tensor,
    weight_OK: Tensor | QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
) -> Tensor:
    if isinstance(weight_OK, QuantizedWeight):
        weight_OK = dequantize(weight_OK, x_MK.dtype)
    if norm is not None:
        x_MK = F.rms_norm(x_MK, norm.weight.shape, norm.weight, norm.eps)
    # Sums are in float64 and then rounded, so here too a row's result does not depend on the number of rows.
    wide_bias = None if bias_O is None else bias_O.double()
    out = F.linear(x_MK.double(), weight_OK.double(), wide_bias).to(x_MK.dtype)
    if gated:
        out = apply_gate_reference(out)
    return out if residual_MO is None else residual_MO + out
