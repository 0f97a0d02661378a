"""The target network for all families of `fledge.families`; their differences are in the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fledge.config import ModelConfig
from fledge.errors import ModelError
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import Attend
from fledge.kernels.attention.paged import causal_attend as causal_attend
from fledge.models.layers import MLP, Attention, ExactNorm, Layer, RMSNorm, Rotary, module_list
from fledge.models.moe import SparseMLP
from fledge.ops.base import Ops
from fledge.ops.torch_ops import AttendOps

# The number of layers, from the first, whose attention starts only after everything before it is complete (a PDL barrier).
# One is enough: what attention reads early (settled keys, sequence lengths) is complete before the first. Benchmarks change it.
PDL_BARRIER_LAYERS = 1


class DecoderOutput(NamedTuple):
    hidden_ND: Tensor  # after the final norm: the head's input
    taps: Sequence[Tensor]  # one [N, D] per tapped layer, in the requested order


class DecoderLayer(Layer):
    self_attn: Attention

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(layer)
        eps, size, window = config.rms_norm_eps, config.hidden_size, config.windows[layer] if config.windows else None
        norm = ExactNorm if config.unit_norms else RMSNorm
        self.input_layernorm = norm(size, eps)
        self.self_attn = Attention(
            layer,
            size,
            size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            window=window,
            rope=config.rope_of(layer),
            norm=norm,
        )
        self.attention_output_norm = norm(size, eps) if config.sandwich_norms else None
        self.post_attention_layernorm = norm(size, eps)
        self.mlp: MLP | SparseMLP
        if config.moe is not None and config.has_experts(layer):
            self.mlp = SparseMLP(size, config.moe)
        else:
            self.mlp = MLP(size, config.intermediate_size, bias=config.mlp_bias, activation=config.activation)
        self.mlp_output_norm = norm(size, eps) if config.sandwich_norms else None


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = module_list(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = (ExactNorm if config.unit_norms else RMSNorm)(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.set_rotary()

    def set_rotary(self, max_positions: int | None = None, device: torch.device | str | None = None) -> None:
        """Makes the rotary embeddings, for texts up to `max_positions` tokens (None: the model's own limit)."""
        config = self.config
        longest = max_positions or config.max_positions
        self.rotaries = module_list(Rotary(config.head_dim, longest, rope, config.rotated).to(device) for rope in config.ropes)

    @property
    def rotary(self) -> Rotary:
        return self.rotaries[0]

    def reserve(self, num_positions: int) -> None:
        """See `Rotary.reserve`."""
        for rotary in self.rotaries:
            rotary.reserve(num_positions)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations: packed CPU weights are fp16, while everything between them is fp32."""
        return self.norm.dtype

    def forward(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        taps: Sequence[int] = (),
        highest_position: int | None = None,
    ) -> DecoderOutput:
        """Runs the network in plain PyTorch, with the caller's own attention.

        `taps`: layer counts i; tap i is the residual stream after i layers (0: the embeddings).
        """
        ops = AttendOps(attend, *(rotary(positions_N, highest_position) for rotary in self.rotaries))
        x, aux = self.run(self.embed(tokens_N), None, ops, taps)
        return DecoderOutput(ops.norm(self.norm, x), aux)

    def run(
        self, x_ND: Tensor, meta: AttentionMetadata | None, ops: Ops, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Runs the layers: from embeddings (which may be overwritten) to the states before the final norm, and the taps."""
        return ops.layers(self.layers, x_ND, meta, taps, num_pdl_barriers=PDL_BARRIER_LAYERS)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.scaled(self.embed_tokens(tokens).to(self.dtype))

    def scaled(self, x_ND: Tensor) -> Tensor:
        """Scales embeddings for the first layer, if the model has an embedding scale."""
        scale = self.config.embedding_scale
        # The scale itself is rounded to the network's dtype, as in Gemma's training.
        return x_ND if scale is None else x_ND * torch.tensor(scale).to(x_ND.dtype).item()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def check_taps(self, taps: Sequence[int]) -> None:
        bad = [i for i in taps if not 0 <= i <= len(self.layers)]
        if bad:
            raise ModelError(f"the target has {len(self.layers)} layers; it cannot be tapped after layer(s) {bad}")
