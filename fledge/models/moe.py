"""Experts in place of an MLP: Mixtral, Qwen2-MoE, Qwen3-MoE.

p = softmax(router(norm x)), the highest K of it w_1 … w_K, normalised or not
x + Σ_k w_k expert_k(norm x) [+ sigmoid(g) shared(norm x)]

Shapes: N tokens, D hidden size, E experts, K experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fledge.config import MoEConfig
from fledge.kernels.moe import route
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
        self.stacked: tuple[Tensor, Tensor] | None = None

    def forward(self, x_ND: Tensor, ops: Ops, norm: RMSNorm, output_norm: RMSNorm | None = None) -> Tensor:
        """The residual stream with the experts of its norm added."""
        assert output_norm is None, "no family has both"
        normed = ops.norm(norm, x_ND)
        logits = ops.linear(self.gate, normed)
        if self.shared_expert is not None:
            shared = ops.linear(self.shared_expert.down_proj, self.shared_expert.gated(normed, ops))
            x_ND = x_ND + torch.sigmoid(logits[:, -1:]) * shared
        scores = logits[:, : len(self.experts)]
        weights_NK, experts_NK = route(scores, self.experts_per_token, normalise=self.normalise)
        return ops.experts(self, normed, weights_NK, experts_NK, x_ND)

    def stack(self) -> None:
        """Lays the experts' plain weights side by side, as the GPU's kernels read them; the linears become views."""
        gate_up, down = (
            torch.stack([getattr(expert, name).weight.detach() for expert in self.experts])
            for name in ("gate_up_proj", "down_proj")
        )
        for index, expert in enumerate(self.experts):
            expert.gate_up_proj.weight = nn.Parameter(gate_up[index], requires_grad=False)
            expert.down_proj.weight = nn.Parameter(down[index], requires_grad=False)
        self.stacked = (gate_up, down)


def stack_experts(network: nn.Module) -> None:
    """Of all layers of plain weights; quantised experts are read one by one."""
    for module in network.modules():
        if isinstance(module, SparseMLP) and all(isinstance(expert.down_proj, nn.Linear) for expert in module.experts):
            module.stack()
