"""Linears whose rows do not depend on how many there are, for `--deterministic`: `tiled` on a GPU, row by row elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fledge.kernels.linear.reference import NormLike
from fledge.kernels.linear.tiled import tiled_linear
from fledge.kernels.quantization import QuantizedLinear
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.swiglu import swiglu_reference
from fledge.kernels.triton_support import use_triton


def fixed_order_linear(
    module: nn.Module,
    x_MK: Tensor,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    **hints: bool,
) -> Tensor:
    """As `ops.base.Ops.linear`. Its hints are of no use here: attention waits for everything before it."""
    x_MK = x_MK.contiguous()
    if not use_triton(x_MK):
        return rows_apart(module, x_MK, norm=norm, gated=gated, residual=residual)
    if norm is not None:
        x_MK = add_rms_norm(x_MK, None, norm.weight, norm.eps)
    weight = module.quantized if isinstance(module, QuantizedLinear) else module.weight
    return tiled_linear(x_MK, weight, module.bias, gated=gated, residual_MO=residual)


def rows_apart(
    module: nn.Module,
    x_MK: Tensor,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    **hints: bool,
) -> Tensor:
    """One product a row, by torch."""
    rows = []
    for index, row in enumerate(x_MK):
        row = row[None].clone()  # where it lies in memory may matter too
        if norm is not None:
            row = nn.functional.rms_norm(row, norm.weight.shape, norm.weight, norm.eps)
        row = module(row)
        if gated:
            row = swiglu_reference(row)
        rows.append(row if residual is None else residual[index] + row)
    return torch.cat(rows)


def fixed_order_norm(x_ND: Tensor, norm: NormLike) -> Tensor:
    if use_triton(x_ND):
        return add_rms_norm(x_ND, None, norm.weight, norm.eps)
    return torch.cat([nn.functional.rms_norm(row[None].clone(), norm.weight.shape, norm.weight, norm.eps) for row in x_ND])
