"""Multi-head latent attention, as in DeepSeek and Kimi, in its expanded form.

c, k_r = split(W_a x);  [k_n ; v] = W_b norm(c), per head;  q = W_q x, or W_q norm(W_qa x), per head [q_n ; q_r]
score  = (q_n·k_n + rope(q_r)·rope(k_r)) / sqrt(|q|), times YaRN's magnitude squared;  k_r is one for all heads

Other servers cache c and k_r, which saves memory with many heads and long texts. A drafter has only one layer, so here keys and
values are expanded before they are cached: then caches, kernels and the training's unroll need no special case.

Shapes: N tokens, D input size, H heads; a head's query and key are E = nope + rope wide, its value V.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.config import MLAConfig, RopeConfig
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.rope_cache import rotate
from fledge.models.layers import RMSNorm, yarn_magnitude
from fledge.ops.base import Ops


class LatentAttention(nn.Module):
    """Multi-head latent attention. `input_size` differs from the output size in a drafter's first layer only."""

    def __init__(
        self,
        layer: int,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        sizes: MLAConfig,
        rope: RopeConfig,
        eps: float,
        *,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.window = layer, window
        self.num_heads, self.sizes = num_heads, sizes
        self.query_size = sizes.q_lora_rank or num_heads * sizes.qk_head_dim
        # All projections of the input in one: queries (or their latent state), the latent state, the shared rotated key.
        self.qkv_a_proj = nn.Linear(input_size, self.query_size + sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, eps) if sizes.q_lora_rank else None
        self.q_b_proj = nn.Linear(sizes.q_lora_rank, num_heads * sizes.qk_head_dim, bias=False) if sizes.q_lora_rank else None
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * sizes.v_head_dim, hidden_size, bias=False)
        # `Ops.attend` scales by 1/sqrt(E); YaRN's factor is applied to the queries.
        self.query_scale = yarn_magnitude(rope.factor, rope.mscale_all_dim or 0.0) ** 2 if rope.kind == "yarn" else 1.0

    def forward(
        self,
        x_ND: Tensor,
        meta: AttentionMetadata | None,
        ops: Ops,
        norm: RMSNorm | None = None,
        *,
        pdl_barrier: bool = False,
    ) -> Tensor:
        """Returns the input of `o_proj`, [N, H * V]."""
        sizes, heads = self.sizes, (self.num_heads, -1)
        projected = ops.linear(self.qkv_a_proj, x_ND, norm=norm, pdl_barrier=pdl_barrier)
        q, latent, k_rope = projected.split((self.query_size, sizes.kv_lora_rank, sizes.qk_rope_head_dim), -1)
        if self.q_b_proj is not None:
            q = ops.linear(self.q_b_proj, q.contiguous(), norm=self.q_a_layernorm)
        q_nope, q_rope = q.unflatten(-1, heads).split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), -1)
        expanded = ops.linear(self.kv_b_proj, latent.contiguous(), norm=self.kv_a_layernorm).unflatten(-1, heads)
        k_nope, v = expanded.split((sizes.qk_nope_head_dim, sizes.v_head_dim), -1)
        cos, sin = ops.angles(meta, len(x_ND))
        q_rope = rotate(_paired_halves(q_rope), cos, sin)
        k_rope = rotate(_paired_halves(k_rope.unsqueeze(-2)), cos, sin).expand_as(q_rope)
        q = torch.cat([q_nope, q_rope], -1)
        q = q if self.query_scale == 1.0 else q * self.query_scale
        # Values are padded with zeros to the keys' width, and the output is cut again, because caches and kernels expect heads
        # of one width.
        v = F.pad(v, (0, sizes.qk_head_dim - sizes.v_head_dim))
        attended = ops.attend(self, q, torch.cat([k_nope, k_rope], -1), v, meta)
        return attended[..., : sizes.v_head_dim].flatten(-2)


def _paired_halves(x: Tensor) -> Tensor:
    """Reorders a head from DeepSeek's rotated pairs (0, 1), (2, 3), … to pairs half a head apart. Queries and keys are
    reordered in the same way, which does not change their products."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
