"""A linear layer with what surrounds it, in plain PyTorch: what every kernel here must equal.

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
    """What kernels read of an RMSNorm: a module of `models.layers`, or a `Norm`."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


class NormModule(NormLike, Protocol):
    """`models.layers.RMSNorm`."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Norm(NamedTuple):
    """An RMSNorm's weight and epsilon alone."""

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
    # Summed in float64 and then rounded, a row does not depend on how many there are either.
    wide_bias = None if bias_O is None else bias_O.double()
    out = F.linear(x_MK.double(), weight_OK.double(), wide_bias).to(x_MK.dtype)
    if gated:
        out = apply_gate_reference(out)
    return out if residual_MO is None else residual_MO + out
