"""Experts in place of an MLP: Mixtral, Qwen2-MoE, Qwen3-MoE.

p = softmax(router(norm x)); w_1 … w_K are its K highest entries, normalised or not
x + Σ_k w_k expert_k(norm x) [+ sigmoid(g) shared(norm x)]

Shapes: N tokens, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fledge.config import MoEConfig
from fledge.kernels.moe import route
from fledge.kernels.quantization import QuantizedLinear, QuantizedWeight, dequantize, stacked_weights
from fledge.models.layers import MLP, RMSNorm, module_list
from fledge.ops.base import Ops


class SparseMLP(nn.Module):
    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.experts_per_token, self.normalise = config.experts_per_token, config.normalise
        has_shared = config.shared_intermediate_size > 0
        # The router; the shared expert's gate is its last output.
        self.gate = nn.Linear(hidden_size, config.num_experts + has_shared, bias=False)
        self.experts = module_list(MLP(hidden_size, config.intermediate_size) for _ in range(config.num_experts))
        self.shared_expert = MLP(hidden_size, config.shared_intermediate_size) if has_shared else None
        self.stacked: tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight] | None = None

    def forward(self, x_ND: Tensor, ops: Ops, norm: RMSNorm, output_norm: RMSNorm | None = None) -> Tensor:
        """Returns residual stream + weighted experts(norm(residual stream))."""
        assert output_norm is None, "no family has both"
        normed = ops.norm(norm, x_ND)
        logits = ops.linear(self.gate, normed)
        if self.shared_expert is not None:
            shared = ops.linear(self.shared_expert.down_proj, self.shared_expert.gated(normed, ops))
            x_ND = x_ND + torch.sigmoid(logits[:, -1:]) * shared
        scores = logits[:, : len(self.experts)]
        weights_NK, experts_NK = route(scores, self.experts_per_token, normalise=self.normalise)
        return ops.experts(self, normed, weights_NK, experts_NK, x_ND)

    def stack(self, dtype: torch.dtype) -> None:
        """Stacks the experts' weights into one tensor for the GPU's kernels; the linears become views of it."""
        self.stacked = self._stacked("gate_up_proj", dtype), self._stacked("down_proj", dtype)

    def _stacked(self, name: str, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        linears: list[nn.Module] = [getattr(expert, name) for expert in self.experts]
        quantised = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
        if len(quantised) == len(linears) and (whole := stacked_weights(quantised)) is not None:
            for index in range(len(quantised)):
                offsets = None if whole.offsets is None else whole.offsets[index]
                part = replace(whole, codes=whole.codes[index], scales=whole.scales[index], offsets=offsets)
                setattr(self.experts[index], name, QuantizedLinear(part))
            return whole
        # Unquantised weights, if the experts' formats differ (some may have no exact one) or the kernels do not support them.
        weights = [_plain(linear, dtype) for linear in linears]
        plain = torch.stack(weights)
        for index, expert in enumerate(self.experts):
            view = nn.Linear(1, 1, bias=False)
            view.out_features, view.in_features = plain.shape[1:]
            view.weight = nn.Parameter(plain[index], requires_grad=False)
            setattr(expert, name, view)
        return plain


def _plain(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    if isinstance(linear, QuantizedLinear):
        weight = dequantize(linear.quantized, dtype)
        return weight if linear.order is None else torch.empty_like(weight).index_copy_(1, linear.order, weight)
    assert isinstance(linear, nn.Linear)
    return linear.weight.detach()


def stack_experts(network: nn.Module, dtype: torch.dtype) -> None:
    """Stacks the experts of all layers. `dtype`: the activations' dtype."""
    for module in network.modules():
        if isinstance(module, SparseMLP):
            module.stack(dtype)
