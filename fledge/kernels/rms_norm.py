"""RMSNorm of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.triton_support import by_device, jit, let_next_start, next_power_of_2, overlap, tl, wait_for_inputs


def rms_norm_reference(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_ND, weight_D.shape, weight_D, eps)


def rms_norm_triton(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    num_rows, size = x_ND.shape
    assert x_ND.is_contiguous()
    normed = torch.empty_like(x_ND)
    if num_rows:
        block = next_power_of_2(size)
        warps = min(max(block // 256, 1), 8)
        _rms_norm[(num_rows,)](x_ND, weight_D, normed, eps, SIZE=size, BLOCK=block, num_warps=warps, **overlap(normed))
    return normed


rms_norm = by_device(rms_norm_triton, rms_norm_reference)


@jit
def _rms_norm(x_ptr, weight_ptr, normed_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(normed_ptr + row * SIZE + columns, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)
