"""The EAGLE drafter: one network for EAGLE 3, 3.1 and combinations of both. The flags are in `DrafterConfig`.

aux_i[t]  the target's residual stream after i layers
g_t = fc(concat_i fc_norm_i(input_norm(aux)_i[t]))         `fuse`, once per target position
step 0 pairs token x_{t+1} with g_t at position t; later steps pair a drafted token with the fed-back state
post = norm(pre);  logits = lm_head(post);  fed back: post if norm_output else pre
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fledge.config import DrafterConfig
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import Attend
from fledge.kernels.draft_inputs import DraftInputs
from fledge.kernels.sample import PartialArgmax
from fledge.models.layers import MLP, Attention, Layer, RMSNorm, Rotary, module_list
from fledge.models.mla import LatentAttention
from fledge.ops.base import Ops
from fledge.ops.torch_ops import PLAIN, AttendOps


class DrafterOutput(NamedTuple):
    hidden_ND: Tensor  # after the final norm: the head's input
    feedback_ND: Tensor  # the state that is fed back to the next draft step


class DrafterLayer(Layer):
    """Layer 0 attends over [embedding ; state] (twice the hidden size); further layers are plain decoder layers."""

    mlp: MLP

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__(layer)
        eps, size = config.rms_norm_eps, config.hidden_size
        self.first = layer == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if self.first else None
        self.self_attn = _attention(config, layer, 2 * size if self.first else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size, bias=config.mlp_bias)


def _attention(config: DrafterConfig, layer: int, input_size: int) -> Attention | LatentAttention:
    if config.mla is not None:
        return LatentAttention(
            layer,
            input_size,
            config.hidden_size,
            config.num_heads,
            config.mla,
            config.rope,
            config.rms_norm_eps,
            window=config.window,
        )
    return Attention(
        layer,
        input_size,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        window=config.window,
    )


class EagleDrafter(nn.Module):
    """The drafter network. If it has no embedding or head of its own, `share` must lend it the target's before use."""

    d2t: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        size, eps, num_taps = config.hidden_size, config.rms_norm_eps, len(config.aux_layer_ids)
        self.input_norm = RMSNorm(num_taps * config.target_hidden_size, eps) if config.norm_before_fc else None
        self.fc_norm = module_list(RMSNorm(config.target_hidden_size, eps) for _ in range(num_taps)) if config.fc_norm else None
        self.fc = nn.Linear(num_taps * config.target_hidden_size, size, bias=False)
        self.layers = module_list(DrafterLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        self.rotary = Rotary(config.rotary_dim, config.max_positions, config.rope)
        # target id = draft id + d2t[draft id]; the identity when the vocabularies are the same
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def share(self, embedding: nn.Module, head: nn.Module) -> EagleDrafter:
        """Lends the target's embedding and head to a drafter that has none, without registering them as submodules.

        Replaces those of another target that were lent before: they may be on another device.
        """
        if not self.config.own_embedding:
            object.__setattr__(self, "embed_tokens", embedding)
        if not self.config.own_head:
            object.__setattr__(self, "lm_head", head)
        return self

    @property
    def rotaries(self) -> list[Rotary]:
        return [self.rotary]

    @property
    def embedding(self) -> nn.Module:
        assert self.embed_tokens is not None, "it has none of its own, and none was lent"
        return self.embed_tokens

    @property
    def head(self) -> nn.Module:
        assert self.lm_head is not None, "it has none of its own, and none was lent"
        return self.lm_head

    def fuse(self, taps: Sequence[Tensor], ops: Ops | None = None) -> Tensor:
        """Computes g: fuses the tapped target states of each position into one of the drafter's size. `ops` None: plain
        PyTorch."""
        ops = ops or PLAIN
        return ops.linear(self.fc, ops.fuse_inputs(taps, self.input_norm, self.fc_norm, self.norm.weight.dtype))

    def forward(
        self,
        tokens_N: Tensor,
        h_ND: Tensor,
        positions_N: Tensor,
        attend: Attend,
        highest_position: int | None = None,
    ) -> DrafterOutput:
        """One draft step in plain PyTorch: tokens (target ids) with the states they are paired with."""
        return self.step(tokens_N, h_ND, None, AttendOps(attend, self.rotary(positions_N, highest_position)))

    def step(self, tokens_N: Tensor, h_ND: Tensor, meta: AttentionMetadata | None, ops: Ops) -> DrafterOutput:
        x, post = ops.draft_step(self, tokens_N, h_ND, meta)
        return DrafterOutput(post, post if self.config.norm_output else x)

    def inputs(self, tokens: Tensor | PartialArgmax, h_ND: Tensor, ops: Ops, **drafting: Any) -> DraftInputs:
        """The first layer's inputs; `drafting`: see `Ops.draft_inputs`."""
        return ops.draft_inputs(self.layers[0], self.embedding, tokens, h_ND, **drafting)

    def run(self, inputs: DraftInputs, meta: AttentionMetadata | None, ops: Ops) -> Tensor:
        """Runs the layers, up to the states before the final norm."""
        return ops.layers(self.layers, inputs.residual_ND, meta, (), inputs.x_N2D, num_pdl_barriers=len(self.layers))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary."""
        return self.head(hidden)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]
