"""Experts of a mixture: which rows go to which, and their products, one expert after the other.

Shapes: N rows, D hidden size, I an expert's inner size, E experts, K experts a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def route(scores_NE: Tensor, num_chosen: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Weight [N, K] in fp32 and number [N, K] of the experts of each row."""
    chosen = scores_NE.float().softmax(-1).topk(num_chosen, -1)
    weights = chosen.values / chosen.values.sum(-1, keepdim=True) if normalise else chosen.values
    # As transformers rounds them.
    return weights.to(scores_NE.dtype).float(), chosen.indices


def experts_reference(
    experts: Sequence[Callable[[Tensor], Tensor]], x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, residual_ND: Tensor
) -> Tensor:
    """residual + Σ_k weight_k expert_k(x), summed in fp32 in the order of the experts' numbers, whatever other rows do."""
    total = torch.zeros(x_ND.shape, dtype=torch.float32, device=x_ND.device)
    for expert in experts_NK.unique().tolist():
        rows, place = torch.where(experts_NK == expert)
        total.index_add_(0, rows, experts[expert](x_ND[rows]).float() * weights_NK[rows, place, None])
    return residual_ND + total.to(x_ND.dtype)
