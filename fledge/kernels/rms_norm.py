"""Residual add and RMSNorm in one pass: the residual stream is updated in place, its norm returned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.triton_support import jit, let_next_start, next_power_of_2, overlap, tl, use_triton, wait_for_inputs


def add_rms_norm(residual_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """residual += delta (if any); returns norm(residual)."""
    run = add_rms_norm_triton if use_triton(residual_ND) else add_rms_norm_reference
    return run(residual_ND, delta_ND, weight_D, eps)


def add_rms_norm_reference(residual_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    if delta_ND is not None:
        residual_ND += delta_ND
    return F.rms_norm(residual_ND, weight_D.shape, weight_D, eps)


def add_rms_norm_triton(residual_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    num_rows, size = residual_ND.shape
    assert residual_ND.is_contiguous()
    assert delta_ND is None or delta_ND.is_contiguous()
    normed = torch.empty_like(residual_ND)
    if num_rows:
        block = next_power_of_2(size)
        _add_rms_norm[(num_rows,)](
            residual_ND,
            residual_ND if delta_ND is None else delta_ND,
            weight_D,
            normed,
            eps,
            SIZE=size,
            BLOCK=block,
            HAS_DELTA=delta_ND is not None,
            num_warps=min(max(block // 256, 1), 8),
            **overlap(normed),
        )
    return normed


@jit
def _add_rms_norm(
    residual_ptr,
    delta_ptr,
    weight_ptr,
    normed_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(residual_ptr + row * SIZE + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * SIZE + columns, mask=inside, other=0.0)
        # Rounded before it is normed, as the unfused network does.
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * SIZE + columns, x, mask=inside)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(normed_ptr + row * SIZE + columns, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)
